"""The text of `tree-attn generate`, printed as it comes by the first process."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from tree_attn.cluster.join import steps
from tree_attn.commands import interrupts, session
from tree_attn.commands.generate.saved_tokens import SavedTokens
from tree_attn.commands.request import Request, load_generator, open_request
from tree_attn.models.llama import Generation, generate
from tree_attn.models.llama.checkpoint.tokenizer import TextStream
from tree_attn.topology import is_first_process


def write(args: argparse.Namespace) -> None:
    """Generates from the prompts, prints the text, and with `--json` a document of it."""
    request = open_request(args)
    if len(request.prompts) > 1:
        document = _generate_all(args, request)
    else:
        tokens = SavedTokens(args, _identity(args, request) | request.facts, request.checkpoint.config.vocab_size)
        document = {"prompt_ids": request.prompt_ids} | _generate_one(args, request, tokens)
    if args.json and is_first_process():
        print(json.dumps(document | request.facts))


def _generate_one(args: argparse.Namespace, request: Request, tokens: SavedTokens) -> dict[str, Any]:
    """Prints the saved tokens and then new ones as they come; returns their part of `--json`."""
    tokenizer, saved = request.checkpoint.tokenizer, tokens.load()
    stream = TextStream(tokenizer)
    for token in saved.ids:
        _print(stream.push(token))

    document = {"new_ids": saved.ids, "text": None, "prefill_s": None, "per_token_s": None}
    if not saved.is_complete:
        with steps() as step, interrupts.saved_by(tokens.save):

            def on_token(_, token: int) -> None:
                tokens.add(token)
                _print(stream.push(token))
                step()

            result = _continue(args, request, saved.ids, on_token)
        tokens.close()
        document |= {name: getattr(result, name) for name in ("new_ids", "prefill_s", "per_token_s")}
    _print(stream.flush() + "\n")
    return document | {"text": tokenizer.decode(document["new_ids"])}


def _generate_all(args: argparse.Namespace, request: Request) -> dict[str, Any]:
    """Prints the texts of several prompts, when all are complete; returns their part of `--json`."""
    generator, tokenizer = load_generator(args, request), request.checkpoint.tokenizer
    options = dict(stop_ids=tokenizer.stop_ids, max_batch=args.max_batch)
    with session.phase(f"generating from {len(request.prompts)} prompts ..."), steps() as step:
        results = generate(generator, request.prompts, args.max_new_tokens, **options, on_token=lambda *_: step())
    texts = [tokenizer.decode(result.new_ids) for result in results]
    for number, text in enumerate(texts, start=1):
        _print(f"--- prompt {number} of {len(texts)}\n{text}\n")
    fields = ("prompt_ids", "new_ids", "stopped", "prefill_s", "per_token_s")
    return {
        "generations": [
            {"text": text} | {name: getattr(result, name) for name in fields}
            for result, text in zip(results, texts, strict=True)
        ]
    }


def _continue(
    args: argparse.Namespace, request: Request, done: list[int], on_token: Callable[[int, int], None]
) -> Generation:
    generator = load_generator(args, request)
    with session.phase("compiling ..."):
        prompts, first_step = generator.resume([request.prompt_ids], [done])
        generator.compile(prompts, args.max_new_tokens - first_step)
    stop_ids = request.checkpoint.tokenizer.stop_ids
    (result,) = generate(
        generator, [request.prompt_ids], args.max_new_tokens, stop_ids=stop_ids, on_token=on_token, done=[done]
    )
    return result


def _identity(args: argparse.Namespace, request: Request) -> dict[str, Any]:
    """Returns the facts that two runs must have in common for one to continue the other's tokens."""
    limits = {"max_new_tokens": args.max_new_tokens, "dtype": jnp.dtype(request.place.dtype).name}
    # These change the keys and values of the prompt, and so more than rounding. Left out where they are the default.
    options = {name: getattr(args, name) for name in ("cache_dtype", "prefill_chunk")}
    limits |= {name: value for name, value in options.items() if value is not None}
    identity = {"model": args.model, "prompt_ids": request.prompt_ids}
    return identity | dataclasses.asdict(request.sampling) | limits


def _print(text: str) -> None:
    """Prints text without a line's end, in the first process."""
    if is_first_process():
        sys.stdout.write(text)
        sys.stdout.flush()
