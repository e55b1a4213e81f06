"""Logical axes on mesh axes: what is refused, and what ends up where."""

import dataclasses
import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from tree_attn.measure import hlo
from tree_attn.mesh import make_mesh
from tree_attn.models.llama import (
    Generator,
    Llama,
    LlamaConfig,
    LlamaSharding,
    by_name,
    parameters,
    preset,
    spread_over,
)

COLLECTIVES = ("all-gather", "all-reduce")


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"device": 4, "node": 2})


def test_spec_follows_the_logical_axes(mesh):
    sharding = LlamaSharding(mesh=mesh, sequence=("device", "node"), mlp="device")
    assert sharding.spec("layers", "mlp", "embed") == PartitionSpec(None, "device", None)
    assert sharding.spec(None, "sequence") == PartitionSpec(None, ("device", "node"))
    assert sharding.num_shards("sequence") == 8
    assert sharding.num_shards("vocab") == 1


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"sequence": "model"}, "sequence must be one of the mesh axes .*'model'"),
        ({"sequence": "device", "mlp": "model"}, "mlp must be one of the mesh axes .*'model'"),
        ({"sequence": ("device", "device")}, "sequence must name each mesh axis once"),
        ({"sequence": None}, "sequence must name one or more .*None"),
        ({}, "sequence must be one of the mesh axes .*'seq'"),
    ],
)
def test_wrong_axes_are_refused(mesh, axes, message):
    with pytest.raises(ValueError, match=message):
        LlamaSharding(mesh=mesh, **axes)


def test_an_explicit_mesh_serves_as_the_auto_one(tiny_config):
    """`jax.make_mesh` makes Explicit axes; a model is made over them and runs."""
    mesh = jax.make_mesh((2,), ("seq",), devices=jax.devices()[:2])
    sharding = spread_over(tiny_config, mesh)
    assert sharding.mesh == make_mesh({"seq": 2})
    Llama(tiny_config, sharding, parameters.random(sharding, jnp.float32))
    with pytest.raises(TypeError, match=r"mesh must be a jax.sharding.Mesh, got dict"):
        LlamaSharding(mesh={"seq": 2})


def test_a_parameter_that_does_not_divide_is_named(tiny_config, mesh):
    sharding = LlamaSharding(mesh=mesh, sequence="device", kv_heads=("device", "node"))
    with pytest.raises(ValueError, match=r"layers.attention.query_key_value has 2 along it, which must be a multiple"):
        Llama(tiny_config, sharding, parameters.abstract(sharding, jnp.float32))


def test_spread_over_shards_what_divides_and_replicates_the_rest(tiny_config):
    on_8 = spread_over(tiny_config, make_mesh({"seq": 8}))
    on_3 = spread_over(tiny_config, make_mesh({"seq": 3}))
    on_4 = spread_over(tiny_config, make_mesh({"seq": 4}, jax.devices()[:4]))
    assert (on_8.mlp, on_8.vocab, on_8.heads) == ("seq", "seq", None)
    assert (on_4.heads, on_4.kv_heads) == ("seq", None)
    assert (on_3.mlp, on_3.vocab) == (None, None)
    assert {on_3.kv_head_dim, on_4.kv_head_dim, on_8.kv_head_dim} == {None}  # too small to be worth a gather


def test_spread_over_cuts_the_heads_of_a_large_model_where_there_are_fewer_of_keys_than_devices():
    config = dataclasses.replace(preset("llama-3.1-405b"), num_kv_heads=4)
    sharding = spread_over(config, make_mesh({"seq": 8}))
    assert (sharding.kv_heads, sharding.kv_head_dim, sharding.heads) == (None, "seq", "seq")
    attention = nnx.state(Llama(config, sharding, parameters.abstract(sharding, jnp.bfloat16)))["layers"]["attention"]
    kernel = attention["query_key_value"].get_raw_value()
    assert kernel.sharding.shard_shape(kernel.shape) == (126, 4, 32 + 2, 128 // 8, 16384)


@pytest.fixture(scope="module")
def wide_config():
    """Heads, MLP and vocabulary that 1, 2, 3 and 8 devices divide; key heads that 3 do not."""
    return LlamaConfig(
        num_layers=2, hidden_size=32, intermediate_size=48, num_heads=24, num_kv_heads=8, head_dim=4, vocab_size=48,
        max_position=64,
    )  # fmt: skip


@functools.cache
def wide_steps(config, num_devices, attention="tree"):
    """The model, its programs and the logits of every step; everything that divides is spread over the devices."""
    sharding = spread_over(config, make_mesh({"seq": num_devices}, jax.devices()[:num_devices]))
    return steps_of(config, sharding, attention)


def steps_of(config, sharding, attention="tree"):
    model = Llama(config, sharding, parameters.random(sharding, jnp.float32))
    generator = Generator(model, by_name(attention, sharding))
    prompts = [list(range(1, 12)), [7], [5, 40, 3]]
    steps = list(generator.stream(prompts, 5))
    return model, generator.compile(prompts, 5), np.stack([np.asarray(step.logits) for step in steps])


@pytest.fixture(scope="module")
def on_one_device(wide_config):
    return wide_steps(wide_config, 1, "single")[2]


@pytest.mark.slow
@pytest.mark.parametrize("num_devices, attention", [(2, "tree"), (3, "tree"), (8, "tree"), (8, "ring")])
def test_weights_by_heads_and_cache_by_sequence_give_the_logits_of_one_device(
    wide_config, on_one_device, num_devices, attention
):
    model, _, logits = wide_steps(wide_config, num_devices, attention)
    np.testing.assert_allclose(logits, on_one_device, atol=1e-5)
    shard_shapes = {
        name: kernel[...].addressable_shards[0].data.shape for name, kernel in nnx.state(model.layers.attention).items()
    }
    local_kv_heads = 8 if num_devices == 3 else 8 // num_devices
    assert shard_shapes == {
        "query_key_value": (2, local_kv_heads, 3 + 2, 4, 32),
        "output": (2, 32, 24 // num_devices, 4),
    }


@pytest.fixture(scope="module")
def biased_config(wide_config):
    """The same with the biases of Qwen2 and the norms of Qwen3."""
    return dataclasses.replace(wide_config, query_key_value_bias=True, query_key_norm=True)


@pytest.fixture(scope="module")
def biased_on_one_device(biased_config):
    return wide_steps(biased_config, 1, "single")[2]


@pytest.mark.parametrize(
    "axes",
    [
        {"heads": "seq", "kv_heads": "seq"},
        pytest.param({"heads": "model", "kv_heads": "model"}, marks=pytest.mark.slow),
        pytest.param({"kv_heads": "model", "kv_head_dim": "seq"}, marks=pytest.mark.slow),
        pytest.param({"kv_heads": "seq", "kv_head_dim": "model"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_biases_are_cut_as_their_weights_and_added_before_these_are_gathered(
    biased_config, biased_on_one_device, wide_config, axes
):
    sharding = LlamaSharding(mesh=make_mesh({"seq": 2, "model": 2}, jax.devices()[:4]), **axes)
    model, programs, logits = steps_of(biased_config, sharding)
    np.testing.assert_allclose(logits, biased_on_one_device, atol=1e-5)
    attention = model.layers.attention
    kernel, bias = (
        parameter[...].addressable_shards[0].data for parameter in (attention.query_key_value, attention.bias)
    )
    assert bias.shape == kernel.shape[:-1] and bias.size == attention.bias[...].size // 2 ** len({*axes} - {"heads"})
    assert attention.query_norm.scale[...].addressable_shards[0].data.shape == (2, biased_config.head_dim)
    if axes.get("kv_heads") == "seq" and "kv_head_dim" not in axes:
        gathered = [
            one.bytes_payload for one in hlo.collectives(programs.decode.as_text()) if one.opcode == "all-gather"
        ]
        assert max(gathered) == 4 * 3 * (24 + 8 + 8) * wide_config.head_dim, "no bias is sent"


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes",
    [
        {"heads": "seq"},
        {"kv_heads": "seq"},
        {"heads": "model"},
        {"kv_heads": "model"},
        {"heads": "model", "kv_heads": "seq"},
        {"heads": "seq", "kv_heads": "model"},
        {"heads": "seq", "kv_head_dim": "seq"},
        {"kv_heads": "model", "kv_head_dim": "seq"},
        {"kv_heads": "seq", "kv_head_dim": "model"},
        {"head_dim": "model", "mlp": "model"},
        {"embed": "model", "heads": "seq", "kv_heads": "seq", "mlp": "seq"},
    ],
    ids=str,
)
def test_any_cut_of_heads_gives_the_logits_of_one_device(wide_config, on_one_device, axes):
    sharding = LlamaSharding(mesh=make_mesh({"seq": 2, "model": 4}), **axes)
    np.testing.assert_allclose(steps_of(wide_config, sharding)[2], on_one_device, atol=1e-5)


def test_a_batch_over_devices_keeps_its_cache_there(wide_config):
    """A decoding step sends what the reduction over the sequence does, and nothing over the batch's devices."""
    by_data = make_mesh({"data": 2, "seq": 2}, jax.devices()[:4])
    whole = make_mesh({"seq": 2}, jax.devices()[:2])
    logits = []
    for sharding in (LlamaSharding(mesh=by_data, batch="data"), LlamaSharding(mesh=whole)):
        model = Llama(wide_config, sharding, parameters.random(sharding, jnp.float32))
        generator, prompts = Generator(model, by_name("tree", sharding, reduction="gather")), [[5, 40, 3], [7]]
        logits.append(np.stack([np.asarray(step.logits) for step in generator.stream(prompts, 3)]))
        sent = hlo.collectives(generator.compile(prompts, 3).decode.as_text())
        share = len(prompts) // sharding.num_shards("batch")
        states = 2 * 4 * share * wide_config.num_heads * (wide_config.head_dim + 1)
        assert [(one.opcode, one.bytes_payload) for one in sent] == [("all-gather", states)]
        level = generator.inputs.levels(generator.prefix_tree(prompts), 3)[-1]
        assert level.cache.key.addressable_shards[0].data.shape[1] == share
    np.testing.assert_allclose(*logits, atol=1e-5)


@pytest.mark.slow
def test_one_key_head_of_all_query_heads(wide_config):
    """Every device makes all queries; those are not gathered, and each multiplies the heads that it has of `output`."""
    config = dataclasses.replace(wide_config, num_kv_heads=1)
    model, programs, logits = wide_steps(config, 8)
    np.testing.assert_allclose(logits, wide_steps(config, 1, "single")[2], atol=1e-5)
    assert model.layers.attention.output[...].addressable_shards[0].data.shape == (2, 32, 24 // 8, 4)
    in_layers = [one for one in hlo.collectives(programs.decode.as_text()) if one.count == config.num_layers]
    states, update = 8 * 4 * 3 * 24 * (config.head_dim + 1), 4 * 3 * config.hidden_size
    assert sorted((one.opcode, one.bytes_payload) for one in in_layers) == [
        ("all-gather", states),
        ("all-reduce", update),
        ("all-reduce", update),
    ]


@pytest.mark.slow
def test_one_key_head_cut_over_its_dimensions_is_gathered_once_a_step(wide_config):
    config = dataclasses.replace(wide_config, num_kv_heads=1, head_dim=8)
    sharding = dataclasses.replace(spread_over(config, make_mesh({"seq": 8})), kv_head_dim="seq")
    model, programs, logits = steps_of(config, sharding)
    np.testing.assert_allclose(logits, wide_steps(config, 1, "single")[2], atol=1e-5)
    assert model.layers.attention.query_key_value[...].addressable_shards[0].data.shape == (2, 1, 24 + 2, 8 // 8, 32)
    gathered = [one for one in hlo.collectives(programs.decode.as_text()) if one.opcode == "all-gather"]
    assert 4 * 3 * (24 + 2) * config.head_dim in [one.bytes_payload for one in gathered if one.count == 2]


@pytest.mark.slow
def test_an_mlp_cut_over_other_devices_costs_a_sum_and_moves_no_kernel(wide_config, on_one_device):
    def in_layers(program):
        return Counter(
            (one.opcode, one.bytes_payload)
            for one in hlo.collectives(program.as_text())
            if one.count == wide_config.num_layers
        )

    mesh = make_mesh({"seq": 2, "model": 4})
    _, whole, _ = steps_of(wide_config, LlamaSharding(mesh=mesh))
    _, cut, logits = steps_of(wide_config, LlamaSharding(mesh=mesh, mlp="model"))
    np.testing.assert_allclose(logits, on_one_device, atol=1e-5)
    for before, after, tokens in zip(whole, cut, (12 // 2, 1), strict=True):
        assert in_layers(after) - in_layers(before) == Counter({("all-reduce", 4 * 3 * tokens * 32): 1})
        assert not in_layers(before) - in_layers(after)


@pytest.mark.slow
def test_heads_on_the_sequence_devices_cost_a_gather_of_a_tokens_heads_and_a_second_sum(wide_config):
    """Per layer of a step: the new query, key and value go to all, states are reduced, and two blocks end in a sum.

    No weights move.
    """
    _, programs, _ = wide_steps(wide_config, 8)
    in_layers = [one for one in hlo.collectives(programs.decode.as_text()) if one.count == wide_config.num_layers]
    payloads = {
        opcode: sorted(one.bytes_payload for one in in_layers if one.opcode == opcode) for opcode in COLLECTIVES
    }
    per_head = 4 * 3 * wide_config.head_dim  # of three sequences, float32
    states = 8 * 4 * 3 * 24 * (wide_config.head_dim + 1)
    assert payloads == {
        "all-gather": [(24 + 8 + 8) * per_head, states],
        "all-reduce": [4 * 3 * wide_config.hidden_size] * 2,
    }
    assert {one.opcode for one in in_layers} == set(COLLECTIVES)


@pytest.mark.slow
def test_of_tokens_and_kernels_the_fewer_gather_in_prefill(wide_config):
    """A prompt of 56 tokens is more than a kernel of the MLP, one of 8 is less."""
    kernel, logits, gathered = 4 * 48 * 32, {}, {}
    for num_devices in (1, 8):
        sharding = spread_over(wide_config, make_mesh({"seq": num_devices}, jax.devices()[:num_devices]))
        model = Llama(wide_config, sharding, parameters.random(sharding, jnp.float32))
        generator = Generator(model, by_name("tree", sharding))
        for count in (8, 56):
            prompts = [[i % 48 for i in range(count)]]
            logits[num_devices, count] = np.asarray(next(generator.stream(prompts, 2)).logits)
            payloads = [one.bytes_payload for one in hlo.collectives(generator.compile(prompts, 2).prefill.as_text())]
            gathered[num_devices, count] = 4 * count * 32 in payloads, payloads.count(kernel)
    for count in (8, 56):
        np.testing.assert_allclose(logits[8, count], logits[1, count], atol=1e-5)
    (are_tokens, few), (are_long_tokens, more) = gathered[8, 8], gathered[8, 56]
    assert are_tokens and not are_long_tokens and more >= few + 3


def test_abstract_parameters_allocate_nothing_and_say_where_they_go(mesh):
    config = preset("llama-3.1-405b")
    sharding = LlamaSharding(mesh=mesh, sequence="node", mlp="device", heads="device")
    model = Llama(config, sharding, parameters.abstract(sharding, jnp.bfloat16))
    gate_up = nnx.state(model)["layers"]["mlp"]["gate_up"].get_raw_value()
    assert isinstance(gate_up, jax.ShapeDtypeStruct)
    assert gate_up.shape == (126, 2, 53248, 16384)
    assert gate_up.sharding.shard_shape(gate_up.shape) == (126, 2, 53248 // 4, 16384)


def test_a_random_parameter_is_its_random_parts(tiny_config, mesh):
    sharding = LlamaSharding(mesh=mesh, sequence="device", kv_heads="node", mlp="device")
    declared = {}
    Llama(tiny_config, sharding, lambda one: declared.setdefault(one.name, one))
    create = parameters.random(sharding, jnp.float32)
    for name, sizes in (("layers.attention.query_key_value", [2, 1, 1]), ("layers.mlp.gate_up", [1, 1])):
        whole, parts = create(declared[name]), [create(part) for part in declared[name].apart()]
        assert [part.shape[declared[name].part_axis] for part in parts] == sizes
        np.testing.assert_array_equal(whole, np.concatenate(parts, declared[name].part_axis))
    with pytest.raises(ValueError, match=r"parts must add up to dimension 1 of shape=\(2, 3, 4\), got"):
        parameters.Parameter(name="x", shape=(2, 3, 4), axes=("mlp", None, "embed"), parts=(("a", 1), ("b", 1)))


@pytest.mark.slow
def test_weights_on_the_sequence_devices_cost_one_sum_per_layer_and_no_logits_move(tiny_model, tiny_config):
    """Greedy decoding with everything sharded: per layer one gather (attention) and one sum (MLP)."""
    model = tiny_model(8)
    generator = Generator(model, by_name("tree", model.sharding, reduction="gather"))
    counted = hlo.collectives(generator.compile([[1, 2, 3]], 4).decode.as_text())
    in_layers = [collective for collective in counted if collective.count == tiny_config.num_layers]
    assert sorted(collective.opcode for collective in in_layers) == ["all-gather", "all-reduce"]
    after_layers = [collective for collective in counted if collective.count == 1]
    full_logits_bytes = 4 * tiny_config.vocab_size
    assert all(c.bytes_payload < full_logits_bytes for c in after_layers if c.opcode == "all-gather")
