"""The rules of the script that runs every command: what must fit 80 columns, and what is said of all runs."""

import pytest

from . import screens
from .__main__ import Longest, check_screen, written_by_the_model

LONG = "a word " * 20


def shown(out: str, **changes) -> screens.Run:
    fields = dict(status=0, out=out, err="", longest_silence_s=0.5, ended_s=None)
    return screens.Run(**(fields | changes))


def test_text_of_the_model_may_be_long_and_nothing_else():
    document = {"samples": [{"text": f"one\n {LONG}\u2026"}, {"text": "two"}], "attention": "tree"}
    text = written_by_the_model(document)
    assert text == {"one", f"{LONG}\u2026", "two"}
    run = shown(f"--- 1 of 2\none\n {LONG}\u2026\n--- end\n")
    assert check_screen(run, "terminal", text) == "--- end"
    with pytest.raises(AssertionError, match="a cell is cut"):
        check_screen(run, "terminal")
    for out in (f"{LONG}\n", f"--- {LONG}\u2026\n"):
        with pytest.raises(AssertionError):
            check_screen(shown(out), "terminal", text)


def test_the_text_of_one_prompt_and_of_several():
    assert written_by_the_model({"text": "a\nb"}) == {"a", "b"}
    assert written_by_the_model({"generations": [{"text": "a"}, {"text": "c"}]}) == {"a", "c"}


def test_the_longest_of_all_runs_is_told():
    longest = Longest()
    longest.add(shown("", longest_silence_s=2.6))
    assert str(longest) == "longest silence 2.60 s"
    for ended_s in (0.2, 0.4, 0.1):
        longest.add(shown("", ended_s=ended_s))
    assert str(longest) == "slowest of 3 interrupts ended in 0.40 s, longest silence 2.60 s"
