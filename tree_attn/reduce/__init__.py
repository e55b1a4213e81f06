"""Across devices: every device holds the state of its shard, and each strategy merges them on all devices.

A strategy is a function (state, axes) -> state over bound mesh axes; one file each.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from tree_attn import topology
from tree_attn.arguments import one_of
from tree_attn.cost import machine
from tree_attn.cost.predict import LEVELS, candidates, cheapest_reduction
from tree_attn.devices import default_platform
from tree_attn.local import ShardAttention
from tree_attn.reduce.all_to_all import all_to_all
from tree_attn.reduce.allreduce import allreduce
from tree_attn.reduce.fused import fused
from tree_attn.reduce.gather import gather
from tree_attn.reduce.hierarchical import hierarchical
from tree_attn.state import SoftmaxState

REDUCTIONS = (*LEVELS, "hierarchical")
Reduction = str | tuple[str, ...] | None
_log = logging.getLogger("tree_attn")


def reduce_state(
    state: SoftmaxState | ShardAttention, axes: tuple[str, ...], reduction: Reduction, mesh: Mesh | None = None
) -> SoftmaxState:
    """Merges the states of all devices along `axes`; every device gets the result, equal to the bit.

    Args:
      state: this device's `SoftmaxState`, inside `shard_map`; or its attention yet to be run, of which "fused" over all
        axes can take partial states as they are.
      axes: bound mesh axes, fastest link first.
      reduction: see `check_reduction`. None takes what the cost model predicts to be the cheapest for this state, of
        what can run here; on a machine that nobody measured, "fused" over the first axis if it can run, else "gather",
        and "gather" over the others: one latency per level, where "allreduce" has three.
      mesh: the mesh of the axes where it is known; "fused" needs it unless it is of all devices in order.
    Raises:
      NotImplementedError: "fused" cannot run here, see `tree_attn.reduce.fused`.

    Source: Tree Attention, section 5.2 and Algorithm 3.
    """
    levels = {"allreduce": allreduce, "gather": gather, "fused": functools.partial(fused, mesh=mesh)}
    run = functools.partial(_run, state, axes, levels=levels)
    reduction = check_reduction(reduction, axes)
    return _run_cheapest(state, axes, run) if reduction is None else run(reduction)


def _run(
    state: SoftmaxState | ShardAttention, axes: tuple[str, ...], reduction: str | tuple[str, ...], levels: dict
) -> SoftmaxState:
    if reduction != "fused" and isinstance(state, ShardAttention):
        state = state.run()
    if isinstance(reduction, tuple):
        return hierarchical(state, axes, tuple(levels[level] for level in reduction))
    return levels[reduction](state, axes)


def _run_cheapest(state: SoftmaxState | ShardAttention, axes: tuple[str, ...], run: Callable) -> SoftmaxState:
    known = _machine()
    if known is None:
        rest = ("gather",) * (len(axes) - 1)
        left = [(first, *rest) if rest else first for first in ("fused", "gather")]
        cheapest = lambda left: left[0]
    else:
        left = candidates(len(axes))
        sizes = tuple(map(jax.lax.axis_size, axes))
        is_run = isinstance(state, SoftmaxState)
        elements = state.out.size + state.lse.size if is_run else state.num_elements
        cheapest = functools.partial(cheapest_reduction, elements=elements, axis_sizes=sizes, machine=known)
    while True:
        picked = cheapest(left)
        try:
            merged = run(picked)
        except NotImplementedError as error:
            _log.info("reduction=None: %s", error)
            left.remove(picked)
        else:
            _log.info("reduction=None picked %r", picked)
            return merged


def _machine() -> machine.Machine | None:
    """What is known of the machine that programs run on, with as many GPUs per node as there are."""
    known = machine.load(jax.local_devices()[0].device_kind) if default_platform() == "gpu" else None
    num_nodes = topology.num_nodes() if known else None
    return dataclasses.replace(known, gpus_per_node=jax.device_count() // num_nodes) if num_nodes else known


def check_reduction(reduction: Reduction, axes: tuple[str, ...]) -> Reduction:
    """Returns which strategy is meant: one for all axes, or one per axis (hierarchical), or None: to be picked.

    "hierarchical" means "gather" at each level; a tuple names each axis's own, e.g. `("fused", "gather")`.

    Raises:
      ValueError: no such strategy; "hierarchical" over one axis; a tuple that is not one level per axis.
    """
    if reduction is None:
        return None
    if isinstance(reduction, tuple):
        if len(reduction) != len(axes) or not all(level in LEVELS for level in reduction):
            raise ValueError(
                f"reduction given as a tuple must name one of {LEVELS} for each axis of {axes}, got {reduction}"
            )
        return reduction
    one_of("reduction", reduction, REDUCTIONS)
    if reduction != "hierarchical":
        return reduction
    if len(axes) < 2:
        raise ValueError(f"reduction='hierarchical' needs axis_name to be a tuple of two or more axes, got {axes}")
    return ("gather",) * len(axes)


__all__ = [
    "LEVELS",
    "REDUCTIONS",
    "all_to_all",
    "allreduce",
    "check_reduction",
    "fused",
    "gather",
    "hierarchical",
    "reduce_state",
]
