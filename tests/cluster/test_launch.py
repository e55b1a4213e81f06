"""The detection of a process's place among the others, and the one error for each wrong environment."""

import dataclasses

import pytest

from tree_attn.cluster import join
from tree_attn.cluster.hostlist import expand_counts, expand_hostlist
from tree_attn.cluster.launch import Launch, check_coordinator, detect, own_gpus

# Task 2 of `srun --nodes=3 --ntasks=5`, as SLURM 22.05 sets it.
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NODELIST": "n[1-2],m07",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_PROCID": "2",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
}
GPUS = ["0000:1B:00.0", "0000:43:00.0", "0000:52:00.0", "0000:61:00.0"]


@pytest.mark.parametrize(
    "text, names",
    [
        ("n1", "n1"),
        ("n[1-3,07],m2", "n1 n2 n3 n07 m2"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("rack[1-2]-n[3,5].site", "rack1-n3.site rack1-n5.site rack2-n3.site rack2-n5.site"),
    ],
)
def test_host_lists(text, names):
    assert expand_hostlist(text) == tuple(names.split())


@pytest.mark.parametrize(
    "text", ["", "n[1-3", "n1]", "n[]", "n[a]", "n[3-1]", "n[1,,2]", ",n1", "n1,", "n 1", "n[[1]]", "n[1-999999999]"]
)
def test_what_is_no_host_list(text):
    with pytest.raises(ValueError, match=r"no list of node|neither a number nor|counts backwards|an empty name"):
        expand_hostlist(text)


def test_tasks_per_node():
    assert expand_counts("2(x3),1") == (2, 2, 2, 1)
    with pytest.raises(ValueError, match=r"'2x3' is no count"):
        expand_counts("2x3")


def test_a_slurm_step():
    launch = detect(environ=SLURM)
    assert (launch.source, launch.process_id, launch.num_processes) == ("slurm", 2, 5)
    assert (launch.node, launch.local_rank, launch.local_size, launch.num_nodes) == ("n2", 0, 2, 3)
    assert launch.hosts == ("n1", "n1", "n2", "n2", "m07")
    assert launch.coordinator_host == "n1" and launch.job == "SLURM job 4711 step 3"


def test_ranks_dealt_out_in_turn():
    assert detect(environ=SLURM | {"SLURM_DISTRIBUTION": "cyclic"}).hosts == ("n1", "n2", "m07", "n1", "n2")
    assert detect(environ=SLURM | {"SLURM_DISTRIBUTION": "arbitrary"}).hosts == ()


def test_steps_of_one_job_have_ports_of_their_own():
    ports = {detect(environ=SLURM | {"SLURM_STEP_ID": str(step)}).coordinator_port for step in range(50)}
    ports |= {detect(environ=SLURM | {"SLURM_JOB_ID": str(job)}).coordinator_port for job in range(4712, 4762)}
    assert len(ports) > 95 and min(ports) >= 20000 and max(ports) < 32768  # where Linux's own ports begin


def test_the_coordinator_can_be_named():
    launch = detect(environ=SLURM | {"TREE_ATTN_COORDINATOR_PORT": "12345", "TREE_ATTN_COORDINATOR_HOST": "n1-ib0"})
    assert (launch.coordinator_host, launch.coordinator_port) == ("n1-ib0", 12345)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "4", "SLURM_JOB_NODELIST": "n1"},  # salloc
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
        {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"},
    ],
    ids=["nothing", "shell of salloc", "batch script", "leftovers of torch"],
)
def test_shells_are_one_process(environ):
    launch = detect(environ=environ)
    assert (launch.source, launch.num_processes, launch.process_id) == ("single", 1, 0)


def test_a_step_of_one_task_needs_nothing_else():
    environ = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"}
    assert detect(environ=environ).num_processes == 1


def test_one_process_in_an_allocation_of_several_is_remarked():
    several = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_JOB_NUM_NODES": "2"}
    remedy = "which stay idle: start it with srun, without --ntasks=1, to use them"
    assert detect(environ=several).idle_tasks == f"its allocation has 4 tasks on 2 nodes, {remedy}"
    in_step = several | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"}
    assert detect(environ=in_step).idle_tasks == f"its allocation has 2 nodes, {remedy}"
    for alone in ({}, {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1"}, SLURM, TORCHRUN):
        assert detect(environ=alone).idle_tasks is None


def test_torchrun():
    launch = detect(environ=TORCHRUN)
    assert (launch.source, launch.process_id, launch.num_processes, launch.num_nodes) == ("torchrun", 3, 4, 2)
    assert (launch.coordinator_host, launch.coordinator_port) == ("n1", 29500)
    # Its agent listens on MASTER_PORT itself.
    assert detect(environ=TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).coordinator_port == 29501


def test_arguments_come_first():
    launch = detect("n9:1234", 2, 1, [0, 1], environ=SLURM)
    assert (launch.source, launch.coordinator_host, launch.local_device_ids) == ("arguments", "n9", (0, 1))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((None, 2, 0), "coordinator_address must be given too"),
        (("localhost:1", None, 0), "num_processes must be given too"),
        (("localhost:1", 2, None), "process_id must be given too"),
        (("localhost:1", 2, 2), r"process_id must lie in 0 .. num_processes - 1 = 1, got 2"),
        (("localhost:1", 0, 0), "num_processes must be at least 1, got 0"),
        (("localhost:1", 2, "1"), "process_id must be an integer, got '1'"),
        (("localhost", 2, 0), "coordinator_address must be HOST:PORT, got 'localhost'"),
        (("localhost:99999", 2, 0), "coordinator_address must be HOST:PORT, got 'localhost:99999'"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        detect(*arguments, environ={})


@pytest.mark.parametrize(
    "name", sorted(set(SLURM) - {"SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID", "SLURM_STEP_TASKS_PER_NODE"})
)
def test_each_variable_of_slurm_that_is_missing(name):
    with pytest.raises(
        ValueError, match=f"{name} is not set, though SLURM_STEP_.* is, .*: start the program with srun"
    ):
        detect(environ={key: value for key, value in SLURM.items() if key != name})


@pytest.mark.parametrize(
    "name, older",
    [
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        ("SLURM_STEP_ID", "SLURM_STEPID"),
        ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    ],
)
def test_variables_with_two_names(name, older):
    without = {key: value for key, value in SLURM.items() if key != name}
    assert detect(environ=without | {older: SLURM[name]}) == detect(environ=SLURM)
    with pytest.raises(ValueError, match=f"{name} or {older} is not set"):
        detect(environ=without)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"SLURM_PROCID": "5"}, "SLURM_PROCID=5 must be an integer from 0 to 4"),
        ({"SLURM_PROCID": "-1"}, "SLURM_PROCID=-1 must be an integer from 0 to 4"),
        ({"SLURM_PROCID": "two"}, "SLURM_PROCID=two must be an integer"),
        ({"SLURM_NODEID": "3"}, "SLURM_NODEID=3 must be an integer from 0 to 2"),
        ({"SLURM_LOCALID": "2"}, "SLURM_LOCALID=2 must be an integer from 0 to 1"),
        ({"SLURM_STEP_NUM_TASKS": "0"}, "SLURM_STEP_NUM_TASKS=0 must be an integer of at least 1"),
        ({"SLURM_STEP_NODELIST": "n[1-2"}, r"SLURM_STEP_NODELIST=n\[1-2 cannot be read: .* no list of node names"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2,,1"}, "SLURM_STEP_TASKS_PER_NODE=2,,1 cannot be read: '' is no count"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, "gives 6 tasks on 3 nodes, and there are 5 tasks on the 3 nodes"),
        ({"SLURM_STEP_NODELIST": "n[1-2]"}, "gives 5 tasks on 3 nodes, and there are 5 tasks on the 2 nodes"),
        ({"TREE_ATTN_COORDINATOR_PORT": "http"}, "TREE_ATTN_COORDINATOR_PORT=http must be an integer from 1 to 65535"),
    ],
)
def test_wrong_values_of_slurm(changed, message):
    with pytest.raises(ValueError, match=message):
        detect(environ=SLURM | changed)


@pytest.mark.parametrize("name", TORCHRUN)
def test_each_variable_of_torchrun_that_is_missing(name):
    with pytest.raises(ValueError, match=f"{name} is not set, though .* is, so torchrun"):
        detect(environ={key: value for key, value in TORCHRUN.items() if key != name})


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"RANK": "4"}, "RANK=4 must be an integer from 0 to 3"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 must be an integer from 0 to 1"),
        ({"WORLD_SIZE": "all"}, "WORLD_SIZE=all must be an integer of at least 1"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT=65536 must be an integer from 1 to 65535"),
    ],
)
def test_wrong_values_of_torchrun(changed, message):
    with pytest.raises(ValueError, match=message):
        detect(environ=TORCHRUN | changed)


def test_a_coordinator_on_loopback_is_refused_where_there_are_other_nodes():
    launch = Launch(source="slurm", num_processes=2, num_nodes=2, node="n2", coordinator_host="localhost")
    with pytest.raises(ValueError, match=r"'localhost' means .* on n2, .* 2 nodes: set TREE_ATTN_COORDINATOR_HOST to"):
        check_coordinator(launch)
    check_coordinator(dataclasses.replace(launch, num_nodes=1))


def test_a_coordinator_that_does_not_resolve():
    launch = Launch(source="arguments", num_processes=2, coordinator_host="no-such-host.invalid")
    with pytest.raises(ValueError, match=r"'no-such-host.invalid' does not resolve on .*: give coordinator_address as"):
        check_coordinator(launch)


@pytest.mark.parametrize("local_rank, local_size, numbers", [(0, 1, (0, 1, 2, 3)), (1, 2, (2, 3)), (3, 4, (3,))])
def test_gpus_are_dealt_out_over_the_processes_of_a_node(local_rank, local_size, numbers):
    launch = Launch(source="slurm", local_rank=local_rank, local_size=local_size)
    assert own_gpus(launch, GPUS, {"SLURM_GPUS_ON_NODE": "4"}) == numbers


def test_no_gpus_and_no_word_of_the_node():
    assert own_gpus(Launch(source="slurm", local_rank=0, local_size=2), [], {}) is None
    assert own_gpus(Launch(source="arguments"), GPUS, {}) is None


@pytest.mark.parametrize(
    "visible, environ, found",
    [
        (1, {"SLURM_GPUS_PER_TASK": "1", "CUDA_VISIBLE_DEVICES": "0"}, "CUDA_VISIBLE_DEVICES=0, SLURM_GPUS_PER_TASK=1"),
        (2, {"SLURM_GPUS_ON_NODE": "4", "SLURM_STEP_GPUS": "0,1"}, "SLURM_STEP_GPUS=0,1, SLURM_GPUS_ON_NODE=4"),
    ],
)
def test_gpus_hidden_from_a_task(visible, environ, found):
    launch = Launch(source="slurm", process_id=3, node="n2", local_rank=1, local_size=2)
    with pytest.raises(ValueError, match=f"rank 3 sees {visible} GPUs? of n2, .*{found}.*without --gpus-per-task"):
        own_gpus(launch, GPUS[:visible], environ)


def test_gpus_that_cannot_be_dealt_out_equally():
    with pytest.raises(ValueError, match="the 4 GPUs of n1 cannot be dealt out equally to its 3 processes"):
        own_gpus(Launch(source="slurm", node="n1", local_rank=0, local_size=3), GPUS, {})


def test_gpus_that_were_asked_for_and_are_not_there():
    with pytest.raises(ValueError, match=r"local_device_ids must lie in 0 .. 3, the GPUs seen on n1; got \[4\]"):
        own_gpus(Launch(source="slurm", node="n1", local_device_ids=(0, 4)), GPUS, {})


def test_one_process_takes_the_gpus_that_it_names_of_either_maker(monkeypatch):
    options = {}
    monkeypatch.setattr(join.jax.config, "update", options.__setitem__)
    launch = join._alone(Launch(source="single", node="n1", local_device_ids=(1, 3)))
    assert options == {"jax_cuda_visible_devices": "1,3", "jax_rocm_visible_devices": "1,3"}
    assert (launch.local_device_ids, launch.hosts) == ((1, 3), ("n1",))
