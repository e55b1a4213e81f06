"""Checks of `gpu_check.py` with keys and values in float8, whose products the lean kernel makes in registers."""

import functools
import itertools
from collections.abc import Iterator

import numpy as np
from garbage_checks import packed, paged
from oracle_case import LEAN_SHAPES, OPTIONS, SHAPES, SHORT_SHAPES, OracleCase

MAX_QUERIES = 8  # more are the many-query kernel's, which takes one dtype
# Groups of many heads, query columns in one block and in two, and queries that are read in place.
SHAPES_OF_COLUMNS = tuple(
    dict(zip(("num_queries", "num_heads", "num_kv_heads", "head_dim", "num_keys"), sizes))
    for sizes in (
        (1, 32, 2, 128, 1920),
        (6, 8, 2, 128, 1920),
        (8, 8, 2, 64, 1920),
        (2, 16, 1, 256, 1920),
        (1, 32, 8, 128, 16_384),
    )
)


def float8_checks() -> Iterator[dict]:
    """Checks float8 on one device. Shapes and ways take turns over options and dtypes of the query."""
    from tree_attn.local import attend

    def padded(query, key, value, *, return_lse, **options):
        return attend(query, key, value, **options)

    shapes = [x for x in SHAPES + SHORT_SHAPES + LEAN_SHAPES if x["num_queries"] <= MAX_QUERIES]
    dtypes = itertools.cycle(("bfloat16", "float16", "bfloat16"))
    ragged = [name for name, options in OPTIONS.items() if "key_value_seq_lengths" in options]
    ways = [("padded", padded, list(OPTIONS), 2), ("packed", packed, ragged, 1), ("paged", paged, ragged, 1)]
    for i, shape in enumerate([*shapes, *SHAPES_OF_COLUMNS]):
        for way, call, names, count in ways:
            if way == "paged" and shape["num_keys"] % 64:
                continue
            for name in (names[(count * i + j) % len(names)] for j in range(count)):
                case = OracleCase(dtype=next(dtypes), options=OPTIONS[name], stored_dtype="float8_e4m3fn", **shape)
                yield case.check(
                    functools.partial(_scaled, call, shape["num_kv_heads"] if i % 2 else None),
                    what="float8", how=way, implementation="mosaic_gpu", options_name=name, scaled=bool(i % 2),
                )  # fmt: skip


def _scaled(call, num_kv_heads: int | None, query, key, value, *, block_size=None, **options):
    """Returns `(out, lse)` of `call`; with a number of KV heads, by scales of each that undo one another."""
    options["implementation"] = "mosaic_gpu"
    if num_kv_heads is None:
        return call(query, key, value, **options)
    # Powers of two: the query, and the results, are divided by them exactly.
    scales = np.exp2(np.arange(num_kv_heads) % 3 - 1).astype(np.float32)
    by_head = np.repeat(scales, query.shape[2] // num_kv_heads)[:, None]
    query = (query / by_head).astype(query.dtype)
    out, lse = call(query, key, value, key_scale=scales, value_scale=scales, **options)
    return (out / by_head).astype(out.dtype), lse
