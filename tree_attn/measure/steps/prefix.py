"""Steps of a batch after a prefix that it shares, on one GPU: with and without sharing, by this library and cuDNN."""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from tree_attn.measure.steps import ways
from tree_attn.measure.steps.chains import fastest
from tree_attn.measure.steps.step import PEAKS, Step

# Way -> (whether it shares the prefix, implementation).
WAYS = {
    "mosaic_gpu": (True, "mosaic_gpu"),
    "cudnn": (True, "cudnn"),
    "mosaic_gpu, not shared": (False, "mosaic_gpu"),
    "cudnn, not shared": (False, "cudnn"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedPrefixStep:
    """One step of `batch` sequences after a prefix that they share. If `ragged`, suffixes have 1 to `suffix` keys."""

    batch: int
    prefix: int
    suffix: int = 128
    num_heads: int = 8
    num_kv_heads: int = 1
    head_dim: int = 128
    ragged: bool = False

    @property
    def lengths(self) -> np.ndarray:
        """Keys of each suffix."""
        return np.linspace(1 if self.ragged else self.suffix, self.suffix, self.batch).astype(np.int32)

    def key_value_bytes(self, keys: int) -> int:
        """Returns the bytes of so many keys and values, in bfloat16."""
        return 2 * 2 * keys * self.num_kv_heads * self.head_dim

    def step(self, is_shared: bool) -> Step:
        """Returns the step as the sweep times it; without sharing, each sequence has the prefix before its suffix."""
        before = 0 if is_shared else self.prefix
        return Step(
            family="prefix",
            case="",
            lengths=tuple(int(n) + before for n in self.lengths),
            gives_lengths=self.ragged,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            prefix=self.prefix if is_shared else 0,
        )

    @property
    def limit_us(self) -> float:
        """The limit by the datasheet of an H200."""
        return self.limit_us_at(PEAKS)

    def limit_us_at(self, peaks: Mapping[str, float]) -> float:
        """Returns the time of the prefix's products, or to read prefix and suffixes once: whichever is longer.

        Args:
          peaks: as `datasheets.rates` has them.
        """
        products = 4 * self.batch * self.num_heads * self.prefix * self.head_dim / peaks["product_flops_per_s"]
        read_bytes = self.key_value_bytes(self.prefix + int(self.lengths.sum()))
        return 1e6 * max(products, read_bytes / peaks["read_bytes_per_s"])


def time_way(case: SharedPrefixStep, is_shared: bool, implementation: str, n_iters: int) -> dict:
    """Times one way; of cuDNN's cuts of the prefix into chunks the fastest counts."""
    step = case.step(is_shared)
    if not is_shared:
        chosen = [ways.named(step, None if implementation == ways.PICKED else implementation)]
    else:
        chosen = [way for way in ways.ways(step) if way.name.split(",")[0] == implementation]
    if case.ragged and implementation == ways.OURS:
        chosen = [_with_prefix_length(way, case.prefix) for way in chosen]
    return fastest(dict(ways.time_ways(step, chosen, n_iters=n_iters)))


def _with_prefix_length(way: ways.Way, prefix: int) -> ways.Way:
    """Returns the way with the prefix's length as a value on the device, as in a Llama."""

    def run(query, prefix_key, prefix_value, prefix_length, key, value, lengths):
        return way.run(query, prefix_key, prefix_value, key, value, lengths, prefix_length=prefix_length)

    def cache(arrays: dict) -> tuple:
        return arrays["prefix_key"], arrays["prefix_value"], jnp.int32(prefix), arrays["key"], arrays["value"]

    return dataclasses.replace(way, run=run, cache=cache)
