"""Scoring under sparse attentions: as decoding token by token, and dense where the budget leaves nothing out."""

import jax.numpy as jnp
import numpy as np
import pytest

from tree_attn.cache import KVCache
from tree_attn.models.llama import by_name
from tree_attn.models.llama.evaluation import scorer as scorer_module
from tree_attn.models.llama.evaluation import tasks
from tree_attn.models.llama.evaluation.methods import Method, methods_for
from tree_attn.models.llama.evaluation.scorer import Scorer
from tree_attn.models.llama.evaluation.tasks import Sample, Sizes, make_samples, score

CONTEXT, TAIL = 20, 7
ALL = CONTEXT + TAIL


class Letters:
    """A tokenizer of one token a character."""

    def encode(self, text, *, add_special_tokens=True):
        return [ord(letter) % 64 for letter in text]

    def decode(self, ids):
        return "".join(chr(64 + i) for i in ids)


@pytest.fixture(scope="module")
def sequences():
    return np.random.default_rng(0).integers(0, 64, size=(2, ALL)).tolist()


@pytest.fixture(scope="module")
def scorer(tiny_model):
    return Scorer(tiny_model(1))


def followed(scorer, sequences, method):
    read = scorer.read([ids[:CONTEXT] for ids in sequences], TAIL)
    return scorer.follow(read, [ids[CONTEXT:] for ids in sequences], method)


@pytest.fixture(scope="module")
def expected(tiny_model, sequences):
    """The model's logits of all tokens but the context's, by its own prefill."""
    model = tiny_model(1)
    cache = KVCache.create(
        batch=2, capacity=ALL, num_kv_heads=2, head_dim=8, dtype=jnp.float32, mesh=model.sharding.mesh,
        axis_name="seq", num_layers=2,
    )  # fmt: skip
    tokens, lengths = jnp.asarray(sequences, jnp.int32), jnp.full(2, ALL, jnp.int32)
    logits, _ = model.prefill(tokens, lengths, cache, by_name("single", model.sharding), all_logits=True)
    return np.asarray(logits)[:, CONTEXT - 1 : -1]


@pytest.mark.parametrize(
    "method",
    [
        Method(name="dense"),
        Method(name="sparq", num_keys=ALL, num_components=8),
        Method(name="sparq_mean", num_keys=ALL, num_components=8),
        Method(name="h2o", num_keys=ALL),
        Method(name="lm_infinite", num_keys=ALL),
        Method(name="flexgen", num_keys=ALL),
    ],
    ids=lambda method: method.name,
)
def test_with_a_budget_for_everything_it_is_the_models_own_logits(scorer, sequences, expected, method):
    np.testing.assert_allclose(followed(scorer, sequences, method), expected, atol=2e-5)


@pytest.mark.parametrize(
    "method",
    [Method(name="sparq_mean", num_keys=6, num_components=3), Method(name="h2o", num_keys=6)],
    ids=lambda method: method.name,
)
def test_several_tokens_at_once_are_one_token_at_a_time(scorer, sequences, expected, method, monkeypatch):
    together = followed(scorer, sequences, method)
    monkeypatch.setattr(scorer_module, "TOKENS_AT_ONCE", 1)
    np.testing.assert_allclose(together, followed(scorer, sequences, method), atol=2e-5)
    assert np.abs(together - expected).max() > 1e-3, "the budget left nothing out"


TEXT = "".join(chr(64 + i) for i in np.random.default_rng(1).integers(0, 60, size=3000))
SIZES = Sizes(context=300, tail=40, samples=4)


def text_ids():
    return Letters().encode(TEXT)


def test_a_repeated_passage_stands_in_its_context():
    for sample in make_samples("repetition", Letters(), text_ids(), SIZES, seed=0):
        assert (len(sample.context), len(sample.tail)) == (300, 40)
        cue = Letters().decode([*sample.context[-32:], *sample.tail])
        assert cue in Letters().decode(sample.context)


def test_the_needle_lies_deeper_from_sample_to_sample():
    hidden = Letters().decode(Letters().encode(" ".join(tasks.NEEDLE)))
    depths = []
    for sample in make_samples("needle", Letters(), text_ids(), SIZES, seed=0):
        context = Letters().decode(sample.context)
        assert len(context) == 300 and context.count(hidden) == 1
        assert (context + Letters().decode(sample.tail)).endswith(hidden)
        depths.append(context.index(hidden))
    assert depths == sorted(set(depths))


def test_a_needle_at_a_depth_has_that_share_of_the_same_text_before_it():
    hidden = Letters().encode(" ".join(tasks.NEEDLE))
    passages = set()
    for depth in (0.0, 0.5, 1.0):
        for sample in make_samples("needle_at_depth", Letters(), text_ids(), SIZES, seed=0, depth=depth):
            context = Letters().decode(sample.context)
            before, after = context.split("J" + Letters().decode(hidden) + "J")
            passages.add(before + after)
            assert len(before) == round(depth * len(before + after[: -1 - len(tasks.NEEDLE[0])]))
    assert len(passages) == SIZES.samples


def test_one_seed_makes_the_same_samples_and_another_makes_others():
    samples = [make_samples("language_modelling", Letters(), text_ids(), SIZES, seed) for seed in (0, 0, 1)]
    assert samples[0] == samples[1] != samples[2]


def test_scores_by_hand():
    sample = Sample(context=(1,), tail=(0, 1, 1), tail_chars=(4, 2, 3))
    logits = np.log(np.array([[[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.5, 0.25, 0.25]]], np.float32))
    assert score("repetition", [sample], logits) == [6.0]  # the third is wrong
    assert score("needle", [sample], logits) == pytest.approx([2 / 3])
    assert score("needle_at_depth", 2 * [sample], np.stack([logits[0], logits[0][[0, 1, 1]]])) == [0, 1]
    assert score("language_modelling", [sample], logits) == pytest.approx([(1 + 1 + 2) / 9])


@pytest.mark.parametrize("ratio", [1 / 2, 1 / 4, 1 / 8])
def test_budgets_come_near_their_ratio(ratio):
    methods = methods_for(ratio, num_keys=1024, head_dim=64, num_kept=64)
    assert ("flexgen" in {method.name for method in methods}) == (ratio == 1 / 2)
    dense = Method(name="dense").transfer_elements(1024, 64)
    for method in methods:
        assert method.transfer_elements(1024, 64) / dense == pytest.approx(ratio, rel=0.05), method


def test_ablations_are_what_sparq_decode_is_given():
    assert Method(name="h2o", num_keys=16).ablations() == []
    paper = Method(name="sparq_mean", num_keys=16, num_components=3)
    found = [
        (options.local_window, options.score_temperature, options.reallocate)
        for options in (method.sparq_options() for method in (paper, *paper.ablations()))
    ]
    assert found == [
        (4, "coverage", True), (4, "head_dim", True), (4, "num_components", True),
        (0, "coverage", True), (8, "coverage", True), (16, "coverage", True),
    ]  # fmt: skip


def test_what_does_not_fit_is_named():
    with pytest.raises(ValueError, match=r"task must be one of 'repetition', 'needle', .*, got 'poetry'"):
        make_samples("poetry", Letters(), text_ids(), SIZES, seed=0)
    with pytest.raises(ValueError, match=r"text must have the 300 \+ 40 tokens of one sample, got 100"):
        make_samples("needle", Letters(), text_ids()[:100], SIZES, seed=0)
    for task, depth, said in (
        ("needle", 0.5, "None"),
        ("needle_at_depth", None, "from"),
        ("needle_at_depth", 2, "from"),
    ):
        with pytest.raises(ValueError, match=f"depth must be {said}.* for task='{task}', got {depth}"):
            make_samples(task, Letters(), text_ids(), SIZES, seed=0, depth=depth)
    with pytest.raises(ValueError, match=r"context must be at least tail \+ 128 = 168, got 100"):
        make_samples("needle", Letters(), text_ids(), Sizes(context=100, tail=40, samples=1), seed=0)
