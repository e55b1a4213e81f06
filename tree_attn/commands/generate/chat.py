"""A conversation of `tree-attn generate --chat`: each turn is answered over the cache of those before it."""

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import jax

from tree_attn.cluster.join import steps
from tree_attn.commands import prompting, session
from tree_attn.commands.generate.described import described, place, reading, show
from tree_attn.commands.request import Request, check_room, load_generator, messages
from tree_attn.commands.units import count
from tree_attn.models.llama import Conversation
from tree_attn.models.llama.checkpoint.tokenizer import TextStream


def converse(args: argparse.Namespace, request: Request) -> tuple[dict[str, Any], str]:
    """Answers the turns in order; returns their part of `--json`, and a summary.

    Raises:
      ValueError: the model has no chat template; or turns come from standard input in several processes.
    """
    if not args.prompt and jax.process_count() > 1:
        raise ValueError("--chat without --prompt reads standard input, which takes a single process")
    conversation = Conversation(load_generator(args, request))
    said = [] if args.system is None else messages(args, "")[:1]
    turns: list[dict[str, Any]] = []
    for text in args.prompt or _lines():
        if args.prompt:
            show(f"> {text}\n", not args.json)
        said.append({"role": "user", "content": text})
        turns.append({"prompt": text} | _answer(args, request, conversation, said))
        said.append({"role": "assistant", "content": turns[-1]["text"]})
    return {"turns": turns}, _summary(turns, request)


def _answer(
    args: argparse.Namespace, request: Request, conversation: Conversation, said: list[dict[str, str]]
) -> dict[str, Any]:
    tokenizer = request.checkpoint.tokenizer
    prompt = tokenizer.encode_chat(said)
    limit = check_room(request.checkpoint.config, len(prompt), args.max_new_tokens)
    with session.phase("compiling ..."):
        conversation.compile(prompt, limit)
    stream = TextStream(tokenizer)
    with steps() as step, reading(len(prompt), limit, is_shown=not args.json) as count_token:

        def on_token(_, token: int) -> None:
            count_token()
            show(stream.push(token), not args.json)
            step()

        result = conversation.answer(prompt, limit, stop_ids=tokenizer.stop_ids, on_token=on_token)
    show(stream.flush() + "\n", not args.json)
    return described(tokenizer, result) | {"reused_tokens": conversation.num_reused}


def _lines() -> Iterator[str]:
    """Yields the lines of standard input; on a terminal each after a sign that one is waited for."""
    is_terminal = sys.stdin.isatty()
    while True:
        if is_terminal:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.buffer.readline()
        if not line:
            return
        try:
            text = prompting.from_utf8("standard input", line).strip()
        except ValueError as error:
            if not is_terminal:
                raise
            print(f"{error}: type the line again", file=sys.stderr)
            continue
        if text:
            yield text


def _summary(turns: list[dict[str, Any]], request: Request) -> str:
    if not turns:
        return "no turns: type a line, or give --prompt"
    new = sum(len(turn["new_ids"]) for turn in turns)
    read, reused = sum(len(turn["prompt_ids"]) for turn in turns), sum(turn["reused_tokens"] for turn in turns)
    rates = [turn["tokens_per_s"] for turn in turns if turn["tokens_per_s"] is not None]
    rate = f"; {rates[-1]:.1f} tokens a second in the last turn" if rates else ""
    return (
        f"{count(len(turns), 'turn')}, {count(new, 'new token')}{rate} on {place(request)}\n"
        f"{reused:,} of {count(read, 'prompt token')} {'was' if reused == 1 else 'were'} in the cache already"
    )
