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
  tree-attn generate --prompt "Hi" --prompt "What is JAX?" --prompt "Name a river." --max-batch 2
  tree-attn generate --prompt "Hi" --attention sparq --num-components 32 --num-keys 128

Prompts are read by ring attention, and every new token attends by the attention that --attention names. All are exact
but sparq: of every key it reads the --num-components components that matter most to the query, then --num-keys whole.

Under srun or torchrun, the processes generate together, over all of their devices; process 0 prints.

With --out DIR, new tokens are saved every few tokens in DIR/tokens.jsonl. The same command run again goes on after the
last one saved, with the tokens that would have come; once complete, it prints them and makes none.

Several prompts are decoded together, and printed when all are done. With --max-batch N at most N are held at a time:
one that has stopped makes room for the next, while the others go on. The tokens are the same.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options; `run` reads them."""
    prompting.add_arguments(parser, temperature=0.0, top_p=None, several_prompts=True)
    parser.add_argument("--max-batch", type=int, metavar="N", help="prompts held and decoded at a time; default: all")
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR", help="save tokens there, and go on from those saved")
    parser.add_argument("--save-every", type=int, default=16, metavar="N", help="tokens saved at a time; default 16")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON: ids, text and times")


def run(args: argparse.Namespace) -> int:
    """Generates and prints; returns 0. Wrong arguments raise before a model is fetched or a device is used."""
    from tree_attn.commands.saved_tokens import SavedTokens

    for name in ("save_every", "max_batch"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.out is not None and len(args.prompt) > 1:
        raise ValueError(f"--out saves the tokens of one --prompt, got {len(args.prompt)}")
    request = prompting.open_request(args)
    if len(request.prompts) > 1:
        document = _generate_all(args, request) | request.how
        if args.json and prompting.is_first():
            print(json.dumps(document))
        return 0
    tokens = SavedTokens(args, _identity(args, request) | request.how, is_first=prompting.is_first())
    document = {"prompt_ids": request.prompt_ids} | _generate(args, request, tokens) | request.how
    if args.json and prompting.is_first():
        print(json.dumps(document))
    return 0


def _generate(args: argparse.Namespace, request: prompting.Request, tokens) -> dict:
    """Prints the new tokens as they come, those saved first; returns what `--json` says of them."""
    from tree_attn.models.llama.checkpoint.tokenizer import TextStream

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


def _generate_all(args: argparse.Namespace, request: prompting.Request) -> dict:
    """Prints what came of several prompts; returns what `--json` says of them."""
    from tree_attn.commands import session
    from tree_attn.models.llama import generate

    generator, tokenizer = prompting.load_generator(args, request), request.checkpoint.tokenizer
    with session.phase(f"generating from {len(request.prompts)} prompts ..."):
        results = generate(
            generator, request.prompts, args.max_new_tokens, stop_ids=tokenizer.stop_ids, max_batch=args.max_batch
        )
    texts = [tokenizer.decode(result.new_ids) for result in results]
    for number, text in enumerate(texts, start=1):
        _write(f"--- prompt {number} of {len(texts)}\n{text}\n")
    fields = ("prompt_ids", "new_ids", "stopped", "prefill_s", "per_token_s")
    return {
        "generations": [
            {"text": text} | {name: getattr(result, name) for name in fields}
            for result, text in zip(results, texts, strict=True)
        ]
    }


def _new_tokens(args: argparse.Namespace, request: prompting.Request, done: list[int], on_token):
    from tree_attn.commands import session
    from tree_attn.models.llama import generate

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
    # What changes what is kept of the prompt, and so more than rounding. Left out where it is the default.
    given = {name: getattr(args, name) for name in ("cache_dtype", "prefill_chunk")}
    limits |= {name: value for name, value in given.items() if value is not None}
    identity = {"model": args.model, "prompt_ids": request.prompt_ids}
    return identity | dataclasses.asdict(request.sampling) | limits


def _write(text: str) -> None:
    if not prompting.is_first():
        return
    sys.stdout.write(text)
    sys.stdout.flush()
