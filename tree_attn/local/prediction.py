"""Predicted time of a call by each backend, from steps that were measured: `implementation=None` picks by it.

    us = launch + a (MB of K and V that queries see) + b (MB of all slots) + c (GFLOP of both products)

The four constants are of a device, a backend and a kind of call: `choice.json`, which `scripts/fit_choice.py` fits.
They count a step in a chain of dependent steps, gaps between launches included.

Lengths are known on the device only. So their calls have a time for each of `SHARES`, and the backend is picked that is
nowhere far behind the fastest: a little may be lost with full caches, where much would be with short sequences.
"""

import functools
import json
import pathlib
from collections.abc import Mapping, Sequence

import jax

from tree_attn.masking import Visibility

FILE = pathlib.Path(__file__).with_name("choice.json")
SHARES = (1.0, 0.5, 0.25)  # of the slots, that hold keys where a call has lengths
Times = Mapping[str, Sequence[float | int]]


def predicted_us(query, key, visible: Visibility) -> Times:
    """Returns the microseconds of a step by each backend that was measured; none for an unknown device or kind.

    That is one time, or one for each of `SHARES`.
    """
    kind = kind_of_call(query.shape[1], visible)
    of_device = constants().get(jax.local_devices()[0].device_kind, {})
    seen = key.shape[1]
    if visible.window is not None and visible.window[0] is not None:
        seen = min(seen, visible.window[0] + query.shape[1])
    counted = counts(query.shape, key.shape, key.dtype.itemsize, keys_seen=query.shape[0] * seen)
    return {name: times(kinds[kind], counted, kind) for name, kinds in of_device.items() if kind in kinds}


def times(fitted: Sequence[float | int], counted: Sequence[float | int], kind: str) -> tuple[float, ...]:
    """Returns the microseconds of a step of this kind, whose slots all hold keys; for each of `SHARES` if not all may.

    Args:
      fitted: the four constants; counted: what they are multiplied with.
    """
    launch, seen, slots, flops = (c * x for c, x in zip(fitted, counted))
    return tuple(launch + slots + share * (seen + flops) for share in (SHARES if kind.endswith("lengths") else (1.0,)))


def pick(predicted: Times) -> str:
    """Returns the backend whose time is the least multiple of the fastest's, in the share where it is the largest."""
    fastest = [min(of_share) for of_share in zip(*predicted.values())]
    return min(predicted, key=lambda name: max(us / best for us, best in zip(predicted[name], fastest)))


def kind_of_call(num_queries: int, visible: Visibility) -> str | None:
    """Returns the kind of a call; None for prompts, and for several queries that all see the same keys."""
    if num_queries > 1 and (visible.is_diagonal or visible.by_length_only):
        return None
    return kind(num_queries, has_window=visible.window is not None, has_lengths=visible.lengths is not None)


def kind(num_queries: int, *, has_window: bool, has_lengths: bool) -> str:
    """Returns the name of a kind of decode step."""
    of_keys = "a window" if has_window else "lengths" if has_lengths else "all keys"
    return f"{'one query' if num_queries == 1 else 'several queries'}, {of_keys}"


def counts(query_shape: Sequence[int], key_shape: Sequence[int], itemsize: int, *, keys_seen: int) -> tuple:
    """Returns what the four constants are multiplied with: 1, MB seen, MB held, GFLOP.

    Args:
      query_shape: `(B, T, N, H)`; key_shape: `(B, S, K, H)`, with as many values.
      itemsize: bytes of an element of K and V.
      keys_seen: by any query, of all sequences together.
    """
    batch, num_queries, num_heads, head_dim = query_shape
    key_bytes = 2 * key_shape[2] * head_dim * itemsize
    flops = 4 * num_queries * num_heads * head_dim * keys_seen
    return 1.0, keys_seen * key_bytes / 1e6, batch * key_shape[1] * key_bytes / 1e6, flops / 1e9


@functools.cache
def constants() -> Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]:
    """Returns the fitted constants by device kind, backend and kind of call."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}
