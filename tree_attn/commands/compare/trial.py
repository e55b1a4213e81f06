"""One case of `tree-attn compare`: compiled, checked against the oracle, and timed."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from tree_attn.commands.compare import data
from tree_attn.commands.compare.cases import Case
from tree_attn.commands.processes import broadcast
from tree_attn.measure import hlo, latency
from tree_attn.measure.memory import compiled_memory, runtime_peak_memory_bytes
from tree_attn.tolerances import relative_out_tolerance
from tree_attn.topology import is_first_process


class WrongResult(Exception):
    """An output that differs from the oracle's by more than the tolerance: nothing may be measured after it."""


class Laboratory:
    """The devices and the random data that cases are checked and timed with.

    Cases of one step share its data. The data of another step is freed before new data is made.
    """

    def __init__(self, devices: Sequence[jax.Device], seed: int):
        """Keeps the devices, in the order of the mesh, and the seed of the data."""
        self.devices, self.seed = list(devices), seed
        self._data: dict[tuple, tuple[jax.Array, ...]] = {}

    def check(self, case: Case) -> dict[str, Any]:
        """Compiles one step, runs it, and compares it with the oracle; returns the fields of the row that this settles.

        Raises:
          WrongResult: the output is further from the oracle than the tolerance.
          NotImplementedError: the case cannot run on these devices.
        """
        if case.obstacle is not None:
            raise NotImplementedError(case.obstacle)
        mesh = case.mesh(self.devices)
        fields, compiled = self._compile(case, mesh)
        arrays = self._arrays(case, mesh)
        before = runtime_peak_memory_bytes(self.devices)
        output = jax.block_until_ready(compiled(*arrays))
        after = runtime_peak_memory_bytes(self.devices)
        if after is not None:
            # The high-water mark cannot be set back: if an earlier program reached higher, it is a bound only.
            fields["peak_memory_bytes_runtime" if after > before else "peak_memory_bytes_runtime_at_most"] = after
        return fields | self._compare_with_oracle(case, output)

    def time(
        self,
        case: Case,
        *,
        n_iters: int,
        chain: int,
        long_chain: int | None,
        step_collectives: dict[str, int] | None,
        on_sample: Callable[[], None] | None = None,
    ) -> dict[str, Any]:
        """Times a case; returns the fields of the row that this settles: those of `latency.Timing`.

        Raises:
          RuntimeError: a timed program does not run the `step_collectives` of one step (None: unknown) for each of its
            steps; or the clock's noise hides the step.
        """
        mesh = case.mesh(self.devices)

        def check(compiled: jax.stages.Compiled, num_steps: int) -> None:
            counts = step_collectives and hlo.counts(compiled.as_text())
            if counts != (step_collectives and {name: num_steps * count for name, count in step_collectives.items()}):
                raise RuntimeError(
                    f"a chain of {num_steps} steps runs {counts}, and one step {step_collectives}: not timed"
                )

        timing = latency.latency_us(
            case.decode(mesh),
            *self._arrays(case, mesh),
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

    def _arrays(self, case: Case, mesh: Mesh) -> tuple[jax.Array, ...]:
        key = (case.step, mesh, case.axes)
        if key not in self._data:
            self._data.clear()  # before new data is made: both may not fit
            self._data[key] = self._make_arrays(case, mesh)
        return self._data[key]

    def _make_arrays(self, case: Case, mesh: Mesh) -> tuple[jax.Array, ...]:
        return data.make_data(case.step, mesh, case.axes, self.seed)

    def _compile(self, case: Case, mesh: Mesh) -> tuple[dict[str, Any], jax.stages.Compiled]:
        lowered = jax.jit(case.decode(mesh)).lower(*self._arrays(case, mesh))
        start = time.perf_counter()
        compiled = lowered.compile()
        fields: dict[str, Any] = {"compile_s": time.perf_counter() - start}
        memory = compiled_memory(compiled)
        fields["peak_memory_bytes_compiled"] = memory and memory.peak_bytes
        try:
            fields["collectives_lowered"] = hlo.counts(lowered.as_text(dialect="hlo"))
            listed = hlo.collectives(compiled.as_text(), num_devices=case.step.n_devices)
            fields["collectives_compiled"] = hlo.counts(listed)
            if case.reduction != "fused":  # a kernel's stores to its peers' memory are not in the program's text
                fields["bytes_sent_per_device_compiled"] = hlo.total_bytes_sent_per_device(listed)
        except ValueError as error:  # text of an unknown compiler: the timing is worth having without it
            fields["collectives_error"] = str(error)
        return fields, compiled

    def _compare_with_oracle(self, case: Case, output: jax.Array) -> dict[str, Any]:
        scope = data.oracle_scope(case.step)
        step = dataclasses.replace(case.step, num_keys=scope.num_keys)
        if step != case.step:
            mesh = case.mesh(self.devices)
            output = jax.jit(case.decode(mesh))(*data.make_data(step, mesh, case.axes, self.seed))
        whole = np.asarray(output.addressable_data(0)).astype(np.float64)  # every device holds all of it

        def errors() -> list[tuple[float, float]]:
            expected = data.oracle_output(step, scope, self.seed)
            actual = whole[: scope.batch, :, : expected.shape[2]]
            return [(np.abs(actual - expected).max(), relative_out_tolerance(step.dtype, expected))]

        error, tolerance = self._verdict(case, errors, num_keys=step.num_keys)
        return {
            "max_abs_error": error,
            "tolerance": tolerance,
            "oracle_num_keys": scope.num_keys,
            "oracle_batch": scope.batch,
            "oracle_num_kv_heads": scope.num_kv_heads,
        }

    def _verdict(
        self, case: Case, errors: Callable[[], list[tuple[float, float]]], *, num_keys: int
    ) -> tuple[float, float]:
        """Returns the error and the tolerance of the array that comes nearest to its tolerance.

        Args:
          errors: returns both for each array. One process calls it, since the others share its host's memory.

        Raises:
          WrongResult: an error is larger than its tolerance; in every process.
        """
        verdict = np.zeros(2)
        if is_first_process():
            verdict = np.array(max(errors(), key=lambda one: np.inf if np.isnan(one[0]) else one[0] / one[1]))
        # float32 is what broadcasting keeps without x64, and enough here.
        error, tolerance = (float(x) for x in broadcast(verdict.astype(np.float32)))
        if not error <= tolerance:  # so written that NaN fails
            raise WrongResult(
                f"{case.label} ({case.implementation}, {num_keys} keys, {case.step.dtype}) is off by {error:.3g} from "
                f"attention in float64, and {tolerance:.3g} is allowed"
            )
        return error, tolerance


def chain_lengths(bytes_sent: float | None, requested: int | None, is_emulated: bool) -> tuple[int, int | None]:
    """Returns the steps in the short program of a sample and in the long one; None without a long one."""
    sends_much = (bytes_sent or 0) > 100e6  # for a millisecond, which needs no long chain
    chain = requested or (1 if is_emulated else 4 if sends_much else 32)
    # Noise of emulated devices may hide the difference.
    return chain, None if is_emulated or chain == 1 else 4 * chain
