"""The facts that must be alike on all ranks: number of processes, versions, platform, devices; and GPUs apart."""

from collections.abc import Mapping
from typing import Any


def misfit(hellos: Mapping[int, dict], hello: dict) -> str | None:
    """Returns the reason why a rank cannot join those that are there, by rank; None where it can."""
    first, rank = hellos[0], hello["rank"]
    if hello["problem"]:
        return f"{name_of(hello)} cannot take part: {hello['problem']}"
    if hello["num_processes"] != first["num_processes"]:
        return _unlike("num_processes", hello, first, "start all with the same number")
    if rank in hellos:
        return (
            f"rank {rank} is there twice: {name_of(hellos[rank])} and {name_of(hello)}. Every process needs a "
            "process_id (SLURM_PROCID, RANK) of its own"
        )
    for package, version in first["versions"].items():
        if hello["versions"].get(package) != version:
            return (
                f"the ranks run different versions of {package}: {version} in {name_of(first)}, "
                f"{hello['versions'].get(package)} in {name_of(hello)}. Use one environment on all nodes"
            )
    if hello["platform"] != first["platform"]:
        return _unlike("platform", hello, first, "look for the driver and the JAX plugin where it is cpu")
    if hello["n_local_devices"] != first["n_local_devices"]:
        return _unlike("n_local_devices", hello, first, "every process must have as many devices as the others")
    for other in hellos.values():
        shared = sorted(set(other["gpus"]) & set(hello["gpus"])) if other["node"] == hello["node"] else []
        if shared:
            return (
                f"{name_of(other)} and {name_of(hello)} both take GPU {shared[0]}: every process needs GPUs of its own "
                "(local_device_ids, or let every task see all GPUs of its node)"
            )
    return None


def name_of(hello: Mapping[str, Any]) -> str:
    """Returns a rank, its node and its process, for messages: "rank 2 on n2 (pid 77)"."""
    return f"rank {hello['rank']} on {hello['node']} (pid {hello['pid']})"


def _unlike(name: str, hello: Mapping, first: Mapping, remedy: str) -> str:
    differ = f"{first[name]} in {name_of(first)}, {hello[name]} in {name_of(hello)}"
    return f"the ranks do not agree on {name}: {differ}; {remedy}"
