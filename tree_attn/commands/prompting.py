"""What the commands share that give a Llama a prompt: their options, and a request that is checked before it is run."""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from tree_attn.commands import processes


def add_arguments(
    parser: argparse.ArgumentParser, *, temperature: float, top_p: float | None, several_prompts: bool = False
) -> None:
    """Declares the options that `open_request` reads; `temperature` and `top_p` are the command's defaults."""
    parser.add_argument(
        "--model",
        default="smollm2",
        help="smollm2 (default; 135M parameters, downloaded once), a Hugging Face folder or id, or a .gguf file",
    )
    says = "what the model is asked, or the text it continues"
    if several_prompts:
        parser.add_argument("--prompt", required=True, action="append", help=f"{says}; may be given several times")
    else:
        parser.add_argument("--prompt", required=True, help=says)
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--chat", action="store_true", help="wrap the prompt in the model's chat template (default if it has one)"
    )
    form.add_argument("--raw", action="store_true", help="send the prompt as it is")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="stop after N tokens; default 128")
    parser.add_argument(
        "--temperature", type=float, default=temperature, metavar="T", help=f"0 is greedy; default {temperature:g}"
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="draw among the K most likely tokens only")
    parser.add_argument(
        "--top-p",
        type=float,
        default=top_p,
        metavar="P",
        help=f"draw among the most likely tokens that make up P; default {1 if top_p is None else top_p:g}",
    )
    parser.add_argument("--seed", type=int, default=0, help="the same seed draws the same tokens; default 0")
    parser.add_argument("--attention", default="tree", metavar="NAME", help="tree (default), ring, single or sparq")
    parser.add_argument(
        "--reduction",
        metavar="NAME",
        help="of tree and sparq: allreduce, gather, fused or hierarchical; default: its own choice",
    )
    add_sparq_arguments(parser)
    parser.add_argument(
        "--cache-dtype",
        metavar="DTYPE",
        help="of keys and values; default: the model's; or float8_e4m3fn, or int8 (not of sparq)",
    )
    parser.add_argument(
        "--prefill-chunk",
        type=int,
        metavar="N",
        help="tokens of a prompt that are read at a time, a multiple of the devices; default: all (ring: always)",
    )
    parser.add_argument(
        "--devices", type=int, metavar="N", help="default: all accelerators, or 8 emulated; single has 1"
    )
    processes.add_arguments(parser)


def add_sparq_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options that `sparq_options` reads."""
    sparq = parser.add_argument_group("of sparq")
    sparq.add_argument("--num-components", type=int, metavar="R", help="of every key, read to choose among them")
    sparq.add_argument("--num-keys", type=int, metavar="K", help="keys and values read whole for each token")
    sparq.add_argument("--local-window", type=int, metavar="L", help="newest keys, always among them; default K / 4")
    sparq.add_argument("--selection", metavar="NAME", help="the K best of all (global, default) or of each per_shard")
    sparq.add_argument(
        "--score-temperature", metavar="NAME", help="of step 1: coverage (default), head_dim or num_components"
    )
    sparq.add_argument(
        "--reallocate",
        action=argparse.BooleanOptionalAction,
        help="give the mean value the weight of what is left out; default: only without grouped heads",
    )


def sparq_options(args: argparse.Namespace, attentions: Sequence[str]):
    """The `SparqOptions` that were asked for; None where `sparq` is not among the attentions: no other takes them."""
    from tree_attn import SparqOptions

    names = [field.name for field in dataclasses.fields(SparqOptions)]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    options = ", ".join("--" + name.replace("_", "-") for name in given)
    if "sparq" not in attentions:
        if given:
            raise ValueError(f"{options}: of --attention sparq only, and it is {args.attention}")
        return None
    if not {"num_components", "num_keys"} <= given.keys():
        raise ValueError(f"--attention sparq needs --num-components and --num-keys, got {options or 'neither'}")
    return SparqOptions(**{"local_window": given["num_keys"] // 4} | given)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A checked request, whose model is opened and not read yet.

    Attributes:
      place: `session.Place`; sampling: `Sampling`; checkpoint: `load.Checkpoint`.
      prompts: token ids of the prompts as they are sent.
      how: attention, the reduction that will run, the number of devices and SparQ's options, for `--json`.
      sparq: these options, of `sparq`.
    """

    place: Any
    sampling: Any
    checkpoint: Any
    prompts: list[list[int]]
    how: dict[str, Any]
    sparq: Any

    @property
    def prompt_ids(self) -> list[int]:
        """The one prompt."""
        (prompt,) = self.prompts
        return prompt


def open_request(args: argparse.Namespace) -> Request:
    """Joins the other processes, if any, and opens the model. Wrong options raise before a model is fetched."""
    from tree_attn.arguments import NARROW_DTYPES, one_of
    from tree_attn.commands import session
    from tree_attn.models.llama import Sampling
    from tree_attn.models.llama.attention import check_cache_dtype, check_choice, check_prefill_chunk
    from tree_attn.models.llama.generation.generator import check_request

    if args.cache_dtype is not None:
        one_of("--cache-dtype", args.cache_dtype, NARROW_DTYPES)
    sparq = sparq_options(args, [args.attention])
    sampling = Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed)
    processes.join(args, args.devices)
    devices = session.choose_devices(1 if args.attention == "single" and args.devices is None else args.devices)
    place = session.Place(devices=devices, two_levels=args.reduction == "hierarchical")
    reduction = check_choice(args.attention, args.reduction, place.axes, len(devices), sparq)
    check_prefill_chunk(args.attention, args.prefill_chunk, len(devices))
    check_cache_dtype(args.attention, args.cache_dtype)
    checkpoint = session.open_with_progress(args.model)
    if sparq is not None:
        sparq.check_head_dim(checkpoint.config.head_dim)
    texts = [args.prompt] if isinstance(args.prompt, str) else args.prompt
    prompts = [_encode(checkpoint.tokenizer, args, text) for text in texts]
    check_request(checkpoint.config, prompts, args.max_new_tokens)
    how = {"attention": args.attention, "reduction": reduction, "n_devices": len(devices)}
    how |= {} if sparq is None else {"sparq": dataclasses.asdict(sparq)}
    return Request(place=place, sampling=sampling, checkpoint=checkpoint, prompts=prompts, how=how, sparq=sparq)


def load_generator(args: argparse.Namespace, request: Request):
    """Reads the model onto its devices: a `Generator` with the attention that was asked for."""
    from tree_attn.commands import session
    from tree_attn.models.llama import Generator, by_name

    sharding = request.place.sharding(request.checkpoint.config)
    attention = by_name(args.attention, sharding, reduction=args.reduction, sparq=request.sparq)
    model = session.load_with_progress(request.checkpoint, sharding, request.place.dtype)
    how = dict(cache_dtype=args.cache_dtype, prefill_chunk=args.prefill_chunk)
    return Generator(model, attention, request.sampling, **how)


def is_first() -> bool:
    """Whether this process prints and writes."""
    import jax

    return jax.process_index() == 0


def _encode(tokenizer, args: argparse.Namespace, text: str) -> list[int]:
    is_chat = args.chat or (not args.raw and tokenizer.chat_template is not None)
    if not is_chat:
        return tokenizer.encode(text)
    return tokenizer.encode_chat([{"role": "user", "content": text}])
