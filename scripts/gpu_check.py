"""Checks every backend, reduction and ring against the float64 oracle on this machine's GPUs.

Slots beyond the lengths hold NaN in every check.

    python3 scripts/gpu_check.py --devices 1,2,8 --out docs/results/gpu_check.jsonl                # one process
    python3 scripts/gpu_check.py --devices 1,2,8 --out ... --process-per-device                    # one per GPU
    python3 scripts/gpu_check.py --devices 1,2 --out ... --trials 300 --seed 1                     # random cases
    python3 scripts/gpu_check.py --out ... --only parts --as 8.9 --every 5                         # a thin selection

Every check runs twice and must give the same bits, on every device. cuDNN's own kernels do not promise that: for them
it is recorded only. The file gets one JSON row per check; a backend that cannot do a case is recorded with its reason.
Exits with 1 if any check failed. Without a GPU it runs on emulated CPU devices (checks the script).
"""

import argparse
import contextlib
import functools
import itertools
import json
import pathlib
import sys
from collections.abc import Collection, Iterator

import numpy as np
from early_checks import early_checks
from float8_checks import float8_checks
from garbage_checks import gradient_checks, ragged_checks
from llama_checks import llama_checks
from oracle_case import (
    EXCHANGED_SHAPES,
    LEAN_SHAPES,
    OPTIONS,
    PREFIX_SHAPES,
    SHAPES,
    SHORT_SHAPES,
    THINNING,
    OracleCase,
    inputs,
    is_same_everywhere,
)
from part_checks import part_checks
from process_per_device import environment, has_gpu, join, spawn, writable
from prompt_checks import prefill_checks, prompt_gradient_checks
from trial_checks import trial_checks

UNTHINNED = (None, "gradients", "sparq", "activations", "llama")  # of --only: not all are a call beside the oracle


def main() -> int:
    """Runs the checks in this process, or starts one process per device that do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="1", help="device counts to check, e.g. 1,2,8")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="JSONL file, appended to")
    parser.add_argument(
        "--only",
        "--how",
        help="a local backend, e.g. mosaic_gpu; or prefix, ragged, gradients, parts, float8, early, sparq, "
        "activations, llama, prefill or prompt_gradients; or part of the name of a strategy, e.g. fused (default: "
        "all checks)",
    )
    parser.add_argument("--trials", type=int, metavar="N", help="N random calls on each count of devices instead")
    parser.add_argument("--seed", type=int, default=0, help="of --trials")
    parser.add_argument(
        "--as", dest="capability", help="run mosaic_gpu as on a GPU of this compute capability, e.g. 8.9"
    )
    parser.add_argument(
        "--every", type=int, default=1, metavar="N", help="of the checks that --only names every N-th, in its order"
    )
    parser.add_argument("--go-on", action="store_true", help="leave out local and sparq checks that --out has")
    parser.add_argument("--process-per-device", action="store_true", help="one process per device (jax.distributed)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # coordinator,count,rank
    args = parser.parse_args()
    if args.trials is not None and args.process_per_device:
        parser.error("--trials: runs in one process")
    if args.go_on and args.process_per_device:
        parser.error("--go-on: processes that read --out while one writes it would leave out different checks")
    if args.every < 1:
        parser.error(f"--every: must be at least 1, got {args.every}")
    if args.every > 1 and (args.trials is not None or args.only in UNTHINNED):
        parser.error(f"--every: needs --only, and none of {', '.join(map(str, UNTHINNED[1:]))}")
    THINNING.every = args.every
    counts = [int(count) for count in args.devices.split(",")]
    if args.process_per_device:
        command = [sys.executable, __file__, "--out", str(args.out), *(["--only", args.only] if args.only else [])]
        command += [*(["--as", args.capability] if args.capability else []), "--every", str(args.every)]
        return max(spawn([*command, "--devices", str(count)], count) for count in counts)
    if args.worker:
        join(args.worker)
    elif not has_gpu():
        import jax

        jax.config.update("jax_num_cpu_devices", max(counts))
    from tree_attn.kernels import targets

    if args.capability not in (None, *targets.TARGETS):
        parser.error(f"--as: must be one of {', '.join(targets.TARGETS)}, got {args.capability}")
    selected = {"every": args.every} if args.every > 1 else {}
    selected |= {"as": args.capability} if args.capability else {}
    with contextlib.nullcontext() if args.capability is None else targets.assumed(args.capability):
        if args.trials is not None:
            trials = functools.partial(trial_checks, num_draws=args.trials, seed=args.seed)
            return max(run_checks(count, args.out, trials(count), fields=selected) for count in counts)
        options = dict(only=args.only, go_on=args.go_on, fields=selected)
        return max(run_checks(count, args.out, **options) for count in counts)


def run_checks(
    num_devices: int,
    out: pathlib.Path,
    checks: Iterator[dict] | None = None,
    only: str | None = None,
    go_on: bool = False,
    fields: dict | None = None,
) -> int:
    """Runs these checks, or every check over `num_devices` devices, or those of `only`; returns the exit status.

    Args:
      fields: of every row: what was selected.
    """
    from tree_attn.measure.rows import MeasuredRows

    writer = MeasuredRows(out)
    done = {_key(row) for row in writer.rows} if go_on else set()
    rows = []
    for row in filter(None, checks or _checks(num_devices, only, done)):  # what --every leaves out has no row
        rows.append(row | (fields or {}) | environment(num_devices))
        writer.append(writable(rows[-1]))
    failed = [row for row in rows if row["passed"] is False]
    if writer.is_writer:
        ran = sum(row["passed"] is not None for row in rows)
        print(
            f"{num_devices} devices, {environment(num_devices)['n_processes']} processes: {ran} checks ran, "
            f"{len(failed)} failed, {len(rows) - ran} not supported"
        )
        for row in failed:
            print("FAILED", json.dumps(row))
    return int(bool(failed))


def _checks(num_devices: int, only: str | None, done: Collection[str]) -> Iterator[dict]:
    """Returns the rows of all checks, or of those that `only` names, each made on demand."""
    from tree_attn.local import IMPLEMENTATIONS

    on_one = {
        "prefix": prefix_checks, "ragged": ragged_checks, "gradients": gradient_checks, "parts": part_checks,
        "float8": float8_checks, "early": early_checks,
    }  # fmt: skip
    if only in on_one:
        return on_one[only]()
    if only == "sparq":
        return sparq_checks(num_devices, done)
    of_devices = {
        "prefill": prefill_checks, "prompt_gradients": prompt_gradient_checks, "activations": activation_checks,
        "llama": llama_checks,
    }  # fmt: skip
    if only in of_devices:
        return of_devices[only](num_devices)
    if only in IMPLEMENTATIONS:
        return local_checks([only], done)
    if only is not None:
        return decode_checks(num_devices, only)
    on_one_device = (local_checks(sorted(IMPLEMENTATIONS), done), *(checks() for checks in on_one.values()))
    local = on_one_device if num_devices == 1 else ()
    return itertools.chain(
        *local,
        decode_checks(num_devices),
        *(checks(num_devices) for checks in of_devices.values()),
        sparq_checks(num_devices, done),
    )


def local_checks(implementations: list[str], done: Collection[str]) -> Iterator[dict]:
    """Checks local backends on one device, with every option."""
    from tree_attn.local import attend

    for implementation, (name, options), dtype in itertools.product(
        implementations, OPTIONS.items(), ("bfloat16", "float16", "float32")
    ):
        for shape in (
            SHAPES + SHORT_SHAPES + (LEAN_SHAPES if implementation == "mosaic_gpu" and dtype != "float32" else ())
        ):
            case = OracleCase(dtype=dtype, options=options, **shape)
            call = functools.partial(attend, implementation=implementation)
            labels = dict(what="local", implementation=implementation, options_name=name)
            if _key(labels | case.shape) not in done:
                yield case.check(call, **labels)


def prefix_checks() -> Iterator[dict]:
    """Checks bifurcated_decode on one device: a prefix read as query columns and as query rows, and suffixes."""
    from tree_attn import bifurcated_decode

    def call(query, key, value, *, key_value_seq_lengths, shared, **options):
        parts = key[0, :shared], value[0, :shared], key[:, shared:], value[:, shared:]
        return bifurcated_decode(query, *parts, key_value_seq_lengths=key_value_seq_lengths - shared, **options)

    for shape, dtype in itertools.product(PREFIX_SHAPES, ("bfloat16", "float16")):
        shared, suffix = shape["shared"], np.arange(shape["batch"]) * 7 % (shape["num_keys"] - shape["shared"] + 1)
        options = dict(key_value_seq_lengths=(shared + np.maximum(suffix, shape["num_queries"])).astype(np.int32))
        options |= dict(is_causal=True) if shape["num_queries"] > 1 else {}
        case = OracleCase(dtype=dtype, options=options, **shape)
        labels = dict(what="prefix", implementation="mosaic_gpu", shared=shared)
        yield case.check(functools.partial(call, shared=shared, implementation="mosaic_gpu"), **labels)


def decode_checks(num_devices: int, name_part: str | None = None) -> Iterator[dict]:
    """Checks tree_decode by every reduction and ring_decode in both variants, in every placement.

    With `name_part`, only strategies with it in their name.
    """
    from tree_attn import make_mesh, tree_decode
    from tree_attn.ring_baseline import ring_decode

    flat = dict(mesh=make_mesh({"seq": num_devices}), axis_name="seq")
    ways = [("tree", r, functools.partial(tree_decode, reduction=r, **flat)) for r in ("allreduce", "gather", "fused")]
    ways += [("ring", v, functools.partial(ring_decode, variant=v, **flat)) for v in ("overlapped", "public")]
    if num_devices % 2 == 0 and num_devices > 2:
        two = dict(mesh=make_mesh({"device": num_devices // 2, "node": 2}), axis_name=("device", "node"))
        for reduction in ("hierarchical", "fused", ("fused", "gather")):
            call = functools.partial(tree_decode, reduction=reduction, **two)
            ways.append(("tree", f"{reduction} over two axes", call))
    ways = [way for way in ways if name_part is None or name_part in way[1]]
    # Shapes and placements take turns over the options; their full product would take longer to compile than a lease.
    turns = list(zip(OPTIONS, itertools.cycle(SHAPES), itertools.cycle((None, 1, None, 16))))
    for (what, way, call), implementation, (name, shape, block_size) in itertools.product(
        ways, ("xla", "cudnn", "mosaic_gpu", "flash_attn"), turns
    ):
        case = OracleCase(
            dtype="bfloat16", options=OPTIONS[name], num_shards=num_devices, block_size=block_size, **shape
        )
        labels = dict(what=what, how=way, implementation=implementation, options_name=name)
        yield case.check(functools.partial(call, implementation=implementation), **labels)
    for (what, way, call), shape, name in itertools.product(ways, EXCHANGED_SHAPES, ("plain", "causal")):
        if way == "fused":
            case = OracleCase(dtype="bfloat16", options=OPTIONS[name], num_shards=num_devices, **shape)
            labels = dict(what=what, how=way, implementation="mosaic_gpu", options_name=name)
            yield case.check(functools.partial(call, implementation="mosaic_gpu"), **labels)


def activation_checks(num_devices: int) -> Iterator[dict]:
    """Checks sums and gathers of a decoding step's activations, thirty dependent ones, each of other numbers."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    from tree_attn import make_mesh
    from tree_attn.reduce.activations import gather_activations, sum_activations

    mesh, steps = make_mesh({"seq": num_devices}), 30
    ways = {"sum": sum_activations, "gather": gather_activations, "sum with residual": sum_activations}
    for (name, way), dtype, size in itertools.product(ways.items(), ("float32", "bfloat16"), (1, 100, 4096, 8192)):
        host = np.random.default_rng(0).normal(size=(num_devices, size)).astype(np.float32).astype(jnp.dtype(dtype))
        has_residual = name == "sum with residual"  # the first device's numbers, on all

        def of_shard(x, way=way, first=host[0] if has_residual else None):
            scale = lambda x, i: x * 2.0 ** -i.astype(x.dtype)
            added = lambda i: {} if first is None else {"residual": scale(jnp.asarray(first, jnp.bfloat16), i)}
            step = lambda _, i: (None, way(scale(x[0], i), ("seq",), mesh, **added(i)))
            return jax.lax.scan(step, None, jnp.arange(steps))[1]

        program = jax.jit(jax.shard_map(of_shard, mesh=mesh, in_specs=P("seq"), out_specs=P(), check_vma=False))
        x = jax.make_array_from_callback(
            host.shape, jax.NamedSharding(mesh, P("seq")), lambda index, host=host: host[index]
        )
        result = program(x)
        found = np.asarray(result.addressable_data(0), np.float64)
        scaled = host.astype(np.float64) * 2.0 ** -np.arange(steps)[:, None, None]
        if has_residual:  # in bfloat16, as a model's is, and so is the result
            residual = host[:1].astype(jnp.bfloat16).astype(np.float64) * 2.0 ** -np.arange(steps)[:, None, None]
            scaled = np.concatenate([scaled, residual], axis=1)
        exact = scaled if name == "gather" else scaled.sum(axis=1)
        # Additions in float32, each off by half a unit at the most, and one rounding to another dtype.
        is_wide = dtype == "float32" and not has_residual
        rounded = 0.0 if is_wide else float(jnp.finfo("bfloat16").eps) / 2
        additions = num_devices - 1 + has_residual
        allowed = 0.0 if name == "gather" else additions * float(jnp.finfo("float32").eps) / 2 + rounded
        size_of = scaled if name == "gather" else np.abs(scaled).sum(axis=1)
        error = np.abs(found - exact) / np.maximum(np.abs(size_of), 1e-30)
        row = dict(what="activations", how=name, dtype=dtype, elements=size, max_relative_error=float(error.max()))
        row |= dict(by_kernel="fused_" in program.lower(x).as_text(), same_bits_everywhere=is_same_everywhere(result))
        passed = error.max() <= allowed and row["same_bits_everywhere"]
        passed = passed and (row["by_kernel"] or not has_gpu() or num_devices == 1)
        yield row | dict(tolerance=allowed, passed=bool(passed))


def sparq_checks(num_devices: int, done: Collection[str]) -> Iterator[dict]:
    """Checks SparQ by its kernels, in chunks and in shards, against its XLA backend (tests check that one)."""
    import jax
    import jax.numpy as jnp

    from tree_attn import make_mesh, sparq_decode
    from tree_attn.tolerances import max_abs_error

    where = {} if num_devices == 1 else dict(mesh=make_mesh({"seq": num_devices}), axis_name="seq", block_size=None)
    sizes = [
        dict(num_keys=4096, head_dim=128, lengths=(4096, 1000, 50, 0), k=128),
        dict(num_keys=8192, head_dim=64, lengths=(8000, 8192), k=200),
        dict(num_keys=36864, head_dim=80, lengths=(36000, 5000), k=70),
        # Groups: one kernel chooses, or logits pass through memory; in one list, or in several.
        dict(num_keys=4096, head_dim=128, lengths=(4096, 1000, 50, 0), k=128, group=4, reallocate=False),
        dict(num_keys=4096, head_dim=128, lengths=(4096, 1000, 50, 0), k=128, group=4),
        dict(num_keys=4096, head_dim=64, lengths=(4000, 3), k=128, group=8, num_queries=3, reallocate=False),
        dict(num_keys=36864, head_dim=128, lengths=(36000, 5000), k=128, group=4, reallocate=False),
        dict(num_keys=8192, head_dim=80, lengths=(8000, 8192), k=70, group=2, num_queries=3),
        dict(num_keys=16384, head_dim=128, lengths=(16000, 16384), k=200, group=8),
    ]
    for size, selection, dtype in itertools.product(sizes, ("global", "per_shard"), ("bfloat16", "float16")):
        size = dict(group=1, num_queries=1, reallocate=True) | size
        labels = dict(what="sparq", selection=selection, dtype=dtype, implementation="mosaic_gpu")
        if _key(labels | size | dict(n_devices=num_devices)) in done:
            continue
        heads, lengths = 8, np.array(size["lengths"], np.int32)
        key_shape = (len(lengths), size["num_keys"], heads // size["group"], size["head_dim"])
        query, key, value = inputs(dtype, (len(lengths), size["num_queries"], heads, size["head_dim"]), key_shape)
        call = functools.partial(
            sparq_decode, num_components=32, num_keys=size["k"], local_window=16, selection=selection,
            key_value_seq_lengths=lengths, is_causal=True, reallocate=size["reallocate"], return_lse=True, **where,
        )  # fmt: skip

        is_garbage = (np.arange(size["num_keys"]) >= lengths[:, None])[:, :, None, None]
        key, value = (np.where(is_garbage, x.dtype.type(np.nan), x) for x in (key, value))

        def run(implementation, call=call, arrays=(query, key, value)):
            by_component = np.ascontiguousarray(np.moveaxis(arrays[1], 1, 3))
            step = lambda q, k, v, c: call(q, k, v, key_by_component=c, implementation=implementation)
            return jax.jit(step)(*arrays, by_component)

        found, again, expected = run("mosaic_gpu"), run("mosaic_gpu"), run("xla")
        as_float = lambda x: np.asarray(x.addressable_data(0), np.float32)  # all devices have it
        pairs = [(as_float(a), as_float(b)) for a, b in zip(found, expected)]
        errors = [max_abs_error(a, b) for a, b in pairs]
        same = all(np.array_equal(as_float(a), as_float(b)) for a, b in zip(found, again))
        tolerances = [float(4 * jnp.finfo(dtype).eps * np.abs(pairs[0][1]).max()), 1e-4]
        passed = same and all(error <= tolerance for error, tolerance in zip(errors, tolerances))
        labels |= dict(num_heads=heads)
        yield labels | size | dict(errors=errors, tolerances=tolerances, same_bits_again=same, passed=passed)


def _key(row: dict) -> str:
    """Returns the fields that tell local checks apart, or those of SparQ."""
    local = ("num_queries", "num_heads", "num_kv_heads", "head_dim", "num_keys", "dtype", "options_name")
    sparq = ("n_devices", "num_queries", "selection", "dtype", "num_keys", "head_dim", "lengths", "k", "group")
    names = {"local": local, "sparq": (*sparq, "reallocate")}.get(row["what"], ())
    row = dict(group=1, num_queries=1, reallocate=True) | row  # the oldest rows lack these fields
    return json.dumps([row["what"], row.get("implementation"), *(row.get(name) for name in names)])


if __name__ == "__main__":
    sys.exit(main())
