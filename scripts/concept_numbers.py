"""Numbers of the figures of docs/concepts and docs/kernels: from committed rows, or by formula."""

import json
import math
import pathlib
import re

import numpy as np

from tree_attn.commands.units import length
from tree_attn.cost import datasheets
from tree_attn.placement import Shard

RESULTS = pathlib.Path(__file__).parent.parent / "docs" / "results"
H200 = datasheets.rates("NVIDIA H200")
READ, PRODUCTS = H200["read_bytes_per_s"], H200["product_flops_per_s"]


def rows_of(name: str) -> list[dict]:
    """Returns the rows of a file of docs/results that hold a measurement."""
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def source(hardware: str, rows: list[dict]) -> str:
    """Returns the hardware and the commits of rows, for a caption."""
    commits = sorted({row["git_commit"][:7] for row in rows})
    end = "" if hardware.endswith("\n") else "; "
    return f"{hardware}{end}rows of commit{'s' * (len(commits) > 1)} {', '.join(commits)}"


def rounding_of_lse() -> dict:
    """Returns the error of exp(lse) where lse is rounded to the nearest, by dtype: exp(half a step) - 1."""
    sizes = [2.0**i for i in range(8)]
    bits = {"bfloat16": 8, "float16": 11, "float32": 24}  # of significance
    errors = {dtype: [math.expm1(2.0 ** (math.floor(math.log2(x)) - n)) for x in sizes] for dtype, n in bits.items()}
    return {"lse": sizes, "of_out": 2.0**-9, **errors}


def reached_products() -> dict:
    """Returns products a byte and TFLOP/s of dense steps, and of steps with a shared prefix."""
    dense = [
        row
        for row in rows_of("lean_h200/table.jsonl")
        if row["implementation"] == "mosaic_gpu" and row["batch"] == 1 and row["max_keys"] > 50_000
    ]
    shared = [row for row in rows_of("prefix_h200/table.jsonl") if row["way"] == "mosaic_gpu"]
    points: dict[str, list] = {"dense": [], "shared": []}
    labels = []
    for row in dense:
        group = row["num_heads"] // row["num_kv_heads"]
        flops = 4 * row["sum_keys"] * row["num_heads"] * row["head_dim"]
        points["dense"].append((group, flops / row["device_us_median"] / 1e6, row["git_commit"]))
        labels.append((group, points["dense"][-1][1], f"{group} query head{'s' * (group > 1)}\na KV head"))
    for row in shared:
        batch, prefix, suffix = row["batch"], row["prefix"], row["suffix"]
        flops = 4 * batch * (prefix + suffix) * row["num_heads"] * row["head_dim"]
        num_bytes = 4 * (prefix + batch * suffix) * row["num_kv_heads"] * row["head_dim"]
        points["shared"].append((flops / num_bytes, flops / row["device_us_median"] / 1e6, row["git_commit"]))
        labels.append((*points["shared"][-1][:2], f"{batch:,} after {length(prefix)}"))
    limits = {"read": READ / 1e12, "products": PRODUCTS / 1e12, "corner": PRODUCTS / READ}
    return {**points, **limits, "labels": labels, "source": source("one H200, bfloat16, mosaic_gpu", dense + shared)}


def parts_of_a_step() -> dict:
    """Returns what a step on eight GPUs is made of, in the order of time: kernels, gaps, and the reduction."""
    steps = rows_of("reduce_8xh200/steps.jsonl")
    us = {(row["keys_per_device"], row["reduction"]): row["us_median"] for row in steps}
    bars = []
    for keys in sorted({row["keys_per_device"] for row in steps})[:2]:
        limit = 4 * keys * steps[0]["heads"] * 128 / READ * 1e6
        alone = next(row for row in steps if (row["keys_per_device"], row["reduction"]) == (keys, "none"))
        attention, merge = (alone["kernels"][f"lean_{name}_mosaic_gpu_kernel"][0] for name in ("attention", "merge"))
        for reduction in ("fused", "gather", "allreduce"):
            parts = {
                "reading at the limit": limit,
                "rest of that kernel": attention - limit,
                "its merge": merge,
                "gaps, other kernels": us[keys, "none"] - attention - merge,
                "the reduction adds": us[keys, reduction] - us[keys, "none"],
            }
            bars.append({"name": f"{length(keys)} keys a GPU\n{reduction}", "parts": parts})
    return {"bars": bars, "source": source("eight H200s, bfloat16, batch 1, 16 heads of 128", steps)}


def steps_over_gpus(lengths: tuple[int, ...] = (81_920, 640_000)) -> dict:
    """Returns the time of a step by tree and by the overlapped ring, over GPUs, for each number of keys.

    A point is (GPUs, microseconds, whether the program named NCCL's setting for transfers). Of several rows the newest
    folder's counts.
    """
    folders = ("compare_1xh200", "compare_2xh200_2processes", "compare_8xh200_8processes")
    folders += ("compare_4xh200_4processes_pairs", "compare_4xh200_4processes_spread")
    rows = [row for folder in folders for row in rows_of(f"{folder}/results.jsonl") if row["error"] is None]
    panels, shown = [], []
    for num_keys in lengths:
        curves = {}
        for name, way in STRATEGIES.items():
            of_way = [row for row in rows if row["num_keys"] == num_keys and (row["strategy"], row["reduction"]) == way]
            newest = {row["n_devices"]: row for row in of_way}
            shown += newest.values()
            curves[name] = [(p, row["latency_us_median"], "nccl" in row) for p, row in sorted(newest.items())]
        row = shown[-1]
        one = 4 * num_keys * row["num_kv_heads"] * row["head_dim"] / READ * 1e6
        panels.append({"keys": num_keys, "limit": [(p, one / p) for p, _, _ in curves["ring"]], "curves": curves})
    what = "H200s of one host, bfloat16, batch 1, 16 heads of 128"
    return {"panels": panels, "source": source(what, shown) + "\nhollow: NCCL's own settings for transfers"}


STRATEGIES = {
    "ring": ("ring_overlapped", None),
    "gather": ("tree", "gather"),
    "fused": ("tree", "fused"),
}


def fullest_device(capacity: int = 131_072, num_shards: int = 8, block: int = 1024) -> dict:
    """Returns the keys of the fullest of eight devices over the mean, in both placements, as a cache fills."""
    tokens = [capacity * i // 64 for i in range(1, 65)]
    curves = {}
    for name, block_size in (("contiguous", None), ("block-cyclic", block)):
        shards = [Shard(index=i, num_shards=num_shards, block_size=block_size) for i in range(num_shards)]
        keys = [shard.local_lengths(np.array(tokens, np.int32), capacity // num_shards) for shard in shards]
        fullest = np.max(keys, axis=0)
        curves[name] = [int(count) * num_shards / length for count, length in zip(fullest, tokens)]
    return {"tokens": tokens, "block": block, **curves}


def samples_of_a_prompt(context: int = 8192) -> dict:
    """Returns ms a token of Llama 2 7B over samples of one prompt, its limit, and the limit without sharing."""
    from tree_attn.commands.bench.roofline import roofline_ms  # these load a model's code, which takes seconds
    from tree_attn.models.llama.presets import preset

    rows = [row for row in rows_of("llama_h200/samples_7b.jsonl") if row["context"] == context]
    prompt_bytes = next(row["cache_bytes_per_device"] for row in rows if row["batch"] == 1)
    unshared = [
        (row["batch"], (row["weights_bytes_per_device"] + row["batch"] * prompt_bytes) / READ * 1e3) for row in rows
    ]
    return {
        "measured": [(row["batch"], row["per_token_ms_median"]) for row in rows],
        "limit": [(row["batch"], roofline_ms(row, preset(row["config"]), "NVIDIA H200")) for row in rows],
        "unshared": unshared,
        "title": f"Llama 2 7B, samples of a prompt of {length(context)} tokens",
        "source": source("one H200, bfloat16, random weights", rows),
    }


def scores_of_sparse_attentions(task: str = "needle") -> dict:
    """Returns scores of SmolLM2 under sparse attentions, over the share of the cache that a token moves."""
    rows = [row for row in rows_of("eval_smollm2/results.jsonl") if row["task"] == task]
    names = {"SparQ": "sparq", "H2O": "h2o", "LM-Infinite": "lm_infinite"}
    curves = {
        name: sorted(
            (row["compression"], row["mean"], row["standard_error"]) for row in rows if row["method"] == method
        )
        for name, method in names.items()
    }
    (dense,) = [row["mean"] for row in rows if row["method"] == "dense"]
    first = rows[0]
    title = f"SmolLM2 (135M) finds needles in {first['context']:,} tokens, {first['samples']} samples"
    return {**curves, "dense": dense, "unit": first["unit"], "title": title, "source": source("a CPU", rows)}


SHARES = "sweep_h200/fixed.jsonl"


def shares_of_the_limit(rows: list[dict] | None = None) -> dict:
    """Returns the share of the datasheet's read rate that each kernel reaches, by step.

    Args:
      rows: of `bench_sweep.py`; None is those of SHARES.
    """
    rows = rows_of(SHARES) if rows is None else rows
    steps = sweep_steps(rows)
    best_peer = lambda shares: max(share for way, share in shares.items() if way in PEERS)
    ordered = sorted(
        ((step, shares) for step, shares in steps.items() if PEERS & shares.keys()), key=lambda item: best_peer(item[1])
    )
    ways = [way for way in WAYS if any(way in shares for _, shares in ordered)]
    return {
        "steps": [step for step, _ in ordered],
        "curves": {way: [shares.get(way) for _, shares in ordered] for way in ways},
        "time": "of a step in a chain",
        "source": source("one H200, query/KV heads\n", rows),
    }


WAYS = {"cuDNN": "cudnn", "FlashInfer": "flashinfer", "mosaic_gpu": "mosaic_gpu", "default": "None"}  # as rows begin
PEERS = {"cuDNN", "FlashInfer"}


def sweep_steps(rows: list[dict]) -> dict[str, dict[str, float]]:
    """Returns the share of each way at its fastest, of those steps of `bench_sweep.py` whose limit is reading."""
    steps: dict[str, dict] = {}
    for row in {(row["case"], row["way"]): row for row in rows}.values():  # the last of each
        if row.get("chain_us_median") and row["bytes_us"] >= row["products_us"]:
            shares = steps.setdefault(with_short_lengths(row["title"]), {})
            way = next((name for name, start in WAYS.items() if row["way"].startswith(start)), None)
            if way is not None:
                shares[way] = max(shares.get(way, 0.0), row["bytes_us"] / row["chain_us_median"])
    return steps


def with_short_lengths(text: str) -> str:
    """Returns a text with "16k" for "16,384"."""
    return re.sub(r"\d{1,3}(,\d{3})+|\d{4,}", lambda found: length(int(found[0].replace(",", ""))), text)


def one_launch_trials(keys: int = 10_240) -> dict:
    """Returns the times of steps in one launch and in two, each try with its tenth and ninetieth percentile."""
    rows = [
        row
        for row in rows_of("reduce_4xh200/one_launch_trials.jsonl")
        if row["keys_per_device"] == keys and row["reduction"] == "fused"
    ]
    ways = {"copies": "a count, after copies", "18 partials": "a count, while copies end", "words": "numbered words"}
    tries = []
    for word, way in ways.items():
        gpus = next(row["n_devices"] for row in rows if word in row["trial"] and row["trial"].startswith("one"))
        for row in rows:
            if row["n_devices"] == gpus:
                times = [row["us_p10"], row["us_median"], row["us_p90"]]
                plural = "s" * (gpus > 1)
                tries.append([f"{way}\n{gpus} GPU{plural}", row["trial"].startswith("one"), times])
    what = f"H200s, {length(keys)} keys a GPU, each way in one run with two launches\n"
    limit = 4 * keys * rows[0]["heads"] * 128 / READ * 1e6
    return {"tries": tries, "limit": limit, "source": source(what, rows)}


def equal_runs() -> dict:
    """Returns which KV tiles each CTA has, where it takes an output tile and where it takes an equal run."""
    from tree_attn.kernels.schedule import lean_schedule

    kv_tiles = (14, 2, 1, 6, 4, 1)  # of each output tile
    whole = [[(tile, count)] for tile, count in enumerate(kv_tiles)]
    runs = [[(part.output_tile, part.num_kv_tiles) for part in run] for run in lean_schedule(kv_tiles, 6)]
    return {"an output tile for each CTA": whole, "equal runs": runs}


NUMBERS = {
    "state": rounding_of_lse,
    "bounds": reached_products,
    "microsecond": parts_of_a_step,
    "links": steps_over_gpus,
    "placement": fullest_device,
    "prefixes": samples_of_a_prompt,
    "approximations": scores_of_sparse_attentions,
    "shares": shares_of_the_limit,
    "launches": one_launch_trials,
    "runs": equal_runs,
}
