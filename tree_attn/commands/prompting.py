"""Options of the commands that give a Llama prompts, and the prompts themselves; `request` reads the rest."""

import argparse
import json
import pathlib
import sys

from tree_attn.commands import processes
from tree_attn.commands.options import check_at_least

STANDARD_INPUT = "-"
PREFILL_HELP = (
    "way to read prompts: ring (default), ring_joint, ring_two_way or ulysses, which with --reduction hierarchical has "
    "a ring across the second axis"
)


def add_arguments(parser: argparse.ArgumentParser, *, temperature: float, top_p: float | None) -> None:
    """Adds the options that `request.open_request` reads; `temperature` and `top_p` are the command's defaults."""
    parser.add_argument(
        "--model",
        default="smollm2",
        help="smollm2 (default; 135M parameters, downloaded once), a Hugging Face folder or id, or a .gguf file",
    )
    _add_prompts(parser)
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="stop after N tokens; default 128, or what the model's positions leave",
    )
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
        help="allreduce, gather, fused or hierarchical, for tree and sparq; default: the cheapest by the cost model",
    )
    add_sparq_arguments(parser)
    parser.add_argument("--prefill", metavar="NAME", help=PREFILL_HELP)
    parser.add_argument(
        "--cache-dtype",
        metavar="DTYPE",
        help="dtype of keys and values; default: the model's; or float8_e4m3fn, or int8 (not with sparq)",
    )
    parser.add_argument(
        "--prefill-chunk",
        type=int,
        metavar="N",
        help="prompt tokens read at a time, a multiple of the devices; default: all (ring: always)",
    )
    parser.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="number of devices; default: all accelerators, or 8 emulated; 1 for single",
    )
    processes.add_arguments(parser)


def add_sparq_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `request.sparq_options` reads."""
    sparq = parser.add_argument_group("options of sparq")
    sparq.add_argument("--num-components", type=int, metavar="R", help="components of every key, read to choose keys")
    sparq.add_argument("--num-keys", type=int, metavar="K", help="keys and values read whole for each token")
    sparq.add_argument("--local-window", type=int, metavar="L", help="newest keys, always among these K; default K / 4")
    sparq.add_argument(
        "--selection", metavar="NAME", help="global (default): the K best keys of all; per_shard: of each shard"
    )
    sparq.add_argument(
        "--score-temperature",
        metavar="NAME",
        help="temperature of step 1: coverage (default), head_dim or num_components",
    )
    sparq.add_argument(
        "--reallocate",
        action=argparse.BooleanOptionalAction,
        help="give the mean value the weight of the keys left out; default: only without grouped heads",
    )


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="question to the model, or the text that it continues; may be given several times",
    )
    parser.add_argument(
        "--prompt-file",
        action="append",
        metavar="FILE",
        help="a prompt in UTF-8, or a .jsonl file of prompts, a JSON text a line; - is standard input",
    )
    parser.add_argument(
        "--system", metavar="TEXT", help="system prompt: goes before the prompt in the model's chat template"
    )
    parser.add_argument(
        "--raw", action="store_true", help="send the prompt as it is, without the model's chat template"
    )


def read_prompts(args: argparse.Namespace, *, may_be_none: bool = False) -> None:
    """Puts the texts of all prompts into `args.prompt`: those of `--prompt`, then those of the files.

    Args:
      args: the options; its `prompt` is replaced.
      may_be_none: whether there need not be a prompt.

    Raises:
      ValueError: there is no prompt, bytes are not UTF-8, a line of a .jsonl file is no JSON text, or a limit or
        `--system` is wrong; before JAX is imported or a model is read.
    """
    check_at_least(args, max_new_tokens=1)
    if args.system is not None and args.raw:
        raise ValueError("--system needs the model's chat template: it must be left out with --raw")
    texts = list(args.prompt or ())
    for option, values in (("--prompt", texts), ("--system", [args.system or ""])):
        for text in values:
            from_utf8(option, text.encode("utf-8", "surrogateescape"))
    check_not_empty(*texts)
    for name in args.prompt_file or ():
        texts += _read(name)
    if not texts and not may_be_none:
        raise ValueError("a prompt must be given: --prompt TEXT, --prompt-file FILE, or --prompt-file - for a pipe")
    args.prompt = texts


def check_not_empty(*prompts: str) -> None:
    """Raises ValueError where a value of `--prompt` has nothing to answer or to continue."""
    for text in prompts:
        if not text.strip():
            raise ValueError(f"--prompt must be a text, got {text!r}")


def _read(name: str) -> list[str]:
    """Returns the prompts of a file."""
    is_input = name == STANDARD_INPUT
    content = sys.stdin.buffer.read() if is_input else pathlib.Path(name).expanduser().read_bytes()
    where = "standard input" if is_input else name
    text = from_utf8(where, content)
    if not text.strip():
        raise ValueError(f"--prompt-file must hold a prompt, got nothing from {where}")
    if not name.endswith(".jsonl"):
        # An editor's last line end is no part of the prompt.
        return [text.removesuffix("\n").removesuffix("\r")]
    return [_json_text(f"{where}, line {i}", line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]


def _json_text(where: str, line: str) -> str:
    try:
        text = json.loads(line)
    except ValueError:
        text = None
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f'{where} must be a JSON text such as "Hello", got {line[:80]!r}')
    return text


def from_utf8(where: str, content: bytes) -> str:
    """Returns the text of UTF-8 bytes; raises ValueError, with the place of the first byte that is none."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} must be UTF-8, got byte 0x{content[error.start]:02x} at {error.start}") from None
