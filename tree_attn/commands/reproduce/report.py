"""The output of `tree-attn reproduce`: our numbers beside the paper's, on a terminal and as JSON."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from tree_attn.commands import terminal
from tree_attn.commands.reproduce.experiment import Experiment, Number, Place, Point, Row
from tree_attn.commands.reproduce.experiments import ALL
from tree_attn.commands.units import count, number


class Line(NamedTuple):
    """One number as text: its setting, ours ("" without rows), and the paper's ("" where it prints none)."""

    setting: str
    ours: str
    paper: str


def lines(experiment: Experiment, rows: Sequence[Row]) -> list[Line]:
    """Returns the numbers of which there is ours or the paper's; ours name their hardware where they are of several."""
    found, has_several = [], not experiment.cpu_is_true and len(hardware(experiment, rows)) > 1
    for point in experiment.points:
        ours = experiment.ours(point, rows)
        text = _text(ours)
        if text and has_several:
            text += f", {short_name(_hardware_of(experiment, point, rows))}"
        if ours is None and experiment.error(point, rows) is not None:
            text = "does not run"
        if text or point.paper is not None:
            found.append(Line(point.setting, text, f"{point.bound}{_as_printed(point.paper)}"))
    return found


def hardware(experiment: Experiment, rows: Sequence[Row]) -> list[str]:
    """Returns the hardware of the rows that the numbers are made of, each once."""
    points = [point for point in experiment.points if experiment.ours(point, rows) is not None]
    used = [row for point in points for row in experiment.rows_of(point, rows)]
    return list(dict.fromkeys(row["hardware"] for row in used if row.get("hardware")))


def short_name(hardware: str | None) -> str:
    """Returns the name of hardware without its maker and memory.

    Example:
      >>> short_name("2 x NVIDIA H100 80GB HBM3")
      '2 x H100'
    """
    return re.sub(r" \d+GB.*", "", str(hardware).replace("NVIDIA ", ""))


def print_list(*, as_json: bool) -> None:
    """Prints all names, with what each shows and needs."""
    facts = [
        {"name": one.name, "paper": one.paper, "place": one.place, "shows": one.what, "min_gpus": one.min_gpus}
        | {"needs_text": one.needs_text, "runs_whole_on_a_cpu": one.cpu_is_true}
        for one in ALL
    ]
    if as_json:
        terminal.print_document({"experiments": facts})
        return
    console = terminal.output()
    for paper in dict.fromkeys(one.paper for one in ALL):
        table = terminal.table("name", "needs", "shows", title=paper, left=("name", "needs", "shows"))
        for one in ALL:
            if one.paper == paper:
                table.add_row(one.name, _needs(one), f"{one.place}: {one.what}")
        console.print(table)


def print_experiment(experiment: Experiment, place: Place, rows: Sequence[Row]) -> None:
    """Prints our numbers beside the paper's, both hardwares, and what differs."""
    console = terminal.output()
    terminal.say(console, f"{experiment.paper}, {experiment.place}: {experiment.what}")
    if not place.gpus:
        terminal.say(console, f"On the CPU: {experiment.cpu}")
    if place.gpus or experiment.cpu_is_true:
        columns = ("setting", "ours", "paper")
        table = terminal.table(*columns, title=experiment.quantity, left=("setting",))
        for line in lines(experiment, rows):
            table.add_row(*(cell or "-" for cell in line))
        console.print(table)
        ours = ", ".join(hardware(experiment, rows)) or "none of these rows"
        terminal.say(console, f"Hardware: ours {ours}; the paper's {experiment.paper_hardware}.")
        terminal.say(console, f"What differs: {experiment.differs.strip()}")
    else:
        errors = [row["error"] for row in rows if row.get("error")]
        text = f"{count(len(rows) - len(errors), 'row')} of the small form"
        terminal.say(console, f"{text}; none is a number of the paper, and its times say nothing about GPUs.")
        for error in dict.fromkeys(errors):
            terminal.say(console, f"One could not be measured: {error}")


def document(experiment: Experiment, place: Place, rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the JSON document."""
    points = [
        {"setting": point.setting, "ours": _fields(experiment.ours(point, rows))}
        | {"hardware": _hardware_of(experiment, point, rows)}
        | {"paper": _fields(point.paper), "paper_bound": point.bound or None, "error": experiment.error(point, rows)}
        for point in experiment.points
    ]
    facts = {"name": experiment.name, "paper": experiment.paper, "place": experiment.place}
    facts |= {"quantity": experiment.quantity, "paper_hardware": experiment.paper_hardware}
    facts |= {"differs": experiment.differs.strip(), "gpus": place.gpus}
    facts |= {"small_form": None if place.gpus or experiment.cpu_is_true else experiment.cpu}
    return facts | {"points": points, "rows": list(rows)}


def _hardware_of(experiment: Experiment, point: Point, rows: Sequence[Row]) -> str | None:
    """Returns the hardware of a point's newest number; None without one."""
    if experiment.ours(point, rows) is None:
        return None
    return [row.get("hardware") for row in experiment.rows_of(point, rows) if not row.get("error")][-1]


def _needs(experiment: Experiment) -> str:
    gpus = "a CPU" if experiment.cpu_is_true else count(experiment.min_gpus, "GPU")
    return gpus + (", --text" if experiment.needs_text else "")


def _text(value: Number | None) -> str:
    if value is None:
        return ""
    three_figures = f"{value.value:#.3g}" if abs(value.value) < 99.95 else number(value.value)
    return three_figures + ("" if value.error is None else f" ± {number(value.error, 2)}")


def _as_printed(value: Number | str | None) -> str:
    """Returns the paper's number with all its digits."""
    if not isinstance(value, Number):
        return value or ""
    return f"{value.value:,g}" + ("" if value.error is None else f" ± {value.error:g}")


def _fields(value: Number | str | None) -> Any:
    return {"value": value.value, "standard_error": value.error} if isinstance(value, Number) else value
