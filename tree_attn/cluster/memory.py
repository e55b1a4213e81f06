"""The memory that is left to this process, so that a rank killed for want of it can be said to be."""

import contextlib
import pathlib

# The limit of a control group and its use, in version 2 and in version 1.
_FILES = ("memory.max", "memory.current")
_OLD_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def free_share(root: pathlib.Path = pathlib.Path("/")) -> float | None:
    """Returns the part of its memory that is left to this process: of its node, or of a control group, if that is less.

    Pages of files that the kernel can drop count as free.

    Args:
      root: the root of the file system.
    Returns:
      A number from 0 to 1, or None where the system does not say.

    Example:
      >>> free_share() is None or 0 <= free_share() <= 1
      True
    """
    shares = [_of_node(root / "proc/meminfo"), *map(_of_group, _groups(root))]
    return min((share for share in shares if share is not None), default=None)


def _of_node(path: pathlib.Path) -> float | None:
    with contextlib.suppress(OSError, ValueError, KeyError, ZeroDivisionError):
        facts = dict(line.split(":") for line in path.read_text().splitlines())
        available, total = (int(facts[name].split()[0]) for name in ("MemAvailable", "MemTotal"))
        return available / total
    return None


def _groups(root: pathlib.Path) -> list[pathlib.Path]:
    """Returns the folders of this process's control group and of those that contain it."""
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers in ("", "memory"):  # version 2 and version 1
                parts = pathlib.PurePosixPath(name).parts[1:]
                base = root / "sys/fs/cgroup" / controllers
                return [base.joinpath(*parts[:depth]) for depth in range(1, len(parts) + 1)]
    return []


def _of_group(folder: pathlib.Path) -> float | None:
    is_old = (folder / "memory.limit_in_bytes").exists()
    limit_file, current_file = _OLD_FILES if is_old else _FILES
    with contextlib.suppress(OSError, ValueError, KeyError, ZeroDivisionError):
        limit = int((folder / limit_file).read_text())  # "max" where there is none
        facts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        used = int((folder / current_file).read_text()) - int(
            facts["total_inactive_file" if is_old else "inactive_file"]
        )
        return max(0.0, 1 - used / limit)
    return None
