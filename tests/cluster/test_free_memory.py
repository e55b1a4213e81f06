"""The memory that is left, read from files as Linux writes them."""

import pytest

from tree_attn.cluster.memory import free_share
from tree_attn.cluster.progress import Limits, Progress, Report


@pytest.fixture
def root(tmp_path):
    """Returns a file system of a process in the group a/b of a node that has 40 of 100 kB left."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(
        "MemTotal: 100 kB\nMemFree: 10 kB\nMemAvailable: 40 kB\nHugePages_Total: 0\n"
    )
    (tmp_path / "proc/self/cgroup").write_text("1:name=systemd:/x\n0::/a/b\n")
    return tmp_path


def write_group(folder, limit: str, current: int, inactive_file: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {inactive_file}\n")


def test_the_least_of_the_node_and_its_groups(root):
    assert free_share(root) == 0.4
    write_group(root / "sys/fs/cgroup/a/b", "max", 10**9, 0)
    assert free_share(root) == 0.4
    write_group(root / "sys/fs/cgroup/a", "1000", 960, 10)
    assert free_share(root) == pytest.approx(0.05)


def test_a_group_of_the_first_version(root):
    (root / "proc/self/cgroup").write_text("9:name=systemd:/\n4:memory:/slurm/job_7\n0::/\n")
    folder = root / "sys/fs/cgroup/memory/slurm/job_7"
    folder.mkdir(parents=True)
    for name, text in (
        ("limit_in_bytes", "1000"),
        ("usage_in_bytes", "930"),
        ("stat", "cache 9\ntotal_inactive_file 30"),
    ):
        (folder / f"memory.{name}").write_text(text + "\n")
    assert free_share(root) == pytest.approx(0.1)


def test_a_system_that_does_not_say(tmp_path):
    assert free_share(tmp_path) is None


@pytest.mark.parametrize(("left", "is_remarked"), [(0.04, True), (0.5, False), (None, False)])
def test_a_rank_that_ends_without_memory_is_said_to(left, is_remarked):
    progress = Progress(range(2), (), Limits(1.0, 1.0, 1.0), now_s=0.0)
    progress.note(1, Report(free_share=left), 0.0)
    remark = progress.low_memory(1)
    assert remark.startswith(" when 4% of its memory was left: the kernel has likely killed it") == is_remarked
    assert bool(remark) == is_remarked
