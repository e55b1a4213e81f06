"""The samples of `tree-attn sample`: drawn together, ranked, and printed by the first process."""

import argparse
import json
from collections.abc import Sequence
from typing import Any

from tree_attn.cluster.join import steps
from tree_attn.commands import session
from tree_attn.commands.request import Request, load_generator, open_request
from tree_attn.models.llama import Generation, Generator, generate, rank_samples
from tree_attn.models.llama.attention_choice import check_sharing
from tree_attn.models.llama.generation import memory
from tree_attn.topology import is_first_process


def draw(args: argparse.Namespace) -> None:
    """Draws the samples and prints the best; with `--json` also a document of all."""
    check_sharing(args.attention, args.share_prefix)
    request = open_request(args)
    generator = load_generator(args, request)
    prompts = [request.prompt_ids] * args.num_samples
    with session.phase("compiling ..."):
        generator.compile(prompts, args.max_new_tokens, share_prefixes=args.share_prefix)
    with session.phase(f"drawing {args.num_samples} samples ..."), steps() as step:
        samples = generate(
            generator,
            [request.prompt_ids],
            args.max_new_tokens,
            num_samples=args.num_samples,
            stop_ids=request.checkpoint.tokenizer.stop_ids,
            share_prefixes=args.share_prefix,
            on_token=lambda *_: step(),
        )
    if is_first_process():
        _print(args, request, rank_samples(samples), _prefix(args, request, generator))


def _print(args: argparse.Namespace, request: Request, ranked: Sequence[Generation], prefix: dict[str, Any]) -> None:
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


def _prefix(args: argparse.Namespace, request: Request, generator: Generator) -> dict[str, Any]:
    """Returns the bytes of the tokens that samples share: all of the prompt but its last, which each sample keeps."""
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
