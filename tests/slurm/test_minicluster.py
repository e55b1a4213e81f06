"""The miniature cluster itself: its nodes, and the calls that it refuses. Its fixture checks that nothing is left."""

import os
import subprocess

from jobs import MINICLUSTER, minicluster, wait_until


def refused(*arguments: str, user: int | None = None, **environment: str) -> str:
    """Returns the message of a `minicluster` call that must fail."""
    done = subprocess.run(
        [MINICLUSTER, *arguments], capture_output=True, text=True, timeout=60, user=user, env=os.environ | environment
    )
    assert done.returncode != 0
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_nodes_have_names_and_addresses_of_their_own(cluster):
    report = ["bash", "-c", "echo $SLURM_PROCID $(hostname) $(hostname -i)"]
    command = ["srun", "--nodes=2", "--ntasks-per-node=2", *report]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    expected = ["0 n1 10.77.13.1", "1 n1 10.77.13.1", "2 n2 10.77.13.2", "3 n2 10.77.13.2"]
    assert sorted(printed.splitlines()) == expected


def test_a_node_can_be_cut_off_and_healed(cluster):
    assert reaches("n1", "n2")
    minicluster("cut", "n2")
    try:
        assert not reaches("n1", "n2")
    finally:
        minicluster("heal", "n2")
    # The kernel looks up an address that did not answer once a second: the first try may come between.
    wait_until(lambda: reaches("n1", "n2"), 10, "n2 was not reached")


def test_two_nodes_can_be_cut_off_from_each_other_alone(cluster):
    pairs = [("n1", "n2"), ("n2", "n3"), ("n3", "n2"), ("n3", "n1")]
    minicluster("cut", "n2", "n3")
    try:
        assert [reaches(*pair) for pair in pairs] == [True, False, False, True]
    finally:
        minicluster("heal", "n2", "n3")
    wait_until(lambda: reaches("n2", "n3"), 10, "n3 was not reached")


def reaches(source: str, target: str) -> bool:
    """Returns whether `source` can connect to the slurmd of `target` within a second."""
    connect = f"exec 3<>/dev/tcp/{target}/27818"
    done = subprocess.run([MINICLUSTER, "exec", source, "timeout", "1", "bash", "-c", connect], capture_output=True)
    return done.returncode == 0


def test_wrong_calls_are_one_line(cluster):
    assert "runs already, or was not stopped" in refused("start")
    assert "there is no node 'n9'; nodes are: n1 n2 n3 n4 n5" in refused("cut", "n9")
    assert "there is no node 'n9'" in refused("cut", "n1", "n9")
    assert "unknown command 'begin'" in refused("begin")
    assert "start takes --nodes N, 1 to 99" in refused("start", "--nodes", "0")


def test_without_root_it_refuses():
    assert "needs root" in refused("status", user=65534)


def test_without_slurm_it_says_how_to_install_it(tmp_path):
    for command in ("bash", "id", "env", "ip", "tc"):
        (tmp_path / command).symlink_to(subprocess.check_output(["which", command], text=True).strip())
    message = refused("start", PATH=str(tmp_path))
    assert "not found: munged slurmctld slurmd" in message and "apt-get install slurm-wlm munge" in message
