"""LeanAttention's stream-K schedule in plain integers: equal runs of KV tiles, one per CTA, whatever the shapes.

An output tile is one block of query columns of one KV head of one sequence. The KV tiles of all output tiles are laid
end to end. CTA g takes the g-th of `num_runs` runs, which differ in length by at most one KV tile. A run may begin
within an output tile and end within another. Its part within one output tile is a segment and gives one partial state.
That is the schedule of one lane, of which there is one for each head or for a few (`lean_layout.lanes`).

The functions on counts take Python ints or int32 arrays alike: the host, the tests and the kernels share them.

Source: LeanAttention, section 4.3 and Algorithm 1.
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

MERGE_KV_TILES = 2  # a run may have so many more, if then nothing is to be merged
MIN_KV_TILES_PER_RUN = 2  # below that a CTA's start and its partial cost more than the tiles it takes off another

Count = int | Array


def num_runs(num_kv_tiles: Count, num_ctas: Count, short_runs: int = 1) -> Count:
    """Returns how many CTAs get a run: all, unless runs would be shorter than `MIN_KV_TILES_PER_RUN`; at least 1.

    Args:
      short_runs: so many runs there may be even where each has a single KV tile.
    """
    of_least = quotient(num_kv_tiles, MIN_KV_TILES_PER_RUN)
    return _minimum(num_ctas, _maximum(of_least, _minimum(num_kv_tiles, short_runs)))


def longest_run(num_kv_tiles: Count, max_runs: Count, short_runs: int = 1) -> Count:
    """Returns how many KV tiles the longest run has."""
    runs = num_runs(num_kv_tiles, max_runs, short_runs)
    return quotient(num_kv_tiles + runs - 1, runs)


def run_start(run: Count, num_kv_tiles: Count, runs: Count) -> Count:
    """Returns the first KV tile of run `run` of `runs`; the next run's first ends it. The first runs take odd tiles."""
    per_run = quotient(num_kv_tiles, runs)
    return run * per_run + _minimum(run, num_kv_tiles - per_run * runs)


def run_of_kv_tile(kv_tile: Count, num_kv_tiles: Count, runs: Count) -> Count:
    """Returns the run that holds `kv_tile`: the inverse of `run_start`."""
    per_run = quotient(num_kv_tiles, runs)
    in_longer = (num_kv_tiles - per_run * runs) * (per_run + 1)
    in_first = quotient(_minimum(kv_tile, in_longer), per_run + 1)
    return in_first + quotient(_maximum(kv_tile, in_longer) - in_longer, _maximum(per_run, 1))


def partials_of_output_tile(output_tile: Count, first: Count, kv_tiles: Count, num_kv_tiles: Count, runs: Count):
    """Returns where the partial states of an output tile lie: `(first partial, how many)`.

    Runs ascend with output tiles, so run + output tile numbers all segments: without a gap within an output tile, and
    without a collision.

    Args:
      output_tile, first, kv_tiles: the output tile, its first KV tile among those of all, and how many it has.
      num_kv_tiles: how many all have together.
    """
    first_run = run_of_kv_tile(first, num_kv_tiles, runs)
    last_run = run_of_kv_tile(first + kv_tiles - 1, num_kv_tiles, runs)
    return first_run + output_tile, last_run - first_run + 1


def sequence_offsets(kv_tiles: Int[Array, " B"], output_tiles_per_sequence: int) -> Int[Array, " B"]:
    """Returns where each sequence's KV tiles begin among all.

    Args:
      kv_tiles: of each output tile of sequence b, of which there are `output_tiles_per_sequence`.
    """
    # A masked sum rather than a scan: XLA makes one small kernel of it.
    batch = kv_tiles.shape[0]
    is_before = jnp.arange(batch)[None, :] < jnp.arange(batch)[:, None]
    return jnp.sum(jnp.where(is_before, kv_tiles[None, :] * output_tiles_per_sequence, 0), axis=1, dtype=jnp.int32)


def run_table(
    kv_tiles: Int[Array, " B"],
    offsets: Int[Array, " B"],
    output_tiles_per_sequence: int,
    num_ctas: int,
    *,
    max_runs: Count | None = None,
    short_runs: int = 1,
) -> Int[Array, "C 4"]:
    """Returns where each CTA's run begins, from lengths that only the device knows: int32 `[num_ctas, 4]`.

    Columns: sequence, output tile within the sequence, KV tile within the output tile, KV tiles in the run (0 for a CTA
    without a run).

    Args:
      kv_tiles, offsets: as in `sequence_offsets`, and its result.
      max_runs: at most `num_ctas`; default: that.
      short_runs: as of `num_runs`.
    """
    start, end = _run_bounds(kv_tiles, offsets, output_tiles_per_sequence, num_ctas, max_runs, short_runs)
    return jnp.stack([*_located(kv_tiles, offsets, start), end - start], axis=1).astype(jnp.int32)


def whole_run_table(
    kv_tiles: Int[Array, " B"], offsets: Int[Array, " B"], output_tiles_per_sequence: int, num_ctas: int
) -> Int[Array, "C 4"]:
    """Returns the table of runs that cut no output tile, in the form and with the arguments of `run_table`.

    Each CTA has one output tile or none, if there are enough CTAs. Otherwise a run that would begin within an output
    tile begins with the next one. It may then have no KV tile, or more than the others by up to an output tile's.
    """
    batch = kv_tiles.shape[0]
    if batch * output_tiles_per_sequence <= num_ctas:
        number = jnp.arange(num_ctas, dtype=jnp.int32)
        sequence = jnp.minimum(number // output_tiles_per_sequence, batch - 1)
        within = number - sequence * output_tiles_per_sequence
        is_any = within < output_tiles_per_sequence
        places = (
            sequence,
            jnp.where(is_any, within, 0),
            jnp.zeros_like(number),
            jnp.where(is_any, kv_tiles[sequence], 0),
        )
        return jnp.stack(places, axis=1).astype(jnp.int32)

    def output_tile_end(kv_tile):
        sequence, output_tile, within = _located(kv_tiles, offsets, kv_tile)
        return jnp.where(within == 0, kv_tile, offsets[sequence] + (output_tile + 1) * kv_tiles[sequence])

    start, end = map(output_tile_end, _run_bounds(kv_tiles, offsets, output_tiles_per_sequence, num_ctas))
    return jnp.stack([*_located(kv_tiles, offsets, start), end - start], axis=1).astype(jnp.int32)


def _run_bounds(
    kv_tiles, offsets, output_tiles_per_sequence: int, num_ctas: int, max_runs: Count | None = None,
    short_runs: int = 1,
):  # fmt: skip
    """Returns each CTA's first KV tile and the one past its last among all; the end for CTAs without a run."""
    total = offsets[-1] + kv_tiles[-1] * output_tiles_per_sequence
    runs = num_runs(total, num_ctas if max_runs is None else max_runs, short_runs)
    cta = jnp.arange(num_ctas, dtype=jnp.int32)
    return tuple(run_start(jnp.minimum(number, runs), total, runs) for number in (cta, cta + 1))


def _located(kv_tiles, offsets, kv_tile):
    """Returns sequence, output tile within it and KV tile within that, of numbers of KV tiles among all."""
    # A binary search in gathers: where XLA fuses sums over a large batch, each thread adds up one by itself.
    batch = kv_tiles.shape[0]
    sequence = jnp.zeros_like(kv_tile)
    for step in (1 << i for i in reversed(range((batch - 1).bit_length()))):
        further = sequence + step
        is_reached = (further < batch) & (offsets[jnp.minimum(further, batch - 1)] <= kv_tile)
        sequence = jnp.where(is_reached, further, sequence)
    within = kv_tile - offsets[sequence]
    return sequence, within // kv_tiles[sequence], within % kv_tiles[sequence]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """KV tiles `first_kv_tile .. first_kv_tile + num_kv_tiles` of an output tile, done by one CTA.

    is_host:       it holds the output tile's first KV tile (the paper's host block, which merges)
    is_finishing:  it holds the output tile's last KV tile
    partial:       where its state is kept until the merge; an output tile's partials are neighbours, in the order of
                   its KV tiles

    Source: LeanAttention, Algorithm 1, lines 11 to 18.
    """

    cta: int
    output_tile: int
    first_kv_tile: int
    num_kv_tiles: int
    is_host: bool
    is_finishing: bool
    partial: int


def lean_schedule(kv_tiles: Sequence[int], num_ctas: int) -> list[list[Segment]]:
    """Returns every CTA's run as its segments: Algorithm 1 written out.

    This is the readable form of the schedule, and what tests hold the kernels' tables to; no kernel calls it.

    Args:
      kv_tiles: KV tiles of each output tile, each at least 1 (one that sees nothing has one masked KV tile).
      num_ctas: how many CTAs there are. Those beyond `num_runs` get an empty list.
    Raises:
      ValueError: no output tile, one without a KV tile, or no CTA.

    Example:
      >>> lean_schedule([3, 2], num_ctas=2)[1]     # the second CTA finishes output tile 0 and does output tile 1

    Source: LeanAttention, Algorithm 1.
    """
    if not kv_tiles or min(kv_tiles) < 1:
        raise ValueError(f"kv_tiles must be counts of at least 1, got {list(kv_tiles)}")
    if num_ctas < 1:
        raise ValueError(f"num_ctas must be at least 1, got {num_ctas}")
    total = sum(kv_tiles)
    runs = num_runs(total, num_ctas)
    schedule: list[list[Segment]] = [[] for _ in range(num_ctas)]
    first = 0
    for output_tile, count in enumerate(kv_tiles):
        kv_tile = 0
        while kv_tile < count:
            cta = run_of_kv_tile(first + kv_tile, total, runs)
            end = min(run_start(cta + 1, total, runs) - first, count)
            schedule[cta].append(
                Segment(
                    cta=cta,
                    output_tile=output_tile,
                    first_kv_tile=kv_tile,
                    num_kv_tiles=end - kv_tile,
                    is_host=kv_tile == 0,
                    is_finishing=end == count,
                    partial=cta + output_tile,
                )
            )
            kv_tile = end
        first += count
    return schedule


def quotient(a: Count, b: Count) -> Count:
    """Returns `a // b`, of counts: nothing is negative."""
    # So kernels are spared the cases that `//` on arrays distinguishes, and a division where a shift does.
    if isinstance(b, int) and (isinstance(a, int) or b & (b - 1) == 0):
        return a // b if isinstance(a, int) else a >> b.bit_length() - 1
    return lax.div(a, b)


def remainder(a: Count, b: Count) -> Count:
    """Returns `a % b`, of counts."""
    if isinstance(b, int) and (isinstance(a, int) or b & (b - 1) == 0):
        return a % b if isinstance(a, int) else a & b - 1
    return lax.rem(a, b)


def _minimum(a: Count, b: Count) -> Count:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.minimum(a, b)


def _maximum(a: Count, b: Count) -> Count:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.maximum(a, b)
