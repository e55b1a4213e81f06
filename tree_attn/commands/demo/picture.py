"""The picture of `tree-attn demo`: what attention sends here, and what a step takes on GPUs."""

import pathlib
from collections.abc import Sequence

from tree_attn.commands import drawing, units
from tree_attn.commands.demo import measured
from tree_attn.commands.demo.answers import Outcome

COLORS = {"tree": "tab:green", "ring": "tab:red"}


def draw(outcomes: Sequence[Outcome], path: pathlib.Path) -> None:
    """Draws bars of the bytes that each device sends for one token, and measured times and their limit over keys.

    Raises:
      OSError: the file cannot be written.
    """
    figure = drawing.new_figure(11, 4)
    here, on_gpus = figure.subplots(1, 2)
    spread = [outcome for outcome in outcomes if outcome.attention in COLORS]
    kilobytes = [outcome.bytes_sent_attention / 1000 for outcome in spread]
    names = [outcome.attention for outcome in spread]
    bars = here.bar(names, kilobytes, color=[COLORS[name] for name in names], width=0.5)
    here.bar_label(bars, fmt="{:,.0f} kB")
    here.set(title=f"Sent by each of {spread[0].n_devices} devices here, one token", ylabel="kB, by attention")
    here.yaxis.set_major_formatter("{x:,.0f}")
    here.margins(y=0.15)
    here.spines[["top", "right"]].set_visible(False)
    curves = {  # us by keys, name and colour
        "ring": ([row.ring_us for row in measured.ROWS], "ring, overlapped", COLORS["ring"]),
        "tree": ([row.tree_us for row in measured.ROWS], "tree, fused", COLORS["tree"]),
        "limit": ([measured.limit_us(row.num_keys) for row in measured.ROWS], "limit: reading K and V", "black"),
    }
    keys = [row.num_keys for row in measured.ROWS]
    for name, (us, _, colour) in curves.items():
        on_gpus.plot(keys, us, ":" if name == "limit" else "o-", color=colour)
    title = f"One step on {measured.MACHINE}, measured, commit {measured.COMMIT}\n{measured.STEP}"
    on_gpus.set(title=title, xlabel="keys", ylabel="microseconds")
    drawing.logarithmic(on_gpus)
    on_gpus.set_xticks(keys, [units.length(number) for number in keys])
    ticks = drawing.ticks(*on_gpus.dataLim.intervaly)
    on_gpus.set_yticks(ticks, [f"{us:,.0f}" for us in ticks])
    drawing.label_ends(on_gpus, [(keys[-1], us[-1], name, colour) for us, name, colour in curves.values()])
    figure.savefig(path, dpi=150)
