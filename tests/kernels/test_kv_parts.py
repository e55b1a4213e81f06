"""Slots that 8 does not divide, and small pages, in Mosaic GPU's interpreter."""

import pytest
from lean_cases import HEAD_SCALES, Call, MergedWith, thorough
from lean_interpreter import check, needs_interpreter

from tree_attn.kernels import lean_compute

pytestmark = [needs_interpreter, pytest.mark.usefixtures("small_layout")]
CAUSAL = {"is_causal": True}
FLOAT8 = {"stored_dtype": "float8_e4m3fn", "options": HEAD_SCALES}
MANY = {"queries": 40, "kv_heads": 1}  # queries, which are then rows of the tensor core
ODD_SLOTS = [
    (Call(slots=131, batch=2, kv_heads=1, group=3, head_dim=128), 2),
    (Call(slots=67, lengths=(67, 3), queries=3, options=CAUSAL | {"local_window_size": (40, 0)}), 1),
    (Call(slots=37, lengths=(37, 0, 9), head_dim=128), 1),  # output tiles of one KV tile, read up to their ends
    (Call(slots=67, head_dim=80, **FLOAT8), 1),
    (Call(layout="packed", lengths=(70, 2, 69), slots=72, spare=0), 2),
]
SMALL_PAGES = [
    (Call(layout="paged", page=16, lengths=(200, 0, 77), slots=208, kv_heads=1), 2),  # tiles beyond the table's end
    (Call(layout="paged", page=5, lengths=(70, 129), slots=130), 2),
]
MORE = [
    (Call(slots=1, batch=2), 1),
    (Call(layout="paged", page=8, lengths=(72, 0, 31), slots=72, **FLOAT8), 1),
    (Call(slots=131, lengths=(131, 70), **MANY), 2),
    (Call(layout="paged", page=32, lengths=(96, 70), slots=96, head_dim=128, kv_heads=1), 1),
    (Call(slots=203, lengths=(203, 0, 77, 1), group=2), 2),
    (MergedWith(slots=251, first=187, lengths=(250, 100), **MANY), 2),
    (Call(layout="paged", page=48, lengths=(140, 7), slots=144, queries=3, options=CAUSAL), 2),
]


@pytest.mark.parametrize("call, num_kernels", ODD_SLOTS + SMALL_PAGES + thorough(MORE), ids=str)
def test_it_is_exact_and_has_no_race(call, num_kernels):
    check(call, num_kernels)


@pytest.mark.parametrize(
    "call",
    [Call(slots=67, lengths=(24, 0), kv_heads=1), Call(layout="paged", page=16, lengths=(48, 0), slots=64, kv_heads=1)],
    ids=str,
)
@pytest.mark.usefixtures("fresh_traces")
def test_parts_that_no_query_sees_are_not_read(call, monkeypatch):
    """They hold NaN, for which the kernel puts zeros otherwise."""
    monkeypatch.setattr(lean_compute, "zero_garbage", lambda *args, **options: None)
    check(call, num_kernels=1)
