"""Logical axes on mesh axes: what is refused, and what ends up where."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from models.llama import Generator, Llama, LlamaSharding, by_name, parameters, preset, spread_over
from tree_attn import hlo
from tree_attn.mesh import make_mesh


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"near": 4, "far": 2})


def test_spec_follows_the_logical_axes(mesh):
    sharding = LlamaSharding(mesh=mesh, sequence=("near", "far"), mlp="near")
    assert sharding.spec("layers", "mlp", "embed") == PartitionSpec(None, "near", None)
    assert sharding.spec(None, "sequence") == PartitionSpec(None, ("near", "far"))
    assert sharding.num_shards("sequence") == 8
    assert sharding.num_shards("vocab") == 1


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"sequence": "model"}, "sequence='model': must be one of the mesh axes"),
        ({"sequence": "near", "mlp": "model"}, "mlp='model': must be one of the mesh axes"),
        ({"sequence": ("near", "near")}, "sequence=.*: must name each mesh axis once"),
        ({"sequence": None}, "sequence=None: must name one or more"),
        ({}, "sequence='sequence': must be one of the mesh axes"),
    ],
)
def test_wrong_axes_are_refused(mesh, axes, message):
    with pytest.raises(ValueError, match=message):
        LlamaSharding(mesh=mesh, **axes)


def test_a_parameter_that_does_not_divide_is_named(tiny_config, mesh):
    sharding = LlamaSharding(mesh=mesh, sequence="near", kv_heads=("near", "far"))
    with pytest.raises(ValueError, match=r"layers.attention.key has 2 along it, which must be a multiple of 8 devices"):
        Llama(tiny_config, sharding, parameters.abstract(sharding, jnp.float32))


def test_spread_over_shards_what_divides_and_replicates_the_rest(tiny_config):
    on_8 = spread_over(tiny_config, make_mesh({"sequence": 8}))
    on_3 = spread_over(tiny_config, make_mesh({"sequence": 3}))
    assert (on_8.mlp, on_8.vocab, on_8.heads) == ("sequence", "sequence", None)
    assert (on_3.mlp, on_3.vocab) == (None, None)


def test_abstract_parameters_allocate_nothing_and_say_where_they_go(mesh):
    config = preset("llama-3.1-405b")
    sharding = LlamaSharding(mesh=mesh, sequence="far", mlp="near", heads="near")
    model = Llama(config, sharding, parameters.abstract(sharding, jnp.bfloat16))
    gate = nnx.state(model)["layers"]["mlp"]["gate"].get_raw_value()
    assert isinstance(gate, jax.ShapeDtypeStruct)
    assert gate.shape == (126, 53248, 16384)
    assert gate.sharding.shard_shape(gate.shape) == (126, 53248 // 4, 16384)


def test_weights_on_the_sequence_devices_cost_one_sum_per_layer_and_no_logits_move(tiny_model, tiny_config):
    """Greedy decoding with everything sharded: per layer one gather (attention) and one sum (MLP)."""
    model = tiny_model(8)
    generator = Generator(model, by_name("tree", model.sharding, reduction="gather"))
    counted = hlo.collectives(generator.programs([[1, 2, 3]], 4).decode.as_text())
    in_layers = [collective for collective in counted if collective.count == tiny_config.num_layers]
    assert sorted(collective.kind for collective in in_layers) == ["all-gather", "all-reduce"]
    after_layers = [collective for collective in counted if collective.count == 1]
    full_logits_bytes = 4 * tiny_config.vocab_size
    assert all(c.bytes_payload < full_logits_bytes for c in after_layers if c.kind == "all-gather")
