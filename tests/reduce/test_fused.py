"""The fused reduction where there is no GPU: its refusals, the groups of devices, and its program."""

import itertools
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from tree_attn import SoftmaxState, make_mesh, tree_decode
from tree_attn.kernels import launch_order, lean_call, lean_layout
from tree_attn.kernels.epilogue import PARTIALS_AT_ONCE
from tree_attn.kernels.exchange_words import PARTIAL_WORDS, Buffers
from tree_attn.kernels.schedule import lean_schedule
from tree_attn.reduce import fused, peer_memory, reduce_state
from tree_attn.reduce.fused import MAX_ELEMENTS, OLDEST_JAX

COLLECTIVE = r"stablehlo\.(?:all_|reduce_scatter|collective_)"
WHEELS = os.environ.get("TREE_ATTN_TEST_CUDA_WHEELS")
needs_new_jax = pytest.mark.skipif(jax.__version_info__ < OLDEST_JAX, reason="runs with JAX 0.11 or newer")


def state(rows=3, head_dim=8, dtype=jnp.float32):
    return SoftmaxState(jnp.ones((1, 1, rows, head_dim), dtype), jnp.zeros((1, 1, rows), jnp.float32))


def traced(mesh, axes, reduction, state, check_vma=False):
    """The program in which every device has `state`."""
    on_device = lambda state: reduce_state(state, axes, reduction, mesh)
    program = jax.shard_map(on_device, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=check_vma)
    return jax.jit(program).trace(state)


@needs_new_jax
def test_without_gpus_it_is_refused_by_name():
    with pytest.raises(NotImplementedError, match=r"fused needs NVIDIA GPUs, got 'cpu' devices"):
        traced(make_mesh({"seq": 2}), ("seq",), "fused", state())


@needs_new_jax
def test_tree_decode_refuses_it_before_anything_is_compiled():
    arrays = [jnp.ones((1, 1, 2, 8)), jnp.ones((1, 8, 2, 8)), jnp.ones((1, 8, 2, 8))]
    with pytest.raises(NotImplementedError, match="fused needs NVIDIA GPUs"):
        tree_decode(*arrays, axis_name="seq", mesh=make_mesh({"seq": 2}), reduction="fused")


@needs_new_jax
def test_a_state_that_is_too_large_is_refused():
    with pytest.raises(NotImplementedError, match=f"up to {MAX_ELEMENTS} elements, got"):
        traced(make_mesh({"seq": 2}), ("seq",), "fused", state(rows=MAX_ELEMENTS // 8))


@pytest.mark.parametrize(
    "modes, in_order", [((), True), (("LHS",), True), (("CONCURRENT",), False), (("CONCURRENT", "SERIALIZE"), True)]
)
def test_kernels_run_in_order_unless_xla_is_told_otherwise(modes, in_order, monkeypatch):
    flags = [f"--xla_gpu_command_buffer_scheduling_mode={mode}" for mode in modes]
    monkeypatch.setenv("XLA_FLAGS", " ".join(["--xla_gpu_autotune_level=0", *flags]))
    assert launch_order.runs_kernels_in_order() == in_order


@pytest.mark.skipif(jax.__version_info__ < OLDEST_JAX, reason="runs with JAX 0.11 or newer")
def test_kernels_that_run_at_once_are_refused(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT")
    with pytest.raises(NotImplementedError, match="fused needs kernels to run in order"):
        traced(make_mesh({"seq": 2}), ("seq",), "fused", state())


@pytest.mark.skipif(jax.__version_info__ >= OLDEST_JAX, reason="runs with JAX before 0.11")
def test_an_old_jax_is_refused():
    with pytest.raises(NotImplementedError, match=r"JAX 0\.11 and newer"):
        traced(make_mesh({"seq": 2}), ("seq",), "fused", state())


@pytest.mark.parametrize(
    "axes, expected",
    [
        (("device",), [(0, 1, 2), (3, 4, 5)]),
        (("node",), [(0, 3), (1, 4), (2, 5)]),
        (("device", "node"), [(0, 3, 1, 4, 2, 5)]),  # the first axis varies slowest in the index over both
        (("node", "device"), [(0, 1, 2, 3, 4, 5)]),
    ],
)
def test_who_meets_whom(axes, expected):
    mesh = make_mesh({"device": 3, "node": 2})
    groups = fused._groups(axes, mesh)
    assert [tuple(device.id for device in group) for group in groups] == expected
    index = jax.shard_map(
        lambda: jax.lax.axis_index(axes)[None], mesh=mesh, in_specs=(), out_specs=P(mesh.axis_names), check_vma=False
    )()
    for group in groups:
        for rank, device in enumerate(group):
            place = list(mesh.devices.ravel()).index(device)
            assert index[place] == rank


def test_devices_that_it_cannot_know_are_asked_for():
    """Within a caller's own `shard_map` over a part of the devices, no mesh says which."""
    with pytest.raises(NotImplementedError, match="fused needs mesh"):
        traced_in_shard_map = jax.shard_map(
            lambda: fused._groups(("seq",), None) and jnp.zeros(1), mesh=make_mesh({"seq": 2}), in_specs=(),
            out_specs=P("seq"), check_vma=False,
        )  # fmt: skip
        jax.jit(traced_in_shard_map).trace()


@pytest.fixture
def anywhere(monkeypatch):
    """Gives an address that nothing is at; the programs are not run."""
    monkeypatch.setattr(peer_memory, "peer_memory", lambda groups, num_bytes: 0x5D00_0000_0000)
    monkeypatch.setattr(peer_memory, "check_platform", lambda devices: None)


@needs_new_jax
@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("axes, reduction", [(("device",), "fused"), (("device", "node"), ("fused", "fused"))])
def test_its_program_has_a_kernel_and_no_collective(axes, reduction, dtype):
    mesh = make_mesh(dict(zip(axes, (4, 2))))
    text = traced(mesh, axes, reduction, state(dtype=dtype)).lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"custom_call @mosaic_gpu", text)) == len(axes)
    assert not re.search(COLLECTIVE, text)


@needs_new_jax
@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("axes", [("device",), ("node", "device")])
def test_in_a_checked_shard_map_its_result_varies_over_the_other_axes_only(axes):
    """`state` varies over all axes; the kernel's result is typed as the same along those that it merges."""
    mesh, spec = make_mesh({"device": 2, "node": 2, "data": 2}), P(("data", "node", "device"))
    varying = []

    def on_device(part):
        merged = reduce_state(SoftmaxState(part, part[..., 0]), axes, "fused", mesh)
        varying.append([jax.typeof(x).mat.varying for x in merged])
        return merged.out

    jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=spec, out_specs=spec)).trace(jnp.ones((8, 1, 2, 4)))
    assert varying == [2 * [frozenset(mesh.axis_names) - frozenset(axes)]]
    traced(mesh, axes, "fused", state(), check_vma=True)  # its result needs no axis in out_specs


@needs_new_jax
@pytest.mark.usefixtures("anywhere")
def test_between_nodes_it_leaves_the_link_to_another():
    mesh, axes = make_mesh({"device": 4, "node": 2}), ("device", "node")
    text = traced(mesh, axes, ("fused", "gather"), state()).lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"custom_call @mosaic_gpu", text)) == len(re.findall(COLLECTIVE, text)) == 1


@pytest.mark.skipif(
    WHEELS is None, reason="runs with TREE_ATTN_TEST_CUDA_WHEELS=DIR, see tests/kernels/test_lean_compiled.py"
)
def test_compiled_for_four_gpus_it_spills_no_register_and_calls_no_nccl():
    script = pathlib.Path(__file__).parents[1] / "kernels" / "compile_fused.py"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([WHEELS, *sys.path])}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stdout)
    assert spills and {int(x) for pair in spills for x in pair} == {0}
    programs, registers = parsed(done.stdout)
    # States, sums and gathers of two dtypes; steps by the lean kernel; decoding steps of two layers.
    of_reductions, of_steps, of_wide_steps, of_llamas = programs[:6], programs[6:14], programs[14:16], programs[16:]
    assert of_reductions == [{"collectives": 0, "kernels": 1}] * 6
    assert of_steps == [{"collectives": 0, "kernels": 1}] * 8, "attention, the merge of its parts, and the exchange"
    assert max(max(used) for used in registers[6:10]) <= 128, "two CTAs share an SM"
    assert of_wide_steps == [{"collectives": 0, "kernels": 3}] * 2
    # The embedding; new heads, attention, output, MLP. With products by the kernel, which ends in the sums, there are
    # those of new heads, of gate and up, and the head's. Chained, a layer is attention and one more; the first has new
    # heads and their gather before.
    kernels = [1 + 2 * 4, 1 + 2 * 6 + 1, 1 + 2 + 2 * 2 + 1]
    assert of_llamas == [{"collectives": 0, "kernels": number} for number in kernels]
    (found,) = (json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"put_back"'))
    assert found["put_back"] == 0, "a new token is scattered: nothing is read, chosen and put back"
    # Four layers more of a prefill hold little more, for a layer's keys and values are written before the next begins.
    assert 2 * found["growth"] < found["growth_where_writes_are_put_off"]


@pytest.mark.parametrize("lengths", [None, (4096, 1000, 0, 77)])
def test_output_tiles_have_the_partials_of_the_schedule(lengths):
    shape = lean_layout.LeanShape(
        batch=4, num_kv_heads=3, col_blocks=1, cols=8, head_dim=64, scale=1.0, logits_soft_cap=None, mask="span",
        num_slots=4096, static_kv_tiles=64 if lengths is None else None, dtype=jnp.bfloat16, key_dtype=jnp.bfloat16,
    )  # fmt: skip
    config = lean_layout.LeanConfig(block_kv=64, num_ctas=132)
    tables, tiles = {}, [64] * 4
    if lengths is not None:
        starts, ends = jnp.zeros((4, 1), jnp.int32), jnp.asarray(lengths, jnp.int32)[:, None]
        tables["sequences"], _ = lean_call.schedule_tables(starts, ends, shape, config)
        tiles = [max(1, -(-length // 64)) for length in lengths]
    by_output_tile = [[] for _ in range(12)]
    for lane in range(3):  # a head each, one after another
        for segment in itertools.chain(*lean_schedule(tiles, 132 // 3)):
            by_output_tile[3 * segment.output_tile + lane].append(segment.partial + lane * (132 // 3 + 4))
    spans = lean_layout.partial_spans(shape, config, tables)
    assert [list(range(*span)) for span in spans.tolist()] == by_output_tile


def test_what_cannot_end_the_attention_s_kernel():
    exchange = fused.Exchange(None, Buffers(table=0, num_ranks=2, capacity=MAX_ELEMENTS))
    result = lambda output_tiles, columns: jax.ShapeDtypeStruct((output_tiles, columns, 128), jnp.bfloat16)
    can = lambda output_tiles=16, columns=1, ctas=132, partials=148: (
        exchange.epilogue(result(output_tiles, columns), ctas, partials, 128) is not None
    )
    assert can() and can(ctas=64) and can(ctas=1024)
    assert not can(ctas=63) and not can(ctas=1025)
    max_tiles = MAX_ELEMENTS // 129  # a buffer slot's
    assert can(output_tiles=max_tiles) and not can(output_tiles=max_tiles + 1)
    max_partials = PARTIAL_WORDS // (130 * 16) - PARTIALS_AT_ONCE
    assert can(columns=16, partials=max_partials) and not can(columns=16, partials=max_partials + 1)


def test_a_buffer_has_room_for_all_its_areas():
    buffers = Buffers(table=0, num_ranks=8, capacity=1000)
    assert buffers.steps_offset == 2 * 8 * 1000 * 8
    assert buffers.partials_offset == buffers.steps_offset + 1024 * 4
    assert buffers.num_bytes == buffers.partials_offset + PARTIAL_WORDS * 8


def parsed(output: str) -> tuple[list[dict], list[list[int]]]:
    """Returns what the script printed of each program, and ptxas of its kernels' registers."""
    programs, registers = [], [[]]
    for line in output.splitlines():
        if used := re.search(r"Used (\d+) registers", line):
            registers[-1].append(int(used[1]))
        elif line.startswith('{"collectives"'):
            programs.append(json.loads(line))
            registers.append([])
    return programs, registers[:-1]
