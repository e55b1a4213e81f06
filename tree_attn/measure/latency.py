"""Timers, memory, where a number was measured, and the file it is written to.

Timing: what it costs to call a program must not count as attention. `latency_us` therefore puts a chain of calls, each
waiting for the one before, into one compiled program, and the same of more calls into another; by how much the longer
takes longer is due to its further calls alone. Kernels are still enqueued one by one within the program, so work
shorter than its own enqueueing (a few microseconds) is bounded by it.
"""

import dataclasses
import errno
import json
import math
import os
import pathlib
import platform
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """Latency of one call in microseconds: median, 10th and 90th percentile over `n_iters` samples.

    A sample is one program of `chain` calls, or a pair with another of `long_chain`, and then without what a program
    costs beside its calls: `program_us`, a median too (None: not told apart, and so in the latency, a `chain`-th of
    it). Noise may make it negative, and the 10th percentile. `method` says in words what was divided by what;
    `compile_s` is the time to compile what was measured, in seconds, and is part of no sample.
    """

    median_us: float
    p10_us: float
    p90_us: float
    program_us: float | None
    n_iters: int
    chain: int
    long_chain: int | None
    compile_s: float
    method: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledMemory:
    """What a compiled program needs on each device, in bytes, as XLA's buffer assignment has it.

    `alias_bytes` is the part of the output that shares its memory with (donated) arguments.
    """

    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Arguments, outputs and temporaries together, shared memory counted once."""
        return self.argument_bytes + self.output_bytes + self.temp_bytes - self.alias_bytes


def chain_calls(fn: Callable, length: int) -> Callable:
    """Returns `chained(query, *rest)`: `fn` called `length` times, each on the output of the one before.

        query_0 = query,    query_{i+1} = fn(query_i, *rest),    chained = query_length

    As a decoder calls its layers: a call cannot start before the last has ended. `fn` must return an array, or a
    pytree of them, of the shapes of its first argument. The rest goes through a barrier with the query in every turn;
    without it XLA finds that a ring's transfers do not depend on the query and runs them once for the whole chain. A
    loop, since JAX 0.10's CPU compiler drops the barriers of unrolled turns.

    Raises:
        ValueError: `length` is not a positive integer.
    """
    if not isinstance(length, int) or length < 1:
        raise ValueError(f"length must be an integer of at least 1, got {length!r}")

    def chained(query, *rest):
        def body(_, carried):
            barred_query, barred_rest = jax.lax.optimization_barrier((carried, rest))
            return jax.tree.map(lambda new, old: new.astype(old.dtype), fn(barred_query, *barred_rest), carried)

        return jax.lax.fori_loop(0, length, body, query)

    return chained


def latency_us(
    fn: Callable,
    *args: Any,
    n_iters: int = 20,
    warmup: int = 3,
    chain: int = 1,
    long_chain: int | None = None,
    on_sample: Callable[[], None] | None = None,
    on_compiled: Callable[[jax.stages.Compiled, int], None] | None = None,
) -> Timing:
    """Times `fn(*args)` after compiling it and warming up; see `Timing`.

        without `long_chain`:    us(chain) / chain
        with it:                 (us(long_chain) - us(chain)) / (long_chain - chain)

    The first counts a `chain`-th of a program's launch and of waking up after it as latency. The second, of pairs of
    programs run in turn, does not, but means nothing where noise exceeds what the further calls take, as it may on
    emulated devices. Both numbers of calls are given, and follow from no clock: processes that run a program together
    must agree on them.

    Args:
        fn: not yet jitted, or jitted; traceable. For chains of more than 1 see `chain_calls`.
        args: its arguments, on their devices already.
        n_iters: samples; the median of fewer than ten says little.
        warmup: samples run first and thrown away.
        chain: calls in one compiled program; 1 without `long_chain` times single calls, host launch included.
        long_chain: calls in the other program; 4 times `chain`, say.
        on_sample: called after every sample, for a progress bar.
        on_compiled: called with each program and its number of calls before anything is timed, to check what will be.

    Raises:
        ValueError: `n_iters`, `warmup`, `chain` or `long_chain` out of range.
        RuntimeError: the longer chain did not take longer, by the median.

    Example:
        >>> step = lambda q, k, v: tree_decode(q, k, v, axis_name="seq", mesh=mesh)
        >>> latency_us(step, q, k, v, chain=32, long_chain=128).median_us
    """
    if n_iters < 1 or warmup < 0:
        raise ValueError(f"n_iters must be at least 1 and warmup at least 0, got n_iters={n_iters}, warmup={warmup}")
    if long_chain is not None and long_chain <= chain:
        raise ValueError(f"long_chain must be at least {chain + 1}, for chain={chain}, got {long_chain}")
    lengths = (chain,) if long_chain is None else (chain, long_chain)
    programs, compile_s = [], 0.0
    for length in lengths:
        lowered = jax.jit(fn if length == 1 else chain_calls(fn, length)).lower(*args)
        start = time.perf_counter()
        programs.append(lowered.compile())
        compile_s += time.perf_counter() - start
        if on_compiled is not None:
            on_compiled(programs[-1], length)
    host_us = []
    for _ in range(warmup + n_iters):
        host_us.append([_host_us(program, args) for program in programs])
        if on_sample is not None:
            on_sample()
    call_us, program_us = _split(np.array(host_us[warmup:]), lengths)
    p10, median, p90 = np.percentile(call_us, [10, 50, 90])
    if median <= 0:
        raise RuntimeError(f"{long_chain} calls took no longer than {chain}: noise hides what a call takes")
    return Timing(
        median_us=float(median),
        p10_us=float(p10),
        p90_us=float(p90),
        program_us=program_us,
        n_iters=n_iters,
        chain=chain,
        long_chain=long_chain,
        compile_s=compile_s,
        method=_method(chain, long_chain),
    )


def compiled_memory(compiled: jax.stages.Compiled) -> CompiledMemory | None:
    """Memory that a compiled program needs on each device; None where the backend does not say.

    Example:
        >>> compiled_memory(jax.jit(f).lower(x).compile()).temp_bytes
    """
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    return CompiledMemory(
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        temp_bytes=stats.temp_size_in_bytes,
        alias_bytes=stats.alias_size_in_bytes,
    )


def bytes_per_device(arrays: Any) -> int:
    """What the arrays of a pytree, or their shapes and shardings, take on each of their devices.

    Example:
        >>> bytes_per_device(jax.ShapeDtypeStruct((8, 128), jnp.float32, sharding=by_rows_over_eight_devices))
        512
    """
    leaves = jax.tree.leaves(arrays)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def runtime_peak_memory_bytes(devices: list[jax.Device]) -> int | None:
    """The most memory that any of this process's `devices` has had in use since the process began; None on CPU.

    It cannot be set back, so it tells what one program needs only if that raised it: compare it before and after.
    """
    stats = [device.memory_stats() for device in devices if device.process_index == jax.process_index()]
    peaks = [one["peak_bytes_in_use"] for one in stats if one and "peak_bytes_in_use" in one]
    return max(peaks) if peaks else None


def hardware(devices: list[jax.Device]) -> str:
    """The devices in words: "8 x NVIDIA H200", or "8 emulated CPU devices on 2 cores (x86_64)"."""
    kinds = sorted({device.device_kind for device in devices})
    if devices[0].platform == "cpu":
        return f"{len(devices)} emulated CPU devices on {os.cpu_count()} cores ({platform.machine()})"
    return f"{len(devices)} x {', '.join(kinds)}"


def git_commit() -> str | None:
    """The commit this package was run from, with "-dirty" for uncommitted changes; None outside a git checkout.

    A machine that holds a copy of the tree without its history says the commit in `TREE_ATTN_GIT_COMMIT`.
    """
    if "TREE_ATTN_GIT_COMMIT" in os.environ:
        return os.environ["TREE_ATTN_GIT_COMMIT"]
    folder = pathlib.Path(__file__).parent
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        # Of an installed copy, git would describe whatever repository happens to lie around it.
        _git(folder, "ls-files", "--error-unmatch", pathlib.Path(__file__).name)
        is_dirty = bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("-dirty" if is_dirty else "")


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that matter to a measurement; None for what is not installed."""
    from importlib import metadata

    packages = ("tree-attn", "jax", "jaxlib", "flax", "numpy", "jax-cuda13-plugin", "jax-cuda12-plugin")
    packages += ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "nvidia-nccl-cu13", "nvidia-nccl-cu12", "flash-attn-jax")
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def nccl_settings() -> dict[str, str]:
    """NCCL's settings in the environment, without paths; by some transfers take several times as long as by others."""
    given = {name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_") and "/" not in value}
    given.pop("NCCL_VERSION", None)  # an image's own
    return given


class JsonlWriter:
    """Rows in a file, one JSON object a line, each on disk before `append` returns, and each whole or not there at all.

    A process that dies while writing leaves a torn last line; the next writer drops it, so a run can be continued. What
    the rows belong to (`sweep`) lies beside them, for `results.jsonl` in `results.sweep.json`: rows of two sweeps never
    mix. One writer at a time.

    Example:
        >>> writer = JsonlWriter("results.jsonl", sweep={"seed": 0})
        >>> writer.append({"latency_us_median": 35.2})
        >>> writer.rows
        [{'latency_us_median': 35.2}]
    """

    def __init__(self, path: str | os.PathLike, sweep: Mapping[str, Any] | None = None):
        """Opens `path`, made if it is not there, and reads the rows it holds.

        Raises:
            ValueError: a line other than a torn last one is not a JSON object (names the file and the line); or the
                rows that are there belong to another sweep (names what differs).
        """
        self.path = pathlib.Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if sweep is not None:
            _check_sweep(self.path.with_suffix(".sweep.json"), json.loads(json.dumps(sweep)))
        self.rows = self._read_and_repair()

    def append(self, row: Mapping[str, Any]) -> None:
        """Writes one row and waits until it is on disk.

        Raises:
            OSError: the row could not be written whole (a full disk, say); the file then ends after the row before it.
            RuntimeError: someone else has written to the file.
        """
        line = _line(row)
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            size = os.fstat(descriptor).st_size
            if size != self._size:
                raise RuntimeError(f"{self.path} has {size} bytes and not {self._size}: another process writes to it")
            self._write_whole(descriptor, line)
        finally:
            os.close(descriptor)
        if not self._size:
            _sync_folder(self.path.parent)  # a new file's name has to reach the disk too
        self._size += len(line)
        self.rows.append(dict(row))

    def replace(self, index: int, row: Mapping[str, Any]) -> None:
        """Writes `row` in the place of `rows[index]`; at every moment the file holds one of the two."""
        rows = [*self.rows[:index], dict(row), *self.rows[index + 1 :]]
        content = b"".join(_line(one) for one in rows)
        write_atomically(self.path, content)
        self.rows, self._size = rows, len(content)

    def _write_whole(self, descriptor: int, line: bytes) -> None:
        try:
            # One call: other programs then see all of the line or nothing of it, unless the disk fills within it.
            if os.write(descriptor, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(descriptor)
        except OSError as error:
            os.ftruncate(descriptor, self._size)
            raise OSError(
                error.errno,
                f"{error.strerror}: row {len(self.rows) + 1} of {self.path} could not be written; the "
                f"{len(self.rows)} rows before it are whole, and a rerun continues after them",
            ) from error

    def _read_and_repair(self) -> list[dict]:
        content = self.path.read_bytes() if self.path.exists() else b""
        complete = content[: content.rfind(b"\n") + 1]
        self._size = len(complete)
        if len(complete) < len(content):
            with self.path.open("r+b") as file:
                file.truncate(len(complete))
                os.fsync(file.fileno())
        rows = []
        for number, line in enumerate(complete.splitlines(), start=1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{self.path}, line {number}, is not JSON ({error}): {line[:80]!r}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{self.path}, line {number}, is not a JSON object: {line[:80]!r}")
            rows.append(row)
        return rows


def write_atomically(path: pathlib.Path, content: bytes) -> None:
    """Puts a file in place with all of its content, on disk; whatever happens, the old file or the new one is there."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise OSError(error.errno, f"{error.strerror}: {path} could not be written, and is as it was") from error
    _sync_folder(path.parent)


def _check_sweep(path: pathlib.Path, sweep: dict[str, Any]) -> None:
    """Leaves `sweep` at `path`, or raises ValueError if another one lies there."""
    if not path.exists():
        write_atomically(path, json.dumps(sweep, indent=1).encode() + b"\n")
        return
    try:
        there = dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} should say which sweep lies here, and is not a JSON object: {error}") from error
    differences = [
        f"{name} is {there.get(name)!r} there and {sweep.get(name)!r} here"
        for name in dict.fromkeys([*there, *sweep])
        if there.get(name) != sweep.get(name)
    ]
    if differences:
        raise ValueError(
            f"{path.parent} holds the results of another sweep: {'; '.join(differences)}. Give the same options to "
            "continue that sweep, or another folder to begin this one"
        )


def _line(row: Mapping[str, Any]) -> bytes:
    # allow_nan=False: NaN is not JSON, and a row that other tools cannot read is worse than an error here.
    return (json.dumps(row, allow_nan=False) + "\n").encode()


def _sync_folder(folder: pathlib.Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems have no such thing
            raise
    finally:
        os.close(descriptor)


def _host_us(program: Callable, args: tuple) -> float:
    start = time.perf_counter()
    jax.block_until_ready(program(*args))
    return (time.perf_counter() - start) * 1e6


def _split(host_us: np.ndarray, lengths: tuple[int, ...]) -> tuple[np.ndarray, float | None]:
    """Of `[samples, programs]` of so many calls: what a call takes by each sample, and the rest of a program (median).

    Pair by pair, for clocks drift; between the two of a pair they hardly do.
    """
    short_us = host_us[:, 0]
    if len(lengths) == 1:
        return short_us / lengths[0], None
    call_us = (host_us[:, 1] - short_us) / (lengths[1] - lengths[0])
    return call_us, float(np.median(short_us - lengths[0] * call_us))


def _method(chain: int, long_chain: int | None) -> str:
    if long_chain is not None:
        return (
            f"in-graph chains of {chain} and of {long_chain} dependent calls, one program each, timed on the host in "
            f"turn; their difference divided by {long_chain - chain}"
        )
    if chain == 1:
        return "single calls timed on the host, launch included"
    return f"in-graph chain of {chain} dependent calls in one program, timed on the host and divided by {chain}"


def _git(folder: pathlib.Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.strip()
