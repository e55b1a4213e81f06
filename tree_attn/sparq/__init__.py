"""SparQ Attention: of a long cache, read a few components of every key, then a few keys and values whole.

In the algebra it is two states: the exact attention over the kept keys, and one state for all the rest, whose value is
the mean of the values and whose weight is what the approximate scores give it:

    kept = attend(q, K[i2], V[i2]),    rest = (out: mean(V), lse: kept.lse + log((1 - alpha) / alpha)),
    out  = merge(kept, rest) = alpha kept.out + (1 - alpha) mean(V).

So it composes with sequence shards as everything else does.

Source: SparQ Attention, Algorithm 1, section 4 and appendix B.
"""

import dataclasses
import functools
import logging
import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from tree_attn.arguments import AttentionOptions, check_arrays, check_integer, default_scale, one_of
from tree_attn.kernels import sparq_attend as sparq_attend_kernel
from tree_attn.kernels import sparq_select as sparq_kernel
from tree_attn.kernels import sparq_shape as sparq_layout
from tree_attn.kernels.registers import LOG2_E
from tree_attn.kernels.tuning import num_sms
from tree_attn.local import attend, mosaic_gpu
from tree_attn.masking import Visibility, visibility
from tree_attn.mesh import AxisName, axis_tuple
from tree_attn.placement import Shard
from tree_attn.reduce import check_reduction, reduce_state
from tree_attn.sharded import check_call, check_one_device, local_shard, over_shards, pad_keys
from tree_attn.state import SoftmaxState, empty_like, merge_state

_log = logging.getLogger("tree_attn")
INTERPRETED = False  # in tests: kernels in words that Mosaic GPU's interpreter knows
SELECTIONS = ("global", "per_shard")
SCORE_TEMPERATURES = ("coverage", "head_dim", "num_components")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparqOptions:
    """What SparQ keeps, as one argument, for what calls `sparq_decode`, where the fields have their meanings.

    Raises:
      ValueError: a field that is none of what `sparq_decode` takes; the message names it.

    Example:
      >>> attention = by_name("sparq", sharding, sparq=SparqOptions(num_components=32, num_keys=128))
    """

    num_components: int
    num_keys: int
    local_window: int = 0
    reallocate: bool | None = None
    selection: str = "global"
    score_temperature: str = "coverage"

    def __post_init__(self) -> None:
        one_of("score_temperature", self.score_temperature, SCORE_TEMPERATURES)
        one_of("selection", self.selection, SELECTIONS)
        one_of("reallocate", self.reallocate, (None, True, False))
        check_integer("num_components", self.num_components, least=1)
        check_integer("num_keys", self.num_keys, least=1)
        check_integer("local_window", self.local_window, least=0, most=self.num_keys)

    def check_head_dim(self, head_dim: int) -> None:
        """Raises ValueError if `num_components` is more than the components that there are."""
        check_integer("num_components", self.num_components, least=1, most=head_dim)


def sparq_decode(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    *,
    num_components: int,
    num_keys: int,
    local_window: int = 0,
    value_mean: Float[Array, "B K Hv"] | None = None,
    reallocate: bool | None = None,
    key_by_component: Float[Array, "B K H S"] | None = None,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    implementation: str | None = None,
    axis_name: AxisName | None = None,
    mesh: Mesh | None = None,
    block_size: int | None = None,
    selection: str = "global",
    score_temperature: str = "coverage",
    reduction: str | tuple[str, ...] | None = None,
    return_lse: bool = False,
) -> Float[Array, "B T N Hv"] | tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Approximate attention that reads `S r + 2 k H` elements of K and V per KV head instead of `2 S H`.

    For each query, with r = num_components, k = num_keys, l = local_window, sums over the G heads of a group:
      i1    = argtopk(sum_g |q|, r)
      s_hat = softmax(q[i1] K[:, i1]^T / tau),    tau = sqrt(H ||q[i1]||_1 / ||q||_1)
      i2    = argtopk(sum_g s_hat + m, k),        m = infinity at the last l positions, else 0
      alpha = sum s_hat[i2]
      out   = alpha attend(q, K[i2], V[i2]) + (1 - alpha) mean(V)
    With r = H and k >= S it is exact.

    Sharded over p devices, `selection` says which keys are kept:
      "global"     the k best of all, as on one device. Beside the reduction of the result, three small all-gathers, one
                   after another: `B T N` (the denominators of s_hat), `2 B T K min(k, S / p)` (each shard's best scores
                   and where they are), `B T N` (alpha), in elements of 4 bytes that each device sends.
      "per_shard"  each shard's own ceil(k / p) best, with an alpha of its own: no collective but the reduction. Where
                   what matters is on few shards, it reads keys that do not matter.

    Args:
      query: `[B, T, N, H]`; key: `[B, S, K, H]`; value: `[B, S, K, Hv]`, one dtype. T queries choose keys separately.
      num_components: r, of H. num_keys: k, more than there are means all.
      local_window: l, positions before and at the query's own that are always kept; at most num_keys.
      value_mean: float32 `[B, K, Hv]`, the mean over each sequence's valid values, as `KVCache.value_mean` keeps it;
        None: worked out here by reading V whole, for each of T causal queries over the values it may see.
      reallocate: whether to give what is not kept its weight; False leaves out the mean. Default: only where G is 1,
        for the paper found grouped models to be better without (section 4).
      key_by_component: `[B, K, H, S]`, the keys once more, so that a component is contiguous; sharded on S. None: they
        are taken from `key`, where reading a component touches whole rows.
      key_value_seq_lengths, is_causal, scale: as in `tree_attn.local.attend`.
      implementation: as there. With None and "mosaic_gpu" both gathers are kernels on a Hopper GPU, where all are
        bfloat16 or float16, G up to 8, `key_by_component` is given, S (of a shard) is a multiple of 512 and r of 4.
        They have no gradient. The logger `tree_attn` says at DEBUG why they are not used.
      axis_name, mesh, block_size, reduction: as in `tree_attn.tree_decode`; axis_name None: all on one device.
      selection: "global" or "per_shard".
      score_temperature: tau: "coverage", as above, or for ablations (Figure 7b) "head_dim", sqrt(H), or
        "num_components", sqrt(r). Without groups and reallocation nothing depends on it.
    Returns:
      As `tree_attn.tree_decode`; `lse` is that of kept and rest together.
    Raises:
      ValueError, TypeError: an argument does not fit; the message names it.
      NotImplementedError: as in `tree_attn.tree_decode`.

    Example:
      >>> out = sparq_decode(query, key, value, num_components=32, num_keys=128, local_window=32)

    Source: SparQ Attention, Algorithm 1 (T = G = 1), section 4 (groups), equation 11.
    """
    sparq = SparqOptions(
        num_components=num_components, num_keys=num_keys, local_window=local_window, reallocate=reallocate,
        selection=selection, score_temperature=score_temperature,
    )  # fmt: skip
    check_arrays(query, key, value)
    how = _How(sparq=sparq, axes=() if axis_name is None else axis_tuple(axis_name), mesh=mesh)
    how = how.checked(query, key, value, value_mean, key_by_component, block_size, reduction)
    options = AttentionOptions(
        key_value_seq_lengths=key_value_seq_lengths, is_causal=is_causal, scale=scale, implementation=implementation
    )
    check_call(query, key, value, options, axes=how.axes, block_size=block_size)
    key, value, options = pad_keys(key, value, options, axes=how.axes, mesh=mesh, block_size=block_size)

    def body(query, key, value, options: AttentionOptions, key_by_component, value_mean) -> SoftmaxState:
        shard = local_shard(how.axes, block_size)
        return _sparq(query, key, value, options, shard, key_by_component, value_mean, how=how)

    along_sequence = P(None, how.axes)
    operands = query, key, value, options, key_by_component, value_mean
    specs = P(), along_sequence, along_sequence, P(), P(None, None, None, how.axes), P()
    state = over_shards(body, operands, specs, axes=how.axes, mesh=mesh)
    return (state.out, state.lse) if return_lse else state.out


@dataclasses.dataclass(frozen=True, kw_only=True)
class _How:
    """The static part of a call."""

    sparq: SparqOptions
    axes: tuple[str, ...]
    mesh: Mesh | None
    reduction: str | tuple[str, ...] | None = None

    def checked(self, query, key, value, value_mean, key_by_component, block_size, reduction) -> "_How":
        """Returns it complete; raises ValueError where something does not fit. (`check_call` checks the options.)"""
        head_dim = key.shape[-1]
        self.sparq.check_head_dim(head_dim)
        if not self.axes:
            check_one_device(mesh=self.mesh, block_size=block_size, reduction=reduction)
        batch, num_keys, num_kv_heads = key.shape[:3]
        if value_mean is not None and jnp.shape(value_mean) != (batch, num_kv_heads, value.shape[-1]):
            expected = (batch, num_kv_heads, value.shape[-1])
            raise ValueError(f"value_mean must have shape [B, K, Hv] = {expected}, got {jnp.shape(value_mean)}")
        if key_by_component is not None:
            expected = (batch, num_kv_heads, head_dim, num_keys)
            if key_by_component.shape != expected or key_by_component.dtype != key.dtype:
                raise ValueError(
                    f"key_by_component must hold key as [B, K, H, S] = {expected} in {key.dtype}, got "
                    f"{key_by_component.shape} in {key_by_component.dtype}"
                )
            shards = 1 if self.mesh is None else math.prod(self.mesh.shape.get(axis, 1) for axis in self.axes)
            if num_keys % shards:
                raise ValueError(f"key_by_component must hold keys that {shards} devices divide, got {num_keys}")
        reallocate = query.shape[2] == num_kv_heads if self.sparq.reallocate is None else self.sparq.reallocate
        sparq = dataclasses.replace(self.sparq, reallocate=reallocate)
        return dataclasses.replace(
            self, sparq=sparq, reduction=check_reduction(reduction, self.axes) if self.axes else None
        )


def _sparq(
    query, key, value, options: AttentionOptions, shard: Shard, key_by_component, value_mean, *, how: _How
) -> SoftmaxState:
    batch, num_queries, num_heads, head_dim = query.shape
    num_slots, num_kv_heads = key.shape[1:3]
    if num_slots == 0:
        shape = (batch, num_queries, num_heads)
        return empty_like(SoftmaxState(jnp.zeros((*shape, value.shape[-1]), query.dtype), jnp.zeros(shape)))
    view = visibility(options, batch=batch, num_queries=num_queries, num_slots=num_slots, shard=shard)
    grouped = query.reshape(batch, num_queries, num_kv_heads, -1, head_dim)
    is_global = how.sparq.selection == "global" and shard.num_shards > 1
    most = how.sparq.num_keys if is_global else -(-how.sparq.num_keys // shard.num_shards)
    why_not = _why_no_kernel(query, key, value, key_by_component, how.sparq, most, options)
    _log.debug("kernels of SparQ's gathers: %s", why_not or "used")
    if why_not is None:
        shape = _kernel_shape(grouped, key, how.sparq, most, options, is_global)
        choice = _choose_by_kernel(grouped, key_by_component, view, options, shard, how, most, shape)
        state = _attend_by_kernel(grouped, key, value, choice, shape)
    else:
        choice = _choose(grouped, key, key_by_component, view, options, shard, how, most, is_global)
        state = _attend_rows(grouped, key, value, choice.slots, choice.counts, options)
    if is_global:
        state = reduce_state(state, how.axes, how.reduction, how.mesh)
    if how.sparq.reallocate:
        mean = _value_mean(value, view.mask(), how.axes) if value_mean is None else value_mean[:, None]
        state = merge_state(state, _rest(state, choice.total, choice.kept, mean))
    if how.axes and not is_global:
        state = reduce_state(state, how.axes, how.reduction, how.mesh)
    return state


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Choice:
    """Which of this shard's keys each query keeps: the first `counts [B, T, K]` of `slots [B, T, K, k]`.

    total, kept: `[B, T, K, G]`, log-sum-exp of the approximate logits of all keys, and of those kept; over all shards
      where they choose together. The latter may be None where nothing is reallocated.
    """

    slots: Int[Array, "B T K k"]
    counts: Int[Array, "B T K"]
    total: Float[Array, "B T K G"]
    kept: Float[Array, "B T K G"] | None


def _choose(
    grouped, key, key_by_component, view: Visibility, options, shard: Shard, how: _How, most: int, is_global: bool
) -> _Choice:
    """Step 1 and the choice, in XLA."""
    batch, num_queries, _, _, head_dim = grouped.shape
    visible = view.mask()[:, :, None, :]  # [B or 1, T or 1, 1, S]
    scale = default_scale(options.scale, head_dim)
    components, weights = _components(grouped, how.sparq, scale)
    logits = _approximate_logits(components, weights, key, key_by_component)  # [B, T, K, G, S]
    logits = jnp.where(visible[:, :, :, None], logits, -jnp.inf)
    total = _over_shards(jax.nn.logsumexp(logits, axis=-1), how, is_global)
    scores = jax.nn.logsumexp(logits - jnp.where(jnp.isneginf(total), 0.0, total)[..., None], axis=3)  # [B, T, K, S]
    is_recent = _ends(options, batch, num_queries, view.num_slots, shard) - how.sparq.local_window
    is_recent = shard.positions(view.num_slots)[None, None, None, :] >= is_recent[:, :, None, None]
    scores = jnp.where(is_recent & visible, jnp.inf, scores)
    return _best(scores, None, logits, total, view.num_slots, shard, how, most, is_global)


def _best(scores, slots, logits, total, num_slots: int, shard: Shard, how: _How, most: int, is_global) -> _Choice:
    """The best of candidates: `scores [B, T, K, n]`, their `slots` (None: in order) and `logits [B, T, K, G, n]`."""
    scores, places = jax.lax.top_k(scores, min(most, scores.shape[-1]))  # [B, T, K, k]; of equals the earliest
    slots = places if slots is None else jnp.take_along_axis(slots, places, axis=-1)
    is_kept = scores > -jnp.inf
    if is_global:
        is_kept &= _is_among_best(scores, shard.positions(num_slots)[slots], how.sparq.num_keys, how.axes)
    lse = None
    if how.sparq.reallocate:  # else nobody asks
        kept = jnp.take_along_axis(logits, places[:, :, :, None, :], axis=-1)
        kept = jnp.where(is_kept[:, :, :, None, :], kept, -jnp.inf)
        lse = _over_shards(jax.nn.logsumexp(kept, axis=-1), how, is_global)
    # What is kept are the first of the k, for they come in the order in which all devices rank them.
    return _Choice(slots=slots, counts=is_kept.sum(axis=-1, dtype=jnp.int32), total=total, kept=lse)


def _why_no_kernel(query, key, value, key_by_component, sparq: SparqOptions, most: int, options) -> str | None:
    """Returns what the two gathers as kernels need and this call lacks, or None where they run."""
    if options.implementation not in (None, "mosaic_gpu"):
        return f"implementation 'mosaic_gpu', not {options.implementation!r}"
    if sparq.local_window > most:
        return f"a local_window of at most the {most} keys that a shard keeps, not {sparq.local_window}"
    return mosaic_gpu.unavailable() or sparq_layout.unsupported(query, key, value, key_by_component, sparq)


def _kernel_shape(grouped, key, sparq: SparqOptions, most: int, options, is_global) -> sparq_layout.SparqShape:
    batch, num_queries, num_kv_heads, group, head_dim = grouped.shape
    return sparq_layout.SparqShape(
        batch=batch,
        num_queries=num_queries,
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        num_slots=key.shape[1],
        num_components=sparq.num_components,
        num_keys=min(most, key.shape[1]),
        scale=default_scale(options.scale, head_dim),
        dtype=grouped.dtype,
        num_sms=num_sms(),
        is_shard=is_global,
        reallocate=sparq.reallocate,
    )


def _choose_by_kernel(
    grouped, key_by_component, view: Visibility, options, shard: Shard, how: _How, most: int, shape
) -> _Choice:
    """Step 1 and the choice in one kernel; where a choice is cut into chunks, or over shards, their best compete.

    Of a group all logits must be known before any key is chosen, so what is cut passes through memory.
    """
    heads = grouped.shape[:3]
    for_heads = lambda x: jnp.broadcast_to(x, heads)
    by_choice = lambda x: x.reshape(shape.choices, -1)
    launched = dict(shape=shape, interpret=INTERPRETED)
    components, weights = sparq_kernel.choose_components(
        grouped.reshape(shape.choices, shape.group, -1), share=_share(how.sparq, shape.head_dim), **launched
    )
    end = for_heads(view.slot_ranges()[1][:, :, None])
    counts = jnp.minimum(end, shape.num_keys)
    first_recent = _ends(options, *heads[:2], view.num_slots, shard) - how.sparq.local_window
    recent = jnp.clip(first_recent, 0, view.num_slots * shard.num_shards)
    recent = for_heads(shard.local_lengths(recent, view.num_slots)[:, :, None])
    streamed = key_by_component, components, weights, _ends_of_rows(end, recent, shape.num_chunks, shape.chunk)
    if shape.group == 1 or shape.is_final:
        slots, scores, lse = sparq_kernel.select_keys(*streamed, **launched)  # the order of logits is that of scores
        lse = lse.reshape(*heads, shape.num_chunks, -1)
        total, kept = lse[..., : shape.group], lse[..., shape.group :]  # the latter empty for groups: nobody asks
        if shape.is_final:
            slots = slots.reshape(*heads, -1)
            return _Choice(slots=slots, counts=counts, total=total[:, :, :, 0], kept=kept[:, :, :, 0])
    else:
        logits, total = sparq_kernel.approximate_logits(*streamed, **launched)
        total = total.reshape(*heads, shape.num_chunks, shape.group)
    total = _over_shards(jax.nn.logsumexp(total, axis=3), how, shape.is_shard)  # [B, T, K, G]
    if shape.group > 1:
        ends = _ends_of_rows(end, recent, shape.num_lists, sparq_layout.CHUNK)
        finite = by_choice(jnp.where(jnp.isneginf(total), 0.0, total))
        slots, scores = sparq_kernel.select_by_share(logits, finite, ends, **launched)

    def logits_at(slots):
        """`[B, T, K, G, n]` of `slots [B, T, K, n]`, if anybody asks."""
        if not how.sparq.reallocate:
            return None
        of_all = logits.reshape(*heads, shape.group, -1)
        return jnp.take_along_axis(of_all, slots[:, :, :, None], axis=-1) / LOG2_E

    def chosen(slots, kept=None):
        slots = slots.reshape(*heads, -1)
        if shape.group > 1 and how.sparq.reallocate:
            is_kept = jnp.arange(shape.num_keys)[None, None, None, None, :] < counts[..., None, None]
            kept = jax.nn.logsumexp(jnp.where(is_kept, logits_at(slots), -jnp.inf), axis=-1)
        return _Choice(slots=slots, counts=counts, total=total, kept=kept)

    if shape.num_lists == 1 and not shape.is_shard:
        return chosen(slots)
    candidates = (*heads, shape.num_lists, shape.num_keys)
    is_there = jnp.arange(shape.num_keys)[None, None, None, None, :]
    is_there = is_there < _within(end, shape.num_lists, sparq_layout.CHUNK)[..., None]
    flat = lambda x, missing: jnp.where(is_there, x.reshape(candidates), missing).reshape(*heads, -1)
    slots, scores = flat(slots, 0), flat(scores, -jnp.inf)
    if not shape.is_shard and slots.shape[-1] <= sparq_layout.CHUNK:
        slots, kept = sparq_kernel.best_of(by_choice(slots), by_choice(scores), recent.reshape(-1), **launched)
        return chosen(slots, kept.reshape(*heads, 1))
    # Of equal scores the earliest are wanted, and the lists are in no order.
    order = jnp.argsort(slots, axis=-1)
    slots, scores = (jnp.take_along_axis(x, order, axis=-1) for x in (slots, scores))
    of_candidates = scores[:, :, :, None] if shape.group == 1 else logits_at(slots)
    scores = jnp.where((slots >= recent[..., None]) & (scores > -jnp.inf), jnp.inf, scores)
    return _best(scores, slots, of_candidates, total, view.num_slots, shard, how, most, shape.is_shard)


def _within(slot, num_rows: int, width: int):
    """`slot [B, T, K]` as seen from rows of `width` slots each, `[B, T, K, rows]`."""
    starts = width * jnp.arange(num_rows, dtype=jnp.int32)[None, None, None, :]
    return jnp.clip(slot[..., None] - starts, 0, width)


def _ends_of_rows(end, recent, num_rows: int, width: int):
    """What the kernels are told of each row."""
    ends = [_within(end, num_rows, width), _within(recent, num_rows, width)]
    return jnp.stack([*ends, *[jnp.zeros_like(ends[0])] * 2], axis=-1).reshape(-1, 4)


def _attend_by_kernel(grouped, key, value, choice: _Choice, shape) -> SoftmaxState:
    """Step 2 in one kernel."""
    out, lse = sparq_attend_kernel.attend_kept(
        grouped.reshape(shape.choices, shape.group, -1),
        key,
        value,
        choice.slots.reshape(shape.choices, -1),
        choice.counts.reshape(-1),
        shape=shape,
        interpret=INTERPRETED,
    )
    batch, num_queries = grouped.shape[:2]
    return SoftmaxState(out.reshape(batch, num_queries, -1, shape.head_dim), lse.reshape(batch, num_queries, -1))


def _components(grouped, sparq: SparqOptions, scale: float):
    """What is read of keys: the r components in which the queries of a group are largest, `[B, T, K, r]`, and what
    they are multiplied by, `[B, T, K, G, r]`: the query, the scale and the temperature."""
    size = jnp.abs(grouped.astype(jnp.float32))
    components = jax.lax.top_k(size.sum(axis=3), sparq.num_components)[1]
    kept = jnp.take_along_axis(grouped, components[:, :, :, None, :], axis=-1).astype(jnp.float32)
    whole, part = size.sum(axis=-1), jnp.abs(kept).sum(axis=-1)
    share = _share(sparq, grouped.shape[-1])
    if share is None:
        # A query may have nothing where its group has most; its logits are then 0, whatever the temperature.
        coverage = jnp.where(part > 0, part / jnp.where(part > 0, whole, 1.0), 1.0)
    else:
        coverage = jnp.full_like(whole, share)
    return components, kept * (scale * jax.lax.rsqrt(coverage))[..., None]


def _share(sparq: SparqOptions, head_dim: int) -> float | None:
    """What part of the query's size its kept components are taken to have, for tau; None: what they have."""
    return {"coverage": None, "head_dim": 1.0, "num_components": sparq.num_components / head_dim}[
        sparq.score_temperature
    ]


def _approximate_logits(components, weights, key, key_by_component):
    """`[B, T, K, G, S]` from components of the keys."""
    batch, _, num_kv_heads = components.shape[:3]
    row = jnp.arange(batch)[:, None, None, None]
    head = jnp.arange(num_kv_heads)[None, None, :, None]
    of_key = key if key_by_component is None else key_by_component
    found = of_key[(row, slice(None), head, components) if key_by_component is None else (row, head, components)]
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32, precision=jax.lax.Precision.HIGHEST)
    return dot("btkgr,btkrs->btkgs", weights, found.astype(jnp.float32))  # [B, T, K, r, S]


def _ends(options: AttentionOptions, batch: int, num_queries: int, num_slots: int, shard: Shard):
    """One position past each query's own, int32 `[B, T]`; of queries that see one another, past the last."""
    ends = jnp.full(batch, num_slots * shard.num_shards, jnp.int32)
    if options.key_value_seq_lengths is not None:
        ends = jnp.minimum(jnp.asarray(options.key_value_seq_lengths, jnp.int32), ends)
    later = num_queries - 1 - jnp.arange(num_queries, dtype=jnp.int32)
    return ends[:, None] - (later if options.is_causal else jnp.zeros_like(later))[None, :]


def _is_among_best(scores, positions, num_keys: int, axes: tuple[str, ...]):
    """Whether each of this shard's candidates `[B, T, K, k]` is one of the `num_keys` best of all shards'."""
    packed = jnp.stack([jax.lax.bitcast_convert_type(scores, jnp.int32), positions])
    everyone = jnp.moveaxis(jax.lax.all_gather(packed, axes), 0, -2)  # [2, B, T, K, p, k]
    everyone = everyone.reshape(*everyone.shape[:-2], -1)
    if everyone.shape[-1] <= num_keys:
        return jnp.ones_like(scores, dtype=bool)
    everyone = -jax.lax.bitcast_convert_type(everyone[0], jnp.float32), everyone[1]
    last_score, last_position = (x[..., num_keys - 1, None] for x in jax.lax.sort(everyone, num_keys=2))
    return (-scores < last_score) | ((-scores == last_score) & (positions <= last_position))


def _attend_rows(grouped, key, value, slots, counts, options: AttentionOptions) -> SoftmaxState:
    """Step 2: exact attention over the first `counts [B, T, K]` of `slots [B, T, K, k]`."""
    batch, num_queries, num_kv_heads, group, head_dim = grouped.shape
    row = jnp.arange(batch)[:, None, None, None]
    head = jnp.arange(num_kv_heads)[None, None, :, None]
    # A row for each choice of keys, with one KV head. Kernels take keys eight by eight; `counts` leaves out the rest.
    filling = [(0, 0), (0, -slots.shape[3] % 8), (0, 0), (0, 0)]
    as_batch = lambda x: jnp.pad(x.reshape(-1, x.shape[3], 1, x.shape[4]), filling)
    state = attend(
        grouped.reshape(-1, 1, group, head_dim),
        as_batch(key[row, slots, head]),
        as_batch(value[row, slots, head]),
        key_value_seq_lengths=counts.reshape(-1),
        scale=options.scale,
        implementation=options.implementation,
    )
    shape = (batch, num_queries, num_kv_heads * group)
    return SoftmaxState(state.out.reshape(*shape, value.shape[-1]), state.lse.reshape(shape))


def _rest(state: SoftmaxState, total, kept, value_mean) -> SoftmaxState:
    """Step 3: the mean value, weighing what the approximate scores leave it: `lse + log((1 - alpha) / alpha)`.

    `alpha = exp(kept - total)`; it is 1 within rounding where all is kept, and the rest then weighs nothing.
    """
    excess = jnp.maximum(total - kept, 0.0)
    odds = (excess + jnp.log(-jnp.expm1(-excess))).reshape(state.lse.shape)  # log(exp(excess) - 1) without overflow
    sees_any = jnp.isfinite(state.lse)
    lse = jnp.where(sees_any, state.lse + jnp.where(sees_any, odds, 0.0), -jnp.inf)
    group = state.lse.shape[2] // value_mean.shape[2]
    mean = jnp.repeat(value_mean, group, axis=2).astype(state.out.dtype)  # [B, T or 1, N, Hv]
    return SoftmaxState(jnp.broadcast_to(mean, state.out.shape), lse)


def _value_mean(value, visible, axes: tuple[str, ...]):
    """Mean of the values that each query may see over all shards, float32 `[B or 1, T or 1, K, Hv]`; 0 of none."""
    visible = jnp.broadcast_to(visible, (value.shape[0], *visible.shape[1:])).astype(jnp.float32)
    total = jnp.einsum("bts,bskv->btkv", visible, value.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    count = visible.sum(axis=-1)[:, :, None, None]
    if axes:
        total, count = jax.lax.psum((total, count), axes)
    return total / jnp.maximum(count, 1.0)


def _over_shards(lse, how: _How, is_global: bool):
    """Log-sum-exp over all shards, if they choose together."""
    return jax.nn.logsumexp(jax.lax.all_gather(lse, how.axes), axis=0) if is_global else lse


def slot_multiple(num_slots: int) -> int:
    """Returns the multiple to which a cache should round `num_slots` up for the kernels; 1 if that would pad much."""
    return sparq_layout.SLOT_MULTIPLE if num_slots >= 8 * sparq_layout.SLOT_MULTIPLE else 1
