"""The random data of `tree-attn compare`, and the part of it that the oracle checks."""

import numpy as np
import pytest

from tree_attn import make_mesh, reference
from tree_attn.commands.compare import data
from tree_attn.cost.step import DecodeStep


def make_step(**changes) -> DecodeStep:
    sizes = dict(batch=2, num_keys=80, num_heads=4, num_kv_heads=2, head_dim=8, dtype="float32", n_devices=8)
    return DecodeStep(**(sizes | changes))


@pytest.mark.parametrize("block_elements", [1 << 21, 96])  # one block; blocks of 3, the last overlapping
def test_oracle_sees_the_data_that_the_devices_hold(monkeypatch, block_elements):
    monkeypatch.setattr(data, "_BLOCK_ELEMENTS", block_elements)
    step, scope = make_step(), data.OracleScope(batch=2, num_kv_heads=2, num_keys=80)
    data.oracle_output.cache_clear()
    expected = data.oracle_output(step, scope, 7)
    for axes in ({"device": 8}, {"device": 4, "node": 2}):
        arrays = data.make_data(step, make_mesh(axes), tuple(axes), 7)
        np.testing.assert_allclose(reference.attention(*arrays)[0], expected, atol=1e-6)
    data.oracle_output.cache_clear()


def test_data_is_normal_sharded_and_different_everywhere():
    query, key, value = data.make_data(make_step(num_keys=8000), make_mesh({"device": 8}), ("device",), 0)
    for x in (key, value):
        assert abs(float(x.mean())) < 0.02 and abs(float(x.std()) - 1) < 0.02
        assert {shard.data.shape for shard in x.addressable_shards} == {(2, 1000, 2, 8)}
        assert np.unique(np.asarray(x)).size > 0.95 * x.size  # float32 normals repeat now and then
    assert query.sharding.is_fully_replicated
    assert not np.array_equal(key, value)


def test_oracle_scope_shrinks_with_size_and_prefers_whole_lengths():
    scope = data.oracle_scope
    small = dict(batch=4, num_heads=16, num_kv_heads=16, head_dim=128)
    assert scope(make_step(**small, num_keys=800)) == data.OracleScope(batch=4, num_kv_heads=16, num_keys=800)
    long = scope(make_step(**small, num_keys=640_000))
    assert long == data.OracleScope(batch=1, num_kv_heads=1, num_keys=640_000)
    endless = scope(make_step(**small, num_keys=5_120_000))
    assert (endless.batch, endless.num_kv_heads) == (1, 1)
    assert endless.num_keys == 1_048_576
