"""Layers of more than one kind: with a window and without."""

from collections.abc import Callable

import jax
import numpy as np

from tree_attn.models.llama.config import LlamaConfig


def in_layer(config: LlamaConfig, layer: jax.Array | int, attend: Callable[..., jax.Array]) -> jax.Array:
    """Calls `attend(**options)` with the options of a layer (`config.attention_options`).

    In a scan over layers of two kinds the layer is traced, and so is the choice among two calls.
    """
    if not config.has_layer_kinds:
        return attend(**config.attention_options(0))
    if isinstance(layer, int):
        return attend(**config.attention_options(layer))
    is_global = np.isin(np.arange(config.num_layers), config.global_layers)
    kinds = [lambda first=first: attend(**config.attention_options(first)) for first in _first_of_each(is_global)]
    return jax.lax.cond(jax.numpy.asarray(is_global)[layer], *kinds)


def _first_of_each(is_global: np.ndarray) -> tuple[int, int]:
    """Returns a layer without the window, and one with it."""
    return int(np.argmax(is_global)), int(np.argmin(is_global))
