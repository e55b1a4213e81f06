"""`tree-attn generate`: a Llama writes, its KV cache sharded over devices."""

import argparse
import dataclasses
import json
import pathlib
import sys

from tree_attn.commands import prompting

HELP = """\
Generate text with a Llama whose KV cache is sharded over devices along the sequence.

examples:
  tree-attn generate --model smollm2 --prompt "Name three rivers in Europe."
  tree-attn generate --model path/to/Llama-3.2-1B-Instruct --prompt "Hello" --temperature 0.7 --top-p 0.9 --seed 1
  tree-attn generate --model model.gguf --raw --prompt "Once upon a time" --attention ring --devices 4
  tree-attn generate --model smollm2 --prompt "Hi" --attention tree --reduction allreduce --json | tail -1
  tree-attn generate --prompt "Hi" --attention sparq --num-components 32 --num-keys 128

Prompts are read by ring attention, and every new token attends by the attention that --attention names. All are exact
but sparq: of every key it reads the --num-components components that matter most to the query, then --num-keys whole.

Under srun or torchrun, the processes generate together, over all of their devices; process 0 prints.

With --out DIR, new tokens are saved every few tokens in DIR/tokens.jsonl. The same command run again goes on after the
last one saved, with the tokens that would have come; once complete, it prints them and makes none.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options; `run` reads them."""
    prompting.add_arguments(parser, temperature=0.0, top_p=None)
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR", help="save tokens there, and go on from those saved")
    parser.add_argument("--save-every", type=int, default=16, metavar="N", help="tokens saved at a time; default 16")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON: ids, text and times")


def run(args: argparse.Namespace) -> int:
    """Generates and prints; returns 0. Wrong arguments raise before a model is fetched or a device is used."""
    from tree_attn.commands.saved_tokens import SavedTokens

    if args.save_every < 1:
        raise ValueError(f"--save-every must be at least 1, got {args.save_every}")
    request = prompting.open_request(args)
    tokens = SavedTokens(args, _identity(args, request) | request.how, is_first=prompting.is_first())
    document = {"prompt_ids": request.prompt_ids} | _generate(args, request, tokens) | request.how
    if args.json and prompting.is_first():
        print(json.dumps(document))
    return 0


def _generate(args: argparse.Namespace, request: prompting.Request, tokens) -> dict:
    """Prints the new tokens as they come, those saved first; returns what `--json` says of them."""
    from models.llama.tokenizer import TextStream

    tokenizer, saved = request.checkpoint.tokenizer, tokens.load()
    stream = TextStream(tokenizer)
    for token in saved.ids:
        _write(stream.push(token))

    def on_token(_, token: int) -> None:
        tokens.add(token)
        _write(stream.push(token))

    document = {"new_ids": saved.ids, "text": None, "prefill_s": None, "per_token_s": None}
    if not saved.is_complete:
        result = _new_tokens(args, request, saved.ids, on_token)
        tokens.close()
        document |= {name: getattr(result, name) for name in ("new_ids", "prefill_s", "per_token_s")}
    _write(stream.flush() + "\n")
    return document | {"text": tokenizer.decode(document["new_ids"])}


def _new_tokens(args: argparse.Namespace, request: prompting.Request, done: list[int], on_token):
    from models.llama import generate, session

    generator = prompting.load_generator(args, request)
    with session.phase("compiling ..."):
        prompts, first_step = generator.going_on([request.prompt_ids], [done])
        generator.programs(prompts, args.max_new_tokens - first_step)
    stop_ids = request.checkpoint.tokenizer.stop_ids
    (result,) = generate(
        generator, [request.prompt_ids], args.max_new_tokens, stop_ids=stop_ids, on_token=on_token, done=[done]
    )
    return result


def _identity(args: argparse.Namespace, request: prompting.Request) -> dict:
    """What two runs must have in common for one to go on with the other's tokens."""
    import jax.numpy as jnp

    limits = {"max_new_tokens": args.max_new_tokens, "dtype": jnp.dtype(request.place.dtype).name}
    limits |= {} if args.cache_dtype is None else {"cache_dtype": args.cache_dtype}
    identity = {"model": args.model, "prompt_ids": request.prompt_ids}
    return identity | dataclasses.asdict(request.sampling) | limits


def _write(text: str) -> None:
    if not prompting.is_first():
        return
    sys.stdout.write(text)
    sys.stdout.flush()
