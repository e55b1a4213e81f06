"""Checks every backend, reduction and ring against the float64 oracle on this machine's GPUs.

    python3 scripts/gpu_check.py --devices 1,2,8 --out docs/results/gpu_check.jsonl                # one process
    python3 scripts/gpu_check.py --devices 1,2,8 --out ... --process-per-device                    # one per GPU

Every check runs twice and must give the same bits, on every device; cuDNN's own kernels do not promise that, so of
them it is recorded only. One JSON row per check; a backend that cannot do a case is recorded with its reason. Exits
with 1 if any check failed. Without a GPU it runs on emulated CPU devices (checks the script).
"""

import argparse
import functools
import itertools
import json
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np

COORDINATOR_TIMEOUT_S = 120


def main() -> int:
    """Runs the checks in this process, or starts one process per device that do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="1", help="device counts to check, e.g. 1,2,8")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="JSONL file, appended to")
    parser.add_argument(
        "--how",
        help="only a local backend, e.g. mosaic_gpu; or prefix, sparq or activations; or ways of tree_decode with this "
        "in their name, e.g. fused (default: all)",
    )
    parser.add_argument("--go-on", action="store_true", help="leave out local and sparq checks that --out has")
    parser.add_argument("--process-per-device", action="store_true", help="one process per device (jax.distributed)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # coordinator,count,rank
    args = parser.parse_args()
    if args.go_on and args.process_per_device:
        parser.error("--go-on: processes that read --out while one writes it would leave out different checks")
    if args.go_on and args.out.exists():
        _DONE.update(_key(json.loads(line)) for line in args.out.read_text().splitlines())
    counts = [int(count) for count in args.devices.split(",")]
    if args.process_per_device:
        command = [
            sys.executable,
            __file__,
            "--out",
            str(args.out),
            *(["--how", args.how] if args.how else []),
            "--devices",
        ]
        return max(spawn([*command, str(count)], count) for count in counts)
    if args.worker:
        join(args.worker)
        return run_checks(*counts, args.out, args.how)
    import jax

    if not _has_gpu():
        jax.config.update("jax_num_cpu_devices", max(counts))
    return max(run_checks(count, args.out, args.how) for count in counts)


def run_checks(num_devices: int, out: pathlib.Path, how: str | None) -> int:
    """Runs every check over `num_devices` devices, or those of `how`, and returns the exit status."""
    import jax

    from tree_attn.local import IMPLEMENTATIONS

    rows = []
    if how is None:
        local = (local_checks(sorted(IMPLEMENTATIONS)), prefix_checks()) if num_devices == 1 else ()
        checks = itertools.chain(
            *local,
            decode_checks(num_devices),
            prefill_checks(num_devices),
            activation_checks(num_devices),
            sparq_checks(num_devices),
        )
    elif how == "prefix":
        checks = prefix_checks()
    elif how in ("sparq", "activations"):
        checks = {"sparq": sparq_checks, "activations": activation_checks}[how](num_devices)
    elif how in IMPLEMENTATIONS:
        checks = local_checks([how])
    else:
        checks = decode_checks(num_devices, how)
    for row in checks:
        rows.append(row | environment(num_devices))
        if jax.process_index() == 0:
            out.parent.mkdir(parents=True, exist_ok=True)
            with out.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    failed = [row for row in rows if row["passed"] is False]
    if jax.process_index() == 0:
        ran = sum(row["passed"] is not None for row in rows)
        print(
            f"{num_devices} devices, {jax.process_count()} processes: {ran} checks ran, {len(failed)} failed, "
            f"{len(rows) - ran} not supported"
        )
        for row in failed:
            print("FAILED", json.dumps(row))
    return int(bool(failed))


def local_checks(implementations):
    """Local backends on one device, every option."""
    from tree_attn.local import attend

    for implementation, (name, options), dtype in itertools.product(
        implementations, OPTIONS.items(), ("bfloat16", "float16", "float32")
    ):
        for shape in (
            SHAPES + SHORT_SHAPES + (LEAN_SHAPES if implementation == "mosaic_gpu" and dtype != "float32" else ())
        ):
            case = Case(dtype=dtype, options=options, **shape)
            call = functools.partial(attend, implementation=implementation)
            labels = dict(what="local", implementation=implementation, options_name=name)
            if _key(labels | case.shape) not in _DONE:
                yield case.check(call, **labels)


def prefix_checks():
    """bifurcated_decode on one device: what all sequences share, read as columns and as rows, and what each has."""
    from tree_attn import bifurcated_decode

    def call(query, key, value, *, key_value_seq_lengths, shared, **how):
        own = dict(key_value_seq_lengths=key_value_seq_lengths - shared)
        parts = key[0, :shared], value[0, :shared], key[:, shared:], value[:, shared:]
        return bifurcated_decode(query, *parts, **own, **how)

    for shape, dtype in itertools.product(PREFIX_SHAPES, ("bfloat16", "float16")):
        shared, own = shape["shared"], np.arange(shape["batch"]) * 7 % (shape["num_keys"] - shape["shared"] + 1)
        options = dict(key_value_seq_lengths=(shared + np.maximum(own, shape["num_queries"])).astype(np.int32))
        options |= dict(is_causal=True) if shape["num_queries"] > 1 else {}
        case = Case(dtype=dtype, options=options, **shape)
        labels = dict(what="prefix", implementation="mosaic_gpu", shared=shared)
        yield case.check(functools.partial(call, shared=shared, implementation="mosaic_gpu"), **labels)


def decode_checks(num_devices: int, asked: str | None = None):
    """tree_decode under every reduction, ring_decode in both variants, in every placement; or the ways of one name."""
    from tree_attn import make_mesh, tree_decode
    from tree_attn.ring_baseline import ring_decode

    flat = dict(mesh=make_mesh({"seq": num_devices}), axis_name="seq")
    ways = [("tree", r, functools.partial(tree_decode, reduction=r, **flat)) for r in ("allreduce", "gather", "fused")]
    ways += [("ring", v, functools.partial(ring_decode, variant=v, **flat)) for v in ("overlapped", "public")]
    if num_devices % 2 == 0 and num_devices > 2:
        two = dict(mesh=make_mesh({"device": num_devices // 2, "node": 2}), axis_name=("device", "node"))
        for how in ("hierarchical", "fused", ("fused", "gather")):
            ways.append(("tree", f"{how} over two axes", functools.partial(tree_decode, reduction=how, **two)))
    ways = [way for way in ways if asked is None or asked in way[1]]
    # Shapes and placements take turns over the options; their full product would take longer to compile than a lease.
    turns = list(zip(OPTIONS, itertools.cycle(SHAPES), itertools.cycle((None, 1, None, 16))))
    for (what, how, call), implementation, (name, shape, block_size) in itertools.product(
        ways, ("xla", "cudnn", "mosaic_gpu", "flash_attn"), turns
    ):
        case = Case(dtype="bfloat16", options=OPTIONS[name], num_shards=num_devices, block_size=block_size, **shape)
        labels = dict(what=what, how=how, implementation=implementation, options_name=name)
        yield case.check(functools.partial(call, implementation=implementation), **labels)
    for (what, how, call), shape, name in itertools.product(ways, EXCHANGED_SHAPES, ("plain", "causal")):
        if how == "fused":
            case = Case(dtype="bfloat16", options=OPTIONS[name], num_shards=num_devices, **shape)
            labels = dict(what=what, how=how, implementation="mosaic_gpu", options_name=name)
            yield case.check(functools.partial(call, implementation="mosaic_gpu"), **labels)


def prefill_checks(num_devices: int):
    """ring_attention, striped and contiguous, causal, with lengths and windows."""
    from tree_attn import make_mesh
    from tree_attn.ring_baseline import ring_attention

    mesh = make_mesh({"seq": num_devices})
    for block_size, name in itertools.product((1, None), ("plain", "lengths", "window")):
        options = dict(OPTIONS[name], is_causal=True)
        shape = dict(SHAPES[1], num_queries=1920, num_keys=1920)
        case = Case(dtype="bfloat16", options=options, num_shards=num_devices, block_size=block_size, **shape)
        call = functools.partial(ring_attention, mesh=mesh, axis_name="seq", implementation="xla")
        yield case.check(call, what="ring_attention", implementation="xla", options_name=name, prefill=True)


def activation_checks(num_devices: int):
    """Sums and gathers of a decoding step's few numbers, thirty in a row, each of other numbers than the one before."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    from tree_attn import make_mesh
    from tree_attn.reduce.activations import gather_activations, sum_activations

    mesh, steps = make_mesh({"seq": num_devices}), 30
    ways = {"sum": sum_activations, "gather": gather_activations}
    for (name, way), dtype, size in itertools.product(ways.items(), ("float32", "bfloat16"), (1, 100, 4096, 8192)):
        given = np.random.default_rng(0).normal(size=(num_devices, size)).astype(np.float32).astype(jnp.dtype(dtype))

        def of_shard(x, way=way):
            step = lambda _, i: (None, way(x[0] * 2.0 ** -i.astype(x.dtype), ("seq",), mesh))
            return jax.lax.scan(step, None, jnp.arange(steps))[1]

        program = jax.jit(jax.shard_map(of_shard, mesh=mesh, in_specs=P("seq"), out_specs=P(), check_vma=False))
        x = jax.make_array_from_callback(
            given.shape, jax.NamedSharding(mesh, P("seq")), lambda index, given=given: given[index]
        )
        result = program(x)
        found = np.asarray(result.addressable_data(0), np.float64)
        scaled = given.astype(np.float64) * 2.0 ** -np.arange(steps)[:, None, None]
        exact = scaled if name == "gather" else scaled.sum(axis=1)
        # n - 1 additions in float32, each off by half a unit at the most, and what rounding to another dtype loses.
        rounded = 0.0 if dtype == "float32" else float(jnp.finfo(dtype).eps) / 2
        allowed = (num_devices - 1) * float(jnp.finfo("float32").eps) / 2 + rounded if name == "sum" else 0.0
        size_of = scaled if name == "gather" else np.abs(scaled).sum(axis=1)
        error = np.abs(found - exact) / np.maximum(np.abs(size_of), 1e-30)
        row = dict(what="activations", how=name, dtype=dtype, elements=size, max_relative_error=float(error.max()))
        row |= dict(by_kernel="fused_" in program.lower(x).as_text(), same_bits_everywhere=is_same_everywhere(result))
        passed = error.max() <= allowed and row["same_bits_everywhere"]
        passed = passed and (row["by_kernel"] or not _has_gpu() or num_devices == 1)
        yield row | dict(tolerance=allowed, passed=bool(passed))


def sparq_checks(num_devices: int):
    """SparQ by its kernels against the same in XLA, which tests hold against Algorithm 1: in chunks, in shards."""
    import jax
    import jax.numpy as jnp

    from tree_attn import make_mesh, sparq_decode
    from tree_attn.tolerances import max_abs_error

    where = {} if num_devices == 1 else dict(mesh=make_mesh({"seq": num_devices}), axis_name="seq")
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
        if _key(labels | size | dict(n_devices=num_devices)) in _DONE:
            continue
        heads, lengths = 8, np.array(size["lengths"], np.int32)
        key_shape = (len(lengths), size["num_keys"], heads // size["group"], size["head_dim"])
        query, key, value = _inputs(dtype, (len(lengths), size["num_queries"], heads, size["head_dim"]), key_shape)
        call = functools.partial(
            sparq_decode, num_components=32, num_keys=size["k"], local_window=16, selection=selection,
            key_value_seq_lengths=lengths, is_causal=True, reallocate=size["reallocate"], return_lse=True, **where,
        )  # fmt: skip

        def run(implementation, call=call, given=(query, key, value)):
            by_component = np.ascontiguousarray(np.moveaxis(given[1], 1, 3))
            step = lambda q, k, v, c: call(q, k, v, key_by_component=c, implementation=implementation)
            return jax.jit(step)(*given, by_component)

        found, again, expected = run("mosaic_gpu"), run("mosaic_gpu"), run("xla")
        as_float = lambda x: np.asarray(x.addressable_data(0), np.float32)  # all devices have it
        pairs = [(as_float(a), as_float(b)) for a, b in zip(found, expected)]
        errors = [max_abs_error(a, b) for a, b in pairs]
        same = all(np.array_equal(as_float(a), as_float(b)) for a, b in zip(found, again))
        tolerances = [float(4 * jnp.finfo(dtype).eps * np.abs(pairs[0][1]).max()), 1e-4]
        passed = same and all(error <= tolerance for error, tolerance in zip(errors, tolerances))
        labels |= dict(num_heads=heads)
        yield labels | size | dict(errors=errors, tolerances=tolerances, same_bits_again=same, passed=passed)


# Lengths end in the first shard, nowhere in particular, and at 0; sizes divide nothing but the placement needs.
OPTIONS = {
    "plain": {},
    "lengths": dict(key_value_seq_lengths=np.array([1861, 100, 0], np.int32)),
    "causal": dict(is_causal=True, key_value_seq_lengths=np.array([1861, 100, 1], np.int32)),
    "window": dict(local_window_size=(300, 0), key_value_seq_lengths=np.array([1861, 1100, 30], np.int32)),
    "soft_cap": dict(logits_soft_cap=5.0),
    "sinks": dict(sinks="per head", key_value_seq_lengths=np.array([1861, 100, 0], np.int32)),
    "huge_logits": dict(scale=1e3),
}
SHAPES = (
    dict(num_queries=1, num_heads=16, num_kv_heads=16, head_dim=128, num_keys=1920),
    dict(num_queries=1, num_heads=8, num_kv_heads=2, head_dim=64, num_keys=1920),
    dict(num_queries=5, num_heads=8, num_kv_heads=1, head_dim=128, num_keys=1920),
)
SHORT_SHAPES = (  # sequences of a tile, and of two that no run cuts
    dict(num_queries=1, num_heads=8, num_kv_heads=8, head_dim=128, num_keys=40),
    dict(num_queries=3, num_heads=8, num_kv_heads=2, head_dim=64, num_keys=64),
    dict(num_queries=1, num_heads=8, num_kv_heads=8, head_dim=128, num_keys=104),
)
# What only the Hopper kernels treat apart: padded head dims, several blocks of query columns, columns that are rows.
LEAN_SHAPES = (
    dict(num_queries=1, num_heads=6, num_kv_heads=2, head_dim=80, num_keys=1920),
    dict(num_queries=2, num_heads=4, num_kv_heads=4, head_dim=96, num_keys=1920),
    dict(num_queries=1, num_heads=4, num_kv_heads=2, head_dim=256, num_keys=1920),
    dict(num_queries=8, num_heads=16, num_kv_heads=1, head_dim=128, num_keys=1920),
    dict(num_queries=40, num_heads=8, num_kv_heads=2, head_dim=64, num_keys=1920),
    dict(num_queries=200, num_heads=6, num_kv_heads=3, head_dim=128, num_keys=1920),
    dict(num_queries=9, num_heads=2, num_kv_heads=2, head_dim=256, num_keys=1920),
)
# Sequences that share their first keys: as columns, as rows of one and of several heads, and of two blocks; numbers
# that eight does not divide, and groups whose heads do not share a tile.
PREFIX_SHAPES = tuple(
    dict(zip(("batch", "num_queries", "num_heads", "num_kv_heads", "head_dim", "shared", "num_keys"), sizes))
    for sizes in (
        (16, 1, 2, 2, 128, 1000, 1072),
        (13, 1, 3, 3, 80, 1000, 1072),
        (12, 2, 2, 2, 64, 1000, 1104),
        (40, 1, 2, 2, 128, 1000, 1072),
        (16, 1, 8, 2, 128, 1000, 1072),
        (70, 2, 16, 2, 64, 400, 504),
        (20, 1, 6, 2, 128, 1000, 1072),
        (33, 1, 4, 1, 256, 400, 472),
        (64, 1, 4, 4, 128, 96, 168),
    )
)
# What only an exchange at the end of the lean kernel treats apart: many partials a row, padded head dims, many columns,
# keys and values that are widened.
EXCHANGED_SHAPES = (
    dict(num_queries=1, num_heads=8, num_kv_heads=1, head_dim=128, num_keys=36_864),
    dict(num_queries=2, num_heads=8, num_kv_heads=1, head_dim=128, num_keys=3840),
    dict(num_queries=1, num_heads=6, num_kv_heads=2, head_dim=80, num_keys=3840),
    dict(num_queries=1, num_heads=4, num_kv_heads=2, head_dim=256, num_keys=3840),
    dict(num_queries=1, num_heads=8, num_kv_heads=2, head_dim=128, num_keys=3840, stored_dtype="float8_e4m3fn"),
)


class Case:
    """One set of inputs, its exact result, and the error that the policy allows (`tree_attn.tolerances`)."""

    def __init__(
        self, *, dtype, options, num_queries, num_heads, num_kv_heads, head_dim, num_keys, stored_dtype=None,
        num_shards=1, block_size=None, batch=3, shared=0,
    ):  # fmt: skip
        self.batch = batch
        self.query, self.key, self.value = _inputs(
            dtype, (batch, num_queries, num_heads, head_dim), (batch, num_keys, num_kv_heads, head_dim)
        )
        for x in (self.key, self.value):  # the first `shared` keys are the same for all
            x[:, :shared] = x[:1, :shared]
        self.stored_dtype = stored_dtype or dtype
        self.key, self.value = (x.astype(self.stored_dtype).astype(x.dtype) for x in (self.key, self.value))
        if "key_value_seq_lengths" in options:
            options = options | {"key_value_seq_lengths": np.minimum(options["key_value_seq_lengths"], num_keys)}
        sinks = {"sinks": np.linspace(-2, 2, num_heads, dtype=np.float32)} if "sinks" in options else {}
        self.options, self.dtype = options | sinks, dtype
        self.num_shards, self.block_size = num_shards, block_size
        self.shape = dict(
            batch=self.batch,
            num_queries=num_queries,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            num_keys=num_keys,
            dtype=dtype,
            stored_dtype=self.stored_dtype,
        )

    def check(self, call, *, prefill=False, **labels) -> dict:
        """Runs `call` and returns the row: errors and tolerances, or why it is not supported."""
        import jax

        from tree_attn import storage_order
        from tree_attn.tolerances import lse_tolerance, max_abs_error, out_tolerance

        row = labels | self.shape | dict(block_size=self.block_size)
        order = storage_order(self.key.shape[1], self.num_shards, self.block_size)
        query = self.query[:, order] if prefill else self.query
        is_local = labels["what"] == "local"
        extra = {} if is_local else dict(block_size=self.block_size, return_lse=True)
        try:
            run = jax.jit(functools.partial(call, **extra, **self.options))
            key, value = (x[:, order].astype(self.stored_dtype) for x in (self.key, self.value))
            (out, lse), again = (run(query, key, value) for _ in range(2))
        except NotImplementedError as error:
            return row | dict(passed=None, reason=str(error))
        expected_out, expected_lse, plain = self.expected(prefill)
        tolerance = out_tolerance(self.dtype, expected_out, plain)
        out, lse = local_part(out), local_part(lse)
        if prefill:
            positions = order[out[1]]
            expected_out, expected_lse = expected_out[:, positions], expected_lse[:, positions]
        row |= dict(
            max_abs_error=max_abs_error(out[0], expected_out),
            tolerance=tolerance,
            lse_max_abs_error=max_abs_error(lse[0], expected_lse),
            lse_tolerance=lse_tolerance(expected_lse),
            same_bits_again=all(np.array_equal(local_part(x)[0], y[0]) for x, y in zip(again, (out, lse))),
            same_bits_everywhere=all(is_same_everywhere(x) for x in again),
        )
        passed = row["max_abs_error"] <= row["tolerance"] and row["lse_max_abs_error"] <= row["lse_tolerance"]
        passed = passed and row["same_bits_everywhere"]
        passed = passed and (row["same_bits_again"] or labels["implementation"] == "cudnn")
        return row | dict(passed=bool(passed))

    def expected(self, prefill):
        """The oracle's result, and that of a plain implementation in the same dtype (restricted to what it can do)."""
        key = (
            self.dtype,
            self.stored_dtype,
            prefill,
            json.dumps({k: np.asarray(v).tolist() for k, v in self.options.items()}),
            self.query.shape,
            self.key.shape,
        )
        if key not in _EXPECTED:
            from tree_attn import reference

            options = dict(self.options)
            if prefill:
                options["query_positions"] = np.arange(self.query.shape[1])
            _EXPECTED[key] = (*reference.attention(self.query, self.key, self.value, **options), self._plain(options))
        return _EXPECTED[key]

    def _plain(self, options):
        import jax.numpy as jnp

        from tree_attn.arguments import AttentionOptions
        from tree_attn.masking import visibility
        from tree_attn.placement import Shard
        from tree_attn.tolerances import plain_attention

        if "sinks" in options or "logits_soft_cap" in options:
            options = {k: v for k, v in options.items() if k == "key_value_seq_lengths"}
        scale = options.get("scale")
        visible = visibility(
            AttentionOptions(**options),
            batch=self.batch,
            num_queries=self.query.shape[1],
            num_slots=self.key.shape[1],
            shard=Shard(),
        ).mask()[:, None]
        return np.asarray(plain_attention(*map(jnp.asarray, (self.query, self.key, self.value)), visible, scale))


_EXPECTED: dict = {}
_DONE: set = set()  # of what is left out


def _key(row: dict) -> str:
    """What tells local checks, or sparq's, apart."""
    local = ("num_queries", "num_heads", "num_kv_heads", "head_dim", "num_keys", "dtype", "options_name")
    sparq = (
        "n_devices",
        "num_queries",
        "selection",
        "dtype",
        "num_keys",
        "head_dim",
        "lengths",
        "k",
        "group",
        "reallocate",
    )
    names = {"local": local, "sparq": sparq}.get(row["what"], ())
    row = dict(group=1, num_queries=1, reallocate=True) | row  # older rows do not say so
    return json.dumps([row["what"], row.get("implementation"), *(row.get(name) for name in names)])


@functools.cache
def _inputs(dtype: str, query_shape: tuple, key_shape: tuple) -> tuple:
    """Random query, key and value on the host, rounded to `dtype`."""
    import jax.numpy as jnp

    rng = np.random.default_rng(0)
    draw = lambda shape: rng.normal(size=shape).astype(np.float32).astype(jnp.dtype(dtype))
    return draw(query_shape), draw(key_shape), draw(key_shape)


def local_part(x):
    """Returns this process's part of `x` along axis 1 and which indices it is (everything, where it is replicated)."""
    shards = {}
    for shard in x.addressable_shards:
        shards[shard.index[1].start or 0] = np.asarray(shard.data)
    data = np.concatenate([shards[start] for start in sorted(shards)], axis=1)
    indices = np.concatenate([start + np.arange(shards[start].shape[1]) for start in sorted(shards)])
    return data, indices


def is_same_everywhere(x) -> bool:
    """Whether this process's devices hold the same bits where they hold the same part of `x`."""
    shards: dict = {}
    for shard in x.addressable_shards:
        shards.setdefault(str(shard.index), []).append(np.asarray(shard.data))
    return all(np.array_equal(copies[0], copy) for copies in shards.values() for copy in copies)


@functools.cache
def environment(num_devices: int) -> dict:
    """Hardware, versions, commit and command of a row."""
    import jax

    from tree_attn.measure import provenance

    return dict(
        n_devices=num_devices,
        n_processes=jax.process_count(),
        hardware=provenance.hardware(jax.devices()),
        jax_version=jax.__version__,
        git_commit=provenance.git_commit(),
        command=" ".join(["python3", *sys.argv]),
    )


def _has_gpu() -> bool:
    return pathlib.Path("/dev/nvidia0").exists()


def spawn(command: list[str], count: int) -> int:
    """Runs `command` in one process per device, each with the option `--worker`; returns the worst exit status."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    workers = []
    for rank in range(count):
        env = os.environ | ({"CUDA_VISIBLE_DEVICES": str(rank)} if _has_gpu() else {})
        workers.append(subprocess.Popen([*command, "--worker", f"127.0.0.1:{port},{count},{rank}"], env=env))
    return max(worker.wait() for worker in workers)


def join(worker: str) -> None:
    """Connects a process that `spawn` has started."""
    import jax

    coordinator, count, rank = worker.split(",")
    if not _has_gpu():
        jax.config.update("jax_num_cpu_devices", 1)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, int(count), int(rank), initialization_timeout=COORDINATOR_TIMEOUT_S)


if __name__ == "__main__":
    sys.exit(main())
