"""One case of `tree-attn bench`: a model, random prompts, and the time and memory of their generation."""

import argparse
import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from flax import nnx

from tree_attn.cluster.join import steps
from tree_attn.commands import session
from tree_attn.commands.bench import room
from tree_attn.commands.bench.roofline import roofline_ms
from tree_attn.measure.memory import bytes_per_device, compiled_memory, runtime_peak_memory_bytes
from tree_attn.models.llama import Generator, Llama, LlamaConfig, LlamaSharding, by_name, parameters
from tree_attn.models.llama.attention import Attention
from tree_attn.models.llama.attention_choice import REDUCING
from tree_attn.models.llama.generation import memory

COUNTED_TOKENS = 10  # in the paper's "prefill plus 10 tokens"
NO_ATTENTION = "none"
OPTIONAL = ("prefill", "share_prefix")  # options that rows name where they are given


def make_model(args: argparse.Namespace, config: LlamaConfig, place: session.Place, contexts: Sequence[int]) -> Llama:
    """Returns the model in `--model`, or one of the shape `config` with random weights, that takes these contexts.

    Raises:
      ValueError: see `room.check`; before weights are read or made.
    """
    options = {"unroll_layers": args.unroll_layers, "products": args.products}
    if args.model is not None:
        checkpoint = session.open_with_progress(args.model)
        room.check(args, checkpoint.config, place, contexts)
        sharding = _sharding(args, checkpoint.config, place)
        model = session.load_with_progress(checkpoint, sharding, place.dtype)
        return Llama(checkpoint.config, sharding, parameters.moved(model, sharding), **options)
    room.check(args, config, place, contexts)
    longest = max(contexts) + args.problem_tokens + args.new_tokens
    config = dataclasses.replace(config, max_position=max(config.max_position, longest))
    sharding = _sharding(args, config, place)
    with session.phase(f"making random weights of {args.config}"):
        return Llama(config, sharding, parameters.random(sharding, place.dtype), **options)


def random_prompts(
    vocab_size: int, context: int, batch: int, num_levels: int, *, num_problems: int, problem_tokens: int
) -> list[list[int]]:
    """Returns `batch` prompts: the same `context` tokens, and then the tokens of a problem.

    The sequences of a problem share its tokens with two levels; with one level each has its own.
    """
    rng = np.random.default_rng(0)
    draw = lambda count: rng.integers(0, vocab_size, size=count).tolist()
    prompt, per_problem = draw(context), batch // num_problems
    texts = [draw(problem_tokens) for _ in range(num_problems)]
    return [prompt + (text if num_levels == 2 else draw(problem_tokens)) for text in texts for _ in range(per_problem)]


def no_attention(sharding: LlamaSharding) -> Attention:
    """Returns an attention that gives back the queries: what is left of a model's time is the ceiling of any other.

    Source: Hydragen, section 4.1.
    """
    return Attention(
        name=NO_ATTENTION,
        reduction=None,
        num_shards=sharding.num_shards("sequence"),
        shares_prefixes=True,
        prefill=lambda query, *_, **__: query,
        decode=lambda query, *_, **__: query,
    )


def make_generator(args: argparse.Namespace, model: Llama, name: str, options: Mapping[str, Any]) -> Generator:
    """Returns the generator of the attention `name`; `options` are those of `by_name`."""
    attention = no_attention(model.sharding) if name == NO_ATTENTION else by_name(name, model.sharding, **options)
    return Generator(
        model,
        attention,
        tokens_per_dispatch=args.tokens_per_dispatch,
        cache_dtype=args.cache_dtype,
        prefill_chunk=args.prefill_chunk if attention.prefills_in_chunks else None,
    )


def time_case(
    args: argparse.Namespace, model: Llama, place: session.Place, generator: Generator, prompts: list[list[int]]
) -> dict[str, Any]:
    """Generates from the prompts by the model's generator; returns the fields of the row."""
    name = generator.attention.name
    programs = generator.compile(prompts, args.new_tokens, share_prefixes=args.share_prefix)
    predicted = memory.predict(generator, prompts, args.new_tokens, share_prefixes=args.share_prefix)
    room.check_compiled(predicted, f"{name}, {len(prompts[0]):,} tokens x {len(prompts):,}", place)
    devices, run = list(place.devices), functools.partial(_run_steps, args, generator, prompts)
    earlier_peak = runtime_peak_memory_bytes(devices)
    with steps() as end_step:
        if args.warm_up:  # with the same number of new tokens: with fewer, caches and so programs could be others
            count = 2 + generator.tokens_per_dispatch
            run(count, f"{name}: warming up", end_step)
        trials_s = [run(args.new_tokens, f"{name}: timing", end_step)]
        for trial in range(2, args.prefill_trials + 1):
            count = min(1 + COUNTED_TOKENS, args.new_tokens)
            trials_s.append(run(count, f"{name}: trial {trial} of {args.prefill_trials}", end_step))
    weights, cache = _bytes_per_token(args, model, generator, prompts)
    compiled = {phase: compiled_memory(getattr(programs, phase)) for phase in ("prefill", "decode")}
    peak = runtime_peak_memory_bytes(devices)
    setting = _setting(args, place, model, generator, prompts, name)
    read = {"weights_bytes_per_device": weights, "cache_bytes_per_device": cache}
    shape = setting | read | {"context": len(prompts[0]) - args.problem_tokens}
    has_attention = name != NO_ATTENTION
    return setting | _times(trials_s, len(prompts)) | read | {
        "roofline_ms": roofline_ms(shape, model.config, devices[0].device_kind) if has_attention else None,
        "peak_bytes_compiled": {phase: None if one is None else one.peak_bytes for phase, one in compiled.items()},
        "predicted": dataclasses.asdict(predicted), "predicted_bytes_per_device": predicted.peak,
        "measured_bytes_per_device": None if peak == earlier_peak else peak, "peak_bytes_runtime": peak,
    }  # fmt: skip


def _run_steps(
    args: argparse.Namespace,
    generator: Generator,
    prompts: list[list[int]],
    count: int,
    title: str,
    end_step: Callable[[], None],
) -> list[float]:
    """Returns the seconds of the prefill and of each step after it, `count` in all; phases name which of both runs."""
    steps = generator.stream(prompts, args.new_tokens, share_prefixes=args.share_prefix)
    with session.phase(f"{title}, prefill of {len(prompts[0]):,} tokens"):
        seconds = [next(steps).seconds]
        end_step()
    if count == 1:
        return seconds
    with session.phase(f"{title}, token", count - 1) as decoding:
        for step in itertools.islice(steps, count - 1):
            seconds.append(step.seconds)
            end_step()
            decoding.advance()
    return seconds


def _sharding(args: argparse.Namespace, config: LlamaConfig, place: session.Place) -> LlamaSharding:
    sharding = place.sharding(config)
    if args.replicate_weights:
        return LlamaSharding(mesh=sharding.mesh, sequence=sharding.sequence)
    return sharding


def _setting(
    args: argparse.Namespace,
    place: session.Place,
    model: Llama,
    generator: Generator,
    prompts: Sequence[Sequence[int]],
    name: str,
) -> dict[str, Any]:
    """Returns the fields of the row that say what is timed."""
    attention = generator.attention
    reduction = attention.reduction
    if reduction is None and name in REDUCING:
        reduction = place.picked_reduction(model.config, len(prompts))
    return {
        "config": args.config if args.model is None else args.model,
        "problems": args.problems, "problem_tokens": args.problem_tokens,
        "attention": name, "reduction": reduction,
        "sparq": None if attention.sparq is None else dataclasses.asdict(attention.sparq),
        "n_devices": len(place.devices), "dtype": np.dtype(place.dtype).name, "batch": len(prompts),
        "cache_dtype": args.cache_dtype, "prefill_chunk": args.prefill_chunk if attention.prefills_in_chunks else None,
        "weights": "replicated" if args.replicate_weights else "spread", "new_tokens": args.new_tokens,
        "tokens_per_dispatch": generator.tokens_per_dispatch, "unroll_layers": model.unroll_layers,
        "warm_up": args.warm_up, "products": model.products.name_of(len(prompts)),
        **{name: getattr(args, name) for name in OPTIONAL if getattr(args, name) is not None},
    }  # fmt: skip


def _times(trials_s: Sequence[Sequence[float]], batch: int) -> dict[str, Any]:
    """Returns the fields of the row that come from the seconds of the prefill and of each token, in each trial.

    All tokens are those of the first trial; the others have ten.
    """
    prefills_s, token_s = [prefill for prefill, *_ in trials_s], trials_s[0][1:]
    prefill_s = statistics.median(prefills_s)
    ten_tokens = lambda tokens: COUNTED_TOKENS * statistics.fmean(tokens[:COUNTED_TOKENS])
    return {
        "prefill_s": prefill_s,
        "prefill_trials_s": prefills_s,
        "per_token_ms_median": statistics.median(token_s) * 1e3,
        "per_token_ms_p10": float(np.percentile(token_s, 10)) * 1e3,
        "per_token_ms_p90": float(np.percentile(token_s, 90)) * 1e3,
        "tokens_per_s": batch / statistics.median(token_s),
        "prefill_plus_10_tokens_s": prefill_s + ten_tokens(token_s),
        "prefill_plus_10_tokens_trials_s": [prefill + ten_tokens(tokens) for prefill, *tokens in trials_s],
    }


def _bytes_per_token(
    args: argparse.Namespace, model: Llama, generator: Generator, prompts: Sequence[Sequence[int]]
) -> tuple[int, int]:
    """Returns the bytes of weights, and of keys and values, that one device reads for a token.

    Of an embedding it reads one row, which is not counted. Of keys and values SparQ reads the components and the keys
    that it chooses; the part that prompts share is read once.
    """
    weights = bytes_per_device(nnx.state(model, nnx.Param))
    if not model.config.tie_embeddings:
        weights -= bytes_per_device(model.embedding[...])
    if generator.attention.name == NO_ATTENTION:
        return weights, 0
    tree = generator.prefix_tree(prompts, args.share_prefix)
    texts = [*(node.tokens for level in tree.levels for node in level), *tree.remainders]
    cache = sum(memory.bytes_read(generator, len(text)) for text in texts)
    return weights, cache // model.sharding.num_shards("sequence")
