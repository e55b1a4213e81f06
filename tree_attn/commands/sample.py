"""`tree-attn sample`: many samples of one prompt, which is held once, ranked by their probability."""

import argparse
import json
from typing import Any

from tree_attn.commands import prompting
from tree_attn.commands.options import check_at_least

HELP = """\
Draw many samples of one prompt with a Llama, and print those that the model itself finds the most likely.

examples:
  tree-attn sample --model smollm2 --prompt "Write a haiku about rivers." --num-samples 64 --top 3
  tree-attn sample --raw --prompt "Once upon a time" --num-samples 16 --max-new-tokens 40 --seed 1 --attention single
  tree-attn sample --prompt "Hi" --num-samples 8 --share-prefix --json | tail -1

The prompt is read, held and, for every token, attended to once for all samples where that pays; --share-prefix does it
however short the prompt is, --no-share-prefix never. The samples are the same.

Different samples are ranked by the mean log-probability of their tokens (Bifurcated Attention, section 5.4, pass@top-k,
whose temperature and top-p are the defaults).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tree-attn sample`."""
    parser.add_argument("--num-samples", type=int, default=16, metavar="N", help="samples to draw; default 16")
    parser.add_argument("--top", type=int, default=3, metavar="N", help="samples to print; default 3")
    parser.add_argument(
        "--share-prefix",
        action=argparse.BooleanOptionalAction,
        help="hold the prompt once, or once for each sample; default: once where that pays (ring: never)",
    )
    parser.add_argument("--json", action="store_true", help="end with one line of JSON: all samples, bytes and times")
    prompting.add_arguments(parser, temperature=0.8, top_p=0.95)


def run(args: argparse.Namespace) -> int:
    """Generates and prints; returns 0. Wrong arguments raise before a model is fetched or a device is used."""
    # These load JAX, which --help does without.
    from tree_attn.commands import session
    from tree_attn.commands.request import load_generator, open_request
    from tree_attn.models.llama import generate, rank_samples
    from tree_attn.models.llama.attention_choice import check_sharing
    from tree_attn.topology import is_first_process

    check_at_least(args, num_samples=1, top=1)
    check_sharing(args.attention, args.share_prefix)
    request = open_request(args)
    generator = load_generator(args, request)
    prompts = [request.prompt_ids] * args.num_samples
    with session.phase("compiling ..."):
        generator.compile(prompts, args.max_new_tokens, share_prefixes=args.share_prefix)
    with session.phase(f"drawing {args.num_samples} samples ..."):
        samples = generate(
            generator,
            [request.prompt_ids],
            args.max_new_tokens,
            num_samples=args.num_samples,
            stop_ids=request.checkpoint.tokenizer.stop_ids,
            share_prefixes=args.share_prefix,
        )
    if is_first_process():
        _print(args, request, rank_samples(samples), _prefix(args, request, generator))
    return 0


def _print(args: argparse.Namespace, request, ranked, prefix: dict[str, Any]) -> None:
    decode = request.checkpoint.tokenizer.decode
    for place, sample in enumerate(ranked[: args.top], start=1):
        print(f"--- {place} of {len(ranked)} different samples: mean log-probability {sample.mean_log_probability:.3f}")
        print(decode(sample.new_ids))
    print(f"--- {_sentence(prefix, args.num_samples)}")
    if args.json:
        samples = [
            {
                "new_ids": sample.new_ids,
                "text": decode(sample.new_ids),
                "log_probability": sample.log_probability,
                "mean_log_probability": sample.mean_log_probability,
            }
            for sample in ranked
        ]
        times = {name: getattr(ranked[0], name) for name in ("prefill_s", "per_token_s")}
        print(json.dumps({"prompt_ids": request.prompt_ids, "samples": samples} | times | prefix | request.facts))


def _prefix(args: argparse.Namespace, request, generator) -> dict[str, Any]:
    """Returns the bytes of the tokens that samples share: all of the prompt but its last, which each sample keeps."""
    from tree_attn.models.llama.generation import memory

    num_tokens = len(request.prompt_ids) - 1
    once = num_tokens * memory.bytes_per_token(generator)
    prompts = [request.prompt_ids] * args.num_samples
    return {
        "shares_prefix": generator.prefix_tree(prompts, args.share_prefix).num_shared > 0,
        "prefix_tokens": num_tokens,
        "prefix_bytes_shared": once,
        "prefix_bytes_unshared": once * args.num_samples,
    }


def _sentence(prefix: dict[str, Any], num_samples: int) -> str:
    shared, unshared = (f"{prefix[f'prefix_bytes_{name}'] / 1e6:,.1f} MB" for name in ("shared", "unshared"))
    place = "once" if prefix["shares_prefix"] else "for each sample"
    return (
        f"keys and values of the prompt's {prefix['prefix_tokens']:,} common tokens: {shared} held once, {unshared} "
        f"held for each of {num_samples} samples; held {place} here"
    )
