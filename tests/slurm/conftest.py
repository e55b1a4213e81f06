"""The real SLURM cluster of `slurm/minicluster`: one for all tests here.

They cannot share it between processes: `python3 -m pytest -n 0 tests/slurm`, as root, with slurm-wlm and munge. With
TREE_ATTN_TEST_SLURM=1, as in CI, a cluster that cannot start is a failure and no skip.
"""

import os
import pathlib
import shutil
import subprocess

import pytest
from jobs import minicluster

COMMANDS = ("munged", "slurmctld", "slurmd", "ip", "tc")


def reason_to_skip() -> str | None:
    """Why there can be no cluster here, with what would change that; None where there can."""
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
def cluster():
    """Two idle nodes, n1 and n2, that SLURM's commands talk to while it lives; afterwards, nothing may be left."""
    reason = reason_to_skip()
    assert reason is None, reason
    minicluster("stop")  # what an interrupted run left
    before = remains()
    minicluster("start", "--nodes", "2")
    name, _, path = minicluster("env").removeprefix("export ").strip().partition("=")
    os.environ[name] = path
    yield
    del os.environ[name]
    minicluster("stop")
    assert remains() == before
    assert not pathlib.Path(path).parent.exists()


def remains() -> set[str]:
    """Network interfaces, namespaces, and processes of SLURM and of our commands, one line each."""
    commands = (["ip", "-brief", "link"], ["ip", "netns", "list"], ["ps", "-eo", "pid,args"])
    lines = [line for command in commands for line in subprocess.check_output(command, text=True).splitlines()]
    words = ("mc-", "slurm", "munged", "tree-attn", "tree_attn.cli")
    return {line for line in lines if any(word in line for word in words) and "pytest" not in line}
