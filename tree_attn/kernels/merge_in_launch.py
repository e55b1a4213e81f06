"""The merge of the lean kernel's partial states in the launch that makes them, by the CTAs that left them.

Where reading an output tile's partial states takes one CTA little, the last that leaves one merges them. Otherwise all
that left one wait for each other, and each merges a part: 64 head dims of 8 query columns (`arrivals.py`).
"""

from jax import lax
from jax.experimental import pallas as pl

from tree_attn.kernels.arrivals import COUNT_BITS, arrive, await_others, depart, reset
from tree_attn.kernels.interpreter import is_interpreted
from tree_attn.kernels.launch_order import runs_kernels_in_order
from tree_attn.kernels.lean_layout import LeanConfig, LeanShape, lanes, partial_of, partials_of
from tree_attn.kernels.lean_merge import COLUMNS, MERGE_HEAD_DIMS, finished, fold_partials
from tree_attn.kernels.plain_copies import store_result
from tree_attn.kernels.schedule import MIN_KV_TILES_PER_RUN
from tree_attn.kernels.tuning import num_sms

# Weighted values that one CTA reads together if it merges all, where one CTA has an SM and where two have.
MERGED_ELEMENTS, MERGED_ELEMENTS_OF_TWO = 16384, 4096
MAX_ROUNDS = 4  # how often it reads so at most, in less time than another launch takes
# The same of a part: partial states that are read together, and how often.
PARTS_AT_ONCE, PARTS_AT_ONCE_OF_TWO = 16, 8
MAX_ROUNDS_OF_PARTS = 5


def merges_in_launch(shape: LeanShape, config: LeanConfig) -> bool:
    """Returns whether the CTAs that leave an output tile's partial states merge them.

    The kernel is one that writes results too (`lean.writes_uncut`), which has the registers for it. Otherwise a second
    kernel does, where more CTAs share that work. The interpreter has no atomics.
    """
    if is_interpreted() or not runs_kernels_in_order():
        return False
    return _merges_alone(shape, config) or _merges_together(shape, config)


def merge_in_launch(results, words_smem, output_tiles, tables, shape: LeanShape, config: LeanConfig) -> None:
    """Counts a run's partial states in, and merges what is this CTA's to merge.

    Args:
      results: `lean_results.results_of`, which has left the partial states.
      words_smem: 8 bytes of shared memory, as `arrivals.arrive` takes them.
      output_tiles: the run's first and its last, of which a partial state is there if runs cut them.
      tables: with "arrivals", a count of each output tile.
    """
    first, last = output_tiles
    spans = [partials_of(shape, config, tables.get("sequences"), output_tile) for output_tile in output_tiles]
    are_cut = [count > 1 for _, count in spans]
    are_cut[1] &= last != first
    before = arrive(tables["arrivals"], output_tiles, are_cut, words_smem)
    for output_tile, span, is_cut, found in zip(output_tiles, spans, are_cut, before):
        if _merges_alone(shape, config):
            pl.when(is_cut & (found == span[1] - 1))(
                lambda output_tile=output_tile, span=span: _merge_alone(
                    results, output_tile, span, tables, shape, config
                )
            )
        else:
            pl.when(is_cut)(
                lambda output_tile=output_tile, span=span: _merge_together(
                    results.outputs, words_smem, output_tile, span, tables, shape, config
                )
            )


def _merges_alone(shape: LeanShape, config: LeanConfig) -> bool:
    """Returns whether one CTA merges all partial states of an output tile."""
    return _most_partials(shape, config) <= MAX_ROUNDS * _merged_at_once(shape, config)


def _merges_together(shape: LeanShape, config: LeanConfig) -> bool:
    """Returns whether all CTAs of an output tile merge a part each: few enough to read, of results in their layout."""
    is_counted = config.num_ctas < 2**COUNT_BITS
    most = MAX_ROUNDS_OF_PARTS * _parts_at_once(config)
    return shape.tokens is None and is_counted and _most_partials(shape, config) <= most


def _most_partials(shape: LeanShape, config: LeanConfig) -> int:
    """Returns how many partial states an output tile may have."""
    of_lane = lanes(shape, config)
    runs = config.num_ctas // of_lane  # of which one output tile may have all
    if shape.static_kv_tiles is not None:
        runs = -(-runs // (shape.num_output_tiles // of_lane))
    most_kv_tiles = pl.cdiv(shape.num_slots, config.block_kv)
    return min(runs, most_kv_tiles // MIN_KV_TILES_PER_RUN + 1)


def _merged_at_once(shape: LeanShape, config: LeanConfig) -> int:
    """Returns how many partial states a CTA reads together that merges all."""
    elements = MERGED_ELEMENTS if config.num_ctas <= num_sms() else MERGED_ELEMENTS_OF_TWO
    return max(1, elements // (shape.padded_head_dim * shape.cols))


def _parts_at_once(config: LeanConfig) -> int:
    """Returns of how many partial states a CTA reads a part together."""
    return PARTS_AT_ONCE if config.num_ctas <= num_sms() else PARTS_AT_ONCE_OF_TWO


def _merge_alone(results, output_tile, span, tables, shape: LeanShape, config: LeanConfig) -> None:
    """Merges an output tile's partial states, the first and how many of which `span` says, and writes the result."""
    (first, count), (accs_ref, stats_ref) = span, results.outputs[-2:]
    reset(tables["arrivals"], output_tile)

    def end(state):
        acc, top, total = state
        results.await_memory()
        results.write(output_tile, 0, (acc, top, lambda: total))

    state_of = lambda i: (accs_ref.at[first + i], stats_ref.at[first + i])
    rows = shape.padded_head_dim, shape.cols
    fold_partials(count, state_of, end, rows, at_once=_merged_at_once(shape, config), axis=1)


def _merge_together(outputs, words_smem, output_tile, span, tables, shape: LeanShape, config: LeanConfig) -> None:
    """Waits for an output tile's other CTAs, and merges this one's part, or all if one gave up waiting."""
    counts, (first, count) = tables["arrivals"], span
    place = partial_of(shape, config, lax.axis_index("cta"), output_tile) - first
    have_come = await_others(counts, output_tile, count, words_smem)
    merge = lambda *parts: _merge_parts(outputs, output_tile, span, parts, shape, config)
    pl.when(have_come > 0)(lambda: merge(place, count))
    is_missed = depart(counts, output_tile, count, 1 - have_come, words_smem)
    pl.when(is_missed > 0)(lambda: merge(0, 1))


def _merge_parts(outputs, output_tile, span, parts, shape: LeanShape, config: LeanConfig) -> None:
    """Merges every n-th part of an output tile's partial states from the i-th on; `parts` are i and n."""
    (out_ref, lse_ref, accs_ref, stats_ref), (first, count), (begin, stride) = outputs, span, parts
    blocks = shape.padded_head_dim // MERGE_HEAD_DIMS

    def merge(number, _):
        part = begin + number * stride
        block, group = lax.rem(part, blocks), lax.div(part, blocks)
        first_dim, first_column = block * MERGE_HEAD_DIMS, group * COLUMNS
        head_dims = pl.ds(pl.multiple_of(first_dim, MERGE_HEAD_DIMS), MERGE_HEAD_DIMS)
        columns = pl.ds(pl.multiple_of(first_column, COLUMNS), COLUMNS)

        def end(state):
            store_result(
                out_ref, lse_ref, output_tile, finished(*state), first_dim=first_dim, first_column=first_column,
                is_first=block == 0,
            )  # fmt: skip

        part_of = lambda i: (accs_ref.at[first + i, head_dims, columns], stats_ref.at[first + i, :, columns])
        fold_partials(count, part_of, end, (MERGE_HEAD_DIMS, COLUMNS), at_once=_parts_at_once(config), axis=1)

    num_parts = blocks * (shape.cols // COLUMNS)
    lax.fori_loop(0, lax.div(num_parts - begin + stride - 1, stride), merge, None)
