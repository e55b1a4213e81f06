"""Layers of more than one kind: with a window and without."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from tree_attn.models.llama.config import LlamaConfig
from tree_attn.models.llama.rope import rotation


def in_layer(config: LlamaConfig, layer: jax.Array | int, attend: Callable[..., jax.Array]) -> jax.Array:
    """Calls `attend(is_global, **options)` with the kind and the options of a layer (`config.attention_options`).

    In a scan over layers of two kinds the layer is traced, and so is the choice among two calls.
    """
    attend_like = lambda layer: attend(config.window_of(layer) is None, **config.attention_options(layer))
    if isinstance(layer, int) or not config.has_layer_kinds:
        return attend_like(layer if isinstance(layer, int) else 0)
    is_global = global_mask(config)
    kinds = [lambda first=first: attend_like(first) for first in _first_of_each(is_global)]
    return jax.lax.cond(jnp.asarray(is_global)[layer], *kinds)


def is_later(config: LlamaConfig, layer: jax.Array | int) -> bool:
    """Returns whether it is known when compiling that a layer before attends alike."""
    return isinstance(layer, int) and layer > 0 and not config.has_layer_kinds


def rotations(config: LlamaConfig, positions: jax.Array) -> Callable[[jax.Array | int], tuple[jax.Array, jax.Array]]:
    """Returns a function from a layer to its `rope.rotation` of these positions, which layers of a kind share."""
    everywhere = rotation(config, positions)
    if config.local_rope_theta is None:
        return lambda layer: everywhere
    local = rotation(config, positions, is_local=True)

    def of_layer(layer: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        if isinstance(layer, int) or not config.has_layer_kinds:
            is_local = config.window_of(layer if isinstance(layer, int) else 0) is not None
            return local if is_local else everywhere
        is_global = jnp.asarray(global_mask(config))[layer]
        cosine, sine = (jnp.where(is_global, *pair) for pair in zip(everywhere, local, strict=True))
        return cosine, sine

    return of_layer


def global_mask(config: LlamaConfig) -> np.ndarray:
    """Returns which layers see all tokens before theirs, bool `[L]`."""
    return np.isin(np.arange(config.num_layers), config.global_layers)


def _first_of_each(is_global: np.ndarray) -> tuple[int, int]:
    """Returns a layer without the window, and one with it."""
    return int(np.argmax(is_global)), int(np.argmin(is_global))
