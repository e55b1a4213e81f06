"""The answers of `tree-attn demo`: one model and one prompt, under three attentions."""

import argparse
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from tree_attn.commands import session
from tree_attn.measure import hlo, hlo_text
from tree_attn.measure.memory import compiled_memory
from tree_attn.models.llama import Generator, Llama, by_name, generate
from tree_attn.models.llama.checkpoint.open import move
from tree_attn.models.llama.generation.request import check_request


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The tokens of one attention, and the cost of its step for one token on each device."""

    attention: str
    n_devices: int
    new_ids: list[int]
    per_token_s: float | None
    peak_memory_bytes: int | None
    collectives: int
    collectives_attention: int
    bytes_sent: float
    bytes_sent_attention: float


def answer(args: argparse.Namespace) -> tuple[list[Outcome], Any, bool]:
    """Returns the outcomes under tree, ring and single-device attention; the tokenizer; True for emulated devices."""
    devices = session.choose_devices(args.devices)
    many, one = session.Place(devices=devices), session.Place(devices=devices[:1])
    checkpoint = session.open_with_progress(args.model)
    prompt_ids = _encode(checkpoint.tokenizer, args.prompt)
    check_request(checkpoint.config, [prompt_ids], args.max_new_tokens)
    sharding = many.sharding(checkpoint.config)
    # Whole float32 products: with fewer digits, near ties would fall differently on one device and on many.
    with jax.default_matmul_precision("float32"):
        model = session.load_with_progress(checkpoint, sharding, jnp.float32)
        request = (prompt_ids, args.max_new_tokens, checkpoint.tokenizer.stop_ids)
        outcomes = [_try(name, model, *request) for name in ("tree", "ring")]
        with session.phase("moving the weights onto one device"):
            alone = move(model, one.sharding(checkpoint.config))
        outcomes.append(_try("single", alone, *request))
    return outcomes, checkpoint.tokenizer, devices[0].platform == "cpu"


def _encode(tokenizer, prompt: str) -> list[int]:
    if tokenizer.chat_template is None:
        return tokenizer.encode(prompt)
    return tokenizer.encode_chat([{"role": "user", "content": prompt}])


def _try(name: str, model: Llama, prompt_ids: list[int], max_new_tokens: int, stop_ids) -> Outcome:
    generator = Generator(model, by_name(name, model.sharding))
    with session.phase(f"{name}: compiling"):
        programs = generator.compile([prompt_ids], max_new_tokens)
    with session.phase(f"{name}: generating", max_new_tokens) as generating:
        on_token = lambda *_: generating.advance()
        (result,) = generate(generator, [prompt_ids], max_new_tokens, stop_ids=stop_ids, on_token=on_token)
    with session.phase(f"{name}: counting what a step sends"):
        costs = _costs(programs.decode)
    return Outcome(
        attention=name,
        n_devices=model.sharding.mesh.size,
        new_ids=result.new_ids,
        per_token_s=result.per_token_s,
        **costs,
    )


def _costs(compiled) -> dict[str, float | int | None]:
    """Returns memory and communication of the compiled step for one token, per device, with attention's share."""
    text = compiled.as_text()
    instructions = [one for computation in hlo_text.parse(text).computations.values() for one in computation.values()]
    # The names of the model's scopes are in every instruction's metadata.
    in_attention = {one.name for one in instructions if "/attend/" in one.attributes}
    everything = hlo.collectives(text)
    attention = [collective for collective in everything if collective.name in in_attention]
    memory = compiled_memory(compiled)
    return {
        "peak_memory_bytes": None if memory is None else memory.peak_bytes,
        "collectives": sum(collective.count for collective in everything),
        "collectives_attention": sum(collective.count for collective in attention),
        "bytes_sent": hlo.total_bytes_sent_per_device(everything),
        "bytes_sent_attention": hlo.total_bytes_sent_per_device(attention),
    }
