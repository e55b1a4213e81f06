"""cuDNN's adapter: against a stand-in on any machine, against cuDNN itself where there is a CUDA GPU."""

import enum
import inspect
import re
import types
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_attention, assert_gradients, assert_same_bits
from attention_cases import KEYS, OPTIONS, SINKS, Case
from dense import dense_attention, without_padding

from tree_attn import Shard, attend, make_mesh, storage_order
from tree_attn.arguments import AttentionOptions
from tree_attn.local import cudnn, gradient
from tree_attn.masking import visibility
from tree_attn.ring_baseline import ring_attention

needs_gpu = pytest.mark.skipif(
    jax.default_backend() != "gpu", reason="runs with TREE_ATTN_TEST_GPU=1 where JAX finds a CUDA GPU"
)
UNSUPPORTED = {"logits_soft_cap", "key_scale", "value_scale"}
SUPPORTED = {name: options for name, options in OPTIONS.items() if not UNSUPPORTED & options.keys()}
LENGTHS = np.array([[KEYS, KEYS], [0, 19], [1, 36]], np.int32)


def view_of(query, key, **options):
    return visibility(
        AttentionOptions(**options),
        batch=query.shape[0],
        num_queries=query.shape[1],
        num_slots=key.shape[1],
        shard=Shard(),
    )


class MaskType(enum.Enum):
    NO_MASK, PADDING, CAUSAL, PADDING_CAUSAL = range(4)


def stand_in_attention(
    query, key, value, *, scale, return_residual, mask=None, mask_type=MaskType.NO_MASK, q_seqlen=None, kv_seqlen=None
):
    """Computes what the tests rely on in the private function.

    The result is undefined for a query that sees nothing. The residual is float32 `[B, N, T]` and passes no gradient.
    """
    assert return_residual and scale >= 0
    visible = jnp.ones((1, 1, 1, key.shape[1]), bool)
    if mask_type in (MaskType.PADDING, MaskType.PADDING_CAUSAL):
        assert q_seqlen.dtype == kv_seqlen.dtype == jnp.int32
        visible = visible & (jnp.arange(key.shape[1])[None] < kv_seqlen[:, None])[:, None, None]
    if mask_type in (MaskType.CAUSAL, MaskType.PADDING_CAUSAL):
        visible = visible & jnp.tri(query.shape[1], key.shape[1], dtype=bool)[None, None]
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    logits = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=jnp.float32) * scale
    if mask is not None:
        logits += jnp.where(mask, 0.0, -1e30)  # a bias, which leaves NaN
    logits = jnp.where(visible, logits, -1e30)
    out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits).astype(value.dtype), value)
    return out, jax.lax.stop_gradient(jax.nn.logsumexp(logits, axis=-1))


def stand_in_backward(
    query, out, of_out, key, value, lse, *, scale, mask=None, mask_type=MaskType.NO_MASK, q_seqlen=None, kv_seqlen=None
):
    """Computes what the primitive of the backward pass does, with the sums of `out` and its cotangent made here."""
    assert scale >= 0
    visible = jnp.ones((1, 1, 1, key.shape[1]), bool)
    if mask_type in (MaskType.PADDING, MaskType.PADDING_CAUSAL):
        visible = visible & (jnp.arange(key.shape[1])[None] < kv_seqlen[:, None])[:, None, None]
    if mask_type in (MaskType.CAUSAL, MaskType.PADDING_CAUSAL):
        visible = visible & jnp.tri(query.shape[1], key.shape[1], dtype=bool)[None, None]
    visible = visible if mask is None else visible & mask
    group = query.shape[2] // key.shape[2]
    query, out, of_out, key, value = (x.astype(jnp.float32) for x in (query, out, of_out, key, value))
    keys, values = (jnp.repeat(x, group, axis=2) for x in (key, value))
    logits = jnp.where(visible, jnp.einsum("btnh,bsnh->bnts", query, keys) * scale, -1e30)
    weights = jnp.exp(logits - jnp.swapaxes(lse, 1, 2)[..., None])
    sums = jnp.einsum("btnh,btnh->bnt", out, of_out)[..., None]
    of_logits = weights * (jnp.einsum("btnh,bsnh->bnts", of_out, values) - sums) * scale
    by_kv_head = lambda x: x.reshape(*x.shape[:2], -1, group, x.shape[-1]).sum(axis=3)
    of_query = jnp.einsum("bnts,bsnh->btnh", of_logits, keys)
    of_key = by_kv_head(jnp.einsum("bnts,btnh->bsnh", of_logits, query))
    return of_query, of_key, by_kv_head(jnp.einsum("bnts,btnh->bsnh", weights, of_out))


@pytest.fixture
def stand_in(monkeypatch):
    module = types.SimpleNamespace(
        MaskType=MaskType,
        dot_product_attention=stand_in_attention,
        check_cudnn_version=lambda: None,
        check_compute_capability=lambda capability: True,
    )
    monkeypatch.setattr(cudnn, "_fused_attention", lambda: module)
    monkeypatch.setattr(cudnn, "_backward_pass", stand_in_backward)
    monkeypatch.setattr(cudnn, "unavailable", lambda: None)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("options", SUPPORTED.values(), ids=SUPPORTED)
def test_adapter_does_every_supported_option(options):
    arrays = Case(dtype="bfloat16").arrays()
    call = jax.jit(lambda lengths: attend(*arrays, implementation="cudnn", key_value_seq_lengths=lengths, **options))
    for lengths in LENGTHS:
        assert_attention(call(lengths), *arrays, key_value_seq_lengths=lengths, **options)


@pytest.mark.usefixtures("cudnn_or_stand_in")
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_scale_below_zero_is_taken_to_the_query(is_causal):
    arrays = gpu_arrays()
    options = dict(scale=-0.4, is_causal=is_causal, key_value_seq_lengths=np.array([384, 201], np.int32))
    assert_attention(attend(*arrays, implementation="cudnn", **options), *arrays, **options)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"local_window_size": 5}], ids=str)
def test_values_beyond_the_lengths_do_not_matter(options):
    query, key, value = Case(dtype="bfloat16").arrays()
    lengths = np.array([19, 0], np.int32)
    dirty = [x.at[0, 19:].set(jnp.nan).at[1].set(jnp.inf) for x in (key, value)]
    call = partial(attend, implementation="cudnn", key_value_seq_lengths=lengths, **options)
    assert_attention(call(query, *dirty), query, key, value, key_value_seq_lengths=lengths, **options)


@needs_gpu
@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"local_window_size": (50, 0)}], ids=str)
def test_on_a_gpu_keys_and_values_beyond_the_lengths_do_not_matter(queries, options):
    draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
    query, key, value = draw(0, 2, queries, 4, 64), draw(1, 2, 512, 2, 64), draw(2, 2, 512, 2, 64)
    lengths = np.array([200, 3], np.int32)
    is_garbage = (np.arange(512) >= lengths[:, None])[:, :, None, None]
    clean, dirty = ([jnp.where(is_garbage, fill, x).astype(x.dtype) for x in (key, value)] for fill in (0, np.nan))
    call = partial(attend, implementation="cudnn", key_value_seq_lengths=lengths, **options)
    gradients = jax.grad(lambda *arrays: sum(x.astype(jnp.float32).sum() for x in call(*arrays)), argnums=(0, 1, 2))
    assert_same_bits(call(query, *dirty), call(query, *clean))
    assert_gradients(gradients(query, *dirty), gradients(query, *clean))


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("num_shards, block_size", [(1, None), (1, 1), (3, 1)])
def test_a_prompt_is_causal_by_the_mask_of_cudnn(num_shards, block_size, monkeypatch):
    monkeypatch.setattr(cudnn, "MAX_BIAS_ELEMENTS", 0)
    arrays = Case(queries=24, keys=24, dtype="bfloat16").arrays()
    order = storage_order(24, num_shards, block_size)
    stored = [x[:, order] for x in arrays]
    ring = jax.jit(
        partial(
            ring_attention, axis_name="seq", mesh=make_mesh({"seq": num_shards}), block_size=block_size,
            implementation="cudnn", return_lse=True,
        )
    )  # fmt: skip
    for lengths in (None, *np.array([[24, 13], [0, 5]], np.int32)):
        got = jax.tree.map(lambda x: x[:, np.argsort(order)], ring(*stored, key_value_seq_lengths=lengths))
        options = {"is_causal": True, "query_positions": np.arange(24), "key_value_seq_lengths": lengths}
        assert_attention(got, without_padding(arrays[0], lengths), *arrays[1:], **options)


RING_GRADIENTS = {
    "diagonal": (3, 1, {}),
    "one_device": (1, 1, {}),
    "bias": (3, None, {"local_window_size": 9}),
    "all_pairs_sinks": (3, 2, {"is_causal": False, "sinks": SINKS}),
}


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("has_lengths", [False, True])
@pytest.mark.parametrize("name", RING_GRADIENTS)
def test_the_gradient_of_a_ring_is_that_of_its_backward_pass(name, has_lengths, monkeypatch):
    """It runs hop by hop; no block of ours runs."""
    monkeypatch.setattr(gradient, "_over_blocks", None)
    num_shards, block_size, options = RING_GRADIENTS[name]
    arrays, order = Case(queries=24, keys=24, dtype="bfloat16").arrays(), storage_order(24, num_shards, block_size)
    lengths = np.array([24, 13], np.int32) if has_lengths else None
    weights = jnp.asarray(np.random.default_rng(1).normal(size=arrays[0].shape), jnp.float32)
    options = {"is_causal": True, "key_value_seq_lengths": lengths} | options

    def ring(*arrays):
        stored = ring_attention(
            *(x[:, order] for x in arrays), axis_name="seq", mesh=make_mesh({"seq": num_shards}),
            block_size=block_size, **options,
        )  # fmt: skip
        return stored[:, np.argsort(order)]

    dense = lambda query, *rest: dense_attention(
        without_padding(query, lengths), *rest, query_positions=np.arange(24), **options
    )[0]  # fmt: skip
    of = lambda attention: jax.grad(
        lambda *arrays: jnp.vdot(attention(*arrays).astype(jnp.float32), weights), (0, 1, 2)
    )
    expected = of(dense)(*(x.astype(jnp.float32) for x in arrays))
    for found, wanted in zip(jax.jit(of(ring))(*arrays), expected, strict=True):
        np.testing.assert_allclose(np.asarray(found, np.float32), wanted, atol=0.04 * np.abs(wanted).max())


@pytest.mark.usefixtures("stand_in")
def test_a_ring_that_returns_lse_has_the_gradient_of_lse_too():
    """cuDNN's backward pass takes lse for a constant, so blocks of ours run instead."""
    arrays = Case(queries=24, keys=24, dtype="bfloat16").arrays()
    ring = partial(ring_attention, axis_name="seq", mesh=make_mesh({"seq": 2}), block_size=None, return_lse=True)
    dense = partial(dense_attention, query_positions=np.arange(24), is_causal=True)
    of = lambda attention: jax.jit(jax.grad(lambda *arrays: jnp.sum(attention(*arrays)[1]), (0, 1)))
    expected = of(dense)(*(x.astype(jnp.float32) for x in arrays))
    for found, wanted in zip(of(ring)(*arrays), expected, strict=True):
        np.testing.assert_allclose(np.asarray(found, np.float32), wanted, atol=0.04 * np.abs(wanted).max())


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("options, block_size", [({}, 2), ({}, None), ({"local_window_size": 3}, 1)])
def test_what_the_mask_of_cudnn_cannot_say_needs_a_bias(options, block_size, monkeypatch):
    monkeypatch.setattr(cudnn, "MAX_BIAS_ELEMENTS", 0)
    arrays = Case(queries=24, keys=24, dtype="bfloat16").arrays()
    sharding = dict(axis_name="seq", mesh=make_mesh({"seq": 3}), block_size=block_size, implementation="cudnn")
    with pytest.raises(NotImplementedError, match="as a bias of B x T x S"):
        ring_attention(*arrays, **sharding, **options)


@pytest.mark.usefixtures("stand_in")
def test_adapter_without_lengths():
    arrays = Case(dtype="float16").arrays()
    assert_attention(attend(*arrays, implementation="cudnn"), *arrays)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=["padding", "causal"])
def test_gradients_include_those_of_lse(options):
    """JAX's rule for the private function drops them, and every merge of states depends on them."""
    arrays = Case().arrays()
    options = options | {"key_value_seq_lengths": np.array([0, 30], np.int32)}
    view = view_of(*arrays[:2], **options)

    def loss(attention, *arrays):
        out, lse = attention(*arrays)
        return jnp.sum(out**2) + jnp.sum(jnp.where(jnp.isneginf(lse), 0.0, lse))

    ours = partial(cudnn.attend, scale=8**-0.5, logits_soft_cap=None, visible=view)
    gradient = lambda attention: jax.jit(jax.grad(partial(loss, attention), argnums=(0, 1, 2)))(*arrays)
    assert_gradients(gradient(ours), gradient(partial(dense_attention, **options)))


def shapes(dtype=jnp.bfloat16, head_dim=64, value_dim=None, keys=16, stored_dtype=None):
    stored = lambda *shape: jax.ShapeDtypeStruct(shape, stored_dtype or dtype)
    query = jax.ShapeDtypeStruct((2, 4, 8, head_dim), dtype)
    return query, stored(2, keys, 2, head_dim), stored(2, keys, 2, value_dim or head_dim)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    "arrays, soft_cap, named",
    [
        (shapes(), 2.0, "logits_soft_cap"),
        (shapes(dtype=jnp.float32), None, "dtype .* not float32"),
        (shapes(head_dim=100), None, "head dim .* not 100"),
        (shapes(head_dim=264), None, "head dim .* 256, not 264"),
        (shapes(value_dim=32), None, "head dim .* 32 for values"),
        (shapes(keys=0), None, "S = 0"),
        (shapes(stored_dtype=jnp.float8_e4m3fn), None, "float8_e4m3fn key and value"),
    ],
)
def test_what_it_cannot_do_is_named(arrays, soft_cap, named):
    reason = cudnn.unsupported(*arrays, logits_soft_cap=soft_cap, visible=view_of(*arrays[:2]))
    assert re.search(f"cudnn .*{named}", reason)


@pytest.mark.usefixtures("stand_in")
def test_what_it_can_do_is_not_refused():
    arrays = shapes(head_dim=256)
    assert cudnn.unsupported(*arrays, logits_soft_cap=None, visible=view_of(*arrays[:2], is_causal=True)) is None


@pytest.mark.usefixtures("stand_in")
def test_a_mask_is_not_materialised_without_bound():
    prompt = [jax.ShapeDtypeStruct((1, 1 << 15, 4, 64), jnp.bfloat16)] * 3
    refuse = partial(cudnn.unsupported, *prompt, logits_soft_cap=None)
    assert "B x T x S = 1073741824" in refuse(visible=view_of(*prompt[:2], is_causal=True))
    assert refuse(visible=view_of(*prompt[:2])) is None


def test_head_dims_above_128_need_hopper(monkeypatch):
    monkeypatch.setattr(cudnn._fused_attention(), "check_compute_capability", lambda capability: False)
    arrays = shapes(head_dim=256)
    assert "up to 128" in cudnn.unsupported(*arrays, logits_soft_cap=None, visible=view_of(*arrays[:2]))


def test_the_private_function_still_takes_what_the_adapter_gives():
    """Fails when JAX moves or changes it: then `tree_attn/local/cudnn.py` must follow."""
    fused = cudnn._fused_attention()
    arrays, lengths = shapes(), jax.ShapeDtypeStruct((2,), jnp.int32)
    signature = inspect.signature(fused.dot_product_attention)
    common = {"scale": 0.5, "return_residual": True}
    signature.bind(*arrays, **common, mask_type=fused.MaskType.PADDING, q_seqlen=lengths, kv_seqlen=lengths)
    signature.bind(*arrays, **common, mask=None)
    assert callable(fused.check_cudnn_version) and callable(fused.check_compute_capability)


def test_the_backward_primitive_still_takes_what_the_adapter_gives():
    """Fails when JAX moves or changes it: then `_backward_pass` must follow."""
    fused = cudnn._fused_attention()
    taken = list(inspect.signature(fused._dot_product_attention_bwd_impl).parameters)
    arrays = "query key value bias q_seqlen kv_seqlen q_offsets kv_offsets page_table_k page_table_v activation"
    options = "scale seed dropout_rate variadic_args mask_type layout sliding_window_length"
    expected = [*arrays.split(), "fwd_output", "grad_output", *options.split()]
    if "score_mod" in taken:  # of JAX 0.12: `score_mod_args` come after the other arrays
        expected = [*arrays.split(), "fwd_output", "grad_output", "score_mod_args", *options.split(), "score_mod"]
    assert taken == expected


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"is_causal": True, "local_window_size": 5}], ids=str)
@pytest.mark.parametrize("has_lengths", [False, True])
def test_the_backward_pass_lowers_to_a_call_of_cudnn(options, has_lengths, monkeypatch):
    """For CUDA, without a GPU: lowered, and not compiled."""
    fused = cudnn._fused_attention()
    monkeypatch.setattr(fused, "check_compute_capability", lambda capability: True)
    lengths = np.array([16, 5], np.int32) if has_lengths else None
    query, key, value = shapes()
    query = jax.ShapeDtypeStruct((2, 16, 8, 64), query.dtype)
    lse = jax.ShapeDtypeStruct(query.shape[:3], jnp.float32)
    view = view_of(query, key, key_value_seq_lengths=lengths, **options)

    def call(query, key, value, out, lse, of_out):
        return cudnn.gradient(query, key, value, scale=0.1, visible=view, out=out, lse=lse, of_out=of_out)

    arrays = query, key, value, query, lse, query
    assert cudnn.gradient_unsupported(*arrays[:3], logits_soft_cap=None, visible=view) is None
    assert [x.shape for x in jax.eval_shape(call, *arrays)] == [query.shape, key.shape, value.shape]
    text = jax.jit(call).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert re.search("__cudnn\\$fmha.*Backward", text)


def test_the_private_function_still_gives_a_float32_lse_by_heads_then_queries(monkeypatch):
    """Traced, not run, so that it needs no GPU. `jax.nn` would hand on a bfloat16 lse (DESIGN, trap 1)."""
    fused = cudnn._fused_attention()
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(fused, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(fused, "is_cuda_compute_capability_equal", lambda capability: False)
    query, key, value = shapes()
    out, lse = jax.eval_shape(partial(fused.dot_product_attention, scale=0.5, return_residual=True), query, key, value)
    assert (out.shape, out.dtype) == (query.shape, jnp.bfloat16)
    assert (lse.shape, lse.dtype) == ((2, 8, 4), jnp.float32)


def gpu_arrays(dtype="bfloat16"):
    """Sizes of a real call: cuDNN has no kernel for a head dim of 8 or for 37 keys with a bias."""
    rng = np.random.default_rng(0)
    sizes = (2, 3, 4, 64), (2, 384, 2, 64), (2, 384, 2, 64)
    return [jnp.asarray(rng.normal(size=size), dtype) for size in sizes]


@needs_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("options", SUPPORTED.values(), ids=SUPPORTED)
def test_on_a_gpu_every_supported_option(options, dtype):
    arrays = gpu_arrays(dtype)
    call = jax.jit(lambda lengths: attend(*arrays, implementation="cudnn", key_value_seq_lengths=lengths, **options))
    for lengths in np.array([[384, 384], [0, 201], [1, 36]], np.int32):
        assert_attention(call(lengths), *arrays, key_value_seq_lengths=lengths, **options)
        assert_same_bits(call(lengths), call(lengths))
    assert_attention(attend(*arrays, implementation="cudnn", **options), *arrays, **options)


@pytest.fixture
def cudnn_or_stand_in(request):
    if jax.default_backend() != "gpu":
        request.getfixturevalue("stand_in")


@pytest.mark.usefixtures("cudnn_or_stand_in")
@pytest.mark.parametrize(
    "index, block_size, options",
    [
        (0, 1, {}),
        (1, 1, {"key_value_seq_lengths": np.array([384, 7], np.int32)}),
        (1, 1, {"is_causal": False, "key_value_seq_lengths": np.array([384, 1], np.int32)}),
        (1, None, {"key_value_seq_lengths": np.array([300, 7], np.int32)}),
        (0, None, {"local_window_size": (90, None)}),
        (1, 2, {"scale": 0.3}),
        (1, 2, {"scale": -0.3}),
    ],
    ids=["diagonal", "strict_lengths", "padding", "bias_unseen", "bias_window", "bias_scale", "bias_below_zero"],
)
def test_the_gradient_of_a_shard_is_that_of_blocks(index, block_size, options):
    """Takes shard 0's queries over either shard of two; cuDNN runs itself where there is a GPU."""
    draw = lambda *shape: jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    query, key, value = draw(2, 384, 4, 64), draw(2, 384, 2, 64), draw(2, 384, 2, 64)
    options = {"is_causal": True} | options
    order = storage_order(384, 2, block_size)
    wide = (x.astype(jnp.float32) for x in (query, key, value))
    dense = dense_attention(*wide, query_positions=np.arange(384), **options)
    parts = lambda x, i: x[:, order[192 * i : 192 * (i + 1)]]
    out, lse = (parts(x, 0) for x in dense)
    of_out = draw(2, 192, 4, 64).astype(jnp.float32)
    arguments = parts(query, 0), parts(key, index), parts(value, index)
    shards = [Shard(index=i, num_shards=2, block_size=block_size) for i in (index, 0)]
    of_sum = -jnp.sum(of_out * out, axis=-1)

    def found(name):
        of_name = AttentionOptions(**options, implementation=name)
        call = partial(gradient.shard_gradient, query_shard=shards[1], lse=lse, of_out=of_out, of_sum=of_sum)
        return jax.jit(lambda out: call(*arguments, of_name, shards[0], out=out))(out.astype(jnp.bfloat16))

    for ours, blocks in zip(found("cudnn")[:3], found("xla")[:3], strict=True):
        np.testing.assert_allclose(ours, blocks, atol=0.03 * max(np.abs(blocks).max(), 1e-3))


@needs_gpu
@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=["plain", "causal"])
def test_on_a_gpu_the_compiled_program_calls_cudnn(options):
    call = jax.jit(partial(attend, implementation="cudnn", **options))
    assert "__cudnn$fmha" in call.lower(*gpu_arrays()).compile().as_text()


@needs_gpu
def test_on_a_gpu_gradients_are_those_of_xla():
    def loss(name, *arrays):
        out, lse = attend(*arrays, implementation=name, is_causal=True)
        return jnp.sum(out.astype(jnp.float32) ** 2) + jnp.sum(lse)

    ours, xlas = (jax.jit(jax.grad(partial(loss, name), argnums=(0, 1, 2)))(*gpu_arrays()) for name in ("cudnn", "xla"))
    for a, b in zip(ours, xlas, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, atol=float(jnp.finfo(jnp.bfloat16).eps) * np.abs(b).max())
