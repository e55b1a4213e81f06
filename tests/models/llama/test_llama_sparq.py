"""SparQ as the attention of new tokens: dense where it leaves nothing out, else what it chooses on one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tree_attn import SoftmaxState, SparqOptions, merge_states, sparq_decode
from tree_attn.models.llama import Generator, by_name, generate

PROMPTS = [list(range(3, 20)), [5], [9, 8, 7, 60, 2, 33]]
COUNT = 6
ALL = SparqOptions(num_components=8, num_keys=64, reallocate=True)
FEW = SparqOptions(num_components=3, num_keys=6, local_window=2)
WITH_MEAN = dataclasses.replace(FEW, reallocate=True)
IN_CHUNKS, FLOAT8 = {"prefill_chunk": 6}, {"cache_dtype": "float8_e4m3fn"}


@functools.cache
def make_generator(tiny_model, num_devices, sparq=FEW, **options) -> Generator:
    """One for the same arguments, so that no program is compiled twice."""
    model = tiny_model(num_devices)
    return Generator(model, by_name("sparq", model.sharding, sparq=sparq), **options)


def steps_of(generator, prompts=PROMPTS):
    return [(step.tokens.tolist(), np.asarray(step.logits)) for step in generator.stream(prompts, COUNT)]


def empty_cache_of(generator, room):
    """Returns the cache with which a generation from the prompts begins."""
    return generator.inputs.levels(generator.prefix_tree(PROMPTS), room)[-1].cache


@pytest.fixture(scope="module")
def dense(tiny_model):
    model = tiny_model(1)
    return steps_of(Generator(model, by_name("single", model.sharding)))


def test_with_all_components_and_keys_tokens_are_those_of_dense_attention(tiny_model, dense):
    found = steps_of(make_generator(tiny_model, 1, ALL))
    for (tokens, logits), (expected, of_dense) in zip(found, dense, strict=True):
        assert tokens == expected
        np.testing.assert_allclose(logits, of_dense, atol=2e-5)


def on_one_device(query, cache, layer, prefixes=(), is_later=False):
    """SparQ from keys and values alone."""
    options = dict(key_value_seq_lengths=cache.lengths + 1, **dataclasses.asdict(WITH_MEAN))
    return sparq_decode(query, cache.key[layer], cache.value[layer], **options)


@pytest.mark.slow
@pytest.mark.parametrize("options", [IN_CHUNKS, FLOAT8])
def test_new_tokens_attend_to_what_sparq_decode_chooses_on_one_device(tiny_model, dense, options):
    model = tiny_model(1)
    attention = dataclasses.replace(by_name("single", model.sharding), decode=on_one_device)
    expected = steps_of(Generator(model, attention, **{} if options == IN_CHUNKS else options))
    found = steps_of(make_generator(tiny_model, 3, WITH_MEAN, **options))
    for (tokens, logits), (expected_tokens, expected_logits) in zip(found, expected, strict=True):
        assert tokens == expected_tokens
        np.testing.assert_allclose(logits, expected_logits, atol=2e-5)
    np.testing.assert_allclose(found[0][1], dense[0][1], atol=2e-5)  # prompts are read exactly
    assert np.abs(found[-1][1] - dense[-1][1]).max() > 1e-3, "it left nothing out"


def test_selected_per_shard_it_is_each_shards_own_choice_merged(tiny_model):
    generator = make_generator(tiny_model, 3, dataclasses.replace(FEW, local_window=0, selection="per_shard"))
    cache = empty_cache_of(generator, COUNT)
    rng = np.random.default_rng(0)
    key, value, query = (
        rng.normal(size=(3, *shape)).astype(np.float32) for shape in ((20, 2, 8), (20, 2, 8), (1, 4, 8))
    )
    lengths = np.array([20, 4, 13], np.int32)
    options = dict(num_components=FEW.num_components, num_keys=FEW.num_keys // 3, return_lse=True)

    @jax.jit
    def sharded(query, key, value, lengths):
        written = dataclasses.replace(cache.write(key, value, layer=1), lengths=lengths - 1)
        return generator.attention.decode(query, written, 1)

    @jax.jit
    def merged(query, key, value, lengths):
        states = [
            sparq_decode(query, key[:, i::3], value[:, i::3], key_value_seq_lengths=(lengths - i + 2) // 3, **options)
            for i in range(3)
        ]
        return merge_states(SoftmaxState(*map(jnp.stack, zip(*states, strict=True))), axis=0).out

    operands = query, key, value, lengths
    np.testing.assert_allclose(sharded(*operands), merged(*operands), atol=2e-5)


def test_the_cache_keeps_what_sparq_reads_and_says_what_it_takes(tiny_model, cache_bytes):
    generator = make_generator(tiny_model, 3)
    cache = empty_cache_of(generator, COUNT)
    assert cache.key_by_component.shape == (2, 3, 2, 8, cache.capacity)
    num_bytes = cache_bytes(generator, PROMPTS, COUNT)
    assert num_bytes == sum(x.nbytes for x in (cache.key, cache.value, cache.key_by_component))


@pytest.mark.slow
def test_an_interrupted_generation_goes_on_with_the_same_tokens(tiny_model):
    generator = make_generator(tiny_model, 3, WITH_MEAN, **IN_CHUNKS)
    whole = [result.new_ids for result in generate(generator, PROMPTS, COUNT)]
    heard = []
    done = [ids[:4] for ids in whole]
    again = generate(generator, PROMPTS, COUNT, done=done, on_token=lambda *token: heard.append(token))
    assert [result.new_ids for result in again] == whole
    assert heard == [(row, whole[row][step]) for step in (4, 5) for row in range(3)]
    other = [*done[:2], [*done[2][:3], (done[2][3] + 1) % 64]]
    with pytest.raises(ValueError, match=r"done: holds token \d+ as number 3 of sequence 2, and this generation makes"):
        generate(generator, PROMPTS, COUNT, done=other)


@pytest.mark.slow
def test_a_queue_gives_every_prompt_the_tokens_that_it_gets_with_the_others_at_hand(tiny_model):
    """With the mean value: what is kept beside keys and values changes hands with the row."""
    generator = make_generator(tiny_model, 3, WITH_MEAN, **IN_CHUNKS)
    # Programs are compiled by length: as many rows as of `PROMPTS`, as long, and all are admitted by one program.
    queue = [list(range(first, first + count)) for first, count in ((3, 17), (40, 14), (20, 15))]
    whole = [result.new_ids for result in generate(generator, queue, COUNT)]
    stop = whole[1][2]
    whole = generate(generator, queue, COUNT, stop_ids=[stop])
    assert {one.stopped for one in whole} == {True, False}
    queued = generate(generator, queue, COUNT, stop_ids=[stop], max_batch=2)
    for a, b in zip(whole, queued, strict=True):
        assert (a.new_ids, a.stopped) == (b.new_ids, b.stopped)
        assert a.log_probability == pytest.approx(b.log_probability, abs=1e-4)
    done = [one.new_ids[:1] for one in whole]
    again = generate(generator, queue, COUNT, stop_ids=[stop], max_batch=2, done=done)
    assert [one.new_ids for one in again] == [one.new_ids for one in whole]


@pytest.mark.parametrize(
    ("name", "sparq", "message"),
    [
        ("sparq", None, "sparq must be SparqOptions .num_components, num_keys. for attention='sparq', got None"),
        ("tree", FEW, "sparq must be None for attention='tree', which attends to all keys, got Sparq"),
    ],
)
def test_options_go_with_sparq_alone(tiny_config, sharding_over, name, sparq, message):
    with pytest.raises(ValueError, match=message):
        by_name(name, sharding_over(tiny_config, 3), sparq=sparq)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_components": 0}, "num_components must be an integer of at least 1, got 0"),
        ({"num_keys": 1.5}, "num_keys must be an integer of at least 1, got 1.5"),
        ({"local_window": 7}, "local_window must be an integer of at least 0 and at most 6, got 7"),
        ({"selection": "best"}, "selection must be one of 'global', 'per_shard', got 'best'"),
        ({"reallocate": "no"}, "reallocate must be one of None, True, False, got 'no'"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(FEW, **options)


def test_what_does_not_fit_the_model_is_refused_before_anything_is_compiled(tiny_model):
    with pytest.raises(ValueError, match="num_components must be an integer of at least 1 and at most 8, got 9"):
        make_generator(tiny_model, 3, dataclasses.replace(FEW, num_components=9))
    with pytest.raises(NotImplementedError, match="cache_dtype='int8': attention='sparq' takes no scales"):
        make_generator(tiny_model, 3, cache_dtype="int8")
    generator = make_generator(tiny_model, 3)
    with pytest.raises(NotImplementedError, match="share_prefixes=True: attention='sparq' has no form for shared"):
        generator.stream(PROMPTS, COUNT, share_prefixes=True)
    with pytest.raises(NotImplementedError, match="attention='sparq' has no form for shared prefixes"):
        cache = empty_cache_of(generator, 0)
        generator.attention.decode(jnp.zeros((3, 1, 4, 8)), cache, 0, [object()])
    with pytest.raises(
        NotImplementedError, match="cache: keeps float32 with scales; attention='sparq' takes no scales"
    ):
        arrays = dataclasses.replace(cache.arrays, value_scale=jnp.ones((2, 2), jnp.float32))
        scaled = dataclasses.replace(cache, arrays=arrays)
        generator.attention.decode(jnp.zeros((3, 1, 4, 8)), scaled, 0)
    assert not generator.programs._compiled
