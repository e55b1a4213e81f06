"""Shared parts of benchmarks on one GPU: rows that a rerun skips, and tables of them."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence

from tree_attn.measure import provenance, rows


class MissingRows:
    """Rows of a file that are not in it yet: each is measured, written with its provenance, and printed.

    Attributes:
      keys: names of the fields that tell rows apart.
    """

    def __init__(self, path: pathlib.Path, keys: Sequence[str]):
        """Opens the file of rows, and notes which are there."""
        self.keys = keys
        self._writer = rows.MeasuredRows(path)
        self._origin = origin()

    def has(self, labels: dict) -> bool:
        """Returns whether a row with these labels is in the file."""
        return any(self._key(row) == self._key(labels) for row in self._writer.rows)

    def add(self, labels: dict, measure: Callable[[], dict], title: str | None = None) -> None:
        """Measures the row of `labels` unless the file has it, writes it and prints a line."""
        if self.has(labels):
            return
        row = labels | measure() | self._origin
        self._writer.append(row)
        chain, us = row.get("chain_us_median"), row.get("device_us_median")
        times = [f"{us:8.1f} us"] if us else []  # the profiler may have lost events
        times += [f"chain {chain:8.1f} us, {chain / row['limit_us']:5.2f} x limit"] if chain else []
        result = ", ".join(times) or row["error"][:200]
        print(title or " ".join(f"{labels[key]!s:>8s}" for key in self.keys), result, flush=True)

    def _key(self, row: dict) -> tuple:
        return tuple(row.get(key) for key in self.keys)


def origin() -> dict:
    """Returns what every row of a benchmark on one GPU says of its run: date, host, driver, commit, command."""
    import jax

    return provenance.of_script(jax.local_devices()[:1]) | {"n_devices": 1}


def chosen(cases: Sequence, indices: str | None) -> list:
    """Returns the cases that `--cases` names ("0,3"), all of them for None."""
    return list(cases) if indices is None else [cases[int(i)] for i in indices.split(",")]


def cell(row: dict) -> str:
    """Returns a row's time in a table: of the kernels, and after a slash in a chain, where that was measured."""
    times = [row[name] for name in ("device_us_median", "chain_us_median") if row.get(name)]
    return " / ".join(f"{us:,.1f}" for us in times)


def markdown(
    path: pathlib.Path,
    label: Callable[[dict], str],
    ways: Sequence[str],
    step_type: type,
    verdict: tuple[str, Callable[[dict[str, float]], str]] | None = None,
) -> int:
    """Prints times, one line per case, in microseconds, with the commits that its rows were measured at.

    The limit is made from the row's shape, `step_type(...).limit_us`: rows of all days refer to the same rates. The
    share is what the first way reaches of it, in the chain where that was measured.

    Args:
      verdict: title and text of one more column, made from the chain time of each way; it is left out where rows have
        no such times.
    """
    all_rows = rows.read(path)
    if not any("chain_us_median" in row for row in all_rows):
        verdict = None
    titles = ["step", *ways, "limit", "share", *([verdict[0]] if verdict else []), "commit"]
    print(f"| {' | '.join(titles)} |")
    print("|" + "---|" * len(titles))
    for case in dict.fromkeys(map(label, all_rows)):
        of_case = [row for row in all_rows if label(row) == case]
        cells = [cell(next((row for row in of_case if row["way"] == way), {})) for way in ways]
        shape = {field.name for field in dataclasses.fields(step_type)} & of_case[0].keys()
        limit_us = step_type(**{name: of_case[0][name] for name in shape}).limit_us
        cells += [f"{limit_us:,.1f}", _share(limit_us, next((row for row in of_case if row["way"] == ways[0]), {}))]
        if verdict:
            cells.append(verdict[1]({row["way"]: us for row in of_case if (us := row.get("chain_us_median"))}))
        commits = ", ".join(dict.fromkeys(row["git_commit"] for row in of_case))
        print(f"| {' | '.join([case, *cells, commits])} |")
    return 0


def _share(limit_us: float, row: dict) -> str:
    us = row.get("chain_us_median") or row.get("device_us_median")
    return f"{limit_us / us:.0%}" if us else ""
