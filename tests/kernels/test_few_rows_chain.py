"""A chain of products of few rows in one launch: in Mosaic GPU's interpreter, and its layouts."""

import dataclasses
import functools
import operator
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from few_rows_cases import H200_SMS, Chain, Layer, chains_of_models
from lean_interpreter import interpreter, needs_interpreter

from tree_attn.kernels import (
    few_rows_broadcast,
    few_rows_chain,
    few_rows_chain_call,
    few_rows_chain_cta,
    few_rows_chain_messages,
    few_rows_cta,
    few_rows_moves,
    few_rows_norm,
    few_rows_ring,
)
from tree_attn.kernels.exchange_words import MIN_CTAS, Buffers
from tree_attn.kernels.few_rows import in_rows
from tree_attn.kernels.few_rows_chain_layout import (
    chain_bytes,
    chain_configs,
    comes_in_parts,
    num_ctas,
    receives_in_vain,
    tells_all_reads,
)
from tree_attn.kernels.few_rows_cta import CtaProduct
from tree_attn.kernels.lean_call import plan_call
from tree_attn.kernels.lean_layout import LeanConfig, partial_spans
from tree_attn.kernels.registers import RESERVED_SMEM_BYTES, WRITES_IN_PLACE
from tree_attn.kernels.targets import SMEM_BYTES_PER_SM

pytestmark = pytest.mark.usefixtures("time_limit")

CHAINS = [
    Chain(rows=3, ctas=5, intermediate=1024, adds_one=True),
    Chain(rows=9, hidden=512, ctas=2),
    Chain(rows=3, heads=(1, 2, 32)),
]


@needs_interpreter
@pytest.mark.parametrize("chain", CHAINS, ids=str)
def test_products_of_its_layouts_are_exact_and_have_no_race(chain):
    """The interpreter has no atomics: each product is a launch of its own."""
    with interpreter() as found:
        results = jax.block_until_ready(jax.jit(chain.run)(*chain.inputs()))
    assert [races.races_found for races in found] == [False] * len(chain.shapes)
    results = results if isinstance(results, tuple) else (results,)
    for result, expected in zip(results, chain.expected(), strict=True):
        assert (result.shape, result.dtype) == (expected.shape, jnp.bfloat16)
        # Rounding may differ at each product: the float64 product of rounded inputs, and the kernel's float32.
        error = np.abs(np.asarray(result, np.float64) - expected).max()
        assert error <= 4 * float(jnp.finfo(jnp.bfloat16).eps) * np.abs(expected).max()


RINGS = [
    Chain(intermediate=1024, ctas=5, smem_bytes=100 * 1024),  # few stages; tiles of several steps
    # Products have CTAs of different numbers; of the last, those of one have blocks in stacks of 4.
    Chain(hidden=640, intermediate=256, num_features=1024, ctas=20, smem_bytes=110 * 1024),
    Chain(rows=9, hidden=640, num_features=1024, ctas=20),
    Chain(rows=2, hidden=512, intermediate=512, num_features=1024, ctas=40, heads=(1, 2, 64), smem_bytes=150 * 1024),
]


def test_rings_have_all_that_layouts_have():
    _, *uneven = (chain.configs for chain in RINGS)
    assert all(len({config.num_ctas for config in configs}) > 1 for configs in uneven)
    assert all(any(config.slabs > 1 and config.stack > 1 for config in configs) for configs in uneven)
    assert max(config.stack for config in uneven[-1]) == 4


@needs_interpreter
@pytest.mark.parametrize("chain", RINGS, ids=str)
def test_products_follow_one_another_in_one_ring(chain, monkeypatch):
    """In one launch, where no product takes another's result, so that CTAs need not meet."""
    products, shapes, configs = chain.products, chain.shapes, chain.configs
    _, residual, weights, scales, heads = chain.inputs()
    inputs = [product.inputs()[0] for product in (*products, chain.append) if product is not None]
    monkeypatch.setattr(few_rows_chain_messages, "read_count", lambda *_: jnp.int32(0))
    monkeypatch.setattr(few_rows_chain_messages, "come", lambda *_: None)
    monkeypatch.setattr(few_rows_chain_messages, "meet", lambda *_: None)

    def refs_of(named, outputs, shapes):
        return [
            {"x": named["x" if number == 0 else f"x {number}"], "weights": named[f"weights {number}"]}
            | {"scale": named.get(f"scale {number}"), "residual": named["residual"]}
            | {name: named.get(name) for name in few_rows_chain_cta.HEADS}
            for number in range(len(shapes))
        ]

    monkeypatch.setattr(few_rows_chain_cta, "refs_of", refs_of)
    more = {f"x {number}": x for number, x in enumerate(inputs) if number > 0}

    def launch(x, *arrays):
        if heads is None:
            return few_rows_chain._launch(x, *arrays, shapes, configs, **more)
        *places, key, value = heads
        caches = jax.new_ref(key), jax.new_ref(value)
        named = dict(zip(few_rows_chain_cta.HEADS, (*places, *caches), strict=True))
        *results, query = few_rows_chain._launch(x, *arrays, shapes, configs, **more, **named)
        return *results, in_rows(query, shapes[-1]), *map(jax.freeze, caches)

    with interpreter() as found:
        results = jax.block_until_ready(jax.jit(launch)(inputs[0], residual, weights, scales))
    assert [races.races_found for races in found] == [False]
    wanted = []
    for number, product in enumerate(products):
        added = residual if product.shape.has_residual else None
        wanted.append(product.expected((inputs[number], weights[number], scales[number], added)))
    if heads is not None:
        wanted += chain.append.expected((inputs[-1], weights[-1], scales[-1], *heads))
    for result, expected in zip(results, wanted, strict=True):
        error = np.abs(np.asarray(result[: len(expected)], np.float64) - expected).max()
        assert error <= 4 * float(jnp.finfo(jnp.bfloat16).eps) * np.abs(expected).max()


def more_stages(configs):
    return [dataclasses.replace(config, num_stages=config.num_stages + 1) for config in configs]


@pytest.mark.parametrize("chain", chains_of_models(), ids=str)
def test_a_stage_of_one_product_is_a_stage_of_the_next(chain):
    configs = chain.configs
    assert {(config.num_stages, config.block_in, config.rows) for config in configs} == {
        (configs[0].num_stages, 128, 128)
    }
    assert (
        chain_bytes(chain.shapes, configs) <= SMEM_BYTES_PER_SM - 1024 < chain_bytes(chain.shapes, more_stages(configs))
    )
    assert configs[0].num_stages * 32 * 1024 >= 128 * 1024, "of weights on their way, for an SM"
    assert num_ctas(configs) <= H200_SMS
    for shape, config in zip(chain.shapes, configs, strict=True):
        assert config.tile * config.tiles * config.num_ctas >= shape.out_features
        assert shape.parts * config.slabs * config.stacked <= 128


def test_a_ring_has_as_many_stages_as_fit():
    """A stage more may take more than the one before, for arrays are aligned."""
    rng, room = np.random.default_rng(0), SMEM_BYTES_PER_SM - RESERVED_SMEM_BYTES
    for _ in range(300):
        sizes = dict(zip(("hidden", "intermediate", "num_features"), (128 * rng.integers(2, 100, size=3)).tolist()))
        heads = [None, (4, 4, 64), (2, 7, 128)][rng.integers(3)]
        shapes = Chain(rows=int(rng.integers(1, 17)), heads=heads, **sizes).shapes
        configs = chain_configs(shapes, H200_SMS, may_be_compact=bool(rng.integers(2)))
        assert chain_bytes(shapes, configs) <= room < chain_bytes(shapes, more_stages(configs))


def test_no_more_stages_are_on_their_way_than_there_are():
    """A barrier tells a stage's last copies from those before, and not from earlier ones."""
    shapes = Chain().shapes
    of_bytes = [chain_configs(shapes, 3, kib * 1024)[0] for kib in (80, 150, 227)]
    found = [(config.num_stages, config.in_flight) for config in of_bytes]
    assert found[0] == (2, 2) and all(stages > 2 and in_flight == 3 for stages, in_flight in found[1:])


def test_what_has_no_layout_has_a_reason():
    assert "multiple of 128, not 320" in chain_configs(Chain(num_features=320).shapes, 3)
    assert "a chain needs 2 stages" in chain_configs(Chain().shapes, 3, 50 * 1024)


def test_each_product_takes_the_one_before_and_the_residual_stream():
    shapes = Chain(heads=(1, 2, 16)).shapes
    named = {"x": "attended", "residual": "stream", "key": "cache"}
    named |= {f"weights {number}": f"W{number}" for number in range(4)} | {"scale 1": "s1", "scale 3": "s3"}
    refs = few_rows_chain_cta.refs_of(named, ["r", "gated", "y", "query"], shapes)
    of = lambda name: [product[name] for product in refs]
    assert of("x") == ["attended", "r", "gated", "y"]
    assert of("weights") == ["W0", "W1", "W2", "W3"]
    assert of("scale") == [None, "s1", None, "s3"]
    added = [product["residual"] for product, shape in zip(refs, shapes, strict=True) if shape.has_residual]
    assert added == ["stream", "r"]
    assert refs[3]["key"] == "cache"


def traced_calls(chain: Chain, monkeypatch) -> list[tuple]:
    """Traces a launch, and returns what its CTAs tell one another."""
    calls: list[tuple] = []
    monkeypatch.setattr(few_rows_chain_messages, "come", lambda _, *of: calls.append(("come", *of)))
    monkeypatch.setattr(few_rows_chain_messages, "meet", lambda _, number, before: calls.append(("meet", number)))

    def read_count(_, number):
        calls.append(("read", number))
        return jnp.int32(0)

    def settle_x(broadcast, words, smem, column, *, shape, config):
        calls.append(("receive", shape.in_features))
        return _settle_x(broadcast, words, smem, column, shape=shape, config=config)

    _settle_x = few_rows_moves.settle_x
    monkeypatch.setattr(few_rows_moves, "settle_x", settle_x)
    monkeypatch.setattr(few_rows_chain_messages, "read_count", read_count)
    shapes, configs = chain.shapes, chain.configs
    *inputs, _ = chain.inputs()
    jax.jit(lambda *arrays: few_rows_chain._launch(*arrays, shapes, configs)).trace(*inputs)
    return calls


@needs_interpreter
def test_what_the_ring_holds_of_x_is_received_and_ctas_meet_for_the_rest(monkeypatch):
    chain = Chain(hidden=2048, intermediate=8192, num_features=2048, ctas=H200_SMS)
    for module in (few_rows_chain, few_rows_chain_messages):
        monkeypatch.setattr(module, "broadcasts", lambda *_: True)
    calls = traced_calls(chain, monkeypatch)
    steps = [config.tiles * config.blocks(shape) for shape, config in zip(chain.shapes, chain.configs)]
    assert steps == [2, 16, 8]
    assert chain.configs[0].num_stages == 4, "the last two products have more steps than the ring has stages"
    ctas = num_ctas(chain.configs)
    computing = [("come", 0, ctas), ("come", 1, ctas)]
    moving = [("read", 0), ("read", 1), *[("receive", 2048)] * 4, ("meet", 0), *[("receive", 8192)] * 4, ("meet", 1)]
    assert calls == computing + moving


def test_over_devices_results_of_few_rows_are_broadcast_and_sums_and_heads_exchanged():
    buffers = Buffers(table=0, num_ranks=2, capacity=4096)
    for rows, heads, exchanges in ((1, (1, 2, 64), [0, 2, 3]), (4, None, [0, 2]), (5, None, [])):
        sizes = dict(hidden=2048, intermediate=8192, num_features=2048, ctas=H200_SMS)
        of_chain = Chain(rows=rows, heads=heads, **sizes)
        ends = [shape.has_residual or shape.heads for shape in of_chain.shapes]
        fields = dict(shapes=of_chain.shapes, configs=of_chain.configs, attention=None, named={}, outputs=())
        make = functools.partial(
            few_rows_chain_cta.CtaChain, **fields, ends=[end or None for end in ends], fulls=[], free=None, smem={}
        )
        chain = make(buffers=buffers)
        assert chain.exchanges == exchanges
        assert chain.broadcasts == list(range(len(of_chain.shapes) - 1)) * (rows <= few_rows_broadcast.MAX_ROWS)
        assert make(buffers=None).broadcasts == make(buffers=None).exchanges == []


def test_ctas_add_up_what_devices_give_where_few_words_are_that_and_none_is_read_late():
    """Heads have fewer CTAs than down. For the larger model CTAs meet before, and for the smaller they do not."""
    sizes = dict(hidden=4096, intermediate=7168, num_features=2048, heads=(4, 4, 128), ctas=H200_SMS)
    large = functools.partial(Chain, **sizes)
    small = Chain(hidden=2048, intermediate=4096, num_features=1024, heads=(4, 4, 64), ctas=H200_SMS)
    for chain, ranks, expected in (
        (large(), 2, [0, 2]), (large(rows=2), 2, [0, 2]), (large(rows=3), 2, []), (large(), 4, [0, 2]),
        (large(rows=2), 4, []), (small, 2, [0]),
    ):  # fmt: skip
        comes = functools.partial(comes_in_parts, chain.shapes, chain.configs, num_ranks=ranks)
        assert [number for number in range(4) if comes(number)] == expected
    assert not receives_in_vain(chain.shapes[3], chain.configs[3])
    even = Chain(hidden=2048, intermediate=4096, num_features=1024, heads=(8, 4, 64), ctas=128)
    assert even.configs[3].tiles * even.configs[3].blocks(even.shapes[3]) <= even.configs[3].num_stages
    assert even.configs[3].num_ctas == 96 and not comes_in_parts(even.shapes, even.configs, 2, 2)
    fewer = [dataclasses.replace(config, num_ctas=96) for config in even.configs]
    assert comes_in_parts(even.shapes, fewer, 2, 2), "each CTA has heads, and none meets another"
    *products, heads = large().shapes
    first = (heads, *products)
    assert comes_in_parts(first, chain_configs(first, H200_SMS), 1, 2), "of a whole layer the output"
    # The last CTA's last tile is empty; or two are, of which only the first is received.
    for empty in (large(hidden=256, intermediate=8576), large(hidden=256, intermediate=19072)):
        assert receives_in_vain(*(each[1] for each in (empty.shapes, empty.configs)))
        assert not comes_in_parts(empty.shapes, empty.configs, 0, 2)


def test_steps_of_what_is_sent_within_a_device_and_between_devices_are_counted_apart():
    """The numbers are the same for those who send, who receive and who count."""
    buffers = Buffers(table=0, num_ranks=2, capacity=4096)
    sizes = dict(hidden=4096, intermediate=7168, num_features=2048, heads=(4, 4, 128), ctas=H200_SMS)
    small = dict(hidden=2048, intermediate=4096, num_features=1024, heads=(4, 4, 64), ctas=H200_SMS)
    steps = few_rows_chain_messages.Steps(100, 200)
    for chain, sent, received, exchanged in (
        (Chain(**sizes), {1: 100}, {0: 200, 1: 100, 2: 201}, {0: 200, 2: 201, 3: 202}),
        (Chain(**small), {1: 100, 2: 101}, {0: 200, 1: 100, 2: 101}, {0: 200, 2: 201, 3: 202}),
        (Chain(rows=3, **sizes), {0: 100, 1: 101, 2: 102}, {0: 100, 1: 101, 2: 102}, {0: 200, 2: 201, 3: 202}),
    ):
        of_cta = few_rows_chain_cta.CtaChain(
            shapes=chain.shapes, configs=chain.configs, attention=None, buffers=buffers, named={"words": "words"},
            outputs=(), ends=[1, None, 1, 1], fulls=[], free=None, smem={},
        )  # fmt: skip
        of_each = zip(range(4), map(functools.partial(of_cta._broadcast, steps=steps), range(4)))
        assert {i: found.step for i, found in of_each if found is not None} == sent
        assert {i: of_cta._received(i, steps).step for i in range(3)} == received
        of_each = ((i, of_cta._exchange(i, steps)) for i in range(4))
        assert {i: found for i, found in of_each if found is not None} == exchanged
        assert of_cta.sent == list(sent)
        ranks = {i: of_cta._received(i, steps).buffers.num_ranks for i in received}
        assert ranks == {i: 1 if i in sent else 2 for i in received}


@pytest.mark.parametrize("batch, sizes, layout", [
    (1, dict(hidden=2048, intermediate=8192, heads=(8, 4, 64)), (6, True)),
    (2, dict(hidden=2048, intermediate=8192, heads=(8, 4, 64)), (4, False)),
    (1, {}, (5, False)),
])  # fmt: skip
def test_layers_of_the_two_models_have_the_rings_that_were_timed(monkeypatch, batch, sizes, layout):
    if jax.__version_info__ < WRITES_IN_PLACE:
        pytest.skip("a chain needs JAX 0.11")
    chosen: list = []
    choose = few_rows_chain_call.chain_configs
    monkeypatch.setattr(few_rows_chain_call, "num_sms", lambda: H200_SMS)
    monkeypatch.setattr(
        few_rows_chain_call, "chain_configs", lambda *a, **k: chosen.append(choose(*a, **k)) or chosen[-1]
    )
    layer = Layer(batch=batch, slots=8192, **sizes)
    jax.jit(layer.run).trace(*layer.array_shapes())
    ((config, *_),) = chosen
    assert (config.num_stages, config.is_compact) == layout


def test_a_layer_of_as_many_stages_as_fit_is_lowered(monkeypatch):
    """By the sizes of arrays alone one more stage would fit; each begins at a multiple of 1,024 bytes."""
    if jax.__version_info__ < WRITES_IN_PLACE:
        pytest.skip("a chain needs JAX 0.11")
    monkeypatch.setattr(few_rows_chain_call, "num_sms", lambda: H200_SMS)
    layer = Layer(batch=4, hidden=1536, intermediate=4608, slots=1024)
    jax.jit(layer.run).trace(*layer.array_shapes()).lower(lowering_platforms=("cuda",))


def test_who_receives_x_sends_something_where_x_may_be_overwritten():
    """A CTA whose last tile is empty has sent all when it receives that tile's x, and nothing waits for it."""
    products = Chain(hidden=256, intermediate=8576, num_features=256, ctas=H200_SMS, heads=(1, 2, 64))
    *others, heads = products.shapes
    assert chain_configs(products.shapes, H200_SMS)[1].tiles == 2
    tells = lambda shapes, **options: tells_all_reads(shapes, chain_configs(shapes, H200_SMS), **options)
    assert not tells(products.shapes, has_attention=False)
    assert tells(tuple(others), has_attention=False), "nothing is broadcast after down, in the place of its x"
    assert tells((heads, *others), has_attention=True), "the result of down is not broadcast"
    long = Chain(hidden=4096, intermediate=9472, num_features=4096, ctas=H200_SMS, heads=(1, 2, 64))
    assert tells(long.shapes, has_attention=False), "x of its empty tile is copied"
    wide = Chain(hidden=9216, intermediate=8192, num_features=9216, ctas=H200_SMS, heads=(1, 2, 64))
    *others, heads = wide.shapes
    assert not tells((heads, *others), has_attention=True), "all of attention's result is received"


@pytest.mark.parametrize("buffers", [None, Buffers(table=0, num_ranks=2, capacity=4096)])
def test_ctas_do_not_meet_after_heads_and_attention(buffers):
    *products, heads = Chain(heads=(1, 2, 64)).shapes
    configs = chain_configs((heads, *products), 4)
    chain = few_rows_chain_cta.CtaChain(
        shapes=(heads, *products), configs=configs, attention=types.SimpleNamespace(config=configs[0]), buffers=buffers,
        named={}, outputs=(), ends=[None] * 4, fulls=[], free=None, smem={},
    )  # fmt: skip
    assert [number for number, _ in chain.operations] == [0, None, 1, 2, 3]
    assert chain.broadcasts == [0, 1, 2, 3], "the last result is in memory only"
    assert not chain._meets(0) and not chain._meets(1)


def test_some_run_attends_with_each_head_where_nothing_is_seen():
    """Else words of heads were left unread, and a late one could hit a later word."""
    query, key = (jax.ShapeDtypeStruct((2, length, heads, 64), jnp.bfloat16) for length, heads in ((1, 4), (256, 2)))
    config = LeanConfig(block_kv=128, num_ctas=132)
    for end in ([0, 0], [256, 0]):
        spans = jnp.zeros((2, 1), jnp.int32), jnp.asarray(end, jnp.int32)[:, None]
        options = dict(num_slots=256, scale=1.0, logits_soft_cap=None)
        call = plan_call(query, key, spans, config=config, leaves_partials=True, **options)
        first, last = np.asarray(partial_spans(call.shape, config, call.tables)).T
        assert (first < last).all() and len(first) == 4


def test_a_device_sends_what_its_output_product_reads(monkeypatch):
    whole = lambda f: lambda a, b: f(int(a), int(b))
    integers = types.SimpleNamespace(
        constant=lambda _, x: x, remui=whole(operator.mod), divui=whole(operator.floordiv), index_cast=lambda _, x: x,
        cmpi=lambda _, a, b: a == b, CmpIPredicate=types.SimpleNamespace(eq=None),
    )  # fmt: skip
    nothing = types.SimpleNamespace(get=lambda: None)
    monkeypatch.setattr(few_rows_broadcast, "arith", integers)
    monkeypatch.setattr(few_rows_broadcast, "ops", types.SimpleNamespace(i64=lambda: None))
    monkeypatch.setattr(few_rows_broadcast, "ir", types.SimpleNamespace(IndexType=nothing))
    buffers = Buffers(table=0, num_ranks=2, capacity=4096)
    end = few_rows_broadcast.BroadcastEnd(buffers, 132, (8, 4, 64), num_kv_heads=4)
    assert [tile for tile in range(8) if end._is_of_rank(tile, 1)] == [2, 3, 6, 7]


def test_no_more_ctas_of_a_chain_merge_than_have_a_part_of_its_products():
    """A product of 4,608 features has 116 CTAs on 132 multiprocessors; `chain_exchange_model.py` says why."""
    buffers = Buffers(table=0, num_ranks=2, capacity=4096, num_ctas=96)
    end = few_rows_broadcast.BroadcastEnd(buffers, 132, (8, 4, 64), num_kv_heads=4)
    assert end.num_exchanging == MIN_CTAS


@pytest.mark.parametrize("columns", [64, 128])
def test_words_lie_in_shared_memory_as_copies_would(columns, monkeypatch):
    """In tiles of 8 rows and 64 columns, of whose rows of 128 bytes the hardware exchanges chunks of 16."""
    whole = lambda f: lambda a, b: f(int(a), int(b))
    integers = types.SimpleNamespace(
        addi=whole(operator.add), muli=whole(operator.mul), xori=whole(operator.xor), divui=whole(operator.floordiv),
        remui=whole(operator.mod),
    )  # fmt: skip
    monkeypatch.setattr(few_rows_broadcast, "arith", integers)
    monkeypatch.setattr(few_rows_broadcast, "ops", types.SimpleNamespace(int32=int))
    place_of = few_rows_broadcast.place_in_tiles
    places = np.array([[place_of(row, column, columns) for column in range(columns)] for row in range(24)])
    assert sorted(places.flat) == list(range(0, 24 * columns * 2, 2))
    for row, column in np.ndindex(24, columns):
        tile, chunk = row // 8 * (columns // 64) + column // 64, column % 64 // 8
        assert places[row, column] == tile * 1024 + row % 8 * 128 + (chunk ^ row % 8) * 16 + column % 8 * 2
    shape, config = Chain().shapes[0], dataclasses.replace(Chain().configs[0], block_in=columns)
    for block in range(3):
        distance, _ = few_rows_norm.distances_of(block, shape, config)
        assert (places[8 * block : 8 * block + 8] == places[:8] + distance).all()


@needs_interpreter
def test_all_ctas_come_to_each_meeting_and_read_its_count_before(monkeypatch):
    """In the order of `chain_model.py`; those without a part of a product come by the warpgroup that reads counts."""
    calls, configs = traced_calls(RINGS[1], monkeypatch), RINGS[1].configs
    ctas = num_ctas(configs)
    assert [config.num_ctas == ctas for config in configs] == [True, False, True]
    computing = [("come", 0, ctas), ("come", 1, ctas)]
    moving = [("read", 0), ("read", 1), ("meet", 0), ("come", 1, ctas), ("meet", 1)]
    assert calls == computing + moving


@needs_interpreter
def test_chains_of_a_batch_follow_one_another():
    """Their CTAs would count together: a batch is a loop of launches."""
    chain = Chain()
    batched = jax.jit(jax.vmap(chain.run, in_axes=(0, 0, None, None)))
    x, residual, weights, scales, _ = chain.inputs()
    shapes = [jax.ShapeDtypeStruct((2, *array.shape), array.dtype) for array in (x, residual)]
    text = batched.trace(*shapes, weights, scales).lower(lowering_platforms=("cuda",)).as_text()
    assert "while" in text


@needs_interpreter
def test_over_devices_sums_and_heads_end_in_exchanges_and_the_first_x_has_an_offset(monkeypatch):
    found = {}

    def recorded(**fields):
        found[fields["shape"]] = (fields["end"] is not None, fields["x_offset"] is not None)
        return CtaProduct(**fields)

    monkeypatch.setattr(few_rows_chain_cta, "CtaProduct", recorded)
    chain = Chain(heads=(2, 2, 64), ctas=20)
    caches = [jax.ShapeDtypeStruct((1, 8, 4, 64), jnp.bfloat16)] * 2  # KV heads of both devices
    x, residual, weights, scales, heads = chain.array_shapes()
    x = jax.ShapeDtypeStruct((1, 2 * chain.num_features), jnp.bfloat16)
    buffers = Buffers(table=0, num_ranks=2, capacity=4096)
    options = dict(shapes=chain.shapes, configs=chain.configs, buffers=buffers)
    run = lambda *arrays: few_rows_chain.multiply_chain(*arrays, **options)
    y, query, key, value = jax.eval_shape(run, x, residual, weights, scales, [*heads[:2], *caches], None)
    assert list(found.values()) == [(True, True), (False, False), (True, False), (True, False)]
    assert (y.shape, query.shape, key.shape) == ((1, 256), (1, 8, 64), (1, 8, 4, 64))
    assert value.shape == key.shape


def test_more_weights_are_on_their_way_when_x_is_there(monkeypatch):
    """Each step waits for weights of the step before, or for x and those of the third step before."""
    awaited = []
    monkeypatch.setattr(few_rows_ring, "copies_together", lambda: True)
    monkeypatch.setattr(few_rows_ring.pl, "when", lambda condition: lambda body: body() if condition else None)
    monkeypatch.setattr(few_rows_ring, "await_copies", lambda _, step, __: awaited.append(int(step)))
    monkeypatch.setattr(
        few_rows_ring, "await_copies_or_x", lambda _, *steps: awaited.append(tuple(map(int, steps[:-1])))
    )
    monkeypatch.setattr(few_rows_ring.Ring, "await_free", lambda *_: None)
    ring = few_rows_ring.Ring(full=[None, None], free=None, num_stages=4, in_flight=3, opens_with_x=True)
    for first_step in (0, 8):
        for step in range(6):
            dataclasses.replace(ring, first_step=first_step).await_room(jnp.int32(step))
    # Numbers are of the step before, of that of x, and of an earlier one. Of a launch's first step nothing is awaited.
    of_first = [(0, 0, 0), (1, 0, 0), (2, 0, 0), 1, 2]
    assert awaited == [*of_first, (7, 8, 5), (8, 8, 6), (9, 8, 7), (10, 8, 8), 9, 10]
    awaited.clear()
    for step in range(6):
        dataclasses.replace(ring, first_step=8, opens_with_x=False).await_room(jnp.int32(step))
    assert awaited == [7, 8, 9, 10, 9, 10]


@pytest.mark.parametrize("broadcasts", [[], [0]])
def test_rings_open_with_x_where_results_are_broadcast(broadcasts, monkeypatch):
    config = types.SimpleNamespace(is_compact=True, num_ctas=1, num_stages=4, in_flight=3)
    fields = {"operations": [(0, config)], "broadcasts": broadcasts, "refs": [None], "in_parts": []}
    for name, value in fields.items():
        monkeypatch.setattr(few_rows_chain_cta.CtaChain, name, value)
    product = lambda _, number, refs, options: types.SimpleNamespace(num_steps=1, ring=options["ring"])
    monkeypatch.setattr(few_rows_chain_cta.CtaChain, "_product", product)
    chain = few_rows_chain_cta.CtaChain(
        shapes=(None,), configs=(config,), attention=None, buffers=None, named={}, outputs=(), ends=[None],
        fulls=[None], free=None, smem={},
    )  # fmt: skip
    rings = [operation.ring for operation in chain.run(few_rows_chain_messages.Steps())]
    assert [ring.opens_with_x for ring in rings] == [bool(broadcasts)]


@pytest.mark.parametrize("end, broadcast, heads, order", [
    (True, None, None, ["send", "tell", "receive"]),
    (True, "words", None, ["send", "receive", "tell"]),
    (False, "words", None, ["write", "tell"]),
    (False, "words", "heads", ["write heads", "tell"]),
], ids=["in parts", "a sum", "of one device", "heads"])  # fmt: skip
def test_a_product_tells_when_its_last_tile_is_sent(end, broadcast, heads, order, monkeypatch):
    """The product waits for nothing where a sum comes in parts."""
    calls = []
    record = lambda name: lambda *_, **__: calls.append(name)
    config = types.SimpleNamespace(tiles=2, is_compact=True, stack=1)
    shape = types.SimpleNamespace(has_residual=False, heads=heads, columns=8)
    ring = types.SimpleNamespace(release=record("release"))
    end = types.SimpleNamespace(send=record("send"), receive=record("receive")) if end else None
    monkeypatch.setattr(few_rows_cta, "write_rows", record("write"))
    monkeypatch.setattr(few_rows_cta, "write_heads", record("write heads"))
    for name, value in {"read_places_of": (None, None), "turned": None, "turns_in_fold": True}.items():
        monkeypatch.setattr(few_rows_cta, name, lambda *_, value=value: value)
    monkeypatch.setattr(few_rows_cta, "_finish", lambda *_: None)
    monkeypatch.setattr(few_rows_cta.pl, "when", lambda condition: lambda body: body() if condition else None)
    for name in ("first_feature", "first_pair"):
        monkeypatch.setattr(few_rows_cta.CtaProduct, name, lambda *_: 0)
    monkeypatch.setattr(few_rows_cta.CtaProduct, "_compact_products", lambda *_: ([None], None))
    monkeypatch.setattr(few_rows_cta.CtaProduct, "blocks", 1)
    loop = lambda first, count, body, _: [body(tile, None) for tile in range(first, count)]
    monkeypatch.setattr(few_rows_cta.lax, "fori_loop", loop)
    product = few_rows_cta.CtaProduct(
        shape=shape, config=config, refs={"key": None, "value": None}, out_ref=None, ring=ring, weights_smem=None,
        x_smem=None, end=end, exchange_step=7, broadcast=broadcast,
    )  # fmt: skip
    product.compute(record("tell"))
    first = [call for call in order if call != "tell"]  # of two tiles
    assert calls == ["release", *first, "release", *order]
