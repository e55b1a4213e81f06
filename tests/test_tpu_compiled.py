"""Decoding steps compiled ahead of time for TPU v5e, v6e and v7: what they send, hold and read.

No TPU is needed, and none has run them. docs/log/tpu.md has the compiler's numbers; run as a program it prints them:

    PYTHONPATH=. TREE_ATTN_TEST_LIBTPU=DIR python3 tests/test_tpu_compiled.py
"""

import functools
import json
import os
import pathlib
import subprocess
import sys
from collections import Counter

import pytest

from tree_attn.cost import predict
from tree_attn.cost.step import DecodeStep

LIBTPU = os.environ.get("TREE_ATTN_TEST_LIBTPU")
TOPOLOGIES = {"v5e:2x4": ("TPU v5 lite", 8), "v6e:2x2": ("TPU v6 lite", 4), "tpu7x:2x2x1": ("TPU7x", 8)}
KEYS_PER_DEVICE, NUM_HEADS, HEAD_DIM = 65_536, 32, 128
NUM_LAYERS, HIDDEN_SIZE = 2, 4096
LOGITS_BYTES = 4 * NUM_HEADS * KEYS_PER_DEVICE  # float32, of one shard
STRATEGIES = {
    "gather": ("tree", "gather"),
    "allreduce": ("tree", "allreduce"),
    "overlapped": ("ring_overlapped", None),
    "public": ("ring_public", None),
}

pytestmark = pytest.mark.skipif(
    LIBTPU is None,
    reason="runs with TREE_ATTN_TEST_LIBTPU=DIR, where pip install --no-deps --target DIR has put the libtpu that "
    "jax[tpu] of this JAX's version names",
)


@functools.cache
def programs(topology: str) -> dict[str, dict]:
    """Returns what the compiler says of each program, by its name."""
    script = pathlib.Path(__file__).with_name("compile_tpu.py")
    done = subprocess.run(
        [sys.executable, str(script), topology],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([LIBTPU, *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,  # it takes 20 seconds of a core that it has for itself
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}


def make_step(topology: str) -> DecodeStep:
    num_devices = TOPOLOGIES[topology][1]
    sizes = dict(batch=1, num_heads=NUM_HEADS, num_kv_heads=8, head_dim=HEAD_DIM, dtype="bfloat16")
    return DecodeStep(num_keys=KEYS_PER_DEVICE * num_devices, n_devices=num_devices, **sizes)


def held_bytes(row: dict) -> int:
    return row["argument_bytes"] + row["temp_bytes"]


def bytes_sent(row: dict) -> float:
    return sum(sent * count for _, _, sent, count in row["sent"])


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_devices_are_those_that_were_asked_for(topology):
    found = programs(topology)["devices"]
    assert (found["kind"], found["count"]) == TOPOLOGIES[topology]


@pytest.mark.parametrize("topology, links, in_order", [("v5e:2x4", 12, 14), ("v6e:2x2", 4, 6), ("tpu7x:2x2x1", 4, 6)])
def test_a_ring_over_make_mesh_crosses_fewer_links_than_in_order(topology, links, in_order):
    found = programs(topology)["devices"]
    assert (found["links"], found["links_in_order"]) == (links, in_order)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_attention_runs_the_collectives_of_the_equations(topology, name):
    """Equations 10 and 14, and a packed gather: as often, and to the byte, as on every other platform."""
    step, row = make_step(topology), programs(topology)[name]
    counts = Counter()
    for opcode, _, _, count in row["sent"]:
        counts[opcode] += count
    expected = {
        "gather": {"all-gather": 1},
        "allreduce": {"all-reduce": 3},
        "overlapped": {"collective-permute": 2 * (step.n_devices - 1)},
        "public": {"collective-permute": 2 * step.n_devices},
    }
    assert counts == expected[name]
    assert bytes_sent(row) == pytest.approx(predict.bytes_sent_per_device(step, *STRATEGIES[name]))


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_attention_holds_what_the_equations_say(topology):
    """Equation 9 within 1 %; three shards in a ring that overlaps, three and a half in the public one."""
    step, found = make_step(topology), programs(topology)
    for name in ("gather", "allreduce", "overlapped"):
        expected = predict.program_memory_bytes(step, STRATEGIES[name][0])
        assert held_bytes(found[name]) == pytest.approx(expected, rel=0.01), name
    extra = held_bytes(found["public"]) - predict.program_memory_bytes(step, "ring_public")
    assert extra == pytest.approx(step.key_value_bytes_per_device / 2, rel=0.01)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_ring_attends_while_it_transfers(topology):
    """The schedule reads keys and values between the begin and the end of every transfer."""
    step = make_step(topology)
    assert programs(topology)["overlapped"]["reads_beside"] == [2] * 2 * (step.n_devices - 1)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_attention_reads_keys_and_values_once(topology):
    """The compiler's count within 2 %: keys and values once, and the logits thrice, which are written and read twice.

    It counts a transfer four times: as an operand and as a result of its start and of its end. Loops it counts as if
    they ran once, so the public ring is left out.
    """
    step, found = make_step(topology), programs(topology)
    once = step.key_value_bytes_per_device + 3 * LOGITS_BYTES
    for name, expected in {
        "gather": once,
        "allreduce": once,
        "overlapped": step.n_devices * once + 4 * bytes_sent(found["overlapped"]),
    }.items():
        assert found[name]["accessed_bytes"] == pytest.approx(expected, rel=0.02), name


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_llama_step_runs_the_collectives_of_its_sharding(topology):
    """A layer gathers its new query, key and value, then its states, and sums twice; the embedding is summed once.

    Beside these there are three numbers of each device, by which the next token is chosen.
    """
    num_devices = TOPOLOGIES[topology][1]
    large = Counter()
    for opcode, payload, _, count in programs(topology)["llama"]["sent"]:
        if payload > 3 * 4 * num_devices:
            large[opcode, payload] += count
    states = num_devices * 4 * NUM_HEADS * (HEAD_DIM + 1)
    assert large == {
        ("all-reduce", 2 * HIDDEN_SIZE): 1,
        ("all-gather", 2 * (NUM_HEADS + 2 * 8) * HEAD_DIM): NUM_LAYERS,
        ("all-gather", states): NUM_LAYERS,
        ("all-reduce", 4 * HIDDEN_SIZE): 2 * NUM_LAYERS,
    }


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_llama_step_writes_its_cache_in_place_and_copies_none_of_it(topology):
    row = programs(topology)["llama"]
    assert row["argument_bytes"] == pytest.approx(row["weights"] + row["cache"], rel=1e-4)
    assert row["alias_bytes"] == pytest.approx(row["cache"], rel=1e-4)
    assert row["temp_bytes"] < 0.03 * row["cache"]
    # The compiler counts an array that is written in place as if all of it were written.
    each_once = row["weights"] + row["cache"]
    assert each_once <= row["accessed_bytes"] <= 2.2 * each_once


def main() -> None:
    """Prints the table of docs/log/tpu.md."""
    print("| topology | program | sent per device | held | read and written |\n|" + "---|" * 5)
    for topology in TOPOLOGIES:
        shards = make_step(topology).key_value_bytes_per_device / 2
        for name, row in programs(topology).items():
            if "sent" in row:
                memory = f"{held_bytes(row) / 1e6:.0f} MB"
                memory += f" = {held_bytes(row) / shards:.2f} btd" if name in STRATEGIES else ""
                accessed = f"{row['accessed_bytes'] / 1e6:,.0f} MB"
                print(f"| {topology} | {name} | {bytes_sent(row):,.0f} B | {memory} | {accessed} |")


if __name__ == "__main__":
    main()
