"""Counts of the kernels that a call of the lean kernel launches on Hopper."""

import re

from lean_cases import WHOLE, AfterPrefix, Call

from tree_attn.kernels.lean_call import column_blocks
from tree_attn.kernels.lean_layout import MANY_QUERY_ROWS, MAX_QUERIES, rows_of_few_queries
from tree_attn.kernels.targets import HOPPER


def count_launches(text: str) -> int:
    """Returns how many kernels of Mosaic GPU a lowered program has."""
    return len(re.findall(r"custom_call @mosaic_gpu", text))


def num_launches(call: Call) -> int:
    """Returns how many kernels a call of `lean_cases` is to take: one, and a merge where it cuts output tiles."""
    if isinstance(call, AfterPrefix):
        return 2  # one for the prefix
    # A run has two KV tiles at least, of 128 keys at head dim 64 and for many queries: no output tile is cut.
    columns, slots = call.queries * call.group, getattr(call, "first", call.slots)
    if call.stored_dtype is not None:
        _, cols = column_blocks(columns, call.head_dim, True, HOPPER)
        has_wide_tiles = slots > WHOLE and cols * -(-call.head_dim // 64) * 64 <= 2048 and call.layout != "paged"
    elif call.are_rows:
        is_few = call.queries <= MAX_QUERIES
        rows = rows_of_few_queries(call.queries, call.group, call.head_dim, slots) if is_few else MANY_QUERY_ROWS
        has_wide_tiles = call.head_dim * (MANY_QUERY_ROWS // rows) <= 128  # a block of 64 rows has two streams
    else:
        has_wide_tiles = call.head_dim == 64 and (call.lengths is None or columns <= 16)
    if call.lengths is None:
        is_whole = slots == WHOLE or has_wide_tiles
    else:
        is_whole = slots <= 2 * (128 if has_wide_tiles else 64)
    is_whole &= call.layout != "packed"
    # Few query columns are merged by the last CTA, unless a state over other keys joins, which is not padded, or one
    # sequence has very many keys.
    is_odd, is_widened = call.slots % 8 > 0 and call.layout != "paged", call.stored_dtype is not None
    cols = column_blocks(columns, call.head_dim, is_widened, HOPPER, is_whole=not is_odd)[1]
    joins = hasattr(call, "first") and call.queries % 8 == 0
    merges = not call.are_rows and cols <= 48 and not joins and slots < 65_536
    return 1 if is_whole or merges else 2
