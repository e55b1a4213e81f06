"""The shape of a decoding step, and the bad shapes it refuses."""

import pytest
from steps import make_step

from tree_attn.cost import step


def test_uneven_shards_count_the_fullest_device():
    assert make_step(num_keys=10, n_devices=3).keys_per_device == 4


@pytest.mark.parametrize("dtype, size", [("bfloat16", 2), ("float16", 2), ("float32", 4), ("float64", 8)])
def test_itemsize(dtype, size):
    assert step.itemsize(dtype) == size


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: make_step(batch=0), "batch must be an integer of at least 1, got 0"),
        (lambda: make_step(num_keys=-1), "num_keys must be an integer of at least 1, got -1"),
        (lambda: make_step(head_dim=1.5), "head_dim must be an integer of at least 1, got 1.5"),
        (lambda: make_step(n_devices=True), "n_devices must be an integer of at least 1, got True"),
        (lambda: make_step(num_kv_heads=3), "num_heads must be a multiple of num_kv_heads, got num_heads=16"),
        (lambda: make_step(dtype="int8"), "dtype must be a floating dtype such as .* got 'int8'"),
        (lambda: make_step(dtype="floaty"), "dtype must be a floating dtype such as .* got 'floaty'"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
