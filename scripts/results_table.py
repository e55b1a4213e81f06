"""Prints the README's table from raw rows of `tree-attn compare`.

python3 scripts/results_table.py docs/results/compare_4xh200_4processes_fused/results.jsonl
"""

import json
import pathlib
import sys


def table(rows: list[dict]) -> str:
    """A Markdown table: latency, its ratio to the fastest of the same length, traffic, the ring's rate, memory."""
    lines = [
        "| keys | strategy | latency, us (p10 to p90) | over fastest | sent per device | GB/s (bare link) | memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        fastest = min(r["latency_us_median"] for r in rows if r["num_keys"] == row["num_keys"])
        is_ring = row["strategy"] != "tree"
        rate = f"{row['sent_gb_per_s']:.0f} ({row['neighbour_gb_per_s']:.0f})" if is_ring else ""
        cells = (
            f"{row['num_keys']:,}",
            row["strategy"].replace("_", " ") if is_ring else f"tree {row['reduction']}",
            f"{row['latency_us_median']:.0f} ({row['latency_us_p10']:.0f} to {row['latency_us_p90']:.0f})",
            f"{row['latency_us_median'] / fastest:.2f}",
            _sent(row),
            rate,
            f"{row['peak_memory_bytes_compiled'] / 1e6:,.0f} MB",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _sent(row: dict) -> str:
    """Counted in the compiled program, or by the formula where a kernel sends, which the program does not show."""
    is_counted = row["reduction"] != "fused"
    sent = row["bytes_sent_per_device_compiled" if is_counted else "bytes_sent_per_device_predicted"]
    return f"{sent / 1e6:,.3f} MB" + ("" if is_counted else " (formula)")


if __name__ == "__main__":
    print(table([json.loads(line) for line in pathlib.Path(sys.argv[1]).read_text().splitlines()]))
