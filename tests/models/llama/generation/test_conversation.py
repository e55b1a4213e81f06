"""Conversations: the tokens of each prompt read anew, though most of it lies in the cache already."""

import pytest

from tree_attn.models.llama import Conversation, Generator, by_name, generate
from tree_attn.sparq import SparqOptions

FIRST, ADDED = [9, 8, 7, 60, 2, 33], [5, 4, 40]


def test_a_second_turn_reads_only_what_is_new(tiny_model):
    generator = Generator(tiny_model(1), by_name("single", tiny_model(1).sharding))
    conversation = Conversation(generator, capacity=32, chunk=2)
    prompt = [*FIRST, *conversation.answer(FIRST, 6).new_ids, *ADDED]
    second = conversation.answer(prompt, 4)
    # Without the last token of the first turn, whose keys no step has written.
    assert conversation.num_reused == len(FIRST) + 5
    assert second.new_ids == generate(generator, [prompt], 4)[0].new_ids


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, num_devices, options, num_written",
    [("tree", 3, {"tokens_per_dispatch": 3}, 6), ("ring", 2, {}, 5)],
)
def test_each_turn_has_the_tokens_of_its_whole_prompt(tiny_model, name, num_devices, options, num_written):
    model = tiny_model(num_devices)
    generator = Generator(model, by_name(name, model.sharding), **options)
    conversation = Conversation(generator, capacity=32, chunk=4)
    heard = []
    first = conversation.answer(FIRST, 6, on_token=lambda _, token: heard.append(token))
    assert heard == first.new_ids == generate(generator, [FIRST], 6)[0].new_ids
    assert conversation.num_reused == 0

    following = [*FIRST, *first.new_ids, *ADDED]
    stop = generate(generator, [following], 4)[0].new_ids[2]
    second = conversation.answer(following, 4, stop_ids={stop})
    expected = generate(generator, [following], 4, stop_ids={stop})[0]
    assert (second.new_ids, second.stopped) == (expected.new_ids, True)
    assert conversation.num_reused == len(FIRST) + num_written

    edited = [*FIRST, 1, 2, 3]
    third = conversation.answer(edited, 3)
    assert third.new_ids == generate(generator, [edited], 3)[0].new_ids
    assert conversation.num_reused == len(FIRST)
    longer = conversation.answer([*edited, *third.new_ids], 60)
    assert conversation.num_reused == 0, "the cache was too short"
    assert longer.new_ids == generate(generator, [edited], 63)[0].new_ids[3:]


def test_sparq_reads_every_prompt_whole(tiny_model):
    model = tiny_model(1)
    attention = by_name("sparq", model.sharding, sparq=SparqOptions(num_components=4, num_keys=8, local_window=2))
    conversation = Conversation(Generator(model, attention), capacity=16, chunk=4)
    conversation._held, conversation._cache = FIRST, type("Cache", (), {"capacity": 64})
    assert conversation._num_common([*FIRST, 1], 10) == 0


@pytest.mark.parametrize("options", [{"capacity": 0}, {"chunk": 0}, {"chunk": 1.5}])
def test_wrong_sizes_are_refused(tiny_model, options):
    generator = Generator(tiny_model(1), by_name("single", tiny_model(1).sharding))
    (name,) = options
    with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, got"):
        Conversation(generator, **options)
    with pytest.raises(ValueError, match="prompts must be one or more, of one or more tokens"):
        Conversation(generator).answer([], 3)
