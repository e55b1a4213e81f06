"""Table and plots of the rows of `bench_lean.py`."""

import pathlib

from benching import READ_GB_PER_S

from tree_attn.measure.rows import read

KEYS = ("figure", "batch", "max_keys", "sum_keys", "num_heads", "num_kv_heads", "head_dim", "implementation")


def markdown(path: pathlib.Path) -> int:
    """Prints device times, one line per case, in microseconds, and the share that mosaic_gpu reaches of the limit."""
    rows = read(path)
    names = {"mosaic_gpu": "mosaic_gpu", "cudnn": "cuDNN", "flashinfer": "FlashInfer"}
    print(f"| step | heads | {' | '.join(names.values())} | limit | share | commit |")
    print("|---|---|" + "---|" * (len(names) + 3))
    cases = {_key(row)[:-1]: row for row in rows}
    for key, row in cases.items():
        times = {r["implementation"]: r["device_us_median"] for r in rows if _key(r)[:-1] == key}
        step = f"{row['batch']} x {row['max_keys']:,}"
        step = f"{row['batch']} ragged, longest {row['max_keys']:,}" if row["is_ragged"] else step
        cells = " | ".join(f"{times[name]:.1f}" if name in times else "" for name in names)
        heads = f"{row['num_heads']}/{row['num_kv_heads']}"
        limit = _limit_us(row)
        share = f"{limit / times['mosaic_gpu']:.0%}" if "mosaic_gpu" in times else ""
        print(f"| {step} | {heads} | {cells} | {limit:.1f} | {share} | {row['git_commit']} |")
    return 0


def plot(path: pathlib.Path) -> int:
    """Draws time over the limit for each figure, one line per implementation and number of heads."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in read(path) if row.get("device_us_median")]
    axes_of = {"7": ("max_keys", "keys, one sequence"), "8": ("batch", "sequences of 16,384 keys")}
    axes_of["12"] = ("sum_keys", "keys over 8 sequences, the longest 65,536")
    figure, panels = plt.subplots(1, 3, figsize=(16, 5), sharey=True)
    styles = {"mosaic_gpu": "-", "cudnn": "--", "flash_attn": "-.", "flashinfer": ":"}
    for panel, (name, (x, label)) in zip(panels, axes_of.items()):
        for implementation, style in styles.items():
            for heads, colour in zip((8, 32, 64), ("tab:blue", "tab:orange", "tab:green")):
                chosen = [r for r in rows if (r["figure"], r["implementation"]) == (name, implementation)]
                points = sorted((r[x], r["device_us_median"] / _limit_us(r)) for r in chosen if r["num_heads"] == heads)
                if points:
                    panel.plot(*zip(*points), style, color=colour, marker=".", label=f"{implementation}, {heads} heads")
        panel.set(xscale="log", yscale="log", xlabel=label, title=f"LeanAttention, Figure {name}: head dim 64, bf16")
        panel.axhline(1, color="gray", linewidth=1)
        points = sorted({row[x] for row in rows if row["figure"] == name})
        panel.set_xticks(points, [f"{point:,}" for point in points], rotation=20)
        panel.set_xticks([], minor=True)
        if panel.get_legend_handles_labels()[0]:  # rows of this figure are there
            panel.legend(fontsize=7)
    panels[0].set_ylabel(f"device time / time to read K and V at {READ_GB_PER_S / 1000} TB/s")
    figure.savefig(path.with_suffix(".png"), bbox_inches="tight", dpi=110)
    return 0


def _limit_us(row: dict) -> float:
    """Returns the time to read the row's keys and values once, at the datasheet's rate."""
    return row["key_value_bytes"] / READ_GB_PER_S / 1e3


def _key(row: dict) -> tuple:
    return tuple(row[name] for name in KEYS)
