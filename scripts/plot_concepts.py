"""Draws the figures of docs/concepts and docs/kernels, from committed rows and from formulas.

    python3 scripts/plot_concepts.py            # all of them, into docs/figures
    python3 scripts/plot_concepts.py links      # one

A picture carries a digest of the numbers that it shows. `tests/scripts/test_plot_concepts.py` compares the two, so that
other rows ask for another picture.
"""

import argparse
import hashlib
import json
import pathlib

from concept_numbers import NUMBERS, READ

ROOT = pathlib.Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "figures"
GREEN, LIGHT_GREEN, PURPLE, GREY, RED = "#1b7837", "#7fbf7b", "#9970ab", "#555555", "#b2182b"


def main(names: list[str]) -> None:
    """Draws the figures of these names, or all."""
    for name in names or NUMBERS:
        draw(name, FOLDER / f"{name}.png")


def draw(name: str, path: pathlib.Path) -> None:
    """Draws one figure into a file, with the digest of its numbers in it."""
    from matplotlib.figure import Figure

    numbers = NUMBERS[name]()
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    DRAWINGS[name](axes, numbers)
    if "source" in numbers:
        figure.supxlabel(numbers["source"], fontsize=8, color=GREY, x=0.01, ha="left")
    figure.savefig(path, dpi=120, metadata={"Description": digest(numbers)})


def digest(numbers: dict) -> str:
    """Returns a short text that differs for other numbers."""
    return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()[:16]


def label(axes, x: float, y: float, text: str, colour: str, **options) -> None:
    """Writes a curve's name beside it."""
    axes.annotate(text, (x, y), color=colour, fontsize=10, annotation_clip=False, **options)


def short(keys: float) -> str:
    """Returns a number of keys as "80k"."""
    return f"{keys / 1024:.0f}k" if keys % 1024 == 0 else f"{keys / 1000:,.0f}k"


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
    xs = [0.7, numbers["corner"], 20_000]
    axes.plot(xs, [min(x * numbers["read"], numbers["products"]) for x in xs], color=GREY, lw=1.5)
    label(axes, 1.1, 2.0 * numbers["read"], f"reading, {numbers['read']:.1f} TB/s", GREY, rotation=33)
    label(axes, 700, numbers["products"] * 1.12, f"products, {numbers['products']:.0f} TFLOP/s", GREY)
    for name, colour in (("dense", GREEN), ("shared", PURPLE)):
        points = numbers[name]
        axes.scatter([x for x, _, _ in points], [y for _, y, _ in points], color=colour, s=40, zorder=3)
    for x, y, text in numbers["labels"]:
        is_left = text.startswith("256")  # beside its neighbour's
        side = {"ha": "right" if is_left else "left", "va": "top" if x < 10 else "center"}
        label(axes, x / 1.25 if is_left else x * 1.25, y, text, GREY, **side)
    axes.set(xscale="log", yscale="log", xlim=(0.7, 20_000), ylim=(2, 1_800))
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
    handles = [axes.barh(0, 0, color=colour, label=part) for part, colour in colours.items()]
    spacing = {"ncols": 5, "handlelength": 0.8, "handletextpad": 0.4, "columnspacing": 1.0}
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(-0.18, 1), frameon=False, fontsize=9, **spacing)
    axes.set(xlabel="microseconds of one decoding step")


def links(axes, numbers: dict) -> None:
    """Draws the time of a step over the number of GPUs, by tree and by ring, with perfect scaling."""
    gpus = numbers["gpus"]
    axes.plot(gpus, numbers["limit"], color=GREY, ls=":", lw=1.5)
    label(axes, gpus[-1] * 1.06, numbers["limit"][-1] * 0.82, "reading, 1/p", GREY, va="center")
    for name, colour in (("tree", GREEN), ("ring", PURPLE)):
        points = numbers[name]
        axes.plot([p for p, _ in points], [us for _, us in points], color=colour, marker="o", lw=2)
        for p, us in points:
            above = -17 if (name, p) == ("tree", 1) else 7
            label(axes, p, us, f"{us:,.0f}", colour, xytext=(0, above), textcoords="offset points", ha="center")
        label(axes, points[-1][0] * 1.06, points[-1][1], numbers["names"][name], colour, va="center")
    axes.set(xscale="log", yscale="log", xlim=(0.9, 14), ylim=(100, 40_000), ylabel="microseconds of one decoding step")
    axes.set_xticks(gpus, [str(p) for p in gpus])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("GPUs")
    axes.set_title(numbers["title"], fontsize=11, loc="left")


def placement(axes, numbers: dict) -> None:
    """Draws what the fullest device reads over the mean, while a cache fills."""
    for name, colour in (("contiguous", RED), ("block-cyclic", GREEN)):
        axes.plot(numbers["tokens"], numbers[name], color=colour, lw=2)
    label(axes, numbers["tokens"][9], numbers["contiguous"][9], "  contiguous", RED)
    label(axes, numbers["tokens"][9], 1.5, f"block-cyclic, blocks of {numbers['block']:,}", GREEN)
    axes.set(xlim=(0, numbers["tokens"][-1]), ylim=(0, 8.6), ylabel="keys of the fullest device over the mean")
    axes.set_xticks(ticks := [i * numbers["tokens"][-1] / 4 for i in range(5)], [short(x) if x else "0" for x in ticks])
    axes.set_xlabel(f"tokens in a cache of {short(numbers['tokens'][-1])}, on eight devices")
    axes.set_title("A step takes as long as the fullest device", fontsize=11, loc="left")


def prefixes(axes, numbers: dict) -> None:
    """Draws the time of a token over the number of samples, with its limit, and the limit without sharing."""
    for name, colour, style in (("measured", GREEN, "o-"), ("limit", LIGHT_GREEN, ":"), ("unshared", RED, ":")):
        points = numbers[name]
        axes.plot([x for x, _ in points], [y for _, y in points], style, color=colour, lw=2)
    texts = ("measured, the prompt\nheld and read once", "its limit", "limit if each sample\nreads its own prompt")
    for name, text, colour, place, offset, side in (
        ("measured", texts[0], GREEN, -1, (-14, 8), "right"),
        ("limit", texts[1], LIGHT_GREEN, 2, (8, -14), "left"),
        ("unshared", texts[2], RED, 2, (-14, 4), "right"),
    ):
        x, y = numbers[name][place]
        label(axes, x, y, text, colour, xytext=offset, textcoords="offset points", ha=side)
    axes.set(xscale="log", yscale="log", xlabel="samples of one prompt", ylabel="ms a token", ylim=(2.5, 1500))
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
    colours = {"cuDNN": RED, "FlashInfer": PURPLE, "mosaic_gpu": GREEN}
    places = range(len(numbers["steps"]))
    axes.hlines(places, 0, 1, color="#dddddd", lw=1)
    for name, colour in colours.items():
        axes.plot(numbers["curves"][name], places, "o", color=colour, label=name)
    axes.axvline(1, color=GREY, ls=":", lw=1.5)
    axes.set_yticks(places, numbers["steps"], fontsize=9)
    axes.invert_yaxis()
    axes.set_xticks(ticks := [0, 0.25, 0.5, 0.75, 1], [f"{tick:.0%}" for tick in ticks])
    axes.set(xlim=(0, 1.03), xlabel=f"share of {READ / 1e12:.1f} TB/s, the datasheet's")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, fontsize=9)


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
    label(axes, 39.2, -0.25, "two launches", GREY, va="center")
    label(axes, 39.2, 0.15, "one launch", GREEN, va="center")
    axes.set_yticks(range(len(ways)), ways, fontsize=9)
    axes.invert_yaxis()
    axes.set(xlim=(22, 45), xlabel="microseconds of one decoding step, p10 to p90; dots: medians")


def runs(axes, numbers: dict) -> None:
    """Draws the KV tiles of each CTA, in the colour of their output tile, for both ways."""
    colours = (GREEN, PURPLE, RED, LIGHT_GREEN, "#2166ac", "#dfc27d")
    y = 0
    for way, ctas in numbers.items():
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
