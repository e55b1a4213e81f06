"""`tree-attn sample`: many samples of each prompt, which is held once, ranked by their probability."""

import argparse

from tree_attn.commands import prompting
from tree_attn.commands.options import check_at_least

HELP = """\
Draws many samples of each prompt with a Llama, and prints those that the model itself finds the most likely.

examples:
  tree-attn sample --model smollm2 --prompt "Write a haiku about rivers." --num-samples 64 --top 3
  tree-attn sample --raw --prompt "Once upon a time" --num-samples 16 --max-new-tokens 40 --seed 1 --attention single
  tree-attn sample --prompt "Hi" --num-samples 8 --share-prefix --json > samples.json
  tree-attn sample --prompt "Name a river." --prompt "Name a lake." --num-samples 4 --top 1

Where it pays, the prompt is read and held once for all samples, and attended to once per token. --share-prefix does so
however short the prompt is, --no-share-prefix never. The samples are the same.

Different samples are ranked by the mean log-probability of their tokens (Bifurcated Attention, section 5.4, pass@top-k,
whose temperature and top-p are the defaults).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tree-attn sample`."""
    parser.add_argument("--num-samples", type=int, default=16, metavar="N", help="samples of each prompt; default 16")
    parser.add_argument("--top", type=int, default=3, metavar="N", help="samples of each to print; default 3")
    parser.add_argument(
        "--share-prefix",
        action=argparse.BooleanOptionalAction,
        help="hold the prompt once, or once for each sample; default: once where that pays (ring: never)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document: all samples, bytes, times")
    prompting.add_arguments(parser, temperature=0.8, top_p=0.95)


def run(args: argparse.Namespace) -> int:
    """Generates and prints; returns 0. Wrong arguments raise before a model is fetched or a device is used."""
    check_at_least(args, num_samples=1, top=1)
    prompting.read_prompts(args)
    from tree_attn.commands.sample.samples import draw  # loads JAX, which --help does without

    draw(args)
    return 0
