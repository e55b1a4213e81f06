"""Times reductions of tree decoding: alone over payloads, and in whole steps beside the local attention.

    python3 scripts/bench_reduce.py --devices 4 --out docs/results/reduce_4xh200.jsonl --process-per-device
    python3 scripts/bench_reduce.py --devices 4 --out ...                                               # one process

Rows of "exchange": one reduction of a state of `elements`. Rows of "step": one step of tree_decode; `reduction` "none"
leaves the local results unmerged, and the others add to it. Rows of "ragged" (`--parts ragged`): a step of several
sequences of drawn lengths, in blocks of slots that devices take in turn. Rows of "transfer" (`--parts transfer`): every
device sends `bytes` to the next one, as in a ring's hop, at `gb_per_s`; `nccl` has NCCL's settings.

`us_median` is by the host's clock: the time of a program of `long_calls` dependent calls less that of one of `calls`,
over their difference. `program_us` is the rest of a program. The profiler gives, in other runs of the shorter program,
`device_us`, the time in which this process's GPUs ran anything, and the `kernels`. Up to 25 runs of both come first,
for clocks to rise.
"""

import argparse
import functools
import itertools
import pathlib
import sys

from process_per_device import environment, join, spawn

HEAD_DIM = 128
UNROLLED = 8  # exchanges in a turn of the loop: its counter's kernel is then a small part, and compiling takes seconds
ELEMENTS = tuple(heads * (HEAD_DIM + 1) for heads in (16, 64, 256, 1024, 2032))
KEYS_PER_DEVICE = (10_240, 80_000, 640_000)
TRANSFER_BYTES = tuple(round(mb * 1e6) for mb in (1, 2, 4.2, 8.4, 16.8, 42, 84, 168, 328, 655))
RAGGED_BATCHES, RAGGED_KEYS, RAGGED_HEADS, RAGGED_BLOCK = (8, 16, 32), 20_480, (32, 8), 512
PARTS = ("exchange", "step", "ragged", "transfer")
REDUCTIONS = ("allreduce", "gather", "fused", None)


def main() -> int:
    """Times in this process, or starts one process per device that do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="JSONL file, appended to")
    parser.add_argument("--parts", default="exchange,step", help=f"of {', '.join(PARTS)} (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=16, help="query and key heads of a step")
    parser.add_argument("--iters", type=int, default=32, help="timed samples per row")
    parser.add_argument("--process-per-device", action="store_true", help="one process per device (jax.distributed)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # coordinator,count,rank
    args = parser.parse_args()
    if unknown := set(args.parts.split(",")) - set(PARTS):
        parser.error(f"--parts: must name parts of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    if args.process_per_device:
        words = [word for word in sys.argv[1:] if word != "--process-per-device"]
        return spawn([sys.executable, __file__, *words], args.devices)
    if args.worker:
        join(args.worker)
    from tree_attn import make_mesh
    from tree_attn.measure.rows import MeasuredRows

    mesh, writer = make_mesh({"seq": args.devices}), MeasuredRows(args.out)
    parts = {"exchange": exchanges, "step": functools.partial(steps, heads=args.heads), "ragged": ragged}
    for part in args.parts.split(","):
        if part == "transfer":
            for row in transfers(mesh, args.iters):
                write(row, writer, args.devices)
            continue
        for labels, turn, arrays, counts in parts[part](mesh):
            row = {"what": part} | labels | timed(turn, arrays, n_iters=args.iters, **counts)
            write(row, writer, args.devices)
    return 0


def transfers(mesh, n_iters: int):
    """Yields rows of bare transfers to the next device, by size."""
    from tree_attn.measure import provenance
    from tree_attn.measure.links import neighbour_gb_per_s

    for num_bytes in TRANSFER_BYTES:
        rate = neighbour_gb_per_s(mesh, num_bytes, n_iters=n_iters)
        row = {"what": "transfer", "bytes": num_bytes, "gb_per_s": rate, "nccl": provenance.nccl_settings()}
        yield row | provenance.clocks()


def exchanges(mesh):
    """Yields reductions alone; each call's state depends on the result of the last, so that none can be left out."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    from tree_attn.reduce import reduce_state
    from tree_attn.state import SoftmaxState

    for elements, reduction in itertools.product(ELEMENTS, REDUCTIONS):
        heads = elements // (HEAD_DIM + 1)

        def on_device(mixed, local, reduction=reduction):
            for _ in range(UNROLLED):
                merged = reduce_state(mixed, ("seq",), reduction, mesh)
                mixed = jax.tree.map(lambda a, b: (0.5 * a + 0.5 * b).astype(a.dtype), local, merged)
            return mixed

        spec = P("seq")
        turn = jax.shard_map(on_device, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False)
        ranks = mesh.devices.size
        local = SoftmaxState(
            sharded(mesh, spec, (ranks, 1, heads, HEAD_DIM), jnp.bfloat16),
            sharded(mesh, spec, (ranks, 1, heads), jnp.float32),
        )
        counts = {"chain": 8, "calls_per_turn": UNROLLED, "warmup": 25}
        yield {"reduction": reduction, "elements": elements}, turn, (local, local), counts


def steps(mesh, heads: int):
    """Yields whole steps of decoding, and the local attention of one."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    from tree_attn import attend, tree_decode

    along_keys = P(None, "seq")
    for keys in KEYS_PER_DEVICE:
        shape = (1, keys * mesh.devices.size, heads, HEAD_DIM)
        arrays = [
            sharded(mesh, P(), (1, 1, heads, HEAD_DIM), jnp.bfloat16),
            sharded(mesh, along_keys, shape, jnp.bfloat16),
            sharded(mesh, along_keys, shape, jnp.bfloat16),
        ]
        local = jax.shard_map(
            lambda *shard: attend(*shard).out, mesh=mesh, in_specs=(P(), along_keys, along_keys), out_specs=P(),
            check_vma=False,
        )  # fmt: skip
        ways = {"none": local}
        for reduction in REDUCTIONS:
            ways[reduction] = functools.partial(tree_decode, axis_name="seq", mesh=mesh, reduction=reduction)
        for reduction, step in ways.items():
            labels = {"reduction": reduction, "keys_per_device": keys, "heads": heads}
            # Long steps need no long chains.
            counts = {"chain": min(32, 5_120_000 // keys), "calls_per_turn": 1, "warmup": max(2, 250_000 // keys)}
            yield labels, step, arrays, counts


def ragged(mesh):
    """Yields whole steps of decoding for sequences of up to `RAGGED_KEYS` keys, all lengths equally likely."""
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import PartitionSpec as P

    from tree_attn import tree_decode

    num_heads, num_kv_heads = RAGGED_HEADS
    for batch in RAGGED_BATCHES:
        lengths = np.random.default_rng(0).integers(1, RAGGED_KEYS + 1, batch).astype(np.int32)
        cache = (batch, RAGGED_KEYS, num_kv_heads, HEAD_DIM)
        query = sharded(mesh, P(), (batch, 1, num_heads, HEAD_DIM), jnp.bfloat16)
        arrays = [query, *(sharded(mesh, P(None, "seq"), cache, jnp.bfloat16) for _ in range(2))]
        for reduction in REDUCTIONS:
            step = functools.partial(
                tree_decode, key_value_seq_lengths=lengths, block_size=RAGGED_BLOCK, axis_name="seq", mesh=mesh,
                reduction=reduction,
            )  # fmt: skip
            labels = {"reduction": reduction, "batch": batch, "keys_per_device": RAGGED_KEYS // mesh.devices.size}
            labels |= {"heads": num_heads, "kv_heads": num_kv_heads, "block_size": RAGGED_BLOCK}
            yield labels | {"num_keys": int(lengths.sum())}, step, arrays, dict(chain=16, calls_per_turn=1, warmup=10)


def sharded(mesh, spec, shape, dtype):
    """Returns random values; each device's part is made on it."""
    import jax
    from jax.sharding import NamedSharding

    return jax.jit(
        lambda: jax.random.normal(jax.random.key(0), shape, dtype), out_shardings=NamedSharding(mesh, spec)
    )()


def timed(turn, arrays, *, chain: int, calls_per_turn: int, warmup: int, n_iters: int) -> dict:
    """Returns medians per call of `turn`, which makes `calls_per_turn`; or the reason why it cannot run."""
    import jax

    from tree_attn.measure import provenance
    from tree_attn.measure.device_time import device_time
    from tree_attn.measure.latency import latency_us

    programs = {}
    try:
        timing = latency_us(
            turn,
            *arrays,
            n_iters=n_iters,
            warmup=warmup,
            chain=chain,
            long_chain=4 * chain,
            on_compiled=lambda compiled, length: programs.update({length: compiled}),
        )
    except NotImplementedError as error:
        return {"error": str(error)}
    on_device = device_time(programs[chain], *arrays, calls=chain * calls_per_turn, n_iters=32, warmup=1)
    # A fixed number of runs: all processes have to make equally many.
    clocks = provenance.clocks_during(lambda: jax.block_until_ready(programs[chain](*arrays)), repetitions=50)
    return {
        "us_median": timing.median_us / calls_per_turn,
        "us_p10": timing.p10_us / calls_per_turn,
        "us_p90": timing.p90_us / calls_per_turn,
        "program_us": timing.program_us,
        "n_iters": n_iters,
        "calls": chain * calls_per_turn,
        "long_calls": timing.long_chain * calls_per_turn,
        "device_us": on_device.median_us,
        "kernels": dict(itertools.islice(on_device.kernels.items(), 8)),
    } | clocks


def write(row: dict, writer, num_devices: int) -> None:
    """Appends the row and prints a line, in process 0."""
    from tree_attn.measure import provenance

    if not writer.is_writer:
        return
    writer.append(environment(num_devices) | row | {"versions": provenance.versions()})
    if row["what"] == "transfer":
        print(f"transfer {row['bytes']:11,d} bytes {row['gb_per_s'] or 0:6.1f} GB/s", flush=True)
        return
    size = row.get("elements") or row.get("num_keys") or row.get("keys_per_device")
    values = row.get("error") or f"{row['us_median']:8.1f} us, on the device {row['device_us']:8.1f}"
    print(f"{row['what']:9s} {size:8d} {row['reduction'] or 'picked'!s:10s} {values}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
