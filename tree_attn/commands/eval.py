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
  needle_at_depth      share of such sentences that it gets right as a whole, by context and depth (a heatmap)

Contexts are read densely; the tokens after them attend by SparQ (without and with the mean value for what is left
out), H2O, LM-Infinite or FlexGen's top-k, each with the budget whose transfers come nearest to the ratio.
Rows go to DIR/results.jsonl as they come; the same command run again goes on after them. Plots need the extra 'plot'.

examples:
  tree-attn eval --text kjv.txt --out results/eval
  tree-attn eval --text kjv.txt --tasks repetition --ratios 2,8 --kept 32,64,128 --samples 32 --out results/eval_kept
  tree-attn eval --text kjv.txt --tasks needle_at_depth --context 256,512,1024 --samples 8 --out results/needle
  tree-attn eval --text kjv.txt --ablations --ratios 8 --out results/ablations

A text of Debian's, in the public domain:
  apt-get install bible-kjv && bible -f gen1:1-rev22:21 | sed 's/^[^ ]* //' > kjv.txt
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options; `run` reads them."""
    parser.add_argument("--text", type=pathlib.Path, required=True, metavar="FILE", help="what tasks are made of")
    parser.add_argument("--model", default="smollm2", help="as of `tree-attn generate`; default smollm2")
    parser.add_argument(
        "--tasks", default="repetition,needle,language_modelling", metavar="A,B", help="default: the first three"
    )
    parser.add_argument(
        "--ratios", default="2,4,8", metavar="N,M", help="compression, dense over sparse; default 2,4,8"
    )
    parser.add_argument("--kept", metavar="K,L", help="keys that SparQ keeps; default a sixteenth of the context")
    parser.add_argument("--context", default="1024", metavar="N,M", help="tokens read densely; default 1024")
    parser.add_argument(
        "--depths", default="0,25,50,75,100", metavar="P,Q",
        help="of needle_at_depth: percent of the text before the needle; default 0,25,50,75,100",
    )  # fmt: skip
    parser.add_argument(
        "--ablations", action="store_true", help="SparQ alone, also with other temperatures and local windows"
    )
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
    from tree_attn.commands import plots, session
    from tree_attn.measure.rows import RowWriter

    plan = _checked(args)
    text = args.text.read_text()
    if not args.no_plots:
        plots.require_matplotlib()
    checkpoint = session.open_with_progress(args.model)
    sweep = plan.sweep() | {
        "model": args.model, "seed": args.seed, "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
    }  # fmt: skip
    sweep |= {} if args.cache_dtype is None else {"cache_dtype": args.cache_dtype}
    writer = RowWriter(args.out / "results.jsonl", sweep=sweep)
    _evaluate(args, checkpoint, text, plan, writer)
    files = {} if args.no_plots else plots.draw_evaluation(writer.rows, args.out)
    if args.json:
        print(json.dumps({"rows": writer.rows, "files": files}))
    else:
        _print(writer.rows)
        print(*files.values())
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    """What is scored: checked arguments. `kept` is None for a sixteenth of each context."""

    tasks: list[str]
    ratios: list[int]
    kept: list[int] | None
    depths: list[int]
    sizes: list[Any]
    has_ablations: bool

    def sweep(self) -> dict[str, Any]:
        """What rows of one file have in common; as it was before there were several contexts, where there is one."""
        contexts = [sizes.context for sizes in self.sizes]
        common = dataclasses.asdict(self.sizes[0]) | {"tasks": self.tasks, "ratios": self.ratios, "kept": self.kept}
        if len(contexts) > 1:
            common["context"] = contexts
        elif self.kept is None:
            common["kept"] = self.kept_of(contexts[0])
        common |= {"depths": self.depths} if "needle_at_depth" in self.tasks else {}
        return common | ({"ablations": True} if self.has_ablations else {})

    def cases(self, context: int, head_dim: int) -> dict[Any, int]:
        """Methods for a context, and the compression that each was asked for."""
        from tree_attn.models.llama.evaluation.tasks import Method, methods_for

        found = {Method(name="dense"): 1}
        for ratio in self.ratios:
            for num_kept in self.kept_of(context):
                methods = methods_for(1 / ratio, context, head_dim, num_kept)
                if self.has_ablations:
                    methods = [one for method in methods if method.is_sparq for one in (method, *method.ablations())]
                found |= {method: ratio for method in methods}
        return found

    def kept_of(self, context: int) -> list[int]:
        """Keys that SparQ keeps of a context."""
        return [context // 16] if self.kept is None else self.kept

    def groups(self) -> list[tuple[str, Any, int | None]]:
        """Task, sizes and depth in percent (None: of a task without) of all samples that are read together."""
        from tree_attn.models.llama.evaluation.tasks import TASKS

        depths = {task: self.depths if TASKS[task].has_depth else [None] for task in self.tasks}
        return [(task, sizes, depth) for task in self.tasks for sizes in self.sizes for depth in depths[task]]


def _checked(args: argparse.Namespace) -> _Plan:
    from tree_attn.arguments import one_of
    from tree_attn.models.llama.evaluation.tasks import TASKS, Sizes

    if args.cache_dtype is not None:
        one_of("--cache-dtype", args.cache_dtype, ("float8_e4m3fn",))  # sparse attentions know no scales
    tasks = [name.strip() for name in args.tasks.split(",")]
    for task in tasks:
        one_of("--tasks", task, tuple(TASKS))
    ratios, contexts = (_integers(name, getattr(args, name)) for name in ("ratios", "context"))
    kept = None if args.kept is None else _integers("kept", args.kept)
    if "needle_at_depth" in tasks and kept is not None and len(kept) > 1:
        raise ValueError(f"--kept must be one number for needle_at_depth, got {args.kept!r}")
    depths = _integers("depths", args.depths, least=0, most=100)
    for name in ("samples", "batch", "tail"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.ablations and "needle_at_depth" in tasks:
        raise ValueError("--ablations: not of needle_at_depth, whose heatmap has one place for each method")
    sizes = [Sizes(context=context, tail=args.tail, samples=args.samples) for context in contexts]
    return _Plan(tasks=tasks, ratios=ratios, kept=kept, depths=depths, sizes=sizes, has_ablations=args.ablations)


def _integers(name: str, text: str, least: int = 1, most: int | None = None) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [least - 1]
    if min(found) < least or (most is not None and max(found) > most):
        upper = "" if most is None else f" and at most {most}"
        raise ValueError(f"--{name} must be integers of at least {least}{upper}, separated by commas, got {text!r}")
    return found


def _evaluate(args, checkpoint, text: str, plan: _Plan, writer) -> None:
    """Appends the rows that are missing."""
    import jax

    from tree_attn.commands import session
    from tree_attn.commands.report import progress
    from tree_attn.models.llama.evaluation.tasks import Scorer, make_samples, score

    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    cases = {sizes.context: plan.cases(sizes.context, config.head_dim) for sizes in plan.sizes}
    todo = {
        group: [method for method in cases[group[1].context] if not _is_done(writer.rows, group, method)]
        for group in plan.groups()
    }
    if not any(todo.values()):
        return
    with session.phase("encoding the text ..."):
        text_ids = tokenizer.encode(text, add_special_tokens=False)
    samples = {
        (task, sizes, depth): make_samples(
            task, tokenizer, text_ids, sizes, args.seed, None if depth is None else depth / 100
        )
        for task, sizes, depth in todo
    }
    place = session.Place(devices=(jax.devices()[0],))
    scorer = Scorer(session.load_with_progress(checkpoint, place.sharding(config), place.dtype), args.cache_dtype)
    with progress("evaluating", sum(map(len, todo.values())), is_shown=True) as (describe, advance):
        for group, methods in todo.items():
            task, sizes, _ = group
            batches = [samples[group][i : i + args.batch] for i in range(0, args.samples, args.batch)]
            describe(f"{task}: contexts")
            room = len(samples[group][0].tail)
            read = [scorer.read([one.context for one in batch], room) for batch in batches] if methods else []
            for method in methods:
                describe(f"{task}: {method.name}")
                scores = []
                for batch, context in zip(batches, read, strict=True):
                    logits = scorer.follow(context, [one.tail for one in batch], method)
                    scores += score(task, batch, logits)
                writer.append(_row(args, config, place, group, method, cases[sizes.context][method], scores))
                advance()


def _is_done(rows: Sequence[dict], group: tuple, method) -> bool:
    task, sizes, depth = group
    key = {"task": task, "method": method.name, "num_keys": method.num_keys, "num_components": method.num_components}
    key |= {"context": sizes.context, "depth_percent": depth} | _ablation(method)
    return any({name: row.get(name) for name in key} == key for row in rows)


def _ablation(method) -> dict[str, Any]:
    """What is not as in the paper, None where it is."""
    temperature = None if method.score_temperature == "coverage" else method.score_temperature
    return {"local_window": method.local_window, "score_temperature": temperature}


def _row(args, config, place, group: tuple, method, ratio: int, scores: list[float]) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    from tree_attn.measure import provenance
    from tree_attn.models.llama.evaluation.tasks import TASKS
    from tree_attn.sparq import transfers

    task, sizes, depth = group
    elements = method.transfer_elements(sizes.context, config.head_dim)
    dense = transfers.dense_transfer_elements(num_keys=sizes.context, head_dim=config.head_dim)
    cache_dtype = jnp.dtype(args.cache_dtype or place.dtype)
    ablation = {name: value for name, value in _ablation(method).items() if value is not None}
    return ({} if depth is None else {"depth_percent": depth}) | ablation | {
        "task": task, "method": method.name, "num_keys": method.num_keys, "num_components": method.num_components,
        "asked_ratio": ratio, "compression": elements / dense,
        "transfer_bytes_per_token": elements * config.num_kv_heads * config.num_layers * cache_dtype.itemsize,
        "mean": statistics.fmean(scores),
        "standard_error": _standard_error(scores),
        "cache_dtype": cache_dtype.name, "unit": TASKS[task].unit, "higher_is_better": TASKS[task].higher_is_better,
        "scores": scores,
        "context": sizes.context, "tail": args.tail, "samples": args.samples, "seed": args.seed, "model": args.model,
        "dtype": jnp.dtype(place.dtype).name, "hardware": provenance.hardware(list(place.devices)),
        "jax_version": jax.__version__, "git_commit": provenance.git_commit(), "command": args.command_line,
    }  # fmt: skip


def _print(rows: Sequence[dict]) -> None:
    """A table per task and context: a line per method, a column per compression that was asked for.

    As the paper's Table 2; over all depths, where there are several, as in its Table 3.
    """
    from rich.console import Console
    from rich.table import Table

    from tree_attn.commands.plots import evaluation_label

    console = Console()
    console = console if console.is_terminal else Console(width=120)
    for task, context in dict.fromkeys((row["task"], row["context"]) for row in rows):
        of_task = [row for row in rows if (row["task"], row["context"]) == (task, context)]
        ratios = sorted({row["asked_ratio"] for row in of_task})
        scores: dict[str, dict[int, list[float]]] = {}
        for row in of_task:
            scores.setdefault(evaluation_label(row), {}).setdefault(row["asked_ratio"], []).extend(row["scores"])
        count = len(next(iter(next(iter(scores.values())).values())))
        console.print(f"{task}: {of_task[0]['unit']}, mean and standard error of {count}, context {context:,}")
        table = Table()
        table.add_column("method")
        for ratio in ratios:
            table.add_column("dense" if ratio == 1 else f"1/{ratio}", justify="right")
        for label, by_ratio in scores.items():
            table.add_row(label, *(_cell(by_ratio[ratio]) if ratio in by_ratio else "" for ratio in ratios))
        console.print(table)


def _cell(scores: Sequence[float]) -> str:
    error = _standard_error(scores)
    return f"{statistics.fmean(scores):.3g}" + ("" if error is None else f" ± {error:.2g}")


def _standard_error(scores: Sequence[float]) -> float | None:
    return statistics.stdev(scores) / len(scores) ** 0.5 if len(scores) > 1 else None
