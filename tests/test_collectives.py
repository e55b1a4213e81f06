"""Collectives of tree and ring decoding, counted as written (lowered) and as run (compiled), and their bytes.

How the bytes are compared with the paper:
  equation 14 counts elements that each device sends: 2 (p - 1) / p * (b d + 2 b n_h). States travel in float32, so
      "allreduce" must send exactly 4 bytes for each of them, whatever the dtype of keys and values.
  equation 10, 2 b t d p, is what each device sends in p hops of keys and values, in their own dtype. The public ring
      must send exactly that; ours leaves out the hop that only brings every shard home, so (p - 1) / p of it.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tree_attn import make_mesh, tree_decode
from tree_attn.cost import equations, predict, step
from tree_attn.cost.step import DecodeStep
from tree_attn.measure import hlo
from tree_attn.ring_baseline import ring_decode

N_LAYERS = 5
LOWERED, COMPILED = "lowered", "compiled"


def make_step(n_devices: int, dtype: str = "float32", **changes) -> DecodeStep:
    sizes = dict(batch=2, num_keys=24 * n_devices, num_heads=4, num_kv_heads=2, head_dim=16)
    return DecodeStep(**(sizes | changes), dtype=dtype, n_devices=n_devices)


def texts(decode, mesh, step: DecodeStep, *, n_layers: int | None = None) -> dict[str, str]:
    """HLO of one step, or of `n_layers` steps in a scan, each on its own keys and on the output of the one before."""
    axes = tuple(reversed(mesh.axis_names))  # fastest links first
    decode = functools.partial(decode, axis_name=axes, mesh=mesh, implementation="xla")

    def layers(query, key, value):
        return jax.lax.scan(lambda x, kv: (decode(x, *kv), None), query, (key, value))[0]

    leading = () if n_layers is None else (n_layers,)
    whole, sharded = NamedSharding(mesh, P()), NamedSharding(mesh, P(*(None for _ in leading), None, axes))
    query = jax.ShapeDtypeStruct((step.batch, 1, step.num_heads, step.head_dim), step.dtype, sharding=whole)
    shape = (*leading, step.batch, step.num_keys, step.num_kv_heads, step.head_dim)
    key = jax.ShapeDtypeStruct(shape, step.dtype, sharding=sharded)
    lowered = jax.jit(decode if n_layers is None else layers).lower(query, key, key)
    return {LOWERED: lowered.as_text(dialect="hlo"), COMPILED: lowered.compile().as_text()}


def tree(reduction):
    return functools.partial(tree_decode, reduction=reduction)


def ring(variant):
    return functools.partial(ring_decode, variant=variant)


def expected_counts(name: str, n_devices: int) -> dict[str, int]:
    """K and V are two permutes per hop."""
    return {
        "allreduce": {"all-reduce": 3},
        "gather": {"all-gather": 1},
        "overlapped": {"collective-permute": 2 * (n_devices - 1)},
        "public": {"collective-permute": 2 * n_devices},
    }[name]


STRATEGIES = {
    "allreduce": tree("allreduce"),
    "gather": tree("gather"),
    "overlapped": ring("overlapped"),
    "public": ring("public"),
}


@pytest.mark.parametrize("n_layers", [None, N_LAYERS])
@pytest.mark.parametrize("n_devices", [3, 8])
@pytest.mark.parametrize("name", STRATEGIES)
def test_counts(name, n_devices, n_layers):
    mesh = make_mesh({"device": n_devices})
    once = expected_counts(name, n_devices)
    expected = {opcode: count * (n_layers or 1) for opcode, count in once.items()}
    found = texts(STRATEGIES[name], mesh, make_step(n_devices), n_layers=n_layers)
    assert {which: hlo.counts(text) for which, text in found.items()} == {LOWERED: expected, COMPILED: expected}


@pytest.mark.parametrize(
    "reduction, once",
    [
        ("hierarchical", {"all-gather": 2}),
        (("gather", "allreduce"), {"all-gather": 1, "all-reduce": 3}),
    ],
)
@pytest.mark.parametrize("n_layers", [None, N_LAYERS])
def test_counts_of_two_levels(reduction, once, n_layers):
    found = texts(tree(reduction), make_mesh({"device": 4, "node": 2}), make_step(8), n_layers=n_layers)
    expected = {opcode: count * (n_layers or 1) for opcode, count in once.items()}
    assert {which: hlo.counts(text) for which, text in found.items()} == {LOWERED: expected, COMPILED: expected}


@pytest.mark.parametrize("n_devices", [3, 8])
def test_allreduce_sends_equation_14(n_devices):
    step = make_step(n_devices)
    elements = equations.tree_volume_elements(b=2, d=4 * 16, n_h=4, p=n_devices)
    for text in texts(tree("allreduce"), make_mesh({"device": n_devices}), step).values():
        assert hlo.total_bytes_sent_per_device(text) == pytest.approx(4 * elements)
    assert predict.bytes_sent_per_device(step, "tree", "allreduce") == pytest.approx(4 * elements)


@pytest.mark.parametrize("dtype, num_keys", [("bfloat16", 192), ("float32", 1920)])
def test_tree_traffic_depends_on_neither_dtype_nor_number_of_keys(dtype, num_keys):
    step = make_step(8, dtype, num_keys=num_keys)
    elements = equations.tree_volume_elements(b=2, d=4 * 16, n_h=4, p=8)
    for text in texts(tree("allreduce"), make_mesh({"device": 8}), step).values():
        assert hlo.total_bytes_sent_per_device(text) == pytest.approx(4 * elements)


@pytest.mark.parametrize("n_devices", [3, 8])
def test_gather_sends_one_packed_state_to_everyone(n_devices):
    step = make_step(n_devices)
    for text in texts(tree("gather"), make_mesh({"device": n_devices}), step).values():
        assert hlo.total_bytes_sent_per_device(text) == (n_devices - 1) * 2 * 4 * (16 + 1) * 4
    predicted = predict.bytes_sent_per_device(step, "tree", "gather")
    assert predicted == pytest.approx((n_devices - 1) * 2 * 4 * (16 + 1) * 4)


def test_hierarchical_sends_each_level_once():
    step = make_step(8)
    for text in texts(tree("hierarchical"), make_mesh({"device": 4, "node": 2}), step).values():
        sent = hlo.total_bytes_sent_per_device(text)
        assert sent == (3 + 1) * 2 * 4 * (16 + 1) * 4
        predicted = predict.bytes_sent_per_device(step, "tree", "hierarchical", axis_sizes=(4, 2))
        assert predicted == pytest.approx(sent)


@pytest.mark.parametrize("n_devices", [3, 8])
def test_rings_send_equation_10(n_devices):
    step = make_step(n_devices)
    mesh = make_mesh({"device": n_devices})
    elements = equations.ring_volume_elements(b=2, t=24, d=4 * 16, p=n_devices, d_kv=2 * 16)
    for text in texts(ring("public"), mesh, step).values():
        assert hlo.total_bytes_sent_per_device(text) == 4 * elements
    for text in texts(ring("overlapped"), mesh, step).values():
        assert hlo.total_bytes_sent_per_device(text) == pytest.approx(4 * elements * (n_devices - 1) / n_devices)
    assert predict.bytes_sent_per_device(step, "ring_public") == 4 * elements
    assert predict.bytes_sent_per_device(step, "ring_overlapped") * n_devices == 4 * elements * (n_devices - 1)


def test_rings_move_keys_and_values_in_their_own_dtype():
    """Counts as written; XLA's CPU compiler then widens 16-bit collectives to float32, which a GPU's does not."""
    text = texts(ring("overlapped"), make_mesh({"device": 8}), make_step(8, "bfloat16"))[LOWERED]
    assert {item.dtype for item in hlo.collectives(text)} == {"bf16"}
    assert hlo.total_bytes_sent_per_device(text) == 2 * 7 / 8 * equations.ring_volume_elements(
        b=2, t=24, d=4 * 16, p=8, d_kv=2 * 16
    )


@pytest.mark.parametrize("name", ["allreduce", "gather", "overlapped"])
def test_one_device_sends_nothing(name):
    for text in texts(STRATEGIES[name], make_mesh({"device": 1}), make_step(1)).values():
        assert hlo.total_bytes_sent_per_device(text) == 0


def test_float32_states_for_bfloat16_keys():
    """A narrower state would halve the traffic and bend the merged weights; the dtypes on the wire must say float32."""
    for reduction in ("allreduce", "gather"):
        text = texts(tree(reduction), make_mesh({"device": 8}), make_step(8, "bfloat16"))[LOWERED]
        assert {item.dtype for item in hlo.collectives(text)} == {"f32"}
        assert jnp.dtype("float32").itemsize == step.STATE_BYTES
