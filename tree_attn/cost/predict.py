"""What the paper predicts, and what physics allows: memory, communication and time of one decoding step.

Symbols, as in section 6 of Tree Attention:

    b    batch size                          p    number of devices
    t    keys per device, N / p              d    hidden size, d_h * n_h (head dim times query heads)
    n_h  query heads

The paper counts elements and has as many key heads as query heads. `d_kv = d_h * n_kv` is the width of one key under
grouped queries (GQA); it defaults to d, which gives the paper's formulas back. Only terms that hold keys and values
shrink with it: queries, outputs and softmax states keep n_h heads.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from tree_attn.cost.machine import KINDS, Machine

# Bytes per second that one device reads from its own memory: a plain copy's rate, measured (not the datasheet's; the
# longest runs of the lean kernel exceed it by 8 %), by a part of `jax.Device.device_kind`.
MEMORY_BYTES_PER_S = {"H200": 4.3e12}
# Floating-point operations per second of large bfloat16 matrix products of random numbers, measured.
PRODUCT_FLOPS_PER_S = {"H200": 790e12}
# Bytes per second that one device sends to one neighbour, measured with a `ppermute` of 256 MB.
LINK_BYTES_PER_S = {"H200": 215e9}

STATE_BYTES = 4  # softmax states travel as float32, whatever the dtype of K and V
STRATEGIES = ("tree", "ring_overlapped", "ring_public")
AXIS_REDUCTIONS = ("allreduce", "gather", "fused")  # over one axis, or over all axes at once
Reduction = str | tuple[str, ...]


def ring_memory_elements(*, b: int, t: int, d: int, d_kv: int | None = None) -> int:
    """Equation 8, peak memory of Ring Attention per device in elements: `4 b t d + 2 b d` (GQA: `4 b t d_kv + 2 b d`).

    Two shards of keys and values (the one in use and the one arriving), a query and an output.

    Example:
        >>> ring_memory_elements(b=1, t=1024, d=2048)
        8392704
    """
    _check_positive(b=b, t=t, d=d, d_kv=d_kv)
    return 4 * b * t * (d if d_kv is None else d_kv) + 2 * b * d


def tree_memory_elements(*, b: int, t: int, d: int, n_h: int, d_kv: int | None = None) -> int:
    """Equation 9, peak memory of Tree Attention per device in elements: `2 b t d + 2 b d + 2 b n_h`.

    One shard of keys and values, a query, a numerator, and a denominator and a maximum per head (GQA: `2 b t d_kv`).
    """
    _check_positive(b=b, t=t, d=d, n_h=n_h, d_kv=d_kv)
    return 2 * b * t * (d if d_kv is None else d_kv) + 2 * b * d + 2 * b * n_h


def ring_volume_elements(*, b: int, t: int, d: int, p: int, d_kv: int | None = None) -> int:
    """Equation 10, elements that Ring Attention communicates: `2 b t d p` (GQA: `2 b t d_kv p`).

    Each of p hops moves a shard of keys and values, `2 b t d`, so this is what one device sends in a whole pass (and,
    equally, what all p devices send in one hop). A ring that leaves out the last hop, which only brings every shard
    home, sends `(p - 1) / p` of it.
    """
    _check_positive(b=b, t=t, d=d, p=p, d_kv=d_kv)
    return 2 * b * t * (d if d_kv is None else d_kv) * p


def allreduce_volume_elements(numel: float, *, p: int) -> float:
    """Equation 12, elements each device sends in an all-reduce of `numel` elements: `2 (p - 1) / p * numel`."""
    _check_positive(p=p)
    if numel < 0:
        raise ValueError(f"numel must be at least 0, got {numel}")
    return 2 * (p - 1) / p * numel


def tree_volume_elements(*, b: int, d: int, n_h: int, p: int) -> float:
    """Equation 14, elements each device sends in Tree Attention: `2 (p - 1) / p * (b d + 2 b n_h)`.

    Equation 12 of numerator, denominator and maximum; the number of keys does not occur in it. d and n_h are those of
    the query, so GQA changes nothing.

    Example:
        >>> tree_volume_elements(b=1, d=2048, n_h=16, p=8)
        3640.0
    """
    _check_positive(b=b, d=d, n_h=n_h, p=p)
    return allreduce_volume_elements(b * d + 2 * b * n_h, p=p)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeStep:
    """The shape of one decoding step over keys sharded on p devices; validates itself.

    Attributes:
        batch, num_keys: b, and N, the keys of each sequence over all devices.
        num_heads, num_kv_heads: query heads n_h and key heads; the first a multiple of the second.
        head_dim: d_h, of queries, keys and values.
        dtype: of queries, keys and values, for example "bfloat16".
        n_devices: p.
        num_queries: T query tokens per sequence; the paper's formulas have 1.
    """

    batch: int
    num_keys: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    n_devices: int
    num_queries: int = 1

    def __post_init__(self):
        sizes = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "dtype"}
        _check_positive(**sizes)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got num_heads={self.num_heads} and "
                f"num_kv_heads={self.num_kv_heads}"
            )
        itemsize(self.dtype)

    @property
    def hidden_size(self) -> int:
        """d, of the queries."""
        return self.num_heads * self.head_dim

    @property
    def keys_per_device(self) -> int:
        """t, rounded up: the devices that hold most."""
        return -(-self.num_keys // self.n_devices)

    @property
    def key_value_bytes_per_device(self) -> int:
        """`2 b t d_kv` in bytes: keys and values that one device holds, and reads once in a step."""
        return 2 * self.batch * self.keys_per_device * self.num_kv_heads * self.head_dim * itemsize(self.dtype)

    @property
    def state_bytes(self) -> int:
        """`b d + 2 b n_h` in float32: numerator, denominator and maximum of all queries (equation 13)."""
        return self.batch * self.num_queries * self.num_heads * (self.head_dim + 2) * STATE_BYTES

    @property
    def packed_state_bytes(self) -> int:
        """`b d + b n_h` in float32: outputs and lse of all queries, as one gather carries them."""
        return self.batch * self.num_queries * self.num_heads * (self.head_dim + 1) * STATE_BYTES


def peak_memory_bytes(step: DecodeStep, strategy: str) -> int:
    """Predicted peak memory of one device: equation 9 for "tree", equation 8 for either ring, in bytes.

    Every element is counted in the dtype of K and V, as the paper does; the float32 states would add `O(b d)` bytes,
    nothing beside `b t d`. With T queries, the terms without t are multiplied by T.

    Raises:
        ValueError: `strategy` is not one of `STRATEGIES`.
    """
    _check_strategy(strategy)
    b, t, n_h, d = step.batch, step.keys_per_device, step.num_heads, step.hidden_size
    per_key = 2 * b * t * step.num_kv_heads * step.head_dim
    per_query = 2 * b * d * step.num_queries
    tree = per_key + per_query + 2 * b * n_h * step.num_queries
    ring = 2 * per_key + per_query
    return (tree if strategy == "tree" else ring) * itemsize(step.dtype)


def program_memory_bytes(step: DecodeStep, strategy: str) -> int:
    """Predicted peak memory of one device as our programs have it, where `peak_memory_bytes` has the paper's equations.

    They differ for rings, which hold three times the keys and values: the shard in use, the one arriving, and the
    device's own, which the next token needs (`docs/peak_memory.md`). An overlapped ring of two has no third, and one
    device only its own.
    """
    public = 3 if step.n_devices > 1 else 1
    held = {"tree": 1, "ring_overlapped": min(step.n_devices, 3), "ring_public": public}
    _check_strategy(strategy)
    extra = (held[strategy] - (1 if strategy == "tree" else 2)) * step.key_value_bytes_per_device
    return peak_memory_bytes(step, strategy) + extra


def bytes_sent_per_device(
    step: DecodeStep, strategy: str, reduction: Reduction | None = None, *, axis_sizes: Sequence[int] | None = None
) -> float:
    """Predicts the bytes each device sends in a step, by the ring model of each collective (`tree_attn.measure.hlo`).

        tree, "allreduce"      equation 14 in float32:  2 (p - 1) / p * (b d + 2 b n_h) * 4
        tree, "gather"         (p - 1) * (b d + b n_h) * 4:  one packed `[out, lse]` from everyone
        tree, "fused"          2 (p - 1) * (b d + b n_h) * 4:  the same, each 4 bytes with 4 of the step's number
        tree, a tuple          one of the former for each of `axis_sizes` (p_1, p_2, ...), summed
        tree, "hierarchical"   a tuple of gathers
        ring_overlapped        (p - 1) / p of equation 10, in the dtype of K and V
        ring_public            equation 10, in the dtype of K and V; of one device, which XLA spares it, nothing

    Raises:
        ValueError: an unknown strategy or reduction, or `axis_sizes` whose product is not `n_devices`.
    """
    _check_strategy(strategy)
    if strategy == "ring_overlapped":
        return float((step.n_devices - 1) * step.key_value_bytes_per_device)
    if strategy == "ring_public":
        return float(step.n_devices * step.key_value_bytes_per_device) if step.n_devices > 1 else 0.0
    return sum(level_bytes_sent_per_device(step, reduction, axis_sizes=axis_sizes))


def level_bytes_sent_per_device(
    step: DecodeStep, reduction: Reduction, *, axis_sizes: Sequence[int] | None = None
) -> tuple[float, ...]:
    """As `bytes_sent_per_device` of tree attention, for each exchange: one, or one per axis if hierarchical."""
    exchanges = _exchanges(reduction, (step.n_devices,) if axis_sizes is None else axis_sizes)
    if math.prod(size for _, size, _ in exchanges) != step.n_devices or (
        reduction not in AXIS_REDUCTIONS and not axis_sizes
    ):
        raise ValueError(
            f"axis_sizes must be the axes' sizes, with product n_devices={step.n_devices}, got {axis_sizes}"
        )
    payload = lambda kind: step.state_bytes if kind == "allreduce" else step.packed_state_bytes
    return tuple(KINDS[kind].sent(size) * payload(kind) for kind, size, _ in exchanges)


def reduction_us(
    reduction: Reduction, *, elements: int, axis_sizes: Sequence[int], machine: Machine
) -> tuple[float, ...]:
    """Predicted time of each exchange of a reduction: one over all axes, or one per axis if hierarchical.

    Beside these a step with any of NCCL's collectives pays `machine.collective_us` once.

    Args:
        elements: of one packed state, `B T N (H + 1)`, in float32.
        axis_sizes: of the mesh axes, fastest links first; devices are counted along the first axis first.

    Raises:
        ValueError: no such reduction.
        NotImplementedError: it cannot run over these links, or nobody knows what it costs there.

    Example:
        >>> reduction_us(("fused", "gather"), elements=2064, axis_sizes=(8, 16), machine=machine.load("NVIDIA H200"))
    """
    _check_positive(elements=elements, **{f"axis_sizes[{i}]": size for i, size in enumerate(axis_sizes)})
    return tuple(
        machine.exchange_us(kind, elements * STATE_BYTES, size, stride)
        for kind, size, stride in _exchanges(reduction, axis_sizes)
    )


def needs_collective(reduction: Reduction, axis_sizes: Sequence[int]) -> bool:
    """Whether any exchange of a reduction is one of NCCL's."""
    return any(KINDS[kind].is_collective and size > 1 for kind, size, _ in _exchanges(reduction, axis_sizes))


def candidates(num_axes: int) -> list[Reduction]:
    """Every reduction over so many axes: one exchange over all of them, or one per axis.

    Example:
        >>> candidates(1)
        ['allreduce', 'gather', 'fused']
    """
    return [*AXIS_REDUCTIONS, *(itertools.product(AXIS_REDUCTIONS, repeat=num_axes) if num_axes > 1 else ())]


def cheapest_reduction(
    candidates: Sequence[Reduction], *, elements: int, axis_sizes: Sequence[int], machine: Machine
) -> Reduction:
    """The candidate that is predicted to take the least time; of equals the first. Touches no device.

    Args:
        candidates: reductions that can run; those that `machine` knows no cost of are passed over.
        elements, axis_sizes: see `reduction_us`.

    Raises:
        ValueError: no candidate, or an unknown one.
        NotImplementedError: `machine` knows the cost of none.

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
        times.append((sum(exchanges) + machine.collective_us * needs_collective(candidate, axis_sizes), candidate))
    if not times:
        raise NotImplementedError("; ".join(reasons))
    return min(times, key=lambda timed: timed[0])[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """Where the time of one step goes, in microseconds, and what it sends and holds on each device, in bytes.

    Attributes:
        local_us: attention to all the keys that a device meets, and everything else beside the following.
        collective_us: what NCCL's first collective costs beside itself.
        exchanges_us: each exchange of a reduction; for a ring, what its transfers add to the attention.
        bytes_sent: by each exchange; for a ring, by all of its hops.
        memory_bytes: as `program_memory_bytes`.
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


def predict(
    step: DecodeStep,
    strategy: str,
    reduction: Reduction | None = None,
    *,
    machine: Machine,
    axis_sizes: Sequence[int] | None = None,
) -> Prediction:
    """Predicted time of one step. With `local = 2 b t d_kv / read rate + machine.local_us`, of one shard:

        tree              local + collective_us + the exchanges of the reduction (`reduction_us`)
        ring_overlapped   local + (p - 1) max(transfer, local):  a hop ends when both are done
        ring_public       p (transfer + local + copy):  its loop copies each arrival into the carry, read and written

    One device has no links, and nothing to copy: all strategies then take `local`.
    A transfer moves K and then V to a neighbour, and the slowest link bounds it for all.

    Args:
        axis_sizes: as for `reduction_us`; default: one axis of all devices.

    Raises:
        ValueError: as `bytes_sent_per_device`.
        NotImplementedError: as `reduction_us`.

    Source: Tree Attention, section 6 (complexity in 5.2, links in 5.3).
    """
    _check_strategy(strategy)
    p, shard_bytes = step.n_devices, step.key_value_bytes_per_device
    sizes = (p,) if axis_sizes is None else tuple(axis_sizes)
    read_us = shard_bytes / machine.read_bytes_per_s * 1e6
    local_us, memory_bytes = read_us + machine.local_us, program_memory_bytes(step, strategy)
    if strategy == "tree":
        bytes_sent = level_bytes_sent_per_device(step, reduction, axis_sizes=sizes)
        return Prediction(
            local_us=local_us,
            collective_us=machine.collective_us * needs_collective(reduction, sizes),
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


def read_limit_us(step: DecodeStep, device_kind: str) -> float | None:
    """The least time a step can take: every device reads its keys and values once, `2 b t d_kv / bandwidth`.

    Args:
        device_kind: `jax.Device.device_kind`; None is returned for a kind whose read rate nobody measured.

    Example:
        >>> step = DecodeStep(batch=1, num_keys=640_000, num_heads=16, num_kv_heads=16, head_dim=128,
        ...                   dtype="bfloat16", n_devices=8)
        >>> round(read_limit_us(step, "NVIDIA H200"))
        152
    """
    return memory_limit_us(step.key_value_bytes_per_device, device_kind)


def memory_limit_us(num_bytes: float, device_kind: str) -> float | None:
    """The least time to read `num_bytes` from a device's own memory; None for a kind nobody measured."""
    return _time_us(num_bytes, _lookup(MEMORY_BYTES_PER_S, device_kind))


def products_limit_us(num_flops: float, device_kind: str) -> float | None:
    """The least time for that many operations of bfloat16 matrix products; None for a kind nobody measured."""
    return _time_us(num_flops, _lookup(PRODUCT_FLOPS_PER_S, device_kind))


def link_limit_us(num_bytes: float, device_kind: str) -> float | None:
    """The least time to send `num_bytes` to one neighbour; None for a kind whose link rate nobody measured."""
    return _time_us(num_bytes, _lookup(LINK_BYTES_PER_S, device_kind))


def itemsize(dtype: str) -> int:
    """Bytes of one element of a floating dtype: 2 for "bfloat16".

    Raises:
        ValueError: `dtype` does not name a floating dtype.
    """
    if dtype == "bfloat16":  # numpy learns this name only from ml_dtypes
        return 2
    try:
        parsed = np.dtype(dtype)
    except TypeError:
        parsed = None
    if parsed is None or parsed.kind != "f":
        raise ValueError(f"dtype must be a floating dtype such as 'bfloat16' or 'float32', got {dtype!r}")
    return parsed.itemsize


def _time_us(num_bytes: float, bytes_per_s: float | None) -> float | None:
    return None if bytes_per_s is None else num_bytes / bytes_per_s * 1e6


def _lookup(table: dict[str, float], device_kind: str) -> float | None:
    return next((rate for kind, rate in table.items() if kind.lower() in device_kind.lower()), None)


def _check_positive(**sizes) -> None:
    for name, size in sizes.items():
        if size is None and name == "d_kv":
            continue
        if not isinstance(size, int | np.integer) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {size!r}")


def _exchanges(reduction: Reduction, axis_sizes: Sequence[int]) -> list[tuple[str, int, int]]:
    """The exchanges of a reduction in order: kind, how many devices meet, and how far apart they are counted."""
    if reduction in AXIS_REDUCTIONS:
        return [(reduction, math.prod(axis_sizes), 1)]
    kinds = ("gather",) * len(axis_sizes) if reduction == "hierarchical" else reduction
    if (
        not isinstance(kinds, tuple)
        or len(kinds) != len(axis_sizes)
        or not all(kind in AXIS_REDUCTIONS for kind in kinds)
    ):
        raise ValueError(
            f"reduction must be one of {', '.join(map(repr, AXIS_REDUCTIONS))}, 'hierarchical', or a tuple of the "
            f"first three for each of {len(axis_sizes)} axes, got {reduction!r}"
        )
    return [(kind, size, math.prod(axis_sizes[:i])) for i, (kind, size) in enumerate(zip(kinds, axis_sizes))]


def _check_strategy(strategy: str) -> None:
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(map(repr, STRATEGIES))}, got {strategy!r}")
