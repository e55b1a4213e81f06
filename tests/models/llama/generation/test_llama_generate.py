"""The model and its generation: prefill against decode, ragged batches, placements, stops, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tree_attn.mesh import make_mesh
from tree_attn.models.llama import (
    Generator,
    Llama,
    Sampling,
    by_name,
    generate,
    parameters,
    spread_over,
)
from tree_attn.models.llama.storage import empty_cache

PROMPTS = [list(range(3, 20)), [5], [9, 8, 7, 60, 2, 33]]


@pytest.fixture(scope="module")
def expected(tiny_model):
    """New tokens of the prompts on one device."""
    return new_ids(tiny_model(1), "single")


def new_ids(model, name, prompts=PROMPTS, count=6, **options) -> list[list[int]]:
    generator = Generator(model, by_name(name, model.sharding, **options))
    return [result.new_ids for result in generate(generator, prompts, count)]


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


@pytest.mark.parametrize(
    "prefill, axes",
    [
        ("ulysses", {"device": 2, "node": 2}),
        pytest.param("ulysses", {"seq": 4}, marks=pytest.mark.slow),
        pytest.param("ring_joint", {"seq": 3}, marks=pytest.mark.slow),
        pytest.param("ring_two_way", {"seq": 3}, marks=pytest.mark.slow),
    ],
)
def test_prompts_are_read_alike_by_every_way(tiny_model, tiny_config, prefill, axes):
    tokens = np.array([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [2, 7, 1, 8, 2, 8, 1, 0, 0, 0, 0, 0]], np.int32)
    lengths = jnp.array([12, 7], jnp.int32)
    mesh = make_mesh(axes)
    sharding = spread_over(tiny_config, mesh, sequence=tuple(axes) if len(axes) > 1 else "seq")
    sharded = Llama(tiny_config, sharding, parameters.random(sharding, jnp.float32))

    def logits(model, attention):
        layout = attention.prompt_layout(12)
        cache = empty_cache(model.config, model.sharding, batch=2, capacity=12, dtype=jnp.float32)
        read = jax.jit(lambda *args: model.prefill(*args, attention, all_logits=True)[0])
        return layout.restore(np.asarray(read(layout.store(tokens), lengths, cache)))

    one = tiny_model(1)
    expected = logits(one, by_name("single", one.sharding))
    found = logits(sharded, by_name("tree", sharding, prefill=prefill))
    for sequence, length in enumerate(lengths):
        np.testing.assert_allclose(found[sequence, :length], expected[sequence, :length], atol=1e-5)


@pytest.mark.parametrize(
    "prefill, name, message",
    [
        ("star", "tree", "prefill must be one of None, 'ring', 'ring_joint', 'ring_two_way', 'ulysses', got 'star'"),
        ("ulysses", "single", "prefill must be None for attention='single', which has whole prompts, got 'ulysses'"),
    ],
)
def test_a_wrong_way_to_read_prompts_is_refused(tiny_model, prefill, name, message):
    with pytest.raises(ValueError, match=message):
        by_name(name, tiny_model(1).sharding, prefill=prefill)


@pytest.mark.slow
def test_a_sequence_does_not_depend_on_its_batch(tiny_model, expected):
    model = tiny_model(1)
    assert [new_ids(model, "single", [prompt])[0] for prompt in PROMPTS] == expected


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_devices"), [("tree", 8), ("ring", 3), ("single", 1)])
def test_prefill_equals_decoding_the_prompt_token_by_token_or_in_pieces(tiny_model, name, num_devices):
    model = tiny_model(num_devices)
    attention = by_name(name, model.sharding)
    tokens = np.array([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]], np.int32)
    # To any multiple of the shards; what it is padded with must not matter.
    padded = np.pad(tokens, ((0, 0), (0, 24 - tokens.shape[1])), constant_values=63)
    layout = attention.prompt_layout(24)
    empty = lambda: empty_cache(model.config, model.sharding, batch=1, capacity=24, dtype=jnp.float32)
    prefill = jax.jit(lambda *args: model.prefill(*args, attention, all_logits=True))
    whole, cache = prefill(layout.store(padded), jnp.array([11], jnp.int32), empty())
    whole = layout.restore(np.asarray(whole))[:, :11]
    assert cache.lengths.tolist() == [11]

    decode = jax.jit(lambda tokens, cache: model.decode(tokens, cache, attention))
    cache, pieces = empty(), []
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


@pytest.mark.slow
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


@pytest.mark.slow
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
        cache = empty_cache(model.config, model.sharding, batch=1, capacity=8, dtype=jnp.float32)
        return decode.lower(jnp.ones((1, 1), jnp.int32), cache).as_text().count("while")

    assert loops(model) > loops(unrolled) == 0
    for a, b in zip(steps[1], steps[3], strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_allclose(a.logits, b.logits, atol=1e-5)
        np.testing.assert_allclose(a.log_probabilities, b.log_probabilities, atol=1e-5)
    with pytest.raises(ValueError, match="tokens_per_dispatch must be an integer of at least 1, got 0"):
        Generator(model, by_name("single", model.sharding), tokens_per_dispatch=0)


@pytest.mark.slow
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


WRONG = {
    "a float token": ({"prompts": [[1.5]]}, r"prompts must be sequences of integers, .*got \[1.5\]"),
    "a bool token": ({"prompts": [[1, True]]}, "prompts must be sequences of integers"),
    "text tokens": ({"prompts": [["1"]]}, "prompts must be sequences of integers"),
    "text": ({"prompts": "hello"}, "prompts must be sequences of integers, .*got 'hello'"),
    "texts": ({"prompts": ["hello"]}, "prompts must be sequences of integers, .*got 'hello'"),
    "one prompt": ({"prompts": [1, 2]}, "prompts must be sequences of integers, .*got 1"),
    "float array": ({"prompts": np.ones((2, 3))}, "prompts must be sequences of integers"),
    "a long prompt": ({"prompts": [[1] * 900]}, "prompts must leave room for a new token: .*128 positions, got 900"),
    "float count": ({"max_new_tokens": 2.5}, "max_new_tokens must be 1 or more, got 2.5"),
    "text count": ({"max_new_tokens": "4"}, "max_new_tokens must be 1 or more, got '4'"),
    "a stop id": ({"stop_ids": 3}, "stop_ids must be a collection of integers, got 3"),
    "a stop word": ({"stop_ids": "end"}, "stop_ids must be a collection of integers, got 'end'"),
    "float stop": ({"stop_ids": [2.0]}, "stop_ids must be a collection of integers"),
    "float samples": ({"num_samples": 1.5}, "num_samples must be an integer of at least 1, got 1.5"),
    "no function": ({"on_token": 3}, "on_token must be None or a function"),
    "text done": ({"done": ["ab"]}, "done must be sequences of integers"),
    "no done": ({"done": 3}, "done must be sequences of integers"),
    "float batch": ({"max_batch": 1.5}, "max_batch must be an integer of at least 1, got 1.5"),
    "sharing": ({"share_prefixes": "yes"}, "share_prefixes must be one of None, True, False, got 'yes'"),
    "no generator": ({"generator": None}, "generator must be a Generator, got NoneType"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_request_names_its_argument(tiny_model, arguments, message):
    model = tiny_model(1)
    generator = Generator(model, by_name("single", model.sharding))
    with pytest.raises((ValueError, TypeError), match=message):
        generate(**{"generator": generator, "prompts": [[1, 2]], "max_new_tokens": 4} | arguments)
    assert not generator.programs._compiled


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prefill_chunk": "2"}, "prefill_chunk must be a multiple of 1 shards, got '2'"),
        ({"prefill_chunk": 2.0}, "prefill_chunk must be a multiple of 1 shards, got 2.0"),
        ({"tokens_per_dispatch": 1.5}, "tokens_per_dispatch must be an integer of at least 1, got 1.5"),
        ({"cache_dtype": "wide"}, "cache_dtype must be a dtype, got 'wide'"),
        ({"sampling": 0.7}, r"sampling must be .*Sampling.*, got 0.7"),
        ({"attention": "tree"}, "attention must be Attention, got 'tree'"),
        ({"model": None}, "model must be Llama, got None"),
    ],
)
def test_a_wrong_generator_names_its_argument(tiny_model, arguments, message):
    model = tiny_model(1)
    with pytest.raises((ValueError, TypeError), match=message):
        Generator(**{"model": model, "attention": by_name("single", model.sharding)} | arguments)


def test_options_of_sparq_have_their_type(tiny_model):
    with pytest.raises(TypeError, match=r"sparq must be SparqOptions or None, got \{'num_keys': 3\}"):
        by_name("sparq", tiny_model(1).sharding, sparq={"num_keys": 3})


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
