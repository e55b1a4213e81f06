"""A request to a Llama, checked before its model is read: prompts, sampling, attention and devices."""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from tree_attn.arguments import NARROW_DTYPES, one_of
from tree_attn.commands import processes, session
from tree_attn.devices import runtime_of
from tree_attn.models.llama import Generator, Sampling, by_name
from tree_attn.models.llama.attention_choice import (
    REDUCING,
    check_cache_dtype,
    check_choice,
    check_model_options,
    check_prefill,
    check_prefill_chunk,
)
from tree_attn.models.llama.checkpoint.open import Checkpoint
from tree_attn.models.llama.config import LlamaConfig
from tree_attn.models.llama.generation.request import check_request
from tree_attn.sparq import SparqOptions

DEFAULT_NEW_TOKENS = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A checked request, whose model is opened and not read yet.

    Attributes:
      place: the devices.
      sampling: the choice of tokens.
      checkpoint: the opened model.
      prompts: token ids of each prompt, with the chat template's; none for a conversation.
      facts: for `--json`: attention, the reduction that runs (None until `note_reduction`), the number of
        devices, and SparQ's options.
      sparq: SparQ's options; None for another attention.
    """

    place: session.Place
    sampling: Sampling
    checkpoint: Checkpoint
    prompts: list[list[int]]
    facts: dict[str, Any]
    sparq: SparqOptions | None


def open_request(args: argparse.Namespace) -> Request:
    """Joins the other processes, if any, and opens the model.

    Raises:
      ValueError: an option is wrong; before a model is fetched.
    """
    if args.cache_dtype is not None:
        one_of("--cache-dtype", args.cache_dtype, NARROW_DTYPES)
    sparq = sparq_options(args, [args.attention])
    sampling = Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed)
    processes.join(args, args.devices)
    if args.attention == "single" and args.devices not in (None, 1):
        raise ValueError(f"--devices must be 1 with --attention single, which keeps all keys there, got {args.devices}")
    devices = session.choose_devices(1 if args.attention == "single" and args.devices is None else args.devices)
    place = session.Place(devices=devices, has_two_axes=args.reduction == "hierarchical")
    reduction = check_choice(args.attention, args.reduction, tuple(place.axis_sizes), len(devices), sparq)
    if reduction == "fused" and runtime_of(devices[0]) != "cuda":
        raise NotImplementedError(f"--reduction fused needs NVIDIA GPUs, got {runtime_of(devices[0])!r} devices")
    check_prefill(args.prefill, args.attention)
    check_prefill_chunk(args.attention, args.prefill_chunk, len(devices))
    check_cache_dtype(args.attention, args.cache_dtype)
    checkpoint = session.open_with_progress(args.model)
    check_model_options(args.attention, checkpoint.config, args.prefill_chunk)
    check_prefill(args.prefill, args.attention, checkpoint.config, tuple(place.axis_sizes.values()))
    if sparq is not None:
        sparq.check_head_dim(checkpoint.config.head_dim)
    prompts = _prompts(args, checkpoint)
    facts = {"attention": args.attention, "reduction": reduction, "n_devices": len(devices)}
    facts |= {} if sparq is None else {"sparq": dataclasses.asdict(sparq)}
    return Request(place=place, sampling=sampling, checkpoint=checkpoint, prompts=prompts, facts=facts, sparq=sparq)


def load_generator(args: argparse.Namespace, request: Request) -> Generator:
    """Reads the model onto its devices; returns a generator with the attention of the request."""
    sharding = request.place.sharding(request.checkpoint.config)
    attention = by_name(args.attention, sharding, reduction=args.reduction, prefill=args.prefill, sparq=request.sparq)
    model = session.load_with_progress(request.checkpoint, sharding, request.place.dtype)
    options = dict(cache_dtype=args.cache_dtype, prefill_chunk=args.prefill_chunk)
    return Generator(model, attention, request.sampling, **options)


def note_reduction(request: Request, batch: int) -> None:
    """Puts into the facts the reduction that was picked, where none was named, for `batch` sequences at a time."""
    if request.facts["reduction"] is None and request.facts["attention"] in REDUCING:
        request.facts["reduction"] = request.place.picked_reduction(request.checkpoint.config, batch)


def sparq_options(args: argparse.Namespace, attentions: Sequence[str]) -> SparqOptions | None:
    """Returns SparQ's options; None where `sparq` is not among the attentions.

    Raises:
      ValueError: options of SparQ without it, or one of the two that it needs is missing.
    """
    names = [field.name for field in dataclasses.fields(SparqOptions)]
    values = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    options = ", ".join("--" + name.replace("_", "-") for name in values)
    if "sparq" not in attentions:
        if values:
            raise ValueError(f"{options}: --attention must name sparq, got {args.attention}")
        return None
    if not {"num_components", "num_keys"} <= values.keys():
        raise ValueError(f"--attention sparq needs --num-components and --num-keys, got {options or 'neither'}")
    return SparqOptions(**{"local_window": values["num_keys"] // 4} | values)


def _prompts(args: argparse.Namespace, checkpoint: Checkpoint) -> list[list[int]]:
    """Returns the token ids of the prompts, and resolves the default limit; turns of a conversation come later."""
    if getattr(args, "chat", False):
        checkpoint.tokenizer.render_chat(messages(args, "x"))  # refuses a model without a chat template
        return []
    prompts = [_encode(checkpoint.tokenizer, args, text) for text in args.prompt]
    args.max_new_tokens = check_room(checkpoint.config, max(map(len, prompts)), args.max_new_tokens)
    check_request(checkpoint.config, prompts, args.max_new_tokens)
    return prompts


def check_room(config: LlamaConfig, num_tokens: int, max_new_tokens: int | None) -> int:
    """Returns the limit of new tokens after a prompt: the one given, or 128 or fewer that the positions leave.

    Raises:
      ValueError: prompt and new tokens are more than the model has positions; says what to do.
    """
    room = config.max_position - num_tokens
    if room < 1:
        raise ValueError(
            f"a prompt has {num_tokens} tokens, and the model {config.max_position} positions: shorten the prompt to "
            f"{config.max_position - 1} tokens or fewer, or take a --model with more positions"
        )
    if max_new_tokens is None:
        return min(DEFAULT_NEW_TOKENS, room)
    if max_new_tokens > room:
        raise ValueError(
            f"--max-new-tokens must be at most {room} after a prompt of {num_tokens} tokens, got {max_new_tokens}: the "
            f"model has {config.max_position} positions; lower it or shorten the prompt"
        )
    return max_new_tokens


def messages(args: argparse.Namespace, text: str) -> list[dict[str, str]]:
    """Returns the beginning of a conversation: the system prompt, if there is one, and the user's first turn."""
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [*system, {"role": "user", "content": text}]


def _encode(tokenizer, args: argparse.Namespace, text: str) -> list[int]:
    if args.raw or (tokenizer.chat_template is None and args.system is None):
        return tokenizer.encode(text)
    return tokenizer.encode_chat(messages(args, text))
