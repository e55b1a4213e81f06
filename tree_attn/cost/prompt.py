"""Predictions for attention within a prompt that is sharded, by strategy: memory, bytes sent and time."""

from collections.abc import Sequence
from dataclasses import replace

from tree_attn.arguments import check_exchanged_heads
from tree_attn.cost import datasheets
from tree_attn.cost.machine import Machine
from tree_attn.cost.predict import Prediction
from tree_attn.cost.rotation import Pass, predict_rotations
from tree_attn.cost.step import STATE_BYTES, DecodeStep, itemsize

BACKWARD = 2.5  # products of the backward pass over those of the forward pass: five matrix products, and two

# "ulysses_ring": heads are exchanged over the first mesh axis, and a ring runs over the second.
# Placements are striped, but for "ring_zigzag".
STRATEGIES = ("ring", "ring_joint", "ring_two_way", "ring_zigzag", "ulysses", "ulysses_ring")
ROTATION_OF = {name: "one_way" for name in STRATEGIES} | {"ring_joint": "joint", "ring_two_way": "two_way"}


def check_runs(step: DecodeStep, strategy: str, axis_sizes: Sequence[int]) -> None:
    """Raises NotImplementedError, with the reason, where a strategy cannot run on these devices.

    Raises:
      ValueError: `strategy` is not one of `STRATEGIES`.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(map(repr, STRATEGIES))}, got {strategy!r}")
    if strategy == "ring_two_way" and step.num_kv_heads == 1:
        raise NotImplementedError("half of the KV heads go each way round, and there is only 1")
    if strategy == "ring_zigzag" and step.num_keys % (2 * step.n_devices):
        raise NotImplementedError(f"it needs a multiple of {2 * step.n_devices} tokens, two runs for each device")
    if strategy == "ulysses_ring" and len(axis_sizes) != 2:
        raise NotImplementedError(f"it needs two mesh axes of at least two devices each, got {tuple(axis_sizes)}")
    if strategy.startswith("ulysses"):
        try:
            check_exchanged_heads(step.num_heads, step.num_kv_heads, _parts(step, strategy, axis_sizes)[0])
        except ValueError as error:
            raise NotImplementedError(str(error)) from error


def exchange_bytes_sent(
    step: DecodeStep, strategy: str, axis_sizes: Sequence[int], *, has_gradient: bool = False
) -> tuple[float, ...]:
    """Predicts the bytes that each device sends in one forward pass: by the exchange of heads, and by the ring.

        a ring               (p - 1) kv, whichever way
        ulysses              (u - 1) / u (2 q + c kv),   u = p
        ulysses_ring         the same over the first axis of u devices, and (r - 1) c kv over the second of r

    q are the bytes of a device's queries, and kv those of its keys and values. c = max(1, u / K) are the copies of each
    KV head. With `has_gradient` a backward pass follows. It exchanges heads once more. A ring sends K and V once more,
    and their derivatives in float32 by r hops: the last one takes them home. XLA may send K and V once for both passes.

    Raises:
      NotImplementedError, ValueError: as `check_runs`.
    """
    check_runs(step, strategy, axis_sizes)
    num_parts, num_shards, copies = _parts(step, strategy, axis_sizes)
    key_value_bytes = copies * step.key_value_bytes_per_device
    exchanged = (num_parts - 1) / num_parts * (2 * _query_bytes(step) + key_value_bytes) * (2 if has_gradient else 1)
    passed_on = (num_shards - 1) * float(key_value_bytes)
    if has_gradient:
        passed_on = 2 * passed_on + num_shards * _derivative_bytes(step, key_value_bytes)
    return (exchanged,) * (num_parts > 1) + (passed_on,) * (num_shards > 1)


def memory_bytes(step: DecodeStep, strategy: str, axis_sizes: Sequence[int], *, has_gradient: bool = False) -> int:
    """Predicts the bytes of one device's arrays: arguments, result, running sums in float32, and what arrives.

    A ring holds up to three shards of keys and values, and one more where they travel as one array. An exchange of
    heads holds each array before and after it. With `has_gradient` there are the cotangent and the derivatives too, of
    K and V in float32 as many as shards arrive. What a kernel takes for itself is not counted.
    """
    forward = _forward_memory_bytes(step, strategy, axis_sizes)
    if not has_gradient:
        return forward
    num_parts, num_shards, copies = _parts(step, strategy, axis_sizes)
    derivatives = _query_bytes(step) + step.key_value_bytes_per_device
    travelling = min(num_shards, 3) * copies * step.key_value_bytes_per_device * STATE_BYTES // itemsize(step.dtype)
    exchanged = 2 if num_parts > 1 else 1
    return forward + exchanged * (_query_bytes(step) + derivatives) + travelling


def _forward_memory_bytes(step: DecodeStep, strategy: str, axis_sizes: Sequence[int]) -> int:
    num_parts, num_shards, copies = _parts(step, strategy, axis_sizes)
    query_bytes, key_value_bytes = _query_bytes(step), step.key_value_bytes_per_device
    sums = query_bytes // itemsize(step.dtype) * STATE_BYTES
    if num_parts == 1:
        num_held = min(num_shards, 3) + (strategy == "ring_joint" and num_shards > 1)
        return 2 * query_bytes + sums + num_held * key_value_bytes
    return 4 * query_bytes + sums + (1 + copies * min(num_shards, 3)) * key_value_bytes


def predict_prompt(
    step: DecodeStep, strategy: str, *, machine: Machine, axis_sizes: Sequence[int], has_gradient: bool = False
) -> Prediction:
    """Predicts the least time of causal attention within a prompt of `step.num_keys` tokens.

    With `local = 2 b n_h d_h N^2 / p / product rate`, the products of one device at its datasheet's rate:

        ring, ring_zigzag   local + (p - 1) max(transfer - local / p, 0):  a hop ends when both are done
        ring_joint, ring_two_way   a pass of that rotation (`tree_attn.cost.rotation`)
        ulysses        local + the exchanges of query, key, value and result, each as a transfer of its bytes
        ulysses_ring   both: the exchanges over the first axis, and the hops over the second

    The placement is balanced. Transfers of K and V follow each other. A backward pass has `BACKWARD` times the
    products. It exchanges heads as the forward pass does. A hop of its ring sends derivatives beside K and V, which go
    home in the end.

    Args:
      step: the shape; `num_keys` are the tokens of the prompt.
      axis_sizes: of the mesh axes, fastest links first.
      has_gradient: the forward and the backward pass, instead of the forward pass alone.

    Raises:
      NotImplementedError: as `check_runs`; there is no datasheet of the device.

    Source: DeepSpeed-Ulysses (Jacobs et al. 2023), section 3.2; Ring Attention (Liu et al. 2023), section 3;
    FlashAttention-2 (Dao 2023), section 3.1.2, for the backward pass.
    """
    bytes_sent = exchange_bytes_sent(step, strategy, axis_sizes, has_gradient=has_gradient)
    num_parts, num_shards, copies = _parts(step, strategy, axis_sizes)
    forward_us = products_us(step, machine)
    exchanges_us, passes = (), 2 if has_gradient else 1
    if num_parts > 1:
        array_bytes = (_query_bytes(step),) * 2 + (copies * step.key_value_bytes_per_device / 2,) * 2
        sent = ((num_parts - 1) / num_parts * one for one in array_bytes)
        exchanges_us += (passes * sum(machine.exchange_us("neighbour", one, num_parts) for one in sent),)
    if num_shards > 1:
        ring = ring_pass(step, axis_sizes, strategy, attention_us=forward_us / num_shards)
        rings, rotation, home_us = [ring], ROTATION_OF[strategy], 0.0
        if has_gradient:
            derivative_bytes = _derivative_bytes(step, ring.key_value_bytes)
            sent_bytes = ring.key_value_bytes + derivative_bytes
            rings.append(replace(ring, key_value_bytes=sent_bytes, attention_us=BACKWARD * ring.attention_us))
            home_us = machine.exchange_us("neighbour", derivative_bytes, num_shards, num_parts)
        added = sum(predict_rotations(one, machine, (rotation,))[rotation] for one in rings)
        exchanges_us += (added + home_us,)
    local_us = forward_us * (1 + BACKWARD) if has_gradient else forward_us
    return Prediction(
        local_us=local_us + passes * machine.local_us,
        collective_us=0.0,
        exchanges_us=exchanges_us,
        bytes_sent=bytes_sent,
        memory_bytes=memory_bytes(step, strategy, axis_sizes, has_gradient=has_gradient),
    )


def products_us(step: DecodeStep, machine: Machine) -> float:
    """Predicts the least microseconds of one device's products, `2 b n_h d_h N^2 / p` of them.

    Raises:
      NotImplementedError: there is no datasheet of the device.
    """
    try:
        flops_per_s = datasheets.rates(machine.device_kind)["product_flops_per_s"]
    except KeyError as error:
        raise NotImplementedError(f"the rate of products of a {machine.device_kind} is unknown") from error
    return 2 * step.batch * step.num_heads * step.head_dim * step.num_keys**2 / step.n_devices / flops_per_s * 1e6


def ring_pass(step: DecodeStep, axis_sizes: Sequence[int], strategy: str = "ring", *, attention_us: float) -> Pass:
    """Returns the pass of a strategy's ring; `attention_us` is that of one hop."""
    num_parts, num_shards, copies = _parts(step, strategy, axis_sizes)
    return Pass(
        num_shards=num_shards, key_value_bytes=copies * step.key_value_bytes_per_device, attention_us=attention_us,
        stride=num_parts,
    )  # fmt: skip


def _parts(step: DecodeStep, strategy: str, axis_sizes: Sequence[int]) -> tuple[int, int, int]:
    """Returns the devices that exchange heads, those of a ring, and the copies of each KV head."""
    if not strategy.startswith("ulysses"):
        return 1, step.n_devices, 1
    num_parts = axis_sizes[0] if strategy == "ulysses_ring" else step.n_devices
    return num_parts, step.n_devices // num_parts, max(1, num_parts // step.num_kv_heads)


def _derivative_bytes(step: DecodeStep, key_value_bytes: float) -> float:
    """Returns the bytes of the derivatives of as many keys and values, in float32."""
    return key_value_bytes * STATE_BYTES / itemsize(step.dtype)


def _query_bytes(step: DecodeStep) -> int:
    return step.batch * step.keys_per_device * step.hidden_size * itemsize(step.dtype)
