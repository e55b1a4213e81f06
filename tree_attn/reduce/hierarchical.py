"""Level by level over a topology: first along the fastest links, so that slow links carry merged results only."""

from collections.abc import Callable

from tree_attn.state import SoftmaxState


def hierarchical(
    state: SoftmaxState,
    axes: tuple[str, ...],
    levels: tuple[Callable[[SoftmaxState, tuple[str, ...]], SoftmaxState], ...],
) -> SoftmaxState:
    """Merges over `axes[0]` with `levels[0]`, the result over `axes[1]` with `levels[1]`, and so on.

    Correct because the merge is associative. Source: Tree Attention, section 5.3 (two-level topologies).
    """
    # Widened once: rounding to a narrow dtype at every level would add an error per level.
    merged = SoftmaxState(state.out.astype(state.lse.dtype), state.lse)
    for axis, level in zip(axes, levels, strict=True):
        merged = level(merged, (axis,))
    return SoftmaxState(merged.out.astype(state.out.dtype), merged.lse)
