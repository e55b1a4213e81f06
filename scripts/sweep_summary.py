"""Summary of a sweep's rows: this library's time over the best peer's, by family, and the cases that are behind."""

import math
from collections.abc import Iterable, Sequence

from benching import cell

from tree_attn.measure.steps.ways import OURS, PICKED

MAX_GAP_US = 2  # between a step's chain and its kernels, as a goal


def is_peer(way: str) -> bool:
    """Returns whether a way is somebody else's kernel."""
    return way.startswith(("cudnn", "flashinfer"))


def latest(rows: Iterable[dict]) -> list[dict]:
    """Returns the last row of each case and way."""
    return list({(row["case"], row["way"]): row for row in rows}.values())


def ratios(rows: Sequence[dict], way: str) -> dict[str, float]:
    """Returns case -> chain time of a way over that of the fastest peer, for the cases that have both.

    A way's variants with options of XLA count as it: the fastest of them is taken.
    """
    found = {}
    for case in dict.fromkeys(row["case"] for row in rows):
        times = {row["way"]: row.get("chain_us_median") for row in rows if row["case"] == case}
        ours = [us for name, us in times.items() if us and name.split(" + options")[0] == way]
        peers = [us for name, us in times.items() if us and is_peer(name)]
        if ours and peers:
            found[case] = min(ours) / min(peers)
    return found


def geometric_mean(values: Iterable[float]) -> float:
    """Returns the geometric mean of at least one positive number."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def summary(rows: Sequence[dict]) -> str:
    """Returns a table of the families, and one of the cases in which None is behind the best peer, worst first."""
    rows = latest(rows)
    by_way = {way: ratios(rows, way) for way in (PICKED, OURS)}
    family_of = {row["case"]: row["family"] for row in rows}
    heads = "".join(f" {way} over the best peer: mean | worst | cases over 1.00 |" for way in by_way)
    lines = [f"| family | cases |{heads} None over the limit: mean |", "|---" * (3 + 3 * len(by_way)) + "|"]
    for family in [*dict.fromkeys(family_of.values()), "all"]:
        cases = [case for case, name in family_of.items() if family in (name, "all")]
        cells = [_cells([by_way[way][case] for case in cases if case in by_way[way]]) for way in by_way]
        over_limit = [
            row["chain_us_median"] / max(row["bytes_us"], row["products_us"])
            for row in rows
            if row["way"] == PICKED and row["case"] in cases and row.get("chain_us_median")
        ]
        mean = f"{geometric_mean(over_limit):.2f}" if over_limit else ""
        lines.append(f"| {family} | {len(cases)} | {' | '.join(cells)} | {mean} |")
    behind = sorted((item for item in by_way[PICKED].items() if item[1] > 1), key=lambda item: -item[1])
    lines += ["", f"None is behind the best peer in {len(behind)} of {len(by_way[PICKED])} cases:", ""]
    lines += ["| None over the best peer | step | limit | the four fastest, chain |", "|---|---|---|---|"]
    lines += [f"| {ratio:.2f} | {describe(case, rows)} |" for case, ratio in behind]
    missing = [case for case in family_of if case not in by_way[PICKED]]
    lines += _gaps(rows) + _spread(rows)
    lines += ["", f"No ratio, for want of a peer's time or ours: {', '.join(missing)}"] * bool(missing)
    return "\n".join(lines)


def _gaps(rows: Sequence[dict]) -> list[str]:
    """Says how often a step of None takes more than its kernels do: by gaps between launches, and by noise."""
    gaps = [
        row["chain_us_median"] - row["device_us_median"]
        for row in rows
        if row["way"] == PICKED and row.get("chain_us_median") and row.get("device_us_median")
    ]
    if not gaps:
        return []
    wide = sum(gap > MAX_GAP_US for gap in gaps)
    return [
        "",
        f"A step of None takes over {MAX_GAP_US} us more than the sum of its kernels in {wide} of {len(gaps)} cases, "
        f"at most {max(gaps):.1f} us more.",
    ]


def _spread(rows: Sequence[dict]) -> list[str]:
    """Says how far two chains of the same kernels are apart, where None picked what was timed by its name too."""
    named = {row["case"]: row["chain_us_median"] for row in rows if row["way"] == OURS and row.get("chain_us_median")}
    apart = sorted(
        abs(row["chain_us_median"] / named[row["case"]] - 1)
        for row in rows
        if row["way"] == PICKED and row.get("picked") == repr(OURS) and row.get("chain_us_median")
        if named.get(row["case"], row["chain_us_median"]) != row["chain_us_median"]  # else one row under both names
    )
    if not apart:
        return []
    median, ninth, worst = (f"{100 * apart[int(share * (len(apart) - 1))]:.1f} %" for share in (0.5, 0.9, 1))
    return [
        "",
        f"The same kernels under both names, {len(apart)} cases: chains differ by {median} at the median, by at most "
        f"{ninth} in nine of ten, by {worst} at worst.",
    ]


def markdown(rows: Sequence[dict]) -> str:
    """Returns a table of the cases: kernels and chain of each side, the limit, None over the best peer, the commit."""
    rows = latest(rows)
    over = ratios(rows, PICKED)
    lines = ["| step | None | mosaic_gpu | cuDNN | FlashInfer (way) | limit | None over the best peer | commit |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for case in dict.fromkeys(row["case"] for row in rows):
        of_case = [row for row in rows if row["case"] == case]
        shown = [_fastest(of_case, start) for start in (PICKED, OURS, "cudnn", "flashinfer")]
        cells = [cell(row) for row in shown]
        cells[2] += shown[2].get("way", "").removeprefix("cudnn")
        cells[3] += f" ({shown[3]['way'].removeprefix('flashinfer ')})" if shown[3] else ""
        limit = f"{max(of_case[0]['bytes_us'], of_case[0]['products_us']):,.1f}"
        ratio = f"{over[case]:.2f}" if case in over else ""
        commits = ", ".join(dict.fromkeys((row["git_commit"] or "unknown")[:7] for row in of_case))
        lines.append("| " + " | ".join([of_case[0]["title"], *cells, limit, ratio, commits]) + " |")
    return "\n".join(lines)


def _fastest(rows: Sequence[dict], start: str) -> dict:
    """Returns the row of the least chain time among the ways that begin so; empty without one."""
    timed = [row for row in rows if row["way"].startswith(start) and row.get("chain_us_median")]
    return min(timed, key=lambda row: row["chain_us_median"], default={})


def describe(case: str, rows: Sequence[dict]) -> str:
    """Returns a case in cells of a table: the step, its limit, and the chain times of None and the fastest others."""
    of_case = [row for row in rows if row["case"] == case]
    timed = sorted((row for row in of_case if row.get("chain_us_median")), key=lambda row: row["chain_us_median"])
    shown = [row for i, row in enumerate(timed) if i < 4 or row["way"] == PICKED]
    bound = max(of_case[0]["bytes_us"], of_case[0]["products_us"])
    return f"{of_case[0]['title']} | {bound:,.1f} | {', '.join(map(_time, shown))}"


def _time(row: dict) -> str:
    picked = f" ({row['picked']})" if row.get("picked") else ""
    return f"{row['way']}{picked} {row['chain_us_median']:,.1f}"


def _cells(values: Sequence[float]) -> str:
    if not values:
        return " | | "
    return f"{geometric_mean(values):.3f} | {max(values):.2f} | {sum(value > 1 for value in values)}"
