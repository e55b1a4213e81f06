"""Prompts that begin alike are read, stored and attended to once: the same tokens, from fewer bytes."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tree_attn.models.llama import Generation, Generator, LlamaSharding, Sampling, by_name, generate, rank_samples
from tree_attn.models.llama.generation.prefix_tree import MIN_SHARED_KEYS, unshared

# A root for three sequences, below it a node for two of them, and a sequence that shares nothing.
ROOT, BELOW = list(range(3, 20)), [40, 41, 42, 43, 44]
PROMPTS = [[*ROOT, *BELOW, 50, 51], [*ROOT, *BELOW, 7], [*ROOT, 9, 8, 7, 60, 2, 33], [5]]
SAMPLED = Sampling(temperature=1.0, top_k=30, top_p=0.95, seed=3)
COUNT = 4


def make_generator(tiny_model, name="single", num_devices=1, sampling=None, **options) -> Generator:
    model = tiny_model(num_devices)
    return Generator(model, by_name(name, model.sharding, **options), sampling)


def live_cache_bytes() -> int:
    """Returns the bytes of keys and values: the arrays of five axes, layer, sequence, slot, head, head dim."""
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays() if x.ndim == 5)


def steps(generator, share_prefixes):
    """Returns tokens, log-probabilities and logits of all steps, and the bytes of caches during them."""
    before = live_cache_bytes()
    stream = generator.stream(PROMPTS, COUNT, share_prefixes=share_prefixes)
    taken = [next(stream)]
    held_bytes = live_cache_bytes() - before
    taken += stream
    return *(np.stack([np.asarray(step[i]) for step in taken]) for i in range(3)), held_bytes


@pytest.fixture(scope="module")
def alone(tiny_model):
    """The steps of sequences by themselves, on one device."""
    return {sampling: steps(make_generator(tiny_model, sampling=sampling), False) for sampling in (None, SAMPLED)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_devices", "sampling"),
    [("single", 1, SAMPLED), ("tree", 3, SAMPLED), ("tree", 8, None)],
)
def test_tokens_are_those_of_sequences_by_themselves(tiny_model, cache_bytes, alone, name, num_devices, sampling):
    generator = make_generator(tiny_model, name, num_devices, sampling)
    tree = generator.prefix_tree(PROMPTS, True)
    assert [[node.sequences for node in level] for level in tree.levels] == [[(0, 1, 2)], [(0, 1)]]
    tokens, log_probabilities, logits, held_bytes = steps(generator, True)
    assert held_bytes == cache_bytes(generator, PROMPTS, COUNT, share_prefixes=True) < alone[sampling][3]
    np.testing.assert_array_equal(tokens, alone[sampling][0])
    np.testing.assert_allclose(logits, alone[sampling][2], rtol=0, atol=1e-5)

    wide = logits.astype(np.float64)
    expected = np.take_along_axis(wide, tokens[..., None], -1)[..., 0] - np.log(np.exp(wide).sum(-1))
    assert log_probabilities.dtype == np.float32
    np.testing.assert_allclose(log_probabilities, expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_samples_of_a_prompt_are_ranked_and_the_prompt_is_held_once(tiny_model, cache_bytes):
    """Bytes are measured in the arrays that are alive during generation, beside those predicted from shapes."""
    generator = make_generator(tiny_model, sampling=SAMPLED)
    prompts, num_samples = [list(range(1, 62)), [7, 8, 9]], 16
    bytes_held = {}

    def watched(share_prefixes) -> list[Generation]:
        before = live_cache_bytes()

        def on_token(*_) -> None:
            if share_prefixes not in bytes_held:
                bytes_held[share_prefixes] = live_cache_bytes() - before

        options = dict(num_samples=num_samples, share_prefixes=share_prefixes, on_token=on_token)
        return generate(generator, prompts, COUNT, **options)

    shared, apart = watched(True), watched(False)
    assert [sample.prompt_ids for sample in shared] == [prompt for prompt in prompts for _ in range(num_samples)]
    assert [sample.new_ids for sample in shared] == [sample.new_ids for sample in apart]
    assert len({tuple(sample.new_ids) for sample in shared[:num_samples]}) > 1  # each sequence draws by itself
    # Two nodes, as long as the longer, and each sequence's last token and new ones; without sharing, all for each.
    slot_bytes = 2 * 2 * 2 * 8 * 4
    # Slots for eight tokens or more come in multiples of 8.
    assert bytes_held == {True: (2 * 64 + 32 * (1 + COUNT)) * slot_bytes, False: 32 * (61 + COUNT + 7) * slot_bytes}
    rows = [prompt for prompt in prompts for _ in range(num_samples)]
    for share_prefixes, measured in bytes_held.items():
        assert cache_bytes(generator, rows, COUNT, share_prefixes=share_prefixes) == measured

    best = rank_samples(shared[:num_samples], top=3)
    means = [sample.mean_log_probability for sample in shared[:num_samples]]
    assert [sample.mean_log_probability for sample in best] == sorted(means, reverse=True)[:3]
    assert best[0].log_probability == pytest.approx(COUNT * best[0].mean_log_probability)


def sample(new_ids, mean, stopped=False):
    return Generation(
        prompt_ids=[1],
        new_ids=new_ids,
        stopped=stopped,
        prefill_s=1.0,
        per_token_s=None,
        log_probability=mean,
        mean_log_probability=mean,
    )


def test_of_equal_samples_one_is_ranked():
    samples = [sample([1], -2.0), sample([2], -1.0), sample([1], -2.0), sample([], -3.0), sample([2], -2.0, True)]
    assert rank_samples(samples) == [samples[1], samples[0], samples[4], samples[3]]
    assert rank_samples(samples, top=1) == [samples[1]]
    with pytest.raises(ValueError, match="top must be at least 1, got 0"):
        rank_samples(samples, top=0)


def test_the_mean_counts_the_stop_token(tiny_model):
    generator = make_generator(tiny_model)
    (whole,) = generate(generator, [[1, 2, 3]], 3)
    (stopped,) = generate(generator, [[1, 2, 3]], 3, stop_ids=whole.new_ids[1:2])
    assert len(stopped.new_ids) == whole.new_ids.index(whole.new_ids[1]) < len(whole.new_ids)
    taken = list(generator.stream([[1, 2, 3]], 3))[: len(stopped.new_ids) + 1]
    expected = [float(step.log_probabilities[0]) for step in taken]
    assert stopped.log_probability == pytest.approx(sum(expected))
    assert stopped.mean_log_probability == pytest.approx(np.mean(expected))


def test_by_default_sharing_must_pay(tiny_model):
    generator = make_generator(tiny_model)
    long = [1] * (MIN_SHARED_KEYS // 2 + 1)
    assert generator.prefix_tree(PROMPTS) == unshared(PROMPTS)
    assert generator.prefix_tree([long] * 3, False) == unshared([long] * 3)
    assert generator.prefix_tree([long] * 3).num_slots == len(long) - 1 + 3
    # Remainders have the slots of the longest, which shares nothing: the node would come on top.
    with_longer = [long] * 3 + [[2] * (2 * len(long))]
    assert generator.prefix_tree(with_longer) == unshared(with_longer)


def test_ring_generates_without_sharing_and_refuses_to_share(tiny_model):
    generator = make_generator(tiny_model, "ring", 3)
    rows = [[1] * (MIN_SHARED_KEYS + 2)] * 2
    assert generator.prefix_tree(rows) == unshared(rows)
    with pytest.raises(NotImplementedError, match="share_prefixes=True: attention='ring' has no form for shared"):
        generator.stream(PROMPTS, COUNT, share_prefixes=True)
    with pytest.raises(NotImplementedError, match="attention='ring' has no form for shared prefixes"):
        cache = generator.inputs.levels(generator.prefix_tree(PROMPTS), 0)[-1].cache
        generator.attention.decode(jnp.zeros((2, 1, 4, 8)), cache, 0, [object()])
    assert not generator.programs._compiled


def test_a_batch_over_devices_is_not_shared(tiny_model):
    model = tiny_model(8)
    generator = Generator(model, by_name("tree", model.sharding))
    mesh = jax.make_mesh((2, 4), ("batch", "seq"), axis_types=2 * (jax.sharding.AxisType.Auto,))
    generator.sharding = LlamaSharding(mesh=mesh, batch="batch")
    with pytest.raises(NotImplementedError, match="share_prefixes=True: the batch is cut over 'batch'"):
        generator.stream(PROMPTS, COUNT, share_prefixes=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_samples": 0}, "num_samples must be an integer of at least 1, got 0"),
        ({"num_samples": 2.0}, "num_samples must be an integer of at least 1, got 2.0"),
        ({"share_prefixes": "auto"}, "share_prefixes must be one of None, True, False, got 'auto'"),
        ({"num_samples": 2, "done": [[1]] * 3}, r"done must hold equally many new tokens for each of 8 prompts"),
    ],
)
def test_wrong_requests_are_refused_before_anything_is_compiled(tiny_model, options, message):
    generator = make_generator(tiny_model)
    with pytest.raises(ValueError, match=message):
        generate(generator, PROMPTS, COUNT, **options)
    assert not generator.programs._compiled
