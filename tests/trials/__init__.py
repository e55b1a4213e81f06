"""Trials: random calls of the library, each compared with an oracle that shares nothing with it.

    python3 -m tests.trials --seed 1 --minutes 10                 # all subjects in turn
    python3 -m tests.trials --subject attention --case 'Case(...)'    # one case again
    python3 -m tests.trials --mutants 60 --seed 1                 # what the tests of the core notice

A subject is a module of this package that has these names:

    SUBJECT: str
    draw(rng: numpy.random.Generator) -> Case       # a frozen dataclass whose repr is a runnable reproducer
    check(case) -> str | None                       # the fault, beginning with its kind and a colon
    simpler(case) -> Iterator[Case]                 # optional: simpler cases than one that fails
    count(case) -> int                              # optional: the draws that a case holds, default 1
"""

import dataclasses
import importlib
import pathlib
import time
import types
from collections.abc import Iterator


class Reproducer:
    """A frozen dataclass whose repr leaves out the fields that have their defaults."""

    def __repr__(self) -> str:
        fields = dataclasses.fields(self)
        values = {field.name: getattr(self, field.name) for field in fields}
        is_default = {field.name: field.default == values[field.name] for field in fields}
        shown = ", ".join(f"{name}={value!r}" for name, value in values.items() if not is_default[name])
        return f"{type(self).__name__}({shown})"


def subjects() -> dict[str, types.ModuleType]:
    """Returns the modules of this package that are subjects, by name."""
    names = sorted(path.stem for path in pathlib.Path(__file__).parent.glob("*.py"))
    names = [name for name in names if not name.startswith(("_", "test_"))]
    modules = [importlib.import_module(f"{__package__}.{name}") for name in names]
    return {module.SUBJECT: module for module in modules if hasattr(module, "SUBJECT")}


def outcome(subject: types.ModuleType, case) -> str | None:
    """Returns what is wrong with a case, or None; an exception that `check` lets pass is a fault too."""
    try:
        return subject.check(case)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def count(subject: types.ModuleType, case) -> int:
    """Returns the number of draws that a case holds."""
    return subject.count(case) if hasattr(subject, "count") else 1


def kind(fault: str) -> str:
    """Returns the kind of a fault: what stands before the first colon."""
    return fault.split(":")[0]


def minimal(subject: types.ModuleType, case, fault: str, *, seconds: float) -> tuple[object, str]:
    """Returns the simplest case found within some seconds that has a fault of the same kind, and that fault."""
    end = time.monotonic() + seconds
    candidates: Iterator = subject.simpler(case) if hasattr(subject, "simpler") else iter(())
    while time.monotonic() < end:
        candidate = next(candidates, None)
        if candidate is None:
            break
        found = outcome(subject, candidate)
        if found is not None and kind(found) == kind(fault):
            case, fault, candidates = candidate, found, subject.simpler(candidate)
    return case, fault
