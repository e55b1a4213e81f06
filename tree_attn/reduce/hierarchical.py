"""One axis reduction after another, along the fastest links first: slow links then carry merged results only."""

from collections.abc import Callable

from tree_attn.state import SoftmaxState


def hierarchical(
    state: SoftmaxState,
    axes: tuple[str, ...],
    reductions: tuple[Callable[[SoftmaxState, tuple[str, ...]], SoftmaxState], ...],
) -> SoftmaxState:
    """Merges over `axes[0]` with `reductions[0]`, the result over `axes[1]` with `reductions[1]`, and so on.

    It is exact because the merge is associative.

    Source: Tree Attention, section 5.3 (two-level topologies).
    """
    # Widened once: rounding to a narrow dtype after every axis would add an error per axis.
    merged = SoftmaxState(state.out.astype(state.lse.dtype), state.lse)
    for axis, reduction in zip(axes, reductions, strict=True):
        merged = reduction(merged, (axis,))
    return SoftmaxState(merged.out.astype(state.out.dtype), merged.lse)
