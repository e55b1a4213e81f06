"""cuDNN's fused attention, with the float32 lse that `jax.nn` rounds away.

`jax.nn.dot_product_attention(..., return_residual=True)` casts the lse to the input's dtype, which bends merged
weights by up to 3 %. The function that it calls does not. That function is private to JAX: only `_fused_attention`
names it, and a test fails when JAX moves it.
"""

import inspect
from functools import partial

import jax
import jax.numpy as jnp

from tree_attn.devices import default_runtime
from tree_attn.local import xla
from tree_attn.local.garbage import zeroed
from tree_attn.masking import Visibility
from tree_attn.mesh import vary_as
from tree_attn.state import SoftmaxState

MAX_BIAS_ELEMENTS = 1 << 28  # 512 MiB; a long prefill belongs to a kernel that computes its mask


def unavailable() -> str | None:
    """Returns why cuDNN cannot run here (no CUDA GPU, no cuDNN, JAX moved the private entry), or None."""
    if default_runtime() != "cuda":
        return f"cudnn needs a CUDA GPU; programs run on {default_runtime()!r} here"
    try:
        _fused_attention().check_cudnn_version()
    except (ImportError, AttributeError, RuntimeError) as error:
        return f"cudnn cannot be used with this JAX ({jax.__version__}): {error}"
    return None


def unsupported(query, key, value, *, logits_soft_cap, visible: Visibility, scales=None) -> str | None:
    """Returns which option cuDNN's fused attention cannot do, or None."""
    if logits_soft_cap is not None:
        return "cudnn does not support logits_soft_cap"
    if scales is not None:
        return "cudnn does not support key_scale and value_scale"
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cudnn supports dtype bfloat16 and float16, not {query.dtype}"
    if key.dtype != query.dtype:
        return f"cudnn does not support {key.dtype} key and value"
    max_head_dim = 256 if _fused_attention().check_compute_capability("9.0") else 128
    if query.shape[-1] > max_head_dim or query.shape[-1] % 8 or value.shape[-1] != query.shape[-1]:
        return (
            f"cudnn supports here one head dim that is a multiple of 8 up to {max_head_dim}, not {query.shape[-1]} "
            f"for keys and {value.shape[-1]} for values"
        )
    if key.shape[1] == 0:
        return "cudnn does not support key and value with no slots (S = 0)"
    bias_elements = query.shape[0] * query.shape[1] * key.shape[1]
    if _needs_bias(visible) and bias_elements > MAX_BIAS_ELEMENTS:
        return (
            f"cudnn is given causal offsets and windows as a bias of B x T x S = {bias_elements} elements, "
            f"more than the {MAX_BIAS_ELEMENTS} allowed"
        )
    return None


def attend(
    query, key, value, *, scale: float, logits_soft_cap: float | None, visible: Visibility, scales=None
) -> SoftmaxState:
    """Computes `(out, lse)` as `tree_attn.local.attend` defines them; arguments are checked already.

    Lengths alone become cuDNN's padding mask, which reads the valid keys only. A prompt's own causal diagonal becomes
    its causal mask. Other causal offsets and windows become an additive bias `[B, 1, T, S]`, read once beside K and V.
    """
    if scale < 0:  # with a bias and such a scale a result of cuDNN's was NaN
        query, scale = -query, -scale
    return _attend(query, key, value, visible, scale)


def gradient_unsupported(query, key, value, *, logits_soft_cap, visible: Visibility, scales=None) -> str | None:
    """Returns why `gradient` cannot run, or None."""
    reason = unsupported(query, key, value, logits_soft_cap=logits_soft_cap, visible=visible, scales=scales)
    if reason is None and _needs_bias(visible) and (query.shape[1] % 2 or key.shape[1] % 2):
        return f"cudnn's backward pass takes a bias of even sizes only, not T = {query.shape[1]} and S = {key.shape[1]}"
    return reason


def gradient(query, key, value, *, scale: float, visible: Visibility, out, lse, of_out):
    """Returns the derivative of `sum <of_out, O>` over one shard's keys, as `tree_attn.local.gradient` defines it.

    One difference: the derivative of lse, over all keys, is 0, because cuDNN takes `out` and makes the sums itself.

    Args:
      out, lse: over the keys of all shards; lse float32 `[B, T, N]`.
      of_out: the cotangent of `out`.
    Returns:
      Derivatives of query, key and value, in their dtypes.
    """
    if scale < 0:
        of_query, *others = gradient(
            -query, key, value, scale=-scale, visible=visible, out=out, lse=lse, of_out=of_out
        )  # fmt: skip
        return -of_query, *others
    key, value, sees_any, shift, options = _masked(query, key, value, visible)
    key = zeroed(key, visible.is_valid())  # a weight of 0 times NaN would reach the query
    # exp(logits - inf) = 0: a query that sees nothing here has no weights, whatever its masked logits are.
    hidden = jnp.isneginf(lse) if sees_any is None else jnp.isneginf(lse) | ~sees_any
    lse, of_out = jnp.where(hidden, jnp.inf, lse), jnp.where(hidden[..., None], 0, of_out)
    is_strict = not isinstance(shift, int)
    if is_strict:
        # Query t + 1 is in t's place, and the last place holds a copy.
        lse = jnp.where(
            (jnp.arange(query.shape[1]) < query.shape[1] - shift)[None, :, None], _shifted(lse, shift), jnp.inf
        )
    rows = (_shifted(x.astype(query.dtype), shift) for x in (query, out, of_out))
    of_query, of_key, of_value = _backward_pass(*rows, key, value, lse, scale=scale, **options)
    of_query, of_key, of_value = vary_as((of_query, of_key, of_value), query)
    if is_strict:
        is_first = jnp.arange(query.shape[1]) < shift
        of_query = jnp.where(is_first[None, :, None, None], 0, _shifted(of_query, -shift))
    return of_query, of_key, of_value


def _needs_bias(visible: Visibility) -> bool:
    return not visible.by_length_only and not visible.is_diagonal


def _masked(query, key, value, visible: Visibility):
    """Returns key and value without garbage, which queries see any, their shift, and cuDNN's options of masking."""
    fused = _fused_attention()
    lengths, is_diagonal = visible.local_lengths(), visible.is_diagonal
    options = {"mask_type": fused.MaskType.CAUSAL if is_diagonal else fused.MaskType.NO_MASK}
    if _needs_bias(visible):
        shape = (query.shape[0], query.shape[1], key.shape[1])
        options = {"mask": jnp.broadcast_to(visible.mask(), shape)[:, None]}
    elif lengths is not None:
        # cuDNN's statistics are undefined for a sequence of no keys, so it gets one key, which is masked afterwards.
        options = {
            "mask_type": fused.MaskType.PADDING_CAUSAL if is_diagonal else fused.MaskType.PADDING,
            "q_seqlen": jnp.full(lengths.shape, query.shape[1], jnp.int32),
            "kv_seqlen": jnp.maximum(lengths, 1),
        }
    if "mask" in options:
        key = zeroed(key, visible.is_valid())  # a bias is added to the logits: NaN stays NaN, where a mask replaces it
    if query.shape[1] > 1 or not visible.by_length_only:
        value = zeroed(value, visible.is_valid())  # of one query cuDNN reads the valid values only
    # cuDNN's mask shows query t the slots up to t. Query t + 1 in t's place then sees one slot less.
    shift = 0 if visible.is_strict is None else visible.is_strict.astype(jnp.int32)
    if visible.is_total:
        return key, value, None, shift, options
    sees_any = jnp.bool_(True) if lengths is None else (lengths > 0)[:, None, None]
    if is_diagonal:
        sees_any &= (jnp.arange(query.shape[1]) >= shift)[None, :, None]
    elif not visible.by_length_only:
        sees_any = jnp.any(visible.mask(), -1)[:, :, None]
    return key, value, sees_any, shift, options


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(query, key, value, visible: Visibility, scale: float) -> SoftmaxState:
    key, value, sees_any, shift, options = _masked(query, key, value, visible)
    out, lse = _fused_attention().dot_product_attention(
        _shifted(query, shift), key, value, scale=scale, return_residual=True, **options
    )
    out, lse = vary_as((out, lse), query)  # the kernel's results may lack the type
    out, lse = _shifted(out, -shift), _shifted(jnp.swapaxes(lse, 1, 2), -shift)  # lse was [B, N, T]
    if sees_any is None:
        return SoftmaxState(out, lse)
    return SoftmaxState(
        jnp.where(sees_any[..., None], out, jnp.zeros_like(out)), jnp.where(sees_any, lse, jnp.full_like(lse, -jnp.inf))
    )


def _backward_pass(
    query, out, of_out, key, value, lse, *, scale, mask_type=None, mask=None, q_seqlen=None, kv_seqlen=None
):
    """Returns the derivatives of query, key and value, by the primitive behind JAX's rule for the fused attention.

    Arrays `[B, T, N, H]`; lse `[B, T, N]`, +inf where a query has no weights.
    """
    fused = _fused_attention()
    bias = None if mask is None else fused.combine_bias_and_mask(None, mask, query.dtype)
    absent = jnp.zeros(0, query.dtype)
    bias, q_seqlen, kv_seqlen = (absent if x is None else x for x in (bias, q_seqlen, kv_seqlen))
    parameters = dict(
        scale=scale, seed=42, dropout_rate=0.0, variadic_args=(mask is not None, False),
        mask_type=mask_type or fused.MaskType.NO_MASK, layout=fused.AttentionLayout.BTNH.value,
        sliding_window_length=None,
    )  # fmt: skip
    if "score_mod" in inspect.signature(fused._dot_product_attention_bwd_impl).parameters:  # of JAX 0.12
        parameters["score_mod"] = None
    return fused._dot_product_attention_bwd_p_wrapper.bind(
        query, key, value, bias, q_seqlen, kv_seqlen, *4 * (absent,), jnp.swapaxes(lse, 1, 2), out, of_out,
        **parameters,
    )  # fmt: skip


def _shifted(x, by):
    """Returns `[B, T, ...]` with query `t + by` at t, where `by` is -1, 0 or 1; at the ends queries repeat."""
    if isinstance(by, int):
        return x
    padded = jnp.concatenate([x[:, :1], x, x[:, -1:]], axis=1)
    return jax.lax.dynamic_slice_in_dim(padded, 1 + by, x.shape[1], axis=1)


def _forward(query, key, value, visible, scale):
    return _attend(query, key, value, visible, scale), (query, key, value, visible)


def _backward(scale, residuals, cotangents):
    """Recomputes by XLA: JAX's own rule drops the cotangent of lse silently, and every merge depends on it."""
    *arrays, visible = residuals
    _, pull = jax.vjp(partial(xla.attend, scale=scale, logits_soft_cap=None, visible=visible), *arrays)
    return (*pull(cotangents), None)


_attend.defvjp(_forward, _backward)


def _fused_attention():
    """Imports JAX's private module, in the one place that names it."""
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo
