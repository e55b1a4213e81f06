"""cuDNN's fused attention, with the float32 lse that `jax.nn` rounds away.

`jax.nn.dot_product_attention(..., return_residual=True)` casts the lse to the input's dtype, which bends merged
weights by up to 3 %. The function that it calls does not. That function is private to JAX: only `_fused_attention`
names it, and a test fails when JAX moves it.
"""

from functools import partial

import jax
import jax.numpy as jnp

from tree_attn.devices import default_platform
from tree_attn.local import xla
from tree_attn.local.garbage import zeroed
from tree_attn.masking import Visibility
from tree_attn.mesh import vary_as
from tree_attn.state import SoftmaxState

MAX_BIAS_ELEMENTS = 1 << 28  # 512 MiB; a long prefill belongs to a kernel that computes its mask


def unavailable() -> str | None:
    """Returns why cuDNN cannot run here (no CUDA GPU, no cuDNN, JAX moved the private entry), or None."""
    if default_platform() != "gpu" or "cuda" not in jax.devices()[0].client.platform_version.lower():
        return f"cudnn needs a CUDA GPU; programs run on {default_platform()!r} here"
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
    needs_bias = not visible.by_length_only and not visible.is_diagonal
    if needs_bias and bias_elements > MAX_BIAS_ELEMENTS:
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
    return _attend(query, key, value, visible, scale)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(query, key, value, visible: Visibility, scale: float) -> SoftmaxState:
    fused = _fused_attention()
    lengths, is_diagonal = visible.local_lengths(), visible.is_diagonal
    options = {"mask_type": fused.MaskType.CAUSAL if is_diagonal else fused.MaskType.NO_MASK}
    if not visible.by_length_only and not is_diagonal:
        shape = (query.shape[0], query.shape[1], key.shape[1])
        options = {"mask": jnp.broadcast_to(visible.mask(), shape)[:, None]}
    elif lengths is not None:
        # cuDNN's statistics are undefined for a sequence of no keys, so it gets one key, which is masked below.
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
    out, lse = fused.dot_product_attention(
        _shifted(query, shift), key, value, scale=scale, return_residual=True, **options
    )
    out, lse = vary_as((out, lse), query)  # the kernel's results may lack the type
    out, lse = _shifted(out, -shift), _shifted(jnp.swapaxes(lse, 1, 2), -shift)  # lse was [B, N, T]
    if visible.is_total:
        return SoftmaxState(out, lse)
    sees_any = jnp.bool_(True) if lengths is None else (lengths > 0)[:, None, None]
    if is_diagonal:
        sees_any &= (jnp.arange(query.shape[1]) >= shift)[None, :, None]
    elif not visible.by_length_only:
        sees_any = jnp.any(visible.mask(), -1)[:, :, None]
    return SoftmaxState(
        jnp.where(sees_any[..., None], out, jnp.zeros_like(out)), jnp.where(sees_any, lse, jnp.full_like(lse, -jnp.inf))
    )


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
