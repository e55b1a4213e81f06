"""Processes that compile the programs of a sweep before they are timed.

To trace and to lower a chain of steps takes seconds of Python, which threads of one process cannot share. `Compilers`
runs this file as processes. Each line on stdin asks for some ways of one step. The answer, a line that begins with
REPLY, names a file with their compiled programs, or what compiling each of them raised.
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence

from tree_attn.measure.steps.step import Step
from tree_attn.measure.steps.ways import FAILURES, Programs, programs, reference_program, way_of

REPLY = "reply: "
REFERENCE = "reference"  # in the place of a way


class Compilers:
    """A pool of processes that compile."""

    def __init__(self, count: int):
        """Starts no process yet: a thread starts its own with its first work."""
        self._folder = tempfile.TemporaryDirectory()
        self._pool = concurrent.futures.ThreadPoolExecutor(count)
        self._files: list[concurrent.futures.Future] = []
        self._own = threading.local()
        self._processes: list[subprocess.Popen] = []

    def submit(self, step: Step, ways: Sequence[str], options: dict) -> concurrent.futures.Future:
        """Returns a future of the path of programs of ways, or of REFERENCE's; equal programs are compiled once."""
        self._files.append(self._pool.submit(self._compile, step, ways, options))
        return self._files[-1]

    def await_all(self, until: float) -> None:
        """Waits for all that was submitted, or until a time of `time.monotonic`, from when on nothing is begun."""
        concurrent.futures.wait(self._files, timeout=max(0.0, until - time.monotonic()))
        for file in self._files:
            file.cancel()

    def stop(self) -> None:
        """Ends the processes."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.kill()
        self._folder.cleanup()

    def _compile(self, step: Step, ways: Sequence[str], options: dict) -> pathlib.Path:
        process = getattr(self._own, "process", None)
        if process is None or process.poll() is not None:
            process = self._own.process = subprocess.Popen(
                [sys.executable, str(pathlib.Path(__file__).resolve())],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment(),
            )  # fmt: skip
            self._processes.append(process)
        request = {"step": dataclasses.asdict(step), "ways": ways, "options": options, "folder": self._folder.name}
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        for line in process.stdout:
            if line.startswith(REPLY):
                return pathlib.Path(json.loads(line.removeprefix(REPLY)))
        raise RuntimeError("the process that compiles ended")


def _environment() -> dict:
    scripts = pathlib.Path(__file__).resolve().parent
    path = os.pathsep.join([str(scripts.parent), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def load(file: concurrent.futures.Future, way: str):
    """Returns the `Programs` of a way from a file, or the compiled reference; raises what compiling raised."""
    import jax
    from jax.experimental.pallas import mosaic_gpu  # noqa: F401  brings what its kernels call on the host
    from jax.experimental.serialize_executable import deserialize_and_load

    found = pickle.loads(file.result(timeout=0).read_bytes())[way]
    if isinstance(found, str):
        raise RuntimeError(found)
    fields, *compiled = found
    devices = jax.local_devices()[:1]
    loaded = [deserialize_and_load(*parts, execution_devices=devices) for parts in compiled]
    return Programs(short=loaded[0], long=loaded[1], **fields) if fields else loaded[0]


def _saved(compiled) -> tuple:
    """Returns what `load` makes programs of, or the reference."""
    from jax.experimental.serialize_executable import serialize

    if not isinstance(compiled, Programs):
        return {}, serialize(compiled)
    fields = {"key": compiled.key, "picked": compiled.picked, "options": compiled.options}
    return fields, serialize(compiled.short), serialize(compiled.long)


def _compiled(step: Step, name: str, options: dict, known: dict[str, Programs]):
    """Returns the programs of the way of that name, compiled unless they are known by their keys."""
    if name == REFERENCE:
        return reference_program(step)
    compiled = programs(step, way_of(step, name), options, known)
    known.setdefault(compiled.key, compiled)
    return compiled


def _answer(step: Step, names: list[str], options: dict) -> dict:
    """Returns by each way's name what `load` makes its programs of, or a string of what compiling raised."""
    found, known = {}, {}
    for name in names:
        try:
            found[name] = _saved(_compiled(step, name, options, known))
        except FAILURES as error:
            found[name] = f"{type(error).__name__}: {str(error)[:500]}"
    return found


def main() -> None:
    """Answers requests until stdin ends."""
    for count, line in enumerate(sys.stdin):
        request = json.loads(line)
        step = Step(**request["step"] | {"lengths": tuple(request["step"]["lengths"])})
        path = pathlib.Path(request["folder"]) / f"{os.getpid()}-{count}"
        path.write_bytes(pickle.dumps(_answer(step, request["ways"], request["options"])))
        print(REPLY + json.dumps(str(path)), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
