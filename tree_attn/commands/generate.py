"""`tree-attn generate`: a Llama writes, its KV cache sharded over devices."""

import argparse
import json
import sys

HELP = """\
Generate text with a Llama whose KV cache is sharded over devices along the sequence.

examples:
  tree-attn generate --model smollm2 --prompt "Name three rivers in Europe."
  tree-attn generate --model path/to/Llama-3.2-1B-Instruct --prompt "Hello" --temperature 0.7 --top-p 0.9 --seed 1
  tree-attn generate --model model.gguf --raw --prompt "Once upon a time" --attention ring --devices 4
  tree-attn generate --model smollm2 --prompt "Hi" --attention tree --reduction allreduce --json | tail -1

Prompts are read by ring attention, and every new token attends by the attention that --attention names.
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
        "--reduction", metavar="NAME", help="of tree: allreduce, gather or hierarchical; default: its own choice"
    )
    parser.add_argument(
        "--devices", type=int, metavar="N", help="default: all accelerators, or 8 emulated; single has 1"
    )
    parser.add_argument("--json", action="store_true", help="end with one line of JSON: ids, text and times")


def run(args: argparse.Namespace) -> int:
    """Generates and prints; returns 0. Wrong arguments raise before a model is fetched or a device is used."""
    from models.llama import Generator, Sampling, by_name, generate, session
    from models.llama.attention import check_choice
    from models.llama.generate import check_request
    from models.llama.tokenizer import TextStream

    sampling = Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed)
    devices = session.choose_devices(1 if args.attention == "single" and args.devices is None else args.devices)
    place = session.Place(devices=devices, two_levels=args.reduction == "hierarchical")
    check_choice(args.attention, args.reduction, place.axes, len(devices))
    checkpoint = session.open_with_progress(args.model)
    prompt_ids = _encode(checkpoint.tokenizer, args)
    check_request(checkpoint.config, [prompt_ids], args.max_new_tokens)
    sharding = place.sharding(checkpoint.config)
    attention = by_name(args.attention, sharding, reduction=args.reduction)
    model = session.load_with_progress(checkpoint, sharding, place.dtype)
    generator = Generator(model, attention, sampling)
    with session.phase("compiling ..."):
        generator.programs([prompt_ids], args.max_new_tokens)

    stream = TextStream(checkpoint.tokenizer)
    (result,) = generate(
        generator,
        [prompt_ids],
        args.max_new_tokens,
        stop_ids=checkpoint.tokenizer.stop_ids,
        on_token=lambda _, token: _write(stream.push(token)),
    )
    _write(stream.flush() + "\n")
    if args.json:
        document = {
            "prompt_ids": result.prompt_ids,
            "new_ids": result.new_ids,
            "text": checkpoint.tokenizer.decode(result.new_ids),
            "prefill_s": result.prefill_s,
            "per_token_s": result.per_token_s,
            "attention": attention.name,
            "reduction": attention.reduction,
            "n_devices": len(devices),
        }
        print(json.dumps(document))
    return 0


def _encode(tokenizer, args: argparse.Namespace) -> list[int]:
    is_chat = args.chat or (not args.raw and tokenizer.chat_template is not None)
    if not is_chat:
        return tokenizer.encode(args.prompt)
    return tokenizer.encode_chat([{"role": "user", "content": args.prompt}])


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
