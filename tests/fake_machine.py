"""A fake machine for sums by hand: four GPUs a node, and every number different, so that no mix-up cancels."""

from tree_attn.cost.machine import AlphaBeta, ExchangeCost, LinkClass, Machine


def cost(alpha_us: float, round_us: float, bytes_per_s: float) -> ExchangeCost:
    return ExchangeCost(round_us=round_us, lines=(AlphaBeta(alpha_us=alpha_us, bytes_per_s=bytes_per_s),))


def make_machine(**changes) -> Machine:
    node = {"allreduce": cost(5, 1, 1e9), "gather": cost(7, 2, 2e9), "fused": cost(3, 0.5, 4e9)}
    network = {"allreduce": cost(11, 13, 1e8), "gather": cost(17, 19, 2e8), "neighbour": cost(23, 29, 3e8)}
    neighbour = ExchangeCost(
        round_us=1, lines=(AlphaBeta(alpha_us=1, bytes_per_s=1e9), AlphaBeta(alpha_us=501, bytes_per_s=2e9))
    )
    fields = dict(
        device_kind="fake",
        gpus_per_node=4,
        memory_bytes=10**9,
        read_bytes_per_s=1e12,
        local_us=10.0,
        collective_us=100.0,
        node=LinkClass(source="measured: by hand", costs=node | {"neighbour": neighbour}),
        network=LinkClass(source="measured: by hand too", costs=network),
    )
    return Machine(**(fields | changes))
