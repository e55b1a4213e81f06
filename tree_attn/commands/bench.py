"""`tree-attn bench llama`: a Llama's prefill and decoding time over long contexts, beside the least it can take."""

import argparse
import dataclasses
import itertools
import json
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

HELP = """\
Time a Llama of a published shape over long contexts: prefill, each new token, memory, by tree and by ring attention.

The prompt is random, and so are weights unless --model names some: times do not depend on them. Keys and values are
spread by sequence and weights by heads and columns over the same devices; --replicate-weights gives every device all
weights, as in the paper's Table 1. The roofline of a token is the time to read a device's weights and its part of the
keys and values once, or as much of them as SparQ reads; with --samples, of the prompt's once for all, or the time of
the products with the weights, if that is more.

examples:
  tree-attn bench llama --context 32768,131072 --out results/llama
  tree-attn bench llama --config llama-3.2-1b --devices 4 --context 131072 --tokens-per-dispatch 8
  tree-attn bench llama --config llama-2-7b --devices 1 --attention single --context 8192 --samples 1,64,1024
  tree-attn bench llama --config llama-2-7b --devices 1 --attention single --context 2400 --problems 8 \\
    --problem-tokens 500 --samples 128 --levels 2,1
  tree-attn bench llama --config smollm2-135m --devices 3 --context 512 --attention tree --json

Memory is that of one device: predicted before the run from what is held (weights, keys and values, to the byte) and
what XLA says that its programs need besides, and measured where the backend measures it and this case took more than
any before it in the process.

Rows go to DIR/results.jsonl as they come; the same command run again goes on after them. A case is run once before it
is timed, so that compilation and first use are not in its times; --no-warm-up spares it where a prefill takes minutes.
"""

COUNTED_TOKENS = 10  # of the paper's "prefill plus 10 tokens"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options; `run` reads them."""
    from tree_attn.commands import processes, prompting

    parser.add_argument("what", choices=("llama",), help="what to time")
    parser.add_argument("--config", default="llama-3.1-8b", help="a published shape; default llama-3.1-8b")
    parser.add_argument(
        "--model", metavar="PATH", help="weights of your own, as of `tree-attn generate`; default: random"
    )
    parser.add_argument("--context", default="32768,131072", metavar="N,M", help="tokens; default 32768,131072")
    parser.add_argument("--new-tokens", type=int, default=33, metavar="N", help="tokens made; default 33")
    parser.add_argument("--attention", default="tree,ring", metavar="A,B", help="default tree,ring; or single, sparq")
    parser.add_argument(
        "--samples", default="1", metavar="N,M", help="sequences that go on from the one prompt, which they share"
    )
    parser.add_argument(
        "--problems", type=int, default=1, metavar="N", help="texts after the prompt, each with --samples sequences"
    )
    parser.add_argument("--problem-tokens", type=int, default=0, metavar="N", help="length of each; default 0")
    parser.add_argument(
        "--levels",
        default="2",
        metavar="A,B",
        help="2: a problem's sequences share it; 1: each has as many tokens by itself, and only the prompt is shared",
    )
    parser.add_argument("--reduction", metavar="NAME", help="of tree and sparq; default: its own choice")
    prompting.add_sparq_arguments(parser)
    parser.add_argument("--devices", type=int, metavar="N", help="default: all accelerators, or 8 emulated")
    parser.add_argument(
        "--cache-dtype",
        metavar="DTYPE",
        help="default: the model's; float8_e4m3fn and int8 (not of sparq) halve bfloat16",
    )
    parser.add_argument(
        "--prefill-chunk", type=int, metavar="N", help="tokens read at a time; default: all, as a ring always does"
    )
    parser.add_argument("--replicate-weights", action="store_true", help="every device holds and reads all weights")
    parser.add_argument(
        "--tokens-per-dispatch", type=int, metavar="K", help="steps per program call; default 8 on GPUs, else 1"
    )
    parser.add_argument(
        "--unroll-layers",
        action=argparse.BooleanOptionalAction,
        help="write the layers out, or loop over them: less to compile; default: write them out on GPUs",
    )
    parser.add_argument(
        "--warm-up",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="run a case once before it is timed; without, first use (not compilation) is in its prefill; default: do",
    )
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR", help="rows go there; default: they are only printed")
    parser.add_argument("--json", action="store_true", help="print the rows as one JSON document instead of a table")
    processes.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Times and prints; returns 0. Wrong arguments raise before a weight is made."""
    from tree_attn.commands import processes, session
    from tree_attn.commands.compare import cases as comparison
    from tree_attn.measure import provenance
    from tree_attn.models.llama.attention import CHUNKING, check_cache_dtype, check_choice, check_prefill_chunk

    config, contexts, samples, levels, attentions, sparq = _checked(args)
    processes.join(args, args.devices)
    devices = session.choose_devices(1 if attentions == ["single"] and args.devices is None else args.devices)
    place = session.Place(devices=devices, two_levels=args.reduction == "hierarchical")
    for name in attentions:
        check_cache_dtype(name, args.cache_dtype)
        check_prefill_chunk(name, args.prefill_chunk if name in CHUNKING else None, len(devices))
        options = _options_of(name, args, sparq)
        check_choice(name, options["reduction"], place.axes, len(devices), options["sparq"])
    rows = [] if args.out is None else _Rows(args.out, _sweep(args, len(devices), sparq))
    done = {(row["context"], row["batch"], row["levels"], row["attention"]) for row in rows}
    batches = [count * args.problems for count in samples]
    cases = list(itertools.product(contexts, batches, levels, attentions))
    is_done = comparison.broadcast_flags([case in done for case in cases])  # the first process alone has the file
    todo = [case for case, done in zip(cases, is_done, strict=True) if not done]
    if todo:
        longest = max(contexts) + args.problem_tokens
        model = _random_model(args, config, place, longest) if args.model is None else _own_model(args, place)
        for context, batch, level, name in todo:
            with session.phase(f"{name}, {context:,} tokens" + (f" x {batch:,}" if batch > 1 else "") + " ..."):
                prompts = _prompts(model.config.vocab_size, context, batch, level, args)
                row = {"context": context, "levels": level} | _time(args, model, place, prompts, name, sparq)
            row |= {
                "hardware": provenance.hardware(list(devices)), "versions": provenance.versions(),
                "nccl": provenance.nccl_settings(),
                "git_commit": provenance.git_commit(), "command": args.command_line,
            }  # fmt: skip
            rows.append(row)
    if _is_first():
        _print(args, list(rows))
    return 0


class _Rows(list):
    """Rows on disk, written by the first process; another has none, and asks nothing of the file."""

    def __init__(self, folder: pathlib.Path, sweep: dict[str, Any]):
        from tree_attn.measure.rows import RowWriter

        self._writer = RowWriter(folder / "results.jsonl", sweep=sweep) if _is_first() else None
        super().__init__(self._writer.rows if self._writer else [])

    def append(self, row: dict) -> None:
        if self._writer:
            self._writer.append(row)
        super().append(row)


def _checked(args: argparse.Namespace):
    from tree_attn.arguments import NARROW_DTYPES, one_of
    from tree_attn.commands import prompting
    from tree_attn.models.llama.attention import ATTENTIONS, check_sharing
    from tree_attn.models.llama.presets import preset

    config = preset(args.config)
    if args.cache_dtype is not None:
        one_of("--cache-dtype", args.cache_dtype, NARROW_DTYPES)
    contexts, samples, levels = (_integers(name, getattr(args, name)) for name in ("context", "samples", "levels"))
    attentions = [part.strip() for part in args.attention.split(",")]
    for name in attentions:
        one_of("--attention", name, ATTENTIONS)
        check_sharing(name, True if max(samples) * args.problems > 1 else None)
    at_least = {"new_tokens": 2, "tokens_per_dispatch": 1, "problems": 1, "problem_tokens": min(args.problems - 1, 1)}
    for name, least in at_least.items():
        if getattr(args, name) is not None and getattr(args, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(args, name)}")
    for level in levels:
        one_of("--levels", level, (1, 2))
    if 1 in levels and not args.problem_tokens:
        raise ValueError("--levels 1 needs --problem-tokens: without a problem there is one level in any case")
    sparq = prompting.sparq_options(args, attentions)
    if sparq is not None:
        sparq.check_head_dim(config.head_dim)
    return config, contexts, samples, levels, attentions, sparq


def _integers(name: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise ValueError(f"--{name} must be integers of at least 1, separated by commas, got {text!r}")
    return numbers


def _options_of(name: str, args: argparse.Namespace, sparq) -> dict[str, Any]:
    """What `by_name` is given for one of the attentions."""
    from tree_attn.models.llama.attention import REDUCING

    return {"reduction": args.reduction if name in REDUCING else None, "sparq": sparq if name == "sparq" else None}


def _sweep(args: argparse.Namespace, num_devices: int, sparq) -> dict[str, Any]:
    names = (
        "config",
        "model",
        "cache_dtype",
        "prefill_chunk",
        "new_tokens",
        "problems",
        "problem_tokens",
        "reduction",
        "replicate_weights",
        "tokens_per_dispatch",
        "unroll_layers",
        "warm_up",
    )
    sweep = {name: getattr(args, name) for name in names} | {"n_devices": num_devices}
    return sweep | ({} if sparq is None else {"sparq": dataclasses.asdict(sparq)})


def _random_model(args: argparse.Namespace, config, place, longest: int):
    from tree_attn.models.llama import Llama, parameters

    # Published limits are the training's; time does not know them.
    config = dataclasses.replace(config, max_position=max(config.max_position, longest + args.new_tokens))
    sharding = _sharding(args, config, place)
    return Llama(config, sharding, parameters.random(sharding, place.dtype), unroll_layers=args.unroll_layers)


def _own_model(args: argparse.Namespace, place):
    from tree_attn.commands import session
    from tree_attn.models.llama import Llama, parameters

    checkpoint = session.open_with_progress(args.model)
    sharding = _sharding(args, checkpoint.config, place)
    model = session.load_with_progress(checkpoint, sharding, place.dtype)
    return Llama(checkpoint.config, sharding, parameters.moved(model, sharding), unroll_layers=args.unroll_layers)


def _sharding(args: argparse.Namespace, config, place):
    from tree_attn.models.llama import LlamaSharding

    spread = place.sharding(config)
    return LlamaSharding(mesh=spread.mesh, sequence=spread.sequence) if args.replicate_weights else spread


def _prompts(vocab_size: int, context: int, batch: int, levels: int, args: argparse.Namespace) -> list[list[int]]:
    """Random ones: of `context` tokens that all share, then a problem's, which its sequences share if `levels` is 2."""
    import numpy as np

    rng = np.random.default_rng(0)
    draw = lambda count: rng.integers(0, vocab_size, size=count).tolist()
    prompt, each = draw(context), batch // args.problems
    texts = [draw(args.problem_tokens) for _ in range(args.problems)]
    return [prompt + (text if levels == 2 else draw(args.problem_tokens)) for text in texts for _ in range(each)]


def _time(args: argparse.Namespace, model, place, prompts: list[list[int]], name: str, sparq) -> dict[str, Any]:
    import numpy as np

    from tree_attn.cost import limits
    from tree_attn.measure.memory import compiled_memory, runtime_peak_memory_bytes
    from tree_attn.models.llama import Generator, by_name
    from tree_attn.models.llama.generation import memory

    attention = by_name(name, model.sharding, **_options_of(name, args, sparq))
    chunk = args.prefill_chunk if attention.prefills_in_chunks else None
    generator = Generator(
        model,
        attention,
        tokens_per_dispatch=args.tokens_per_dispatch,
        cache_dtype=args.cache_dtype,
        prefill_chunk=chunk,
    )
    programs = generator.programs(prompts, args.new_tokens)
    predicted, devices = memory.predict(generator, prompts, args.new_tokens), list(place.devices)
    earlier_peak = runtime_peak_memory_bytes(devices)
    if args.warm_up:  # of as many new tokens: with fewer, caches and so programs could be others
        for _ in itertools.islice(generator.stream(prompts, args.new_tokens), 2 + generator.tokens_per_dispatch):
            pass
    seconds = [step.seconds for step in generator.stream(prompts, args.new_tokens)]
    later = np.array(seconds[1:])
    weights, cache = _bytes_per_device(model, generator, prompts)
    compiled = {phase: compiled_memory(getattr(programs, phase)) for phase in ("prefill", "decode")}
    peak = runtime_peak_memory_bytes(devices)
    kind = place.devices[0].device_kind
    limits_us = (
        limits.memory_limit_us(weights + cache, kind),
        limits.products_limit_us(2 * len(prompts) * weights / np.dtype(place.dtype).itemsize, kind),
    )
    limit_us = None if None in limits_us else max(limits_us)
    return {
        "config": args.config if args.model is None else args.model,
        "problems": args.problems, "problem_tokens": args.problem_tokens,
        "attention": name, "reduction": attention.reduction,
        "sparq": None if attention.sparq is None else dataclasses.asdict(attention.sparq),
        "n_devices": len(place.devices), "dtype": np.dtype(place.dtype).name, "batch": len(prompts),
        "cache_dtype": args.cache_dtype, "prefill_chunk": chunk,
        "weights": "replicated" if args.replicate_weights else "spread", "new_tokens": args.new_tokens,
        "tokens_per_dispatch": generator.tokens_per_dispatch, "unroll_layers": model.unroll_layers,
        "warm_up": args.warm_up,
        "prefill_s": seconds[0], "per_token_ms_median": statistics.median(seconds[1:]) * 1e3,
        "per_token_ms_p10": float(np.percentile(later, 10)) * 1e3,
        "per_token_ms_p90": float(np.percentile(later, 90)) * 1e3,
        "tokens_per_s": len(prompts) / statistics.median(seconds[1:]),
        "prefill_plus_10_tokens_s": seconds[0] + COUNTED_TOKENS * statistics.fmean(seconds[1 : 1 + COUNTED_TOKENS]),
        "roofline_ms": None if limit_us is None else limit_us / 1e3,
        "weights_bytes_per_device": weights, "cache_bytes_per_device": cache,
        "peak_bytes_compiled": {phase: None if one is None else one.peak_bytes for phase, one in compiled.items()},
        "predicted": dataclasses.asdict(predicted), "predicted_bytes_per_device": predicted.peak,
        "measured_bytes_per_device": None if peak == earlier_peak else peak, "peak_bytes_runtime": peak,
    }  # fmt: skip


def _bytes_per_device(model, generator, prompts: Sequence[Sequence[int]]) -> tuple[int, int]:
    """What one device reads for a token: its weights, less an embedding of which it reads one row, and its K and V.

    Of those SparQ reads the components and the keys that it chooses; what prompts share is read once.
    """
    from flax import nnx

    from tree_attn.measure.memory import bytes_per_device
    from tree_attn.models.llama.generation import memory

    weights = bytes_per_device(nnx.state(model, nnx.Param))
    if not model.config.tie_embeddings:
        weights -= bytes_per_device(model.embedding[...])
    tree = generator.prefix_tree(prompts)
    texts = [*(node.tokens for level in tree.levels for node in level), *tree.remainders]
    cache = sum(memory.bytes_read(generator, len(text)) for text in texts)
    return weights, cache // model.sharding.num_shards("sequence")


def _is_first() -> bool:
    import jax

    return jax.process_index() == 0


def _print(args: argparse.Namespace, rows: Sequence[dict]) -> None:
    if args.json:
        print(json.dumps({"rows": rows}))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console = console if console.is_terminal else Console(width=132)
    table = Table()
    columns = ("context", "batch", "attention", "prefill s", "ms per token (p10 to p90)", "roofline ms", "tokens / s",
               "prefill + 10 s", "GB (measured)")  # fmt: skip
    for column in columns:
        table.add_column(column, justify="left" if column == "attention" else "right")
    for row in rows:
        # Older rows have neither.
        predicted, measured = (row.get(f"{how}_bytes_per_device") for how in ("predicted", "measured"))
        memory = "unknown" if predicted is None else f"{predicted / 1e9:.3g}"
        table.add_row(
            f"{row['context']:,}",
            f"{row['batch']:,}",
            row["attention"] + (f" {row['reduction']}" if row["reduction"] else ""),
            f"{row['prefill_s']:.3g}",
            f"{row['per_token_ms_median']:.3g} ({row['per_token_ms_p10']:.3g} to {row['per_token_ms_p90']:.3g})",
            "unknown" if row["roofline_ms"] is None else f"{row['roofline_ms']:.3g}",
            f"{row['tokens_per_s']:.4g}",
            f"{row['prefill_plus_10_tokens_s']:.3g}",
            memory + ("" if measured is None else f" ({measured / 1e9:.3g})"),
        )
    console.print(f"{rows[0]['config']} on {rows[0]['hardware']}, weights {rows[0]['weights']}")
    console.print(table)
