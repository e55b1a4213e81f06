"""`tree-attn generate`: a Llama writes, its KV cache sharded over devices."""

import argparse
import dataclasses
import json
import pathlib
import sys

from tree_attn.commands import processes

HELP = """\
Generate text with a Llama whose KV cache is sharded over devices along the sequence.

examples:
  tree-attn generate --model smollm2 --prompt "Name three rivers in Europe."
  tree-attn generate --model path/to/Llama-3.2-1B-Instruct --prompt "Hello" --temperature 0.7 --top-p 0.9 --seed 1
  tree-attn generate --model model.gguf --raw --prompt "Once upon a time" --attention ring --devices 4
  tree-attn generate --model smollm2 --prompt "Hi" --attention tree --reduction allreduce --json | tail -1

Prompts are read by ring attention, and every new token attends by the attention that --attention names.

Under srun or torchrun, the processes generate together, over all of their devices; process 0 prints.

With --out DIR, new tokens are saved every few tokens in DIR/tokens.jsonl. The same command run again goes on after the
last one saved, with the tokens that would have come; once complete, it prints them and makes none.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options; `run` reads them."""
    parser.add_argument(
        "--model",
        default="smollm2",
        help="smollm2 (default; 135M parameters, downloaded once), a Hugging Face folder or id, or a .gguf file",
    )
    parser.add_argument("--prompt", required=True, help="what the model is asked, or the text it continues")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--chat", action="store_true", help="wrap the prompt in the model's chat template (default if it has one)"
    )
    form.add_argument("--raw", action="store_true", help="send the prompt as it is")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="stop after N tokens; default 128")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 (default) is greedy")
    parser.add_argument("--top-k", type=int, metavar="K", help="draw among the K most likely tokens only")
    parser.add_argument("--top-p", type=float, metavar="P", help="draw among the most likely tokens that make up P")
    parser.add_argument("--seed", type=int, default=0, help="the same seed draws the same tokens; default 0")
    parser.add_argument("--attention", default="tree", metavar="NAME", help="tree (default), ring or single")
    parser.add_argument(
        "--reduction", metavar="NAME", help="of tree: allreduce, gather, fused or hierarchical; default: its own choice"
    )
    parser.add_argument(
        "--devices", type=int, metavar="N", help="default: all accelerators, or 8 emulated; single has 1"
    )
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR", help="save tokens there, and go on from those saved")
    parser.add_argument("--save-every", type=int, default=16, metavar="N", help="tokens saved at a time; default 16")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON: ids, text and times")
    processes.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Generates and prints; returns 0. Wrong arguments raise before a model is fetched or a device is used."""
    from models.llama import Sampling, session
    from models.llama.attention import check_choice
    from models.llama.generate import check_request
    from tree_attn.commands.saved_tokens import SavedTokens

    if args.save_every < 1:
        raise ValueError(f"--save-every must be at least 1, got {args.save_every}")
    sampling = Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed)
    processes.join(args, args.devices)
    devices = session.choose_devices(1 if args.attention == "single" and args.devices is None else args.devices)
    place = session.Place(devices=devices, two_levels=args.reduction == "hierarchical")
    reduction = check_choice(args.attention, args.reduction, place.axes, len(devices))
    checkpoint = session.open_with_progress(args.model)
    prompt_ids = _encode(checkpoint.tokenizer, args)
    check_request(checkpoint.config, [prompt_ids], args.max_new_tokens)
    how = {"attention": args.attention, "reduction": reduction, "n_devices": len(devices)}
    tokens = SavedTokens(args, _identity(args, prompt_ids, sampling, place) | how, is_first=_is_first())
    document = {"prompt_ids": prompt_ids} | _generate(args, checkpoint, place, sampling, tokens, prompt_ids) | how
    if args.json and _is_first():
        print(json.dumps(document))
    return 0


def _generate(args: argparse.Namespace, checkpoint, place, sampling, tokens, prompt_ids: list[int]) -> dict:
    """Prints the new tokens as they come, those saved first; returns what `--json` says of them."""
    from models.llama.tokenizer import TextStream

    saved = tokens.load()
    stream = TextStream(checkpoint.tokenizer)
    for token in saved.ids:
        _write(stream.push(token))

    def on_token(_, token: int) -> None:
        tokens.add(token)
        _write(stream.push(token))

    document = {"new_ids": saved.ids, "text": None, "prefill_s": None, "per_token_s": None}
    if not saved.is_complete:
        result = _new_tokens(args, checkpoint, place, sampling, prompt_ids, saved.ids, on_token)
        tokens.close()
        document |= {name: getattr(result, name) for name in ("new_ids", "prefill_s", "per_token_s")}
    _write(stream.flush() + "\n")
    return document | {"text": checkpoint.tokenizer.decode(document["new_ids"])}


def _new_tokens(args: argparse.Namespace, checkpoint, place, sampling, prompt_ids, done, on_token):
    from models.llama import Generator, by_name, generate, session

    sharding = place.sharding(checkpoint.config)
    attention = by_name(args.attention, sharding, reduction=args.reduction)
    model = session.load_with_progress(checkpoint, sharding, place.dtype)
    generator = Generator(model, attention, sampling)
    with session.phase("compiling ..."):
        generator.programs([[*prompt_ids, *done]], args.max_new_tokens - len(done))
    stop_ids = checkpoint.tokenizer.stop_ids
    (result,) = generate(
        generator, [prompt_ids], args.max_new_tokens, stop_ids=stop_ids, on_token=on_token, done=[done]
    )
    return result


def _identity(args: argparse.Namespace, prompt_ids: list[int], sampling, place) -> dict:
    """What two runs must have in common for one to go on with the other's tokens."""
    import jax.numpy as jnp

    limits = {"max_new_tokens": args.max_new_tokens, "dtype": jnp.dtype(place.dtype).name}
    return {"model": args.model, "prompt_ids": prompt_ids} | dataclasses.asdict(sampling) | limits


def _is_first() -> bool:
    """Whether this process prints and writes."""
    import jax

    return jax.process_index() == 0


def _encode(tokenizer, args: argparse.Namespace) -> list[int]:
    is_chat = args.chat or (not args.raw and tokenizer.chat_template is not None)
    if not is_chat:
        return tokenizer.encode(args.prompt)
    return tokenizer.encode_chat([{"role": "user", "content": args.prompt}])


def _write(text: str) -> None:
    if not _is_first():
        return
    sys.stdout.write(text)
    sys.stdout.flush()
