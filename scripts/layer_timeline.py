"""The kernels of one layer of a decoding step on a time line: from rows of `profile_llama.py` and `peer_llama.py`.

A layer runs from the start of its attention, or of the launch that has it, to the start of the next layer's: every
kernel of a layer is in it once. Of all such layers of a profile the one of median length is drawn. The floor is the
time to read a layer's weights and its keys and values once, at the datasheet's rate.
"""

import collections
import json
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Event = tuple[float, float, str]  # start and end in us, name
# The first kind whose pattern is found in a kernel's name is the kernel's.
KINDS = (
    ("chain of products and attention", re.compile(r"few_rows_chain"), "#6a3d9a"),
    ("sum over GPUs", re.compile(r"nccl|all_?reduce|one_shot|(?<!lean_)exchange", re.I), "#d95f02"),
    ("other", re.compile(r"norm|rope|rotary|silu|act_and_mul|append", re.I), "#8c8c8c"),
    ("attention", re.compile(r"attention|lean_|mha|sdpa|Batch(Prefill|Decode)|merge_?states", re.I), "#1b9e77"),
    ("product", re.compile(r"gemm|gemv|nvjet|cutlass|cublas|few_rows|dot|split_?k", re.I), "#3b6fb6"),
)
OTHER = "other"
SMALL = 9  # points, of names and numbers at the bars
COLOURS = {name: colour for name, _, colour in reversed(KINDS)}
NEEDED = ("way", "config", "context", "layers", "steps", "kernel_names", "events", "read_bytes_per_s")
NEEDED += ("layer_weights_bytes", "layer_cache_bytes")


def packed(events_ns: Iterable[Event]) -> dict[str, list]:
    """Returns the fields of a row that hold events given in ns: names, and start, duration (us) and index of each."""
    events = sorted(events_ns)
    names = list(dict.fromkeys(name for _, _, name in events))
    index, first = {name: i for i, name in enumerate(names)}, events[0][0] if events else 0.0
    us = lambda ns: round(ns / 1e3, 3)
    return {"kernel_names": names, "events": [[us(s - first), us(e - s), index[name]] for s, e, name in events]}


def unpacked(row: Mapping[str, Any]) -> list[Event]:
    """Returns the events of a row's fields."""
    return [(start, start + us, row["kernel_names"][index]) for start, us, index in row["events"]]


def read_rate(device_kind: str) -> float | None:
    """Returns the bytes per second of a device's datasheet; None where there is none, and then nothing is drawn."""
    from tree_attn.cost import datasheets

    try:
        return datasheets.rates(device_kind)["read_bytes_per_s"]
    except KeyError:
        return None


def kind_of(name: str) -> str:
    """Returns what a kernel does, by its name."""
    return next((kind for kind, pattern, _ in KINDS if pattern.search(name)), OTHER)


def layer_of(events: Sequence[Event], num_layers: int, num_steps: int) -> tuple[list[Event], float]:
    """Returns the events of one layer, from 0 us on, and its length: of all layers the one of median length.

    Raises:
      ValueError: no kernel runs once in each layer, so that the layers cannot be told apart.
    """
    starts: dict[str, list[float]] = collections.defaultdict(list)
    spent: dict[str, float] = collections.Counter()
    for start, end, name in events:
        starts[name].append(start)
        spent[name] += end - start
    once = [name for name in starts if len(starts[name]) == num_layers * num_steps]
    # Attention proper rather than the merge of its parts; any other such kernel where it has a name of its own.
    anchor = max(once, key=lambda name: (kind_of(name) == "attention", spent[name]), default=None)
    if anchor is None or num_layers < 2:
        counts = ", ".join(f"{len(found)} x {name:.40}" for name, found in starts.items())
        raise ValueError(f"no kernel runs once in each of {num_layers} layers of {num_steps} steps: {counts}")
    bounds = sorted(starts[anchor])
    # Between the last layer of a step and the next step's first are the head and the sampling.
    layers = [bounds[i : i + 2] for i in range(len(bounds) - 1) if (i + 1) % num_layers]
    begin, end = sorted(layers, key=lambda bound: bound[1] - bound[0])[len(layers) // 2]
    return [(s - begin, e - begin, name) for s, e, name in events if begin <= s < end], end - begin


def summary(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what is drawn of a row: one layer's kernels, its length, and the time in which any kernel ran."""
    kernels, layer_us = layer_of(unpacked(row), row["layers"], row["steps"])
    busy, reached = 0.0, 0.0
    for start, end, _ in sorted(kernels):
        busy += max(0.0, min(end, layer_us) - max(start, reached))
        reached = max(reached, min(end, layer_us))
    rounded = [[round(start, 3), round(end, 3), kind_of(name), name] for start, end, name in kernels]
    origin = {"hardware": row.get("hardware"), "git_commit": row.get("git_commit")}
    numbers = {"layer_us": round(layer_us, 3), "busy_us": round(busy, 3), "kernels": rounded}
    return {"way": row["way"]} | origin | numbers


def floor_us(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the least times to read what a layer reads: "weights", and "keys and values"."""
    rate = row["read_bytes_per_s"] / 1e6
    return {"weights": row["layer_weights_bytes"] / rate, "keys and values": row["layer_cache_bytes"] / rate}


def draw_rows(rows: Iterable[Mapping[str, Any]], folder: pathlib.Path) -> list[pathlib.Path]:
    """Draws a picture, and writes its numbers beside it, for each model, context and batch; returns the pictures.

    Sequences that share their prompt (`samples`) and those with a context each (`batch`) are of pictures of their own.

    Rows without events are left out, and with a printed reason those whose layers cannot be told apart. Of several rows
    of one way the last counts.

    Raises:
      ValueError: no row has events.
    """
    groups: dict[tuple, dict[str, Mapping]] = collections.defaultdict(dict)
    for row in rows:
        if all(row.get(name) is not None for name in NEEDED):
            batch, samples = row.get("batch") or 1, row.get("samples") or 1
            groups[row["config"], row["context"], batch, samples][row["way"]] = row
    if not groups:
        raise ValueError(f"rows must have {', '.join(NEEDED)}: none has them all")
    folder.mkdir(parents=True, exist_ok=True)
    pictures = []
    for (config, context, batch, samples), ways in groups.items():
        picture = folder / f"layer_{config}_{context}_{batch}{f'_{samples}_samples' if samples > 1 else ''}.png"
        found = {"config": config, "context": context, "batch": batch, "samples": samples}
        first = next(iter(ways.values()))
        found |= {"floor_us": floor_us(first), "read_bytes_per_s": first["read_bytes_per_s"], "ways": []}
        for way, row in ways.items():
            try:
                found["ways"].append(summary(row))
            except ValueError as error:
                print(f"{config}, {context:,}, {way}: {error}")
        if not found["ways"]:
            continue
        picture.with_suffix(".json").write_text(json.dumps(found) + "\n")
        draw(found, picture)
        pictures.append(picture)
    return pictures


def lanes(kernels: Sequence[Sequence]) -> list[int]:
    """Returns a lane for each kernel, in the order of their starts, so that those of a lane do not overlap."""
    ends: list[float] = []
    found = []
    for start, end, *_ in kernels:
        lane = next((i for i, reached in enumerate(ends) if start >= reached), len(ends))
        ends[lane : lane + 1] = [end]
        found.append(lane)
    return found


def draw(found: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draws the floor, and below it a band of kernels for each way, from the numbers that `draw_rows` writes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from tree_attn.commands import units

    ways, floor = found["ways"], sum(found["floor_us"].values())
    longest = max(floor, *(way["layer_us"] for way in ways))
    figure, axes = plt.subplots(figsize=(9, 1.4 + 0.9 * len(ways)), layout="constrained")
    labels, begin = [f"floor: bytes at {found['read_bytes_per_s'] / 1e12:.3g} TB/s\n{floor:.1f} us"], 0.0
    sides = {"weights": (found["floor_us"]["weights"] / 2, "center"), "keys and values": (floor * 1.01, "left")}
    for name, us in found["floor_us"].items():
        colour = COLOURS["product" if name == "weights" else "attention"]
        axes.broken_barh([(begin, us)], (-0.2, 0.4), facecolors=colour, alpha=0.45)
        x, side = sides[name]
        axes.text(x, 0, name, color=colour, fontsize=SMALL, ha=side, va="center")
        begin += us
    axes.axvline(floor, color="black", linewidth=1, linestyle="--")
    named: set[str] = set()
    for band, way in enumerate(ways, 1):
        _draw_band(axes, band, way["kernels"], way["layer_us"], longest)
        _name_kinds(axes, band, way["kernels"], named)
        axes.axvline(way["layer_us"], *_span(band, len(ways)), color="black", linewidth=1)
        gaps = way["layer_us"] - way["busy_us"]
        labels.append(f"{way['way']}\n{way['layer_us']:.1f} us, {gaps:.1f} of them in gaps")
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(ways) + 0.5, -0.5)
    axes.set_xlim(0, longest * 1.01)
    axis = "us from the start of attention, or of the launch that has it; numbers in bars are us"
    hardware = ", ".join(dict.fromkeys(str(way["hardware"]) for way in ways))
    commits = ", ".join(str(way["git_commit"]) for way in ways)
    axes.set_xlabel(f"{axis}\n{hardware}; commits of the ways, from above: {commits}", fontsize=SMALL)
    batch = f" x {found['batch']}" if found["batch"] > 1 else ""
    batch += f", {found['samples']} samples" if found["samples"] > 1 else ""
    axes.set_title(f"{found['config']}, {units.length(found['context'])} tokens{batch}: one layer of a decoding step")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_band(axes, band: int, kernels: Sequence[Sequence], layer_us: float, longest: float) -> None:
    """Draws kernels that overlap in lanes of the band, and the length of those that are wide enough for it."""
    of_kernels = lanes(kernels)
    height = 0.7 / (max(of_kernels, default=0) + 1)
    for (start, end, kind, _), lane in zip(kernels, of_kernels, strict=True):
        end = min(end, layer_us)  # what begins early waits in the next layer
        low = band - 0.35 + lane * height
        bar = [(start, end - start)]
        axes.broken_barh(bar, (low, height), facecolors=COLOURS[kind], edgecolor="white", linewidth=0.5)
        if end - start > longest / 30:
            text = dict(color="white", fontsize=SMALL, ha="center", va="center")
            axes.text((start + end) / 2, low + height / 2, f"{end - start:.1f}", **text)


def _span(band: int, count: int) -> tuple[float, float]:
    """Returns the ends of a band as shares of the height, from below."""
    return (count - band + 0.1) / (count + 1), (count - band + 0.9) / (count + 1)


def _name_kinds(axes, band: int, kernels: Sequence[Sequence], named: set[str]) -> None:
    """Writes each kind that no band above has at its longest kernel, and adds it to `named`.

    The name is above the band, or below it for a kernel that is not in the first lane.
    """
    longest: dict[str, tuple] = {}
    for (start, end, kind, _), lane in zip(kernels, lanes(kernels), strict=True):
        if kind not in longest or end - start > longest[kind][1] - longest[kind][0]:
            longest[kind] = start, end, lane
    for kind, (start, end, lane) in longest.items():
        if kind not in named:
            side = {"ha": "left"} if start == 0 else {"ha": "center"}
            side |= {"va": "top"} if lane else {"va": "bottom"}
            x, y = start if start == 0 else (start + end) / 2, band + (0.36 if lane else -0.36)
            place = {"xytext": (2 * (start == 0), 0), "textcoords": "offset points"}
            axes.annotate(kind, (x, y), color=COLOURS[kind], fontsize=SMALL, **place, **side)
            named.add(kind)
