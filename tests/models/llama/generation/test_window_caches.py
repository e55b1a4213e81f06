"""Layers with a window keep their window: the tokens of whole caches, from fewer bytes, known before."""

import concurrent.futures
import dataclasses
import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tree_attn.measure.memory import bytes_per_device
from tree_attn.models.llama import Conversation, Generator, Llama, by_name, generate, parameters
from tree_attn.models.llama.generation import memory
from tree_attn.models.llama.generation.layout import Layout
from tree_attn.models.llama.generation.programs import form_of
from tree_attn.models.llama.layer_caches import LayerCaches
from tree_attn.models.llama.storage import empty_cache

WINDOW = 6
KINDS = {"alike": (), "of_two_kinds": (1,)}
# Up to several windows, and then more new tokens than a window has.
PROMPTS, COUNT = [list(range(3, 26)), [5], [9, 8, 7, 60, 2, 33, 40]], WINDOW + 2


@pytest.fixture(scope="module")
def windowed(tiny_config, sharding_over):
    """`windowed(kind, n)`: a random model of three layers, on n devices; of two kinds the middle one sees all."""

    @functools.cache
    def make(kind: str, num_devices: int = 1, window: int | None = WINDOW, unroll_layers: bool = False) -> Llama:
        config = dataclasses.replace(tiny_config, num_layers=3, window=window, global_layers=KINDS[kind])
        sharding = sharding_over(config, num_devices)
        return Llama(config, sharding, parameters.random(sharding, jnp.float32), unroll_layers=unroll_layers)

    return make


def make_generator(model, name="single", **options) -> Generator:
    return Generator(model, by_name(name, model.sharding), **options)


SCALES = {
    name: np.random.default_rng(seed).uniform(0.01, 0.03, (3, 2)).astype(np.float32)
    for seed, name in enumerate(("key_scale", "value_scale"))
}


def as_arrays(scales):
    return {name: jnp.asarray(scale) for name, scale in scales.items()}


@pytest.mark.parametrize(
    ("kind", "num_devices", "unroll_layers", "dtype"), [("of_two_kinds", 2, True, "int8"), ("alike", 1, False, None)]
)
def test_programs_are_compiled_from_the_shapes_of_what_they_run_on(
    monkeypatch, windowed, kind, num_devices, unroll_layers, dtype
):
    model = windowed(kind, num_devices, unroll_layers=unroll_layers)
    scales = {"cache_scales": as_arrays(SCALES)} if dtype else {}
    generator = make_generator(model, "tree", cache_dtype=dtype, **scales)
    tree = generator.prefix_tree(PROMPTS)
    levels, shapes = generator.inputs.levels(tree, COUNT), generator.inputs.shapes_of_levels(tree, COUNT)
    assert jax.tree.structure(levels) == jax.tree.structure(shapes)
    for array, shape in zip(jax.tree.leaves(levels), jax.tree.leaves(shapes), strict=True):
        assert isinstance(shape, jax.ShapeDtypeStruct) and (array.shape, array.dtype) == (shape.shape, shape.dtype)
        assert array.sharding.is_equivalent_to(shape.sharding, array.ndim)
    monkeypatch.setattr(generator.inputs, "levels", lambda *_: pytest.fail("a cache is allocated"))
    calls = [generator.lower(PROMPTS, count) for count in (COUNT, 2 * COUNT)]
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        programs, _ = threads.map(lambda compile_programs: compile_programs(), calls)
    assert programs.decode is generator.compile(PROMPTS, COUNT).decode


@pytest.mark.parametrize(
    ("kind", "name", "num_devices", "unroll_layers", "dtype"),
    [
        ("of_two_kinds", "single", 1, False, None),
        ("of_two_kinds", "tree", 2, True, "int8"),
        pytest.param("of_two_kinds", "tree", 3, False, "int8", marks=pytest.mark.slow),
        pytest.param("of_two_kinds", "ring", 2, False, None, marks=pytest.mark.slow),
        pytest.param("alike", "single", 1, True, None, marks=pytest.mark.slow),
        pytest.param("alike", "tree", 3, False, None, marks=pytest.mark.slow),
    ],
)
def test_steps_are_those_over_whole_caches(windowed, monkeypatch, kind, name, num_devices, unroll_layers, dtype):
    model = windowed(kind, num_devices, unroll_layers=unroll_layers)
    options = {} if dtype is None else dict(cache_dtype=dtype, cache_scales=as_arrays(SCALES))
    run = lambda: list(make_generator(model, name, **options).stream(PROMPTS, COUNT))
    steps = run()
    monkeypatch.setattr(Layout, "window_slots", lambda *_: None)
    for step, expected in zip(steps, run(), strict=True):
        np.testing.assert_array_equal(step.tokens, expected.tokens)
        np.testing.assert_allclose(step.logits, expected.logits, rtol=0, atol=1e-5)


def test_memory_is_predicted_to_the_byte_and_the_windows_layers_take_theirs(windowed):
    """Each device's bytes; beside those of the same model without windows, and those alive during a generation."""
    generator, num_devices = make_generator(windowed("of_two_kinds", 2), "tree"), 2
    predicted = memory.predict(generator, PROMPTS, 57)
    levels = generator.inputs.levels(generator.prefix_tree(PROMPTS), 57)
    capacity, slot_bytes = 80, 2 * len(PROMPTS) * 2 * 8 * 4
    counts = 5 * len(PROMPTS)  # a length and a flag of each sequence
    assert levels[0].cache.capacity == capacity
    on_first = lambda tree: sum(array.addressable_shards[0].data.nbytes for array in jax.tree.leaves(tree))
    assert predicted.cache == on_first(levels[0].cache) == (capacity + 2 * WINDOW) * slot_bytes // 2 + 2 * counts
    plain = make_generator(windowed("of_two_kinds", 2, None), "tree").inputs.levels(generator.prefix_tree(PROMPTS), 57)
    assert bytes_per_device(plain[0].cache) == 3 * capacity * slot_bytes // 2 + counts
    kept_bytes = memory.bytes_kept(generator, capacity)
    assert kept_bytes * len(PROMPTS) == (capacity + 2 * WINDOW) * slot_bytes
    assert memory.bytes_read(generator, 4) == 4 * memory.bytes_per_token(generator)

    del levels, plain
    decode = generator.compile(PROMPTS, 57).decode.memory_analysis()
    assert decode.alias_size_in_bytes >= kept_bytes * len(PROMPTS) // num_devices
    alive = lambda: (gc.collect() and 0) or sum(x.nbytes for x in jax.live_arrays() if x.ndim == 5)
    before = alive()
    stream = generator.stream(PROMPTS, 57)
    next(stream)
    next(stream)
    assert alive() - before == (capacity + 2 * WINDOW) * slot_bytes


def test_a_queue_of_prompts_shorter_and_longer_than_the_window(windowed):
    generator = make_generator(windowed("of_two_kinds"))
    prompts = [[9, 8, 7], PROMPTS[0], PROMPTS[0][::-1]]
    apart, queued = (generate(generator, prompts, COUNT, **options) for options in ({}, {"max_batch": 2}))
    assert [one.new_ids for one in queued] == [one.new_ids for one in apart]


def test_a_conversation_keeps_all_tokens_and_so_reads_only_what_is_new(windowed):
    """The programs of a generation and of a conversation stand beside each other in one generator."""
    generator = make_generator(windowed("of_two_kinds"))
    conversation = Conversation(generator, capacity=32, chunk=4)
    prompt = [*PROMPTS[2], *conversation.answer(PROMPTS[2], 6).new_ids, 5, 4, 40]
    answers = [conversation.answer(prompt, 4).new_ids, generate(generator, [prompt], 4)[0].new_ids]
    assert conversation.num_reused == len(PROMPTS[2]) + 5
    assert answers[0] == answers[1] == conversation.answer(prompt, 4).new_ids


def test_windows_that_the_shards_do_not_make_up_are_kept_with_all_other_tokens(windowed):
    layout = lambda num_devices: make_generator(windowed("alike", num_devices), "tree").layout
    assert [layout(n).window_slots(WINDOW) for n in (1, 2, 3)] == [WINDOW] * 3
    assert layout(2).window_slots(None) is layout(2).window_slots(7) is None
    assert layout(1).window_slots(12) is None, "slots for eight tokens or more come in multiples of 8"
    assert layout(2).window_slots(48) == 48


def test_scales_are_those_of_all_layers_in_their_order(windowed):
    model = windowed("of_two_kinds", 2)
    config = dataclasses.replace(model.config, global_layers=(2,))
    options = dict(batch=1, capacity=12, dtype="int8", window=WINDOW) | as_arrays(SCALES)
    for stacks_layers in (True, False):
        cache = empty_cache(config, model.sharding, **options, stacks_layers=stacks_layers)
        assert isinstance(cache, LayerCaches)
        assert (cache.whole.shape[:3], cache.windowed.shape[:3]) == ((1, 1, 12), (2, 1, WINDOW))
        for name, scale in cache.scales().items():
            np.testing.assert_array_equal(scale, SCALES[name])
    assert not isinstance(empty_cache(config, model.sharding, **options | {"window": None}), LayerCaches)


@pytest.mark.parametrize("kind", KINDS)
def test_caches_that_differ_in_capacity_or_in_what_they_keep_have_programs_of_their_own(windowed, kind):
    """Arrays may have the same shapes under two capacities."""
    empty = make_generator(windowed(kind)).inputs.empty_cache
    forms = [form_of(cache) for cache in (empty(1, 24), empty(1, 32), empty(1, 24, keeps_all=True))]
    assert len(set(forms)) == 3 and form_of(empty(1, 24)) == forms[0]


def test_tokens_come_one_at_a_time(windowed):
    model = windowed("of_two_kinds", 1)
    cache = empty_cache(model.config, model.sharding, batch=1, capacity=12, dtype=jnp.float32, window=WINDOW)
    with pytest.raises(ValueError, match="key must be one token at a time for a cache that keeps a window, got 2"):
        jax.eval_shape(lambda: model.decode(jnp.zeros((1, 2), jnp.int32), cache, by_name("single", model.sharding)))
