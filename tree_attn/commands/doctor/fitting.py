"""The cost model's parameters from measured times: launch, latency and rate of exchanges and transfers."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tree_attn.cost import predict
from tree_attn.cost.machine import EXCHANGES, AlphaBeta, ExchangeCost

COLLECTIVES = tuple(name for name in predict.AXIS_REDUCTIONS if EXCHANGES[name].is_collective)
NCCL_ROUND_US = 0.6  # a message over NVLink by its LL protocol: NCCL 2.28, src/graph/tuning.cc, hwLat
MAX_BYTES_PER_S = 1e15  # where noise says that more bytes take no more time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One measurement: an exchange of `payload_bytes` on each of `size` devices took `us` microseconds.

    The time is the difference that the exchange makes to a step. For bare transfers ("neighbour") it is the median of a
    chain of them.
    """

    exchange: str
    size: int
    payload_bytes: int
    us: float

    def saved(self) -> dict[str, Any]:
        """Returns the point as a machine's file has it."""
        return {"kind": self.exchange, "size": self.size, "payload_bytes": self.payload_bytes, "us": self.us}


def fit_collectives(
    points: Mapping[str, Sequence[Point]], round_us: float = 0.0
) -> tuple[float, dict[str, ExchangeCost]]:
    """Returns what a reduction costs beside NCCL's collectives, and the cost of each by axis ("device", "node").

    All collectives share an axis's launch, latency and rate. Otherwise what a reduction costs beside them could not be
    separated from a launch.

    Args:
      points: by axis; only `COLLECTIVES` count.
      round_us: latency of a message that waits for another, for an axis with one size of groups. Launch and latency
        cannot be separated there; by default the launch has both.
    """
    chosen = [(axis, point) for axis, found in points.items() for point in found if point.exchange in COLLECTIVES]
    axes = list(dict.fromkeys(axis for axis, _ in chosen))
    if not axes:
        return 0.0, {}
    rows = np.zeros((len(chosen), 1 + 3 * len(axes)))
    rows[:, 0] = 1
    for row, (axis, point) in zip(rows, chosen):
        first = 1 + 3 * axes.index(axis)
        on_axis = [other for other_axis, other in chosen if other_axis == axis]
        row[first : first + 3] = _counts(point, on_axis, is_across=axis == "node")
    assumed = {axis: round_us for i, axis in enumerate(axes) if not rows[:, 2 + 3 * i].any()}
    us = [point.us - assumed.get(axis, 0.0) * _num_rounds(point, is_across=axis == "node") for axis, point in chosen]
    collective_us, *costs = _least_squares(rows, us)
    fitted = {axis: _cost(*costs[3 * i : 3 * i + 3]) for i, axis in enumerate(axes)}
    return collective_us, fitted | {
        axis: dataclasses.replace(fitted[axis], round_us=us) for axis, us in assumed.items()
    }


def fit_exchange(points: Sequence[Point], *, is_across: bool) -> ExchangeCost:
    """Returns the launch, latency and rate, none negative, that explain an exchange's times with least relative errors.

    With one size of groups launch and latency cannot be separated: the launch then has both.

    Args:
      points: of one exchange.
      is_across: across nodes, not inside one.
    """
    rows = np.array([_counts(point, points, is_across=is_across) for point in points])
    return _cost(*_least_squares(rows, [point.us for point in points]))


def fit_transfers(points: Sequence[Point]) -> tuple[AlphaBeta, ...]:
    """Returns the lines of the least concave function that no point is above: transfers of all sizes at their slowest.

    NCCL gives larger transfers more channels, so the time per byte falls with the size.
    """
    hull: list[Point] = []
    for point in sorted(points, key=lambda point: point.payload_bytes):
        while len(hull) > 1 and _us_per_mb(hull[-1], point) >= _us_per_mb(hull[-2], hull[-1]):
            hull.pop()
        hull.append(point)
    return tuple(
        AlphaBeta(
            alpha_us=max(0.0, left.us - max(0.0, _us_per_mb(left, right)) * left.payload_bytes / 1e6),
            bytes_per_s=rate(_us_per_mb(left, right)),
        )
        for left, right in itertools.pairwise(hull)
    )


def rate(us_per_mb: float) -> float:
    """Returns bytes per second from microseconds per megabyte; at most `MAX_BYTES_PER_S`."""
    return 1e12 / max(us_per_mb, 1e12 / MAX_BYTES_PER_S)


def _counts(point: Point, points: Sequence[Point], *, is_across: bool) -> list[float]:
    """Returns launches, messages that wait for one another, and megabytes of an exchange."""
    pattern = EXCHANGES[point.exchange]
    rounds = _num_rounds(point, is_across=is_across) * (len({other.size for other in points}) > 1)
    megabytes = pattern.payloads_sent(point.size) * point.payload_bytes / 1e6
    return [pattern.num_exchanges, rounds, megabytes]


def _num_rounds(point: Point, *, is_across: bool) -> int:
    """Returns the messages of all exchanges of a reduction that wait for one another."""
    pattern = EXCHANGES[point.exchange]
    return pattern.num_exchanges * (pattern.rounds(1, point.size)[1] if is_across else pattern.rounds(point.size, 1)[0])


def _least_squares(rows: np.ndarray, us: Sequence[float]) -> list[float]:
    """Returns the cost of each column, none negative, with the least relative errors; small times count less.

    A difference of two medians may be all noise, and would otherwise outweigh the rest.
    """
    from scipy.optimize import nnls  # comes with JAX

    us = np.array(us)
    scale = np.maximum(us, np.median(us) / 4)
    found, _ = nnls(rows / scale[:, None], us / scale)
    return [float(x) for x in found]


def _cost(alpha_us: float, round_us: float, us_per_mb: float) -> ExchangeCost:
    return ExchangeCost(round_us=round_us, lines=(AlphaBeta(alpha_us=alpha_us, bytes_per_s=rate(us_per_mb)),))


def _us_per_mb(left: Point, right: Point) -> float:
    return (right.us - left.us) / (right.payload_bytes - left.payload_bytes) * 1e6
