"""The model and its generation: prefill against decode, ragged batches, placements, stops, and what is refused."""

import dataclasses
import gc
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tree_attn.cache import KVCache
from tree_attn.measure.memory import bytes_per_device
from tree_attn.models.llama import (
    Generator,
    Llama,
    LlamaSharding,
    Sampling,
    by_name,
    generate,
    parameters,
    stream_queue,
)
from tree_attn.models.llama.generation import memory
from tree_attn.models.llama.generation.int8_scales import cache_scales
from tree_attn.sparq import SparqOptions

PROMPTS = [list(range(3, 20)), [5], [9, 8, 7, 60, 2, 33]]


@pytest.fixture(scope="module")
def expected(tiny_model):
    """New tokens of the prompts on one device."""
    return new_ids(tiny_model(1), "single")


def new_ids(model, name, prompts=PROMPTS, count=6, **options) -> list[list[int]]:
    generator = Generator(model, by_name(name, model.sharding, **options))
    return [result.new_ids for result in generate(generator, prompts, count)]


def empty_cache(model, batch: int, capacity: int) -> KVCache:
    return KVCache.create(
        batch=batch,
        capacity=capacity,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        dtype=jnp.float32,
        mesh=model.sharding.mesh,
        axis_name=model.sharding.sequence,
        num_layers=model.config.num_layers,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_devices", "options"),
    [("tree", 8, {"reduction": "allreduce"}), ("ring", 3, {})],
)
def test_attentions_that_are_not_compared_with_transformers_give_the_same_tokens(
    tiny_model, expected, name, num_devices, options
):
    """test_llama_parity has the others: tree by gather on 8 and on 3 devices, ring on 8."""
    assert new_ids(tiny_model(num_devices), name, **options) == expected


def test_a_sequence_does_not_depend_on_its_batch(tiny_model, expected):
    model = tiny_model(1)
    assert [new_ids(model, "single", [prompt])[0] for prompt in PROMPTS] == expected


@pytest.mark.parametrize(("name", "num_devices"), [("tree", 8), ("ring", 3), ("single", 1)])
def test_prefill_equals_decoding_the_prompt_token_by_token_or_in_pieces(tiny_model, name, num_devices):
    model = tiny_model(num_devices)
    attention = by_name(name, model.sharding)
    tokens = np.array([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]], np.int32)
    # To any multiple of the shards; what it is padded with must not matter.
    padded = np.pad(tokens, ((0, 0), (0, 24 - tokens.shape[1])), constant_values=63)
    order = attention.storage_order(24)
    prefill = jax.jit(lambda *args: model.prefill(*args, attention, all_logits=True))
    whole, cache = prefill(padded[:, order.positions], jnp.array([11], jnp.int32), empty_cache(model, 1, 24))
    whole = np.asarray(whole)[:, order.indices][:, :11]
    assert cache.lengths.tolist() == [11]

    decode = jax.jit(lambda tokens, cache: model.decode(tokens, cache, attention))
    cache, pieces = empty_cache(model, 1, 24), []
    for start, stop in ((0, 1), (1, 2), (2, 6), (6, 11)):
        logits, cache = decode(tokens[:, start:stop], cache)
        pieces.append(np.asarray(logits))
    assert cache.lengths.tolist() == [11]
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), whole, rtol=0, atol=1e-5)


def test_generation_ends_at_a_stop_token_which_is_not_returned(tiny_model, expected):
    model = tiny_model(1)
    generator = Generator(model, by_name("single", model.sharding))
    heard = []
    stop = expected[0][2]
    (result,) = generate(generator, PROMPTS[:1], 6, stop_ids=[stop], on_token=lambda *token: heard.append(token))
    first = expected[0].index(stop)
    assert result.stopped
    assert result.new_ids == expected[0][:first]
    assert heard == [(0, token) for token in result.new_ids]
    (unstopped,) = generate(generator, PROMPTS[:1], 6)
    assert not unstopped.stopped
    assert unstopped.prefill_s > 0
    assert unstopped.per_token_s > 0


def test_a_seed_draws_the_same_tokens_and_another_seed_others(tiny_model):
    model = tiny_model(1)

    def drawn(seed: int) -> list[int]:
        sampling = Sampling(temperature=1.0, top_k=30, top_p=0.95, seed=seed)
        return generate(Generator(model, by_name("single", model.sharding), sampling), [[1, 2, 3]], 12)[0].new_ids

    assert drawn(0) == drawn(0) != drawn(1)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, top_k=30, top_p=0.95, seed=3)])
def test_an_interrupted_generation_goes_on_with_the_same_tokens(tiny_model, sampling):
    model = tiny_model(8)
    generator = Generator(model, by_name("tree", model.sharding), sampling)
    whole = [result.new_ids for result in generate(generator, PROMPTS, 12)]
    for count in (0, 1, 5, 11):
        heard = []
        done = [ids[:count] for ids in whole]
        again = generate(generator, PROMPTS, 12, done=done, on_token=lambda *token, heard=heard: heard.append(token))
        assert [result.new_ids for result in again] == whole
        assert [result.prompt_ids for result in again] == PROMPTS
        assert heard == [(row, whole[row][step]) for step in range(count, 12) for row in range(3)]


def test_several_tokens_per_dispatch_and_unrolled_layers_change_nothing(tiny_model, tiny_config):
    model = tiny_model(1)
    unrolled = Llama(tiny_config, model.sharding, parameters.moved(model, model.sharding), unroll_layers=True)
    sampling = Sampling(temperature=1.0, seed=3)
    steps = {}
    for at_once, one in ((1, model), (3, unrolled)):
        generator = Generator(one, by_name("single", one.sharding), sampling, tokens_per_dispatch=at_once)
        steps[at_once] = list(generator.stream(PROMPTS, 6))  # one by prefill, three, and two of the next three
    assert len({step.seconds for step in steps[3][1:4]}) == 1, "of one call"

    def loops(model):
        decode = jax.jit(lambda tokens, cache: model.decode(tokens, cache, by_name("single", model.sharding)))
        return decode.lower(jnp.ones((1, 1), jnp.int32), empty_cache(model, 1, 8)).as_text().count("while")

    assert loops(model) > loops(unrolled) == 0
    for a, b in zip(steps[1], steps[3], strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_allclose(a.logits, b.logits, atol=1e-5)
        np.testing.assert_allclose(a.log_probabilities, b.log_probabilities, atol=1e-5)
    with pytest.raises(ValueError, match="tokens_per_dispatch must be an integer of at least 1, got 0"):
        Generator(model, by_name("single", model.sharding), tokens_per_dispatch=0)


def test_a_float8_cache_takes_a_quarter_of_float32_and_changes_logits_a_little(tiny_model, cache_bytes):
    model = tiny_model(8)
    steps, num_bytes = {}, {}
    for dtype in (None, jnp.float8_e4m3fn):
        generator = Generator(model, by_name("tree", model.sharding), cache_dtype=dtype)
        steps[dtype] = [np.asarray(step.logits) for step in generator.stream(PROMPTS, 2)]
        num_bytes[dtype] = cache_bytes(generator, PROMPTS, 2)
    assert num_bytes[None] == 4 * num_bytes[jnp.float8_e4m3fn]
    whole, narrow = steps.values()
    np.testing.assert_array_equal(whole[0], narrow[0])  # prompts are read in full precision
    with pytest.raises(ValueError, match=r"cache_dtype must be one of 'float32', .*'int8', got 'bfloat16'"):
        Generator(model, by_name("tree", model.sharding), cache_dtype=jnp.bfloat16)
    assert 1e-4 < np.abs(whole[1] - narrow[1]).max() < 0.2 * np.abs(whole[1]).max()


@pytest.mark.slow
def test_an_int8_cache_gives_what_attention_to_the_multiples_of_its_scales_gives(tiny_model, monkeypatch):
    """A float32 cache that is given those multiples gives the same logits to within rounding, wherever keys are."""
    model = tiny_model(1)
    scales = cache_scales(model, by_name("single", model.sharding))
    prompts = [[*range(3, 25), *rest] for rest in ([5], [9, 8, 7, 60, 2, 33])]

    def logits(name, num_devices, share_prefixes=False, **options) -> list[np.ndarray]:
        model = tiny_model(num_devices)
        generator = Generator(model, by_name(name, model.sharding), **options)
        return [np.asarray(step.logits) for step in generator.stream(prompts, 4, share_prefixes=share_prefixes)]

    def rounded(write):
        def to_multiples(cache, key, value, layer=None, **where):
            key, value = (
                jnp.clip(jnp.round(x / scale), -127, 127) * scale
                for x, scale in (
                    (key, scales["key_scale"][layer, :, None]),
                    (value, scales["value_scale"][layer, :, None]),
                )
            )
            return write(cache, key, value, layer=layer, **where)

        return to_multiples

    with monkeypatch.context() as patch, jax.numpy_rank_promotion("allow"):
        for write in ("write", "write_prefix"):
            patch.setattr(KVCache, write, rounded(getattr(KVCache, write)))
        expected = logits("single", 1)
    int8 = dict(cache_dtype="int8", cache_scales=scales)
    np.testing.assert_allclose(logits("tree", 3, **int8), expected, atol=1e-5)
    shared = logits("single", 1, share_prefixes=True, **int8)  # the remainders are read over int8 too
    assert 1e-5 < np.abs(np.array(shared) - expected).max() < 0.05 * np.abs(expected).max()


def test_scales_are_of_the_largest_keys_and_values_and_for_int8_alone(tiny_model):
    model = tiny_model(1)
    attention = by_name("single", model.sharding)
    tokens = np.arange(12, dtype=np.int32)
    scales = cache_scales(model, attention, tokens=tokens, margin=1.5)
    _, cache = model.prefill(tokens[None], jnp.array([12], jnp.int32), empty_cache(model, 1, 12), attention)
    for name, array in (("key_scale", cache.key), ("value_scale", cache.value)):
        np.testing.assert_allclose(scales[name], 1.5 / 127 * np.abs(array).max(axis=(1, 2, 4)), rtol=1e-5)
    with pytest.raises(ValueError, match="cache_scales must be None for cache_dtype='float32': only int8 has them"):
        Generator(model, attention, cache_scales=scales)
    with pytest.raises(ValueError, match="tokens must be one or more, and margin positive, got 12 tokens and margin=0"):
        cache_scales(model, attention, tokens=tokens, margin=0)


@pytest.mark.parametrize("name, num_devices", [("tree", 8), ("single", 1)])
def test_prefill_in_chunks_changes_nothing(tiny_model, name, num_devices):
    model = tiny_model(num_devices)
    attention = by_name(name, model.sharding)
    prompts = [list(range(3, 60)), [5], [9, 8, 7] * 8, list(range(30))]  # the last two end with a chunk, and within one
    lengths = []
    spy = dataclasses.replace(
        attention, prefill=lambda query, *rest: lengths.append(query.shape[1]) or attention.prefill(query, *rest)
    )
    whole, chunked = Generator(model, attention), Generator(model, spy, prefill_chunk=24)
    steps = [list(generator.stream(prompts, 3, share_prefixes=False)) for generator in (whole, chunked)]
    for a, b in zip(*steps, strict=True):
        np.testing.assert_allclose(a.logits, b.logits, atol=1e-5)
    assert set(lengths) == {24}


@pytest.mark.slow
def test_chunks_after_a_shared_prefix(tiny_model):
    model = tiny_model(3)
    prompts = [[*range(3, 33), *rest] for rest in (range(20), [7, 1], range(40, 43))]
    logits = []
    for chunk, share in ((None, False), (6, True)):
        generator = Generator(model, by_name("tree", model.sharding), prefill_chunk=chunk)
        logits.append([np.asarray(step.logits) for step in generator.stream(prompts, 2, share_prefixes=share)])
    np.testing.assert_allclose(*logits, atol=1e-5)


def test_chunks_that_do_not_fit_are_refused(tiny_model):
    model = tiny_model(3)
    with pytest.raises(ValueError, match="prefill_chunk must be a multiple of 3 shards, got 10"):
        Generator(model, by_name("tree", model.sharding), prefill_chunk=10)
    with pytest.raises(NotImplementedError, match="prefill_chunk=6: attention='ring' reads prompts whole"):
        Generator(model, by_name("ring", model.sharding), prefill_chunk=6)


@pytest.mark.parametrize("done", [[[1], [2]], [[1], [2, 3], [4]], [[1, 2, 3]] * 3])
def test_what_cannot_go_on_is_refused(tiny_model, done):
    model = tiny_model(1)
    generator = Generator(model, by_name("single", model.sharding))
    with pytest.raises(ValueError, match=r"done must hold equally many new tokens for each of 3 prompts, fewer than"):
        generate(generator, PROMPTS, 3, done=done)


def test_the_program_does_not_grow_with_the_depth(tiny_config, sharding_over):
    def num_lines(num_layers: int) -> int:
        config = dataclasses.replace(tiny_config, num_layers=num_layers)
        sharding = sharding_over(config, 1)
        model = Llama(config, sharding, parameters.random(sharding, jnp.float32))
        generator = Generator(model, by_name("single", sharding))
        return generator.compile([[1, 2]], 2).decode.as_text().count("\n")

    # XLA writes loops of different lengths a little differently; a layer of its own would be some hundred lines.
    assert num_lines(9) < 1.05 * num_lines(2)


def test_a_profile_reads_like_the_source(tiny_model):
    model = tiny_model(8)
    text = Generator(model, by_name("tree", model.sharding)).compile([[1, 2]], 2).decode.as_text()
    for scope in ("/embed/", "/layers/", "/attention/rope/", "/attention/attend/", "/mlp/", "/head/", "/choose/"):
        assert scope in text


def test_the_decode_step_updates_its_cache_in_place(tiny_model, tiny_config):
    model = tiny_model(8)
    generator = Generator(model, by_name("tree", model.sharding))
    analysis = generator.compile([[1, 2, 3]], 61).decode.memory_analysis()
    keys_and_values = 2 * tiny_config.num_layers * 64 // 8 * tiny_config.num_kv_heads * tiny_config.head_dim * 4
    assert analysis.alias_size_in_bytes >= keys_and_values


@pytest.mark.slow
def test_what_is_predicted_to_be_held_is_what_is_alive(tiny_model):
    model, options = tiny_model(3), dict(share_prefixes=True)
    generator = Generator(model, by_name("tree", model.sharding))
    prompts = [[*range(3, 20), *rest] for rest in ([5], [9, 8, 7])]
    predicted, programs = memory.predict(generator, prompts, 7, **options), generator.compile(prompts, 7, **options)

    def alive() -> int:
        gc.collect()
        device = model.sharding.mesh.devices.flat[0]
        shards = [shard for array in jax.live_arrays() for shard in array.addressable_shards if shard.device == device]
        return sum({shard.data.unsafe_buffer_pointer(): shard.data.nbytes for shard in shards}.values())

    before = alive()
    stream = generator.stream(prompts, 7, **options)
    next(stream)
    logits = next(stream).logits
    results = bytes_per_device(logits) + 4 * len(prompts)  # log-probabilities, kept by the generation besides
    # Results of two steps: after the first token the next one runs, with a few integers of each sequence.
    assert 0 <= alive() - before - (predicted.cache + predicted.inputs + 2 * results) <= 16 * len(prompts)
    parameters_held = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert predicted.weights == sum(array.addressable_shards[0].data.nbytes for array in parameters_held)
    # XLA drops arguments that are not read: a few integers of each sequence, as the token before the first one.
    assert 0 <= predicted.held - programs.prefill.memory_analysis().argument_size_in_bytes <= 64
    needs = [getattr(programs, phase).memory_analysis() for phase in ("prefill", "decode")]
    temporaries = [need.temp_size_in_bytes for need in needs]
    assert predicted.held + max(temporaries) < predicted.peak < predicted.held + max(temporaries) + 2 * results + 1024


def test_xla_options_of_decoding_on_gpus_depend_on_the_batch_and_devices(tiny_model, monkeypatch):
    on_one, on_two = (Generator(tiny_model(n), by_name("tree", tiny_model(n).sharding)) for n in (1, 2))
    assert on_one.programs.xla_options(17) == {}
    monkeypatch.setattr(LlamaSharding, "is_on_gpus", True)
    always = {"xla_gpu_enable_dynamic_slice_fusion": False}
    by_cublas = {"xla_gpu_enable_triton_gemm": False}
    side_by_side = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
    assert on_one.programs.xla_options(16) == always | side_by_side
    assert on_one.programs.xla_options(17) == on_one.programs.xla_options(128) == always | by_cublas | side_by_side
    assert on_one.programs.xla_options(129) == always | by_cublas
    assert on_two.programs.xla_options(1) == always  # kernels that exchange would wait for one another


@pytest.mark.slow
@pytest.mark.parametrize("dtype, batch", [(jnp.float32, 1), (jnp.bfloat16, 3)])
def test_a_step_multiplies_once_by_the_kernels_of_one_operand_as_they_lie(tiny_config, tiny_model, dtype, batch):
    config = dataclasses.replace(tiny_config, intermediate_size=56, vocab_size=80)
    sharding = tiny_model(1).sharding
    model = Llama(config, sharding, parameters.random(sharding, dtype))
    generator = Generator(model, by_name("single", sharding))

    def shapes(program, *kinds) -> list[tuple[int, ...]]:
        found = re.findall(rf"= \w+\[([\d,]+)\]\S* (?:{'|'.join(kinds)})\(", program.as_text())
        return [tuple(map(int, dims.split(","))) for dims in found]

    long, short = (generator.compile([[1] * count] * batch, 3) for count in (60, 3))
    for program in (long.prefill, short.decode):
        widths = sorted(shape[1] for shape in shapes(program, "dot") if len(shape) == 2)  # attention's have more
        assert widths == sorted([(4 + 2 + 2) * 8, 32, 2 * 56, 32, 80]), "query, key and value; output; MLP; head"
    smallest = min(math.prod(kernel.shape[1:]) for kernel in jax.tree.leaves(nnx.state(model.layers.attention)))
    moved = shapes(short.decode, "copy", "transpose", "concatenate")
    assert moved and max(map(math.prod, moved)) < smallest


def test_the_first_token_is_read_before_more_is_launched_and_then_one_call_is_ahead(tiny_model, monkeypatch):
    generator = Generator(tiny_model(1), by_name("single", tiny_model(1).sharding))
    programs, launched = generator.compile([[1, 2, 3]], 4), []
    decode = lambda *args, **options: launched.append(1) or programs.decode(*args, **options)
    monkeypatch.setattr(generator.programs, "of_tree", lambda *args: programs._replace(decode=decode))
    stream = generator.stream([[1, 2, 3]], 4)
    assert [(next(stream) and len(launched)) for _ in range(4)] == [0, 2, 3, 3]


def test_a_call_makes_several_tokens_by_default_on_gpus_only(tiny_model, monkeypatch):
    model = tiny_model(1)
    make = lambda **options: Generator(model, by_name("single", model.sharding), **options).tokens_per_dispatch
    assert make() == 1
    monkeypatch.setattr(LlamaSharding, "is_on_gpus", True)
    assert make() == 8 and make(tokens_per_dispatch=1) == 1


def test_slots_come_in_the_multiples_of_kernels_where_that_pads_little(tiny_model):
    sharding = tiny_model(3).sharding
    tree, sparq = (
        by_name("tree", sharding),
        by_name("sparq", sharding, sparq=SparqOptions(num_components=4, num_keys=8)),
    )
    assert [tree.slot_multiple(3 * count) for count in (7, 8, 4096)] == [1, 8, 8]
    assert [sparq.slot_multiple(3 * count) for count in (7, 8, 4095, 4096)] == [1, 8, 8, 512]


def test_a_step_that_fails_does_not_take_the_one_before_with_it(tiny_model, monkeypatch):
    model = tiny_model(1)
    generator, calls = Generator(model, by_name("single", model.sharding)), []
    programs = generator.compile([[1, 2, 3]], 6)

    def decode(*args, **options):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return programs.decode(*args, **options)

    monkeypatch.setattr(generator.programs, "of_tree", lambda *_: programs._replace(decode=decode))
    tokens = []
    with pytest.raises(RuntimeError, match="out of memory"):
        for step in generator.stream([[1, 2, 3]], 6):
            tokens.append(step.tokens)
    assert len(tokens) == 2 and len(calls) == 2


@pytest.mark.slow
def test_bfloat16_weights_give_float32_logits(tiny_config, sharding_over):
    sharding = sharding_over(tiny_config, 8)
    model = Llama(tiny_config, sharding, parameters.random(sharding, jnp.bfloat16))
    steps = list(Generator(model, by_name("tree", sharding)).stream([[1, 2, 3]], 2))
    assert all(step.logits.dtype == jnp.float32 for step in steps)
    assert all(bool(jnp.all(jnp.isfinite(step.logits))) for step in steps)


@pytest.mark.parametrize(
    ("prompts", "max_new_tokens", "message"),
    [
        ([], 4, "prompts must be one or more"),
        ([[1], []], 4, r"of one or more tokens each, got \[1, 0\]"),
        ([[1]], 0, "max_new_tokens must be 1 or more, got 0"),
        (
            [[1] * 100],
            29,
            r"at most 28 with a prompt of 100 tokens, got 29; the model has 128 positions",
        ),
        ([[1, 64]], 4, r"token ids must be in \[0, 64\), got 1 to 64"),
        ([[-1, 3]], 4, r"token ids must be in \[0, 64\), got -1 to 3"),
    ],
)
def test_wrong_requests_are_refused_before_anything_is_compiled(tiny_model, prompts, max_new_tokens, message):
    model = tiny_model(1)
    generator = Generator(model, by_name("single", model.sharding))
    with pytest.raises(ValueError, match=message):
        generator.stream(prompts, max_new_tokens)
    assert not generator.programs._compiled


@pytest.mark.parametrize(
    ("name", "num_devices", "options", "message"),
    [
        ("flash", 8, {}, "attention must be one of 'tree', 'ring', 'single', 'sparq', got 'flash'"),
        ("ring", 8, {"reduction": "gather"}, "attention='ring' does not reduce across devices"),
        ("single", 8, {}, "attention='single' keeps all keys on one device: the sequence must have 1, got 8"),
        ("tree", 8, {"reduction": "star"}, "reduction must be one of .*'star'"),
        ("tree", 8, {"reduction": "hierarchical"}, "reduction='hierarchical' needs"),
        ("tree", 8, {"implementation": "abacus"}, "implementation must be one of .*'abacus'"),
    ],
)
def test_wrong_attentions_are_refused(tiny_config, sharding_over, name, num_devices, options, message):
    with pytest.raises(ValueError, match=message):
        by_name(name, sharding_over(tiny_config, num_devices), **options)


def test_the_reduction_that_will_run_can_be_read(tiny_config, sharding_over):
    assert by_name("tree", sharding_over(tiny_config, 8)).reduction is None
    assert by_name("ring", sharding_over(tiny_config, 8)).reduction is None


QUEUE = [[5], [9, 8, 7, 60, 2, 33], [1, 2, 3, 4], [40, 2, 7, 7, 7], [9, 8, 7, 60, 2, 33]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, num_devices, sampling, options",
    [
        ("single", 1, Sampling(), {}),
        ("tree", 3, Sampling(temperature=1.0, top_p=0.95, seed=3), {"tokens_per_dispatch": 3, "prefill_chunk": 3}),
    ],
)
def test_a_queue_gives_every_prompt_the_tokens_that_it_gets_with_the_others_at_hand(
    tiny_model, name, num_devices, sampling, options
):
    model = tiny_model(num_devices)
    attention = by_name(name, model.sharding)
    generator, other = (Generator(model, attention, sampling, **extra) for extra in (options, {}))
    apart = generate(other, QUEUE, 8)
    assert (apart[1].new_ids == apart[4].new_ids) == (sampling.temperature == 0), "draws of one prompt are apart"
    # Stops a sequence at its first token, one in the middle and leaves some to their limit.
    stop_ids = {apart[0].new_ids[0], apart[1].new_ids[3]}
    whole = generate(other, QUEUE, 8, stop_ids=stop_ids)
    assert {one.stopped for one in whole} == {True, False} and whole[0].new_ids == []
    heard: list[tuple[int, int]] = []
    queued = generate(generator, QUEUE, 8, stop_ids=stop_ids, max_batch=2, on_token=lambda *one: heard.append(one))
    for a, b in zip(whole, queued, strict=True):
        assert (a.prompt_ids, a.new_ids, a.stopped) == (b.prompt_ids, b.new_ids, b.stopped)
        assert a.log_probability == pytest.approx(b.log_probability, abs=1e-4)
        assert b.prefill_s > 0
    for sequence, one in enumerate(queued):
        assert [token for index, token in heard if index == sequence] == one.new_ids
    # One program for the steps, and one for each padded length of a prompt.
    lengths = {num_devices * 2 ** math.ceil(math.log2(math.ceil(len(prompt) / num_devices))) for prompt in QUEUE}
    assert len(generator.programs._compiled) <= 1 + len(lengths)
    num_programs = len(generator.programs._compiled)
    steps = [step.sequences for step in stream_queue(generator, QUEUE, 8, max_batch=2, stop_ids=stop_ids)]
    assert len(generator.programs._compiled) == num_programs
    assert {len(step) for step in steps} == {1, 2}
    for sequence, one in enumerate(queued):
        assert sum(index == sequence for step in steps for index in step) == len(one.new_ids) + one.stopped
    last_admission = max(i for i, step in enumerate(steps) if len(step) == 1)
    idle = [step for step in steps[:last_admission] if None in step]
    assert generator.tokens_per_dispatch > 1 or not idle, "while prompts wait, no slot is idle but within a dispatch"


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"max_batch": 0}, ValueError, "max_batch must be an integer of at least 1, got 0"),
        ({"max_batch": 1.5}, ValueError, "max_batch must be an integer of at least 1, got 1.5"),
        (
            {"max_batch": 2, "share_prefixes": True},
            NotImplementedError,
            r"share_prefixes=True: .*max_batch=2, share none",
        ),
    ],
)
def test_queues_that_cannot_be_are_refused(tiny_model, options, error, message):
    model = tiny_model(1)
    generator = Generator(model, by_name("single", model.sharding))
    with pytest.raises(error, match=message):
        generate(generator, QUEUE, 4, **options)
    assert not generator.programs._compiled
