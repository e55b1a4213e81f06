"""The wrapper of the lean kernel: every variant lowers for CUDA, and what it cannot do it names. No GPU needed."""

import os
import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from assertions import assert_same_bits
from jax.experimental.mosaic.gpu.utils import BarrierRef
from jax.sharding import PartitionSpec as P
from lean_cases import Call, Fused, exchanges, more_variants, thorough, variants
from lean_launches import count_launches, num_launches

from tree_attn import Shard, attend, lean_decode, make_mesh, paged_decode, tree_decode
from tree_attn.arguments import AttentionOptions
from tree_attn.kernels import tuning
from tree_attn.local import mosaic_gpu
from tree_attn.masking import visibility
from tree_attn.state import SoftmaxState


@pytest.fixture
def anywhere(monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "unavailable", lambda: None)


@pytest.fixture
def as_on_an_h200(anywhere, monkeypatch):
    monkeypatch.setattr(tuning, "device_kind", lambda: "NVIDIA H200")


def lowered(function, *shapes) -> str:
    return jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def without_exchange(calls: list) -> list:
    return [call for call in calls if not isinstance(call, Fused)]


@pytest.mark.skipif(
    jax.__version_info__ < mosaic_gpu.OLDEST_JAX, reason="runs with JAX 0.11 or newer: no kernel runs with an older one"
)
@pytest.mark.skipif(
    "TREE_ATTN_TEST_CUDA_WHEELS" in os.environ, reason="test_lean_compiled.py counts the kernels of the same calls"
)
@pytest.mark.usefixtures("as_on_an_h200")
@pytest.mark.parametrize("call", without_exchange(variants()) + thorough(without_exchange(more_variants())), ids=str)
def test_variants_lower_to_one_kernel_and_a_merge(call):
    assert count_launches(lowered(call.run, *call.shapes())) == num_launches(call)


@pytest.mark.skipif(
    jax.__version_info__ < mosaic_gpu.OLDEST_JAX, reason="runs with JAX 0.11 or newer: no kernel runs with an older one"
)
@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("call, launches", list(zip(exchanges(), (1, 1, 1, 2, 2, 2), strict=True)), ids=str)
def test_an_exchange_ends_the_kernel_where_registers_allow(call, launches):
    assert count_launches(lowered(call.run, *call.shapes())) == launches


@pytest.mark.usefixtures("anywhere")
def test_int8_is_refused_by_name_and_passed_over():
    shape = lambda *sizes, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(sizes, dtype)
    shapes = shape(2, 1, 4, 128), *2 * (shape(2, 512, 2, 128, dtype=jnp.int8),)
    with pytest.raises(NotImplementedError, match="mosaic_gpu does not support int8 key and value"):
        jax.eval_shape(partial(attend, implementation="mosaic_gpu"), *shapes)
    assert "mosaic_gpu" not in lowered(partial(attend, implementation="xla"), *shapes)


@pytest.mark.usefixtures("anywhere")
def test_a_checked_shard_map_is_refused_by_name_and_passed_over():
    """Its types enter the kernel with the operands, and the kernel's loops do not type-check."""
    along, shape = P(None, "seq"), lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
    shapes = shape(1, 1, 4, 64), *2 * (shape(1, 512, 2, 64),), jax.ShapeDtypeStruct((1,), jnp.int32)

    def decode(implementation, check_vma=True):
        step = lambda query, key, value, lengths: tree_decode(
            query, key, value, axis_name="seq", block_size=None, key_value_seq_lengths=lengths, reduction="gather",
            implementation=implementation,
        )  # fmt: skip
        mesh, specs = make_mesh({"seq": 2}), (P(), along, along, P())
        return jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)

    with pytest.raises(NotImplementedError, match=r"mosaic_gpu does not run .* inside a shard_map with check_vma=True"):
        jax.eval_shape(decode("mosaic_gpu"), *shapes)
    assert "@mosaic_gpu" not in lowered(decode(None), *shapes)
    assert "@mosaic_gpu" in lowered(decode("mosaic_gpu", check_vma=False), *shapes)


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("keys", [512, 501])  # 251 on each device
def test_it_lowers_within_a_sharded_program(keys):
    """Shapes carry the mesh there, and jax.numpy's use of it did once not lower."""
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
    decode = partial(
        tree_decode, mesh=make_mesh({"seq": 2}), axis_name="seq", block_size=None, implementation="mosaic_gpu"
    )
    text = lowered(
        lambda query, key, value, lengths: decode(query, key, value, key_value_seq_lengths=lengths),
        shape(2, 1, 4, 128), shape(2, keys, 2, 128), shape(2, keys, 2, 128), jax.ShapeDtypeStruct((2,), jnp.int32),
    )  # fmt: skip
    assert "mosaic_gpu" in text


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("num_queries", [1, 40])
def test_no_keys_take_no_kernel(num_queries):
    """The state is empty, and so are the keys' gradients; a state to merge with stays as it is."""
    query, keys = jnp.ones((2, num_queries, 4, 64), jnp.bfloat16), jnp.ones((2, 0, 2, 64), jnp.bfloat16)
    out, lse = attend(query, keys, keys, implementation="mosaic_gpu")
    assert out.dtype == query.dtype and (out == 0).all() and (lse == -jnp.inf).all()
    arguments = dict(scale=1.0, logits_soft_cap=None, visible=visibility(
        AttentionOptions(), batch=2, num_queries=num_queries, num_slots=0, shard=Shard()
    ))  # fmt: skip
    other = SoftmaxState(query, jnp.zeros(query.shape[:3], jnp.float32))
    assert_same_bits(mosaic_gpu.attend(query, keys, keys, merge_with=other, **arguments), other)
    loss = lambda *arrays: attend(*arrays, implementation="mosaic_gpu").out.astype(jnp.float32).sum()
    gradients = jax.grad(loss, argnums=(0, 1, 2))(query, keys, keys)
    assert (gradients[0] == 0).all() and gradients[1].shape == gradients[2].shape == keys.shape


@pytest.mark.usefixtures("anywhere")
def test_small_pages_are_refused_by_name_and_passed_over_for_many_queries():
    shape = lambda *sizes, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(sizes, dtype)
    shapes = shape(2, 20, 4, 64), *2 * (shape(9, 12, 2, 64),), shape(2, 4, dtype=jnp.int32), shape(2, dtype=jnp.int32)
    with pytest.raises(NotImplementedError, match=r"pages of a multiple of 64 keys for more than 8 queries .* not 12"):
        jax.eval_shape(partial(paged_decode, implementation="mosaic_gpu"), *shapes)
    assert "@mosaic_gpu" not in lowered(paged_decode, *shapes)


@pytest.mark.usefixtures("anywhere")
def test_lengths_that_change_compile_nothing_anew():
    call, count = Call(lengths=(9, 70)), 0

    def run(*inputs):
        nonlocal count
        count += 1
        return call.run(*inputs)

    traced = jax.jit(run)
    for lengths in ((9, 70), (256, 0)):
        traced.trace(*Call(lengths=lengths).inputs())
    assert count == 1


def sizes(queries=1, heads=8, keys=64, head_dim=64, value_dim=None, dtype=jnp.bfloat16):
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, dtype)
    return shape(2, queries, heads, head_dim), shape(2, keys, 2, head_dim), shape(2, keys, 2, value_dim or head_dim)


def refusal(arrays):
    options = dict(batch=2, num_queries=arrays[0].shape[1], num_slots=arrays[1].shape[1], shard=Shard())
    return mosaic_gpu.unsupported(*arrays, logits_soft_cap=None, visible=visibility(AttentionOptions(), **options))


@pytest.mark.parametrize(
    "arrays, named",
    [
        (sizes(dtype=jnp.float32), "dtype .*not float32"),
        (sizes(head_dim=100), "head dim .*not 100"),
        (sizes(value_dim=128), "head dim .*not 64 for keys and 128 for values"),
        (sizes(queries=9, head_dim=80), "more than 8 queries .* head dim of .*, not 9 with 80"),
        (sizes(heads=34), "up to 16 query heads per key head, not 17"),
    ],
)
def test_what_it_cannot_do_is_named(arrays, named):
    assert re.search(f"mosaic_gpu .*{named}", refusal(arrays))


def test_many_queries_that_see_different_keys_are_refused():
    visible = visibility(AttentionOptions(is_causal=True), batch=2, num_queries=9, num_slots=64, shard=Shard())
    reason = mosaic_gpu.unsupported(*sizes(queries=9), logits_soft_cap=None, visible=visible)
    assert re.search("up to 8 queries per sequence, not 9, unless all of a sequence see the same keys", reason)


MANY = sizes(queries=9, heads=40)  # in groups of 20
FULL = sizes(queries=8, heads=32, head_dim=256, dtype=jnp.float16)


@pytest.mark.parametrize("arrays", [sizes(), FULL, MANY, *(sizes(keys=keys) for keys in (63, 1, 0))])
def test_what_it_can_do_is_not_refused(arrays):
    assert refusal(arrays) is None


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="runs where JAX finds no GPU")
@pytest.mark.parametrize(
    "call",
    [
        lambda q, x: attend(q, x, x, implementation="mosaic_gpu"),
        lambda q, x: lean_decode(q, x[0], x[0], jnp.array([0, 64]), implementation="mosaic_gpu"),
        lambda q, x: paged_decode(q, x, x, jnp.array([[0]]), jnp.array([64]), implementation="mosaic_gpu"),
    ],
    ids=["attend", "lean_decode", "paged_decode"],
)
def test_by_name_it_raises_where_there_is_no_hopper(call):
    arrays = jnp.ones((1, 1, 1, 64), jnp.bfloat16), jnp.ones((1, 64, 1, 64), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=r"mosaic_gpu.*cannot run.*needs an NVIDIA GPU"):
        call(*arrays)


@pytest.mark.skipif(jax.__version_info__ < mosaic_gpu.OLDEST_JAX, reason="barriers are made otherwise")
@pytest.mark.usefixtures("anywhere")
def test_every_thread_arrives_with_its_share_of_a_tile_that_is_copied_in_parts(monkeypatch):
    """A barrier counts the threads that arrive; the interpreter counts warpgroups, and sees no kernel that waits on."""
    arrivals, arrive = [], BarrierRef.arrive_expect_tx

    def note(barrier, num_bytes, **options):
        arrivals.append((num_bytes, options))
        arrive(barrier, num_bytes, **options)

    monkeypatch.setattr(BarrierRef, "arrive_expect_tx", note)
    call = Call(slots=700, lengths=(700, 3), kv_heads=1, head_dim=128)
    lowered(call.run, *call.shapes())
    of_parts = [(num_bytes, options) for num_bytes, options in arrivals if isinstance(num_bytes, int)]
    slots = {128 * num_bytes // (128 * 2) for num_bytes, _ in of_parts}
    # No more is read than 16 slots beyond the last.
    assert slots in (set(range(16, 65, 16)), set(range(16, 129, 16)))
    assert all(options.get("predicate") is None for _, options in of_parts)
