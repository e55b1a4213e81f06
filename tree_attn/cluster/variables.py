"""The environment variables of a launcher: each is required, and an error names it, its value and the remedy."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Reader:
    """Reads variables that have to be there; every error names the variable, its value and the remedy."""

    environ: Mapping[str, str]
    launcher: str
    remedy: str

    def name(self, *names: str) -> str:
        """Returns the first of `names` that is set."""
        for name in names:
            if self.environ.get(name):
                return name
        there = [name for name in self.environ if name.startswith(("SLURM_STEP_", "RANK", "WORLD_SIZE", "LOCAL_RANK"))]
        raise ValueError(
            f"{' or '.join(names)} is not set, though {min(there, default='the rest')} is, so {self.launcher} must "
            f"have started this process: {self.remedy}"
        )

    def text(self, *names: str) -> str:
        """Returns the value of the first of `names` that is set."""
        return self.environ[self.name(*names)]

    def integer(self, *names: str, minimum: int = 0, maximum: int | None = None) -> int:
        """Returns an integer, the value of the first of `names` that is set; from `minimum` to `maximum`."""
        name = self.name(*names)
        text = self.environ[name]
        if not text.isdecimal() or int(text) < minimum or (maximum is not None and int(text) > maximum):
            allowed = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
            raise self.wrong(name, f"must be an integer {allowed}")
        return int(text)

    def parsed(self, parse: Callable[[str], Any], *names: str) -> Any:
        """Returns `parse` of the value of the first of `names` that is set."""
        name = self.name(*names)
        try:
            return parse(self.environ[name])
        except ValueError as error:
            raise self.wrong(name, f"cannot be read: {error}") from None

    def wrong(self, name: str, reason: str) -> ValueError:
        """Returns the error for a variable with a wrong value."""
        return ValueError(f"{name}={self.environ[name]} {reason}: {self.remedy}")
