"""JAX as users have it: inside their own `shard_map`, checked or not, and on meshes of every type.

Values and gradients are compared with dense attention. In an unchecked `shard_map` a gradient taken inside follows the
rule of JAX's own `psum` there (docs/conventions.md: "Gradients inside shard_map").
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_gradients
from attention_cases import SINKS
from dense import dense_attention, without_padding
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tree_attn import (
    KVCache,
    PrefixLevel,
    attention_moments,
    energy,
    hydragen_decode,
    make_mesh,
    sparq_decode,
    tree_decode,
)
from tree_attn.local import xla
from tree_attn.ring_baseline import ring_attention, ring_decode, ulysses_attention

BATCH, KEYS, HEADS, KV_HEADS, HEAD_DIM = 2, 8, 4, 2, 4
LENGTHS = np.array([7, 3], np.int32)
OPTIONS = {"key_value_seq_lengths": LENGTHS, "is_causal": True, "sinks": SINKS}
NO_SINKS = {"key_value_seq_lengths": LENGTHS, "is_causal": True}
ONE, TWO = ("seq",), ("device", "node")


def draw(num_queries: int = 2):
    """Returns query, key, value and a cotangent of the output."""
    rng = np.random.default_rng(0)
    shapes = (num_queries, HEADS), (KEYS, KV_HEADS), (KEYS, KV_HEADS), (num_queries, HEADS)
    return [jnp.asarray(rng.normal(size=(BATCH, *shape, HEAD_DIM)), jnp.float32) for shape in shapes]


def tree(reduction, **options):
    return functools.partial(tree_decode, reduction=reduction, block_size=None, **(OPTIONS | options))


def ring(variant):
    return functools.partial(ring_decode, variant=variant, block_size=None, **OPTIONS)


def sparq(selection):
    """SparQ that keeps everything, which is exact."""
    return functools.partial(
        sparq_decode, num_components=HEAD_DIM, num_keys=2 * KEYS, selection=selection, block_size=None, **NO_SINKS
    )


def as_gradient(query, key, value, **options):
    """Attention as the gradient of the energy."""
    return jax.grad(lambda source: energy(query, key, value, source, **options).sum())(jnp.zeros_like(query))


# name -> function, mesh axes, options of dense attention
CASES = {
    "tree": (tree(None), ONE, OPTIONS),
    "tree_allreduce": (tree("allreduce"), ONE, OPTIONS),
    "tree_hierarchical": (tree("hierarchical"), TWO, OPTIONS),
    "tree_tuple": (tree(("allreduce", "gather")), TWO, OPTIONS),
    "ring": (ring("overlapped"), ONE, OPTIONS),
    "ring_public": (ring("public"), ONE, OPTIONS),
    "sparq_global": (sparq("global"), ONE, NO_SINKS),
    "sparq_per_shard": (sparq("per_shard"), ONE, NO_SINKS),
    "hydragen": (lambda q, k, v, **o: hydragen_decode(q, [], k, v, block_size=None, **OPTIONS, **o), ONE, OPTIONS),
}


def axis_name(axes):
    return axes if len(axes) > 1 else axes[0]


def in_shard_map(function, axes, *, check_vma: bool, sharded_query: bool = False):
    """Returns `function(query, key, value)` in a `shard_map` of two devices per axis, and its mesh and specs."""
    mesh = make_mesh({axis: 2 for axis in axes})
    along = P(None, axes)
    specs = (along if sharded_query else P(), along, along)
    mapped = functools.partial(jax.shard_map, mesh=mesh, in_specs=specs, check_vma=check_vma)
    return mapped(functools.partial(function, axis_name=axis_name(axes)), out_specs=specs[0]), mapped, specs


def values_and_gradients(function, axes, arrays, *, check_vma: bool, sharded_query: bool = False):
    """Returns the output, and its gradients outside and inside of the `shard_map`, from one compiled program."""
    *arrays, weights = arrays
    outer, mapped, specs = in_shard_map(function, axes, check_vma=check_vma, sharded_query=sharded_query)

    def inside(query, key, value, weights):
        loss = lambda *arrays: jnp.vdot(function(*arrays, axis_name=axis_name(axes)), weights)
        total = lambda *arrays: jax.lax.psum(loss(*arrays), axes) if sharded_query else loss(*arrays)
        gradients = jax.grad(total, (0, 1, 2))(query, key, value)
        # Unchecked, each device has the gradient of its own copy of a replicated query.
        is_partial = not check_vma and not sharded_query
        return (jax.lax.psum(gradients[0], axes), *gradients[1:]) if is_partial else gradients

    @jax.jit
    def program(*arrays):
        gradient = jax.grad(lambda *arrays: jnp.vdot(outer(*arrays), weights), (0, 1, 2))
        inner = mapped(inside, in_specs=(*specs, specs[0]), out_specs=specs)
        return outer(*arrays), gradient(*arrays), inner(*arrays, weights)

    return program(*arrays)


def expected(arrays, options, *, is_prompt=False):
    *arrays, weights = arrays
    if is_prompt:
        options = options | {"query_positions": np.arange(KEYS)}
    read = lambda query: without_padding(query, LENGTHS) if is_prompt else query
    out = lambda query, *rest: dense_attention(read(query), *rest, **options)[0]
    return out(*arrays), jax.grad(lambda *arrays: jnp.vdot(out(*arrays), weights), (0, 1, 2))(*arrays)


@pytest.mark.parametrize("name", CASES)
def test_a_checked_shard_map_takes_every_function_and_gradients_are_right_on_both_sides(name):
    function, axes, options = CASES[name]
    arrays = draw()
    out, outside, inside = values_and_gradients(function, axes, arrays, check_vma=True)
    expected_out, gradients = expected(arrays, options)
    assert_gradients(out, expected_out)
    assert_gradients(outside, gradients)
    assert_gradients(inside, gradients)


@pytest.mark.parametrize("name", ["tree", "tree_allreduce", "ring", "sparq_global"])
def test_unchecked_a_gradient_inside_is_that_of_the_sum_over_devices(name):
    """p equal losses on p devices: the same rule as `psum` has there, under every reduction."""
    function, axes, options = CASES[name]
    arrays = draw()
    out, outside, inside = values_and_gradients(function, axes, arrays, check_vma=False)
    expected_out, gradients = expected(arrays, options)
    assert_gradients(out, expected_out)
    assert_gradients(outside, gradients)
    assert_gradients(inside, jax.tree.map(lambda x: 2 * x, gradients))


def test_the_rule_of_gradients_inside_is_that_of_psum():
    """JAX's own primitives alone, as docs/conventions.md states it: checked 1, unchecked p times; outside always 1."""
    mesh = make_mesh({"seq": 4})

    def ratio(collective, check_vma, is_inside):
        def mapped(f):
            return jax.shard_map(f, mesh=mesh, in_specs=P("seq"), out_specs=P("seq"), check_vma=check_vma)

        if is_inside:
            gradient = mapped(jax.grad(lambda x: collective(x).sum()))
        else:
            total = jax.shard_map(collective, mesh=mesh, in_specs=P("seq"), out_specs=P(), check_vma=check_vma)
            gradient = jax.grad(lambda x: total(x).sum())
        return jax.jit(gradient)(jnp.ones(4)).tolist()

    psum = lambda x: jax.lax.psum(x, "seq")
    assert ratio(psum, True, True) == ratio(psum, True, False) == ratio(psum, False, False) == [1.0] * 4
    assert ratio(psum, False, True) == [4.0] * 4
    # A transpose that is right inside is p times too small outside: there each device gets a p-th of the cotangent.
    once = jax.custom_vjp(psum)
    once.defvjp(lambda x: (psum(x), None), lambda _, cotangent: (cotangent,))
    assert ratio(once, False, True) == [1.0] * 4
    assert ratio(once, False, False) == [0.25] * 4


PROMPT_OPTIONS = OPTIONS | {"local_window_size": (5, None), "logits_soft_cap": 2.0}
PROMPTS = {
    "ring": (ring_attention, ONE),
    "ring_of_runs": (ring_attention, ONE),  # without a window, hops between devices take a branch each
    "ulysses": (ulysses_attention, ONE),
    "mix": (ulysses_attention, TWO),
}


@pytest.mark.parametrize(
    "name, check_vma",
    [
        ("ring", True),
        ("ring_of_runs", True),
        ("ulysses", False),
        ("mix", True),
        pytest.param("ring", False, marks=pytest.mark.slow),
        pytest.param("ring_of_runs", False, marks=pytest.mark.thorough),
        pytest.param("ulysses", True, marks=pytest.mark.slow),
        pytest.param("mix", False, marks=pytest.mark.thorough),
    ],
)
def test_prompts_in_a_shard_map(name, check_vma):
    """The output is sharded, so a loss is a sum over devices, `psum`: p times too large unchecked, as JAX has it."""
    arrays = draw(num_queries=KEYS)
    function, axes = PROMPTS[name]
    options = (OPTIONS if name == "ring_of_runs" else PROMPT_OPTIONS) | {"block_size": None}
    function = functools.partial(function, **options)
    out, outside, inside = values_and_gradients(function, axes, arrays, check_vma=check_vma, sharded_query=True)
    del options["block_size"]
    expected_out, gradients = expected(arrays, options, is_prompt=True)
    assert_gradients(out, expected_out)
    assert_gradients(outside, gradients)
    devices = 2 ** len(axes)
    assert_gradients(inside, jax.tree.map(lambda x: x if check_vma else devices * x, gradients))


def test_a_checked_shard_map_takes_chunks_of_keys_and_tiles_of_queries(monkeypatch):
    """Loops, branches and checkpoints of the backend in XLA."""
    monkeypatch.setattr(xla, "MAX_CHUNK_KEYS_ON_CPU", 3)
    monkeypatch.setattr(xla, "MAX_TILE_QUERIES", 2)
    arrays = draw(num_queries=3)
    *arrays, weights = arrays
    loss = lambda *arrays: jnp.vdot(tree(None)(*arrays, axis_name="seq"), weights)
    _, mapped, specs = in_shard_map(loss, ONE, check_vma=True)
    inside = jax.jit(mapped(jax.grad(loss, (0, 1, 2)), out_specs=specs))(*arrays)
    assert_gradients(inside, expected([*arrays, weights], OPTIONS)[1])


def test_a_checked_shard_map_takes_prefix_levels():
    query, key, value, _ = draw()
    served = PrefixLevel(key=key[:1], value=value[:1], sequences=((0, 1),))
    along = P(None, "seq")
    level = PrefixLevel(key=along, value=along, sequences=((0, 1),))
    out = jax.jit(
        jax.shard_map(
            lambda q, k, v, level: hydragen_decode(q, [level], k, v, axis_name="seq"),
            mesh=make_mesh({"seq": 2}),
            in_specs=(P(), along, along, level),
            out_specs=P(),
        )
    )(query, key, value, served)
    both = [jnp.concatenate([jnp.repeat(x[:1], 2, axis=0), x], axis=1) for x in (key, value)]
    assert_gradients(out, dense_attention(query, *both)[0])


@pytest.mark.parametrize("check_vma", [True, False])
def test_heads_left_on_their_devices_in_a_shard_map(check_vma):
    query, key, value, _ = draw()
    heads = functools.partial(tree_decode, shard_heads=True, axis_name="seq", block_size=None, **OPTIONS)
    along = P(None, "seq")
    out = jax.jit(
        jax.shard_map(
            heads, mesh=make_mesh({"seq": 2}), in_specs=(P(), along, along), out_specs=P(None, None, "seq"),
            check_vma=check_vma,
        )
    )(query, key, value)  # fmt: skip
    assert_gradients(out, dense_attention(query, key, value, **OPTIONS)[0])


def test_attention_as_a_gradient_inside_a_checked_shard_map():
    """Reverse mode by hand, and forward mode in `attention_moments`, which is right in both modes."""
    query, key, value, _ = draw()
    along, options = P(None, "seq"), dict(axis_name="seq", block_size=None, **OPTIONS)

    def both(query, key, value):
        return as_gradient(query, key, value, **options), attention_moments(query, key, value, order=1, **options)[0]

    out = jax.jit(jax.shard_map(both, mesh=make_mesh({"seq": 2}), in_specs=(P(), along, along), out_specs=(P(), P())))(
        query, key, value
    )
    expected_out = dense_attention(query, key, value, **OPTIONS)[0]
    assert_gradients(out, (expected_out, expected_out))


# The mesh and the axes of batch, sequence and heads in it.
MESHES = {
    "seq": ({"seq": 4}, P(None, "seq")),
    "data_seq": ({"data": 2, "seq": 4}, P("data", "seq")),
    "seq_data": ({"seq": 4, "data": 2}, P("data", "seq")),
    "data_model_seq": ({"data": 2, "model": 2, "seq": 2}, P("data", "seq", "model")),
}


def mesh_of(name, kind):
    sizes, spec = MESHES[name]
    devices = jax.devices()[: math.prod(sizes.values())]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes), devices=devices), spec


def every_function(levels, **where):
    """Returns functions of (query, key, value, prompt's query), each exact, by name."""
    options, plain = dict(where, block_size=None, **OPTIONS), dict(where, block_size=None, **NO_SINKS)
    return {
        "gather": lambda q, k, v, p: tree_decode(q, k, v, reduction="gather", **options),
        "allreduce": lambda q, k, v, p: tree_decode(q, k, v, reduction="allreduce", **options),
        "heads": lambda q, k, v, p: tree_decode(q, k, v, shard_heads=True, **options),
        "ring": lambda q, k, v, p: ring_decode(q, k, v, **options),
        "ring_attention": lambda q, k, v, p: ring_attention(p, k, v, **options),
        "ulysses_attention": lambda q, k, v, p: ulysses_attention(p, k, v, **options),
        "hydragen": lambda q, k, v, p: hydragen_decode(q, levels, k, v, **options),
        "sparq": lambda q, k, v, p: sparq_decode(q, k, v, num_components=HEAD_DIM, num_keys=KEYS, **plain),
        "energy": lambda q, k, v, p: as_gradient(q, k, v, **options),
        "moments": lambda q, k, v, p: attention_moments(q, k, v, 1, **options)[0],
    }


def answers(query, key, value, prompt, levels):
    """Returns what each of `every_function` must give, by dense attention."""
    decoded = dense_attention(query, key, value, **OPTIONS)[0]
    ((level,),) = (levels,)
    prefix = [jnp.stack([x[0], x[1]]) for x in (level.key, level.value)]  # node i serves sequence i
    # The prefix is seen whole, so it comes after the suffix's end: lengths and positions count it behind.
    both = [jnp.concatenate([x[:, :KEYS], y], axis=1) for x, y in zip((key, value), prefix)]
    positions = LENGTHS[:, None, None] - query.shape[1] + np.arange(query.shape[1])[None, :, None]
    sees = jnp.asarray(np.arange(KEYS)[None, None] <= positions)
    sees = jnp.concatenate([sees, jnp.ones((BATCH, query.shape[1], KEYS), bool)], axis=2)
    found = dict.fromkeys(("gather", "allreduce", "heads", "ring", "energy", "moments"), decoded)
    found["ring_attention"] = found["ulysses_attention"] = dense_attention(
        without_padding(prompt, LENGTHS), key, value, **OPTIONS, query_positions=np.arange(KEYS)
    )[0]
    found["sparq"] = dense_attention(query, key, value, **NO_SINKS)[0]
    found["hydragen"] = _masked(query, *both, sees)
    return found


def _masked(query, key, value, sees):
    key, value = (jnp.repeat(x, HEADS // KV_HEADS, axis=2) for x in (key, value))
    logits = jnp.einsum("btnh,bsnh->btns", query, key) * HEAD_DIM**-0.5
    logits = jnp.where(sees[:, :, None], logits, -jnp.inf)
    sinks = jnp.broadcast_to(SINKS[None, None, :, None], (*logits.shape[:3], 1))
    weights = jax.nn.softmax(jnp.concatenate([logits, sinks], axis=-1), axis=-1)[..., :-1]
    return jnp.einsum("btns,bsnh->btnh", weights, value)


def device_groups(line: str) -> list[list[int]]:
    """Returns the devices of each group of a collective, as a line of HLO names them in XLA's four ways."""
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", line):
        return [[int(x) for x in pair] for pair in re.findall(r"(\d+),(\d+)", pairs.group(1))]
    if listed := re.search(r"replica_groups=\{(\{.*?\})\}", line):
        return [[int(x) for x in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", listed.group(1))]
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        sizes = [int(x) for x in iota.group(3).split(",")]
        order = [int(x) for x in iota.group(4).split(",")] if iota.group(4) else range(len(sizes))
        devices = np.arange(math.prod(sizes)).reshape(sizes).transpose(order)
        return devices.reshape(int(iota.group(1)), int(iota.group(2))).tolist()
    named = re.search(r"replica_groups=(?:@?\w+)?\[(.*?)\] \{(.*?)\}", line)
    sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", named.group(1))}
    over = [list(sizes).index(axis) for axis in re.findall(r"'(\w+)'", named.group(2))]
    devices = np.arange(math.prod(sizes.values())).reshape(list(sizes.values()))
    devices = np.moveaxis(devices, over, range(-len(over), 0))
    return devices.reshape(-1, math.prod(devices.shape[-len(over) :])).tolist()


def axes_of_collectives(text: str, mesh) -> dict[str, set[str]]:
    """Returns for each kind of collective in a compiled program the mesh axes that any of them runs over."""
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        match = re.search(r" (all-\w+(?:-\w+)?|collective-permute|reduce-scatter)(?:-start)?\(", line)
        if match and "groups=" in line + "groups=" * ("source_target_pairs" in line):
            axes = found.setdefault(match.group(1), set())
            for group in device_groups(line):
                places = np.array(np.unravel_index(group, mesh.devices.shape))
                axes |= {axis for axis, row in zip(mesh.axis_names, places) if len(set(row)) > 1}
    return found


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=["explicit", "auto"])
@pytest.mark.parametrize(
    "name", ["seq", "data_seq", pytest.param("seq_data", marks=pytest.mark.slow), "data_model_seq"]
)
def test_meshes_of_one_to_three_axes_take_every_function_and_send_over_the_sequence_only(name, kind):
    """Arrays are sharded over batch and heads too. Auto axes of the batch are named, those of heads are not used."""
    mesh, spec = mesh_of(name, kind)
    is_auto = kind == AxisType.Auto
    spec = P(*spec[:2]) if is_auto else spec
    where = {"axis_name": "seq"} | ({"batch_axis_name": "data"} if is_auto and "data" in name else {})
    query, key, value, _ = draw()
    prompt = draw(num_queries=KEYS)[0]
    placed = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    along, of_query = P(*spec), P(spec[0], None, *spec[2:])
    of_level = P(None, *spec[1:])
    level = PrefixLevel(key=key[::-1], value=value, sequences=((0,), (1,)))
    placed_level = PrefixLevel(key=placed(key[::-1], of_level), value=placed(value, of_level), sequences=((0,), (1,)))

    def program(query, key, value, prompt, level):
        return {n: f(query, key, value, prompt) for n, f in every_function([level], **where).items()}

    arrays = placed(query, of_query), placed(key, along), placed(value, along), placed(prompt, along), placed_level
    with jax.set_mesh(mesh):
        compiled = jax.jit(program).lower(*arrays).compile()
        found = compiled(*arrays)
    for n, expected_out in answers(query, key, value, prompt, [level]).items():
        assert_gradients(found[n], expected_out)
    over = axes_of_collectives(compiled.as_text(), mesh)
    assert set().union(*over.values()) == {"seq"}, over
    is_all_mapped = not (is_auto and "model" in name)  # else XLA has an axis, and a gather is a sum among zeros
    assert set(over) >= {"all-reduce", "collective-permute"} | ({"all-gather"} if is_all_mapped else set())


def test_an_auto_batch_that_nobody_names_is_not_gathered():
    """`tree_decode` by gather, and both rings: XLA shards the batch, and sends nothing over its axis."""
    mesh, spec = mesh_of("data_seq", AxisType.Auto)
    query, key, value, _ = draw()
    options = dict(axis_name="seq", mesh=mesh, block_size=None)

    def program(query, key, value, prompt):
        return (
            tree_decode(query, key, value, reduction="gather", **options),
            tree_decode(query, key, value, shard_heads=True, **options),
            ring_decode(query, key, value, **options),
            ring_attention(prompt, key, value, **options),
            ulysses_attention(prompt, key, value, **options),
        )

    specs = P("data"), spec, spec, spec
    prompt = draw(num_queries=KEYS)[0]
    arrays = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip((query, key, value, prompt), specs)]
    compiled = jax.jit(program).lower(*arrays).compile()
    over = axes_of_collectives(compiled.as_text(), mesh)
    assert over == {"all-reduce": {"seq"}, "collective-permute": {"seq"}}
    decoded = dense_attention(query, key, value)[0]
    prompts = dense_attention(prompt, key, value, is_causal=True)[0]
    expected_out = (decoded, decoded, decoded, prompts, prompts)
    assert_gradients(compiled(*arrays), expected_out)


def test_a_sequence_on_one_device_beside_an_auto_batch():
    """XLA refuses a bare sum over a mapped axis of one device there."""
    mesh = jax.make_mesh((2, 1), ("data", "seq"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:2])
    query, key, value, weights = draw()
    prompt = draw(num_queries=KEYS)[0]
    level = PrefixLevel(key=key[::-1], value=value, sequences=((0,), (1,)))
    placed = lambda x: jax.device_put(x, NamedSharding(mesh, P("data")))
    functions = every_function([level], axis_name="seq", mesh=mesh)

    def program(query, key, value, prompt):
        loss = lambda *arrays: jnp.vdot(functions["allreduce"](*arrays, prompt), weights)
        decoded = {name: function(query, key, value, prompt) for name, function in functions.items()}
        return decoded, jax.grad(loss, (0, 1, 2))(query, key, value)

    found, gradients = jax.jit(program)(*map(placed, (query, key, value, prompt)))
    for name, expected_out in answers(query, key, value, prompt, [level]).items():
        assert_gradients(found[name], expected_out)
    assert_gradients(gradients, expected((query, key, value, weights), OPTIONS)[1])


@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("name", ["tree_allreduce", "ring"])
def test_ones_own_shard_map_over_one_device_beside_an_auto_batch(name, check_vma):
    function, _, options = CASES[name]
    mesh = jax.make_mesh((2, 1), ("data", "seq"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:2])
    query, key, value, _ = draw()
    along = P(None, "seq")
    mapped = jax.shard_map(
        functools.partial(function, axis_name="seq"),
        mesh=mesh, axis_names={"seq"}, in_specs=(P(), along, along), out_specs=P(), check_vma=check_vma,
    )  # fmt: skip
    arrays = [jax.device_put(x, NamedSharding(mesh, P("data"))) for x in (query, key, value)]
    assert_gradients(jax.jit(mapped)(*arrays), dense_attention(query, key, value, **options)[0])


@pytest.mark.parametrize("name", ["tree", "ring_attention", "ulysses_attention"])
def test_gradients_on_an_explicit_mesh_are_sharded_as_the_arrays(name):
    mesh, spec = mesh_of("data_seq", AxisType.Explicit)
    is_prompt = name != "tree"
    arrays = draw(num_queries=KEYS) if is_prompt else draw()
    of_query = spec if is_prompt else P("data")
    placed = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, (of_query, spec, spec, of_query))]
    prompt = {"ring_attention": ring_attention, "ulysses_attention": ulysses_attention}
    function = functools.partial(prompt[name], block_size=None, **OPTIONS) if is_prompt else tree(None)

    def loss(query, key, value, weights):
        return (function(query, key, value, axis_name="seq", mesh=mesh) * weights).sum()

    gradients = jax.jit(jax.grad(loss, (0, 1, 2)))(*placed)
    assert_gradients(gradients, expected(arrays, OPTIONS, is_prompt=is_prompt)[1])
    assert [jax.typeof(x).sharding.spec for x in gradients] == [jax.typeof(x).sharding.spec for x in placed[:3]]


@pytest.mark.parametrize("name", ["gather", "ring_attention", "hydragen", "sparq", "moments"])
def test_eager_calls_place_plain_arrays_on_an_explicit_mesh(name):
    mesh = jax.make_mesh((2,), ("seq",), devices=jax.devices()[:2])
    query, key, value, _ = draw()
    prompt = draw(num_queries=KEYS)[0]
    levels = [PrefixLevel(key=key[::-1], value=value, sequences=((0,), (1,)))]
    out = every_function(levels, axis_name="seq", mesh=mesh)[name](query, key, value, prompt)
    assert_gradients(out, answers(query, key, value, prompt, levels)[name])


def test_eager_gradients_of_plain_keys_that_an_explicit_mesh_does_not_divide():
    mesh = jax.make_mesh((2,), ("seq",), devices=jax.devices()[:2])
    query, key, value, weights = draw()
    operands = query, key[:, :-1], value[:, :-1]
    out, pull = jax.vjp(functools.partial(tree_decode, axis_name="seq", mesh=mesh, block_size=None), *operands)
    expected_out, gradients = expected((*operands, weights), {})
    assert_gradients(out, expected_out)
    assert_gradients(pull(weights), gradients)


@pytest.mark.parametrize("bound", ["data", "seq"])
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=["explicit", "auto"])
def test_a_shard_map_over_one_of_two_axes(bound, check_vma, kind):
    """The other is left to the function: the sequence, or a batch that is sharded over an Explicit or Auto axis."""
    mesh, _ = mesh_of("data_seq", kind)
    arrays = draw()
    *inputs, weights = arrays
    specs = [P(*(axis if axis == bound else None for axis in spec)) for spec in (("data",), ("data", "seq"))]
    specs = specs[0], specs[1], specs[1]
    rest = [("data",), ("data", "seq"), ("data", "seq")]
    placed = [jax.device_put(x, NamedSharding(mesh, P(*spec))) for x, spec in zip(inputs, rest)]
    lengths = jax.device_put(LENGTHS, NamedSharding(mesh, P("data")))

    def decode(query, key, value, lengths):
        options = OPTIONS | {"key_value_seq_lengths": lengths}
        return tree_decode(query, key, value, axis_name="seq", block_size=None, **options)

    mapped = jax.shard_map(
        decode, mesh=mesh, axis_names={bound}, in_specs=(*specs, specs[0]), out_specs=specs[0], check_vma=check_vma
    )

    def loss(*arrays):
        return (mapped(*arrays, lengths) * weights).sum()

    with jax.set_mesh(mesh):
        # Jitted: JAX 0.10 runs no unchecked `shard_map` over a part of the axes eagerly.
        out, gradients = jax.jit(mapped)(*placed, lengths), jax.jit(jax.grad(loss, (0, 1, 2)))(*placed)
    expected_out, expected_gradients = expected(arrays, OPTIONS)
    assert_gradients(out, expected_out)
    assert_gradients(gradients, expected_gradients)


def test_a_cache_whose_batch_is_sharded_is_attended_to_without_its_axis():
    mesh = make_mesh({"seq": 4, "data": 2})
    cache = KVCache.create(
        batch=BATCH, capacity=KEYS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=jnp.float32, mesh=mesh,
        axis_name="seq", batch_axis_name="data",
    )  # fmt: skip
    query, key, value, _ = draw()
    cache = cache.append(key, value)
    compiled = jax.jit(KVCache.attend).lower(cache, query).compile()
    assert axes_of_collectives(compiled.as_text(), mesh) == {"all-gather": {"seq"}}
    assert_gradients(compiled(cache, query), dense_attention(query, key, value)[0])
