"""The cases that `tree-attn compare` runs, and how one of them is compiled, checked and timed."""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from tree_attn import tree_decode
from tree_attn.arguments import AttentionOptions
from tree_attn.commands.compare import data as comparison_data
from tree_attn.cost import predict
from tree_attn.cost.step import DecodeStep
from tree_attn.local import choose
from tree_attn.masking import visibility
from tree_attn.measure import hlo, latency, provenance
from tree_attn.measure.memory import compiled_memory, runtime_peak_memory_bytes
from tree_attn.mesh import NODE_AXES, make_mesh, node_axes
from tree_attn.placement import Shard
from tree_attn.reduce import REDUCTIONS
from tree_attn.tolerances import relative_out_tolerance

# The fields of a row that say what was run, rather than what came out.
KEY_FIELDS = (
    "strategy", "reduction", "implementation", "n_devices", "n_processes", "batch", "num_keys", "num_heads",
    "num_kv_heads", "head_dim", "dtype", "hardware", "jax_version",
)  # fmt: skip
_RESULT_FIELDS = (
    "latency_us_median", "latency_us_p10", "latency_us_p90", "program_us", "n_iters", "chain", "long_chain", "timing",
    "compile_s",
    "peak_memory_bytes_compiled", "peak_memory_bytes_runtime", "peak_memory_bytes_runtime_at_most",
    "collectives_lowered", "collectives_compiled", "bytes_sent_per_device_compiled", "max_abs_error", "tolerance",
    "oracle_num_keys", "oracle_batch", "oracle_num_kv_heads", "sent_gb_per_s", "neighbour_gb_per_s", "error",
)  # fmt: skip


class WrongResult(Exception):
    """An output that differs from the oracle's by more than the tolerance: nothing may be measured after it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One row: a strategy of `predict.STRATEGIES`, a reduction (tree only), the local kernel, and the step.

    `axis_sizes` has one entry, or two for "hierarchical", fastest links first.
    """

    strategy: str
    reduction: str | None
    implementation: str
    step: DecodeStep
    axis_sizes: tuple[int, ...]

    @property
    def label(self) -> str:
        """How tables and plots call the strategy: "tree allreduce", "ring overlapped"."""
        return f"tree {self.reduction}" if self.reduction else self.strategy.replace("_", " ")

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that the keys are sharded over, fastest links first: their shards come in this order."""
        return NODE_AXES[: len(self.axis_sizes)]

    def mesh(self, devices: Sequence[jax.Device]) -> Mesh:
        """The devices as one axis, or as two for "hierarchical"."""
        return make_mesh(dict(zip(self.axes, self.axis_sizes)), devices)

    def decode(self, mesh: Mesh) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
        """The function under comparison, of (query, key, value)."""
        from tree_attn.ring_baseline import ring_decode  # here, so that tree_attn alone does not need ring_baseline

        options = dict(axis_name=self.axes, mesh=mesh, implementation=self.implementation)
        if self.strategy == "tree":
            return functools.partial(tree_decode, reduction=self.reduction, **options)
        return functools.partial(ring_decode, variant=self.strategy.removeprefix("ring_"), **options)


def plan(
    steps: Sequence[DecodeStep], reductions: Sequence[str], implementations: Sequence[str | None], platform: str
) -> list[Case]:
    """All cases: for each step and implementation, tree with every reduction and then both rings.

    Args:
        reductions: which; if empty, all but "fused" on a platform that never has it.
    """
    reductions = reductions or [name for name in REDUCTIONS if name != "fused" or platform == "gpu"]
    cases = []
    for step, asked in itertools.product(steps, implementations):
        case = functools.partial(Case, step=step, implementation=asked or _automatic_implementation(step, platform))
        for reduction in reductions:
            axes = node_axes(step.n_devices) if reduction == "hierarchical" else None
            sizes = tuple(axes.values()) if axes else (step.n_devices,)
            cases.append(case(strategy="tree", reduction=reduction, axis_sizes=sizes))
        beside = asked or _automatic_implementation(step, platform, beside_transfers=True)
        for strategy in ("ring_overlapped", "ring_public"):
            ring = case(strategy=strategy, reduction=None, implementation=beside, axis_sizes=(step.n_devices,))
            cases.append(ring)
    return cases


def new_row(case: Case, *, hardware: str, git_commit: str | None, command: str) -> dict[str, Any]:
    """The row of a case before it has run: what it is and what is predicted for it; results are None."""
    step = case.step
    reachable = case.reduction != "hierarchical" or len(case.axis_sizes) == 2
    sizes = dataclasses.asdict(step)
    row = {"strategy": case.strategy, "reduction": case.reduction, "implementation": case.implementation}
    row |= {"n_devices": step.n_devices, "n_processes": jax.process_count(), "axis_sizes": list(case.axis_sizes)}
    row |= {name: sizes[name] for name in ("batch", "num_keys", "num_heads", "num_kv_heads", "head_dim", "dtype")}
    row |= dict.fromkeys(_RESULT_FIELDS)
    row["peak_memory_bytes_predicted"] = predict.peak_memory_bytes(step, case.strategy)
    row["bytes_sent_per_device_predicted"] = (
        predict.bytes_sent_per_device(step, case.strategy, case.reduction, axis_sizes=case.axis_sizes)
        if reachable
        else None
    )
    return row | {
        "hardware": hardware, "jax_version": jax.__version__, "nccl": provenance.nccl_settings(),
        "git_commit": git_commit, "command": command,
    }  # fmt: skip


def row_key(row: dict[str, Any]) -> tuple:
    """What makes two rows measurements of the same thing."""
    return tuple(row.get(field) for field in KEY_FIELDS)


def check_reachable(case: Case) -> None:
    """Raises NotImplementedError, with the reason, for a case that these devices cannot run."""
    if case.reduction == "hierarchical" and len(case.axis_sizes) != 2:
        raise NotImplementedError(
            f"reduction 'hierarchical' needs two mesh axes of at least two devices each; {case.step.n_devices} devices "
            "do not factor into two"
        )


def check_case(case: Case, devices: Sequence[jax.Device], seed: int) -> dict[str, Any]:
    """Compiles one step, runs it, and compares it with the oracle; returns the row's fields that this settles.

    Raises:
        WrongResult: the output is further from the oracle than the tolerance.
        NotImplementedError: the case cannot run here.
    """
    check_reachable(case)
    mesh = case.mesh(devices)
    fields, compiled = _compile(case, mesh, seed)
    data = _data(case, mesh, seed)
    before = runtime_peak_memory_bytes(devices)
    output = jax.block_until_ready(compiled(*data))
    after = runtime_peak_memory_bytes(devices)
    if after is not None:
        # The high-water mark cannot be set back: if an earlier program reached higher, all we have is a bound.
        fields |= (
            {"peak_memory_bytes_runtime": after} if after > before else {"peak_memory_bytes_runtime_at_most": after}
        )
    return fields | _compare_with_oracle(case, devices, seed, output)


def time_case(
    case: Case,
    devices: Sequence[jax.Device],
    seed: int,
    *,
    n_iters: int,
    chain: int,
    long_chain: int | None,
    step_collectives: dict[str, int] | None,
    on_sample: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Times a case; returns the row's fields that this settles: those of `latency.Timing`.

    Raises:
        RuntimeError: a timed program does not run the `step_collectives` of one step (None: unknown) for each of its
            steps; or the clock's noise hides the step.
    """
    mesh = case.mesh(devices)

    def check(compiled: jax.stages.Compiled, num_steps: int) -> None:
        counts = step_collectives and hlo.counts(compiled.as_text())
        if counts != (step_collectives and {kind: num_steps * count for kind, count in step_collectives.items()}):
            raise RuntimeError(
                f"a chain of {num_steps} steps runs {counts}, and one step {step_collectives}: not timed"
            )

    timing = latency.latency_us(
        case.decode(mesh),
        *_data(case, mesh, seed),
        n_iters=n_iters,
        chain=chain,
        long_chain=long_chain,
        on_sample=on_sample,
        on_compiled=check,
    )
    return {
        "latency_us_median": timing.median_us,
        "latency_us_p10": timing.p10_us,
        "latency_us_p90": timing.p90_us,
        "program_us": timing.program_us,
        "n_iters": timing.n_iters,
        "chain": timing.chain,
        "long_chain": timing.long_chain,
        "timing": timing.method,
    }


def _compile(case: Case, mesh: Mesh, seed: int) -> tuple[dict[str, Any], jax.stages.Compiled]:
    lowered = jax.jit(case.decode(mesh)).lower(*_data(case, mesh, seed))
    start = time.perf_counter()
    compiled = lowered.compile()
    fields: dict[str, Any] = {"compile_s": time.perf_counter() - start}
    memory = compiled_memory(compiled)
    fields["peak_memory_bytes_compiled"] = memory and memory.peak_bytes
    try:
        fields["collectives_lowered"] = hlo.counts(lowered.as_text(dialect="hlo"))
        listed = hlo.collectives(compiled.as_text(), num_devices=case.step.n_devices)
        fields["collectives_compiled"] = hlo.counts(listed)
        if case.reduction != "fused":  # what a kernel stores in its peers' memory is not in the program's text
            fields["bytes_sent_per_device_compiled"] = hlo.total_bytes_sent_per_device(listed)
    except ValueError as error:  # text of a compiler we have not met: the timing is worth having all the same
        fields["collectives_error"] = str(error)
    return fields, compiled


def _compare_with_oracle(case: Case, devices: Sequence[jax.Device], seed: int, output: jax.Array) -> dict[str, Any]:
    scope = comparison_data.oracle_scope(case.step)
    step = dataclasses.replace(case.step, num_keys=scope.num_keys)
    if step != case.step:
        mesh = case.mesh(devices)
        output = jax.jit(case.decode(mesh))(*comparison_data.make_data(step, mesh, case.axes, seed))
    whole = np.asarray(output.addressable_data(0)).astype(np.float64)  # every device holds all of it
    # One process consults the oracle, since the others share its host's memory; all must come to one verdict.
    verdict = np.zeros(2)
    if jax.process_index() == 0:
        expected = comparison_data.oracle_output(step, scope, seed)
        got = whole[: scope.batch, :, : expected.shape[2]]
        verdict = np.array([np.abs(got - expected).max(), relative_out_tolerance(step.dtype, expected)])
    # float32 is what broadcasting keeps without x64, and enough here.
    error, allowed = (float(x) for x in _broadcast(verdict.astype(np.float32)))
    if not error <= allowed:  # so written that NaN fails
        raise WrongResult(
            f"{case.label} ({case.implementation}, {step.num_keys} keys, {step.dtype}) is off by {error:.3g} from the "
            f"float64 oracle, and {allowed:.3g} is allowed"
        )
    return {
        "max_abs_error": error,
        "tolerance": allowed,
        "oracle_num_keys": scope.num_keys,
        "oracle_batch": scope.batch,
        "oracle_num_kv_heads": scope.num_kv_heads,
    }


def _broadcast(x: np.ndarray) -> np.ndarray:
    """Process 0's value of `x`, in every process."""
    return x if jax.process_count() == 1 else np.asarray(multihost_utils.broadcast_one_to_all(x))


def _data(case: Case, mesh: Mesh, seed: int, held: dict = {}) -> tuple[jax.Array, ...]:  # noqa: B006
    """The data of a step, made once for all cases that share it; the last step's is freed before the next is made."""
    wanted = (case.step, mesh, case.axes, seed)
    if wanted not in held:
        held.clear()
        held[wanted] = comparison_data.make_data(*wanted)
    return held[wanted]


def broadcast_flags(flags: Sequence[bool]) -> list[bool]:
    """Process 0's list of booleans, in every process."""
    return [bool(flag) for flag in _broadcast(np.asarray(flags, np.int32))]


def _automatic_implementation(step: DecodeStep, platform: str, beside_transfers: bool = False) -> str:
    """What `implementation=None` would run on one shard of this step, in tree attention or in a ring."""
    if platform == "cpu":
        return "xla"  # on a machine with a GPU, the library would judge by that and not by the emulated devices
    batch, keys, heads, dim = step.batch, step.keys_per_device, step.num_kv_heads, step.head_dim
    query = jax.ShapeDtypeStruct((batch, step.num_queries, step.num_heads, dim), step.dtype)
    key = jax.ShapeDtypeStruct((batch, keys, heads, dim), step.dtype)
    visible = visibility(AttentionOptions(), batch=batch, num_queries=step.num_queries, num_slots=keys, shard=Shard())
    return choose(
        query, key, key, logits_soft_cap=None, visible=visible, implementation=None, beside_transfers=beside_transfers
    )
