"""A figure or table of a paper: the rows that it is made of, and the paper's numbers beside them."""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Number:
    """A number and its standard error, None where there is none."""

    value: float
    error: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One number of a figure or table.

    Attributes:
      setting: where it stands, such as "32k tokens, tree".
      where: fields of its row; a tuple is any of its values, and None a field that the row lacks, or has no value of.
      over: fields of another row, with which the number is combined (`Experiment.combine`).
      paper: the paper's number, or its word for none ("OOM"); None where the paper draws it and prints no number.
      bound: sign before the paper's number where it prints a bound: ">".
      x, series: place in a drawing; x None is not drawn.
      paper_series: the paper's name of its number in a drawing; "" is that of `series`.
    """

    setting: str
    where: Mapping[str, Any]
    over: Mapping[str, Any] | None = None
    paper: Number | str | None = None
    bound: str = ""
    x: float | None = None
    series: str = ""
    paper_series: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """The machine that an experiment runs on, and the options that some of them take.

    Attributes:
      gpus: GPUs that are here; 0 runs the small form on the CPU.
      text: file of plain text, for those that score a model.
      model: that model.
      samples: of each of its scores.
    """

    gpus: int
    text: pathlib.Path | None = None
    model: str = "smollm2"
    samples: int = 100

    @property
    def evaluation(self) -> list[str]:
        """Options of `tree-attn eval` that all its runs have."""
        return ["--text", str(self.text), "--model", self.model, "--samples", str(self.samples), "--no-plots"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """A run of another command, whose rows go into a folder below the experiment's.

    Attributes:
      arguments: of `tree-attn`, without `--out`.
    """

    folder: str
    arguments: Sequence[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Steps:
    """Decode steps on one device, by several ways each; `tree_attn.measure.steps` has their kinds.

    Attributes:
      kind: "lean", "prefix", "sparq" or "needles".
      cases: fields of each step.
      ways: names of the ways; () is what the kind has here.
      has_energy: also measure joules.
    """

    kind: str
    cases: Sequence[Mapping[str, Any]]
    ways: Sequence[str] = ()
    has_energy: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """A figure or table, and what makes it.

    Attributes:
      name: "tree-table-1".
      paper, place: "Tree Attention", "Table 1".
      what: what it shows, in a line.
      quantity: what its numbers are, with their unit.
      measure: the number of the rows that have a point's fields, the newest last; there is one or more.
      paper_hardware: the paper's.
      differs: what differs from the paper, and why, in sentences.
      points: its numbers.
      plan: the runs that make its rows, on a place.
      cpu: what the small form is, and what it leaves out.
      min_gpus: GPUs that the paper's form needs.
      needs_text: it scores a model on a text.
      cpu_is_true: what a CPU measures is what the figure shows: scores, no times.
      x_axis: name of the axis of its drawing; "" is none.
      combine: `(number of a point's row, number of the row `over`) -> number`; by default the second over the first.
      limit: the least that `measure` can be for a point's row, by a datasheet, which a drawing shows; None draws none.
    """

    name: str
    paper: str
    place: str
    what: str
    quantity: str
    measure: Callable[[Sequence[Row]], Number | None]
    paper_hardware: str
    differs: str
    points: Sequence[Point]
    plan: Callable[[Place], Sequence[Command | Steps]]
    cpu: str
    min_gpus: int = 1
    needs_text: bool = False
    cpu_is_true: bool = False
    x_axis: str = ""
    combine: Callable[[float, float], float] = lambda number, other: other / number
    limit: Callable[[Row], float | None] | None = None

    def ours(self, point: Point, rows: Sequence[Row]) -> Number | None:
        """Returns the number of a point from the newest rows that have its fields; None without such rows.

        A number of two rows is of one kind of hardware: the newest that has both.
        """
        rows = self._of_one_kind(point, rows)
        found = self._number(point.where, rows)
        if point.over is None or found is None:
            return found
        other = self._number(point.over, rows)
        return None if other is None else Number(value=self.combine(found.value, other.value))

    def limit_of(self, point: Point, rows: Sequence[Row]) -> float | None:
        """Returns what the number of a point of two rows would be at the limit; None where that is not known."""
        of_kind = self._of_one_kind(point, rows)
        if self.limit is None or point.over is None or not of_kind:
            return None
        limit = self.limit([row for row in _matching(point.where, of_kind) if not row.get("error")][-1])
        other = self._number(point.over, of_kind)
        return None if limit is None or other is None else self.combine(limit, other.value)

    def rows_of(self, point: Point, rows: Sequence[Row]) -> list[Row]:
        """Returns the rows that a point is made of."""
        rows = self._of_one_kind(point, rows)
        return [row for fields in _all_fields(point) for row in _matching(fields, rows)]

    def error(self, point: Point, rows: Sequence[Row]) -> str | None:
        """Returns why a point has no number, where its row says so."""
        newest = [_matching(fields, rows)[-1:] for fields in _all_fields(point)]
        return next((row["error"] for found in newest for row in found if row.get("error")), None)

    def _of_one_kind(self, point: Point, rows: Sequence[Row]) -> Sequence[Row]:
        """Returns all rows; if a point is of two numbers, those of the newest hardware that has both, or none."""
        if point.over is None:
            return rows
        newest_first = reversed(_matching(point.where, rows))
        for hardware in dict.fromkeys(row.get("hardware") for row in newest_first if not row.get("error")):
            of_kind = [row for row in rows if row.get("hardware") == hardware]
            if all(self._number(fields, of_kind) is not None for fields in _all_fields(point)):
                return of_kind
        return []

    def _number(self, fields: Mapping[str, Any], rows: Sequence[Row]) -> Number | None:
        found = [row for row in _matching(fields, rows) if not row.get("error")]
        return self.measure(found) if found else None


def field(name: str, factor: float = 1.0) -> Callable[[Sequence[Row]], Number | None]:
    """Returns the measure of a field of the newest row, times a factor."""
    return lambda rows: None if rows[-1].get(name) is None else Number(value=factor * rows[-1][name])


def step_us(rows: Sequence[Row]) -> Number | None:
    """Returns the time of a step in a chain, gaps between kernels included; of its kernels in rows without that."""
    us = rows[-1].get("chain_us_median") or rows[-1].get("device_us_median")
    return None if us is None else Number(value=us)


def reading_limit_us(row: Row) -> float | None:
    """Returns the least time of a step that is bound by reading, by the datasheet of its GPU; None if there is none.

    `limit_us` of a row is that of an H200, on every GPU.
    """
    from tree_attn.cost import datasheets

    if (peaks := peaks_of(row)) is None:
        return None
    of_h200 = datasheets.rates(datasheets.MEASURED)
    return row["limit_us"] * of_h200["read_bytes_per_s"] / peaks["read_bytes_per_s"]


def peaks_of(row: Row) -> dict[str, float] | None:
    """Returns the datasheet's rates of the hardware of a row, "1 x NVIDIA H200"; None if there is none."""
    from tree_attn.cost import datasheets

    try:
        return datasheets.rates(row["hardware"].partition(" x ")[2])
    except KeyError:
        return None


def scores(rows: Sequence[Row], factor: float = 1.0) -> Number:
    """Returns the mean of the scores of all rows, with its standard error, times a factor."""
    return mean_of([factor * score for row in rows for score in row["scores"]])


def mean_of(samples: Sequence[float]) -> Number:
    """Returns the mean of samples and its standard error."""
    mean = math.fsum(samples) / len(samples)
    if len(samples) == 1:
        return Number(value=mean)
    variance = math.fsum((sample - mean) ** 2 for sample in samples) / (len(samples) - 1)
    return Number(value=mean, error=math.sqrt(variance / len(samples)))


def thousands(count: int) -> str:
    """Returns a length as the papers print it: "8k" for 8,192 and 8,000, else all digits.

    Example:
      >>> thousands(32768)
      '32k'
    """
    for unit in (1024, 1000):
        if count % unit == 0:
            return f"{count // unit}k"
    return f"{count:,}"


def paper(value: float | str | None, error: float | None = None) -> Number | str | None:
    """Returns a paper's number, with the standard error that it prints."""
    return Number(value=value, error=error) if isinstance(value, int | float) else value


def _all_fields(point: Point) -> list[Mapping[str, Any]]:
    return [fields for fields in (point.where, point.over) if fields is not None]


def _matching(fields: Mapping[str, Any], rows: Sequence[Row]) -> list[Row]:
    agrees = lambda found, value: found in value if isinstance(value, tuple) else found == value
    return [row for row in rows if all(agrees(row.get(name), value) for name, value in fields.items())]
