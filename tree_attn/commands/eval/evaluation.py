"""The scores of `tree-attn eval`: contexts are read densely, and the tokens after them by every method."""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tree_attn.commands import session
from tree_attn.commands.eval.plan import Group, Plan
from tree_attn.commands.eval.report import standard_error
from tree_attn.devices import started_devices
from tree_attn.measure import provenance
from tree_attn.measure.rows import MeasuredRows
from tree_attn.models.llama.checkpoint.open import Checkpoint
from tree_attn.models.llama.config import LlamaConfig
from tree_attn.models.llama.evaluation.methods import Method
from tree_attn.models.llama.evaluation.scorer import Scorer
from tree_attn.models.llama.evaluation.tasks import TASKS, make_samples, score
from tree_attn.sparq.transfers import dense_transfer_elements


def evaluate(args: argparse.Namespace, checkpoint: Checkpoint, text: str, plan: Plan, writer: MeasuredRows) -> None:
    """Scores the methods without a row, and appends their rows."""
    config = checkpoint.config
    cases = {sizes.context: plan.cases(sizes.context, config.head_dim) for sizes in plan.sizes}
    pending = {
        group: [method for method in cases[group[1].context] if not _has_row(writer.rows, group, method)]
        for group in plan.groups()
    }
    if not any(pending.values()):
        return
    samples = _samples(args, checkpoint, text, pending)
    place = session.Place(devices=(started_devices()[0],))
    scorer = Scorer(session.load_with_progress(checkpoint, place.sharding(config), place.dtype), args.cache_dtype)
    total = sum(map(len, pending.values()))
    with session.phase("evaluating", total) as evaluating:
        for group, methods in pending.items():
            task, sizes, _ = group
            batches = [samples[group][i : i + args.batch] for i in range(0, args.samples, args.batch)]
            evaluating.describe(f"{task}: contexts")
            room = len(samples[group][0].tail)
            contexts = [scorer.read([one.context for one in batch], room) for batch in batches] if methods else []
            for method in methods:
                evaluating.describe(f"{task}: {method.name}")
                scores = []
                for batch, context in zip(batches, contexts, strict=True):
                    logits = scorer.follow(context, [one.tail for one in batch], method)
                    scores += score(task, batch, logits)
                ratio = cases[sizes.context][method]
                writer.append(_row(args, config, place, group, method, ratio, scores))
                evaluating.advance()


def _samples(
    args: argparse.Namespace, checkpoint: Checkpoint, text: str, groups: Mapping[Group, Any]
) -> dict[Group, list]:
    tokenizer = checkpoint.tokenizer
    with session.phase("encoding the text ..."):
        text_ids = tokenizer.encode(text, add_special_tokens=False)
    return {
        (task, sizes, depth): make_samples(
            task, tokenizer, text_ids, sizes, args.seed, None if depth is None else depth / 100
        )
        for task, sizes, depth in groups
    }


def _has_row(rows: Sequence[dict], group: Group, method: Method) -> bool:
    task, sizes, depth = group
    key = {"task": task, "method": method.name, "num_keys": method.num_keys, "num_components": method.num_components}
    key |= {"context": sizes.context, "depth_percent": depth} | _ablation(method)
    return any({name: row.get(name) for name in key} == key for row in rows)


def _ablation(method: Method) -> dict[str, Any]:
    """Returns the options in which a method differs from the paper's; None where it does not."""
    temperature = None if method.score_temperature == "coverage" else method.score_temperature
    return {"local_window": method.local_window, "score_temperature": temperature}


def _row(
    args: argparse.Namespace,
    config: LlamaConfig,
    place: session.Place,
    group: Group,
    method: Method,
    ratio: int,
    scores: list[float],
) -> dict[str, Any]:
    task, sizes, depth = group
    elements = method.transfer_elements(sizes.context, config.head_dim)
    dense = dense_transfer_elements(num_keys=sizes.context, head_dim=config.head_dim)
    cache_dtype = jnp.dtype(args.cache_dtype or place.dtype)
    ablation = {name: value for name, value in _ablation(method).items() if value is not None}
    return ({} if depth is None else {"depth_percent": depth}) | ablation | {
        "task": task, "method": method.name, "num_keys": method.num_keys, "num_components": method.num_components,
        "asked_ratio": ratio, "compression": elements / dense,
        "transfer_bytes_per_token": elements * config.num_kv_heads * config.num_layers * cache_dtype.itemsize,
        "mean": statistics.fmean(scores),
        "standard_error": standard_error(scores),
        "cache_dtype": cache_dtype.name, "unit": TASKS[task].unit, "higher_is_better": TASKS[task].higher_is_better,
        "scores": scores,
        "context": sizes.context, "tail": args.tail, "samples": args.samples, "seed": args.seed, "model": args.model,
        "dtype": jnp.dtype(place.dtype).name, "hardware": provenance.hardware(list(place.devices)),
        "jax_version": jax.__version__, "git_commit": provenance.git_commit(), "command": args.command_line,
    }  # fmt: skip
