"""Sums and gathers of a decoding step's few numbers: XLA's collectives here, the exchange kernel on GPUs of a host."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tree_attn import make_mesh
from tree_attn.reduce import peer_memory
from tree_attn.reduce.activations import MAX_SENT, gather_activations, sum_activations
from tree_attn.reduce.fused import OLDEST_JAX

needs_new_jax = pytest.mark.skipif(jax.__version_info__ < OLDEST_JAX, reason="runs with JAX 0.11 or newer")


def over(mesh, axes, way):
    """`way` of each device's row of an array."""
    of_shard = lambda x: way(x[0], axes, mesh)
    return jax.jit(
        jax.shard_map(of_shard, mesh=mesh, axis_names=set(axes), in_specs=P(axes), out_specs=P(), check_vma=False)
    )


@pytest.mark.parametrize("num_devices", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_they_are_the_sum_and_all_parts_in_order(num_devices, dtype):
    mesh = make_mesh({"seq": num_devices})
    x = np.random.default_rng(0).integers(-8, 8, (num_devices, 3, 5)).astype(jnp.dtype(dtype))  # sums are exact
    np.testing.assert_array_equal(over(mesh, ("seq",), sum_activations)(x), x.astype(np.float32).sum(axis=0))
    np.testing.assert_array_equal(over(mesh, ("seq",), gather_activations)(x), x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_residual_is_added_before_anything_is_rounded(dtype):
    mesh = make_mesh({"seq": 3})
    x = np.full((3, 4), 0.333984375, jnp.dtype(dtype))  # the sum, 1.002, is 1 in bfloat16
    residual = jnp.full(4, 256, jnp.bfloat16)  # whose neighbours are 2 away: 257 is 256, and 257.002 is 258
    way = functools.partial(sum_activations, residual=residual)
    found = over(mesh, ("seq",), way)(x)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, 258)


def test_over_two_axes_the_parts_are_in_the_order_of_the_axes():
    mesh, axes = make_mesh({"device": 2, "node": 3}), ("device", "node")
    x = np.arange(6.0)[:, None]
    np.testing.assert_array_equal(over(mesh, axes, gather_activations)(x), x)
    np.testing.assert_array_equal(over(mesh, axes, sum_activations)(x), [15.0])


@needs_new_jax
@pytest.mark.parametrize("way", [sum_activations, gather_activations])
@pytest.mark.parametrize(
    "sizes, axes, elements, is_by_kernel",
    [
        ({"seq": 4}, ("seq",), 4096, True),
        ({"seq": 4}, ("seq",), MAX_SENT // 3 + 1, False),  # a device sends to three
        ({"seq": 4, "batch": 2}, ("seq",), 8, False),  # XLA cannot cut a kernel over the batch
        ({"seq": 1}, ("seq",), 8, False),
    ],
)
def test_few_numbers_go_by_the_kernel_and_others_by_a_collective(way, sizes, axes, elements, is_by_kernel, monkeypatch):
    monkeypatch.setattr(peer_memory, "peer_memory", lambda groups, num_bytes: 0x5D00_0000_0000)
    monkeypatch.setattr(peer_memory, "check_platform", lambda devices: None)
    mesh = make_mesh(sizes)
    x = jax.ShapeDtypeStruct((sizes["seq"], elements), jnp.bfloat16)
    text = over(mesh, axes, way).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    found = functools.partial(re.search, string=text)
    assert bool(found(r"custom_call @mosaic_gpu")) == is_by_kernel
    assert bool(found(r"stablehlo\.all_(?:reduce|gather)")) == (not is_by_kernel)
