"""matplotlib, which is loaded in a phase of its own: a cold import takes seconds."""

import importlib

import pytest

from tree_attn.commands import drawing, phases


def test_loading_matplotlib_is_a_phase(capsys, monkeypatch):
    shown, load = [], importlib.import_module
    show = lambda *names: shown.append(phases._screen._phases[-1].title) or load(*names)
    with monkeypatch.context() as patched, phases.command(is_quiet=False):
        patched.setattr(importlib, "import_module", show)
        assert drawing.has_matplotlib()
    assert set(shown) == {"loading matplotlib"} and capsys.readouterr().err == "loading matplotlib ...\n"


@pytest.mark.parametrize("error", [ImportError("no libfreetype"), RuntimeError("broken")])
def test_a_broken_matplotlib_leaves_no_phase(monkeypatch, error):
    def fail(name):
        raise error

    monkeypatch.setattr(importlib, "import_module", fail)
    assert not drawing.has_matplotlib() and str(error) in drawing.advice()
    assert phases._screen._phases == []


def test_names_are_spread_as_little_as_they_must():
    assert drawing.spread([0.1, 0.5, 0.9], 0.2) == [0.1, 0.5, 0.9]
    assert drawing.spread([0.5, 0.5, 0.5], 0.1) == pytest.approx([0.4, 0.5, 0.6])
    assert drawing.spread([0.0, 0.0, 1.0, 1.0], 0.25) == pytest.approx([0.0, 0.25, 0.75, 1.0])
    assert drawing.spread([], 0.1) == []


def test_the_stroke_to_a_curve_that_ends_early_is_dotted():
    pytest.importorskip("matplotlib")
    axes = drawing.new_figure(6, 4).subplots()
    axes.set(xlim=(0, 10), ylim=(0, 1))
    drawing.label_ends(axes, [(10, 0.2, "whole", "C0"), (5, 0.8, "early", "C1")])
    strokes = {text.get_text(): text.arrow_patch.get_linestyle() for text in axes.texts}
    assert strokes["whole"] in ("-", "solid") and strokes["early"] not in ("-", "solid")
