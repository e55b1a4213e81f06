"""Layouts in plain numpy: padding to shards and chunks, capacities, storage order and batch slots."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tree_attn.models.llama.generation.layout import Layout, batch_slots
from tree_attn.models.llama.generation.prefix_tree import share

TEXTS = st.lists(st.lists(st.integers(1, 63), min_size=1, max_size=30), min_size=1, max_size=4)


def make_layout(num_shards: int = 3, multiple: int = 1, prefill_chunk: int | None = None) -> Layout:
    return Layout(num_shards=num_shards, slot_multiple=lambda num_tokens: multiple, prefill_chunk=prefill_chunk)


@pytest.mark.parametrize("num_tokens, padded, chunk", [(1, 3, None), (6, 6, None), (7, 12, 6), (13, 18, 6)])
def test_texts_are_padded_to_whole_shards_or_to_whole_chunks(num_tokens, padded, chunk):
    layout = make_layout(prefill_chunk=6)
    assert (layout.padded_length(num_tokens), layout.chunk_of(num_tokens)) == (padded, chunk)
    assert make_layout().chunk_of(num_tokens) is None


@pytest.mark.parametrize("num_tokens, length", [(1, 3), (3, 3), (4, 6), (7, 12), (13, 24), (25, 30), (30, 30)])
def test_a_queue_pads_to_powers_of_two_times_the_shards_up_to_the_longest(num_tokens, length):
    assert make_layout().bucket_length(num_tokens, longest=30) == length


def test_capacity_is_a_multiple_of_shards_and_kernels_and_holds_what_prefill_writes():
    texts = [[1] * 5, [2] * 13]
    assert make_layout().capacity(texts) == 15
    assert make_layout().capacity(texts, 7) == 21
    assert make_layout(multiple=8).capacity(texts, 7) == 24
    assert make_layout(prefill_chunk=12).capacity(texts, 7) == 24  # two chunks are more than 20 tokens


def test_the_multiple_depends_on_the_text_and_the_tokens_after_it():
    counts = []
    layout = Layout(num_shards=2, slot_multiple=lambda num_tokens: counts.append(num_tokens) or 1)
    layout.capacity([[1] * 4], 6)
    assert counts == [10]


def test_new_tokens_follow_the_remainders_of_a_tree_only():
    tree = share([[1, 2, 3, 4], [1, 2, 3, 5, 6]], min_shared=1)
    nodes, remainders = make_layout().levels(tree, max_new_tokens=4)
    assert (nodes.texts, nodes.num_tokens, nodes.capacity) == (((1, 2, 3),), 3, 3)
    assert (remainders.texts, remainders.num_tokens, remainders.capacity) == (((4,), (5, 6)), 3, 6)


@given(texts=TEXTS, num_shards=st.integers(1, 5))
def test_shards_hold_consecutive_tokens_in_turn_and_padding_lies_behind(texts, num_shards):
    layout = make_layout(num_shards)
    num_tokens = layout.padded_length(max(map(len, texts)))
    tokens, lengths = layout.stored(texts, num_tokens)
    assert tokens.dtype == lengths.dtype == np.int32 and tokens.shape == (len(texts), num_tokens)
    assert lengths.tolist() == [len(text) for text in texts]
    in_turn = tokens.reshape(len(texts), num_shards, -1).swapaxes(1, 2).reshape(len(texts), -1)
    for text, padded in zip(texts, in_turn.tolist(), strict=True):
        assert padded == text + [0] * (num_tokens - len(text))


def test_batch_slots_begin_with_consecutive_sequences():
    slots = batch_slots(3, first_sequence=4, step=2)
    assert [x.tolist() for x in slots] == [[0, 0, 0], [4, 5, 6], [2, 2, 2]]
    assert {x.dtype for x in slots} == {np.dtype(np.int32)}
