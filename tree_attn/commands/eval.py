"""`tree-attn eval`: what SparQ and the methods of its paper's comparison do to a model's answers."""

import argparse
import dataclasses
import hashlib
import json
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

HELP = """\
Score a Llama on tasks made of a text, with dense attention and with sparse ones at several compression ratios:

  repetition           characters of a repeated passage that it gets right before its first error
  needle               share of the answer's tokens it gets right, of a sentence hidden in the text
  language_modelling   bits per character

Contexts are read densely; the tokens after them attend by SparQ (without and with the mean value for what is left
out), H2O, LM-Infinite or FlexGen's top-k, each with the budget whose transfers come nearest to the ratio.
Rows go to DIR/results.jsonl as they come; the same command run again goes on after them. Plots need the extra 'plot'.

examples:
  tree-attn eval --text kjv.txt --out results/eval
  tree-attn eval --text kjv.txt --tasks repetition --ratios 2,8 --kept 32,64,128 --samples 32 --out results/eval_kept

A text of Debian's, in the public domain:
  apt-get install bible-kjv && bible -f gen1:1-rev22:21 | sed 's/^[^ ]* //' > kjv.txt
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options; `run` reads them."""
    parser.add_argument("--text", type=pathlib.Path, required=True, metavar="FILE", help="what tasks are made of")
    parser.add_argument("--model", default="smollm2", help="as of `tree-attn generate`; default smollm2")
    parser.add_argument("--tasks", default="repetition,needle,language_modelling", metavar="A,B", help="default: all")
    parser.add_argument(
        "--ratios", default="2,4,8", metavar="N,M", help="compression, dense over sparse; default 2,4,8"
    )
    parser.add_argument("--kept", default="64", metavar="K,L", help="keys that SparQ keeps; default 64")
    parser.add_argument("--context", type=int, default=1024, metavar="N", help="tokens read densely; default 1024")
    parser.add_argument("--tail", type=int, default=64, metavar="N", help="tokens scored after them; default 64")
    parser.add_argument("--samples", type=int, default=16, metavar="N", help="of each task; default 16")
    parser.add_argument("--cache-dtype", metavar="DTYPE", help="of keys and values; default: the model's")
    parser.add_argument("--batch", type=int, default=4, metavar="N", help="samples at a time; default 4")
    parser.add_argument("--seed", type=int, default=0, help="the same seed makes the same samples; default 0")
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="DIR", help="rows and plots go there")
    parser.add_argument("--no-plots", action="store_true", help="do without matplotlib")
    parser.add_argument("--json", action="store_true", help="print the rows as one JSON document instead of a table")


def run(args: argparse.Namespace) -> int:
    """Evaluates, prints and draws; returns 0. Wrong arguments raise before a model is fetched."""
    from models.llama import session
    from tree_attn import measure
    from tree_attn.commands import plots

    tasks, ratios, kept, sizes = _checked(args)
    text = args.text.read_text()
    if not args.no_plots:
        plots.require_matplotlib()
    checkpoint = session.open_with_progress(args.model)
    sweep = dataclasses.asdict(sizes) | {
        "model": args.model, "seed": args.seed, "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "tasks": tasks, "ratios": ratios, "kept": kept,
    }  # fmt: skip
    sweep |= {} if args.cache_dtype is None else {"cache_dtype": args.cache_dtype}
    writer = measure.JsonlWriter(args.out / "results.jsonl", sweep=sweep)
    _evaluate(args, checkpoint, text, tasks, ratios, kept, sizes, writer)
    files = {} if args.no_plots else {"plot": str(plots.draw_evaluation(writer.rows, args.out / "evaluation.png"))}
    if args.json:
        print(json.dumps({"rows": writer.rows, "files": files}))
    else:
        _print(writer.rows)
        print(*files.values())
    return 0


def _checked(args: argparse.Namespace) -> tuple[list[str], list[int], list[int], Any]:
    from models.llama.evaluation import TASKS, Sizes
    from tree_attn.arguments import one_of

    if args.cache_dtype is not None:
        one_of("--cache-dtype", args.cache_dtype, ("float8_e4m3fn",))  # sparse attentions know no scales
    tasks = [name.strip() for name in args.tasks.split(",")]
    for task in tasks:
        one_of("--tasks", task, tuple(TASKS))
    ratios, kept = (_integers(name, getattr(args, name)) for name in ("ratios", "kept"))
    for name in ("samples", "batch", "tail"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(args, name)}")
    return tasks, ratios, kept, Sizes(context=args.context, tail=args.tail, samples=args.samples)


def _integers(name: str, text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise ValueError(f"--{name} must be integers of at least 1, separated by commas, got {text!r}")
    return found


def _evaluate(args, checkpoint, text: str, tasks, ratios, kept, sizes, writer) -> None:
    """Appends the rows that are missing."""
    import jax

    from models.llama import session
    from models.llama.evaluation import Method, Scorer, make_samples, methods_for, score
    from tree_attn.commands.report import progress

    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    cases: dict[Method, int] = {Method(name="dense"): 1}
    for ratio in ratios:
        for num_kept in kept:
            cases |= {method: ratio for method in methods_for(1 / ratio, args.context, config.head_dim, num_kept)}
    todo = {task: [method for method in cases if not _is_done(writer.rows, task, method)] for task in tasks}
    if not any(todo.values()):
        return
    with session.phase("encoding the text ..."):
        text_ids = tokenizer.encode(text, add_special_tokens=False)
    samples = {task: make_samples(task, tokenizer, text_ids, sizes, args.seed) for task in tasks}
    place = session.Place(devices=(jax.devices()[0],))
    scorer = Scorer(session.load_with_progress(checkpoint, place.sharding(config), place.dtype), args.cache_dtype)
    with progress("evaluating", sum(map(len, todo.values())), is_shown=True) as (describe, advance):
        for task, methods in todo.items():
            batches = [samples[task][i : i + args.batch] for i in range(0, args.samples, args.batch)]
            describe(f"{task}: contexts")
            room = len(samples[task][0].tail)
            read = [scorer.read([one.context for one in batch], room) for batch in batches] if methods else []
            for method in methods:
                describe(f"{task}: {method.name}")
                scores = []
                for batch, context in zip(batches, read, strict=True):
                    logits = scorer.follow(context, [one.tail for one in batch], method)
                    scores += score(task, batch, logits)
                writer.append(_row(args, config, place, task, method, cases[method], scores))
                advance()


def _is_done(rows: Sequence[dict], task: str, method) -> bool:
    key = {"task": task, "method": method.name, "num_keys": method.num_keys, "num_components": method.num_components}
    return any({name: row[name] for name in key} == key for row in rows)


def _row(args, config, place, task: str, method, ratio: int, scores: list[float]) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    from models.llama.evaluation import TASKS
    from tree_attn import cost_model, measure

    elements = method.transfer_elements(args.context, config.head_dim)
    dense = cost_model.dense_transfer_elements(num_keys=args.context, head_dim=config.head_dim)
    cache_dtype = jnp.dtype(args.cache_dtype or place.dtype)
    return {
        "task": task, "method": method.name, "num_keys": method.num_keys, "num_components": method.num_components,
        "asked_ratio": ratio, "compression": elements / dense,
        "transfer_bytes_per_token": elements * config.num_kv_heads * config.num_layers * cache_dtype.itemsize,
        "mean": statistics.fmean(scores),
        "standard_error": statistics.stdev(scores) / len(scores) ** 0.5 if len(scores) > 1 else None,
        "cache_dtype": cache_dtype.name, "unit": TASKS[task].unit, "higher_is_better": TASKS[task].higher_is_better,
        "scores": scores,
        "context": args.context, "tail": args.tail, "samples": args.samples, "seed": args.seed, "model": args.model,
        "dtype": jnp.dtype(place.dtype).name, "hardware": measure.hardware(list(place.devices)),
        "jax_version": jax.__version__, "git_commit": measure.git_commit(), "command": args.command_line,
    }  # fmt: skip


def _print(rows: Sequence[dict]) -> None:
    """A table per task: a line per method, a column per compression that was asked for, as the paper's Table 2."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console = console if console.is_terminal else Console(width=120)
    for task in dict.fromkeys(row["task"] for row in rows):
        of_task = [row for row in rows if row["task"] == task]
        ratios = sorted({row["asked_ratio"] for row in of_task})
        console.print(f"{task}: {of_task[0]['unit']}, mean and standard error of {of_task[0]['samples']}")
        table = Table()
        table.add_column("method")
        for ratio in ratios:
            table.add_column("dense" if ratio == 1 else f"1/{ratio}", justify="right")
        for label in dict.fromkeys(_label(row) for row in of_task):
            cells = {row["asked_ratio"]: _cell(row) for row in of_task if _label(row) == label}
            table.add_row(label, *(cells.get(ratio, "") for ratio in ratios))
        console.print(table)


def _label(row: dict) -> str:
    return f"{row['method']} (k {row['num_keys']})" if row["method"].startswith("sparq") else row["method"]


def _cell(row: dict) -> str:
    error = "" if row["standard_error"] is None else f" ± {row['standard_error']:.2g}"
    return f"{row['mean']:.3g}{error}"
