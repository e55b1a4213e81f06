"""Draws README's picture: one decoding step by tree and by ring, on eight and on four H200s.

python3 scripts/plot_front_page.py docs/figures/tree_and_ring.png
"""

import argparse
import json
import pathlib

from plot_concepts import save

from tree_attn.commands import units
from tree_attn.commands.figures.rows import device_kind, step
from tree_attn.cost import limits

ROOT = pathlib.Path(__file__).parent.parent
FOLDERS = ("compare_8xh200_8processes", "compare_4xh200_4processes_spread")
KEYS = (640_000, 81_920)
# Rows name the commit that they were measured at; this is the day of those commits.
DATE_OF_COMMIT = {"d6a7619": "22 November 2026", "d649ccb": "22 November 2026"}
POINTS = {  # (strategy, reduction) -> label, colour
    ("tree", "fused"): ("tree, fused", "#1b7837"),
    ("tree", "gather"): ("tree, gather", "#5aae61"),
    ("ring_overlapped", None): ("ring, overlapped", "#762a83"),
    ("ring_public", None): ("ring, public form", "#9970ab"),
}
GROUP = len(POINTS) + 1  # lines of one group, and a gap
GREY = "#555555"


def main(path: pathlib.Path) -> None:
    """Reads the committed rows, draws one point for each strategy, and writes the picture to `path`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    groups = [rows_of(folder, num_keys) for folder in FOLDERS for num_keys in KEYS]
    figure, axes = plt.subplots(figsize=(7, 4.6), layout="constrained")
    for place, rows in enumerate(groups):
        limit = limits.read_limit_us(step(rows["tree", "fused"]), device_kind(rows["tree", "fused"]))
        ends = place * GROUP - 0.5, place * GROUP + len(POINTS) - 0.5
        axes.vlines(limit, *ends, color="black", linestyle=":")
        if place == 0:
            axes.text(limit * 0.92, sum(ends) / 2, "limit", va="center", ha="right", fontsize=9)
        for line, (strategy, (label, colour)) in enumerate(POINTS.items()):
            y = place * GROUP + line
            if strategy not in rows:
                axes.text(limit * 1.15, y, f"{label}: not in this run", va="center", fontsize=9, color=GREY)
                continue
            us = rows[strategy]["latency_us_median"]
            axes.hlines(y, limit, us, color=colour, linewidth=1)
            axes.plot(us, y, marker="o", markersize=7, color=colour)
            name = f"  {label}" * (place == 0)  # the other groups have the same colours
            axes.text(us * 1.2, y, f"{us:,.0f}{name}", va="center", fontsize=9, color=colour)
    middles = [place * GROUP + (len(POINTS) - 1) / 2 for place in range(len(groups))]
    axes.set_yticks(middles, [group_label(rows) for rows in groups], fontsize=9)
    axes.set(xscale="log", xlim=(10, 900_000), xlabel="one decoding step, microseconds (median; log scale)")
    axes.set_xticks(ticks := [10, 100, 1000, 10_000], [f"{us:,}" for us in ticks])
    axes.minorticks_off()
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title(groups), fontsize=9, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    save(figure, path, dpi=132)


def rows_of(folder: str, num_keys: int) -> dict[tuple[str, str | None], dict]:
    """Returns the row of each strategy, of one folder of results and one length."""
    text = (ROOT / "docs/results" / folder / "results.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    return {(row["strategy"], row["reduction"]): row for row in rows if row["num_keys"] == num_keys}


def group_label(rows: dict) -> str:
    """Returns GPUs, keys and commit of one group of points, and the ring's rate beside that of its bare link."""
    ring = rows["ring_overlapped", None]
    link = f"ring sends {ring['sent_gb_per_s']:.0f} of {ring['neighbour_gb_per_s']:.0f} GB/s"
    return f"{ring['n_devices']} GPUs, {units.length(ring['num_keys'])} keys\n{link}\n({ring['git_commit']})"


def title(groups: list[dict]) -> str:
    """Returns what all rows have in common: hardware, heads, dtype, versions and date."""
    rows = [row for group in groups for strategy, row in group.items() if strategy in POINTS]
    (setting,) = {(row["num_heads"], row["num_kv_heads"], row["head_dim"], row["dtype"]) for row in rows}
    ((jax_version, batch),) = {(row["jax_version"], row["batch"]) for row in rows}
    (hardware,) = {row["hardware"].partition(" x ")[2] for row in rows}
    (date,) = {DATE_OF_COMMIT[row["git_commit"]] for row in rows}
    heads, kv_heads, head_dim, dtype = setting
    return (
        f"{hardware}s of one host, NVLink, one process per GPU; JAX {jax_version}; measured {date}\n"
        f"{heads} query and {kv_heads} KV heads of {head_dim}, {dtype}, batch {batch}; local kernels: mosaic_gpu "
        "(tree), cuDNN (ring)\nlimit: every GPU reads its part of K and V once, at the datasheet's rate"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=pathlib.Path, help="the picture, e.g. a .png")
    main(parser.parse_args().path)
