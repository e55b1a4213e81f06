"""Draws the figures of docs/concepts, docs/kernels and docs/results.md, from committed rows and from formulas.

    python3 scripts/plot_concepts.py            # all of them, into docs/figures
    python3 scripts/plot_concepts.py links      # one

A picture carries a digest of the numbers that it shows. `tests/scripts/test_plot_concepts.py` compares the two, so that
other rows ask for another picture. "shares" shows the rows of `bench_sweep.py --table`.
"""

import argparse
import hashlib
import io
import json
import pathlib
import textwrap

from concept_numbers import NUMBERS, READ

from tree_attn.commands.units import length

ROOT = pathlib.Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "figures"
SIZE, DPI = (6.0, 3.5), 144  # inches: points are so large that a picture is readable at half its size
SMALL = 8  # points, of the source
GREEN, LIGHT_GREEN, PURPLE, GREY, RED = "#1b7837", "#7fbf7b", "#9970ab", "#555555", "#b2182b"


def main(names: list[str]) -> None:
    """Draws the figures of these names, or all."""
    for name in names or NUMBERS:
        draw(name, FOLDER / f"{name}.png")


def draw(name: str, path: pathlib.Path) -> None:
    """Draws one figure into a file, with the digest of its numbers in it."""
    from matplotlib.figure import Figure

    numbers = NUMBERS[name]()
    panels = len(numbers.get("panels", "1"))
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots(1, panels, sharey=True)
    for one in figure.axes:
        one.spines[["top", "right"]].set_visible(False)
    DRAWINGS[name](axes, numbers)
    if "source" in numbers:
        figure.supxlabel(numbers["source"], fontsize=SMALL, color=GREY, x=0.01, ha="left")
    save(figure, path, dpi=DPI, description=digest(numbers))


def save(figure, path: pathlib.Path, *, dpi: int, description: str = "") -> None:
    """Writes a figure as PNG with 64 colours, which halves its bytes and more, and with a description in it."""
    from PIL import Image, PngImagePlugin

    drawn, text = io.BytesIO(), PngImagePlugin.PngInfo()
    figure.savefig(drawn, dpi=dpi)
    text.add_text("Description", description)
    with Image.open(drawn) as picture:
        picture.convert("RGB").quantize(64).save(path, format="PNG", optimize=True, pnginfo=text)


def digest(numbers: dict) -> str:
    """Returns a short text that differs for other numbers."""
    return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()[:16]


def label(axes, x: float, y: float, text: str, colour: str, **options) -> None:
    """Writes a curve's name beside it."""
    axes.annotate(text, (x, y), color=colour, fontsize=10, annotation_clip=False, **options)


def name_marks(axes, marks: list[tuple], y: float, **options) -> None:
    """Writes the names of marks (x, y, name, colour) in a line at a height `y`, each with a stroke to its mark."""
    for i, (at, height, name, colour) in enumerate(sorted(marks)):
        from_text = (0.5, float(y > height))  # the edge of the text that the mark is beyond; y grows downwards
        arrow = {"arrowstyle": "-", "color": colour, "lw": 1, "shrinkB": 3, "relpos": from_text}
        place = {"xytext": (0.9 * (i + 0.5) / len(marks), y), "textcoords": axes.get_yaxis_transform(), "ha": "center"}
        label(axes, at, height, name, colour, arrowprops=arrow, **place, **options)


def state(axes, numbers: dict) -> None:
    """Draws the error of a merged weight over the lse, by the dtype that the lse is kept in."""
    for dtype, colour in (("bfloat16", RED), ("float16", PURPLE), ("float32", GREEN)):
        axes.plot(numbers["lse"], numbers[dtype], color=colour, lw=2)
        label(axes, numbers["lse"][-1] * 1.08, numbers[dtype][-1], dtype, colour, va="center")
    axes.axhline(numbers["of_out"], color=GREY, ls=":", lw=1.5)
    label(axes, 12, numbers["of_out"] * 0.4, "rounding of a bfloat16 output", GREY)
    axes.set(xscale="log", yscale="log", xlim=(1, 250), xlabel="size of the lse", ylabel="largest error of a weight")
    axes.set_title("A weight in a merge is exp(lse - max): the lse must be float32", fontsize=11, loc="left")


def bounds(axes, numbers: dict) -> None:
    """Draws reached products a second over products a byte, under both limits."""
    xs = [0.7, numbers["corner"], 10_000]
    axes.plot(xs, [min(x * numbers["read"], numbers["products"]) for x in xs], color=GREY, lw=1.5)
    label(axes, 1.1, 2.0 * numbers["read"], f"reading, {numbers['read']:.1f} TB/s", GREY, rotation=33)
    label(axes, 230, numbers["products"] * 1.12, f"products, {numbers['products']:.0f} TFLOP/s", GREY)
    for name, colour in (("dense", GREEN), ("shared", PURPLE)):
        points = numbers[name]
        axes.scatter([x for x, _, _ in points], [y for _, y, _ in points], color=colour, s=40, zorder=3)
    for x, y, text in numbers["labels"]:
        is_left = text.startswith("256")  # beside its neighbour's
        side = {"ha": "right" if is_left else "left", "va": "top" if x < 10 else "center"}
        label(axes, x / 1.12 if is_left else x * 1.25, y, text, GREY, **side)
    axes.set(xscale="log", yscale="log", xlim=(0.7, 10_000), ylim=(0.8, 1_800))
    axes.set(xlabel="products a byte that is read: query rows that share a key", ylabel="TFLOP/s")
    axes.set_title("One query row is one product a byte: decoding reads", fontsize=11, loc="left")


def microsecond(axes, numbers: dict) -> None:
    """Draws the parts of a step as bars, for each reduction and two lengths."""
    parts = ("reading at the limit", "rest of that kernel", "its merge", "gaps, other kernels", "the reduction adds")
    colours = dict(zip(parts, (LIGHT_GREEN, GREEN, "#dfc27d", "#999999", PURPLE)))
    for place, bar in enumerate(numbers["bars"]):
        left = 0.0
        for part, colour in colours.items():
            us = bar["parts"][part]
            axes.barh(place, us, left=left, color=colour, height=0.8)
            if us > 5.5:
                axes.text(left + us / 2, place, f"{us:.0f}", ha="center", va="center", color="white", fontsize=9)
            left += us
        axes.text(left + 2, place, f"{left:.0f}", va="center", fontsize=9)
    axes.set_yticks(range(len(numbers["bars"])), [bar["name"] for bar in numbers["bars"]], fontsize=9)
    axes.invert_yaxis()
    last, middles = numbers["bars"][-1]["parts"], {}
    for part in parts:
        middles[part] = sum(last[before] for before in parts[: parts.index(part)]) + last[part] / 2
    y = len(numbers["bars"])
    marks = [(middles[part], y - 0.6, textwrap.fill(part, 10), colour) for part, colour in colours.items()]
    name_marks(axes, marks, y + 0.35, va="top")
    axes.set_ylim(y + 2.0, -0.6)
    axes.set(xlabel="microseconds of a decoding step")


def links(panels, numbers: dict) -> None:
    """Draws the time of a step over the number of GPUs, by tree and by ring, with perfect scaling."""
    panels[0].figure.set_size_inches(6.6, 3.7)
    colours = {"ring": PURPLE, "gather": LIGHT_GREEN, "fused": GREEN}
    sizes = {"ring": 6, "gather": 10, "fused": 5}  # where marks lie on one another, all are seen
    for axes, panel in zip(panels, numbers["panels"]):
        gpus = [p for p, _ in panel["limit"]]
        axes.plot(*zip(*panel["limit"]), color=GREY, ls=":", lw=1.5)
        for name, colour in colours.items():
            curve = panel["curves"][name]
            axes.plot([p for p, _, _ in curve], [us for _, us, _ in curve], color=colour, lw=2, zorder=2)
            for p, us, has_setting in curve:
                full = colour if has_setting or name != "ring" else "white"
                axes.plot(p, us, "o", color=colour, markerfacecolor=full, markersize=sizes[name], zorder=3)
        p, us, _ = panel["curves"]["ring"][-1]
        label(axes, p, us, f"ring\n{us:,.0f}", PURPLE, xytext=(8, 0), textcoords="offset points", va="center")
        label(axes, 1, panel["limit"][2][1], "limit, 1/p", GREY, va="top")
        for name, up in (("gather", 7), ("fused", -7)):
            p, us, _ = panel["curves"][name][-1]
            label(
                axes, p, us, f"{name} {us:,.0f}", colours[name], xytext=(8, up), textcoords="offset points", va="center"
            )
        axes.set(xscale="log", yscale="log", xlim=(0.9, 26), ylim=(10, 40_000), xlabel="GPUs")
        axes.set_xticks(gpus, [str(p) for p in gpus])
        axes.set_xticks([], minor=True)
        axes.set_yticks(ticks := [10, 100, 1000, 10_000], [f"{us:,}" for us in ticks])
        axes.set_title(f"{length(panel['keys'])} keys", fontsize=11, loc="left")
    panels[0].set_ylabel("microseconds of a decoding step")


def placement(axes, numbers: dict) -> None:
    """Draws what the fullest device reads over the mean, while a cache fills."""
    for name, colour in (("contiguous", RED), ("block-cyclic", GREEN)):
        axes.plot(numbers["tokens"], numbers[name], color=colour, lw=2)
    label(axes, numbers["tokens"][9], numbers["contiguous"][9], "  contiguous", RED)
    label(axes, numbers["tokens"][9], 1.5, f"block-cyclic, blocks of {numbers['block']:,}", GREEN)
    axes.axhline(1, color=GREY, ls=":", lw=1.5)
    label(axes, numbers["tokens"][9], 0.45, "limit: every device holds as many", GREY)
    axes.set(xlim=(0, numbers["tokens"][-1]), ylim=(0, 8.6), ylabel="keys of the fullest device over the mean")
    axes.set_xticks(
        ticks := [i * numbers["tokens"][-1] / 4 for i in range(5)], [length(x) if x else "0" for x in ticks]
    )
    axes.set_xlabel(f"tokens in a cache of {length(numbers['tokens'][-1])}, on eight devices")
    axes.set_title("A step takes as long as the fullest device", fontsize=11, loc="left")


def prefixes(axes, numbers: dict) -> None:
    """Draws the time of a token over the number of samples, with its limit, and the limit without sharing."""
    for name, colour, style in (("measured", GREEN, "o-"), ("limit", LIGHT_GREEN, ":"), ("unshared", RED, ":")):
        points = numbers[name]
        axes.plot([x for x, _ in points], [y for _, y in points], style, color=colour, lw=2)
    texts = {
        "measured": "prompt shared: {:.0f}",
        "limit": "its limit: {:.0f}",
        "unshared": "limit of a prompt\neach: {:.0f}",
    }
    for name, colour in (("measured", GREEN), ("limit", LIGHT_GREEN), ("unshared", RED)):
        x, y = numbers[name][-1]
        label(axes, x, y, texts[name].format(y), colour, xytext=(8, 0), textcoords="offset points", va="center")
    axes.set(xscale="log", yscale="log", xlabel="samples of one prompt", ylabel="ms a token")
    axes.set(xlim=(0.8, 30_000), ylim=(2, 2000))
    axes.set_yticks(ticks := [10, 100, 1000], [f"{y:,}" for y in ticks])
    axes.set_xticks(ticks := [x for x, _ in numbers["measured"]], [f"{x:,}" for x in ticks])
    axes.set_xticks([], minor=True)
    axes.set_title(numbers["title"], fontsize=11, loc="left")


def approximations(axes, numbers: dict) -> None:
    """Draws a score over the share of the cache that is read, with standard errors."""
    colours = {"SparQ": GREEN, "H2O": PURPLE, "LM-Infinite": RED}
    for name, colour in colours.items():
        points = numbers[name]
        axes.errorbar(*zip(*points), color=colour, marker="o", lw=2, capsize=3)
        side = "top" if name == "LM-Infinite" else "bottom"
        label(axes, points[0][0] * 0.93, points[0][1], name, colour, ha="right", va=side)
    axes.axhline(numbers["dense"], color=GREY, ls=":", lw=1.5)
    label(axes, 1.0, numbers["dense"] + 0.015, "all keys", GREY, ha="right")
    axes.set(xscale="log", xlim=(0.075, 1.05), ylim=(0, 1.1), ylabel=numbers["unit"])
    axes.set_xlabel("share of the cache that a token moves")
    axes.set_xticks([0.125, 0.25, 0.5, 1], ["1/8", "1/4", "1/2", "1"])
    axes.set_xticks([], minor=True)
    axes.set_title(numbers["title"], fontsize=11, loc="left")


def shares(axes, numbers: dict) -> None:
    """Draws the share of the read rate by step, one mark for each kernel."""
    styles = {"cuDNN": (RED, "o"), "FlashInfer": (PURPLE, "o"), "mosaic_gpu": (GREEN, "o"), "default": ("black", "|")}
    places = range(len(numbers["steps"]))
    axes.figure.set_size_inches(SIZE[0], 1.5 + 0.32 * len(places))
    axes.hlines(places, 0, 1, color="#dddddd", lw=1)
    firsts = []
    for i, (name, curve) in enumerate(numbers["curves"].items()):
        colour, marker = styles[name]
        lower = 0.22 * (i - (len(numbers["curves"]) - 1) / 2)  # no mark covers another
        points = [(share, place + lower) for place, share in enumerate(curve) if share is not None]
        axes.plot(*zip(*points), marker, color=colour, markersize=6)
        firsts.append((*points[0], name, colour))
    name_marks(axes, firsts, -1.1)
    axes.axvline(1, color=GREY, ls=":", lw=1.5)
    label(axes, 1, len(places) - 0.7, "limit", GREY, xytext=(3, 0), textcoords="offset points")
    axes.set_yticks(places, numbers["steps"], fontsize=10)
    axes.set_ylim(len(places) - 0.4, -1.3)
    axes.set_xticks(ticks := [0, 0.25, 0.5, 0.75, 1], [f"{tick:.0%}" for tick in ticks])
    axes.set(xlim=(0, 1.1), xlabel=f"share of {READ / 1e12:.1f} TB/s, {numbers['time']}")


def launches(axes, numbers: dict) -> None:
    """Draws each try of a step in one launch and in two, from its tenth to its ninetieth percentile."""
    ways = list(dict.fromkeys(way for way, _, _ in numbers["tries"]))
    rows: dict[tuple, int] = {}
    for way, is_one, (low, median, high) in numbers["tries"]:
        number = rows[way, is_one] = rows.get((way, is_one), -1) + 1
        y = ways.index(way) + (0.2 if is_one else -0.2) + 0.1 * (number - 1)
        colour = GREEN if is_one else GREY
        axes.plot([low, high], [y, y], color=colour, lw=1.5)
        axes.plot(median, y, "o", color=colour)
    label(axes, 50, -0.25, "two launches", GREY, va="center", ha="right")
    label(axes, 50, 0.15, "one launch", GREEN, va="center", ha="right")
    axes.axvline(numbers["limit"], color=GREY, linestyle=":")
    label(axes, numbers["limit"] - 0.4, 1, "limit: reading", GREY, va="center", ha="right")
    axes.set_yticks(range(len(ways)), ways, fontsize=9)
    axes.invert_yaxis()
    axes.set(xlim=(0, 50), xlabel="microseconds of a step, p10 to p90; dots: medians")


def runs(axes, numbers: dict) -> None:
    """Draws the KV tiles of each CTA, in the colour of their output tile, for both ways."""
    colours = (GREEN, PURPLE, RED, LIGHT_GREEN, "#2166ac", "#dfc27d")
    y = 0
    for way, ctas in numbers.items():
        mean = sum(count for parts in ctas for _, count in parts) / len(ctas)
        axes.vlines(mean, y - 0.45, y + len(ctas) - 0.55, color=GREY, ls=":", lw=1.5, zorder=2)
        if y == 0:
            label(axes, mean + 0.15, 1.5, f"limit: the mean, {mean:.2g} KV tiles", GREY, va="center")
        axes.text(0, y - 0.65, way, fontsize=10, color=GREY, va="center")
        for cta, parts in enumerate(ctas):
            left = 0
            for output_tile, count in parts:
                axes.barh(y, count, left=left, height=0.8, color=colours[output_tile], edgecolor="white")
                axes.text(left + count / 2, y, f"{output_tile}", color="white", ha="center", va="center", fontsize=9)
                left += count
            axes.text(-0.15, y, f"CTA {cta}", ha="right", va="center", fontsize=8, color=GREY)
            y += 1
        y += 1
    axes.invert_yaxis()
    axes.spines["left"].set_visible(False)
    axes.set_yticks([])
    axes.set(xlabel="KV tiles, one after another; a bar's number is its output tile")


DRAWINGS = {
    "state": state,
    "bounds": bounds,
    "microsecond": microsecond,
    "links": links,
    "placement": placement,
    "prefixes": prefixes,
    "approximations": approximations,
    "shares": shares,
    "launches": launches,
    "runs": runs,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="figures; none: all")
    main(parser.parse_args().names)
