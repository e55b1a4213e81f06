"""The backend written in Pallas with Mosaic GPU: LeanAttention, and on Hopper GPUs the many-query kernel.

This module says what the kernels can do and gives them a derivative. `tree_attn/kernels` plans and runs a call; it is
loaded when one is made. Which instructions the kernels use on which GPU is said in `tree_attn/kernels/targets.py`.
"""

import functools

import jax
import jax.numpy as jnp

from tree_attn.devices import default_runtime
from tree_attn.local import xla
from tree_attn.masking import Visibility
from tree_attn.mesh import varying_axes
from tree_attn.state import SoftmaxState, merge_state, of_batch

OLDEST_JAX = (0, 11)
# The types of a checked `shard_map` enter a kernel with its operands, and its loops do not type-check.
CHECKED = "mosaic_gpu does not run on sharded arrays inside a shard_map with check_vma=True"


def unavailable() -> str | None:
    """Returns why the kernel cannot run here (no GPU that it is written for, a JAX it was never run on), or None."""
    if (runtime := default_runtime()) != "cuda":
        return f"mosaic_gpu needs an NVIDIA GPU; programs run on {runtime!r} here"
    from tree_attn.kernels.targets import TARGETS

    capability = getattr(jax.local_devices()[0], "compute_capability", "")
    if capability not in TARGETS:
        return f"mosaic_gpu is written for compute capability {', '.join(TARGETS)}, this GPU has {capability}"
    if jax.__version_info__ < OLDEST_JAX:
        return f"mosaic_gpu was run on a GPU with JAX 0.11 and newer only, this is {jax.__version__}"
    return None


def unsupported(query, key, value, *, logits_soft_cap, visible: Visibility, scales=None) -> str | None:
    """Returns which option the kernel cannot do, or None."""
    from tree_attn.kernels import lean_layout as limits
    from tree_attn.kernels import targets

    is_hopper = targets.current().is_hopper
    if varying_axes((query, key, value)):
        return CHECKED
    num_queries, num_heads, head_dim = query.shape[1:]
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"mosaic_gpu supports dtype bfloat16 and float16, not {query.dtype}"
    if key.dtype == jnp.int8:
        return "mosaic_gpu does not support int8 key and value"
    if head_dim not in limits.HEAD_DIMS or value.shape[-1] != head_dim:
        return (
            f"mosaic_gpu supports one head dim of {limits.HEAD_DIMS}, not {head_dim} for keys and "
            f"{value.shape[-1]} for values"
        )
    group = num_heads // key.shape[2]
    if num_queries > limits.MAX_QUERIES and not is_hopper:
        return f"mosaic_gpu decodes up to {limits.MAX_QUERIES} queries per sequence but on Hopper, not {num_queries}"
    if num_queries > limits.MAX_QUERIES and not visible.by_length_only:
        return (
            f"mosaic_gpu decodes up to {limits.MAX_QUERIES} queries per sequence, not {num_queries}, "
            "unless all of a sequence see the same keys"
        )
    if limits.is_many_query(num_queries, group):
        if head_dim not in limits.MANY_QUERY_HEAD_DIMS or key.dtype != query.dtype:
            return (
                f"mosaic_gpu supports more than {limits.MAX_QUERIES} queries per sequence with a head dim of "
                f"{limits.MANY_QUERY_HEAD_DIMS} and one dtype, not {num_queries} with {head_dim}, {query.dtype} and "
                f"{key.dtype}"
            )
    elif group > limits.MAX_GROUP:
        return f"mosaic_gpu supports up to {limits.MAX_GROUP} query heads per key head, not {group}"
    return None


def unsupported_pages(page_size: int, num_queries: int) -> str | None:
    """Returns why the kernel cannot read pages of `page_size` keys, or None."""
    from tree_attn.kernels.lean_layout import MAX_QUERIES, ROWS

    if page_size % ROWS and num_queries > MAX_QUERIES:
        return (
            f"mosaic_gpu needs pages of a multiple of {ROWS} keys for more than {MAX_QUERIES} queries per sequence, "
            f"not {page_size}"
        )
    return None


def slot_multiple(num_slots: int) -> int:
    """Returns the multiple to which a cache should round `num_slots` up for the kernel; 1 if that would pad much."""
    from tree_attn.kernels.lean_layout import SLOT_MULTIPLE

    return SLOT_MULTIPLE if num_slots >= SLOT_MULTIPLE else 1


def attend(
    query, key, value, *, scale: float, logits_soft_cap: float | None, visible: Visibility, scales=None,
    merge_with: SoftmaxState | None = None, exchange=None,
) -> SoftmaxState:  # fmt: skip
    """Computes `(out, lse)` as `tree_attn.local.attend` defines them; arguments are checked already.

    Args:
      merge_with: a state over other keys, with which the result is merged, or None.
      exchange: merges with the states of other devices (`tree_attn.local.Exchange`), or None. Then there is no
        derivative.
    """
    if exchange is None:
        return _attend(query, key, value, scales, merge_with, visible, scale, logits_soft_cap)
    return _lean_padded(query, key, value, scales, merge_with, visible, scale, logits_soft_cap, exchange)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _attend(query, key, value, scales, merge_with, visible: Visibility, scale, logits_soft_cap) -> SoftmaxState:
    return _lean_padded(query, key, value, scales, merge_with, visible, scale, logits_soft_cap)


def _forward(query, key, value, scales, merge_with, visible, scale, logits_soft_cap):
    state = _attend(query, key, value, scales, merge_with, visible, scale, logits_soft_cap)
    return state, (query, key, value, scales, merge_with, visible)


def _backward(scale, logits_soft_cap, residuals, cotangents):
    # Decoding is not trained through, so XLA recomputes.
    *arrays, visible = residuals

    def recompute(query, key, value, scales, merge_with):
        options = dict(scale=scale, logits_soft_cap=logits_soft_cap, visible=visible, scales=scales)
        state = xla.attend(query, key, value, **options)
        return state if merge_with is None else merge_state(state, merge_with)

    _, pull = jax.vjp(recompute, *arrays)
    return (*pull(cotangents), None)


_attend.defvjp(_forward, _backward)


def attend_after(prefix, suffix) -> SoftmaxState:
    """Computes the state of each sequence over keys that it shares with others, and over its own.

    Args:
      prefix, suffix: `(query, key, value)` and keyword arguments of `attend`, checked already. A sequence of the prefix
        is a node: it holds the queries of as many of the other's sequences, one after another.
    """
    (arrays, options), (suffix_arrays, suffix_options) = prefix, suffix
    of = lambda options: (options["scales"], options["visible"])
    static = tuple((x["scale"], x["logits_soft_cap"]) for x in (options, suffix_options))
    return _attend_after((*arrays, *of(options)), (*suffix_arrays, *of(suffix_options)), static)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _attend_after(prefix, suffix, static) -> SoftmaxState:
    (*prefix_arrays, prefix_scales, prefix_seen), (*suffix_arrays, suffix_scales, suffix_seen) = prefix, suffix
    if calls := _calls_after(prefix, suffix, static):
        of_prefix, of_suffix = calls
        return of_suffix.run_after(of_prefix, prefix_arrays, *suffix_arrays)
    state = _lean_padded(*suffix_arrays, suffix_scales, None, suffix_seen, *static[1])
    state = of_batch(state, prefix_arrays[0].shape[0])
    state = _lean_padded(*prefix_arrays, prefix_scales, state, prefix_seen, *static[0])
    return of_batch(state, suffix_arrays[0].shape[0])


def _calls_after(prefix, suffix, static):
    """Returns the planned calls of both, if the second's kernel begins with the first's partial states; else None."""
    from tree_attn.kernels.lean_call import plan_call

    calls = []
    for (query, key, _, scales, seen), (scale, logits_soft_cap), is_suffix in zip(
        (prefix, suffix), static, (False, True)
    ):
        if key.shape[1] == 0:
            return None
        spans = None if seen.is_total else seen.slot_ranges()
        options = dict(scale=scale, logits_soft_cap=logits_soft_cap, scales=scales, num_slots=key.shape[1])
        calls.append(plan_call(query, key, spans, leaves_whole=is_suffix, **options))
    return calls if calls[1].why_not_after(calls[0]) is None else None


def _forward_after(prefix, suffix, static):
    return _attend_after(prefix, suffix, static), (prefix, suffix)


def _backward_after(static, residuals, cotangents):
    *visible, arrays = *(x[4] for x in residuals), tuple(x[:4] for x in residuals)

    def recompute(*arrays):
        states = [
            xla.attend(*x[:3], scale=scale, logits_soft_cap=cap, visible=seen, scales=x[3])
            for x, (scale, cap), seen in zip(arrays, static, visible)
        ]
        return merge_state(states[1], of_batch(states[0], arrays[1][0].shape[0]))

    _, pull = jax.vjp(recompute, *arrays)
    return tuple((*of, None) for of in pull(cotangents))


_attend_after.defvjp(_forward_after, _backward_after)


def _lean_padded(
    query, key, value, scales, merge_with, visible: Visibility, scale, logits_soft_cap, exchange=None
) -> SoftmaxState:
    """Runs the kernel over `[B, S, K, H]` with any mask that `visible` holds."""
    if key.shape[1] == 0:
        state = no_keys(query) if merge_with is None else merge_state(no_keys(query), merge_with)
        return state if exchange is None else exchange.merge(state)
    spans = None if visible.is_total else visible.slot_ranges()
    options = dict(scale=scale, logits_soft_cap=logits_soft_cap, scales=scales, num_new=visible.num_new)
    return lean_state(
        query, key, value, spans, num_slots=key.shape[1], merge_with=merge_with, exchange=exchange, **options
    )


def no_keys(query) -> SoftmaxState:
    """Returns the state over no keys."""
    return SoftmaxState(jnp.zeros_like(query), jnp.full(query.shape[:3], -jnp.inf, jnp.float32))


def lean_state(
    query, key, value, spans, *, merge_with: SoftmaxState | None = None, exchange=None, **options
) -> SoftmaxState:
    """Plans a call of the kernels and runs it; arguments are checked already.

    Args:
      query: `[B, T, N, H]`; key, value: as `tree_attn.kernels.lean.lean_attention` takes them.
      spans, options: as in `tree_attn.kernels.lean_call.plan_call`.
      merge_with, exchange: as in `tree_attn.kernels.lean_call.LeanCall.run`.
    """
    from tree_attn.kernels.lean_call import plan_call

    is_alone = merge_with is None and exchange is None
    call = plan_call(query, key, spans, leaves_whole=is_alone, **options)
    return call.run(query, key, value, merge_with=merge_with, exchange=exchange)
