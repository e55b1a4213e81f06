"""Continuous batching: the tokens of each prompt by itself, and few programs."""

import math

import pytest

from tree_attn.models.llama import Generator, Sampling, by_name, generate, stream_queue

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
