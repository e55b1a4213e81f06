"""The paper's equations, against numbers worked out by hand."""

import pytest

from tree_attn.cost import equations

PAPER = dict(b=2, t=80_000, d=2048)  # section 6.3: 640,000 keys on 8 devices, hidden size 2048; here with batch 2


def test_equations_in_elements():
    assert equations.ring_memory_elements(**PAPER) == 4 * 2 * 80_000 * 2048 + 2 * 2 * 2048  # 8
    assert equations.tree_memory_elements(**PAPER, n_h=16) == 2 * 2 * 80_000 * 2048 + 2 * 2 * 2048 + 2 * 2 * 16  # 9
    assert equations.ring_volume_elements(**PAPER, p=8) == 2 * 2 * 80_000 * 2048 * 8  # 10
    assert equations.allreduce_volume_elements(100, p=4) == 150.0  # 12
    assert equations.tree_volume_elements(b=2, d=2048, n_h=16, p=8) == 2 * 7 / 8 * (2 * 2048 + 2 * 2 * 16)  # 14


def test_paper_claim_ring_memory_is_twice_tree_memory():
    ratio = equations.ring_memory_elements(**PAPER) / equations.tree_memory_elements(**PAPER, n_h=16)
    assert ratio == pytest.approx(2, rel=1e-4)


def test_paper_figure_4_gap_doubles_with_hidden_size():
    """Section 6.2: doubling the hidden size from 2048 to 4096 doubles the gap, 524 MB to 1040 MB."""
    gap = lambda d: (
        equations.ring_memory_elements(b=1, t=64_000, d=d)
        - equations.tree_memory_elements(b=1, t=64_000, d=d, n_h=d // 128)
    )
    assert gap(4096) / gap(2048) == pytest.approx(2, rel=1e-4)
    assert 2 * gap(2048) == pytest.approx(524e6, rel=0.01)  # bfloat16; the t that their 524 MB implies


def test_grouped_queries_shrink_only_keys_and_values():
    assert equations.ring_memory_elements(b=1, t=10, d=64, d_kv=16) == 4 * 10 * 16 + 2 * 64
    assert equations.tree_memory_elements(b=1, t=10, d=64, n_h=4, d_kv=16) == 2 * 10 * 16 + 2 * 64 + 2 * 4
    assert equations.ring_volume_elements(b=1, t=10, d=64, p=3, d_kv=16) == 2 * 10 * 16 * 3


def test_several_queries_multiply_the_terms_without_keys():
    assert equations.ring_memory_elements(b=1, t=10, d=64, num_queries=3) == 4 * 10 * 64 + 3 * 2 * 64
    assert equations.tree_memory_elements(b=1, t=10, d=64, n_h=4, num_queries=3) == 2 * 10 * 64 + 3 * (2 * 64 + 2 * 4)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: equations.ring_memory_elements(b=1, t=0, d=4), "t must be an integer of at least 1, got 0"),
        (lambda: equations.allreduce_volume_elements(-1, p=2), "numel must be at least 0, got -1"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
