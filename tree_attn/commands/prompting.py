"""Options of the commands that give a Llama a prompt; `request` reads them."""

import argparse

from tree_attn.commands import processes


def add_arguments(
    parser: argparse.ArgumentParser, *, temperature: float, top_p: float | None, several_prompts: bool = False
) -> None:
    """Adds the options that `request.open_request` reads; `temperature` and `top_p` are the command's defaults."""
    parser.add_argument(
        "--model",
        default="smollm2",
        help="smollm2 (default; 135M parameters, downloaded once), a Hugging Face folder or id, or a .gguf file",
    )
    _add_prompt(parser, several_prompts)
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
        help="allreduce, gather, fused or hierarchical, for tree and sparq; default: the cheapest by the cost model",
    )
    add_sparq_arguments(parser)
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


def _add_prompt(parser: argparse.ArgumentParser, several_prompts: bool) -> None:
    text = "question to the model, or the text that it continues"
    if several_prompts:
        parser.add_argument("--prompt", required=True, action="append", help=f"{text}; may be given several times")
    else:
        parser.add_argument("--prompt", required=True, help=text)
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--chat", action="store_true", help="wrap the prompt in the model's chat template (default if it has one)"
    )
    form.add_argument("--raw", action="store_true", help="send the prompt as it is")
