"""The picture of `tree-attn demo`: what attention sends here, and what a step takes on GPUs."""

import pathlib
from collections.abc import Sequence

from tree_attn.commands.demo import measured
from tree_attn.commands.demo.answers import Outcome
from tree_attn.commands.drawing import new_figure

COLORS = {"tree": "tab:green", "ring": "tab:red"}


def draw(outcomes: Sequence[Outcome], path: pathlib.Path) -> None:
    """Draws bars of the bytes that each device sends for one token, and measured times over the number of keys.

    Raises:
      OSError: the file cannot be written.
    """
    figure = new_figure(10, 4)
    here, on_gpus = figure.subplots(1, 2)
    spread = [outcome for outcome in outcomes if outcome.attention in COLORS]
    kilobytes = [outcome.bytes_sent_attention / 1000 for outcome in spread]
    names = [outcome.attention for outcome in spread]
    bars = here.bar(names, kilobytes, color=[COLORS[name] for name in names], width=0.5)
    here.bar_label(bars, fmt="{:,.0f} kB")
    here.set(title=f"Sent by each of {spread[0].n_devices} devices here, one token", ylabel="kB, by attention")
    here.margins(y=0.15)
    keys = [row.num_keys for row in measured.ROWS]
    on_gpus.plot(keys, [row.ring_us for row in measured.ROWS], "o-", color=COLORS["ring"], label="ring, overlapped")
    on_gpus.plot(keys, [row.tree_us for row in measured.ROWS], "o-", color=COLORS["tree"], label="tree, fused")
    on_gpus.set(
        title=f"One step on {measured.MACHINE}, measured\n{measured.STEP}", xlabel="keys", ylabel="microseconds",
        xscale="log", yscale="log",
    )  # fmt: skip
    on_gpus.set_xticks(keys, [f"{number:,}" for number in keys])
    on_gpus.minorticks_off()
    on_gpus.grid(alpha=0.3)
    on_gpus.legend()
    figure.savefig(path, dpi=150)
