"""The samples of `tree-attn sample`: drawn together, ranked, and printed by the first process."""

import argparse
import time
from collections.abc import Sequence
from typing import Any

from tree_attn.cluster.join import steps
from tree_attn.commands import session, terminal
from tree_attn.commands.generate.described import place
from tree_attn.commands.request import Request, load_generator, note_reduction, open_request
from tree_attn.commands.units import count, size
from tree_attn.models.llama import Generation, Generator, generate, rank_samples
from tree_attn.models.llama.attention_choice import check_sharing
from tree_attn.models.llama.generation import memory
from tree_attn.topology import is_first_process


def draw(args: argparse.Namespace) -> None:
    """Draws the samples and prints the best of each prompt, or with `--json` one document of all."""
    check_sharing(args.attention, args.share_prefix)
    request = open_request(args)
    generator = load_generator(args, request)
    with session.phase("compiling ..."):
        generator.compile(_repeated(args, request.prompts), args.max_new_tokens, share_prefixes=args.share_prefix)
    num_samples = args.num_samples * len(request.prompts)
    note_reduction(request, num_samples)
    num_tokens, began = 0, time.perf_counter()
    title = f"drawing tokens of {count(num_samples, 'sample')}"
    with session.phase(title, num_samples * args.max_new_tokens) as drawing, steps() as step:

        def on_token(*_) -> None:
            nonlocal num_tokens
            num_tokens += 1
            drawing.advance()
            step()

        samples = generate(
            generator,
            request.prompts,
            args.max_new_tokens,
            num_samples=args.num_samples,
            stop_ids=request.checkpoint.tokenizer.stop_ids,
            share_prefixes=args.share_prefix,
            on_token=on_token,
        )
    seconds = time.perf_counter() - began
    if is_first_process():
        of_prompts = [samples[i : i + args.num_samples] for i in range(0, num_samples, args.num_samples)]
        ranked = [rank_samples(of_prompt) for of_prompt in of_prompts]
        (_print_json if args.json else _print)(args, request, ranked, _prefix(args, request, generator))
        if not args.json:
            drawn = f"{count(num_samples, 'sample')}, {count(num_tokens, 'new token')}"
            rate = f"{num_tokens / seconds:.1f} tokens a second together on {place(request)}"
            terminal.say(terminal.output(), f"--- {drawn}, {rate}")


def _print(
    args: argparse.Namespace, request: Request, ranked: Sequence[Sequence[Generation]], prefix: dict[str, Any]
) -> None:
    for number, samples in enumerate(ranked, start=1):
        of_prompt = f"prompt {number} of {len(ranked)}, " if len(ranked) > 1 else ""
        for rank, sample in enumerate(samples[: args.top], start=1):
            mean = f"mean log-probability {sample.mean_log_probability:.3f}"
            print(f"--- {of_prompt}{rank} of {count(len(samples), 'different sample')}: {mean}")
            print(request.checkpoint.tokenizer.decode(sample.new_ids))
    print(f"--- {_sentence(prefix, args.num_samples)}")


def _print_json(
    args: argparse.Namespace, request: Request, ranked: Sequence[Sequence[Generation]], prefix: dict[str, Any]
) -> None:
    decode = request.checkpoint.tokenizer.decode
    prompts = [
        {
            "prompt_ids": prompt_ids,
            "samples": [
                {
                    "new_ids": sample.new_ids,
                    "text": decode(sample.new_ids),
                    "finish_reason": "stop" if sample.stopped else "length",
                    "log_probability": sample.log_probability,
                    "mean_log_probability": sample.mean_log_probability,
                }
                for sample in samples
            ],
        }
        for prompt_ids, samples in zip(request.prompts, ranked, strict=True)
    ]
    times = {name: getattr(ranked[0][0], name) for name in ("prefill_s", "per_token_s")}
    document = prompts[0] if len(prompts) == 1 else {"prompts": prompts}
    terminal.print_document(document | times | prefix | request.facts)


def _repeated(args: argparse.Namespace, prompts: Sequence[list[int]]) -> list[list[int]]:
    return [prompt for prompt in prompts for _ in range(args.num_samples)]


def _prefix(args: argparse.Namespace, request: Request, generator: Generator) -> dict[str, Any]:
    """Returns the bytes of the tokens that samples share: all of a prompt but its last, which each sample keeps."""
    num_tokens = sum(len(prompt) - 1 for prompt in request.prompts)
    once = sum(memory.bytes_kept(generator, len(prompt) - 1) for prompt in request.prompts)
    prompts = _repeated(args, request.prompts)
    return {
        "shares_prefix": generator.prefix_tree(prompts, args.share_prefix).num_shared > 0,
        "prefix_tokens": num_tokens,
        "prefix_bytes_shared": once,
        "prefix_bytes_unshared": once * args.num_samples,
    }


def _sentence(prefix: dict[str, Any], num_samples: int) -> str:
    shared, unshared = (size(prefix[f"prefix_bytes_{name}"]) for name in ("shared", "unshared"))
    once, each = (" (as here)", "") if prefix["shares_prefix"] else ("", " (as here)")
    tokens = count(prefix["prefix_tokens"], "prompt token")
    if num_samples == 1:
        return f"keys and values of {tokens}: {shared}"
    return (
        f"keys and values of {tokens} that samples share:\n"
        f"    {shared} in all if held once{once},\n"
        f"    {unshared} in all if each of {num_samples} samples held them{each}"
    )
