"""Runs many consecutive fused exchanges while ranks are held up at random, and checks every result on every rank.

    python3 scripts/soak_fused.py --devices 2,4 --steps 10000 --out docs/results/soak_fused.jsonl       # one process
    python3 scripts/soak_fused.py --devices 2,4 --steps 10000 --out ... --process-per-device            # one per GPU

Each step exchanges two independent states of different size, and the partial states of an attention at the end of its
kernel. A quarter of the steps leave out the second state. Before each exchange a rank waits, with probability 1/4, for
up to 40 us. `wrong` counts the elements whose distance from the merge of all ranks' states is more than float32 allows,
or bfloat16 for the attention.
"""

import argparse
import functools
import json
import pathlib
import sys
import time

import numpy as np
from process_per_device import environment, join, spawn, writable

SHAPES = ((1, 1, 16, 128), (3, 5, 8, 64))
MAX_DELAY_NS = 40_000
TOLERANCE = 1e-4  # of sums of a few float32 terms near 1, by the hardware's exponential
ATTENDED = (1, 4096, 2, 128)  # keys of a rank: 32 KV tiles, two to a run, so 32 partial states of an output tile
# For means of values up to 9, rounded to bfloat16, and for lse; values of another step or rank would be off by more.
ATTENDED_TOLERANCE = 0.05


def main() -> int:
    """Runs the steps in this process, or starts one process per device that do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="2", help="device counts, e.g. 2,4")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="JSONL file, appended to")
    parser.add_argument("--process-per-device", action="store_true", help="one process per device (jax.distributed)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # coordinator,count,rank
    args = parser.parse_args()
    if args.process_per_device:
        command = [sys.executable, __file__, "--steps", str(args.steps), "--out", str(args.out)]
        counts = [int(count) for count in args.devices.split(",")]
        return max(spawn([*command, "--devices", str(count)], count) for count in counts)
    if args.worker:
        join(args.worker)
    return max(soak(int(count), args.steps, args.out) for count in args.devices.split(","))


def soak(num_devices: int, steps: int, out: pathlib.Path) -> int:
    """Runs the steps and writes a row; returns 1 if anything was wrong."""
    import jax
    from jax.sharding import PartitionSpec as P

    from tree_attn import make_mesh
    from tree_attn.measure.rows import MeasuredRows

    mesh = make_mesh({"seq": num_devices})
    on_device = functools.partial(_steps, mesh=mesh, steps=min(steps, 1000))
    program = jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
    ends_attention = "lean_exchange" in program.lower(np.int32(0)).as_text()  # else another kernel merged them
    rounds = -(-steps // 1000)
    wrong, worst, start = 0, np.zeros(2), None
    for i in range(rounds):
        found, error = jax.block_until_ready(program(np.int32(i)))
        start = start or time.perf_counter()  # the first round compiles
        wrong, worst = wrong + int(local(found)), np.maximum(worst, local(error))
    row = {
        "what": "soak",
        "steps": rounds * min(steps, 1000),
        "shapes": SHAPES,
        "attended": ATTENDED,
        "wrong": wrong,
        "max_abs_error": float(worst[0]),
        "max_abs_error_attended": float(worst[1]),
        "us_per_step": (time.perf_counter() - start) / max(1, rounds - 1) / min(steps, 1000) * 1e6,
        "exchange_ends_attention": ends_attention,
        "passed": wrong == 0 and ends_attention,
    } | environment(num_devices)
    writer = MeasuredRows(out)
    if writer.is_writer:
        print(json.dumps(row))
        writer.append(writable(row))
    return int(not row["passed"])


def local(x):
    """Returns this process's copy of a value that all devices have."""
    return np.asarray(x.addressable_data(0))


def _steps(round_index, *, mesh, steps):
    """Runs `steps` steps on one device; returns the number of wrong elements on all, and the largest errors."""
    import jax
    import jax.numpy as jnp

    from tree_attn import attend
    from tree_attn.arguments import AttentionOptions
    from tree_attn.local import shard_attention
    from tree_attn.placement import Shard
    from tree_attn.reduce import reduce_state
    from tree_attn.state import SoftmaxState, merge_states

    rank = jax.lax.axis_index("seq")
    ranks = mesh.shape["seq"]

    def zero(chaos):
        delay = jnp.where(jax.random.bernoulli(chaos, 0.25), jax.random.randint(chaos, (), 0, MAX_DELAY_NS), 0)
        return _stall(delay)

    def compared(merged, expected, tolerance):
        distance = lambda a, b: jnp.ravel(jnp.where(a == b, 0, jnp.abs(a - b)))  # both may be -inf
        off = jnp.concatenate([distance(a, b) for a, b in zip(merged, expected, strict=True)])
        return jnp.sum(~(off <= tolerance), dtype=jnp.int32), jnp.max(off)

    def exchanged(key, shape, chaos):
        states = _states(key, ranks, shape)
        delayed = jax.tree.map(lambda x: x[rank] + zero(chaos), states)
        return compared(reduce_state(delayed, ("seq",), "fused", mesh), merge_states(states, axis=0), TOLERANCE)

    def attended(key, chaos):
        query, keys, values = _attention(key, ranks)
        delayed = query + zero(chaos).astype(query.dtype)
        options = AttentionOptions(implementation="mosaic_gpu")
        attention = shard_attention(delayed, keys[rank], values[rank], options, Shard())
        merged = jax.tree.map(lambda x: x.astype(jnp.float32), reduce_state(attention, ("seq",), "fused", mesh))
        of_rank = lambda k, v: SoftmaxState(*attend(query, k, v, implementation="xla"))
        states = jax.tree.map(lambda x: x.astype(jnp.float32), jax.vmap(of_rank)(keys, values))
        return compared(merged, merge_states(states, axis=0), ATTENDED_TOLERANCE)

    def step(carry, index):
        key = jax.random.fold_in(jax.random.key(round_index), index)
        chaos = jax.random.split(jax.random.fold_in(key, rank + 1), 3)
        first = exchanged(key, SHAPES[0], chaos[0])
        of_parts = attended(key, chaos[2])
        is_whole = jax.random.bernoulli(key, 0.75)  # the same on all ranks
        nothing = lambda: (jnp.int32(0), jnp.float32(0))
        second = jax.lax.cond(is_whole, lambda: exchanged(key, SHAPES[1], chaos[1]), nothing)
        wrong, worst, worst_of_parts = carry
        worst = jnp.maximum(worst, jnp.maximum(first[1], second[1]))
        return (wrong + first[0] + second[0] + of_parts[0], worst, jnp.maximum(worst_of_parts, of_parts[1])), None

    start = jnp.int32(0), jnp.float32(0), jnp.float32(0)
    (wrong, *worst), _ = jax.lax.scan(step, start, jnp.arange(steps))
    return jax.lax.psum(wrong, "seq"), jax.lax.pmax(jnp.stack(worst), "seq")


def _states(key, ranks, shape):
    """Returns every rank's state, `[ranks, *shape]`; one query is empty everywhere, one on all but rank 0."""
    import jax
    import jax.numpy as jnp

    from tree_attn.state import SoftmaxState

    of_out, of_lse = jax.random.split(key)
    lse = 3 * jax.random.normal(of_lse, (ranks, *shape[:-1]))
    lse = lse.at[..., 0].set(-jnp.inf).at[1:, ..., 1].set(-jnp.inf)
    out = jax.random.normal(of_out, (ranks, *shape))
    return SoftmaxState(jnp.where(jnp.isneginf(lse)[..., None], 0, out), lse)


def _attention(key, ranks):
    """Returns one step's query, and every rank's keys and values `[ranks, *ATTENDED]`, whose means differ by rank."""
    import jax
    import jax.numpy as jnp

    of_query, of_keys, of_values, of_means = jax.random.split(key, 4)
    query = jax.random.normal(of_query, (ATTENDED[0], 1, *ATTENDED[2:]), jnp.bfloat16)
    keys = jax.random.normal(of_keys, (ranks, *ATTENDED), jnp.bfloat16)
    means = jax.random.uniform(of_means, (ranks, 1, 1, ATTENDED[2], 1), maxval=8.0)
    return query, keys, (means + 0.1 * jax.random.normal(of_values, (ranks, *ATTENDED))).astype(jnp.bfloat16)


def _stall(nanoseconds):
    """Returns zero, float32, after so many nanoseconds on the device."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas import mosaic_gpu as plgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm, memref

    def body(nanoseconds_ref, zero_ref):
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 2)
        def emit(_, nanoseconds_ref, zero_ref):
            from jaxlib.mlir.dialects import arith

            index = arith.constant(ir.IndexType.get(), 0)
            wait = (
                "{ .reg .pred more; .reg .u64 start, now; .reg .u64 until; cvt.u64.u32 until, $1; "
                "mov.u64 start, %globaltimer; AGAIN: mov.u64 now, %globaltimer; sub.u64 now, now, start; "
                "setp.lt.u64 more, now, until; @more bra AGAIN; mov.u32 $0, 0; }"
            )
            i32 = ir.IntegerType.get_signless(32)
            done = llvm.inline_asm(i32, [memref.load(nanoseconds_ref, [index])], wait, "=r,r", has_side_effects=True)
            memref.store(arith.bitcast(ir.F32Type.get(), done), zero_ref, [index])

        emit(nanoseconds_ref, zero_ref)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((1,), jnp.float32),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="stall",
    )(nanoseconds.astype(jnp.int32)[None])[0]


if __name__ == "__main__":
    sys.exit(main())
