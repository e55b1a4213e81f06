"""One case of `tree-attn bench`: a model, random prompts, and the time and memory of their generation."""

import argparse
import dataclasses
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
from tree_attn.models.llama.attention_choice import REDUCING
from tree_attn.models.llama.generation import memory

COUNTED_TOKENS = 10  # in the paper's "prefill plus 10 tokens"


def make_model(args: argparse.Namespace, config: LlamaConfig, place: session.Place, contexts: Sequence[int]) -> Llama:
    """Returns the model in `--model`, or one of the shape `config` with random weights, that takes these contexts.

    Raises:
      ValueError: see `room.check`; before weights are read or made.
    """
    options = {"unroll_layers": args.unroll_layers, "products": args.products or "xla"}
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


def time_case(
    args: argparse.Namespace,
    model: Llama,
    place: session.Place,
    prompts: list[list[int]],
    name: str,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Generates from the prompts by an attention; returns the fields of the row.

    Args:
      name: of the attention.
      options: of the attention, for `by_name`.
    """
    attention = by_name(name, model.sharding, **options)
    generator = Generator(
        model,
        attention,
        tokens_per_dispatch=args.tokens_per_dispatch,
        cache_dtype=args.cache_dtype,
        prefill_chunk=args.prefill_chunk if attention.prefills_in_chunks else None,
    )
    with session.phase(f"{name}, {len(prompts[0]):,} tokens: compiling"):
        programs, devices = generator.compile(prompts, args.new_tokens), list(place.devices)
    predicted = memory.predict(generator, prompts, args.new_tokens)
    earlier_peak = runtime_peak_memory_bytes(devices)
    with steps() as end_step:
        if args.warm_up:  # with the same number of new tokens: with fewer, caches and so programs could be others
            count = 2 + generator.tokens_per_dispatch
            _run_steps(generator, prompts, args.new_tokens, count, f"{name}: warming up", end_step)
        seconds = _run_steps(generator, prompts, args.new_tokens, args.new_tokens, f"{name}: timing", end_step)
        prefill_s = [seconds[0]]
        for trial in range(2, args.prefill_trials + 1):
            title = f"{name}: trial {trial} of {args.prefill_trials}"
            prefill_s += _run_steps(generator, prompts, args.new_tokens, 1, title, end_step)
    weights, cache = _bytes_per_token(model, generator, prompts)
    compiled = {phase: compiled_memory(getattr(programs, phase)) for phase in ("prefill", "decode")}
    peak = runtime_peak_memory_bytes(devices)
    setting = _setting(args, place, model, generator, prompts, name)
    read = {"weights_bytes_per_device": weights, "cache_bytes_per_device": cache}
    shape = setting | read | {"context": len(prompts[0]) - args.problem_tokens}
    return setting | _times(prefill_s, seconds[1:], len(prompts)) | read | {
        "roofline_ms": roofline_ms(shape, model.config, place.devices[0].device_kind),
        "peak_bytes_compiled": {phase: None if one is None else one.peak_bytes for phase, one in compiled.items()},
        "predicted": dataclasses.asdict(predicted), "predicted_bytes_per_device": predicted.peak,
        "measured_bytes_per_device": None if peak == earlier_peak else peak, "peak_bytes_runtime": peak,
    }  # fmt: skip


def _run_steps(
    generator: Generator,
    prompts: list[list[int]],
    num_new_tokens: int,
    count: int,
    title: str,
    end_step: Callable[[], None],
) -> list[float]:
    """Returns the seconds of the prefill and of each step after it, `count` in all; phases name which of both runs."""
    steps = generator.stream(prompts, num_new_tokens)
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
        "warm_up": args.warm_up,
        **{name: value for name in ("prefill", "products") if (value := getattr(args, name)) is not None},
    }  # fmt: skip


def _times(trials_s: Sequence[float], token_s: Sequence[float], batch: int) -> dict[str, Any]:
    """Returns the fields of the row that come from the seconds of each trial of the prefill, and of each token."""
    prefill_s = statistics.median(trials_s)
    return {
        "prefill_s": prefill_s,
        "prefill_trials_s": list(trials_s),
        "per_token_ms_median": statistics.median(token_s) * 1e3,
        "per_token_ms_p10": float(np.percentile(token_s, 10)) * 1e3,
        "per_token_ms_p90": float(np.percentile(token_s, 90)) * 1e3,
        "tokens_per_s": batch / statistics.median(token_s),
        "prefill_plus_10_tokens_s": prefill_s + COUNTED_TOKENS * statistics.fmean(token_s[:COUNTED_TOKENS]),
    }


def _bytes_per_token(model: Llama, generator: Generator, prompts: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Returns the bytes of weights, and of keys and values, that one device reads for a token.

    Of an embedding it reads one row, which is not counted. Of keys and values SparQ reads the components and the keys
    that it chooses; the part that prompts share is read once.
    """
    weights = bytes_per_device(nnx.state(model, nnx.Param))
    if not model.config.tie_embeddings:
        weights -= bytes_per_device(model.embedding[...])
    tree = generator.prefix_tree(prompts)
    texts = [*(node.tokens for level in tree.levels for node in level), *tree.remainders]
    cache = sum(memory.bytes_read(generator, len(text)) for text in texts)
    return weights, cache // model.sharding.num_shards("sequence")
