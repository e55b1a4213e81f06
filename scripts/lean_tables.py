"""Table of the rows of `bench_lean.py`."""

import pathlib

from tree_attn.measure.rows import read
from tree_attn.measure.steps.step import READ_GB_PER_S

KEYS = ("figure", "batch", "max_keys", "sum_keys", "num_heads", "num_kv_heads", "head_dim", "implementation")


def markdown(path: pathlib.Path) -> int:
    """Prints device times, one line per case, in microseconds, and the share that mosaic_gpu reaches of the limit."""
    rows = read(path)
    names = {"mosaic_gpu": "mosaic_gpu", "cudnn": "cuDNN", "flashinfer": "FlashInfer"}
    print(f"| step | heads | {' | '.join(names.values())} | limit | share | commit |")
    print("|---|---|" + "---|" * (len(names) + 3))
    cases = {_key(row)[:-1]: row for row in rows}
    for key, row in cases.items():
        times = {r["implementation"]: r["device_us_median"] for r in rows if _key(r)[:-1] == key}
        step = f"{row['batch']} x {row['max_keys']:,}"
        step = f"{row['batch']} ragged, longest {row['max_keys']:,}" if row["is_ragged"] else step
        cells = " | ".join(f"{times[name]:.1f}" if name in times else "" for name in names)
        heads = f"{row['num_heads']}/{row['num_kv_heads']}"
        limit = _limit_us(row)
        share = f"{limit / times['mosaic_gpu']:.0%}" if "mosaic_gpu" in times else ""
        print(f"| {step} | {heads} | {cells} | {limit:.1f} | {share} | {row['git_commit']} |")
    return 0


def _limit_us(row: dict) -> float:
    """Returns the time to read the row's keys and values once, at the datasheet's rate."""
    return row["key_value_bytes"] / READ_GB_PER_S / 1e3


def _key(row: dict) -> tuple:
    return tuple(row[name] for name in KEYS)
