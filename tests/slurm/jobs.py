"""Jobs of the SLURM tests: their states, logs, rows and processes. Every wait has a limit."""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parent.parent.parent
MINICLUSTER = ROOT / "slurm" / "minicluster" / "minicluster"

# Two cores compile for all ranks: code that is made quickly counts here, not code that runs quickly.
SETTINGS = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "OMP_NUM_THREADS": "1",
    "TREE_ATTN_TIMEOUT_S": "25",
    "TREE_ATTN_HEARTBEAT_S": "8",
    "TREE_ATTN_END_S": "8",
    "TREE_ATTN_REQUEUE": "no",
    "PYTHONPATH": str(ROOT),
    "TREE_ATTN_HOME": str(ROOT),
    "TREE_ATTN_COMMAND": f"{sys.executable} -m tree_attn.cli",
}
RUNNING = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "SIGNALING")


def minicluster(*arguments: str, timeout: float = 90) -> str:
    """Runs `minicluster` and returns what it printed; fails with its message if it failed."""
    done = subprocess.run([MINICLUSTER, *arguments], capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, f"minicluster {' '.join(arguments)}: {done.stdout}{done.stderr}"
    return done.stdout


def wait_until(condition, limit_s: float, what):
    """Returns the first true value of `condition()`; fails with `what` (or what it returns) after `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what() if callable(what) else what}"
        time.sleep(0.2)
    return value


def slurm(*command: str) -> str:
    """Returns the output of a command of SLURM; fails with its message."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
    return done.stdout


@dataclasses.dataclass(frozen=True)
class Job:
    """A job that was submitted, and its folders of results and logs."""

    id: str
    out: pathlib.Path
    logs: pathlib.Path

    @property
    def facts(self) -> dict[str, str]:
        """The fields of `scontrol show job`."""
        return dict(re.findall(r"(\S+?)=(\S*)", slurm("scontrol", "show", "job", "-o", self.id)))

    @property
    def state(self) -> str:
        return self.facts["JobState"]

    def wait(self, limit_s: float) -> str:
        """Waits until the job has ended and returns its state."""
        return wait_until(lambda: (state := self.state) not in RUNNING and state, limit_s, self.story)

    def requeue(self) -> None:
        """Starts the job, which has ended, again.

        SLURM would let it wait for 6 s. Nodes refuse it in the second in which it has ended, so 2 s are enough.
        """
        slurm("scontrol", "requeue", self.id)
        slurm("scontrol", "update", f"JobId={self.id}", "StartTime=now+2")

    @property
    def output(self) -> str:
        """The output of the sbatch file."""
        path = self.logs / "job.log"
        return path.read_text() if path.exists() else ""

    def rank_log(self, rank: int) -> str:
        path = self.logs / f"{self.id}-{rank}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def story(self) -> str:
        """Returns the state, output and logs of the job, for messages."""
        logs = "".join(f"\n-- rank {rank}:\n{self.rank_log(rank)[-5000:]}" for rank in range(4))
        whole = f"job {self.id} is {self.state}\n-- output:\n{self.output}{logs}"
        return "\n".join(line[:400] for line in whole.splitlines())

    def rows(self, name: str = "results.jsonl") -> list[dict]:
        """Returns the rows so far; fails if one is torn, but for the last while it is being written."""
        path = self.out / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for_rows(self, count: int, limit_s: float, name: str = "results.jsonl") -> None:
        """Waits until so many rows are on disk; fails if the job ends before."""

        def enough():
            assert self.state in RUNNING or len(self.rows(name)) >= count, self.story()
            return len(self.rows(name)) >= count

        wait_until(enough, limit_s, self.story)

    def process(self, rank: int) -> int:
        """Returns the process of a rank, as the host numbers it."""
        found = [pid for pid, command in self.processes(rank).items() if "tree_attn.cli" in command]
        assert len(found) == 1, f"rank {rank} of job {self.id} has the processes {found}"
        return found[0]

    def processes(self, rank: int | None = None) -> dict[int, str]:
        """Returns the command of every process of the job, or of a rank, by its number on the host."""
        wanted = {f"SLURM_JOB_ID={self.id}"} | ({f"SLURM_PROCID={rank}"} if rank is not None else set())
        found = {}
        for folder in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                if wanted <= set((folder / "environ").read_text(errors="replace").split("\0")):
                    found[int(folder.name)] = (folder / "cmdline").read_text(errors="replace").replace("\0", " ")
            except OSError:  # it has ended meanwhile
                continue
        return found


def submit(
    file: str,
    out: pathlib.Path,
    *options: str,
    sbatch: tuple[str, ...] = (),
    logs: pathlib.Path | None = None,
    **environment: str,
) -> Job:
    """Submits `slurm/FILE.sbatch` with the results in `out` and all logs in `logs`, by default beside it."""
    logs = out.parent / f"{out.name}-logs" if logs is None else logs
    logs.mkdir(exist_ok=True)
    settings = SETTINGS | {"TREE_ATTN_OUT": str(out), "TREE_ATTN_LOGS": str(logs)} | environment
    command = ["sbatch", "--parsable", f"--output={logs}/job.log", *sbatch]
    command += [str(ROOT / "slurm" / f"{file}.sbatch"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | settings, check=False)
    assert done.returncode == 0, done.stderr
    return Job(done.stdout.strip(), out, logs)


def cases(rows: list[dict]) -> list[tuple]:
    """Returns the cases of rows, in order: all of a row but its measurements."""
    return [(row["strategy"], row["reduction"], row["num_keys"], row["n_processes"], row["error"]) for row in rows]
