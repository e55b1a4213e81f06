"""`tree-attn demo`: one model answers under three attentions, token for token the same."""

import argparse
import pathlib

from tree_attn.commands import prompting

HELP = """\
A real Llama (SmolLM2, 135M parameters) answers a prompt three times: its KV cache sharded over devices and read by Tree
Attention, the same cache read by Ring Attention, and everything on one device. The tokens must be the same, or the
exit status is 1. Then it prints what each attention costs here, and what a step took on GPUs that were measured.

No GPU is needed: without accelerators, devices are emulated on the CPU. Emulated devices share your cores, so the times
show that everything runs and not how fast it would be; memory and communication are those of real devices.

examples:
  tree-attn demo
  tree-attn demo --prompt "Why is the sky blue?" --max-new-tokens 60 --devices 4
"""

PROMPT = "What is the capital of France? Answer in one sentence."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tree-attn demo`."""
    parser.add_argument("--devices", type=int, metavar="N", help="default: all accelerators, or 8 emulated")
    parser.add_argument("--prompt", default=PROMPT, help=f"question to the model; default: {PROMPT}")
    parser.add_argument("--max-new-tokens", type=int, default=48, metavar="N", help="stop after N tokens; default 48")
    parser.add_argument(
        "--model", default="smollm2", help="smollm2 (default), a Hugging Face folder or id, or a .gguf file"
    )
    parser.add_argument(
        "--picture", type=pathlib.Path, default="tree-attn-demo.png", metavar="FILE",
        help="where the picture goes; default: tree-attn-demo.png",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Runs the three, prints answer and table, draws a picture; returns 0, or 1 when their tokens differ."""
    prompting.check_not_empty(args.prompt)
    from tree_attn.commands.demo import answers, report  # these load JAX, which --help does without

    outcomes, tokenizer, is_emulated = answers.answer(args)
    report.print_outcomes(args.prompt, tokenizer, outcomes, is_emulated=is_emulated)
    status = report.compare(outcomes)
    if status == 0:
        report.conclude(outcomes, args.picture)
    return status
