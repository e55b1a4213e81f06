"""The timeline of a ring: what counts as a transfer, and what of it is hidden."""

import pathlib

import pytest
import ring_timeline

from tree_attn.commands import drawing

EVENTS = [(0.0, 4.0, "fmha"), (1.0, 6.0, "ncclDevKernel_SendRecv"), (3.0, 5.0, "MemcpyP2P"), (5.5, 9.0, "fusion")]


def test_of_two_transfers_that_meet_the_union_counts():
    assert ring_timeline.overlap(EVENTS) == (5.0, 3.5)
    assert ring_timeline.overlap(EVENTS[1:2]) == (5.0, 0.0)
    assert ring_timeline.overlap([]) == (0.0, 0.0)


def test_times_are_in_us_from_the_first_event_of_all_devices():
    events = {"GPU:0": [(3000.0, 4000.0, "a")], "GPU:1": [(2000.0, 2500.0, "b")], "GPU:2": []}
    found = ring_timeline.from_first(events)
    assert found == {"GPU:0": [(1.0, 2.0, "a")], "GPU:1": [(0.0, 0.5, "b")], "GPU:2": []}


SAVED = pathlib.Path(__file__).parents[2] / "docs" / "results" / "ring_timeline_h100"
SHAPE = {"num_keys": 131_072, "num_heads": 16, "num_kv_heads": 16, "head_dim": 128, "n_devices": 2, "block_size": "1"}
ORIGIN = {"hardware": "2 x NVIDIA H100 80GB HBM3", "date": "2026-11-25T10:00:00", "git_commit": "abcdef0123"}


def drawn(found: dict, path: pathlib.Path, monkeypatch) -> list[str]:
    """Draws a time line, and returns the texts of the picture that are no ticks."""
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    figures = []
    new_figure = lambda *size: figures.append(Figure(figsize=size, layout="constrained")) or figures[-1]
    monkeypatch.setattr(drawing, "new_figure", new_figure)
    ring_timeline.draw(found, path)
    return [text.get_text() for text in figures[0].findobj(Text)]


def test_a_picture_names_hardware_commit_and_limit(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    events = {"/device:GPU:0": EVENTS, "/device:GPU:1": []}
    texts = drawn(SHAPE | ORIGIN | {"call": "decode", "events": events}, tmp_path / "timeline.png", monkeypatch)
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    lines = "\n".join(texts).splitlines()
    assert "2 x NVIDIA H100 80GB HBM3, 2026-11-25, commit abcdef0" in lines
    assert "a step of ring_decode: 128k keys, 16 query and 16 KV heads of 128" in lines
    assert "limit: K and V over the link at 450 GB/s, 1.19 ms" in lines
    assert {"GPU 0, transfer", "GPU 1, attention"} <= set(lines)


def test_the_limit_is_the_longest_part():
    # Half of the keys cross the link: 65,536 x 16 x 128 x 2 arrays x 2 bytes.
    name, us = ring_timeline.limit(SHAPE | ORIGIN | {"call": "decode"})
    assert (name, us) == ("K and V over the link at 450 GB/s", pytest.approx(536_870_912 / 450e9 * 1e6))
    # Causal: 2 N^2 products of the width over both GPUs, and 2.5 times as many backward.
    prefill, gradient = (ring_timeline.limit(SHAPE | ORIGIN | {"call": call}) for call in ("prefill", "gradient"))
    us = 131_072**2 * 2048 / 989.5e12 * 1e6
    assert prefill == ("products at 989.5 TFLOP/s", pytest.approx(us))
    assert gradient == ("products at 989.5 TFLOP/s", pytest.approx(3.5 * us))
    short, others = {"num_keys": 512}, {"hardware": "2 x unknown GPU"}
    assert ring_timeline.limit(SHAPE | ORIGIN | short | {"call": "gradient"})[0].startswith("K and V, and their deriv")
    measured = {"hardware": "2 x NVIDIA H200"}  # its machine is no datasheet's
    assert ring_timeline.limit(SHAPE | measured | {"call": "prefill"}) == prefill
    assert ring_timeline.limit(SHAPE | ORIGIN | others | {"call": "decode"}) is None


@pytest.mark.parametrize("name", ["decode", "gradient_zigzag"])
def test_a_saved_time_line_is_drawn_again(name, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    ring_timeline.main(["--saved", str(SAVED / f"{name}.json"), "--out", str(tmp_path / "pictures")])
    picture = tmp_path / "pictures" / f"{name}.png"
    assert capsys.readouterr().out == f"Written: {picture}\n"
    assert picture.read_bytes().startswith(b"\x89PNG")
