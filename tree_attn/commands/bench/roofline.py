"""The least time of a token of a Llama, from the fields of a row of `tree-attn bench`."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from tree_attn.cost import limits
from tree_attn.models.llama import LlamaConfig


def roofline_ms(row: Mapping[str, Any], config: LlamaConfig, device_kind: str) -> float | None:
    """Returns the least time of a token half-way through the new ones; None for a device kind without a datasheet.

        max(bytes / read rate, operations / product rate)

    The bytes are the weights, keys and values of the prompts (what they share once), and those of the continuations so
    far, each sequence's own. The operations are the products with the weights and of attention, of all sequences. Both
    are those of one of the devices, which share them evenly.

    Args:
      row: "weights_bytes_per_device", "cache_bytes_per_device" (of the prompts), "batch", "context", "new_tokens",
        "n_devices" and "dtype"; "problem_tokens", "cache_dtype" and "sparq" where there are such.
      config: the model's shape.
      device_kind: `jax.Device.device_kind`.
    """
    num_bytes = row["weights_bytes_per_device"] + row["cache_bytes_per_device"] + _continuation_bytes(row, config)
    of_weights = 2 * row["batch"] * row["weights_bytes_per_device"] / jnp.dtype(row["dtype"]).itemsize
    us = limits.limit_us(device_kind, num_bytes=num_bytes, num_flops=of_weights + _attention_flops(row, config))
    return None if us is None else us / 1e3


def _continuation_bytes(row: Mapping[str, Any], config: LlamaConfig) -> float:
    """Returns the bytes that a device reads of the new tokens' keys and values, or with SparQ of their components."""
    before, sparq = _prompt_tokens(row), row.get("sparq")
    elements = 2 * config.head_dim if sparq is None else sparq["num_components"]
    tokens = (before, before + row["new_tokens"] / 2)
    seen = [[_seen(config, layer, count) for layer in range(config.num_layers)] for count in tokens]
    further = sum(seen[1]) - sum(seen[0])
    itemsize = jnp.dtype(row.get("cache_dtype") or row["dtype"]).itemsize
    return row["batch"] * further * config.num_kv_heads * elements * itemsize / row["n_devices"]


def _attention_flops(row: Mapping[str, Any], config: LlamaConfig) -> float:
    """Returns the operations of queries with keys, and of weights with values, that a device does for all sequences."""
    tokens, sparq = _prompt_tokens(row) + row["new_tokens"] / 2, row.get("sparq")
    of_layer = lambda seen: 4 * config.head_dim * seen
    if sparq is not None:  # a few components of every key, then a few keys whole
        of_layer = lambda seen: 2 * sparq["num_components"] * seen + 4 * config.head_dim * min(sparq["num_keys"], seen)
    of_sequence = sum(of_layer(_seen(config, layer, tokens)) for layer in range(config.num_layers))
    return row["batch"] * config.num_heads * of_sequence / row["n_devices"]


def _prompt_tokens(row: Mapping[str, Any]) -> int:
    return row["context"] + (row.get("problem_tokens") or 0)


def _seen(config: LlamaConfig, layer: int, tokens: float) -> float:
    window = config.window_of(layer)
    return tokens if window is None else min(tokens, window)
