"""The tolerance policy must pass what is right and catch what is known to go wrong."""

import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_attention
from attention_cases import Case

from tree_attn import SoftmaxState, merge_state, reference


def halves(dtype):
    """The oracle's state of each half of the keys, `out` in `dtype`, and the arrays they come from."""
    query, key, value = Case(keys=64, dtype=dtype).arrays()
    parts = [reference.attention(query, key[:, i : i + 32], value[:, i : i + 32]) for i in (0, 32)]
    return [SoftmaxState(jnp.asarray(o, dtype), jnp.asarray(s, jnp.float32)) for o, s in parts], (query, key, value)


WRONG = {
    "lse_rounded_to_bfloat16": lambda s: s._replace(lse=s.lse.astype(jnp.bfloat16).astype(jnp.float32)),
    "lse_in_base_2": lambda s: s._replace(lse=s.lse / np.float32(np.log(2))),
    "half_the_keys_forgotten": lambda s: s._replace(lse=jnp.full_like(s.lse, -jnp.inf), out=jnp.zeros_like(s.out)),
    "out_five_percent_off": lambda s: s._replace(out=s.out * jnp.asarray(1.05, s.out.dtype)),
    "heads_swapped": lambda s: s._replace(out=s.out[:, :, ::-1]),
    "nan": lambda s: s._replace(out=s.out * jnp.asarray(jnp.nan, s.out.dtype)),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_right_merge_passes(dtype):
    states, arrays = halves(dtype)
    assert_attention(merge_state(*states), *arrays)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("spoil", WRONG.values(), ids=WRONG)
def test_a_wrong_merge_is_caught(spoil, dtype):
    (first, second), arrays = halves(dtype)
    with pytest.raises(AssertionError):
        assert_attention(merge_state(first, spoil(second)), *arrays)
