"""Bifurcated Attention's Tables 6, 7 and 8."""

from tree_attn.commands.reproduce.experiment import Command, Experiment, Place, Point, field, paper, thousands

PAPER = "Bifurcated Attention"
OOM = "OOM"

# Context -> batch -> ms a token: bifurcated and compiled; FlashAttention-2. None: the paper has no number.
TABLE_6 = {
    8192: {
        1: (8.63, 24.06), 2: (11.74, 24.49), 4: (12.03, 39.66), 8: (12.36, 60.92), 16: (12.59, 109.64),
        32: (13.47, 205.57), 64: (15.35, OOM), 128: (19.56, None), 256: (27.15, None), 512: (44.33, None),
        1024: (81.14, None), 2048: (OOM, None),
    },
    16384: {
        1: (12.16, 26.28), 2: (17.17, 37.72), 4: (17.33, 65.98), 8: (18.07, 110.31), 16: (18.46, 206.93),
        32: (19.92, OOM), 64: (22.96, None), 128: (28.98, None), 256: (40.07, None), 512: (65.02, None),
        1024: (117.75, None), 2048: (OOM, None),
    },
    32768: {
        1: (20.90, 37.67), 2: (29.34, 55.94), 4: (29.73, OOM), 8: (30.30, None), 16: (30.66, None),
        32: (32.15, None), 64: (35.25, None), 128: (41.44, None), 256: (OOM, None), 512: (None, None),
        1024: (None, None), 2048: (None, None),
    },
}  # fmt: skip
TABLE_7 = {
    8192: {
        1: (10.56, 21.76), 2: (11.35, 22.46), 4: (11.52, 22.57), 8: (11.79, 22.65), 16: (11.72, 22.31),
        32: (12.50, 26.06), 64: (13.87, OOM), 128: (17.03, None), 256: (24.38, None), 512: (39.08, None),
        1024: (72.24, None), 2048: (OOM, None),
    },
    16384: {
        1: (15.16, 23.59), 2: (15.99, 23.78), 4: (16.20, 24.22), 8: (16.61, 24.03), 16: (16.68, 30.19),
        32: (17.77, OOM), 64: (19.90, None), 128: (24.90, None), 256: (33.76, None), 512: (OOM, None),
        1024: (None, None), 2048: (None, None),
    },
    32768: {
        1: (22.79, 26.64), 2: (23.72, 26.82), 4: (23.98, 27.30), 8: (24.59, 28.36), 16: (24.87, OOM),
        32: (27.01, None), 64: (30.31, None), 128: (37.60, None), 256: (52.06, None), 512: (OOM, None),
        1024: (None, None), 2048: (None, None),
    },
}  # fmt: skip
# (context, batch) -> ms a token: bifurcated, FlashAttention-2.
TABLE_8 = {
    (16384, 16): (55.51, 92.11),
    (32640, 8): (58.56, 92.35),
    (32640, 16): (58.00, 162.02),
    (32640, 32): (57.86, OOM),
    (32640, 64): (60.33, None),
    (32640, 128): (67.82, None),
}
# The most sequences that 141 GB hold, each with its own keys and values of the prompt. JAX takes 113 GB by default.
UNSHARED_7B = {8192: 16, 16384: 8, 32768: 4}
UNSHARED_GROUPED = {8192: 64, 16384: 32, 32768: 16}
MOST_SHARED = 2048  # batches, with a shared prompt
NEW_TOKENS = 17
# Of 32 dispatches of eight tokens. Of two, the first waits for the host to launch the second: 17 and 3 ms a token on
# two GPUs, where each of 32 takes 10.
NEW_TOKENS_OF_TWO = 257


def _points(table: dict, config: str, attention: str, devices: int) -> list[Point]:
    found = []
    for context, batches in table.items():
        for batch, (shared, alone) in batches.items():
            where = {"config": config, "context": context, "batch": batch, "attention": attention}
            where |= {"n_devices": devices, "problem_tokens": 0}
            title = f"{thousands(context)} tokens, batch {batch:,}"
            shares = Point(setting=f"{title}, shared", where=where | {"share_prefix": None}, paper=paper(shared))
            found.append(shares)
            if alone is not None:
                whole = where | {"share_prefix": False if batch > 1 else None}  # one sequence shares nothing
                found.append(Point(setting=f"{title}, not shared", where=whole, paper=paper(alone)))
    return found


def _plan(config: str, most_alone: dict[int, int], contexts):
    def plan(place: Place) -> list[Command]:
        bench = ["bench", "llama", "--devices", "1", "--attention", "single", "--prefill-trials", "1"]
        if not place.gpus:
            return _small(bench)
        common = [*bench, "--config", config, "--new-tokens", str(NEW_TOKENS)]
        batches = [2**i for i in range(MOST_SHARED.bit_length())]
        runs = [
            Command(
                folder=f"shared_{thousands(context)}",
                arguments=[*common, "--context", str(context), "--samples", ",".join(map(str, batches))],
            )
            for context in contexts
        ]
        for context, limit in most_alone.items():
            few = ",".join(str(batch) for batch in batches if 1 < batch <= limit)
            options = ["--context", str(context), "--samples", few, "--no-share-prefix"]
            runs.append(Command(folder=f"not_shared_{thousands(context)}", arguments=[*common, *options]))
        return runs

    return plan


def _small(bench: list[str]) -> list[Command]:
    options = ["--config", "smollm2-135m", "--context", "256", "--samples", "8", "--new-tokens", "9"]
    return [
        Command(folder="small_shared", arguments=[*bench, *options]),
        Command(folder="small_not_shared", arguments=[*bench, *options, "--no-share-prefix"]),
    ]


_CPU = "SmolLM2's shape, 256 tokens and 8 sequences. Not run: the paper's models, contexts and batches."
_DIFFERS = (
    "The paper's shared numbers are of bifurcated attention with torch.compile. Those without sharing are of "
    "FlashAttention-2, without it. A single sequence shares nothing, so that ours is one number there. Compare numbers "
    "of one kind of GPU only: an H200 reads faster than an H100. "
)

TABLE_6_EXPERIMENT = Experiment(
    name="bifurcated-table-6",
    paper=PAPER,
    place="Table 6",
    what="a token of a 7B model with 32 KV heads, for 1 to 2,048 sequences after a prompt of 8k, 16k or 32k",
    quantity="ms a token",
    measure=field("per_token_ms_median"),
    paper_hardware="1 x H100 80 GB",
    differs=_DIFFERS,
    points=_points(TABLE_6, "llama-2-7b", "single", 1),
    plan=_plan("llama-2-7b", UNSHARED_7B, TABLE_6),
    cpu=_CPU,
)

TABLE_7_EXPERIMENT = Experiment(
    name="bifurcated-table-7",
    paper=PAPER,
    place="Table 7",
    what="a token of a 7B model with 8 KV heads, for 1 to 2,048 sequences after a prompt of 8k, 16k or 32k",
    quantity="ms a token",
    measure=field("per_token_ms_median"),
    paper_hardware="1 x H100 80 GB",
    differs=_DIFFERS + "The shape is Mistral's, which has the paper's heads and layers.",
    points=_points(TABLE_7, "mistral-7b-v0.3", "single", 1),
    plan=_plan("mistral-7b-v0.3", UNSHARED_GROUPED, TABLE_7),
    cpu=_CPU,
)


def _table_8() -> list[Point]:
    table: dict[int, dict[int, tuple]] = {}
    for (context, batch), numbers in TABLE_8.items():
        table.setdefault(context, {})[batch] = numbers
    return _points(table, "mistral-7b-v0.3", "tree", 2)


def _plan_8(place: Place) -> list[Command]:
    bench = ["bench", "llama", "--devices", "2", "--attention", "tree", "--prefill-trials", "1"]
    if not place.gpus:
        return _small(bench)
    common = [*bench, "--config", "mistral-7b-v0.3", "--new-tokens", str(NEW_TOKENS_OF_TWO)]
    return [
        Command(folder="shared_16k", arguments=[*common, "--context", "16384", "--samples", "16"]),
        Command(folder="shared_32640", arguments=[*common, "--context", "32640", "--samples", "8,16,32,64,128"]),
        Command(
            folder="not_shared_16k", arguments=[*common, "--context", "16384", "--samples", "16", "--no-share-prefix"]
        ),
        Command(
            folder="not_shared_32640",
            arguments=[*common, "--context", "32640", "--samples", "8,16,32", "--no-share-prefix"],
        ),
    ]


TABLE_8_EXPERIMENT = Experiment(
    name="bifurcated-table-8",
    paper=PAPER,
    place="Table 8",
    what="a token of Mistral 7B on two GPUs, for 8 to 128 sequences after a prompt of 16k or 32,640 tokens",
    quantity="ms a token",
    measure=field("per_token_ms_median"),
    paper_hardware="2 x H100 80 GB",
    differs=(
        "The paper shards heads, without torch.compile. Here weights are sharded by heads, and keys and values by "
        "sequence, so heads set no limit on the number of devices."
    ),
    points=_table_8(),
    plan=_plan_8,
    cpu=_CPU,
    min_gpus=2,
)

EXPERIMENTS = (TABLE_6_EXPERIMENT, TABLE_7_EXPERIMENT, TABLE_8_EXPERIMENT)
