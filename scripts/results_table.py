"""Prints tables of README.md and docs/results.md from raw rows of `compare`, `bench_reduce.py` and `bench llama`.

    python3 scripts/results_table.py --keys 640000 docs/results/compare_8xh200_8processes/results.jsonl
    python3 scripts/results_table.py docs/results/reduce_8xh200/steps.jsonl
    python3 scripts/results_table.py docs/results/reduce_2xh200/ragged.jsonl
    python3 scripts/results_table.py docs/results/llama_h200/{eight_gpus_8processes,one_gpu}.jsonl
    python3 scripts/results_table.py docs/results/llama_h200/{samples,levels}_7b.jsonl
    python3 scripts/results_table.py docs/results/chain_h100/{tokens,peer}.jsonl

Every line names the commit that its row was measured at.
"""

import argparse
import pathlib
import re

from bench_reduce import HEAD_DIM

from tree_attn.measure.rows import read, strategy_label
from tree_attn.measure.steps.step import READ_GB_PER_S


def compare_table(rows: list[dict]) -> str:
    """Returns a Markdown table: latency, its ratio to the fastest of the same length, traffic, link rate, memory."""
    lines = [
        "| keys | strategy | latency, us (p10 to p90) | over fastest | sent per device | GB/s (bare link) | memory "
        "| commit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    rows = [row for row in rows if row.get("error") is None]
    for row in rows:
        fastest = min(r["latency_us_median"] for r in rows if r["num_keys"] == row["num_keys"])
        is_ring = row["strategy"] != "tree"
        rate = f"{row['sent_gb_per_s']:.0f} ({row['neighbour_gb_per_s']:.0f})" if is_ring else ""
        cells = (
            f"{row['num_keys']:,}",
            strategy_label(row["strategy"], row["reduction"]) + _setting(row),
            f"{row['latency_us_median']:.0f} ({row['latency_us_p10']:.0f} to {row['latency_us_p90']:.0f})",
            f"{row['latency_us_median'] / fastest:.2f}",
            _sent(row),
            rate,
            f"{row['peak_memory_bytes_compiled'] / 1e6:,.0f} MB",
            row["git_commit"][:7],
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def steps_table(rows: list[dict]) -> str:
    """Returns a Markdown table: steps by keys per GPU, without a reduction and with each, and what "fused" adds.

    The share is what the step without a reduction reaches of reading K and V at the datasheet's rate.
    """
    rows = [row for row in rows if row["what"] == "step"]  # others are of exchanges alone
    reductions = list(dict.fromkeys(row["reduction"] for row in rows))
    named = ["local only" if name == "none" else name or "picked" for name in reductions]
    lines = [
        "| " + " | ".join(["GPUs", "keys per GPU", *named, "fused adds", "reading K and V", "share", "commit"]) + " |",
        "|---" * (len(named) + 6) + "|",
    ]
    for setting in dict.fromkeys((row["n_devices"], row["keys_per_device"], row["git_commit"][:7]) for row in rows):
        gpus, keys, commit = setting
        same = [row for row in rows if (row["n_devices"], row["keys_per_device"], row["git_commit"][:7]) == setting]
        us = {row["reduction"]: row["us_median"] for row in same}
        limit = 4 * keys * same[0]["heads"] * HEAD_DIM / READ_GB_PER_S / 1e3
        shown = [*(us[name] for name in reductions), us["fused"] - us["none"], limit]
        share = f"{limit / us['none']:.0%}"
        lines.append("| " + " | ".join([f"{gpus}", f"{keys:,}", *(f"{x:,.1f}" for x in shown), share, commit]) + " |")
    return "\n".join(lines)


def ragged_table(rows: list[dict]) -> str:
    """Returns a Markdown table: steps of several sequences of unlike lengths, by each reduction.

    The last column but one is the time of the picked reduction over that of the fastest by name.
    """
    reductions = [name for name in ("allreduce", "gather", "fused", None) if any(r["reduction"] == name for r in rows)]
    named = [name or "picked" for name in reductions]
    lines = [
        "| "
        + " | ".join(["GPUs", "sequences", "keys", *named, "reading K and V", "picked over fastest", "commit"])
        + " |",
        "|---" * (len(named) + 6) + "|",
    ]
    for batch in dict.fromkeys(row["batch"] for row in rows):
        same = [row for row in rows if row["batch"] == batch]
        us, first = {row["reduction"]: row["us_median"] for row in same}, same[0]
        elements = 2 * first["num_keys"] * first["kv_heads"] * HEAD_DIM / first["n_devices"]
        times = [*(us[name] for name in reductions), 2 * elements / READ_GB_PER_S / 1e3]
        cells = [f"{first['n_devices']}", f"{batch}", f"{first['num_keys']:,}", *(f"{x:,.1f}" for x in times)]
        ratio = us[None] / min(x for name, x in us.items() if name is not None)
        lines.append("| " + " | ".join([*cells, f"{ratio:.2f}", first["git_commit"][:7]]) + " |")
    return "\n".join(lines)


# Tree Attention, Table 1: prefill and 10 tokens of Llama 3.1 8B by tree on 8 H100s, in seconds, by context.
PAPERS_S = {32_000: 0.60, 64_000: 1.08, 128_000: 2.68, 256_000: 2.89}


def llama_table(rows: list[dict]) -> str:
    """Returns a Markdown table: prefill, a token's time, its roofline, the paper's time on other hardware, memory."""
    from tree_attn.commands.bench.roofline import roofline_ms  # these load a model's code, which takes seconds
    from tree_attn.commands.figures.rows import device_kind
    from tree_attn.models.llama.presets import preset

    lines = [
        "| GPUs | context | attention | new tokens | prefill, s | ms per token (p10 to p90) | roofline, ms | over it "
        "| prefill + 10, s | the paper's, 8 H100 | GB predicted (measured) | commit |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        median = row["per_token_ms_median"]
        roofline = roofline_ms(row, preset(row["config"]), device_kind(row))  # rows of all days refer to the same rates
        is_papers = row["config"] == "llama-3.1-8b" and row["batch"] == 1
        papers = PAPERS_S.get(row["context"] // 1024 * 1000) if is_papers else None
        processes = re.search(r"--num-processes (\d+)", row["command"])
        measured = row["measured_bytes_per_device"]
        cells = (
            f"{row['n_devices']}" + (f" in {processes[1]} processes" if processes else ""),
            _context(row),
            row["attention"] + (f", {row['cache_dtype']}" if row.get("cache_dtype") else ""),
            row["new_tokens"],
            f"{row['prefill_s']:.2f}",
            f"{median:.2f} ({row['per_token_ms_p10']:.2f} to {row['per_token_ms_p90']:.2f})",
            f"{roofline:.2f}",
            f"{median / roofline:.2f}",
            f"{row['prefill_plus_10_tokens_s']:.2f}",
            "" if papers is None else f"{papers:.2f}",
            f"{row['predicted_bytes_per_device'] / 1e9:.1f}" + (f" ({measured / 1e9:.1f})" if measured else ""),
            row["git_commit"][:7],
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def token_table(rows: list[dict]) -> str:
    """Returns a Markdown table: a token's time by each of our ways, by the peer's fastest, and reading its bytes."""
    lines = [
        "| model | GPUs | context | way | tokens a call | ms per token (p10 to p90) | reading, ms | share | commit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    models = list(dict.fromkeys(row["config"] for row in rows))
    case = lambda row: (models.index(row["config"]), row["n_devices"], row["context"], row["batch"])
    peers: dict[tuple, dict] = {}
    for row in rows:
        if "way" in row:
            peers[case(row)] = min(row, peers.get(case(row), row), key=lambda row: row["per_token_ms_median"])
    for row in sorted((*(row for row in rows if "way" not in row), *peers.values()), key=case):
        median, limit = row["per_token_ms_median"], row.get("floor_ms") or row["roofline_ms"]
        cells = (
            row["config"],
            row["hardware"].replace("NVIDIA ", "").replace(" 80GB HBM3", ""),
            _context(row),
            row.get("way") or f"products {row['products']}, JAX {row['versions']['jax']}",
            row.get("tokens_per_dispatch", 1),
            f"{median:.2f} ({row['per_token_ms_p10']:.2f} to {row['per_token_ms_p90']:.2f})",
            f"{limit:.2f}",
            f"{limit / median:.0%}",
            row["git_commit"][:7],
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _context(row: dict) -> str:
    """Returns the tokens before the new ones, and how many sequences have them."""
    problem_tokens = row.get("problem_tokens")
    levels = f" + {problem_tokens} a {'problem' if row['levels'] == 2 else 'sequence'}" if problem_tokens else ""
    return f"{row['context']:,}{levels}" + (f", {row['batch']:,} sequences" if row["batch"] > 1 else "")


def _setting(row: dict) -> str:
    """Returns the name of NCCL's setting, where a row was measured under several."""
    return f", NCCL {row['nccl_setting']}" if row.get("nccl_setting") else ""


def _sent(row: dict) -> str:
    """Returns megabytes counted in the compiled program, or by the formula where a kernel sends them itself."""
    is_counted = row["reduction"] != "fused"
    sent = row["bytes_sent_per_device_compiled" if is_counted else "bytes_sent_per_device_predicted"]
    return f"{sent / 1e6:,.3f} MB" + ("" if is_counted else " (formula)")


def main() -> None:
    """Reads the rows of all files and prints the table that fits their fields."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=pathlib.Path, help="JSON Lines, as the commands write them")
    parser.add_argument("--keys", type=int, help="rows of `compare` with this many keys only")
    args = parser.parse_args()
    rows = [row for path in args.files for row in read(path)]
    rows = [row for row in rows if args.keys in (None, row.get("num_keys"))]
    table_of = {"per_token_ms_median": llama_table, "keys_per_device": steps_table, "strategy": compare_table}
    if any("way" in row and "per_token_ms_median" in row for row in rows):  # of the peer
        print(token_table(rows))
        return
    if rows[0].get("what") == "ragged":
        print(ragged_table(rows))
        return
    print(next(make for field, make in table_of.items() if field in rows[0])(rows))


if __name__ == "__main__":
    main()
