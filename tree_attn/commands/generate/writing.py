"""The text of `tree-attn generate`, printed as it comes by the first process."""

import argparse
import dataclasses
import json
import sys
import time
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
    """Generates from the prompts and prints the text, or with `--json` one document of it."""
    request = open_request(args)
    if len(request.prompts) > 1:
        document, summary = _generate_all(args, request)
    else:
        tokens = SavedTokens(args, _identity(args, request) | request.facts, request.checkpoint.config.vocab_size)
        document, summary = _generate_one(args, request, tokens)
    if is_first_process():
        print(json.dumps(document | request.facts) if args.json else summary, file=None if args.json else sys.stderr)


def _generate_one(args: argparse.Namespace, request: Request, tokens: SavedTokens) -> tuple[dict[str, Any], str]:
    """Prints the saved tokens and then new ones as they come; returns their part of `--json`, and a summary."""
    tokenizer, saved = request.checkpoint.tokenizer, tokens.load()
    stream, is_shown = TextStream(tokenizer), not args.json
    for token in saved.ids:
        show(stream.push(token), is_shown)

    document = {"new_ids": saved.ids, "stopped": saved.stopped, "prefill_s": None, "per_token_s": None}
    if not saved.stopped and len(saved.ids) < args.max_new_tokens:
        with steps() as step, interrupts.saved_by(tokens.save):

            def on_token(_, token: int) -> None:
                tokens.add(token)
                show(stream.push(token), is_shown)
                step()

            result = _continue(args, request, saved.ids, on_token)
        tokens.close(stopped=result.stopped)
        document = {name: getattr(result, name) for name in document}
    show(stream.flush() + "\n", is_shown)
    document = described(tokenizer.decode(document["new_ids"]), request.prompts[0], **document)
    return document, summary(document, request, num_saved=len(saved.ids))


def _generate_all(args: argparse.Namespace, request: Request) -> tuple[dict[str, Any], str]:
    """Prints the texts of several prompts, when all are complete; returns their part of `--json`, and a summary."""
    generator, tokenizer = load_generator(args, request), request.checkpoint.tokenizer
    options = dict(stop_ids=tokenizer.stop_ids, max_batch=args.max_batch)
    times: list[float] = []
    with session.phase(f"generating from {len(request.prompts)} prompts ..."), steps() as step:

        def on_token(*_) -> None:
            times.append(time.perf_counter())
            step()

        results = generate(generator, request.prompts, args.max_new_tokens, **options, on_token=on_token)
    texts = [tokenizer.decode(result.new_ids) for result in results]
    fields = ("new_ids", "stopped", "prefill_s", "per_token_s")
    generations = [
        described(text, result.prompt_ids, **{name: getattr(result, name) for name in fields})
        for result, text in zip(results, texts, strict=True)
    ]
    for number, (text, one) in enumerate(zip(texts, generations, strict=True), start=1):
        show(f"--- prompt {number} of {len(texts)}, {_ending(one)}\n{text}\n", not args.json)
    seconds = times[-1] - times[0] if times else 0.0
    rate = f", {len(times) / seconds:.1f} tokens a second together" if seconds else ""
    return {"generations": generations}, f"{len(texts)} prompts, {len(times)} new tokens{rate} on {_place(request)}"


def described(
    text: str,
    prompt_ids: list[int],
    *,
    new_ids: list[int],
    stopped: bool,
    prefill_s: float | None,
    per_token_s: float | None,
) -> dict[str, Any]:
    """Returns one generation as `--json` has it."""
    return {
        "prompt_ids": prompt_ids,
        "new_ids": new_ids,
        "text": text,
        "finish_reason": "stop" if stopped else "length",
        "prefill_s": prefill_s,
        "per_token_s": per_token_s,
        "tokens_per_s": 1 / per_token_s if per_token_s else None,
    }


def summary(document: dict[str, Any], request: Request, *, num_saved: int = 0) -> str:
    """Returns the lines after a text: how many tokens, why it ended, and how fast they came."""
    lines = [_ending(document) + (f"; {num_saved} of them saved before" if num_saved else "")]
    if document["tokens_per_s"] is not None:
        lines.append(
            f"{document['tokens_per_s']:.1f} tokens a second on {_place(request)}, "
            f"{document['prefill_s']:.2f} s before the first"
        )
    return "\n".join(lines)


def show(text: str, is_shown: bool = True) -> None:
    """Prints text without a line's end, in the first process."""
    if is_shown and is_first_process():
        sys.stdout.write(text)
        sys.stdout.flush()


def _ending(document: dict[str, Any]) -> str:
    reason = "a stop token" if document["finish_reason"] == "stop" else "the limit of --max-new-tokens"
    return f"{len(document['new_ids'])} new tokens up to {reason}"


def _place(request: Request) -> str:
    count, attention, reduction = (request.facts[name] for name in ("n_devices", "attention", "reduction"))
    return f"{count} device{'s' * (count > 1)} by {attention}" + ("" if reduction is None else f" ({reduction})")


def _continue(
    args: argparse.Namespace, request: Request, done: list[int], on_token: Callable[[int, int], None]
) -> Generation:
    generator = load_generator(args, request)
    with session.phase("compiling ..."):
        prompts, first_step = generator.resume([request.prompts[0]], [done])
        generator.compile(prompts, args.max_new_tokens - first_step)
    stop_ids = request.checkpoint.tokenizer.stop_ids
    (result,) = generate(
        generator, [request.prompts[0]], args.max_new_tokens, stop_ids=stop_ids, on_token=on_token, done=[done]
    )
    return result


def _identity(args: argparse.Namespace, request: Request) -> dict[str, Any]:
    """Returns the facts that two runs must have in common for one to continue the other's tokens."""
    numbers = {"dtype": jnp.dtype(request.place.dtype).name}
    # These change the keys and values of the prompt, and so more than rounding. Left out where they are the default.
    options = {name: getattr(args, name) for name in ("cache_dtype", "prefill_chunk")}
    numbers |= {name: value for name, value in options.items() if value is not None}
    identity = {"model": args.model, "prompt_ids": request.prompts[0]}
    return identity | dataclasses.asdict(request.sampling) | numbers
