"""FlashInfer's ways of a decode step: their names, and the process that times them (`sweep_flashinfer_worker.py`)."""

import dataclasses
import importlib.util
import json
import os
import pathlib
import queue
import subprocess
import sys
import threading

from tree_attn.measure.steps.chains import fastest
from tree_attn.measure.steps.step import Step

REPLY = "reply: "
DEFAULT_PAGE = 64
CUDA_CORE_GROUPS = (1, 2, 4, 8)  # query heads of a KV head that decoding without tensor cores takes
FIRST_S, NEXT_S = 300, 120  # patience: the first call of a kind is compiled


def ways(step: Step) -> list[str]:
    """Returns the names of the ways of a step."""
    if step.prefix:
        merged = [f"flashinfer prefill {backend} + decode + merge" for backend in ("fa2", "fa3")]
        return ["flashinfer cascade", *merged]
    found = ["flashinfer decode, tensor cores", "flashinfer XQA"]
    if step.num_queries == 1:
        if step.num_heads // step.num_kv_heads in CUDA_CORE_GROUPS:
            found.insert(1, "flashinfer decode")
    else:  # of one query, the fa2 prefill is what decoding with tensor cores runs
        found += ["flashinfer prefill fa2", "flashinfer prefill fa3"]
    return found if step.window is not None else [*found, "flashinfer BatchAttention"]


def kernel_key(step: Step, way: str) -> tuple:
    """Returns what FlashInfer compiles a kernel for: ways with equal keys share it."""
    key = (way, step.dtype, step.head_dim, step.window is not None)
    if "XQA" not in way:
        return key
    return (*key, step.page or DEFAULT_PAGE, step.num_heads // step.num_kv_heads, step.num_queries)


class Worker:
    """A process that times FlashInfer; one that dies or hangs is started again for the next way."""

    def __init__(self, path: str | None):
        """Notes the folder that FlashInfer lies in, if it is not installed."""
        self._environment = os.environ | ({"PYTHONPATH": _paths(path)} if path else {})
        self._process: subprocess.Popen | None = None
        self._lines: queue.Queue = queue.Queue()
        self._seen: set[tuple] = set()

    def time(self, step: Step, way: str, n_iters: int, *, only_build: bool = False) -> dict:
        """Returns the fields of a row; "error" says why there are no times."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        request = {"step": dataclasses.asdict(step), "way": way, "n_iters": n_iters, "only_build": only_build}
        patience = NEXT_S if kernel_key(step, way) in self._seen else FIRST_S
        self._seen.add(kernel_key(step, way))
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._lines.get(timeout=patience)
        except (queue.Empty, OSError):
            line = None
        if line is None:
            self.stop()
            return {"error": f"the process of FlashInfer ended, or took longer than {patience} s"}
        reply = json.loads(line)
        if "CUDA" in reply.get("error", ""):
            self.stop()  # such an error stays with a process
        return reply

    def fastest(self, step: Step, n_iters: int) -> dict:
        """Returns the fields of the fastest of all ways of a step."""
        return fastest({way: self.time(step, way, n_iters) for way in ways(step)})

    def stop(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self) -> None:
        self._lines = queue.Queue()
        command = [sys.executable, str(pathlib.Path(__file__).resolve().with_name("sweep_flashinfer_worker.py"))]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self._environment, text=True
        )
        threading.Thread(target=_collect, args=(self._process, self._lines), daemon=True).start()


def find(path: str | None) -> "Worker | None":
    """Returns a process for FlashInfer's ways, or None, with a line that says so, where it is not installed."""
    if path or importlib.util.find_spec("flashinfer"):
        return Worker(path)
    print("FlashInfer is not installed: its ways are left out (--flashinfer FOLDER)")
    return None


def _paths(path: str) -> str:
    """Returns PYTHONPATH with FlashInfer's folder, the scripts and this library."""
    scripts = pathlib.Path(__file__).resolve().parent
    return os.pathsep.join([path, str(scripts), str(scripts.parent), os.environ.get("PYTHONPATH", "")])


def _collect(process: subprocess.Popen, lines: queue.Queue) -> None:
    """Puts the replies of a process into `lines`, and None at its end."""
    for line in process.stdout:
        if line.startswith(REPLY):
            lines.put(line.removeprefix(REPLY))
    lines.put(None)
