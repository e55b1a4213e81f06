"""The text of `tree-attn generate`, printed as it comes by the first process."""

import argparse
import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from tree_attn.cluster.join import steps
from tree_attn.commands import interrupts, session, terminal
from tree_attn.commands.generate.chat import converse
from tree_attn.commands.generate.described import described, ending, from_saved, place, reading, show, summary
from tree_attn.commands.generate.saved_tokens import SavedTokens
from tree_attn.commands.phases import print_wrapped
from tree_attn.commands.request import Request, load_generator, note_reduction, open_request
from tree_attn.commands.units import count
from tree_attn.models.llama import Generation, generate
from tree_attn.models.llama.checkpoint.tokenizer import TextStream
from tree_attn.topology import is_first_process


def write(args: argparse.Namespace) -> None:
    """Generates from the prompts and prints the text, or with `--json` one document of it."""
    request = open_request(args)
    identity = dict(request.facts)  # with the options as they were given
    num_prompts = max(len(request.prompts), 1)
    note_reduction(request, min(args.max_batch or num_prompts, num_prompts))
    if args.chat:
        document, words = converse(args, request)
    elif len(request.prompts) > 1:
        document, words = _generate_all(args, request)
    else:
        tokens = SavedTokens(args, _identity(args, request) | identity, request.checkpoint.config.vocab_size)
        document, words = _generate_one(args, request, tokens)
    if is_first_process():
        if args.json:
            terminal.print_document(document | request.facts)
        elif not args.quiet:
            print_wrapped(words)


def _generate_one(args: argparse.Namespace, request: Request, tokens: SavedTokens) -> tuple[dict[str, Any], str]:
    """Prints the saved tokens and then new ones as they come; returns their part of `--json`, and a summary."""
    tokenizer, saved = request.checkpoint.tokenizer, tokens.load()
    stream, is_shown = TextStream(tokenizer), not args.json
    saved_text = "".join(map(stream.push, saved.ids))
    prompt, num_saved = request.prompts[0], len(saved.ids)
    if saved.stopped or num_saved >= args.max_new_tokens:
        show(saved_text, is_shown)
        document = from_saved(tokenizer, prompt, saved.ids, stopped=saved.stopped)
    else:
        with steps() as step, interrupts.saved_by(tokens.save), contextlib.ExitStack() as before:
            before.callback(show, saved_text, is_shown)  # not earlier: a bar would be drawn over it

            def on_token(_, token: int) -> None:
                before.close()
                tokens.add(token)
                show(stream.push(token), is_shown)
                step()

            result = _continue(args, request, saved.ids, on_token)
        tokens.close(stopped=result.stopped)
        document = described(tokenizer, result)
    show(stream.flush() + "\n", is_shown)
    return document, summary(document, request, num_saved=num_saved)


def _generate_all(args: argparse.Namespace, request: Request) -> tuple[dict[str, Any], str]:
    """Prints the texts of several prompts, when all are complete; returns their part of `--json`, and a summary."""
    generator, tokenizer = load_generator(args, request), request.checkpoint.tokenizer
    options = dict(stop_ids=tokenizer.stop_ids, max_batch=args.max_batch)
    times: list[float] = []
    total = len(request.prompts) * args.max_new_tokens
    title = f"generating tokens from {count(len(request.prompts), 'prompt')}"
    with session.phase(title, total) as generating, steps() as step:

        def on_token(*_) -> None:
            times.append(time.perf_counter())
            generating.advance()
            step()

        results = generate(generator, request.prompts, args.max_new_tokens, **options, on_token=on_token)
    generations = [described(tokenizer, result) for result in results]
    for number, one in enumerate(generations, start=1):
        show(f"--- prompt {number} of {len(results)}, {ending(one)}\n{one['text']}\n", not args.json)
    seconds = times[-1] - times[0] if times else 0.0
    rate = f", {len(times) / seconds:.1f} tokens a second together" if seconds else ""
    done = f"{count(len(results), 'prompt')}, {count(len(times), 'new token')}"
    return {"generations": generations}, f"{done}{rate} on {place(request)}"


def _continue(
    args: argparse.Namespace,
    request: Request,
    done: list[int],
    on_token: Callable[[int, int], None],
) -> Generation:
    generator = load_generator(args, request)
    with session.phase("compiling ..."):
        prompts, first_step = generator.resume([request.prompts[0]], [done])
        generator.compile(prompts, args.max_new_tokens - first_step)
    stop_ids = request.checkpoint.tokenizer.stop_ids
    limit = args.max_new_tokens - len(done)
    with reading(len(prompts[0]), limit, is_shown=not args.json) as count_token:

        def on_any_token(row: int, token: int) -> None:
            count_token()
            on_token(row, token)

        options = dict(stop_ids=stop_ids, on_token=on_any_token, done=[done])
        (result,) = generate(generator, [request.prompts[0]], args.max_new_tokens, **options)
    return result


def _identity(args: argparse.Namespace, request: Request) -> dict[str, Any]:
    """Returns the facts that two runs must have in common for one to continue the other's tokens."""
    numbers = {"dtype": jnp.dtype(request.place.dtype).name}
    # These change the keys and values of the prompt, and so more than rounding. Left out where they are the default.
    options = {name: getattr(args, name) for name in ("cache_dtype", "prefill_chunk")}
    numbers |= {name: value for name, value in options.items() if value is not None}
    identity = {"model": args.model, "prompt_ids": request.prompts[0]}
    return identity | dataclasses.asdict(request.sampling) | numbers
