"""FlashAttention-2 through the package flash-attn-jax, the kernel that the Tree Attention paper used.

flash-attn-jax 0.6.2 declares `jax<0.9` and links CUDA 12's runtime, so it is installed without its dependencies. It
reads K and V once per query head (no packing of GQA groups), so it runs only where it is named.
"""

import importlib
import importlib.util
import pathlib

import jax
import jax.numpy as jnp

from tree_attn.devices import default_runtime
from tree_attn.extras import how_to_install
from tree_attn.masking import Visibility
from tree_attn.mesh import vary_as
from tree_attn.state import SoftmaxState

INSTALL = f"{how_to_install('flash')} && python3 -m pip install --no-deps flash-attn-jax==0.6.2"


def unavailable() -> str | None:
    """Returns why flash-attn-jax cannot run here (not installed, not loadable, no CUDA GPU), or None."""
    try:
        load()
    except ImportError as error:
        return str(error)
    if default_runtime() != "cuda":
        return f"flash_attn needs a CUDA GPU; programs run on {default_runtime()!r} here"
    return None


def unsupported(query, key, value, *, logits_soft_cap, visible: Visibility, scales=None) -> str | None:
    """Returns which option flash-attn-jax's forward cannot do, or None."""
    if logits_soft_cap is not None:
        return "flash_attn does not support logits_soft_cap"
    if scales is not None:
        return "flash_attn does not support key_scale and value_scale"
    if visible.lengths is not None:
        return "flash_attn does not support key_value_seq_lengths"
    if visible.is_causal:
        return "flash_attn does not support is_causal with more than one query"
    if visible.window is not None:
        return "flash_attn does not support local_window_size"
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"flash_attn supports dtype bfloat16 and float16, not {query.dtype}"
    if key.dtype != query.dtype:
        return f"flash_attn does not support {key.dtype} key and value"
    if query.shape[-1] > 256 or value.shape[-1] != query.shape[-1]:
        return f"flash_attn supports one head dim up to 256, not {query.shape[-1]} and {value.shape[-1]}"
    if key.shape[1] == 0:
        return "flash_attn does not support key and value with no slots (S = 0)"
    return None


def attend(
    query, key, value, *, scale: float, logits_soft_cap: float | None, visible: Visibility, scales=None
) -> SoftmaxState:
    """Computes `(out, lse)` as `tree_attn.local.attend` defines them; arguments are checked already."""
    out, lse = load().flash_mha_fwd(
        query, key, value, softmax_scale=scale, is_causal=False, window_size_left=-1, window_size_right=-1
    )
    return vary_as(SoftmaxState(out, jnp.swapaxes(lse, 1, 2)), query)  # lse comes as [B, N, T]


def load():
    """Imports `flash_attn_jax.flash_fwd`, with CUDA 12's runtime preloaded from its wheel when there is one.

    Raises:
      ImportError: the package or the library it links is missing; says how to install both.
    """
    if importlib.util.find_spec("flash_attn_jax") is None:
        raise ImportError(f"flash-attn-jax is not installed; install it with: {INSTALL}")
    _preload_cuda_runtime()
    try:
        flash_fwd = importlib.import_module("flash_attn_jax.flash_fwd")
    except (ImportError, OSError) as error:
        raise ImportError(
            f"flash-attn-jax is installed but does not load ({error}); install it with: {INSTALL}"
        ) from error
    # The package's own function asks the linker for "libcudart.so", which only an installed CUDA toolkit provides.
    flash_fwd.get_sm_count = _sm_count
    return flash_fwd


def _sm_count() -> int:
    return jax.local_devices()[0].core_count


def _preload_cuda_runtime() -> None:
    # The wheel's library is in no search path. Once it is loaded by its full name, the linker finds it by its soname.
    import ctypes

    spec = importlib.util.find_spec("nvidia.cuda_runtime") if importlib.util.find_spec("nvidia") else None
    for folder in (spec.submodule_search_locations if spec else ()) or ():
        library = pathlib.Path(folder) / "lib" / "libcudart.so.12"
        if library.exists():
            ctypes.CDLL(str(library))
