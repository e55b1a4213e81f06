"""The real SLURM cluster of `slurm/minicluster`: one for all tests here.

They cannot share it between processes: `python3 -m pytest -n 0 tests/slurm`, as root, with slurm-wlm and munge. With
TREE_ATTN_TEST_SLURM=1, as in CI, a cluster that cannot start is a failure and no skip.
"""

import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from jobs import Job, minicluster, slurm, submit, wait_until

COMMANDS = ("munged", "slurmctld", "slurmd", "ip", "tc")


def reason_to_skip() -> str | None:
    """Returns the reason why there can be no cluster here, and the remedy; None where there can."""
    if os.environ.get("PYTEST_XDIST_WORKER"):
        return "the SLURM tests share one cluster: run them in one process, python3 -m pytest -n 0 tests/slurm"
    if os.geteuid() != 0:
        return "the SLURM tests need root, for network namespaces and slurmd"
    missing = [name for name in COMMANDS if shutil.which(name) is None]
    return f"the SLURM tests need {', '.join(missing)}: apt-get install slurm-wlm munge iproute2" if missing else None


def pytest_collection_modifyitems(items):
    reason = reason_to_skip()
    if reason is None or os.environ.get("TREE_ATTN_TEST_SLURM"):
        return
    for item in items:
        if pathlib.Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def cluster(request, tmp_path_factory):
    """Starts five idle nodes that SLURM's commands talk to; afterwards, nothing may be left.

    Its `disk` is small, and is mounted first: the nodes see only file systems that were there when they started.
    """
    reason = reason_to_skip()
    assert reason is None, reason
    minicluster("stop")  # what an interrupted run left
    before = remains()
    disk = SmallDisk(tmp_path_factory.mktemp("disk"))
    disk.mount()
    minicluster("start", "--nodes", "5")
    name, _, path = minicluster("env").removeprefix("export ").strip().partition("=")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, path)
        # Jobs of the same shapes run the same programs, which are compiled once for all of them.
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        yield Cluster(disk, LimitedJobs.start(tmp_path_factory.mktemp("limited")) if needs_limited(request) else None)
    minicluster("stop")
    disk.unmount()
    # A process that has been killed stays in the list until process 1 has taken its exit status.
    wait_until(lambda: remains() == before, 20, lambda: f"left {remains() - before}, gone {before - remains()}")
    assert not pathlib.Path(path).parent.exists()


def needs_limited(request) -> bool:
    return any("limited_jobs" in item.fixturenames for item in request.session.items)


@dataclasses.dataclass(frozen=True)
class SmallDisk:
    """A file system of 64 KiB."""

    folder: pathlib.Path

    def mount(self) -> None:
        self._run("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs")

    def unmount(self) -> None:
        self._run("umount")

    def fill_up_to(self, free_bytes: int) -> None:
        """Leaves `free_bytes` of room."""
        free = shutil.disk_usage(self.folder).free
        (self.folder / "ballast").write_bytes(b"x" * (free - free_bytes))

    def make_room(self) -> None:
        (self.folder / "ballast").unlink()

    def _run(self, *command: str) -> None:
        subprocess.run([*command, str(self.folder)], check=True, timeout=30)


@dataclasses.dataclass(frozen=True)
class LimitedJobs:
    """Sweeps of three lines with a time limit of a minute, each line followed by a pause that makes them reach it."""

    requeued: Job
    not_requeued: Job
    settings: dict[str, str]
    where = ("--nodes=1", "--ntasks=1", "--nodelist=n5")

    @classmethod
    def start(cls, folder: pathlib.Path) -> "LimitedJobs":
        """Submits both jobs: they take minutes, little of the machine, and nodes that no other test uses."""
        sweep = "--heads 2 --head-dim 8 --dtype float32 --iters 2 --reduction gather"
        matrix, pauses = folder / "matrix.txt", folder / "pauses"
        lines = [f"--keys {keys} {sweep}" for keys in (8, 16, 24)]
        matrix.write_text("\n".join(["# three lines, the last one without a newline", *lines]))
        pauses.write_text(f'#!/bin/sh\n{sys.executable} -m tree_attn.cli "$@" && sleep $PAUSE_S\n')
        pauses.chmod(0o755)
        settings = {"TREE_ATTN_MATRIX": str(matrix), "TREE_ATTN_COMMAND": str(pauses), "PAUSE_S": "22"}
        # The warning comes within the 30 s before the limit: SLURM looks every 30 s, and a second is the least.
        limit = ("--nodes=1", "--ntasks=1", "--time=1", "--signal=B:USR1@1")
        requeued = submit("matrix", folder / "requeued", sbatch=(*limit, "--nodelist=n4"), **settings)
        # So long a pause that the limit falls into the first one: SLURM ends the job 60 to 90 s after its start.
        longer, where = settings | {"PAUSE_S": "120"}, ("--nodelist=n5", "--no-requeue")
        not_requeued = submit("matrix", folder / "not_requeued", sbatch=(*limit, *where), **longer)
        return cls(requeued, not_requeued, settings)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The running cluster: its small disk, and the jobs that began with it."""

    disk: SmallDisk
    limited_jobs: LimitedJobs | None


@pytest.fixture(autouse=True)
def ends_its_jobs():
    """Cancels the jobs that a test leaves: the next test needs their nodes."""
    before = set(running_jobs())
    yield
    left = set(running_jobs()) - before
    if left:
        slurm("scancel", *sorted(left))
        wait_until(lambda: not left & set(running_jobs()), 60, f"jobs {left} ended")


def running_jobs() -> list[str]:
    return slurm("squeue", "--noheader", "--format=%i").split() if "SLURM_CONF" in os.environ else []


@pytest.fixture
def small_disk(cluster):
    return cluster.disk


@pytest.fixture
def limited_jobs(cluster):
    return cluster.limited_jobs


def remains() -> set[str]:
    """Returns network interfaces, namespaces, and processes of SLURM and of its jobs, one line each."""
    commands = (["ip", "-brief", "link"], ["ip", "netns", "list"], ["ps", "-eo", "pid,args"])
    lines = [line for command in commands for line in subprocess.check_output(command, text=True).splitlines()]
    of_slurm = {line for line in lines if any(word in line for word in ("mc-", "slurmd", "slurmctld", "munged"))}
    return of_slurm | {f"{pid} in a job" for pid in filter(str.isdigit, os.listdir("/proc")) if in_job(pid)}


def in_job(pid: str) -> bool:
    try:
        return b"\0SLURM_JOB_ID=" in pathlib.Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it has ended meanwhile
        return False
