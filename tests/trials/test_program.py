"""The program of the trials: mutants that tests may notice, rounds that end by themselves."""

import pathlib
import sys

from . import __main__, mutants


def test_each_module_has_tests():
    untested = [path for path in mutants.modules() if not mutants.tests_of(path)]
    assert not untested
    named = [pathlib.Path("tests", name) for names in mutants.TESTS.values() for name in names]
    assert not [str(path) for path in named if not (mutants.ROOT / path).exists()]


def test_a_round_that_ends_early_is_a_fault(tmp_path, capsys):
    """A draw that raises would else end its round unseen."""
    for status, num_failed in ((1, 1), (__main__.FOUND, 0), (0, 0)):
        found = __main__._run_round([sys.executable, "-c", f"raise SystemExit({status})"], tmp_path, 60)
        assert sum(found["failed"].values()) == num_failed
    assert "FAULT process ended: exit status 1" in capsys.readouterr().out
