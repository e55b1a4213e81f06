"""The mutants: each module of the core has tests that may notice one."""

import pathlib

from . import mutants


def test_each_module_has_tests():
    untested = [path for path in mutants.modules() if not mutants.tests_of(path)]
    assert not untested
    named = [pathlib.Path("tests", name) for names in mutants.TESTS.values() for name in names]
    assert not [str(path) for path in named if not (mutants.ROOT / path).exists()]
