"""`tree-attn bench llama`: a Llama's prefill and decoding time over long contexts, beside its roofline."""

import argparse
import pathlib

from tree_attn.commands import processes, prompting

HELP = """\
Times a Llama of a published shape over long contexts: prefill, each new token, memory, by tree and by ring attention.

The prompt is random, and so are weights unless --model names some: times do not depend on them. Keys and values are
sharded by sequence and weights by heads and columns over the same devices; --replicate-weights gives every device all
weights, as in the paper's Table 1. The roofline of a token is the time to read a device's weights and its part of the
keys and values once, at the datasheet's rate. They are those of the prompt (with --samples once for all) and of each
sequence's own tokens, half-way through; with SparQ as many as it reads. Where products take longer, those with weights
and those of attention, it is their time.

examples:
  tree-attn bench llama --context 32768,131072 --out results/llama
  tree-attn bench llama --config llama-3.2-1b --devices 4 --context 131072 --tokens-per-dispatch 8
  tree-attn bench llama --config llama-2-7b --devices 1 --attention single --context 8192 --samples 1,64,1024
  tree-attn bench llama --config llama-2-7b --devices 1 --attention single --context 2400 --problems 8 \\
    --problem-tokens 500 --samples 128 --levels 2,1
  tree-attn bench llama --config smollm2-135m --devices 3 --context 512 --attention tree --json

Memory is that of one device. It is predicted before the run: weights, keys and values to the byte, and the rest of
the programs' memory as XLA reports it. It is measured where the backend measures it and this case took more than all
before in the process, compiling included. A case that needs more than a device has is refused before it runs.

All cases are compiled before the first is timed, several at once where one process runs. Rows go to DIR/results.jsonl
as they come; the same command run again continues after them. A case is run once before it is timed, so that first use
is not in its times; --no-warm-up skips that where a prefill takes minutes.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tree-attn bench`."""
    parser.add_argument("what", choices=("llama",), help="the model family to time")
    parser.add_argument("--config", default="llama-3.1-8b", help="a published shape; default llama-3.1-8b")
    parser.add_argument("--model", metavar="PATH", help="a model as in `tree-attn generate`; default: random weights")
    _add_texts(parser)
    parser.add_argument(
        "--attention",
        default="tree,ring",
        metavar="A,B",
        help="attentions to time: tree, ring, single, sparq, and none, which leaves attention out; default tree,ring",
    )
    parser.add_argument(
        "--reduction", metavar="NAME", help="reduction of tree and sparq; default: the cheapest by the cost model"
    )
    prompting.add_sparq_arguments(parser)
    parser.add_argument(
        "--devices", type=int, metavar="N", help="number of devices; default: all accelerators, or 8 emulated"
    )
    _add_programs(parser)
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR", help="rows go there; default: they are only printed")
    parser.add_argument("--json", action="store_true", help="print the rows as one JSON document instead of a table")
    processes.add_arguments(parser)


def _add_texts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--context", default="32768,131072", metavar="N,M", help="tokens of the prompt; default 32768,131072"
    )
    parser.add_argument(
        "--new-tokens",
        type=int,
        default=257,
        metavar="N",
        help="tokens to generate; default 257: one of the prefill, and 32 program calls of 8",
    )
    parser.add_argument(
        "--samples", default="1", metavar="N,M", help="sequences that continue the one prompt, which they share"
    )
    parser.add_argument(
        "--share-prefix",
        action=argparse.BooleanOptionalAction,
        help="hold what sequences share once, or once for each; default: once where that pays (ring: never)",
    )
    parser.add_argument(
        "--problems", type=int, default=1, metavar="N", help="texts after the prompt, each with --samples sequences"
    )
    parser.add_argument("--problem-tokens", type=int, default=0, metavar="N", help="tokens of each problem; default 0")
    parser.add_argument(
        "--levels",
        default="2",
        metavar="A,B",
        help="prefix levels. 2: a problem's sequences share it; 1: each has as many tokens by itself, and only the "
        "prompt is shared",
    )


def _add_programs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cache-dtype",
        metavar="DTYPE",
        help="dtype of keys and values; default: the model's; float8_e4m3fn and int8 (not with sparq) halve bfloat16",
    )
    parser.add_argument("--prefill", metavar="NAME", help=prompting.PREFILL_HELP)
    parser.add_argument(
        "--prefill-chunk",
        type=int,
        metavar="N",
        help="prompt tokens read at a time; default: all, as a ring always does",
    )
    parser.add_argument(
        "--products",
        metavar="NAME",
        help="how new tokens are multiplied with weights: xla; mosaic_gpu, a kernel for 1 to 16 of them on Hopper "
        "GPUs; or mosaic_gpu_chain, several layers, or all between two layers' attention, in one launch; default: the "
        "fastest",
    )
    parser.add_argument("--replicate-weights", action="store_true", help="every device holds and reads all weights")
    parser.add_argument(
        "--tokens-per-dispatch", type=int, metavar="K", help="steps per program call; default 8 on GPUs, else 1"
    )
    parser.add_argument(
        "--unroll-layers",
        action=argparse.BooleanOptionalAction,
        help="write the layers out, or loop over them: less to compile; default: write them out on GPUs",
    )
    parser.add_argument(
        "--warm-up",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="run a case once before it is timed (default); without it, first use (not compilation) is in its prefill",
    )
    parser.add_argument(
        "--prefill-trials",
        type=int,
        default=3,
        metavar="N",
        help="prefills of each case, ten tokens after each; the median counts; default 3",
    )


def run(args: argparse.Namespace) -> int:
    """Times and prints; returns 0. Wrong arguments raise before a weight is made."""
    from tree_attn.commands.bench.sweep import bench  # loads JAX, which --help does without

    bench(args)
    return 0
