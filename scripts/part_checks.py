"""Checks of `gpu_check.py` where 8 does not divide the number of keys, and of small pages, on one device."""

import functools
import itertools
from collections.abc import Iterator

import numpy as np
from garbage_checks import packed, paged
from oracle_case import OPTIONS, OracleCase

FLOAT8 = {"stored_dtype": "float8_e4m3fn"}
ODD_SHAPES = (
    dict(num_queries=1, num_heads=8, num_kv_heads=2, head_dim=128, num_keys=1861),
    dict(num_queries=5, num_heads=8, num_kv_heads=1, head_dim=64, num_keys=1861),
    dict(num_queries=1, num_heads=4, num_kv_heads=2, head_dim=256, num_keys=1001),
    dict(num_queries=40, num_heads=8, num_kv_heads=2, head_dim=128, num_keys=1861),
    dict(num_queries=9, num_heads=8, num_kv_heads=2, head_dim=256, num_keys=1003),
    dict(num_queries=1, num_heads=8, num_kv_heads=2, head_dim=128, num_keys=1863, **FLOAT8),
    dict(num_queries=1, num_heads=6, num_kv_heads=2, head_dim=80, num_keys=1001, **FLOAT8),
    *(dict(num_queries=1, num_heads=8, num_kv_heads=8, head_dim=128, num_keys=keys) for keys in (1, 37, 101)),
    dict(num_queries=1, num_heads=32, num_kv_heads=8, head_dim=128, num_keys=700, batch=128),
    # An output tile for each of three CTAs of an SM.
    *(dict(num_queries=1, num_heads=16, num_kv_heads=8, head_dim=dim, num_keys=701, batch=36) for dim in (64, 128)),
)
PAGED_SHAPES = (
    dict(num_queries=1, num_heads=8, num_kv_heads=2, head_dim=128, num_keys=1920),
    dict(num_queries=5, num_heads=8, num_kv_heads=1, head_dim=64, num_keys=1920),
    dict(num_queries=40, num_heads=8, num_kv_heads=2, head_dim=128, num_keys=1920),
    dict(num_queries=1, num_heads=8, num_kv_heads=2, head_dim=256, num_keys=1920, **FLOAT8),
)
PREFIX_SHAPES = (  # prefix and suffix are odd: query columns, and query rows
    dict(batch=3, num_queries=1, num_heads=8, num_kv_heads=2, head_dim=128, shared=1001, num_keys=1064),
    dict(batch=40, num_queries=1, num_heads=8, num_kv_heads=1, head_dim=128, shared=1001, num_keys=1102),
    dict(batch=20, num_queries=1, num_heads=8, num_kv_heads=2, head_dim=64, shared=1003, num_keys=1304),
)


def part_checks() -> Iterator[dict]:
    """Checks dense, packed and paged batches, and prefixes, whose KV tiles are copied in parts."""
    from tree_attn.local import attend

    for shape, name in itertools.product(ODD_SHAPES, ("plain", "lengths", "causal", "window")):
        is_batch = shape.get("batch", 3) > 3
        if (name == "causal" and shape["num_queries"] > 8) or (is_batch and name != "plain"):
            continue
        case = OracleCase(dtype="bfloat16", options=OPTIONS[name], **shape)
        call = functools.partial(attend, implementation="mosaic_gpu")
        yield case.check(call, what="local", implementation="mosaic_gpu", options_name=name)
    ways = {"packed, odd": functools.partial(packed, spare=3)}
    ways |= {f"pages of {size}": functools.partial(paged, page_size=size) for size in (8, 16, 32, 48, 96)}
    for shape, (way, call), name in itertools.product(PAGED_SHAPES, ways.items(), ("lengths", "window")):
        case = OracleCase(dtype="bfloat16", options=OPTIONS[name], **shape)
        run = lambda *args, block_size, call=call, **options: call(*args, implementation="mosaic_gpu", **options)
        if name == "lengths" or shape["num_queries"] <= 8:
            yield case.check(run, what="ragged", how=way, implementation="mosaic_gpu", options_name=name)
    yield from _prefix_checks()


def _prefix_checks() -> Iterator[dict]:
    from tree_attn import bifurcated_decode

    def call(query, key, value, *, shared, block_size, **options):
        return bifurcated_decode(
            query, key[0, :shared], value[0, :shared], key[:, shared:], value[:, shared:],
            implementation="mosaic_gpu", block_size=block_size, **options,
        )  # fmt: skip

    for shape, is_ragged in itertools.product(PREFIX_SHAPES, (False, True)):
        shared, num_keys = shape["shared"], shape["num_keys"]
        lengths = shared + np.arange(shape["batch"]) * 7 % (num_keys - shared + 1)
        case = OracleCase(
            dtype="bfloat16", options={"key_value_seq_lengths": lengths.astype(np.int32)} if is_ragged else {}, **shape
        )

        def run(*arrays, key_value_seq_lengths=None, shared=shared, **options):
            if key_value_seq_lengths is not None:
                options["key_value_seq_lengths"] = key_value_seq_lengths - shared
            return call(*arrays, shared=shared, **options)

        yield case.check(
            run, what="prefix", implementation="mosaic_gpu", shared=shared, options_name="ragged" * is_ragged
        )
