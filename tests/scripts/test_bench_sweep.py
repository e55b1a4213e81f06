"""The sweep: cases follow from the seed and stay within bounds, and the summary counts as it says."""

import contextlib
import dataclasses
import functools
import json
import sys
import time
import types

import bench_sparq
import bench_sweep
import benching
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sweep_cases
import sweep_flashinfer
import sweep_flashinfer_worker
import sweep_programs
import sweep_summary
from sweep_cases import FAMILIES

from tree_attn.kernels import tuning
from tree_attn.kernels.lean_layout import MANY_QUERY_ROWS, LeanShape
from tree_attn.measure.steps import chains, cudnn_ways, lean, prefix, sparq, ways
from tree_attn.measure.steps.step import Step

DRAWN = [sweep_cases.draw(11, i) for i in range(210)]


def test_cases_follow_from_the_seed_alone():
    assert [sweep_cases.draw(11, i) for i in (5, 3)] == [DRAWN[5], DRAWN[3]]
    assert all(sweep_cases.draw(12, i) != DRAWN[i] for i in range(7))


def test_families_take_turns_and_are_what_their_names_say():
    assert [step.family for step in DRAWN[:8]] == [*FAMILIES, FAMILIES[0]]
    by_family = {family: [step for step in DRAWN if step.family == family] for family in FAMILIES}
    assert all(len(set(step.lengths)) == 1 for step in by_family["dense"])
    assert all(len(set(step.lengths)) > 1 for step in by_family["ragged"])
    assert all(step.page is not None and step.gives_lengths for step in by_family["paged"])
    assert all(2 <= step.num_queries <= 8 for step in by_family["queries"])
    assert all(max(step.lengths) > step.window for step in by_family["window"])
    assert all(step.dtype == "float8_e4m3fn" for step in by_family["float8"])
    assert all(step.prefix >= 512 for step in by_family["prefix"])


def test_cases_are_within_bounds():
    for step in DRAWN:
        assert 1 <= step.batch <= 512 and (len(set(step.lengths)) == 1 or step.gives_lengths)
        assert step.num_queries <= min(step.lengths) and max(step.lengths) <= step.slots
        assert step.copies >= 2 and step.copies * step.bytes_held <= 10e9 and step.bytes_held <= 4e9
        assert step.copies * step.bytes_read >= 3 * 60e6
        assert max(step.bytes_us, step.products_us) <= 1000


def test_cases_are_as_various_as_serving():
    assert {step.head_dim for step in DRAWN} == {64, 128, 256}
    assert {step.batch for step in DRAWN} >= {1} and max(step.batch for step in DRAWN) > 300
    assert any(step.slots > max(step.lengths) for step in DRAWN)
    assert {step.gives_lengths for step in DRAWN if step.family == "dense"} == {True, False}
    assert any(step.prefix % 8 for step in DRAWN) and any(max(step.lengths) % 8 for step in DRAWN)


def test_the_table_has_the_sixteen_steps_that_it_had():
    """Bytes at 4.8 TB/s in microseconds; no entry may change, or runs of different days could not be compared."""
    steps = sweep_cases.table()
    assert [step.case for step in steps] == [f"table {i}" for i in range(16)]
    expected = [306, 125, 164, 224, 171, 17, 64, 56, 112, 285, 112, 28]
    assert [step.bytes_us for step in steps[:12]] == pytest.approx(expected, rel=0.03)
    assert {step.family for step in steps[12:]} == {"prefix"}
    assert sum(map(sum, (step.lengths for step in steps))) == 3_256_093
    # The products of a prefix of 16,384 keys with 1,024 x 8 queries take longer than its bytes.
    assert steps[13].products_us > steps[13].bytes_us


def test_bytes_count_what_a_step_has_to_read():
    step = Step(family="", case="", lengths=(10, 3), gives_lengths=True, num_heads=2, num_kv_heads=1)
    assert (step.key_value_bytes, step.bytes_read, step.slots, step.bytes_held) == (512, 13 * 512, 10, 20 * 512)
    narrow = dataclasses.replace(step, dtype="float8_e4m3fn", window=4, num_queries=2)
    assert narrow.bytes_read == (5 + 3) * 256
    shared = dataclasses.replace(step, prefix=100, page=None)
    assert shared.bytes_read == 113 * 512
    # Each of two sequences and two heads multiplies with the prefix: 4 H flops for each pair of query and key.
    assert shared.products_us * 989.5e6 == pytest.approx(4 * 128 * 2 * (200 + 13))
    assert dataclasses.replace(step, page=8).bytes_held == (2 + 1) * 8 * 512


def row(case, way, us, **fields):
    return dict(case=case, way=way, chain_us_median=us, family="dense", title="t", bytes_us=4, products_us=1) | fields


def test_the_summary_takes_the_best_peer_of_each_case():
    rows = [
        row("a", "None", 9.0, picked="'cudnn'"),
        row("a", "mosaic_gpu", 12.0),
        row("a", "cudnn", 10.0),
        row("a", "flashinfer XQA", 20.0),
        row("b", "None", 99.0),
        row("b", "None", 8.0),  # a later row of the same way counts
        row("b", "None + options", 5.0),
        row("b", "cudnn", None, error="none"),
        row("b", "flashinfer XQA", 4.0),
        row("c", "None", 1.0, family="ragged"),
    ]
    rows = sweep_summary.latest(rows)
    assert sweep_summary.ratios(rows, "None") == {"a": 0.9, "b": 1.25}
    assert sweep_summary.ratios(rows, "mosaic_gpu") == {"a": 1.2}
    assert sweep_summary.geometric_mean([0.5, 2.0, 8.0]) == pytest.approx(2)
    text = sweep_summary.summary(rows)
    mean = np.sqrt(0.9 * 1.25)
    assert f"| dense | 2 | {mean:.3f} | 1.25 | 1 | 1.200 | 1.20 | 1 |" in text
    assert "None is behind the best peer in 1 of 2 cases" in text
    assert "| 1.25 | t | 4.0 | flashinfer XQA 4.0, None + options 5.0, None 8.0 |" in text
    assert "for want of a peer's time or ours: c" in text
    assert "under both names" not in text  # a's None is another kernel
    table = sweep_summary.markdown([row | {"git_commit": "0123456789"} for row in rows])
    assert "| t | 5.0 |  |  | 4.0 (XQA) | 4.0 | 1.25 | 0123456 |" in table


def test_the_summary_says_how_much_longer_a_step_takes_than_its_kernels():
    rows = [row(case, "None", us, device_us_median=10.0) for case, us in zip("abc", [9.0, 12.0, 15.5], strict=True)]
    rows += [row("a", "mosaic_gpu", 99.0, device_us_median=1.0), row("a", "cudnn", 100.0)]
    assert "over 2 us more than the sum of its kernels in 1 of 3 cases, at most 5.5 us more." in sweep_summary.summary(
        rows
    )


def test_the_summary_says_how_far_chains_of_the_same_kernels_are_apart():
    rows = [row(case, "mosaic_gpu", 100.0) for case in "abcd"]
    rows += [
        row(case, "None", us, picked="'mosaic_gpu'")
        for case, us in zip("abcd", [101.0, 98.0, 105.0, 100.0], strict=True)
    ]
    rows.append(row("a", "cudnn", 100.0))
    assert "3 cases: chains differ by 2.0 % at the median, by at most 2.0 % in nine of ten, by 5.0 % at worst." in (
        sweep_summary.summary(rows)
    )


@pytest.mark.parametrize("arguments", [["--threads", "-1"], ["--build", "--threads", "0"]])
def test_kernels_are_compiled_by_a_number_of_processes(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_sweep.py", *arguments])
    with pytest.raises(SystemExit):
        bench_sweep._arguments()
    assert f"--threads must be at least 0, and 1 with --build, got {arguments[-1]}" in capsys.readouterr().err


@pytest.mark.parametrize("text, options", [(None, {}), ("--a=true,b=3,c=X+Y", {"a": True, "b": 3, "c": "X,Y"})])
def test_options_of_xla(text, options):
    assert bench_sweep.parse_options(text) == options


def test_numbers_choose_among_the_drawn_cases(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_sweep.py", "--seed", "11", "--numbers", "5,3,12:3,11:5"])
    assert bench_sweep.drawn(bench_sweep._arguments()) == [DRAWN[5], DRAWN[3], sweep_cases.draw(12, 3)]
    monkeypatch.setattr(sys, "argv", ["bench_sweep.py", "--numbers", "3,x"])
    with pytest.raises(SystemExit):
        bench_sweep._arguments()
    assert "--numbers must be numbers of cases, as 3,17 or 41:3, got 3,x" in capsys.readouterr().err


@pytest.fixture
def on_cpu(monkeypatch):
    """Runs all programs of a chain and makes their times up: there is no profiler, and a difference means nothing."""
    monkeypatch.setattr(chains, "profile", lambda *args, **kwargs: {"device_us_median": 1.0})
    timing = types.SimpleNamespace(median_us=3.0, p10_us=2.0, p90_us=4.0, program_us=1.0, n_iters=32)
    timing.chain, timing.long_chain, timing.method = 2, 4, ""
    monkeypatch.setattr(chains, "time_in_turn", lambda short, long, **_: (short(), long(), timing)[2])
    monkeypatch.setattr(Step, "copies", 2)
    for module in (chains, ways):
        monkeypatch.setattr(module, "chain_lengths", lambda *_: (2, 4))


def test_a_run_goes_on_where_it_ended(tmp_path, monkeypatch):
    """Rows of this commit are kept, errors too, but for those that a second try may mend."""
    out = tmp_path / "rows.jsonl"
    monkeypatch.setenv("TREE_ATTN_GIT_COMMIT", "new")
    monkeypatch.setattr(sys, "argv", ["bench_sweep.py", "--out", str(out)])
    errors = {"None": "the process of FlashInfer ended", "cudnn": "NotImplementedError: no", "mosaic_gpu": None}
    rows = [dict(case="table 0", way=way, error=error or "", git_commit="new") for way, error in errors.items()]
    rows.append(dict(case="table 1", way="cudnn", git_commit="old"))
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sweep = bench_sweep.Sweep(bench_sweep._arguments())
    first, second = sweep_cases.table()[:2]
    assert [sweep._is_missing(first, way) for way in errors] == [True, False, False]
    assert sweep._is_missing(second, "cudnn")


@pytest.mark.parametrize("fault", [None, RuntimeError("no compiler")])
def test_a_run_compiles_flashinfers_kernels_before_it_times_anything(fault, tmp_path, monkeypatch, capsys):
    found = []

    def build(cases, args, is_missing, is_over):
        found.append((cases, is_missing(cases[0], "flashinfer XQA"), is_over()))
        if fault:
            raise fault

    monkeypatch.setattr(sys, "argv", ["bench_sweep.py", "--out", str(tmp_path / "rows.jsonl")])
    monkeypatch.setattr(sweep_flashinfer, "find", lambda folder: types.SimpleNamespace(stop=lambda: None))
    monkeypatch.setattr(bench_sweep, "build", build)
    sweep, cases = bench_sweep.Sweep(bench_sweep._arguments()), sweep_cases.table()[:1]
    monkeypatch.setattr(sweep, "_compiled", lambda *_: {})
    monkeypatch.setattr(sweep, "_case", lambda *_: print("timed"))
    with pytest.raises(RuntimeError, match="no compiler") if fault else contextlib.nullcontext():
        sweep.run(cases)
    assert found == [(cases, True, False)]
    assert ("timed" in capsys.readouterr().out) == (fault is None)


def test_no_kernel_of_flashinfer_is_begun_when_the_time_is_over(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_sweep.py"])
    monkeypatch.setattr(sweep_flashinfer, "Worker", None)  # it would be called
    assert bench_sweep.build(sweep_cases.table()[:1], bench_sweep._arguments(), is_over=lambda: True) == 0
    assert "the time is over" in capsys.readouterr().out


SMALL = dict(family="", case="", num_heads=4, num_kv_heads=2, head_dim=8)
STEPS = [
    dict(lengths=(9, 9), gives_lengths=False),
    dict(lengths=(9, 4), gives_lengths=True, slots=12, num_queries=3, window=4),
    dict(lengths=(9, 4), gives_lengths=True, dtype="float8_e4m3fn"),
    dict(lengths=(9, 4), gives_lengths=True, page=4),
    dict(lengths=(9, 4), gives_lengths=True, prefix=7),
]


@pytest.mark.parametrize("fields", STEPS, ids=["dense", "queries, window, slots", "float8", "paged", "prefix"])
def test_the_ways_of_a_step_run(fields, on_cpu):
    """None's way is timed on emulated devices too, with XLA; cuDNN's says why it has no time."""
    step = Step(**SMALL | fields)
    chosen = [way for way in ways.ways(step) if way.name not in ("mosaic_gpu", "cudnn, prefix in 8")]
    found = dict(ways.time_ways(step, chosen, threads=2))
    assert found["None"]["picked"] == "'xla'" and found["None"]["chain_us_median"] == 3.0
    assert found["None"]["max_error"] < 0.02
    assert all("error" in fields for name, fields in found.items() if name.startswith("cudnn"))


def test_a_way_with_a_layout_has_it_while_it_runs(monkeypatch):
    """The many-query kernel keeps its own."""
    shape = LeanShape(
        batch=2, num_kv_heads=4, col_blocks=1, cols=8, head_dim=64, scale=1.0, logits_soft_cap=None, mask="span",
        num_slots=900, dtype=jnp.dtype("bfloat16"), key_dtype=jnp.dtype("bfloat16"),
    )  # fmt: skip
    configs = lambda: [tuning.lean_config(one, False) for one in (shape, shape.replace(cols=MANY_QUERY_ROWS))]
    before = configs()
    monkeypatch.setattr(ways, "_dense", lambda step, name: configs())
    way = ways.way_of(Step(**SMALL, lengths=(9, 4), gives_lengths=True), "laid out 2x128x3")
    laid_out, many_query = way.run()
    assert (laid_out.block_kv, laid_out.num_stages, laid_out.num_ctas) == (128, 3, 264)
    assert many_query == before[1] and configs() == before
    with pytest.raises(ValueError, match="layouts must fit an SM, got 3x128x3 for bfloat16 and head dim 64"):
        ways.way_of(Step(**SMALL, lengths=(9, 4), gives_lengths=True), "laid out 3x128x3").run()


def test_layouts_are_three_numbers_each(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_sweep.py", "--layouts", "2x64x1,2x64"])
    with pytest.raises(SystemExit):
        bench_sweep.main()
    assert "--layouts must be of three numbers each, as 2x64x1, got 2x64" in capsys.readouterr().err


def test_programs_with_other_options_are_others():
    step = Step(**SMALL, lengths=(9, 4), gives_lengths=True)
    way = ways.named(step, "xla")
    plain, again, other = (ways.programs(step, way, x) for x in (None, {}, {"xla_cpu_enable_fast_min_max": True}))
    assert plain.key == again.key != other.key


def test_programs_that_a_process_compiles_run_here(monkeypatch):
    """A way that cannot be compiled says why; one whose program another way has is timed once."""
    run = lambda compiled, args, *_: {"results": [program(*args)[0].shape for program in compiled]}
    monkeypatch.setattr(ways, "time_chains", run)
    step = Step(**SMALL, lengths=(9, 4), gives_lengths=True)
    chosen = [way for way in ways.ways(step) if way.name != "mosaic_gpu"]
    compilers = sweep_programs.Compilers(1)
    file = compilers.submit(step, [way.name for way in chosen], {})
    reference = compilers.submit(step, [sweep_programs.REFERENCE], {})
    compilers.await_all(until=time.monotonic() + 120)
    programs = {way: functools.partial(sweep_programs.load, file, way.name) for way in chosen}
    found = dict(ways.time_programs(step, programs, 1, sweep_programs.load(reference, sweep_programs.REFERENCE)))
    compilers.stop()
    assert found["None"]["picked"] == "'xla'" and found["None"]["max_error"] < 0.02
    assert found["xla"]["same_program_as"] == "None" and found["xla"]["results"] == [ways.query_shape(step)] * 2
    assert "NotImplementedError" in found["cudnn"]["error"]


@pytest.mark.parametrize("is_ragged, is_shared", [(False, False), (True, True)])
def test_a_shared_prefix_is_timed_as_in_the_sweep(is_ragged, is_shared, on_cpu, monkeypatch):
    case = prefix.SharedPrefixStep(
        batch=3, prefix=11, suffix=8, num_heads=4, num_kv_heads=2, head_dim=8, ragged=is_ragged
    )
    monkeypatch.setattr(ways, "OURS", "xla")
    row = prefix.time_way(case, is_shared, "xla", 32)
    assert row["chain_us_median"] == 3.0 and row["max_error"] < 0.02


def test_a_lean_step_is_timed_as_in_the_sweep(on_cpu):
    case = lean.LeanStep(lengths=(9, 4), num_heads=4, num_kv_heads=2, head_dim=8)
    assert lean.time_way(case, "xla", 32)["chain_us_median"] == 3.0


def test_the_fastest_variant_counts():
    found = {"a": {"chain_us_median": 3.0}, "b": {"chain_us_median": 2.0, "x": 1}, "c": {"error": "none"}}
    times = {"a": 3.0, "b": 2.0, "c": None}
    assert chains.fastest(found) == {"chain_us_median": 2.0, "x": 1, "variant": "b", "variants_chain_us": times}
    assert chains.fastest({"c": {"error": "none"}}) == {"error": "none"}


def test_chains_are_whole_rounds():
    assert chains.chain_lengths(2) == (4, 36)
    assert chains.chain_lengths(25) == (25, 75)
    assert chains.chain_lengths(3, 16) == (6, 24)


def test_cudnn_takes_a_prefix_in_chunks(monkeypatch):
    """The chunks' states and the suffix's merge to the whole, also where chunks do not divide the prefix."""
    step = Step(**SMALL, lengths=(9, 4), gives_lengths=True, prefix=250)
    arrays = ways.draw_cache(step, ways._draw(step))
    query = jax.random.normal(jax.random.key(1), ways.query_shape(step), "bfloat16")
    expected = ways._prefix(query, *arrays.values(), *ways.extras(step), name="xla")
    attend = cudnn_ways.attend
    monkeypatch.setattr(
        cudnn_ways, "attend", lambda *args, **options: attend(*args, **options | {"implementation": "xla"})
    )
    found = cudnn_ways.with_prefix(step, 4, query, *cudnn_ways.chunked(step, 4, arrays), *ways.extras(step))
    assert jnp.abs(found.astype(jnp.float32) - expected.astype(jnp.float32)).max() < 0.02


def test_cudnn_has_as_many_pages_as_its_table_has_entries():
    step = Step(**SMALL, lengths=(9, 4), gives_lengths=True, page=4)
    arrays = ways.draw_cache(step, ways._draw(step))
    table, _ = ways.extras(step)
    key, value = cudnn_ways.padded_pages(step, arrays)
    assert key.shape == value.shape == (table.size, 4, 2, 8) and (key[:4] == arrays["key_pages"]).all()
    with pytest.raises(NotImplementedError, match="too much memory"):
        cudnn_ways.padded_pages(dataclasses.replace(step, lengths=(10**6,) * 200), arrays)


def test_flashinfers_ways_are_those_that_its_process_knows():
    names = {way for step in DRAWN for way in sweep_flashinfer.ways(step)}
    assert names == set(sweep_flashinfer_worker.RUNS)


def test_a_process_that_ends_is_an_error_of_its_way():
    worker = sweep_flashinfer.Worker(None)
    reply = worker.time(sweep_cases.table()[0], "flashinfer XQA", 32)  # there is no torch here, or no GPU
    worker.stop()
    assert "error" in reply


def test_without_a_gpu_the_cases_are_printed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_sweep.py", "--seed", "11", "--cases", "9", "--only", "dense"])
    assert bench_sweep.main() == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(" us  ")[1] for line in printed] == [DRAWN[0].title(), DRAWN[7].title()]
    assert json.dumps(DRAWN[0].row())


def test_tables_of_other_benchmarks_show_chains_and_say_what_does_not_pay(tmp_path, capsys):
    rows = [dict(batch=1, keys=64, num_heads=4, num_kv_heads=4, num_components=8, num_keys=16) for _ in range(3)]
    for row, way, us in zip(rows, ("sparq", "dense, cudnn", "dense, mosaic_gpu"), (10.0, 14.0, 16.0)):
        row |= dict(way=way, chain_us_median=us, device_us_median=us - 1, git_commit="0123456")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    benching.markdown(
        tmp_path / "rows.jsonl",
        bench_sparq._label,
        sparq.WAYS,
        sparq.SparqStep,
        ("gain", bench_sparq._gain),
    )
    title, _, line = capsys.readouterr().out.splitlines()
    assert title.endswith("| limit | share | gain | commit |")
    assert line.startswith("| 1 x 64, r 8, k 16 | 9.0 / 10.0 |")
    assert "% | 1.40" in line and "| 1.40: does not pay | 0123456 |" in line
    assert bench_sparq._gain({"sparq": 2.0, "sparq, no mean": 1.0, "dense, cudnn": 3.0}) == "3.00"


def test_steps_of_other_benchmarks_are_timed_in_chains(on_cpu):
    row = chains.time_steps(lambda query, key: query * key, jnp.ones(3), [(jnp.ones(3),), (jnp.ones(3),)], 32)
    assert (row["chain_us_median"], row["device_us_median"], row["caches"]) == (3.0, 1.0, 2)


def test_a_long_chain_is_dispatched_alone(monkeypatch):
    """A way that would take longer than all samples may gets fewer of them."""
    clock = iter((0.0, 1e-3, 1.0, 1.0 + 10 * chains.LONG_S, 2.0, 5.0))
    monkeypatch.setattr(chains.time, "perf_counter", lambda: next(clock))
    found = [chains.sampling(lambda: None, (4, 20), 32) for _ in range(3)]
    assert found == [(chains.IN_FLIGHT, 32), (1, 8), (1, chains.MIN_SAMPLES)]


def test_a_run_ends_where_the_librarys_kernel_fails_case_after_case(tmp_path, monkeypatch):
    """A step that a kernel does not take is no fault."""
    monkeypatch.setattr(sys, "argv", ["bench_sweep.py", "--out", str(tmp_path / "rows.jsonl")])
    sweep = bench_sweep.Sweep(bench_sweep._arguments())
    fault, refused = {"error": "JaxRuntimeError: no symbol"}, {"error": "NotImplementedError: no"}
    for fields in (fault, fault, refused, fault, {"chain_us_median": 1.0}, fault, fault):
        sweep._stop_if_ours_fails("mosaic_gpu", fields)
    sweep._stop_if_ours_fails("cudnn", fault)
    with pytest.raises(SystemExit, match="failed in 3 cases, one after another; the last: JaxRuntimeError: no symbol"):
        sweep._stop_if_ours_fails("mosaic_gpu", fault)
