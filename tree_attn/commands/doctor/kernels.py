"""The kernels that run what here, for `tree-attn doctor`: asked of the functions by which the library chooses.

Each feature is one call of typical shapes, which is traced as far as the choice of its backend. Nothing is compiled.
"""

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from tree_attn import ragged
from tree_attn.arguments import AttentionOptions
from tree_attn.commands.doctor import evidence
from tree_attn.cost import datasheets, machine
from tree_attn.local import AUTOMATIC, BESIDE_TRANSFERS, cudnn, shard_attention, why_not
from tree_attn.masking import Visibility, visibility
from tree_attn.placement import Shard
from tree_attn.sparq import hopper
from tree_attn.sparq.options import SparqCall, SparqOptions

BATCH, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_KEYS, PAGE = 2, 32, 8, 128, 4096, 128
SPARQ = SparqOptions(num_components=32, num_keys=128, local_window=32, reallocate=False)
Picked = tuple[str, dict[str, str]]  # a backend, and why each that is tried before it cannot run


def examine() -> dict[str, dict[str, Any]]:
    """Returns, for each feature, `runs_by` (its backend here), `passed_over` (backend -> why not) and `known`.

    `known` is a word of `tree_attn.commands.doctor.evidence` for that backend on the first local device.
    """
    device, found = jax.local_devices()[0], {}
    for feature, pick in FEATURES.items():
        backend, passed_over = pick()
        known = evidence.find(feature, backend, device).word
        found[feature] = {"runs_by": backend, "passed_over": passed_over, "known": known}
    return found


def find_unmeasured(device: jax.Device, kernels: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns a sentence for each thing that no measurement says here; none on emulated devices.

    Args:
      kernels: as `examine` returns it.
    """
    if device.platform == "cpu":
        return []
    if machine.load(device.device_kind) is not None:
        features = [name for name, found in kernels.items() if found["known"] != evidence.MEASURED]
        return [f"Not measured on this device: {', '.join(features)}."] if features else []
    plan = "`tree-attn plan` has no datasheet of it"
    if datasheets.load(device.device_kind) is not None:
        plan = f'`tree-attn plan --device-kind "{device.device_kind}"` predicts from its datasheet'
    return [
        f"The cost model has no measurements of devices of this kind, {device.device_kind}. {plan}; "
        "`tree-attn doctor --distributed --machine-out FILE` measures what it needs.",
        "reduction=None does not know what exchanges cost here, and takes those with the fewest latencies.",
    ]


def _traced(ask: Callable[..., Picked], num_queries: int = 1, *, batch: int = BATCH, key_dtype=jnp.bfloat16) -> Picked:
    """Returns what `ask` returns for a query, keys and values that are there in name only."""
    keys = jax.ShapeDtypeStruct((batch, NUM_KEYS, NUM_KV_HEADS, HEAD_DIM), key_dtype)
    query, answers = jax.ShapeDtypeStruct((batch, num_queries, NUM_HEADS, HEAD_DIM), jnp.bfloat16), []
    jax.eval_shape(lambda *arrays: answers.append(ask(*arrays)), query, keys, keys)
    return answers[0]


def _options(has_lengths: bool, batch: int = BATCH, **options) -> AttentionOptions:
    lengths = jnp.full(batch, NUM_KEYS, jnp.int32) if has_lengths else None
    return AttentionOptions(key_value_seq_lengths=lengths, **options)


def _masking(visible: Visibility) -> dict[str, Any]:
    return {"logits_soft_cap": None, "visible": visible, "scales": None}


def _decode(
    num_queries: int = 1, *, batch: int = BATCH, key_dtype=jnp.bfloat16, has_lengths: bool = False, **options
) -> Picked:
    """Asks as `tree_decode` and `hydragen_decode` do."""

    def ask(*arrays) -> Picked:
        picked = shard_attention(*arrays, _options(has_lengths, batch, **options), Shard())
        return picked.implementation, _passed_over(AUTOMATIC, picked, arrays)

    return _traced(ask, num_queries, batch=batch, key_dtype=key_dtype)


def _prompt() -> Picked:
    """Asks as a hop of `ring_attention` does."""

    def ask(*arrays) -> Picked:
        options = _options(has_lengths=False, is_causal=True)
        picked = shard_attention(*arrays, options, Shard(), query_shard=Shard(), beside_transfers=True)
        return picked.implementation, _passed_over(BESIDE_TRANSFERS, picked, arrays)

    return _traced(ask, NUM_KEYS)


def _passed_over(order, picked, arrays) -> dict[str, str]:
    earlier = itertools.takewhile(lambda name: name != picked.implementation, order)
    return {name: why_not(name, *arrays, **picked.arguments) for name in earlier}


def _prompt_gradient() -> Picked:
    """Asks as the backward pass of such a hop does."""

    def ask(*arrays) -> Picked:
        options, sizes = _options(has_lengths=False, is_causal=True), dict(num_queries=NUM_KEYS, num_slots=NUM_KEYS)
        visible = visibility(options, batch=BATCH, **sizes, shard=Shard(), query_shard=Shard())
        reason = cudnn.unavailable() or cudnn.gradient_unsupported(*arrays, **_masking(visible))
        return ("cudnn", {}) if reason is None else ("xla", {"cudnn": reason})

    return _traced(ask, NUM_KEYS)


def _ragged(page_size: int = 0) -> Picked:
    """Asks as `lean_decode` and `paged_decode` do."""

    def ask(*arrays) -> Picked:
        options = _options(has_lengths=True)
        visible = visibility(options, batch=BATCH, num_queries=1, num_slots=NUM_KEYS, shard=Shard())
        picked = ragged.choose_backend(*arrays, visible, options, None, page_size=page_size)
        reason = why_not("mosaic_gpu", *arrays, **_masking(visible))
        return picked, {} if reason is None else {"mosaic_gpu": reason}

    return _traced(ask)


def _sparq() -> Picked:
    """Asks as `sparq_decode` does."""
    call = SparqCall(
        options=SPARQ, axes=(), mesh=None, reduction=None, num_shards=1, scale=1.0, implementation=None
    )  # fmt: skip

    def ask(*arrays) -> Picked:
        by_component = jnp.transpose(arrays[1], (0, 2, 3, 1))
        reason = hopper.why_not(*arrays, by_component, call)
        return ("mosaic_gpu", {}) if reason is None else ("xla", {"mosaic_gpu": reason})

    return _traced(ask)


# bfloat16 queries, 32 heads on 8 KV heads of 128, 4,096 keys, `implementation=None`.
FEATURES: dict[str, Callable[[], Picked]] = {
    "decode": _decode,
    "decode, lengths": functools.partial(_decode, has_lengths=True),
    "decode, soft cap": functools.partial(_decode, logits_soft_cap=50.0),
    "decode, float8 cache": functools.partial(_decode, key_dtype=jnp.float8_e4m3fn),
    "decode, int8 cache": functools.partial(_decode, key_dtype=jnp.int8),
    "packed ragged batch": _ragged,
    "paged cache": functools.partial(_ragged, PAGE),
    "shared prefix": functools.partial(_decode, 64, batch=1),
    "SparQ": _sparq,
    "prompt": _prompt,
    "gradient of a prompt": _prompt_gradient,
}
