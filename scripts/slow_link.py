"""Measures tree and ring attention over two nodes with a slow link between them: time, and bytes per link class.

It runs on the miniature cluster, whose nodes have interfaces to count bytes on, and a link that can be limited.

    slurm/minicluster/minicluster start --nodes 2
    slurm/minicluster/minicluster shape 50mbit
    eval "$(slurm/minicluster/minicluster env)"
    srun --nodes=2 --ntasks-per-node=2 python3 scripts/slow_link.py --out docs/results/slow_link
    python3 scripts/slow_link.py --table docs/results/slow_link

Every node has four emulated CPU devices, two per process. The share of a strategy is the number of bytes that its
algorithm has to send. A flat collective runs along a ring of all devices, which leaves each node once: one device's
traffic crosses the link. In a hierarchical one, each of a node's devices merges with its partners in the other nodes.
"""

import argparse
import os
import pathlib
import time

from tree_attn.measure.rows import MeasuredRows, read, strategy_label

ROUNDS = 3  # the median of the rounds counts: emulated devices share their cores with other programs
NODES, TASKS, DEVICES_PER_TASK = 2, 2, 2
KEY_COUNT, HEADS, KV_HEADS, HEAD_DIM, BATCH = 256, 32, 2, 64, 4


def shares(step, strategy: str, reduction: str | None) -> tuple[float, float]:
    """Returns the bytes that one node has to send in a step, (within itself, to other nodes), by the ring model."""
    from tree_attn.cost import predict

    sizes = (step.n_devices // NODES, NODES)
    if reduction == "hierarchical":
        packed = predict.bytes_sent_per_device(step, strategy, "gather") / (step.n_devices - 1)
        return tuple(sizes[0] * (size - 1) * packed for size in sizes)
    per_device = predict.bytes_sent_per_device(step, strategy, reduction)
    return (sizes[0] - 1) * per_device, per_device


def sent_bytes(interface: str) -> int:
    """Returns the bytes that this node has sent through an interface so far."""
    return int(pathlib.Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def measure_case(case, devices, num_steps: int) -> dict:
    """Returns the row of one strategy: time and bytes of its steps, and its share."""
    import jax

    from tree_attn.commands.compare.data import make_data

    mesh = case.mesh(devices)
    data = make_data(case.step, mesh, case.axes, seed=0)
    near_share, far_share = shares(case.step, case.strategy, case.reduction)
    return {
        "strategy": case.strategy,
        "reduction": case.reduction,
        "axis_sizes": list(case.axis_sizes),
        **measure_steps(jax.jit(case.decode(mesh)), data, num_steps),
        "bytes_share_per_node_within": near_share,
        "bytes_share_per_node_across": far_share,
    }


def measure_axis(case, devices, axis_index: int, num_steps: int) -> dict:
    """Returns the row of one axis of the hierarchical reduction: a state is gathered over it and merged."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    from tree_attn.reduce import reduce_state
    from tree_attn.state import SoftmaxState

    mesh, axis = case.mesh(devices), case.axes[axis_index]
    shape = (case.step.batch, case.step.num_queries, case.step.num_heads)

    def reduce(query):  # the state differs between devices, so that nothing can be left out
        out = query + jax.lax.axis_index(case.axes)
        merged = reduce_state(SoftmaxState(out, jnp.ones(shape, jnp.float32)), (axis,), "gather").out
        return merged[None]

    query = jnp.ones((*shape, case.step.head_dim), case.step.dtype)
    program = jax.jit(jax.shard_map(reduce, mesh=mesh, in_specs=P(), out_specs=P(case.axes), check_vma=False))
    both = shares(case.step, case.strategy, case.reduction)
    return {
        "strategy": "level",
        "reduction": f"{axis} level alone",
        "axis_sizes": list(case.axis_sizes),
        **measure_steps(program, (query,), num_steps),
        "bytes_share_per_node_within": both[0] if axis_index == 0 else 0.0,
        "bytes_share_per_node_across": both[1] if axis_index == 1 else 0.0,
    }


def measure_steps(program, data, num_steps: int) -> dict:
    """Times a program's steps and counts what they send; the same steps are counted and timed."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    step = program.lower(*data).compile()
    for _ in range(3):
        jax.block_until_ready(step(*data))
    seconds, near, far = [], [], []
    for _ in range(ROUNDS):
        multihost_utils.sync_global_devices("before")
        before = sent_bytes("lo"), sent_bytes("eth0")
        multihost_utils.sync_global_devices("counted")  # no process sends before every one has read its counters
        start = time.perf_counter()
        for _ in range(num_steps):
            jax.block_until_ready(step(*data))
        multihost_utils.sync_global_devices("after")  # this node's other process has sent everything too
        seconds.append((time.perf_counter() - start) / num_steps)
        near.append((sent_bytes("lo") - before[0]) / num_steps)
        far.append((sent_bytes("eth0") - before[1]) / num_steps)
    return {
        "latency_us_median": float(np.median(seconds)) * 1e6,
        "latency_us_least": min(seconds) * 1e6,
        "latency_us_most": max(seconds) * 1e6,
        "bytes_sent_per_node_within": float(np.median(near)),
        "bytes_sent_per_node_across": float(np.median(far)),
        "n_steps": num_steps,
        "n_rounds": ROUNDS,
        "load_average": os.getloadavg()[0],  # four processes of this are the measurement itself
    }


def run(out: pathlib.Path, num_steps: int, link: str) -> None:
    """Measures every strategy; process 0 writes a row for each."""
    import jax

    from tree_attn.cluster.join import initialize
    from tree_attn.commands.compare.cases import plan
    from tree_attn.cost.step import DecodeStep
    from tree_attn.measure import provenance

    launch = initialize(n_devices=NODES * TASKS * DEVICES_PER_TASK)
    assert launch.num_processes == NODES * TASKS, f"run it as the help shows, in {NODES} nodes of {TASKS} tasks"
    devices = jax.devices()
    step = DecodeStep(
        batch=BATCH,
        num_keys=KEY_COUNT,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype="float32",
        n_devices=len(devices),
    )
    facts = {
        "link": link,
        "num_keys": KEY_COUNT,
        "num_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "batch": BATCH,
        "dtype": "float32",
        "n_nodes": NODES,
        "n_processes": jax.process_count(),
        "hardware": f"{NODES} nodes, network namespaces of one machine: {provenance.hardware(devices)}",
        "jax_version": jax.__version__,
    }
    writer = MeasuredRows(out / "results.jsonl", facts)
    cases = plan([step], (), [None], "cpu")
    (hierarchical,) = (case for case in cases if case.reduction == "hierarchical")
    rows = [measure_case(case, devices, num_steps) for case in cases]
    rows += [measure_axis(hierarchical, devices, axis_index, num_steps) for axis_index in (0, 1)]
    for row in rows:
        if writer.is_writer:
            command = "srun --nodes=2 --ntasks-per-node=2 python3 scripts/slow_link.py --out DIR"
            writer.append(row | facts | {"git_commit": provenance.git_commit(), "command": command})
            print(f"{_name(row)}: {row['latency_us_median'] / 1e3:.1f} ms, {row['bytes_sent_per_node_across']:,.0f} B")


def table(rows: list[dict]) -> str:
    """Returns a Markdown table: time, then bytes per step and node over each link class, measured and by the model."""
    lines = [
        f"| strategy | time per step (range) | sent within a node (share) | across, {rows[0]['link']} (share) |",
        "|---|---|---|---|",
    ]
    for row in rows:
        time_ms = [row[f"latency_us_{which}"] / 1e3 for which in ("median", "least", "most")]
        cells = [_name(row), "{:.1f} ms ({:.1f} to {:.1f})".format(*time_ms)]
        for place in ("within", "across"):
            sent, share = (row[f"bytes_{which}_per_node_{place}"] / 1e3 for which in ("sent", "share"))
            cells.append(f"{sent:,.1f} kB ({share:,.1f})")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _name(row: dict) -> str:
    if row["strategy"] == "level":
        return f"hierarchical, {row['reduction']}"
    return strategy_label(row["strategy"], row["reduction"])


def main() -> None:
    """Measures and writes rows, or prints their table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--out", type=pathlib.Path, metavar="DIR", help="measure, and write DIR/results.jsonl")
    task.add_argument("--table", type=pathlib.Path, metavar="DIR", help="print the table of DIR/results.jsonl")
    parser.add_argument("--steps", type=int, default=30, help="per round (default 30)")
    parser.add_argument("--link", default="50 Mbit/s", help="the link's name in the table (default 50 Mbit/s)")
    args = parser.parse_args()
    if args.table is not None:
        print(table(read(args.table / "results.jsonl")))
    else:
        run(args.out, args.steps, args.link)


if __name__ == "__main__":
    main()
