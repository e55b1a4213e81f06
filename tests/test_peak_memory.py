"""Compiled peak memory of tree and ring decoding against equations 9 and 8: the paper's Figure 4, without running it.

These are arguments and temporaries of one device, float32, from XLA's buffer assignment. docs/peak_memory.md explains
where a ring needs more than equation 8, and has the same numbers.
"""

import functools

import jax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tree_attn import make_mesh, tree_decode
from tree_attn.cost import equations
from tree_attn.measure.latency import chain_calls
from tree_attn.measure.memory import compiled_memory
from tree_attn.ring_baseline import ring_decode

TOLERANCE = 0.10
HEAD_DIM = 128
# (hidden size, keys over all devices), sweeps of either, as in Figure 4. Shards are long enough for the tolerance: the
# local kernel on CPU copies 512 keys and values at a time.
SWEEP = [(512, 98_304), (1024, 98_304), (2048, 98_304), (4096, 98_304), (2048, 196_608), (2048, 393_216)]


@functools.lru_cache
def peak_bytes(strategy: str, hidden_size: int, num_keys: int, n_devices: int) -> int:
    """Returns the bytes of arguments and temporaries of one device."""
    mesh = make_mesh({"device": n_devices})
    options = dict(axis_name="device", mesh=mesh, implementation="xla")
    if strategy.startswith("ring"):
        decode = functools.partial(ring_decode, variant=strategy.removeprefix("ring_"), **options)
    else:
        decode = functools.partial(tree_decode, reduction=strategy, **options)
    heads = (hidden_size // HEAD_DIM, HEAD_DIM)
    query = jax.ShapeDtypeStruct((1, 1, *heads), "float32", sharding=NamedSharding(mesh, P()))
    key = jax.ShapeDtypeStruct((1, num_keys, *heads), "float32", sharding=NamedSharding(mesh, P(None, "device")))
    memory = compiled_memory(jax.jit(decode).lower(query, key, key).compile())
    return memory.argument_bytes + memory.temp_bytes


def shard_bytes(hidden_size: int, num_keys: int, n_devices: int) -> int:
    """Returns `b t d` in bytes: the keys (or the values) of one device."""
    return 4 * num_keys // n_devices * hidden_size


@pytest.mark.parametrize("reduction", ["allreduce", "gather"])
@pytest.mark.parametrize("hidden_size, num_keys", SWEEP)
def test_tree_follows_equation_9(hidden_size, num_keys, reduction):
    equation_9 = 4 * equations.tree_memory_elements(b=1, t=num_keys // 8, d=hidden_size, n_h=hidden_size // HEAD_DIM)
    assert peak_bytes(reduction, hidden_size, num_keys, 8) == pytest.approx(equation_9, rel=TOLERANCE)


@pytest.mark.parametrize("hidden_size, num_keys", [(512, 24_576), (2048, 24_576), (2048, 98_304)])
def test_ring_on_two_devices_follows_equation_8(hidden_size, num_keys):
    equation_8 = 4 * equations.ring_memory_elements(b=1, t=num_keys // 2, d=hidden_size)
    assert peak_bytes("ring_overlapped", hidden_size, num_keys, 2) == pytest.approx(equation_8, rel=TOLERANCE)


@pytest.mark.parametrize("strategy, n_devices", [("ring_overlapped", 3), ("ring_public", 3), ("ring_public", 8)])
def test_ring_on_more_devices_adds_the_cache_it_may_not_overwrite(strategy, n_devices):
    """Equation 8 counts the shard in use and the one arriving.

    After the first hop neither is the device's own, and the next step needs that one too: 2 b t d more.
    """
    hidden_size, num_keys = 2048, 12_288 * n_devices
    equation_8 = 4 * equations.ring_memory_elements(b=1, t=num_keys // n_devices, d=hidden_size)
    own_cache = 2 * shard_bytes(hidden_size, num_keys, n_devices)
    assert peak_bytes(strategy, hidden_size, num_keys, n_devices) == pytest.approx(
        equation_8 + own_cache, rel=TOLERANCE
    )


@pytest.mark.parametrize("hidden_size, num_keys", SWEEP)
def test_overlapped_ring_on_eight_devices(hidden_size, num_keys):
    """The ring needs one buffer more than that where XLA keeps our barriers.

    JAX 0.10's CPU compiler drops them before it schedules. Four hops then run ahead of the attention, and need eight
    buffers beside the cache.
    """
    buffers = 7 if jax.__version_info__ >= (0, 11) else 10
    allowed = buffers * shard_bytes(hidden_size, num_keys, 8)
    held_by_any_ring = 6 * shard_bytes(hidden_size, num_keys, 8)
    assert held_by_any_ring <= peak_bytes("ring_overlapped", hidden_size, num_keys, 8) <= (1 + TOLERANCE) * allowed


@pytest.mark.parametrize("n_devices, ratio", [(2, 2), (3, 3)])
def test_ring_needs_a_multiple_of_the_memory_of_tree(n_devices, ratio):
    """The paper's claim is twice, measured on two devices; from three on it is three times."""
    tree, ring = (peak_bytes(name, 2048, 32_768 * n_devices, n_devices) for name in ("gather", "ring_overlapped"))
    assert ring / tree == pytest.approx(ratio, rel=TOLERANCE)


def test_gap_doubles_with_hidden_size_and_with_length():
    """Figure 4's observation, on two devices: 524 MB at hidden size 2048 becomes 1040 MB at 4096."""
    gap = lambda *size: peak_bytes("ring_overlapped", *size, 2) - peak_bytes("allreduce", *size, 2)
    assert gap(2048, 32_768) / gap(1024, 32_768) == pytest.approx(2, rel=TOLERANCE)
    assert gap(1024, 65_536) / gap(1024, 32_768) == pytest.approx(2, rel=TOLERANCE)


def test_timing_in_a_chain_adds_no_memory():
    """Latency is taken from a chain of steps in one loop, which must not copy K and V into its carry."""
    mesh = make_mesh({"device": 8})
    decode = functools.partial(tree_decode, axis_name="device", mesh=mesh, reduction="gather", implementation="xla")
    query = jax.ShapeDtypeStruct((1, 1, 4, HEAD_DIM), "float32", sharding=NamedSharding(mesh, P()))
    key = jax.ShapeDtypeStruct((1, 98_304, 4, HEAD_DIM), "float32", sharding=NamedSharding(mesh, P(None, "device")))
    lowered = jax.jit(chain_calls(decode, 8)).lower(query, key, key)
    chained = compiled_memory(lowered.compile())
    once = peak_bytes("gather", 512, 98_304, 8)
    assert chained.argument_bytes + chained.temp_bytes == pytest.approx(once, rel=0.01)


def main() -> None:
    """Prints the table of docs/peak_memory.md: `python3 tests/test_peak_memory.py`."""
    jax.config.update("jax_num_cpu_devices", 8)
    print("| devices | hidden size | keys | tree (gather) | ring overlapped | ring public |\n|" + "---|" * 6)
    for n_devices, (hidden_size, num_keys) in [(2, SWEEP[2]), (3, SWEEP[2]), *((8, size) for size in SWEEP)]:
        cells = []
        for strategy in ("gather", "ring_overlapped", "ring_public"):
            measured = peak_bytes(strategy, hidden_size, num_keys, n_devices)
            shards = measured / shard_bytes(hidden_size, num_keys, n_devices)
            cells.append(f"{measured / 1e6:.0f} MB = {shards:.2f} btd")
        print(f"| {n_devices} | {hidden_size} | {num_keys:,} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
