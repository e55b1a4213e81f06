"""Predictions for one decoding step, by strategy: memory, bytes sent and time, and the cheapest reduction."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

from tree_attn.cost import equations
from tree_attn.cost.equations import check_positive
from tree_attn.cost.machine import EXCHANGES, Machine
from tree_attn.cost.rotation import Pass
from tree_attn.cost.step import STATE_BYTES, DecodeStep, itemsize

STRATEGIES = ("tree", "ring_overlapped", "ring_public")
AXIS_REDUCTIONS = ("allreduce", "gather", "fused")  # over one axis, or over all axes at once
Reduction = str | tuple[str, ...]


def peak_memory_bytes(step: DecodeStep, strategy: str) -> int:
    """Predicts the peak memory of one device in bytes: equation 9 for "tree", equation 8 for either ring.

    Every element is counted in the dtype of K and V, as in the paper. The float32 states would add `O(b d)` bytes,
    nothing beside `b t d`.

    Raises:
      ValueError: `strategy` is not one of `STRATEGIES`.
    """
    _check_strategy(strategy)
    b, t, d, d_kv = step.batch, step.keys_per_device, step.hidden_size, step.key_size
    if strategy == "tree":
        elements = equations.tree_memory_elements(
            b=b, t=t, d=d, n_h=step.num_heads, d_kv=d_kv, num_queries=step.num_queries
        )
    else:
        elements = equations.ring_memory_elements(b=b, t=t, d=d, d_kv=d_kv, num_queries=step.num_queries)
    return elements * itemsize(step.dtype)


def program_memory_bytes(step: DecodeStep, strategy: str) -> int:
    """Predicts the peak memory of one device for our programs, in bytes; `peak_memory_bytes` has the paper's.

    They differ for rings, which hold three shards of keys and values: the one in use, the one arriving, and the
    device's own, which the next token needs (`docs/peak_memory.md`). An overlapped ring of two has no third, and one
    device has its own only.

    Raises:
      ValueError: `strategy` is not one of `STRATEGIES`.
    """
    _check_strategy(strategy)
    public = 3 if step.n_devices > 1 else 1
    num_shards = {"tree": 1, "ring_overlapped": min(step.n_devices, 3), "ring_public": public}
    extra_shards = num_shards[strategy] - (1 if strategy == "tree" else 2)
    return peak_memory_bytes(step, strategy) + extra_shards * step.key_value_bytes_per_device


def bytes_sent_per_device(
    step: DecodeStep, strategy: str, reduction: Reduction | None = None, *, axis_sizes: Sequence[int] | None = None
) -> float:
    """Predicts the bytes each device sends in a step, by the ring model of each collective (`tree_attn.measure.hlo`).

        tree, "allreduce"      equation 14 in float32:  2 (p - 1) / p * (b d + 2 b n_h) * 4
        tree, "gather"         (p - 1) * (b d + b n_h) * 4:  one packed `[out, lse]` from every device
        tree, "fused"          2 (p - 1) * (b d + b n_h) * 4:  the same, each 4 bytes with 4 of the step's number
        tree, a tuple          one of these three for each of `axis_sizes` (p_1, p_2, ...), summed
        tree, "hierarchical"   a tuple of gathers
        ring_overlapped        (p - 1) / p of equation 10, in the dtype of K and V
        ring_public            equation 10, in the dtype of K and V; XLA removes the transfers of one device

    Raises:
      ValueError: an unknown strategy or reduction, or `axis_sizes` whose product is not `n_devices`.
    """
    _check_strategy(strategy)
    if strategy != "tree":
        b, t, d, p = step.batch, step.keys_per_device, step.hidden_size, step.n_devices
        ring_bytes = equations.ring_volume_elements(b=b, t=t, d=d, p=p, d_kv=step.key_size) * itemsize(step.dtype)
        hops = p - 1 if strategy == "ring_overlapped" or p == 1 else p
        return float(ring_bytes // p * hops)
    return sum(exchange_bytes_sent_per_device(step, reduction, axis_sizes=axis_sizes))


def exchange_bytes_sent_per_device(
    step: DecodeStep, reduction: Reduction, *, axis_sizes: Sequence[int] | None = None
) -> tuple[float, ...]:
    """Predicts the bytes each device sends in tree attention by each exchange: one, or one per axis if hierarchical.

    Raises:
      ValueError: an unknown reduction, or `axis_sizes` whose product is not `n_devices`.
    """
    exchanges = _exchanges(reduction, (step.n_devices,) if axis_sizes is None else axis_sizes)
    if math.prod(size for _, size, _ in exchanges) != step.n_devices or (
        reduction not in AXIS_REDUCTIONS and not axis_sizes
    ):
        raise ValueError(
            f"axis_sizes must be the axes' sizes, with product n_devices={step.n_devices}, got {axis_sizes}"
        )
    b, d, n_h = step.batch * step.num_queries, step.hidden_size, step.num_heads
    return tuple(
        equations.tree_volume_elements(b=b, d=d, n_h=n_h, p=size) * STATE_BYTES
        if name == "allreduce"
        else EXCHANGES[name].payloads_sent(size) * step.packed_state_bytes
        for name, size, _ in exchanges
    )


def reduction_us(
    reduction: Reduction, *, elements: int, axis_sizes: Sequence[int], machine: Machine
) -> tuple[float, ...]:
    """Predicts the microseconds of each exchange of a reduction: one over all axes, or one per axis if hierarchical.

    Beside these each exchange by NCCL's collectives takes `machine.collective_us` (`num_collectives`).

    Args:
      reduction: one of `AXIS_REDUCTIONS`, "hierarchical", or a tuple of `AXIS_REDUCTIONS`, one per axis.
      elements: of one packed state, `B T N (H + 1)`, in float32.
      axis_sizes: of the mesh axes, fastest links first; devices are counted along the first axis first.
      machine: its measured costs.

    Raises:
      ValueError: no such reduction.
      NotImplementedError: it cannot run over these links, or its cost there is unknown.

    Example:
      >>> reduction_us(("fused", "gather"), elements=2064, axis_sizes=(8, 16), machine=machine.load("NVIDIA H200"))
    """
    check_positive(elements=elements, **{f"axis_sizes[{i}]": size for i, size in enumerate(axis_sizes)})
    return tuple(
        machine.exchange_us(name, elements * STATE_BYTES, size, stride)
        for name, size, stride in _exchanges(reduction, axis_sizes)
    )


def num_collectives(reduction: Reduction, axis_sizes: Sequence[int]) -> int:
    """Returns how many exchanges of a reduction are by NCCL's collectives: at most one for each axis."""
    return sum(EXCHANGES[name].is_collective and size > 1 for name, size, _ in _exchanges(reduction, axis_sizes))


def candidates(num_axes: int) -> list[Reduction]:
    """Returns every reduction over `num_axes` axes: one exchange over all of them, or one per axis.

    Example:
      >>> candidates(1)
      ['allreduce', 'gather', 'fused']
    """
    return [*AXIS_REDUCTIONS, *(itertools.product(AXIS_REDUCTIONS, repeat=num_axes) if num_axes > 1 else ())]


def cheapest_reduction(
    candidates: Sequence[Reduction], *, elements: int, axis_sizes: Sequence[int], machine: Machine
) -> Reduction:
    """Returns the candidate with the least predicted time; of equals the first. Touches no device.

    Args:
      candidates: reductions that can run; those without a cost in `machine` are passed over.
      elements, axis_sizes, machine: see `reduction_us`.

    Raises:
      ValueError: no candidate, or an unknown one.
      NotImplementedError: `machine` has the cost of none.

    Example:
      >>> cheapest_reduction(["gather", "fused"], elements=2064, axis_sizes=(4,), machine=machine.load("NVIDIA H200"))
      'fused'
    """
    if not candidates:
        raise ValueError("candidates must name at least one reduction")
    times, reasons = [], []
    for candidate in candidates:
        try:
            exchanges = reduction_us(candidate, elements=elements, axis_sizes=axis_sizes, machine=machine)
        except NotImplementedError as error:
            reasons.append(str(error))
            continue
        times.append((sum(exchanges) + machine.collective_us * num_collectives(candidate, axis_sizes), candidate))
    if not times:
        raise NotImplementedError("; ".join(reasons))
    return min(times, key=lambda timed: timed[0])[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """Parts of the predicted time of one step in microseconds, and bytes sent and held by each device.

    Attributes:
      local_us: attention to all the keys that a device meets, and everything that no other field has.
      collective_us: time that exchanges by NCCL's collectives add to their own: packing, merging, waiting for peers.
      exchanges_us: each exchange of a reduction; for a ring, the time that its transfers add to the attention.
      bytes_sent: by each exchange; for a ring, by all of its hops.
      memory_bytes: see `program_memory_bytes`.
    """

    local_us: float
    collective_us: float
    exchanges_us: tuple[float, ...]
    bytes_sent: tuple[float, ...]
    memory_bytes: int

    @property
    def latency_us(self) -> float:
        """The whole step."""
        return self.local_us + self.collective_us + sum(self.exchanges_us)


def predict_step(
    step: DecodeStep,
    strategy: str,
    reduction: Reduction | None = None,
    *,
    machine: Machine,
    axis_sizes: Sequence[int] | None = None,
) -> Prediction:
    """Predicts the time of one step. With `local = 2 b t d_kv / read rate + machine.local_us`, of one shard:

        tree              local + the exchanges of the reduction (`reduction_us`), + collective_us for each by NCCL
        ring_overlapped   local + (p - 1) max(transfer, local):  a hop ends when both are done
        ring_public       p (transfer + local + copy):  its loop copies each arrival into the carry, read and written

    One device has no links and nothing to copy: all strategies then take `local`. A transfer moves K and then V to a
    neighbour, and the slowest link bounds it for all.

    Args:
      step: the shape of the step.
      strategy: one of `STRATEGIES`.
      reduction: for "tree", see `reduction_us`; None for rings.
      machine: its measured costs.
      axis_sizes: see `reduction_us`; default: one axis of all devices.

    Raises:
      ValueError: see `bytes_sent_per_device`.
      NotImplementedError: see `reduction_us`.

    Source: Tree Attention, section 6 (complexity in 5.2, links in 5.3).
    """
    _check_strategy(strategy)
    p, shard_bytes = step.n_devices, step.key_value_bytes_per_device
    sizes = (p,) if axis_sizes is None else tuple(axis_sizes)
    read_us = shard_bytes / machine.read_bytes_per_s * 1e6
    local_us, memory_bytes = read_us + machine.local_us, program_memory_bytes(step, strategy)
    if strategy == "tree":
        bytes_sent = exchange_bytes_sent_per_device(step, reduction, axis_sizes=sizes)
        return Prediction(
            local_us=local_us,
            collective_us=machine.collective_us * num_collectives(reduction, sizes),
            exchanges_us=reduction_us(
                reduction, elements=step.packed_state_bytes // STATE_BYTES, axis_sizes=sizes, machine=machine
            ),
            bytes_sent=bytes_sent,
            memory_bytes=memory_bytes,
        )
    transfer_us = 2 * machine.exchange_us("neighbour", shard_bytes / 2, p)
    if strategy == "ring_overlapped":
        added_us = (p - 1) * max(transfer_us - local_us, 0.0)
    else:
        added_us = p * (transfer_us + 2 * read_us) if p > 1 else 0.0
    return Prediction(
        local_us=p * local_us,
        collective_us=0.0,
        exchanges_us=(added_us,),
        bytes_sent=(bytes_sent_per_device(step, strategy),),
        memory_bytes=memory_bytes,
    )


def ring_pass(step: DecodeStep, machine: Machine) -> Pass:
    """Returns the pass of a ring over the shards of one step."""
    num_bytes = step.key_value_bytes_per_device
    attention_us = num_bytes / machine.read_bytes_per_s * 1e6 + machine.local_us
    return Pass(num_shards=step.n_devices, key_value_bytes=num_bytes, attention_us=attention_us)


def _exchanges(reduction: Reduction, axis_sizes: Sequence[int]) -> list[tuple[str, int, int]]:
    """Returns the exchanges of a reduction in order: name, number of devices that meet, and their stride."""
    if reduction in AXIS_REDUCTIONS:
        return [(reduction, math.prod(axis_sizes), 1)]
    names = ("gather",) * len(axis_sizes) if reduction == "hierarchical" else reduction
    is_known = isinstance(names, tuple) and all(name in AXIS_REDUCTIONS for name in names)
    if not is_known or len(names) != len(axis_sizes):
        raise ValueError(
            f"reduction must be one of {', '.join(map(repr, AXIS_REDUCTIONS))}, 'hierarchical', or a tuple of the "
            f"first three for each of {len(axis_sizes)} axes, got {reduction!r}"
        )
    return [(name, size, math.prod(axis_sizes[:i])) for i, (name, size) in enumerate(zip(names, axis_sizes))]


def _check_strategy(strategy: str) -> None:
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(map(repr, STRATEGIES))}, got {strategy!r}")
