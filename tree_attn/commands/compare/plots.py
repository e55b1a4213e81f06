"""Plots of `tree-attn compare`: latency, memory and communication over the number of keys."""

import pathlib
from collections.abc import Callable, Sequence

from tree_attn.commands.drawing import new_figure
from tree_attn.measure.rows import strategy_label


def draw(rows: Sequence[dict], folder: pathlib.Path) -> dict[str, str]:
    """Draws latency.png, peak_memory.png and communication.png from rows; returns their paths by name.

    Predictions are crosses on a dashed line in the colour of their measurements. Rows with an error are left out.
    """
    files = {}
    for name, title, unit, measured, predicted in (
        ("latency", "Latency of one decoding step", "microseconds", "latency_us_median", None),
        ("peak_memory", "Peak memory per device, compiled", "bytes", "peak_memory_bytes_compiled",
         "peak_memory_bytes_predicted"),
        ("communication", "Bytes sent per device and step", "bytes", "bytes_sent_per_device_compiled",
         "bytes_sent_per_device_predicted"),
    ):  # fmt: skip
        files[name] = str(folder / f"{name}.png")
        _plot(rows, files[name], title, unit, measured, predicted)
    return files


def _plot(rows: Sequence[dict], path: str, title: str, unit: str, measured: str, predicted: str | None) -> None:
    figure = new_figure(7, 5)
    axes = figure.subplots()
    has_spread = measured == "latency_us_median"
    solid = _series(rows, lambda row: (row["num_keys"], row[measured]))
    dashed = {} if predicted is None else _series(rows, lambda row: (row["num_keys"], row[predicted]))
    for name in dict.fromkeys([*solid, *dashed]):
        points = solid.get(name, [])
        # Lines on one another are seen by their markers: hollow ones, of several sizes.
        size = 4 + 2 * (len(axes.get_lines()) % 3)
        xs, ys = ([point[i] for point in points] for i in (0, 1))
        (line,) = axes.plot(xs, ys, marker="o", markersize=size, fillstyle="none", label=name)
        if name in dashed:  # crosses are seen over a line that agrees, and where there is one length
            axes.plot(*zip(*dashed[name]), linestyle="--", marker="x", markersize=size, color=line.get_color())
        if has_spread:
            low, high = (
                [y for _, y in _series(rows, lambda row, end=end: (row["num_keys"], row[end])).get(name, [])]
                for end in ("latency_us_p10", "latency_us_p90")
            )
            axes.vlines([x for x, _ in points], low, high, color=line.get_color(), alpha=0.5, linewidth=3)
    note = " (crosses, dashed: predicted)" if predicted else " (bars: p10 to p90)" if has_spread else ""
    axes.set_title(f"{title}\n{_setting(rows)}", fontsize="medium")
    axes.set(xlabel="keys", ylabel=unit + note)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log" if solid or dashed else "linear")
    lengths = sorted({row["num_keys"] for row in rows})
    axes.set_xticks(lengths, [f"{num_keys:,}" for num_keys in lengths], rotation=30 if len(lengths) > 5 else 0)
    axes.minorticks_off()
    if axes.get_legend_handles_labels()[0]:
        figure.legend(fontsize="small", loc="outside lower center", ncols=3)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def _setting(rows: Sequence[dict]) -> str:
    """Returns what all rows have in common: "4 x NVIDIA H200, 16 query and 2 KV heads of 128, bfloat16, batch 1"."""
    row = rows[0]
    heads = f"{row['num_heads']} query and {row['num_kv_heads']} KV heads of {row['head_dim']}"
    return f"{row['hardware']}\n{heads}, {row['dtype']}, batch {row['batch']}"


def _series(rows: Sequence[dict], point: Callable[[dict], tuple]) -> dict[str, list[tuple]]:
    """Returns the points of each series, ordered by number of keys; a log axis has no place for zeros and gaps."""
    implementations = {row["implementation"] for row in rows}
    series: dict[str, list[tuple]] = {}
    for row in rows:
        if row["error"] is None and point(row)[1]:
            name = strategy_label(row["strategy"], row["reduction"])
            name += f" ({row['implementation']})" if len(implementations) > 1 else ""
            series.setdefault(name, []).append(point(row))
    return {name: sorted(points) for name, points in series.items()}
