"""`tree-attn eval`: what SparQ and the methods of its paper's comparison do to a model's answers."""

import argparse
import hashlib
import pathlib

HELP = """\
Scores a Llama on tasks made of a text, with dense attention and with sparse ones at several compression ratios:

  repetition           characters of a repeated passage that it gets right before its first error
  needle               share of the answer's tokens it gets right, of a sentence hidden in the text
  language_modelling   bits per character
  needle_at_depth      share of such sentences that it gets right as a whole, by context and depth (a heatmap)

Contexts are read densely; the tokens after them attend by SparQ (without and with the mean value for what is left
out), H2O, LM-Infinite or FlexGen's top-k, each with the budget whose transfers come nearest to the ratio.
Rows go to DIR/results.jsonl as they come; the same command run again continues after them. Plots need the extra 'plot'.

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
    parser.add_argument("--text", type=pathlib.Path, required=True, metavar="FILE", help="text that tasks are made of")
    parser.add_argument("--model", default="smollm2", help="a model as in `tree-attn generate`; default smollm2")
    parser.add_argument(
        "--tasks",
        default="repetition,needle,language_modelling",
        metavar="A,B",
        help="tasks to score; default: the first three",
    )
    parser.add_argument(
        "--ratios", default="2,4,8", metavar="N,M", help="compression ratios, dense over sparse; default 2,4,8"
    )
    parser.add_argument("--kept", metavar="K,L", help="keys that SparQ keeps; default a sixteenth of the context")
    parser.add_argument("--context", default="1024", metavar="N,M", help="tokens read densely; default 1024")
    parser.add_argument(
        "--depths", default="0,25,50,75,100", metavar="P,Q",
        help="percent of the text before the needle, for needle_at_depth; default 0,25,50,75,100",
    )  # fmt: skip
    parser.add_argument(
        "--ablations", action="store_true", help="SparQ alone, also with other temperatures and local windows"
    )
    parser.add_argument("--tail", type=int, default=64, metavar="N", help="tokens scored after the context; default 64")
    parser.add_argument("--samples", type=int, default=16, metavar="N", help="samples of each task; default 16")
    parser.add_argument("--cache-dtype", metavar="DTYPE", help="dtype of keys and values; default: the model's")
    parser.add_argument("--batch", type=int, default=4, metavar="N", help="samples at a time; default 4")
    parser.add_argument("--seed", type=int, default=0, help="the same seed makes the same samples; default 0")
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="DIR", help="rows and plots go there")
    parser.add_argument("--no-plots", action="store_true", help="do not draw")
    parser.add_argument("--json", action="store_true", help="print the rows as one JSON document instead of a table")


def run(args: argparse.Namespace) -> int:
    """Evaluates, prints and draws; returns 0. Wrong arguments raise before a model is fetched."""
    # These load JAX, which --help does without.
    from tree_attn.commands import drawing, session, terminal
    from tree_attn.commands.eval import evaluation, plots, report
    from tree_attn.commands.eval.plan import make_plan
    from tree_attn.commands.options import check_folder, reading
    from tree_attn.measure.rows import MeasuredRows

    plan = make_plan(args)
    check_folder("--out", args.out)
    with reading("--text", args.text):
        text = args.text.read_text(encoding="utf-8")
    checkpoint = session.open_with_progress(args.model)
    facts = {"model": args.model, "seed": args.seed, "text_sha256": hashlib.sha256(text.encode()).hexdigest()}
    facts |= {} if args.cache_dtype is None else {"cache_dtype": args.cache_dtype}
    writer = MeasuredRows(args.out / "results.jsonl", sweep=plan.sweep() | facts)
    evaluation.evaluate(args, checkpoint, text, plan, writer)
    files = {}
    if not args.no_plots and drawing.has_matplotlib():
        with session.phase("drawing"):
            files = plots.draw(writer.rows, args.out)
    if args.json:
        terminal.print_document({"rows": writer.rows, "files": files})
        return 0
    report.print_scores(writer.rows)
    console = terminal.output()
    for sentence in report.conclusions(writer.rows):
        terminal.say(console, sentence)
    if not args.no_plots and not files:
        terminal.say(console, f"Not drawn: {drawing.advice()}")
    drawn = f"; plots: {', '.join(files.values())}" if files else ""
    terminal.say(console, f"Rows: {args.out / 'results.jsonl'}{drawn}")
    return 0
