"""Prefix trees in plain integers: nothing is lost, nothing that pays is stored twice."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tree_attn.models.llama.generation.prefix_tree import MIN_SHARED_KEYS, Node, share, unshared

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=8)


def paths(tree):
    """Returns for each sequence the nodes on its path, the root's first."""
    sequences = range(len(tree.remainders))
    return [[node for level in tree.levels for node in level if sequence in node.sequences] for sequence in sequences]


def num_saved(tree) -> int:
    """Tokens beyond the tree's if each sequence stored its own copy of its nodes."""
    return sum(len(node.tokens) * (len(node.sequences) - 1) for level in tree.levels for node in level)


@given(prompts=PROMPTS, min_shared=st.integers(1, 12))
def test_a_path_and_its_remainder_are_the_prompt(prompts, min_shared):
    tree = share(prompts, min_shared)
    for prompt, path, remainder in zip(prompts, paths(tree), tree.remainders, strict=True):
        assert [*itertools.chain.from_iterable(node.tokens for node in path), *remainder] == prompt
        assert remainder
    for depth, level in enumerate(tree.levels):
        sequences = [sequence for node in level for sequence in node.sequences]
        assert level and len(set(sequences)) == len(sequences)
        for node in level:
            assert len(node.tokens) * (len(node.sequences) - 1) >= min_shared
            assert not depth or any(set(node.sequences) <= set(above.sequences) for above in tree.levels[depth - 1])


@given(prompts=PROMPTS, min_shared=st.integers(1, 12))
def test_no_rows_hold_in_common_what_would_pay(prompts, min_shared):
    """Sequences that agree in their first tokens would save too little with what no node holds for all of them."""
    tree = share(prompts, min_shared)
    for end in range(1, 10):
        groups = {}
        for sequence, prompt in enumerate(prompts):
            if len(prompt) > end:  # the last token is always a sequence's own
                groups.setdefault(tuple(prompt[:end]), []).append(sequence)
        for sequences in groups.values():
            num_stored = sum(
                len(node.tokens) for node in paths(tree)[sequences[0]] if set(sequences) <= set(node.sequences)
            )
            assert (end - num_stored) * (len(sequences) - 1) < min_shared


@given(prompts=PROMPTS)
def test_with_no_threshold_every_common_prefix_is_held_once(prompts):
    tree = share(prompts, min_shared=1)
    num_stored = tree.num_shared + sum(map(len, tree.remainders))
    assert num_stored == len({tuple(p[:end]) for p in prompts for end in range(1, len(p))}) + len(prompts)
    assert num_stored + num_saved(tree) == sum(map(len, prompts))


def test_two_levels():
    prompts = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 7], [8]]
    tree = share(prompts, min_shared=1)
    assert tree.levels == ((Node(tokens=(1,), sequences=(0, 1, 2)),), (Node(tokens=(2, 3), sequences=(0, 1)),))
    assert tree.remainders == ((4,), (5,), (7,), (8,))
    assert tree.descendants == ((), (((0,),),), (((0, 1, 2),), ((0, 1),)))
    assert (tree.num_shared, num_saved(tree), tree.num_slots) == (3, 4, 1 + 2 + 4)


def test_what_does_not_pay_goes_to_the_nodes_below():
    prompts = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 7, 7, 7, 0], [1, 7, 7, 7, 3], [1, 9]]
    assert share(prompts, min_shared=4).levels == ((Node(tokens=(1,), sequences=(0, 1, 2, 3, 4)),),)
    assert share(prompts[:4], min_shared=4).levels == (
        (Node(tokens=(1, 2, 3, 4), sequences=(0, 1)), Node(tokens=(1, 7, 7, 7), sequences=(2, 3))),
    )


def test_equal_prompts_keep_their_last_token_to_themselves():
    tree = share([[5, 6, 7]] * 3, min_shared=1)
    assert tree.levels == ((Node(tokens=(5, 6), sequences=(0, 1, 2)),),)
    assert tree.remainders == ((7,),) * 3


@pytest.mark.parametrize("num_samples, shared", [(2, 0), (3, 1)])
def test_by_default_small_work_is_not_shared(num_samples, shared):
    prompt = [0] * (MIN_SHARED_KEYS // 2 + 1)
    assert len(share([prompt] * num_samples).levels) == shared


def test_a_comb_branches_more_often_than_python_recurses():
    prompts = [[0] * length + [1] for length in range(1100)]
    assert len(share(prompts, min_shared=1).levels) > 1000


def test_nothing_is_shared_of_one_prompt():
    assert share([[1, 2, 3]], min_shared=1) == unshared([[1, 2, 3]])
