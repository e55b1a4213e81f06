"""Across devices: every device holds the state of its shard, and each strategy merges them on all devices.

A strategy is a function (state, axes) -> state over bound mesh axes; one file each.
"""

import logging

from tree_attn.arguments import one_of
from tree_attn.reduce.allreduce import allreduce
from tree_attn.reduce.gather import gather
from tree_attn.reduce.hierarchical import hierarchical
from tree_attn.state import SoftmaxState

LEVELS = {"allreduce": allreduce, "gather": gather}
REDUCTIONS = ("allreduce", "gather", "hierarchical")
_log = logging.getLogger("tree_attn")


def reduce_state(state: SoftmaxState, axes: tuple[str, ...], reduction: str | tuple[str, ...] | None) -> SoftmaxState:
    """Merges the states of all devices along `axes`; every device gets the result, equal to the bit.

    Args:
      state: this device's `SoftmaxState`, inside `shard_map`.
      axes: bound mesh axes, fastest link first.
      reduction: see `choose_reduction`.

    Source: Tree Attention, section 5.2 and Algorithm 3.
    """
    reduction = choose_reduction(reduction, axes)
    if isinstance(reduction, tuple):
        return hierarchical(state, axes, tuple(LEVELS[level] for level in reduction))
    return LEVELS[reduction](state, axes)


def choose_reduction(reduction: str | tuple[str, ...] | None, axes: tuple[str, ...]) -> str | tuple[str, ...]:
    """Returns the strategy that will run: "allreduce", "gather", or one of them per axis (hierarchical).

    "hierarchical" means "gather" at each level; a tuple names each axis's own, e.g. `("gather", "allreduce")`. None
    takes "gather" over one axis and "hierarchical" over several: one latency per level, where "allreduce" has three.

    Raises:
      ValueError: no such strategy; "hierarchical" over one axis; a tuple that is not one level per axis.
    """
    if reduction is None:
        reduction = "gather" if len(axes) == 1 else "hierarchical"
        _log.info("reduction=None picked %r", reduction)
    if isinstance(reduction, tuple):
        if len(reduction) != len(axes) or not all(level in LEVELS for level in reduction):
            raise ValueError(
                f"reduction given as a tuple must name one of {tuple(LEVELS)} for each axis of {axes}, got {reduction}"
            )
        return reduction
    one_of("reduction", reduction, REDUCTIONS)
    if reduction != "hierarchical":
        return reduction
    if len(axes) < 2:
        raise ValueError(f"reduction='hierarchical' needs axis_name to be a tuple of two or more axes, got {axes}")
    return ("gather",) * len(axes)


__all__ = ["LEVELS", "REDUCTIONS", "allreduce", "choose_reduction", "gather", "hierarchical", "reduce_state"]
