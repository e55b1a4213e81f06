"""`tree-attn demo`: the answer, the table, and the exit status when tokens differ."""

import contextlib
import dataclasses
import io

import pytest

from tree_attn.cli import main
from tree_attn.commands.demo import report
from tree_attn.commands.demo.answers import Outcome

OUTCOME = Outcome(
    attention="tree",
    n_devices=8,
    new_ids=[5, 6, 7],
    per_token_s=0.1,
    peak_memory_bytes=2**20,
    collectives=31,
    collectives_attention=30,
    bytes_sent=2048.0,
    bytes_sent_attention=1024.0,
)


@pytest.fixture(scope="module")
def shown(optimized) -> tuple[int, str]:
    """Returns exit status and output of the demo, without options."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        status = main(["demo"])
    return status, output.getvalue()


def cells(output: str, attention: str) -> list[str]:
    """Returns the cells of an attention's line in the table."""
    (found,) = [line for line in output.splitlines() if line.startswith(f"│ {attention} ")]
    return [cell.strip() for cell in found.strip("│").split("│")]


@pytest.mark.slow
def test_the_three_attentions_give_one_answer(shown):
    status, output = shown
    assert status == 0
    assert "The capital of France is Paris." in output
    assert "tree, ring, single: the same 7 tokens" in output


@pytest.mark.slow
def test_the_table_compares_what_one_token_costs(shown):
    _, output = shown
    name, devices, time, memory, collectives, sent = cells(output, "tree")
    assert (name, devices) == ("tree", "8")
    assert time.endswith(" ms")
    assert 0 < float(memory.removesuffix(" MiB")) < float(cells(output, "single")[3].removesuffix(" MiB"))
    # Of 30 layers: one gather each by tree, two tensors over seven hops each by the ring.
    assert collectives.endswith("(30)")
    assert cells(output, "ring")[4].endswith("(420)")
    assert cells(output, "single")[4:] == ["0 (0)", "0 KiB (0)"]
    # The gather moves, to each of 8 devices, 7 others' 9 heads of 64 + 1 float32 per layer.
    assert sent.endswith(f"({30 * 7 * 9 * 65 * 4 / 1024:.0f})")


def test_tokens_that_differ_are_reported_and_fail(capsys):
    other = dataclasses.replace(OUTCOME, attention="ring", new_ids=[5, 9, 7])
    assert report.compare([OUTCOME, other]) == 1
    assert "ring differs from tree from new token 1 on" in capsys.readouterr().err
    shorter = dataclasses.replace(OUTCOME, attention="single", new_ids=[5, 6])
    assert report.compare([OUTCOME, shorter]) == 1
    assert "single differs from tree from new token 2 on" in capsys.readouterr().err
    assert report.compare([OUTCOME, OUTCOME]) == 0


def test_a_wrong_request_is_one_line_on_stderr(capsys):
    assert main(["demo", "--max-new-tokens", "9000"]) == 2
    assert "max_new_tokens must be at most 8150 with a prompt of 42 tokens, got 9000" in capsys.readouterr().err
