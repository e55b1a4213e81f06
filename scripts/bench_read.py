"""Times reading alone on one GPU: how near the datasheet's rate a kernel comes that does nothing else.

    python3 scripts/bench_read.py --out FILE.jsonl
    python3 scripts/bench_read.py --megabytes 82,1468 --out FILE.jsonl
    python3 scripts/bench_read.py --markdown --out docs/results/sweep_h200/read.jsonl     # docs/results.md's table

The kernel copies an array to shared memory by TMA, as the lean kernel copies K and V, and multiplies nothing. Each step
of a chain waits for the one before, and reads another array than the L2 cache holds. The sizes are those of the steps
of `bench_sweep.py --table`. What an attention kernel takes beyond such a read is its own; what the read takes beyond
the datasheet's limit no kernel saves.

Layouts are CTAs of an SM, KiB of a tile and tiles in flight. CTAs read tiles by turns, or a run of neighbours each.
"""

import argparse
import functools
import itertools
import pathlib
import sys

from benching import MissingRows

from tree_attn.measure.steps.step import READ_GB_PER_S, ROTATE_BYTES

LABELS = ("megabytes", "layout", "order")
MEGABYTES = (41, 82, 134, 268, 537, 819, 1074, 1468, 3078)
LAYOUTS = ((1, 32, 4), (2, 32, 2), (2, 32, 3), (1, 64, 2), (1, 64, 3), (4, 16, 3))
ORDERS = ("turns", "runs")
WIDTH = 128  # elements of a row


def main() -> int:
    """Times each size in each layout, and prints the fastest of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=_numbers, default=MEGABYTES, help="10^6 bytes of each read: 82,1468")
    parser.add_argument("--iters", type=int, default=32, help="samples of each chain")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="JSONL file, appended to")
    parser.add_argument("--markdown", action="store_true", help="print the table of the file's rows, and time nothing")
    args = parser.parse_args()
    if args.markdown:
        if not args.out.exists():
            parser.error(f"--markdown: there is no file {args.out}")
        print(summary(args.out))
        return 0
    from tree_attn.devices import default_platform

    if default_platform() != "gpu":
        parser.error(f"a GPU is needed, JAX has {default_platform()!r} devices")
    missing = MissingRows(args.out, LABELS)
    for megabytes, layout, order in itertools.product(args.megabytes, LAYOUTS, ORDERS):
        labels = {"megabytes": megabytes, "layout": list(layout), "order": order}
        limit_us = 1e3 * megabytes / READ_GB_PER_S
        missing.add(
            labels | {"limit_us": limit_us, "way": "read"},
            functools.partial(measure, megabytes, layout, order, args.iters),
        )
    print(summary(args.out))
    return 0


def _numbers(text: str) -> tuple[int, ...]:
    """Returns positive whole numbers from "82,1468"."""
    words = text.split(",")
    if not all(word.isdecimal() and int(word) for word in words):
        raise argparse.ArgumentTypeError(f"must be positive whole numbers, as 82,1468, got {text}")
    return tuple(map(int, words))


def summary(path: pathlib.Path) -> str:
    """Returns a line for each size: the fastest layout, its chain time, and its share of the datasheet's rate."""
    from tree_attn.measure.rows import read

    rows = [row for row in read(path) if row.get("chain_us_median")]
    lines = ["| MB | limit, us | read, us | share | layout |", "|---|---|---|---|---|"]
    for megabytes in sorted({row["megabytes"] for row in rows}):
        best = min((row for row in rows if row["megabytes"] == megabytes), key=lambda row: row["chain_us_median"])
        us, layout = best["chain_us_median"], f"{tuple(best['layout'])}, {best['order']}"
        lines.append(f"| {megabytes:,} | {best['limit_us']:.1f} | {us:.1f} | {best['limit_us'] / us:.1%} | {layout} |")
    return "\n".join(lines)


def measure(megabytes: int, layout: tuple[int, int, int], order: str, n_iters: int) -> dict:
    """Returns a row's fields of one size in one layout."""
    from tree_attn.kernels.tuning import num_sms
    from tree_attn.measure.steps.chains import normals, time_steps

    ctas_per_sm, kib, stages = layout
    num_ctas, rows = ctas_per_sm * num_sms(), kib * 1024 // (2 * WIDTH)
    tiles = round(megabytes * 1e6 / (1024 * kib))
    draw = normals()
    copies = max(2, -int(-ROTATE_BYTES // (1e6 * megabytes)))
    arrays = [(draw(tiles * rows, WIDTH),) for _ in range(copies)]
    step = functools.partial(read_all, num_ctas=num_ctas, rows=rows, stages=stages, order=order)
    return time_steps(step, draw(128), arrays, n_iters)


def read_all(token, array, *, num_ctas: int, rows: int, stages: int, order: str):
    """Reads `array`, `rows` of it at a time, and returns `token`, so that the next read can wait for this one.

    Args:
      token: bfloat16 `[128]`.
      array: bfloat16 `[tiles * rows, 128]`.
      order: one of ORDERS.
    """
    import jax

    from tree_attn.kernels.registers import launch

    kernel = launch(
        functools.partial(_read_tiles, array.shape[0] // rows, num_ctas, rows, stages, order),
        out_type=jax.ShapeDtypeStruct(token.shape, token.dtype),
        grid=(num_ctas,),
        grid_names=("cta",),
        num_threads=1,
        thread_name="warpgroup",
        scratch_bytes=0,
        name="read_all",
    )
    return kernel(token, array)


def tiles_of(cta, tiles: int, num_ctas: int, order: str):
    """Returns a CTA's first tile, the distance to its next, and how many it has."""
    from tree_attn.kernels.schedule import quotient

    if order == "turns":
        return cta, num_ctas, quotient(tiles - cta + num_ctas - 1, num_ctas)
    first = quotient(cta * tiles, num_ctas)
    return first, 1, quotient((cta + 1) * tiles, num_ctas) - first


def _read_tiles(tiles: int, num_ctas: int, rows: int, stages: int, order: str, token_ref, array_ref, out_ref):
    from jax import lax
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    cta = lax.axis_index("cta")
    first, stride, count = tiles_of(cta, tiles, num_ctas, order)

    def scoped(tile_smem, token_smem, full, token_full):
        def begin(i):
            place = lax.rem(i, stages)
            start = pl.multiple_of((first + i * stride) * rows, rows)
            plgpu.copy_gmem_to_smem(array_ref.at[pl.ds(start, rows)], tile_smem.at[place], full.at[place])

        def step(i, _):
            plgpu.barrier_wait(full.at[lax.rem(i, stages)])
            pl.when(i + stages < count)(lambda: begin(i + stages))

        lax.fori_loop(0, lax.min(count, stages), lambda i, _: begin(i), None)
        lax.fori_loop(0, count, step, None)

        @pl.when(cta == 0)
        def _():
            plgpu.copy_gmem_to_smem(token_ref, token_smem, token_full)
            plgpu.barrier_wait(token_full)
            plgpu.copy_smem_to_gmem(token_smem, out_ref)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    pl.run_scoped(
        scoped,
        tile_smem=plgpu.SMEM((stages, rows, WIDTH), array_ref.dtype),
        token_smem=plgpu.SMEM(token_ref.shape, token_ref.dtype),
        full=plgpu.Barrier(num_barriers=stages),
        token_full=plgpu.Barrier(),
        collective_axes="warpgroup",
    )


if __name__ == "__main__":
    sys.exit(main())
