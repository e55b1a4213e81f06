"""One call of `tree-attn bench`: its arguments checked, its cases timed, and their rows written."""

import argparse
import dataclasses
import difflib
import functools
import itertools
import re
from typing import Any, NamedTuple

from tree_attn.arguments import NARROW_DTYPES, one_of
from tree_attn.commands import processes, session
from tree_attn.commands.bench import ahead, timing
from tree_attn.commands.bench.report import print_rows
from tree_attn.commands.bench.timing import NO_ATTENTION, OPTIONAL
from tree_attn.commands.options import check_at_least, check_folder, integers_in
from tree_attn.commands.request import sparq_options
from tree_attn.measure import provenance
from tree_attn.measure.rows import MeasuredRows
from tree_attn.models.llama import LlamaConfig
from tree_attn.models.llama.attention_choice import (
    ATTENTIONS,
    CHUNKING,
    REDUCING,
    check_cache_dtype,
    check_choice,
    check_prefill,
    check_prefill_chunk,
    check_sharing,
)
from tree_attn.models.llama.presets import PRESETS, preset
from tree_attn.models.llama.product_choice import PRODUCTS
from tree_attn.sparq import SparqOptions
from tree_attn.topology import is_first_process

# Options that the rows of one file have in common.
COMMON = (
    "config", "model", "cache_dtype", "prefill_chunk", "new_tokens", "problems", "problem_tokens", "reduction",
    "replicate_weights", "tokens_per_dispatch", "unroll_layers", "warm_up", "prefill_trials",
)  # fmt: skip


class Case(NamedTuple):
    """One row: tokens of the prompt, sequences, prefix levels after the prompt, and the attention."""

    context: int
    batch: int
    num_levels: int
    attention: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Checked arguments: the model's shape, the cases, and SparQ's options, None without `sparq`."""

    config: LlamaConfig
    cases: list[Case]
    sparq: SparqOptions | None

    @property
    def attentions(self) -> list[str]:
        """Names of the attentions, each once."""
        return list(dict.fromkeys(case.attention for case in self.cases))

    def options_of(self, attention: str, reduction: str | None, prefill: str | None = None) -> dict[str, Any]:
        """Returns the options of `by_name` for one of the attentions."""
        return {
            "reduction": reduction if attention in REDUCING else None,
            "prefill": None if attention == "single" else prefill,
            "sparq": self.sparq if attention == "sparq" else None,
        }


def bench(args: argparse.Namespace) -> None:
    """Times the cases without a row, writes their rows, and prints all."""
    plan = _checked(args)
    processes.join(args, args.devices)
    is_single = plan.attentions == ["single"] and args.devices is None
    devices = session.choose_devices(1 if is_single else args.devices)
    place = session.Place(devices=devices, has_two_axes=args.reduction == "hierarchical")
    for name in plan.attentions:
        check_cache_dtype(name, args.cache_dtype)
        check_prefill_chunk(name, args.prefill_chunk if name in CHUNKING else None, len(devices))
        options = plan.options_of(name, args.reduction, args.prefill)
        check_prefill(options["prefill"], name, plan.config, tuple(place.axis_sizes.values()))
        if name != NO_ATTENTION:
            check_choice(name, options["reduction"], tuple(place.axis_sizes), len(devices), options["sparq"])
    writer, rows = None, []
    if args.out is not None:
        common = _common(args, len(devices), plan.sparq)
        writer = MeasuredRows(args.out / "results.jsonl", sweep=common, is_writer=is_first_process())
        rows = writer.rows
    try:
        for row in _timed(args, plan, place, rows):
            rows.append(row) if writer is None else writer.append(row)
    finally:  # the rows before a case that fails too
        if rows and is_first_process():
            print_rows(rows, as_json=args.json)


def _checked(args: argparse.Namespace) -> Plan:
    """Returns the checked arguments.

    Raises:
      ValueError: an argument is wrong; names the option.
    """
    _check_config(args.config)
    config = preset(args.config)
    check_folder("--out", args.out)
    if args.cache_dtype is not None:
        one_of("--cache-dtype", args.cache_dtype, NARROW_DTYPES)
    if args.products is not None:
        one_of("--products", args.products, PRODUCTS)
    contexts, samples, levels = (
        integers_in(f"--{name}", getattr(args, name)) for name in ("context", "samples", "levels")
    )
    attentions = [part.strip() for part in args.attention.split(",")]
    for name in attentions:
        one_of("--attention", name, (*ATTENTIONS, NO_ATTENTION))
        shares = args.share_prefix
        if shares is None and name != NO_ATTENTION and max(samples) * args.problems > 1:
            shares = True  # where that pays
        check_sharing(name, shares)
    shortest_problem = min(args.problems - 1, 1)  # one problem may have no text of its own
    check_at_least(args, new_tokens=2, tokens_per_dispatch=1, problems=1, problem_tokens=shortest_problem)
    check_at_least(args, prefill_trials=1)
    for num_levels in levels:
        one_of("--levels", num_levels, (1, 2))
    if 1 in levels and not args.problem_tokens:
        raise ValueError("--levels 1 needs --problem-tokens: without a problem there is one level in any case")
    sparq = sparq_options(args, attentions)
    if sparq is not None:
        sparq.check_head_dim(config.head_dim)
    batches = [count * args.problems for count in samples]
    cases = [Case(*case) for case in itertools.product(contexts, batches, levels, attentions)]
    return Plan(config=config, cases=cases, sparq=sparq)


def _check_config(name: str) -> None:
    """Raises ValueError for the name of no published shape, with those that are like it, or one of each kind."""
    if name not in PRESETS:
        kinds = {re.sub(r"-[0-9.]+[bm]\b", "", one): one for one in PRESETS}
        like = difflib.get_close_matches(name, PRESETS, n=4) or list(kinds.values())
        raise ValueError(f"--config must be a published shape such as {', '.join(like)}, got {name!r}")


def _common(args: argparse.Namespace, num_devices: int, sparq: SparqOptions | None) -> dict[str, Any]:
    """Returns the facts that the rows of one file have in common."""
    common = {name: getattr(args, name) for name in COMMON} | {"n_devices": num_devices}
    common |= {name: getattr(args, name) for name in OPTIONAL if getattr(args, name) is not None}
    common["products"] = args.products or "picked"
    return common | ({} if sparq is None else {"sparq": dataclasses.asdict(sparq)})


def _timed(args: argparse.Namespace, plan: Plan, place: session.Place, rows: list[dict[str, Any]]):
    """Yields the row of each case that is not among `rows`."""
    finished = {(row["context"], row["batch"], row["levels"], row["attention"]) for row in rows}
    flags = processes.broadcast_flags([case in finished for case in plan.cases])  # process 0 alone reads the file
    pending = [case for case, is_done in zip(plan.cases, flags, strict=True) if not is_done]
    if not pending:
        return
    model = timing.make_model(args, plan.config, place, [case.context for case in plan.cases])
    generators = [
        timing.make_generator(
            args, model, case.attention, plan.options_of(case.attention, args.reduction, args.prefill)
        )
        for case in pending
    ]
    prompts = functools.partial(_prompts, args, model.config.vocab_size)
    lower = lambda generator, number: generator.lower(
        prompts(pending[number]), args.new_tokens, share_prefixes=args.share_prefix
    )
    errors = ahead.compile_all(generators, lower)
    for number, case in enumerate(pending, start=1):
        if errors[0] is not None:
            raise errors.pop(0)
        del errors[0]
        samples = f" x {case.batch:,}" if case.batch > 1 else ""
        with session.phase(f"case {number} of {len(pending)}: {case.attention}, {case.context:,} tokens{samples}"):
            fields = timing.time_case(args, model, place, generators[0], prompts(case))
        del generators[0]  # and its programs
        yield {"context": case.context, "levels": case.num_levels} | fields | {
            "hardware": provenance.hardware(list(place.devices)), "versions": provenance.versions(),
            "nccl": provenance.nccl_settings(), **provenance.place(), **provenance.clocks(),
            "git_commit": provenance.git_commit(), "command": args.command_line,
        }  # fmt: skip


def _prompts(args: argparse.Namespace, vocab_size: int, case: Case) -> list[list[int]]:
    return timing.random_prompts(
        vocab_size,
        case.context,
        case.batch,
        case.num_levels,
        num_problems=args.problems,
        problem_tokens=args.problem_tokens,
    )
