"""`tree-attn plan`: the predicted cost of each strategy on a cluster, and which one to choose."""

import argparse
import pathlib

HELP = """\
Predicts one step of decoding on a cluster, by every reduction of Tree Attention and by Ring Attention: time, bytes sent
and memory of each device, and which to choose, with the reason. Touches no device.

The numbers come from the cost model (tree_attn/cost) and a machine's parameters: the package's own, or a file that
`tree-attn doctor --distributed --machine-out FILE` wrote on a machine of yours. The H200 was measured. For H100, A100,
A100 40GB, B200, L40S, RTX 4090, RTX 5090 and TPU v5e, v5p and v6e the datasheets' rates are taken, and of them the
share that an H200 was measured to reach of its own datasheet. Links without a measurement are assumed. Every output
says so, and gives a range beside each time that rests on them, or on constants of fewer GPUs.

examples:
  tree-attn plan --nodes 16 --gpus-per-node 8 --keys 5120000
  tree-attn plan --gpus-per-node 4 --keys 131072 --heads 32 --kv-heads 8
  tree-attn plan --device-kind "TPU v5e" --gpus-per-node 16 --keys 1000000 --batch 8
  tree-attn plan --nodes 2 --keys 1000000 --machine machine.json --json
  tree-attn plan --prefill --nodes 4 --keys 1048576 --heads 32 --kv-heads 8
  tree-attn plan --prefill --gradient --gpus-per-node 8 --keys 262144 --heads 32 --kv-heads 8
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tree-attn plan`."""
    parser.add_argument("--nodes", type=int, default=1, help="nodes (default 1)")
    parser.add_argument("--gpus-per-node", type=int, help="GPUs of each (default: the machine's)")
    parser.add_argument(
        "--prefill", action="store_true", help="attention within a prompt of --keys tokens, forward, instead of a step"
    )
    parser.add_argument("--gradient", action="store_true", help="with --prefill: the forward and the backward pass")
    parser.add_argument("--keys", type=int, required=True, help="keys per sequence, over all GPUs")
    parser.add_argument("--batch", type=int, default=1, help="sequences (default 1)")
    parser.add_argument("--heads", type=int, default=16, help="query heads (default 16)")
    parser.add_argument("--kv-heads", type=int, help="key heads (default: as many as query heads)")
    parser.add_argument("--head-dim", type=int, default=128, help="head dim (default 128)")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of queries, keys and values (default bfloat16)")
    parser.add_argument(
        "--device-kind", default="H200", metavar="NAME", help="H200 (default), or another of those named above"
    )
    parser.add_argument(
        "--machine", type=pathlib.Path, metavar="FILE", help="a file of parameters, instead of the package's"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")


def run(args: argparse.Namespace) -> int:
    """Predicts and prints; returns 0."""
    from tree_attn.commands import terminal
    from tree_attn.commands.plan import prediction, report  # these load JAX, which --help does without

    document = prediction.predict_all(args)
    if args.json:
        terminal.print_document(document)
    else:
        report.print_document(document)
    return 0
