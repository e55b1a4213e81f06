"""The committed rows: each says when, where and at which commit it was measured, but for older files."""

import json
import pathlib

import pytest

RESULTS = pathlib.Path(__file__).parents[1] / "docs" / "results"
ORIGIN = {"date", "host", "driver", "clock_sm_mhz", "clock_memory_mhz", "git_commit"}
# Files from before one writer added what a row lacks, and of runs on a CPU. docs/results/README.md says so.
INCOMPLETE = [
    "activations_2xh200/gpu_check.jsonl",
    "activations_4xh200/gpu_check.jsonl",
    "cache_error_smollm2/results.jsonl",
    "chain_h100/trace.jsonl",
    "checks_cpu/checks.jsonl",
    "checks_h100/sanitize.jsonl",
    "checks_h100/sanitize_merge.jsonl",
    "compare_1xh200/results.jsonl",
    "compare_2xh200_2processes/results.jsonl",
    "compare_4xh200_1process_pairs/results.jsonl",
    "compare_4xh200_4processes/results.jsonl",
    "compare_4xh200_4processes_fused/results.jsonl",
    "compare_4xh200_4processes_mosaic_gpu/results.jsonl",
    "compare_4xh200_4processes_pairs/results.jsonl",
    "compare_4xh200_4processes_spread/results.jsonl",
    "compare_8xh200_1process/results.jsonl",
    "compare_8xh200_8processes/results.jsonl",
    "eval_ablations_smollm2/results.jsonl",
    "eval_needle_smollm2/results.jsonl",
    "eval_smollm2/results.jsonl",
    "fused_2xh200/gpu_check.jsonl",
    "fused_4xh200/gpu_check.jsonl",
    "fused_4xh200/soak.jsonl",
    "fused_8xh200/soak.jsonl",
    "garbage_h200/before_and_after.jsonl",
    "garbage_h200/compare_2xh200.jsonl",
    "garbage_h200/gpu_check.jsonl",
    "gpu_check_8xh200/gpu_check.jsonl",
    "gpu_check_h200/gpu_check.jsonl",
    "layer_h200/trace.jsonl",
    "layer_h200/variants.jsonl",
    "lean_h100/columns.jsonl",
    "lean_h100/layouts.jsonl",
    "lean_h100/uncut.jsonl",
    "lean_h200/energy.jsonl",
    "lean_h200/figures.jsonl",
    "lean_h200/gpu_check.jsonl",
    "lean_h200/table.jsonl",
    "lean_h200/tuning.jsonl",
    "llama_h100/variants.jsonl",
    "llama_h200/append_trials.jsonl",
    "llama_h200/continuous_batching.jsonl",
    "llama_h200/decode_trials.jsonl",
    "llama_h200/eight_gpus_8processes.jsonl",
    "llama_h200/four_gpus_4processes.jsonl",
    "llama_h200/kernels_together.jsonl",
    "llama_h200/levels_7b.jsonl",
    "llama_h200/one_gpu.jsonl",
    "llama_h200/products_7b.jsonl",
    "llama_h200/profile_7b.jsonl",
    "llama_h200/samples_7b.jsonl",
    "llama_h200/two_gpus_2processes.jsonl",
    "llama_h200/xla_options_7b.jsonl",
    "prefix_h200/llama.jsonl",
    "prefix_h200/many_heads_trials.jsonl",
    "prefix_h200/merge_trials.jsonl",
    "prefix_h200/switch.jsonl",
    "prefix_h200/table.jsonl",
    "prefix_h200/table_with_flashinfer.jsonl",
    "reduce_2xh200/bench_reduce.jsonl",
    "reduce_4xh200/bench_reduce.jsonl",
    "reduce_4xh200/one_launch_trials.jsonl",
    "reduce_4xh200/steps.jsonl",
    "reduce_4xh200/transfers.jsonl",
    "reduce_8xh200/steps.jsonl",
    "ring_timeline_h100/ctas.jsonl",
    "slow_link/results.jsonl",
    "sparq_2xh200/gpu_check.jsonl",
    "sparq_h200/gpu_check.jsonl",
    "sparq_h200/kernels.jsonl",
]
FILES = sorted(str(path.relative_to(RESULTS)) for path in RESULTS.rglob("*.jsonl"))


@pytest.mark.parametrize("name", [name for name in FILES if name not in INCOMPLETE])
def test_rows_have_their_origin(name):
    for line in (RESULTS / name).read_text().splitlines():
        assert json.loads(line).keys() >= ORIGIN


def test_no_file_is_excused_that_need_not_be():
    assert set(INCOMPLETE) <= set(FILES)
    for name in INCOMPLETE:
        rows = [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]
        assert any(not row.keys() >= ORIGIN for row in rows), name
