"""The posts about kernels: their programs print what they say."""

import pytest
from lean_interpreter import needs_interpreter
from pages import assert_prints_what_it_says, name_of, pages


@needs_interpreter
@pytest.mark.usefixtures("time_limit")
@pytest.mark.parametrize("page", pages("kernels"), ids=name_of)
def test_a_post_prints_what_it_says(page):
    assert_prints_what_it_says(page)
