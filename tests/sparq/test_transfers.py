"""Elements that each method reads and writes in a step, as SparQ Attention (appendix G) counts them."""

import pytest

from tree_attn.sparq import transfers

# S = 100 keys of d = 16 components, k = 7 kept keys.
SIZES = dict(num_keys=100, head_dim=16, num_kept=7)


@pytest.mark.parametrize(
    "name, sizes, expected",
    [
        ("dense", dict(num_keys=100, head_dim=16), 2 * 100 * 16 + 2 * 16),
        ("sparq", dict(**SIZES, num_components=3), 100 * 3 + 2 * 7 * 16 + 4 * 16),
        ("h2o", SIZES, 2 * 7 * 16 + 2 * 16 + 2 * 100),
        ("lm_infinite", dict(head_dim=16, num_kept=7), 2 * 7 * 16 + 2 * 16),
        ("flexgen", SIZES, 100 * 16 + 7 * 16 + 2 * 16),
    ],
)
def test_elements_are_those_of_the_paper(name, sizes, expected):
    assert getattr(transfers, f"{name}_transfer_elements")(**sizes) == expected
