"""`tree-attn generate`: a Llama writes, its KV cache sharded over devices."""

import argparse
import pathlib

from tree_attn.commands import prompting
from tree_attn.commands.options import check_at_least

HELP = """\
Generates text with a Llama whose KV cache is sharded over devices along the sequence.

examples:
  tree-attn generate --model smollm2 --prompt "Name three rivers in Europe."
  tree-attn generate --model path/to/Llama-3.2-1B-Instruct --prompt "Hello" --temperature 0.7 --top-p 0.9 --seed 1
  tree-attn generate --model model.gguf --raw --prompt "Once upon a time" --attention ring --devices 4
  tree-attn generate --model smollm2 --prompt "Hi" --attention tree --reduction allreduce --json > answer.json
  tree-attn generate --system "Answer in one word." --prompt "What is the capital of France?"
  cat question.txt | tree-attn generate --prompt-file -
  tree-attn generate --chat
  tree-attn generate --prompt "Hi" --prompt "What is JAX?" --prompt "Name a river." --max-batch 2
  tree-attn generate --prompt "Hi" --attention sparq --num-components 32 --num-keys 128

Prompts are read by ring attention, and every new token attends by the attention that --attention names. All but sparq
are exact. It reads the --num-components components of every key that matter most to the query, then --num-keys whole.

Under srun or torchrun, the processes generate together, over all of their devices; process 0 prints.

With --out DIR, new tokens are saved a few at a time in DIR/tokens.jsonl. The same command run again continues after
the last one saved, with the tokens that would have come; once complete, it prints them and generates none. A higher
--max-new-tokens goes on where the lower one ended it.

With --chat prompts are turns of one conversation, and without a prompt each line of standard input is one. The cache
stays between turns: of each only what is new is read.

Several prompts without --chat are decoded together, and printed when all are complete. With --max-batch N at most N are
held at a time: one that has stopped makes room for the next, while the others continue. The tokens are the same.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tree-attn generate`."""
    prompting.add_arguments(parser, temperature=0.0, top_p=None)
    parser.add_argument("--chat", action="store_true", help="keep a conversation; turns are prompts, or lines of stdin")
    parser.add_argument("--max-batch", type=int, metavar="N", help="prompts held and decoded at a time; default: all")
    parser.add_argument(
        "--out", type=pathlib.Path, metavar="DIR", help="save tokens there, and continue after those saved"
    )
    parser.add_argument("--save-every", type=int, default=16, metavar="N", help="tokens saved at a time; default 16")
    parser.add_argument("--json", action="store_true", help="print one JSON document: ids, text, why it ended, times")


def run(args: argparse.Namespace) -> int:
    """Generates and prints; returns 0. Wrong arguments raise before a model is fetched or a device is used."""
    check_at_least(args, save_every=1, max_batch=1)
    prompting.read_prompts(args, may_be_none=args.chat)
    for option, value in (("--raw", args.raw), ("--out", args.out), ("--max-batch", args.max_batch)):
        if args.chat and value not in (None, False):
            raise ValueError(f"{option} must be left out with --chat, which keeps one conversation, got {value}")
    if args.out is not None and len(args.prompt) > 1:
        raise ValueError(f"--out saves the tokens of one prompt, got {len(args.prompt)}")
    from tree_attn.commands.generate.writing import write  # loads JAX, which --help does without

    write(args)
    return 0
