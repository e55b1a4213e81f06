"""`tree-attn bench llama`: its rows, which a rerun goes on from, its table, and its errors. Times are not tested."""

import argparse
import contextlib
import json
import re
import statistics

import jax
import pytest

from tree_attn import cli
from tree_attn.commands import bench as bench_command
from tree_attn.commands import phases, session
from tree_attn.commands.bench import report, room, timing
from tree_attn.measure import provenance
from tree_attn.models.llama import Generator, LlamaConfig, parameters, presets
from tree_attn.models.llama.generation.programs import Programs

SIZES = dict(hidden_size=16, intermediate_size=32, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=64)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(presets.PRESETS, "tiny", LlamaConfig(num_layers=2, max_position=32, **SIZES))


def bench(*options):
    few = ["--new-tokens", "5", "--prefill-trials", "1"]
    return ["bench", "llama", "--config", "tiny", "--devices", "1", "--context", "40", *few, *options]


def test_rows_and_a_rerun_that_times_only_what_is_missing(tmp_path, capsys):
    arguments = bench("--out", str(tmp_path))
    assert cli.main([*arguments, "--attention", "tree"]) == 0
    printed = capsys.readouterr()
    assert "and 10" in printed.out and "these times say nothing about GPUs" in printed.out
    # Of a CPU there is neither a measured memory nor a roofline.
    assert "predicted" in printed.out and "measured" not in printed.out and "unknown" not in printed.out
    first = (tmp_path / "results.jsonl").read_text()
    assert cli.main([*arguments, "--attention", "tree,single", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["attention"], row["reduction"]) for row in rows] == [("tree", "gather"), ("single", None)]
    assert (tmp_path / "results.jsonl").read_text().startswith(first)
    for row in rows:
        assert set(provenance.ORIGIN) <= row.keys()
        assert row["prefill_s"] > 0 and row["per_token_ms_p10"] <= row["per_token_ms_median"] <= row["per_token_ms_p90"]
        assert row["cache_bytes_per_device"] == 2 * 2 * 2 * 8 * 4 * 40  # K and V, layers, heads, head dim, float32
        per_layer = 2 * (4 + 2) * 8 * 16 + 3 * 16 * 32  # query, output, key and value; gate, up and down
        assert row["weights_bytes_per_device"] == 4 * (2 * per_layer + 64 * 16 + (2 * 2 + 1) * 16)  # head and norms too
        assert row["roofline_ms"] is None  # of a CPU
        predicted = row["predicted"]
        assert predicted["weights"] == row["weights_bytes_per_device"] + 4 * 64 * 16  # a token reads one row of these
        assert predicted["cache"] >= 2 * 2 * 2 * 8 * 4 * 45 and row["measured_bytes_per_device"] is None  # of a CPU
        compiled = max(row["peak_bytes_compiled"].values())
        assert compiled <= row["predicted_bytes_per_device"] <= compiled + 16  # arguments that XLA finds not to be read


def test_the_table_has_a_column_for_what_was_measured_and_one_rule_of_units(capsys):
    row = dict(config="tiny", hardware="1 x NVIDIA H200", weights="spread", context=4096, attention="single", batch=1)
    row |= dict(reduction=None, prefill_s=0.0123, prefill_plus_10_tokens_s=1.5, tokens_per_s=1e3, roofline_ms=0.09)
    row |= {f"per_token_ms_{name}": 1.25 for name in ("median", "p10", "p90")}
    row |= dict(predicted_bytes_per_device=333_181_333, measured_bytes_per_device=None)
    report.print_rows([row, row | {"context": 8192, "measured_bytes_per_device": 340_000_000}], as_json=False)
    lines = [re.split(" {2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert ["4,096, single", "12.3 ms", "1.25 ms", "1.50 s", "90.0 us", "333 MB", "-"] in lines
    assert ["8,192, single", "12.3 ms", "1.25 ms", "1.50 s", "90.0 us", "333 MB", "340 MB"] in lines
    assert not any("GPUs" in line for (line, *_) in lines)
    longest = dict(context=131_072, attention="tree", reduction="hierarchical", batch=1024, tokens_per_s=123_456.0)
    report.print_rows([row | longest | {"measured_bytes_per_device": 1}], as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[1:-1])) <= 80 and any("90.0 us" in line for line in lines)
    assert any(line.startswith(" 131,072 x 1,024, tree hierarchical") and "123,456" in line for line in lines)


def test_phases_name_the_prefill(tmp_path, monkeypatch):
    titles = []
    monkeypatch.setattr(session, "phase", lambda title, *_: titles.append(title) or phases.phase(title))
    assert cli.main(bench("--attention", "single", "--json")) == 0
    assert [title for title in titles if "prefill" in title] == [
        f"single: {phase}, prefill of 40 tokens" for phase in ("warming up", "timing")
    ]


def test_a_prefill_has_trials_and_medians_are_over_32_calls(capsys):
    """By default 257 tokens: one of the prefill, and 32 calls of the 8 that a call makes on GPUs."""
    parser = argparse.ArgumentParser()
    bench_command.add_arguments(parser)
    defaults = parser.parse_args(["llama"])
    assert (defaults.new_tokens - 1) / 8 == 32 and defaults.prefill_trials == 3
    assert cli.main(bench("--attention", "single", "--json", "--prefill-trials", "3")) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert len(row["prefill_trials_s"]) == 3 and row["prefill_s"] == statistics.median(row["prefill_trials_s"])


def test_samples_share_their_prompt(tmp_path, capsys):
    arguments = bench("--out", str(tmp_path), "--attention", "single", "--samples", "1,70", "--json")
    assert cli.main(arguments) == 0
    one, many = json.loads(capsys.readouterr().out)["rows"]
    assert (one["batch"], many["batch"]) == (1, 70)
    bytes_per_token = one["cache_bytes_per_device"] / 40
    assert many["cache_bytes_per_device"] == (39 + 70) * bytes_per_token  # the prompt once, a token of its own for each
    assert many["predicted"]["cache"] < 70 * one["predicted"]["cache"] / 2


def test_without_sharing_each_sequence_holds_the_prompt(tmp_path, capsys):
    """And each trial is followed by ten tokens, or as many as there are."""
    options = ["--samples", "70", "--prefill-trials", "2", "--out", str(tmp_path), "--json"]
    assert cli.main(bench(*options, "--no-share-prefix", "--attention", "single")) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["share_prefix"] is False and row["cache_bytes_per_device"] == 70 * 2 * 2 * 2 * 8 * 4 * 40
    trials = row["prefill_plus_10_tokens_trials_s"]
    assert len(trials) == 2 and all(map(float.__gt__, trials, row["prefill_trials_s"]))


@pytest.mark.slow
def test_without_attention_no_key_is_read(capsys):
    assert cli.main(bench("--samples", "70", "--attention", "none", "--json")) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["attention"] == "none" and row["cache_bytes_per_device"] == 0
    assert row["roofline_ms"] is None and row["weights_bytes_per_device"] > 0


def test_no_attention_gives_the_queries_back():
    attention = timing.no_attention(session.Place(devices=(jax.devices()[0],)).sharding(presets.PRESETS["tiny"]))
    assert attention.decode("query", None, 0, scale=1.0) == attention.prefill("query", None, None, None) == "query"
    assert attention.shares_prefixes and attention.num_shards == 1


@pytest.mark.slow
def test_two_prefix_levels_of_sharing_beside_one(capsys):
    options = ["--problems", "2", "--problem-tokens", "35", "--samples", "64", "--levels", "2,1", "--json"]
    assert cli.main(bench(*options, "--attention", "single")) == 0
    two, one = json.loads(capsys.readouterr().out)["rows"]
    assert (two["levels"], one["levels"], two["batch"], one["batch"]) == (2, 1, 128, 128)
    bytes_per_token = 2 * 2 * 2 * 8 * 4
    assert (
        two["cache_bytes_per_device"] == (40 + 2 * 34 + 128) * bytes_per_token
    )  # a problem's last token is each's own
    assert one["cache_bytes_per_device"] == (40 + 128 * 35) * bytes_per_token


def test_what_warms_up_is_the_program_that_is_timed(monkeypatch, capsys):
    """A few new tokens need smaller caches than 60, and so would be another program. Other ranks see every step end."""
    ended, compiled, lower = [], [], Programs._lower_decode
    monkeypatch.setattr(timing, "steps", lambda: contextlib.nullcontext(lambda: ended.append(True)))
    monkeypatch.setattr(Programs, "_lower_decode", lambda *args: compiled.append(args) or lower(*args))
    assert cli.main([*bench("--attention", "single", "--json"), "--new-tokens", "60"]) == 0
    assert len(compiled) == 1
    assert len(ended) == 3 + 60


@pytest.mark.parametrize("phase", ["tracing", "compiling"])
def test_cases_before_one_that_fails_are_timed(tmp_path, monkeypatch, phase):
    lower = Generator.lower

    def fail():
        raise RuntimeError(f"no memory while {phase}")

    def lower_few(generator, prompts, *args, **options):
        if len(prompts) < 3:
            return lower(generator, prompts, *args, **options)
        return fail() if phase == "tracing" else fail

    monkeypatch.setattr(Generator, "lower", lower_few)
    with pytest.raises(RuntimeError, match=f"no memory while {phase}"):
        cli.main(bench("--attention", "single", "--samples", "1,2,3,4", "--out", str(tmp_path)))
    rows = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert [row["batch"] for row in rows] == [1, 2]


@pytest.mark.slow
def test_weights_on_every_device_and_several_tokens_a_call(capsys):
    options = ["--replicate-weights", "--tokens-per-dispatch", "2", "--unroll-layers", "--attention", "sparq", "--json"]
    options += ["--prefill-chunk", "16", "--num-components", "3", "--num-keys", "8", "--cache-dtype", "float8_e4m3fn"]
    options += ["--no-warm-up"]
    assert cli.main([*bench(*options), "--devices", "2"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["sparq"]["num_components"], row["sparq"]["num_keys"], row["sparq"]["local_window"]) == (3, 8, 2)
    assert row["cache_bytes_per_device"] == (40 * 3 + 2 * 8 * 8) * 2 * 2 // 2  # a byte each; layers, heads, devices
    assert (row["weights"], row["tokens_per_dispatch"], row["prefill_chunk"]) == ("replicated", 2, 16)
    assert row["warm_up"] is False
    per_layer = 2 * (4 + 2) * 8 * 16 + 3 * 16 * 32
    assert row["weights_bytes_per_device"] == 4 * (2 * per_layer + 64 * 16 + (2 * 2 + 1) * 16)


@pytest.mark.parametrize(
    "options, said",
    [
        (["--config", "llama-9"], "--config must be a published shape such as llama-"),
        (["--config", "nope"], "--config must be a published shape such as llama-2-70b, llama-3-70b, "),
        (["--out", __file__], f"--out must be a folder, got {__file__}"),
        (["--context", "1k"], "--context must be integers of at least 1, separated by commas, got '1k'"),
        (["--samples", "0"], "--samples must be integers of at least 1, separated by commas, got '0'"),
        (["--problems", "2", "--attention", "tree"], "--problem-tokens must be at least 1, got 0"),
        (["--levels", "1", "--attention", "tree"], "--levels 1 needs --problem-tokens"),
        (["--levels", "3"], "--levels must be one of 1, 2, got 3"),
        (["--samples", "2", "--attention", "ring"], "attention='ring' has no form for shared prefixes"),
        (["--cache-dtype", "float32"], "--cache-dtype must be one of 'float8_e4m3fn', 'int8', got 'float32'"),
        (["--prefill-chunk", "9", "--devices", "2"], "--prefill-chunk must be a multiple of 2 shards, got 9"),
        (
            ["--prefill", "star"],
            "--prefill must be one of None, 'ring', 'ring_joint', 'ring_two_way', 'ulysses', got 'star'",
        ),
        (
            ["--config", "smollm2-135m", "--prefill", "ulysses", "--devices", "2", "--attention", "tree"],
            "that the 2 devices of its first axis divide, and KV heads that they divide or that divide them, got N=9",
        ),
        (["--new-tokens", "1"], "--new-tokens must be at least 2, got 1"),
        (["--prefill-trials", "0"], "--prefill-trials must be at least 1, got 0"),
        (["--attention", "star"], "--attention must be one of 'tree', 'ring', 'single', 'sparq', 'none', got 'star'"),
        (["--attention", "tree,sparq"], "--attention sparq needs --num-components and --num-keys, got neither"),
        (
            ["--attention", "tree,sparq", "--num-components", "3", "--num-keys", "8", "--cache-dtype", "int8"],
            "--cache-dtype='int8': --attention='sparq' takes no scales; float8_e4m3fn needs none",
        ),
        (["--selection", "global"], "--selection: --attention must name sparq, got tree,ring"),
        (["--attention", "single", "--devices", "2"], "attention='single' keeps all keys on one device"),
        (["--reduction", "star"], "reduction must be one of"),
    ],
)
def test_a_wrong_request_is_one_line(capsys, options, said):
    assert cli.main(bench(*options)) == 2
    assert said in capsys.readouterr().err


def test_a_context_beyond_the_positions_is_said_and_timed(capsys):
    args = cli._parser(["bench"]).parse_args(bench())
    with phases.command(is_quiet=False):
        room.check(args, presets.preset("tiny"), session.Place(devices=tuple(jax.devices()[:1])), [8, 40])
        room.check(args, presets.preset("tiny"), session.Place(devices=tuple(jax.devices()[:1])), [8, 27])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tiny was trained on 32 positions: 40 tokens are timed all the same")


def test_a_context_that_no_memory_holds_is_refused_before_anything_is_made(capsys, monkeypatch):
    monkeypatch.setattr(parameters, "random", None)
    assert cli.main(bench("--context", "40,10000000000")) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "--context 10000000000 needs" in error and "for keys and values, and 1 device can hold" in error


def test_a_case_that_needs_more_than_a_device_has_is_refused_before_it_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(room, "device_memory_bytes", lambda _: 2_000_000)
    options = ["--attention", "single", "--no-share-prefix", "--samples", "1,300", "--out", str(tmp_path), "--json"]
    assert cli.main(bench(*options)) == 2
    printed = capsys.readouterr()
    error = printed.err.splitlines()[-1]
    assert re.search(r"single, 40 tokens x 300 needs [.\d]+ MB on each device, which can hold 2 MB: take fewer", error)
    (row,) = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert row["batch"] == 1 and json.loads(printed.out)["rows"] == [row]


def test_a_context_beyond_a_models_own_positions_is_refused_before_it_is_read(tiny_checkpoint, capsys):
    assert cli.main(bench("--model", "any")) == 0
    capsys.readouterr()
    assert cli.main(bench("--model", "any", "--context", "40,64")) == 2
    assert "--context must be at most 59 for any, which has 64 positions" in capsys.readouterr().err
