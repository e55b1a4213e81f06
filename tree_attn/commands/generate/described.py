"""A generation in words and for `--json`, and text printed as it comes by the first process."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from tree_attn.commands import session
from tree_attn.commands.request import Request
from tree_attn.commands.units import count, time
from tree_attn.models.llama import Generation
from tree_attn.models.llama.checkpoint.tokenizer import Tokenizer
from tree_attn.topology import is_first_process


def described(tokenizer: Tokenizer, result: Generation) -> dict[str, Any]:
    """Returns one generation as `--json` has it."""
    return from_saved(tokenizer, result.prompt_ids, result.new_ids, stopped=result.stopped) | {
        "prefill_s": result.prefill_s,
        "per_token_s": result.per_token_s,
        "tokens_per_s": 1 / result.per_token_s if result.per_token_s else None,
    }


def from_saved(tokenizer: Tokenizer, prompt_ids: list[int], new_ids: list[int], *, stopped: bool) -> dict[str, Any]:
    """Returns a generation of an earlier run as `--json` has it: without times."""
    return {
        "prompt_ids": prompt_ids,
        "new_ids": new_ids,
        "text": tokenizer.decode(new_ids),
        "finish_reason": "stop" if stopped else "length",
        "prefill_s": None,
        "per_token_s": None,
        "tokens_per_s": None,
    }


def summary(document: dict[str, Any], request: Request, *, num_saved: int = 0) -> str:
    """Returns the lines after a text: how many tokens, why it ended, and how fast they came."""
    lines = [ending(document) + (f"; {num_saved} of them saved before" if num_saved else "")]
    if document["tokens_per_s"] is not None:
        before = time(document["prefill_s"] * 1e6)
        lines.append(f"{document['tokens_per_s']:.1f} tokens a second on {place(request)}, {before} before the first")
    return "\n".join(lines)


@contextlib.contextmanager
def reading(num_tokens: int, max_new_tokens: int, *, is_shown: bool) -> Iterator[Callable[[], None]]:
    """Shows that a prompt is read, until the function that it gives is called, which is to be at each new token.

    Args:
      num_tokens: of the prompt.
      max_new_tokens: the limit of new ones.
      is_shown: new tokens are printed; else it is shown that they are generated, while the block runs.
    """
    with contextlib.ExitStack() as after, contextlib.ExitStack() as before:
        generating = []
        if not is_shown:
            begin = lambda: after.enter_context(session.phase("generating", max_new_tokens))
            before.callback(lambda: generating.append(begin()))
        before.enter_context(session.phase(f"reading {count(num_tokens, 'token')}"))

        def count_token() -> None:
            before.close()
            for phase in generating:
                phase.advance()

        yield count_token


def show(text: str, is_shown: bool = True) -> None:
    """Prints text without a line's end, in the first process."""
    if is_shown and is_first_process():
        sys.stdout.write(text)
        sys.stdout.flush()


def ending(document: dict[str, Any]) -> str:
    """Returns how many tokens there are, and why there are no more."""
    reason = "a stop token" if document["finish_reason"] == "stop" else "the limit of --max-new-tokens"
    return f"{count(len(document['new_ids']), 'new token')} up to {reason}"


def place(request: Request) -> str:
    """Returns the devices and the attention in words."""
    n_devices, attention, reduction = (request.facts[name] for name in ("n_devices", "attention", "reduction"))
    return f"{count(n_devices, 'device')} by {attention}" + ("" if reduction is None else f" ({reduction})")
