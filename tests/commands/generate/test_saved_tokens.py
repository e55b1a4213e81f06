"""The file of saved tokens: a line that does not follow the lines before it is refused, whatever is wrong with it."""

import argparse
import json
import re

import pytest

from tree_attn.commands.generate.saved_tokens import SavedTokens

ROWS = [
    {"first": 0, "ids": [5, 6, 7], "is_last": False},
    {"first": 3, "ids": [8, 9, 10], "is_last": False},
    {"first": 6, "ids": [11], "is_last": True},
]


def opened(folder, rows, max_new_tokens: int = 12) -> SavedTokens:
    (folder / "tokens.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return reopened(folder, max_new_tokens)


def reopened(folder, max_new_tokens: int) -> SavedTokens:
    args = argparse.Namespace(out=folder, save_every=3, max_new_tokens=max_new_tokens)
    return SavedTokens(args, {"seed": 0}, vocab_size=256)


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_lines_that_follow_each_other_are_the_tokens(tmp_path, count):
    saved = opened(tmp_path, ROWS[:count]).load()
    assert saved.ids == [5, 6, 7, 8, 9, 10, 11][: 3 * count]
    assert saved.stopped == (count == 3)


def test_a_last_line_without_tokens_is_an_end_at_a_stop_token(tmp_path):
    saved = opened(tmp_path, [*ROWS[:2], {"first": 6, "ids": [], "is_last": True}]).load()
    assert (saved.ids, saved.stopped) == ([5, 6, 7, 8, 9, 10], True)


@pytest.mark.parametrize("stopped", [False, True])
def test_the_limit_is_no_end_of_the_file_and_a_stop_token_is(tmp_path, stopped):
    tokens = reopened(tmp_path, max_new_tokens=4)
    for token in (5, 6, 7, 8):
        tokens.add(token)
    tokens.close(stopped=stopped)
    longer = reopened(tmp_path, max_new_tokens=6)
    assert (longer.load().ids, longer.load().stopped) == ([5, 6, 7, 8], stopped)
    if not stopped:
        longer.add(9)
        longer.close(stopped=True)
        assert reopened(tmp_path, max_new_tokens=6).load().ids == [5, 6, 7, 8, 9]


def changed(number: int, **fields) -> list[dict]:
    """Returns the lines with other fields in one of them; None drops a field."""
    row = {name: value for name, value in (ROWS[number] | fields).items() if value is not None}
    return [*ROWS[:number], row, *ROWS[number + 1 :]]


@pytest.mark.parametrize(
    ("rows", "line", "words"),
    [
        (ROWS[1:], 1, "first must be 0, the number of tokens before it, got 3: a line is missing or doubled"),
        ([ROWS[0], ROWS[2]], 2, "first must be 3, the number of tokens before it, got 6: a line is missing"),
        ([ROWS[0], *ROWS], 2, "first must be 3, the number of tokens before it, got 0: a line is missing or doubled"),
        ([ROWS[0], ROWS[2], ROWS[1]], 2, "first must be 3"),
        ([*ROWS, ROWS[2]], 3, "is_last must be false where lines follow, got true"),
        (changed(1, is_last=True), 2, "is_last must be false where lines follow, got true"),
        (changed(1, is_last="false"), 2, "is_last must be true or false, got 'false'"),
        (changed(1, ids=None), 2, "ids must be there, got first, is_last"),
        (changed(0, first=None, ids=None, is_last=None), 1, "first, ids, is_last must be there, got nothing"),
        (changed(1, first=True), 2, "first must be 3"),
        (changed(1, ids="89"), 2, "ids must be a list of integers from 0 to 255, got 89"),
        (changed(1, ids=[8, 9.0, 10]), 2, "ids must be a list of integers from 0 to 255, got [8, 9.0, 10]"),
        (changed(1, ids=[8, True, 10]), 2, "ids must be a list of integers from 0 to 255"),
        (changed(1, ids=[8, -9, 10]), 2, "ids must be a list of integers from 0 to 255"),
        (changed(1, ids=[8, 256, 10]), 2, "ids must be a list of integers from 0 to 255"),
        (changed(1, ids=[]), 2, "ids must hold a token or more unless is_last is true, got none"),
    ],
)
def test_a_line_that_does_not_follow_is_refused_by_its_number(tmp_path, rows, line, words):
    with pytest.raises(ValueError) as error:
        opened(tmp_path, rows)
    assert str(error.value).startswith(f"{tmp_path / 'tokens.jsonl'}, line {line}: {words}")
    assert "\n" not in str(error.value)


def test_more_tokens_than_the_limit_are_refused(tmp_path):
    message = f"--max-new-tokens must be at least 7, got 5: {tmp_path} has 7 tokens already"
    with pytest.raises(ValueError, match=re.escape(message)):
        opened(tmp_path, ROWS, max_new_tokens=5)


def test_another_prompt_is_refused_in_words(tmp_path):
    args = argparse.Namespace(out=tmp_path, save_every=3, max_new_tokens=12)
    SavedTokens(args, {"seed": 0, "prompt_ids": [1, 2]}, vocab_size=256)
    message = f"{tmp_path} holds the tokens of another prompt: give that --prompt, or another --out"
    with pytest.raises(ValueError, match=re.escape(message)):
        SavedTokens(args, {"seed": 0, "prompt_ids": [1, 3]}, vocab_size=256)
    with pytest.raises(ValueError, match="seed is 0 there and 1 here"):
        SavedTokens(args, {"seed": 1, "prompt_ids": [1, 3]}, vocab_size=256)


def test_an_interrupt_saves_the_tokens_of_an_unfinished_batch(tmp_path):
    tokens = opened(tmp_path, ROWS[:1])
    for token in (8, 9):
        tokens.add(token)
    tokens.save()
    tokens.save()
    assert opened_again(tmp_path).ids == [5, 6, 7, 8, 9]
    tokens.add(10)
    tokens.save()
    assert opened_again(tmp_path).ids == [5, 6, 7, 8, 9, 10]


def opened_again(folder):
    rows = [json.loads(line) for line in (folder / "tokens.jsonl").read_text().splitlines()]
    return opened(folder, rows).load()
