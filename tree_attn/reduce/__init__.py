"""Across devices: every device holds the state of its shard, and each strategy merges them on all devices.

A strategy is a function (state, axes) -> state over bound mesh axes, in a module of its own; `reduce_state` runs one by
name, or the one that is predicted to cost least.
"""

import dataclasses
import functools
import logging
from collections.abc import Iterator, Mapping

import jax
from jax.sharding import Mesh

from tree_attn import topology
from tree_attn.arguments import one_of
from tree_attn.cost import machine
from tree_attn.cost.predict import AXIS_REDUCTIONS, candidates, cheapest_reduction
from tree_attn.devices import default_platform
from tree_attn.local import ShardAttention
from tree_attn.reduce import allreduce, fused, gather, hierarchical
from tree_attn.state import SoftmaxState

__all__ = ["AXIS_REDUCTIONS", "REDUCTIONS", "Reduction", "cheapest", "check_reduction", "reduce_state"]

REDUCTIONS = (*AXIS_REDUCTIONS, "hierarchical")
Reduction = str | tuple[str, ...]
_log = logging.getLogger("tree_attn")


def reduce_state(
    state: SoftmaxState | ShardAttention, axes: tuple[str, ...], reduction: Reduction | None, mesh: Mesh | None = None
) -> SoftmaxState:
    """Merges the states of all devices along `axes`; every device gets the result, equal to the bit.

    Args:
      state: this device's `SoftmaxState`, inside `shard_map`. Or its attention, not yet run: "fused" over all axes can
        merge the partial states of its kernel.
      axes: bound mesh axes, fastest link first.
      reduction: see `check_reduction`. None takes the one that the cost model predicts to be the cheapest for this
        state, of those that can run here. On a machine without measured costs that is "fused" over the first axis if
        it can run and was run on such devices, else "gather", and "gather" over the others: one latency per axis, where
        "allreduce" has three.
      mesh: the mesh of the axes where it is known; "fused" needs it unless it is of all devices in order.
    Raises:
      NotImplementedError: "fused" cannot run here, see `tree_attn.reduce.fused`.

    Source: Tree Attention, section 5.2 and Algorithm 3.
    """
    reduction = check_reduction(reduction, axes)
    if reduction is None:
        is_run = isinstance(state, SoftmaxState)
        elements = state.out.size + state.lse.size if is_run else state.num_elements
        reduction = cheapest(elements, {axis: jax.lax.axis_size(axis) for axis in axes}, mesh)
    if reduction != "fused" and isinstance(state, ShardAttention):
        state = state.run()
    merge_over = {
        "allreduce": allreduce.allreduce,
        "gather": gather.gather,
        "fused": functools.partial(fused.fused, mesh=mesh),
    }
    if isinstance(reduction, tuple):
        return hierarchical.hierarchical(state, axes, tuple(merge_over[name] for name in reduction))
    return merge_over[reduction](state, axes)


def check_reduction(reduction: Reduction | None, axes: tuple[str, ...]) -> Reduction | None:
    """Returns the strategy: one for all axes, or a tuple of one per axis (hierarchical), or None for the cheapest.

    "hierarchical" means "gather" over each axis; a tuple names each axis's own, e.g. `("fused", "gather")`.

    Raises:
      ValueError: no such strategy; "hierarchical" over one axis; a tuple that has not one strategy per axis.
    """
    if reduction is None:
        return None
    if isinstance(reduction, tuple):
        if len(reduction) != len(axes) or not all(name in AXIS_REDUCTIONS for name in reduction):
            raise ValueError(
                f"reduction given as a tuple must name one of {AXIS_REDUCTIONS} for each axis of {axes}, "
                f"got {reduction}"
            )
        return reduction
    one_of("reduction", reduction, REDUCTIONS)
    if reduction != "hierarchical":
        return reduction
    if len(axes) < 2:
        raise ValueError(f"reduction='hierarchical' needs axis_name to be a tuple of two or more axes, got {axes}")
    return ("gather",) * len(axes)


def cheapest(elements: int, axis_sizes: Mapping[str, int], mesh: Mesh | None = None) -> Reduction:
    """Returns the cheapest reduction that can run here, and logs it, and why a cheaper one cannot run.

    Args:
      elements: of the state, output and lse.
      axis_sizes: by mesh axis, fastest link first.
      mesh: the mesh of the axes where it is known; "fused" needs it unless it is of all devices in order.
    """
    for reduction in _by_cost(elements, tuple(axis_sizes.values())):
        reason = _why_not(reduction, elements, tuple(axis_sizes), mesh)
        if reason is None:
            _log.info("reduction=None picked %r", reduction)
            return reduction
        _log.info("reduction=None: %s", reason)
    raise AssertionError("gather runs everywhere")


def _by_cost(elements: int, sizes: tuple[int, ...]) -> Iterator[Reduction]:
    """Yields the reductions from the cheapest on; without measured costs, those with one latency per axis."""
    known = machine_here()
    if known is None:
        rest = ("gather",) * (len(sizes) - 1)
        # Named, "fused" runs on other GPUs too, on none of which it was run.
        firsts = ("fused", "gather") if fused.was_run_here() else ("gather",)
        yield from ((first, *rest) if rest else first for first in firsts)
        return
    left = candidates(len(sizes))
    while left:
        best = cheapest_reduction(left, elements=elements, axis_sizes=sizes, machine=known)
        left.remove(best)
        yield best


def _why_not(reduction: Reduction, elements: int, axes: tuple[str, ...], mesh: Mesh | None) -> str | None:
    """Returns the reason why `reduction` cannot run here, or None where it can; only "fused" has needs."""
    if reduction == "fused":
        return fused.why_not(elements, axes, mesh)
    if isinstance(reduction, tuple):
        reasons = (fused.why_not(elements, (axis,), mesh) for axis, name in zip(axes, reduction) if name == "fused")
        return next(filter(None, reasons), None)
    return None


def machine_here() -> machine.Machine | None:
    """Returns the measured costs of the machine that programs run on, with as many GPUs per node as there are."""
    known = machine.load(jax.local_devices()[0].device_kind) if default_platform() == "gpu" else None
    num_nodes = topology.num_nodes() if known else None
    return dataclasses.replace(known, gpus_per_node=jax.device_count() // num_nodes) if num_nodes else known
