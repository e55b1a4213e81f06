"""Tests of which kernels begin before the one before them has ended."""

import jax
import jax.numpy as jnp
import pytest

from tree_attn.kernels import lean, overlap
from tree_attn.kernels.lean_layout import LeanConfig
from tree_attn.local import mosaic_gpu

SMS = 132
KEYS = 1024


def traced(num_ctas: int, keys: int = KEYS) -> str:
    """Returns the program of a step with an output tile for each CTA."""
    query, cache = (jax.ShapeDtypeStruct((num_ctas, n, 1, 64), jnp.bfloat16) for n in (1, keys))
    config = LeanConfig(block_kv=64, num_stages=2, num_ctas=num_ctas)
    options = dict(num_slots=keys, scale=1.0, logits_soft_cap=None, config=config)
    step = lambda query, key, value: mosaic_gpu.lean_state(query, key, value, None, **options).out
    return str(jax.make_jaxpr(step)(query, cache, cache))


@pytest.mark.parametrize(
    "num_ctas, keys, is_early",
    [
        (112, KEYS, True),  # one on an SM: there is room for no other
        (132, KEYS, True),
        (160, KEYS, False),
        (240, KEYS, True),  # all but a few SMs have two
        (264, KEYS, True),
        (288, KEYS, False),  # three on 24 of the SMs
        (288, 256, True),
        (288, 257, False),
        (396, KEYS, True),
    ],
)
def test_attention_begins_early_where_sms_have_equally_many_ctas(monkeypatch, num_ctas, keys, is_early):
    monkeypatch.setattr(lean, "num_sms", lambda: SMS)
    is_part = "griddepcontrol" in traced(num_ctas, keys)
    assert is_part == (is_early and overlap.overlaps())  # with an older JAX no kernel does
