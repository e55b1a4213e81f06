"""LeanAttention's schedule, exhaustively: every tile once, runs of equal length, partials where the merge looks."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tree_attn.kernels.schedule import (
    MIN_KV_TILES_PER_RUN,
    lean_schedule,
    longest_run,
    num_runs,
    partials_of_output_tile,
    run_of_kv_tile,
    run_start,
    run_table,
    sequence_offsets,
    whole_run_table,
)


def plans():
    """Yields `(kv_tiles, num_ctas)`: all small ones, and some drawn with long and short output tiles mixed."""
    for count, longest in ((1, 30), (2, 8), (3, 5), (4, 3)):
        for tiles in itertools.product(range(1, longest + 1), repeat=count):
            yield from ((tiles, ctas) for ctas in (1, 2, 3, 5, 8, 30))
    rng = np.random.default_rng(0)
    for _ in range(200):
        tiles = rng.integers(1, rng.choice([2, 9, 200]), size=rng.integers(1, 40))
        yield tuple(tiles.tolist()), int(rng.integers(1, 140))


def first_tiles(kv_tiles):
    return [0, *itertools.accumulate(kv_tiles)][:-1]


def busy(schedule):
    return [run for run in schedule if run]


def lengths_of(schedule):
    return [sum(segment.num_kv_tiles for segment in run) for run in busy(schedule)]


def test_every_tile_is_in_exactly_one_run_and_runs_are_contiguous():
    for tiles, ctas in plans():
        laid_out = [
            (segment.output_tile, segment.first_kv_tile + i)
            for run in lean_schedule(tiles, ctas)
            for segment in run
            for i in range(segment.num_kv_tiles)
        ]
        # In this order, so CTA g's run is the g-th part of the output tiles laid end to end.
        assert laid_out == [(output_tile, tile) for output_tile, count in enumerate(tiles) for tile in range(count)]


def test_runs_differ_by_at_most_one_tile_and_are_not_too_short():
    for tiles, ctas in plans():
        schedule = lean_schedule(tiles, ctas)
        lengths = lengths_of(schedule)
        assert len(schedule) == ctas and max(lengths) - min(lengths) <= 1
        assert max(lengths) == longest_run(sum(tiles), ctas)
        assert len(lengths) == 1 or min(lengths) >= MIN_KV_TILES_PER_RUN
        # No CTA idles that could have a run of that length.
        assert len(lengths) == ctas or (len(lengths) + 1) * MIN_KV_TILES_PER_RUN > sum(tiles)
        assert all(not run for run in schedule[len(lengths) :])


def test_each_output_tile_has_one_host_and_one_finishing_block():
    for tiles, ctas in plans():
        segments = [segment for run in lean_schedule(tiles, ctas) for segment in run]
        for output_tile, count in enumerate(tiles):
            mine = [segment for segment in segments if segment.output_tile == output_tile]
            assert [segment.is_host for segment in mine] == [True] + [False] * (len(mine) - 1)
            assert [segment.is_finishing for segment in mine] == [False] * (len(mine) - 1) + [True]
            assert mine[0].first_kv_tile == 0 and mine[-1].first_kv_tile + mine[-1].num_kv_tiles == count


def test_partials_lie_where_the_merge_looks_without_collision():
    for tiles, ctas in plans():
        schedule, total = lean_schedule(tiles, ctas), sum(tiles)
        runs = num_runs(total, ctas)
        segments = [segment for run in schedule for segment in run]
        partials = [segment.partial for segment in segments]
        assert len(set(partials)) == len(partials) and max(partials) < ctas + len(tiles)
        for output_tile, (first, count) in enumerate(zip(first_tiles(tiles), tiles)):
            begin, number = partials_of_output_tile(output_tile, first, count, total, runs)
            assert [s.partial for s in segments if s.output_tile == output_tile] == list(range(begin, begin + number))


def test_segments_name_the_cta_whose_run_they_are_in():
    for tiles, ctas in plans():
        for cta, run in enumerate(lean_schedule(tiles, ctas)):
            assert {segment.cta for segment in run} <= {cta}
            found = [segment.output_tile for segment in run]
            assert found == list(range(found[0], found[0] + len(found))) if found else True


@pytest.mark.parametrize("total", [1, 2, 3, 7, 16, 97])
def test_run_of_kv_tile_inverts_run_start(total):
    for runs in range(1, total + 1):
        starts = [run_start(run, total, runs) for run in range(runs + 1)]
        assert starts[0] == 0 and starts[-1] == total and all(a < b for a, b in itertools.pairwise(starts))
        for run in range(runs):
            assert {run_of_kv_tile(tile, total, runs) for tile in range(starts[run], starts[run + 1])} == {run}


def test_counts_may_be_int32_arrays_under_jit():
    """Kernels use them so, on scalars that only the device knows."""
    count = jax.jit(num_runs, static_argnums=1)
    on_device = jax.jit(lambda x, total, runs: (run_start(x, total, runs), run_of_kv_tile(x, total, runs)))
    for total, ctas in itertools.product((1, 5, 64, 97), (1, 4, 30)):
        runs = num_runs(total, ctas)
        traced = count(jnp.int32(total), ctas)
        assert traced.dtype == jnp.int32 and traced == runs
        for x in range(min(total, 6)):
            got = on_device(*map(jnp.int32, (x, total, runs)))
            assert [int(n) for n in got] == [run_start(x, total, runs), run_of_kv_tile(x, total, runs)]
            assert {n.dtype for n in got} == {jnp.dtype("int32")}


@pytest.mark.parametrize("total", [1, 2, 8, 9, 10, 17, 18, 19, 40])
def test_a_few_runs_may_have_one_kv_tile(total):
    ctas, short = 16, 9
    runs, usual = num_runs(total, ctas, short), num_runs(total, ctas)
    assert runs == max(usual, min(total, short))
    assert longest_run(total, ctas, short) <= longest_run(total, ctas)
    assert jax.jit(num_runs, static_argnums=(1, 2))(jnp.int32(total), ctas, short) == runs
    tiles = jnp.asarray([total], jnp.int32)
    table = np.asarray(run_table(tiles, sequence_offsets(tiles, 1), 1, ctas, short_runs=short))
    lengths = [run_start(run + 1, total, runs) - run_start(run, total, runs) for run in range(runs)]
    assert table[:, 3].tolist() == lengths + [0] * (ctas - runs)
    assert table[:runs, 2].tolist() == [run_start(run, total, runs) for run in range(runs)]


@pytest.mark.parametrize("tiles", [[1], [4], [1, 1, 1], [3, 1, 40, 2], [7, 7], [1, 260, 1, 1, 9]], ids=str)
@pytest.mark.parametrize("heads, ctas", [(1, 5), (3, 1), (3, 32)])
def test_the_devices_table_is_the_plain_schedule(tiles, heads, ctas):
    plain = lean_schedule(np.repeat(tiles, heads).tolist(), ctas)

    @jax.jit
    def tables(tiles):
        offsets = sequence_offsets(tiles, heads)
        return offsets, run_table(tiles, offsets, heads, ctas)

    offsets, runs = tables(jnp.array(tiles, jnp.int32))
    assert offsets.dtype == runs.dtype == jnp.int32 and runs.shape == (ctas, 4)
    np.testing.assert_array_equal(offsets, first_tiles([count * heads for count in tiles]))
    for run, (sequence, output_tile, tile, count) in zip(plain, runs.tolist()):
        assert count == sum(segment.num_kv_tiles for segment in run)
        if run:
            assert (sequence * heads + output_tile, tile) == (run[0].output_tile, run[0].first_kv_tile)
        else:  # a CTA without a run still reads its own line, which must name a sequence
            assert 0 <= sequence < len(tiles)


@pytest.mark.parametrize("tiles", [[1], [4], [2, 1, 2, 2, 1], [3, 1, 40, 2], [1, 260, 1, 1, 9]], ids=str)
@pytest.mark.parametrize("heads, ctas", [(1, 5), (3, 1), (3, 32), (7, 4)])
def test_whole_output_tiles_are_in_one_run_each_in_order(tiles, heads, ctas):
    runs = whole_run_table(jnp.array(tiles), sequence_offsets(jnp.array(tiles), heads), heads, ctas)
    walked, lengths = [], []
    for sequence, output_tile, tile, count in runs.tolist():
        assert 0 <= sequence < len(tiles)
        lengths.append(count)
        while count:
            assert tile == 0 and count >= tiles[sequence]
            walked.append((sequence, output_tile))
            count -= tiles[sequence]
            is_last = output_tile + 1 == heads
            sequence, output_tile = (sequence + 1, 0) if is_last else (sequence, output_tile + 1)
    assert walked == [(sequence, head) for sequence in range(len(tiles)) for head in range(heads)]
    # As long as runs that cut, and longer by up to one output tile.
    total = sum(tiles) * heads
    assert max(lengths) < -(-total // num_runs(total, ctas)) + max(tiles)
    assert max(lengths) == max(tiles) or len(tiles) * heads > ctas


def test_lengths_that_change_compile_nothing_anew():
    count = 0

    @jax.jit
    def table(tiles):
        nonlocal count
        count += 1
        return run_table(tiles, sequence_offsets(tiles, 2), 2, 4)

    first, second = table(jnp.array([3, 9])), table(jnp.array([8, 1]))
    assert count == 1 and (first != second).any()


@pytest.mark.parametrize("count, tiles", [(1, 2), (4, 3), (12, 8)])
def test_with_as_many_ctas_as_output_tiles_it_is_flash_attention_2(count, tiles):
    """Section 4.2: one CTA per output tile, nothing to merge."""
    for cta, run in enumerate(lean_schedule([tiles] * count, count)):
        (segment,) = run
        assert (segment.output_tile, segment.num_kv_tiles, segment.is_host, segment.is_finishing) == (
            cta,
            tiles,
            True,
            True,
        )


@pytest.mark.parametrize("count, splits, tiles", [(1, 4, 8), (3, 2, 4), (5, 3, 9)])
def test_with_an_even_multiple_of_the_output_tiles_it_is_a_fixed_split(count, splits, tiles):
    """Section 4.2: FlashDecoding's `splits` equal parts of every output tile."""
    for cta, run in enumerate(lean_schedule([tiles] * count, count * splits)):
        (segment,) = run
        assert (segment.output_tile, segment.num_kv_tiles) == (cta // splits, tiles // splits)
        assert segment.first_kv_tile == cta % splits * (tiles // splits)


@pytest.mark.parametrize(
    "tiles, ctas, named",
    [([], 2, "kv_tiles .*at least 1, got"), ([3, 0], 2, r"kv_tiles .*\[3, 0\]"), ([3], 0, "num_ctas .* 0")],
)
def test_what_does_not_fit_is_named(tiles, ctas, named):
    with pytest.raises(ValueError, match=named):
        lean_schedule(tiles, ctas)
