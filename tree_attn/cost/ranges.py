"""Ranges of predictions that rest on assumed constants: a datasheet's rates, assumed links, more GPUs than were fitted.

A prediction has no range where all of its constants were fitted to rows of as many devices. Elsewhere its range is that
of two machines, one with every assumed time at its least and one at its most:

    assumed                              times of local attention    times of exchanges
    more devices than were fitted        0.95 to 1.05                0.6 to 1.7
    the rates of a datasheet             0.95 to 1.4                 as those of the links
    links that were not measured                                     0.4 to 2.5

The first line holds the steps of four and eight H200s that the model predicts from one and two (a test). The second is
from the datasheet's whole rate, where an H200 reaches 0.96 of it, to 0.7 of it. The third is a guess.
"""

import dataclasses
from collections.abc import Sequence

from tree_attn.cost.machine import AlphaBeta, ExchangeCost, LinkClass, Machine
from tree_attn.cost.predict import Reduction, predict_step
from tree_attn.cost.step import DecodeStep

Factors = tuple[float, float]  # of the least time and of the most

FITTED: Factors = (1.0, 1.0)
LOCAL_OF_MORE_DEVICES: Factors = (0.95, 1.05)  # all wait for the slowest of them
EXCHANGE_OF_MORE_DEVICES: Factors = (0.6, 1.7)
LOCAL_BY_DATASHEET: Factors = (0.95, 1.4)
ASSUMED_LINKS: Factors = (0.4, 2.5)


def latency_range_us(
    step: DecodeStep,
    strategy: str,
    reduction: Reduction | None = None,
    *,
    machine: Machine,
    axis_sizes: Sequence[int] | None = None,
) -> tuple[float, float] | None:
    """Returns the least and the most microseconds of a step; None where nothing of the prediction is assumed.

    Args:
      step, strategy, reduction, machine, axis_sizes: see `tree_attn.cost.predict.predict_step`, which predicts the
        time between the two.

    Raises:
      ValueError, NotImplementedError: as `predict_step`.

    Example:
      >>> step = DecodeStep(batch=1, num_keys=81_920, num_heads=16, num_kv_heads=16, head_dim=128, dtype="bfloat16",
      ...                   n_devices=8)
      >>> latency_range_us(step, "tree", "gather", machine=machine.load("NVIDIA H200"))
    """
    local, node, network = _factors(machine, step.n_devices)
    if local == node == network == FITTED:
        return None
    low, high = (
        predict_step(step, strategy, reduction, machine=_slowed(machine, *factors), axis_sizes=axis_sizes).latency_us
        for factors in zip(local, node, network)
    )
    return low, high


def _factors(machine: Machine, n_devices: int) -> tuple[Factors, Factors, Factors]:
    """Returns the factors of local attention, of the links inside a node and of those across nodes."""
    fitted = machine.gpus_per_node if machine.fitted_devices is None else machine.fitted_devices
    is_extrapolated = n_devices > max(fitted, 1)
    links = [FITTED, FITTED]
    for i, (link, is_used) in enumerate(
        ((machine.node, n_devices > 1), (machine.network, n_devices > machine.gpus_per_node))
    ):
        if is_used and not link.is_measured:
            links[i] = ASSUMED_LINKS
        elif is_used and is_extrapolated:
            links[i] = EXCHANGE_OF_MORE_DEVICES
    if fitted == 0:
        return LOCAL_BY_DATASHEET, *links
    return LOCAL_OF_MORE_DEVICES if is_extrapolated else FITTED, *links


def _slowed(machine: Machine, local: float, node: float, network: float) -> Machine:
    """Returns the machine with its times multiplied; what a reduction adds beside its messages is the node's."""
    return dataclasses.replace(
        machine,
        read_bytes_per_s=machine.read_bytes_per_s / local,
        local_us=machine.local_us * local,
        collective_us=machine.collective_us * node,
        node=_slowed_links(machine.node, node),
        network=_slowed_links(machine.network, network),
    )


def _slowed_links(links: LinkClass, factor: float) -> LinkClass:
    slowed = lambda line: AlphaBeta(alpha_us=line.alpha_us * factor, bytes_per_s=line.bytes_per_s / factor)
    costs = {
        name: ExchangeCost(round_us=cost.round_us * factor, lines=tuple(map(slowed, cost.lines)))
        for name, cost in links.costs.items()
    }
    return dataclasses.replace(links, costs=costs)
