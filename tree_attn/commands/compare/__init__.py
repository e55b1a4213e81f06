"""`tree-attn compare`: tree and ring attention side by side, checked first, then predicted, then measured."""

import argparse
import pathlib

from tree_attn.commands import processes
from tree_attn.commands.options import integers_like, words

HELP = """\
Compares one step of decoding by Tree Attention and by Ring Attention: latency, peak memory and communication.

  1. every strategy is checked against attention in float64; a wrong result ends the command with status 1
  2. the predictions of the Tree Attention paper (its equations 8, 9, 10 and 14) and the least times are printed
  3. every strategy is timed; DIR/results.jsonl gets a row as soon as it is measured

A rerun with the same options and --out continues: it skips the rows in the file and tries those with an error again.
Other options need another folder. A case that cannot run here is a row with its reason in "error", and the
others go on. With --json, stdout is one JSON document: all rows, and the files written.

examples:
  tree-attn compare --devices 8 --keys 8192,65536 --out results/
  tree-attn compare --devices 8 --keys 81920 640000 --heads 16 --head-dim 128 --dtype bfloat16 --out results/
  tree-attn compare --devices 4 --keys 16384 --heads 32 --kv-heads 8 --reduction allreduce,gather --out gqa/
  tree-attn compare --prefill --gradient --devices 4 --keys 65536 --heads 32 --kv-heads 8 --out prompts/

one process per GPU, or per node (process 0 writes and prints; --devices counts those of all):
  tree-attn compare --nccl search --devices 4 --keys 81920 --out results/      (starts them by itself, on one host)
  srun --ntasks-per-node=4 tree-attn compare --devices 8 --keys 81920 --out results/
  torchrun --nproc-per-node=4 -m tree_attn.cli compare --devices 4 --keys 81920 --out results/
or, without any of them:
  for i in 0 1 2 3; do tree-attn compare --devices 4 --keys 81920 --out results/ \\
      --coordinator-address localhost:9876 --num-processes 4 --process-id $i --local-device-ids $i & done; wait
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tree-attn compare`."""
    shape = parser.add_argument_group("the step")
    shape.add_argument("--devices", type=int, default=8, help="devices to shard the keys over (default 8)")
    shape.add_argument(
        "--keys", type=integers_like("8192,65536"), nargs="+", required=True, help="keys per sequence, e.g. 8192,65536"
    )
    shape.add_argument("--batch", type=int, default=1, help="sequences (default 1)")
    shape.add_argument("--heads", type=int, default=16, help="query heads (default 16)")
    shape.add_argument("--kv-heads", type=int, help="key heads (default: as many as query heads)")
    shape.add_argument("--head-dim", type=int, default=128, help="head dim (default 128)")
    shape.add_argument("--dtype", default="bfloat16", help="dtype of queries, keys and values (default bfloat16)")
    shape.add_argument(
        "--prefill",
        action="store_true",
        help="compare attention within prompts of --keys tokens: striped rings by every rotation, a zigzag "
        "ring, Ulysses, and Ulysses with a ring outside; on one GPU, cuDNN's own attention by jax.nn too",
    )
    shape.add_argument(
        "--gradient", action="store_true", help="with --prefill: the forward and the backward pass in one call"
    )
    compared = parser.add_argument_group("what is compared (the rings always are)")
    compared.add_argument(
        "--reduction",
        type=words,
        nargs="+",
        help="reductions of tree attention, e.g. allreduce,gather, and shard_heads, an all-to-all and then a gather of "
        "the heads (default: all; fused and shard_heads on GPUs only)",
    )
    compared.add_argument("--joint", action="store_true", help="a ring too that sends K and V as one array")
    compared.add_argument(
        "--two-way", action="store_true", help="a ring too that sends half of the heads each way round"
    )
    compared.add_argument(
        "--implementation", type=words, nargs="+", help="local kernels (default: the best that can run)"
    )
    measured = parser.add_argument_group("how it is measured")
    measured.add_argument("--iters", type=int, default=32, help="timed samples per row (default 32)")
    measured.add_argument(
        "--chain",
        type=int,
        help="dependent steps in a program (default 32; 4 where a step sends more than 100 MB; 1 on emulated devices). "
        "On GPUs each sample also runs a program of 4 times as many, and the difference gives the time of a step. 1: "
        "single steps, their launch included",
    )
    measured.add_argument(
        "--nccl",
        metavar="NAME",
        help="NCCL's setting for transfers. own: its defaults; search: start one process per GPU of this host, time "
        "bare transfers of the rings' sizes under several, and compare under the fastest and under NCCL's own; or the "
        "name of one of these (default: chunks of 64 KiB, which spread a transfer over the channels)",
    )
    measured.add_argument("--links-only", action="store_true", help=argparse.SUPPRESS)  # of a search: bare transfers
    measured.add_argument("--seed", type=int, default=0, help="seed of the random data (default 0)")
    measured.add_argument("--out", type=pathlib.Path, required=True, metavar="DIR", help="where results and plots go")
    measured.add_argument("--no-plots", action="store_true", help="do not draw (drawing needs the extra 'plot')")
    measured.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    processes.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Compares, prints, writes; returns 0, or 1 if a result was wrong."""
    from tree_attn.commands.compare.sweep import compare  # loads JAX, which --help does without

    return compare(args)
