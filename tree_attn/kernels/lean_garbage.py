"""Zeros in place of the values of a KV tile that are no sequence's keys, so that no NaN among them meets a weight."""

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tree_attn.kernels import columns
from tree_attn.kernels.interpreter import is_interpreted
from tree_attn.kernels.lean_layout import LeanShape


def zero_garbage(values, transforms, span, first_slot, shape: LeanShape, *, commits: bool = True) -> None:
    """Puts zeros in place of the values of a KV tile that are not the sequence's: beyond its end, if packed before it.

    A weight of zero does not make zero of what may be NaN. Only tiles at an end are written. Without `commits`, the
    caller commits what is to be read by products by `wgmma`.

    Args:
      values: `[kv, Hp]`, in shared memory with `transforms`, as stored. All of a warpgroup's threads call this.
      span: from `span_of_keys`. None: TMA fills what is beyond the last slot with zeros.
      first_slot: slot of the first of the values.
    """
    if span is None or not shape.target.is_hopper:  # `plain_copies` brings zeros
        return
    kv = values.shape[0]
    # Only if packed does another sequence's end come before the span.
    start = span[0] - first_slot if shape.is_packed else jnp.int32(0)
    end = span[1] - first_slot

    @pl.when((start > 0) | (end < kv))
    def _():
        if is_interpreted():
            rows = jnp.arange(kv)[:, None]
            values[...] = jnp.where((rows >= start) & (rows < end), values[...], 0).astype(values.dtype)
        else:
            columns.zero_others(values, transforms, start, end, shape)
        if is_interpreted() if shape.uses_mma else commits:
            plgpu.commit_smem()
