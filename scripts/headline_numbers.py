"""Prints the five numbers with which docs/results.md opens, from committed rows.

    python3 scripts/headline_numbers.py

A row names its commit and command. Its date is the row's own, or that of the README of its folder.
"""

import re
import statistics

from concept_numbers import PEERS, READ, RESULTS, SHARES, STRATEGIES, rows_of, shares_of_the_limit

from tree_attn.commands.bench.roofline import roofline_ms
from tree_attn.commands.figures.rows import device_kind
from tree_attn.commands.units import length
from tree_attn.models.llama.presets import preset


def main() -> None:
    """Prints the table."""
    print("| number | of what | limit | beside it | rows | commit | date | command |")
    print("|---|---|---|---|---|---|---|---|")
    for make in (step, reduction, share, token, samples):
        print("| " + " | ".join(make()) + " |")


def step(name: str = "compare_8xh200_8processes/results.jsonl", num_keys: int = 640_000) -> list[str]:
    """Returns the line of a decoding step by tree, with the ring beside it."""
    rows = [row for row in rows_of(name) if row["num_keys"] == num_keys]
    ours, ring = (row_of(rows, *STRATEGIES[way]) for way in ("fused", "ring"))
    us, ring_us = ours["latency_us_median"], ring["latency_us_median"]
    limit = 4 * num_keys * ours["num_kv_heads"] * ours["head_dim"] / ours["n_devices"] / READ * 1e6
    what = f"a decoding step over {length(num_keys)} keys by tree, `fused`, on {gpus(ours)}"
    compared = f"the overlapped ring: {ring_us:,.0f} us, {ring_us / us:.0f} times as long"
    return [f"{us:,.0f} us", what, f"{limit:,.1f} us", compared, *origin(name, ours)]


def reduction(name: str = "reduce_8xh200/steps.jsonl", keys: int = 80_000) -> list[str]:
    """Returns the line of what a reduction adds to a step, with the others beside it."""
    rows = {row["reduction"]: row for row in rows_of(name) if row["keys_per_device"] == keys}
    added = {way: row["us_median"] - rows["none"]["us_median"] for way, row in rows.items() if way}
    what = f"what `fused` adds to a step with {length(keys)} keys on each of {gpus(rows['fused'])}"
    compared = ", ".join(f"`{way}`: {added[way]:.1f} us" for way in ("gather", "allreduce"))
    return [f"{added['fused']:.1f} us", what, "", compared, *origin(name, rows["fused"])]


def share() -> list[str]:
    """Returns the line of the median share of the read rate, with the best peer's beside it."""
    name, rows = SHARES, rows_of(SHARES)
    found = shares_of_the_limit()
    curves = found["curves"]
    ours = [share for share in curves.get("default", curves["mosaic_gpu"]) if share]
    peers = zip(*(curve for way, curve in curves.items() if way in PEERS))
    best = statistics.median(max(share for share in shares if share) for shares in peers)
    what = f"median share of {READ / 1e12:.1f} TB/s over {len(ours)} steps on {gpus(rows[0])}, {found['time']}"
    compared = f"the best of cuDNN and FlashInfer in each step: {best:.0%}"
    return [f"{statistics.median(ours):.0%}", what, "100%", compared, *origin(name, *rows)]


def token(name: str = "layer_h200/four_gpus.jsonl", context: int = 131_072) -> list[str]:
    """Returns the line of a Llama's token after a long prompt, with the peer on as many GPUs beside it."""
    (row,) = [row for row in rows_of(name) if row["context"] == context]
    peers = [one for one in rows_of("layer_h200/peer_gpus.jsonl") if one["context"] == context]
    peer = min(one["per_token_ms_median"] for one in peers if one["n_devices"] == row["n_devices"])
    what = f"a token of Llama 3.1 8B after {length(context)} tokens, by tree on {gpus(row)}"
    return [*ms_and_limit(row, what), f"PyTorch with FlashInfer: {peer:.2f} ms", *origin(name, row)]


def samples(name: str = "llama_h200/samples_7b.jsonl", context: int = 8192, batch: int = 256) -> list[str]:
    """Returns the line of a token of many samples of one prompt, with that of one sample beside it."""
    rows = {row["batch"]: row for row in rows_of(name) if row["context"] == context}
    what = (
        f"a token of each of {batch} samples of a prompt of {length(context)} tokens, Llama 2 7B, {gpus(rows[batch])}"
    )
    compared = f"one sample: {rows[1]['per_token_ms_median']:.2f} ms"
    return [*ms_and_limit(rows[batch], what), compared, *origin(name, rows[batch])]


def ms_and_limit(row: dict, what: str) -> list[str]:
    """Returns the time of a token, what it is of, and its limit."""
    limit = roofline_ms(row, preset(row["config"]), device_kind(row))
    return [f"{row['per_token_ms_median']:.2f} ms", what, f"{limit:.2f} ms"]


def row_of(rows: list[dict], strategy: str, reduction: str | None) -> dict:
    """Returns the one row of a strategy."""
    (row,) = [row for row in rows if (row["strategy"], row["reduction"]) == (strategy, reduction)]
    return row


def gpus(row: dict) -> str:
    """Returns the hardware of a row: "8 x H200"."""
    return row["hardware"].replace("NVIDIA ", "")


def origin(name: str, row: dict, *others: dict) -> list[str]:
    """Returns a link to a file of rows, their commits, and the first one's date and command."""
    readme = (RESULTS / name).with_name("README.md").read_text()
    date = row.get("date") or re.search(r"\*\*When:\*\* (\d{4}-\d\d-\d\d)", readme)[1]
    commits = ", ".join(dict.fromkeys(one["git_commit"][:7] for one in (row, *others)))
    command = re.sub(r" --worker \S+", " --process-per-device", row["command"])
    command, _, is_one_of_several = command.partition(" --coordinator-address")
    command = "`" + re.sub(r"--out \S+", "--out OUT", command) + "`" + (", once per GPU" if is_one_of_several else "")
    return [f"[{name}](results/{name})", commits, date[:10], command]


if __name__ == "__main__":
    main()
