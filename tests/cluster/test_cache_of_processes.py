"""A KV cache of several processes: each has some sequences, and all see alike whether there is room."""

import sys
import textwrap

import pytest
from ranks import STARTS_S, endings, running


@pytest.mark.parametrize("batch_axis_name", [None, "data"])
def test_all_processes_see_alike_whether_there_is_room(batch_axis_name):
    """One process has each sequence where the batch is sharded, and the first is full."""
    code = f"""
        import jax.numpy as jnp, numpy as np
        from tree_attn import CacheFullError, KVCache, initialize, make_mesh
        initialize()
        cache = KVCache.create(
            batch=2, capacity=4, num_kv_heads=1, head_dim=8, dtype=jnp.float32, axis_name="seq",
            mesh=make_mesh({{"data": 2, "seq": 1}}), batch_axis_name={batch_axis_name!r},
        )
        new = jnp.ones((2, 1, 1, 8))
        cache = cache.with_lengths(np.array([3, 1])).append(new, new)
        cache.check_room(0)
        try:
            cache.check_room(1)
        except CacheFullError as error:
            raise SystemExit(str(error))
    """
    with running([sys.executable, "-c", textwrap.dedent(code)], 2) as processes:
        for status, errors in endings(processes, STARTS_S):
            assert status == 1 and "sequence 0 holds 4 of 4 tokens, no room for 1 more" in errors, errors
