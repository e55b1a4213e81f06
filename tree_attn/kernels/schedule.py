"""LeanAttention's stream-K schedule in plain integers: equal runs of KV tiles, one per CTA, whatever the shapes.

Rows are output tiles: one per (sequence, KV head, block of query columns). The tiles of all rows are laid end to end,
and CTA g takes the g-th of `num_runs` runs that differ in length by at most one tile. A run may begin in the middle of
a row and end in the middle of another; each piece of a run within one row is a segment and gives one partial state.

The functions on counts take Python ints or int32 arrays alike: the host, the tests and the kernels share them.

Source: LeanAttention, section 4.3 and Algorithm 1.
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

MIN_TILES_PER_RUN = 2  # below that a CTA's start and its partial cost more than the tiles it takes off another

Count = int | Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """The tiles `first_tile .. first_tile + num_tiles` of row `row`, done by CTA `cta` (Algorithm 1, lines 11 to 18).

    is_host:       it holds the row's first tile (the paper's host block, which merges)
    is_finishing:  it holds the row's last tile
    partial:       where its state is kept until the merge; a row's partials are neighbours, in the order of its tiles
    """

    cta: int
    row: int
    first_tile: int
    num_tiles: int
    is_host: bool
    is_finishing: bool
    partial: int


def num_runs(num_tiles: Count, num_ctas: int) -> Count:
    """How many CTAs get a run: all, unless runs would be shorter than `MIN_TILES_PER_RUN`; at least 1."""
    return _least(num_ctas, _most(_quotient(num_tiles, MIN_TILES_PER_RUN), 1))


def run_start(run: Count, num_tiles: Count, runs: Count) -> Count:
    """The first tile of run `run` of `runs`; that of the next run ends it. The first runs take the odd tiles."""
    per_run = _quotient(num_tiles, runs)
    return run * per_run + _least(run, num_tiles - per_run * runs)


def run_of_tile(tile: Count, num_tiles: Count, runs: Count) -> Count:
    """The run that holds `tile`: the inverse of `run_start`."""
    per_run = _quotient(num_tiles, runs)
    in_longer = (num_tiles - per_run * runs) * (per_run + 1)
    in_first = _quotient(_least(tile, in_longer), per_run + 1)
    return in_first + _quotient(_most(tile, in_longer) - in_longer, _most(per_run, 1))


def partials_of_row(row: Count, first: Count, num_row_tiles: Count, num_tiles: Count, runs: Count):
    """Where the partial states of a row lie: `(first partial, how many)`.

    Runs ascend with rows, so run + row numbers all segments without a gap within a row and without a collision.

    Args:
      row, first, num_row_tiles: the row, its first tile among all rows' tiles, and how many tiles it has.
    """
    first_run = run_of_tile(first, num_tiles, runs)
    last_run = run_of_tile(first + num_row_tiles - 1, num_tiles, runs)
    return first_run + row, last_run - first_run + 1


def lean_schedule(tiles_per_row: Sequence[int], num_ctas: int) -> list[list[Segment]]:
    """Returns every CTA's run as its segments: Algorithm 1 written out, as the kernels follow it.

    Args:
      tiles_per_row: tiles of each output row, each at least 1 (a row that sees nothing has one masked tile).
      num_ctas: how many CTAs there are. Those beyond `num_runs` get an empty list.
    Raises:
      ValueError: no rows, a row without a tile, or no CTA.

    Example:
      >>> lean_schedule([3, 2], num_ctas=2)[1]     # the second CTA finishes row 0 and does row 1

    Source: LeanAttention, Algorithm 1.
    """
    if not tiles_per_row or min(tiles_per_row) < 1:
        raise ValueError(f"tiles_per_row must be counts of at least 1, got {list(tiles_per_row)}")
    if num_ctas < 1:
        raise ValueError(f"num_ctas must be at least 1, got {num_ctas}")
    total = sum(tiles_per_row)
    runs = num_runs(total, num_ctas)
    schedule: list[list[Segment]] = [[] for _ in range(num_ctas)]
    first = 0
    for row, count in enumerate(tiles_per_row):
        tile = 0
        while tile < count:
            cta = run_of_tile(first + tile, total, runs)
            end = min(run_start(cta + 1, total, runs) - first, count)
            schedule[cta].append(
                Segment(
                    cta=cta,
                    row=row,
                    first_tile=tile,
                    num_tiles=end - tile,
                    is_host=tile == 0,
                    is_finishing=end == count,
                    partial=cta + row,
                )
            )
            tile = end
        first += count
    return schedule


def sequence_offsets(tiles_per_row: Int[Array, " B"], rows_per_sequence: int) -> Int[Array, " B"]:
    """Where each sequence's tiles begin among all, for `rows_per_sequence` rows of `tiles_per_row[b]` tiles each.

    A masked sum rather than a scan: XLA makes one small kernel of it.
    """
    batch = tiles_per_row.shape[0]
    is_before = jnp.arange(batch)[None, :] < jnp.arange(batch)[:, None]
    return jnp.sum(jnp.where(is_before, tiles_per_row[None, :] * rows_per_sequence, 0), axis=1, dtype=jnp.int32)


def run_table(
    tiles_per_row: Int[Array, " B"],
    offsets: Int[Array, " B"],
    rows_per_sequence: int,
    num_ctas: int,
    *,
    whole_rows: bool = False,
) -> Int[Array, "C 4"]:
    """Where each CTA's run begins, from lengths that only the device knows: int32 `[num_ctas, 4]`.

    Columns: sequence, row within the sequence, tile within the row, tiles in the run (0 for a CTA without a run).

    Args:
      whole_rows: a run that would begin within a row begins with the next, so that none is cut: a run is then longer
        than the others by up to a row, and may have no tile.
    """
    total = offsets[-1] + tiles_per_row[-1] * rows_per_sequence
    runs = num_runs(total, num_ctas)
    cta = jnp.arange(num_ctas, dtype=jnp.int32)
    start, end = run_start(cta, total, runs), run_start(cta + 1, total, runs)

    def locate(tile):
        last = tiles_per_row.shape[0] - 1
        sequence = jnp.sum(offsets[None, :] <= tile[:, None], axis=1, dtype=jnp.int32) - 1
        sequence = jnp.clip(sequence, 0, last)
        within = tile - offsets[sequence]
        return sequence, within // tiles_per_row[sequence], within % tiles_per_row[sequence]

    def row_end(tile):
        sequence, row, within = locate(tile)
        return jnp.where(within == 0, tile, offsets[sequence] + (row + 1) * tiles_per_row[sequence])

    if whole_rows:
        start, end = row_end(start), row_end(end)
    count = jnp.where(cta < runs, end - start, 0)
    return jnp.stack([*locate(start), count], axis=1).astype(jnp.int32)


def _quotient(a: Count, b: Count) -> Count:
    # Counts are not negative, so kernels are spared the cases that `//` on arrays distinguishes.
    return a // b if isinstance(a, int) and isinstance(b, int) else lax.div(a, b)


def _least(a: Count, b: Count) -> Count:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.minimum(a, b)


def _most(a: Count, b: Count) -> Count:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.maximum(a, b)
