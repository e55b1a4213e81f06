"""Timers, memory, provenance and the row file; and which devices a command gets."""

import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import textwrap
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from tree_attn import devices
from tree_attn.measure import hlo
from tree_attn.measure import latency as measure


def test_latency_is_that_of_the_work_and_excludes_compiling():
    def slow(x):
        return jax.pure_callback(lambda y: (time.sleep(0.02), np.asarray(y))[1], jax.typeof(x), x)

    timing = measure.latency_us(slow, jnp.ones(3), n_iters=5, warmup=1)
    assert 20_000 <= timing.p10_us <= timing.median_us <= timing.p90_us < 200_000
    assert (timing.n_iters, timing.chain, timing.long_chain, timing.program_us) == (5, 1, None, None)
    assert timing.compile_s > 0
    assert "launch included" in timing.method


def test_latency_of_a_chain_is_per_call():
    def slow(x):
        return jax.pure_callback(lambda y: (time.sleep(0.01), np.asarray(y))[1], jax.typeof(x), x)

    samples = []
    timing = measure.latency_us(slow, jnp.ones(3), n_iters=3, warmup=1, chain=5, on_sample=lambda: samples.append(1))
    assert 10_000 <= timing.median_us < 40_000
    assert len(samples) == 4
    assert "chain of 5" in timing.method


def test_two_chains_tell_calls_from_what_a_program_costs(monkeypatch):
    def slow(x):
        return jax.pure_callback(lambda y: (time.sleep(0.01), np.asarray(y))[1], jax.typeof(x), x)

    wait = jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda x: (wait(x), time.sleep(0.1))[0])
    samples, programs = [], []
    timing = measure.latency_us(
        slow,
        jnp.ones(3),
        n_iters=3,
        warmup=1,
        chain=2,
        long_chain=6,
        on_sample=lambda: samples.append(1),
        on_compiled=lambda compiled, length: programs.append(length),
    )
    assert 5_000 < timing.median_us < 40_000
    assert timing.program_us > 80_000
    assert (timing.n_iters, timing.chain, timing.long_chain) == (3, 2, 6)
    assert (len(samples), programs) == (4, [2, 6])
    assert "chains of 2 and of 6 dependent calls" in timing.method and timing.method.endswith("divided by 4")


def test_a_pair_is_split_by_its_difference():
    call_us, program_us = measure._split(np.array([[340.0, 1300.0], [345.0, 1305.0], [440.0, 1280.0]]), (32, 128))
    assert call_us.tolist() == [10.0, 10.0, 8.75]
    assert program_us == 25.0  # the median of 20, 25 and 160


def test_a_difference_that_noise_hides_is_an_error(monkeypatch):
    wait, sleeps = jax.block_until_ready, itertools.cycle([0.1, 0.0])
    monkeypatch.setattr(jax, "block_until_ready", lambda x: (wait(x), time.sleep(next(sleeps)))[0])
    with pytest.raises(RuntimeError, match="8 calls took no longer than 2: noise hides what a call takes"):
        measure.latency_us(lambda x: x + 1, jnp.ones(3), n_iters=3, warmup=1, chain=2, long_chain=8)


def test_chain_feeds_each_call_with_the_last_output():
    chained = measure.chain_calls(lambda query, key: query * key, 5)
    assert float(chained(jnp.float32(3), jnp.float32(2))) == 3 * 2**5


def test_chain_carries_several_arrays_in_their_dtypes():
    chained = measure.chain_calls(lambda pair, x: (pair[1] * x, pair[0].astype(x.dtype) + x), 2)
    narrow, wide = chained((jnp.bfloat16(1), jnp.float32(2)), jnp.float32(3))
    assert (float(narrow), float(wide)) == (12, 9)
    assert (narrow.dtype, wide.dtype) == (jnp.bfloat16, jnp.float32)


def test_chain_repeats_transfers_that_do_not_depend_on_the_query():
    """What makes a chained ring honest: K and V go round once per call, not once per program."""
    mesh = Mesh(np.array(jax.devices()), ("d",))

    def ring(query, key):
        def on_shard(query, key):
            return query * jax.lax.ppermute(key, "d", [(i, (i + 1) % 8) for i in range(8)]).sum()

        specs = dict(in_specs=(PartitionSpec(), PartitionSpec("d")), out_specs=PartitionSpec())
        return jax.shard_map(on_shard, mesh=mesh, check_vma=False, **specs)(query, key)

    compiled = jax.jit(measure.chain_calls(ring, 6)).lower(jnp.ones(4), jnp.ones((8, 16))).compile()
    assert hlo.counts(compiled.as_text()) == {"collective-permute": 6}


@pytest.mark.parametrize(
    "options", [{"n_iters": 0}, {"warmup": -1}, {"chain": 0}, {"chain": 1.5}, {"chain": 4, "long_chain": 4}]
)
def test_timer_refuses_bad_counts(options):
    with pytest.raises(ValueError, match="at least"):
        measure.latency_us(lambda x: x, jnp.ones(3), **options)


def test_compiled_memory_counts_arguments_outputs_and_temporaries():
    compiled = jax.jit(lambda x: jnp.dot(jnp.dot(x, x), x)).lower(jnp.ones((64, 64))).compile()
    memory = measure.compiled_memory(compiled)
    assert memory.argument_bytes == 64 * 64 * 4
    assert memory.output_bytes == 64 * 64 * 4
    assert memory.temp_bytes >= 64 * 64 * 4
    assert memory.peak_bytes == memory.argument_bytes + memory.output_bytes + memory.temp_bytes


def test_donated_memory_counts_once():
    compiled = jax.jit(lambda x: x + 1, donate_argnums=0).lower(jnp.ones(1024)).compile()
    memory = measure.compiled_memory(compiled)
    assert memory.alias_bytes == 4096
    assert memory.peak_bytes == 4096 + memory.temp_bytes


def test_runtime_memory_is_unknown_on_cpu():
    assert measure.runtime_peak_memory_bytes(jax.devices("cpu")) is None


def test_hardware_names_emulated_devices_as_such():
    assert measure.hardware(jax.devices("cpu")[:3]).startswith("3 emulated CPU devices on ")


def test_git_commit_is_a_hash_or_none():
    commit = measure.git_commit()
    assert commit is None or len(commit.removesuffix("-dirty")) == 40


def test_versions_say_what_is_missing():
    found = measure.versions()
    assert found["jax"] == jax.__version__
    assert set(found) >= {"python", "jaxlib", "flash-attn-jax"}


def test_rows_come_back(tmp_path):
    writer = measure.JsonlWriter(tmp_path / "new" / "results.jsonl")
    writer.append({"a": 1, "b": None})
    writer.append({"a": 2})
    again = measure.JsonlWriter(writer.path)
    assert again.rows == writer.rows == [{"a": 1, "b": None}, {"a": 2}]


@pytest.mark.parametrize("torn", ['{"a": 3, "b"', '{"a": 3}'])
def test_torn_last_line_is_dropped_and_writing_goes_on(tmp_path, torn):
    path = tmp_path / "results.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n' + torn)
    writer = measure.JsonlWriter(path)
    writer.append({"a": 4})
    assert [json.loads(line)["a"] for line in path.read_text().splitlines()] == [1, 2, 4]


@pytest.mark.parametrize("line", ["nonsense", "[1]"])
def test_other_bad_lines_are_an_error_that_names_them(tmp_path, line):
    path = tmp_path / "results.jsonl"
    path.write_text(f'{{"a": 1}}\n{line}\n{{"a": 2}}\n')
    with pytest.raises(ValueError, match=r"results\.jsonl, line 2, is not"):
        measure.JsonlWriter(path)


def test_a_row_that_is_not_json_is_refused_before_the_file_is_touched(tmp_path):
    writer = measure.JsonlWriter(tmp_path / "results.jsonl")
    with pytest.raises(ValueError):
        writer.append({"a": float("nan")})
    assert not writer.path.exists()


@pytest.fixture
def small_disk():
    """A file system of 16 KiB."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a file system of 16 KiB")
    # Under a folder of its own, for pytest's would be removed with the disk still mounted if unmounting failed.
    folder = pathlib.Path(tempfile.mkdtemp())
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(folder)], check=True, timeout=30)
    yield folder
    subprocess.run(["umount", str(folder)], check=True, timeout=30)
    folder.rmdir()


def test_a_disk_that_fills_within_a_row_keeps_the_rows_before_it(small_disk):
    writer = measure.JsonlWriter(small_disk / "results.jsonl")
    row = {"text": "x" * 3000}
    with pytest.raises(OSError, match=r"No space left on device: row \d+ of .*results\.jsonl could not be written"):
        for _ in range(20):
            writer.append(row)
    assert 2 <= len(writer.rows) < 6
    content = writer.path.read_text()
    assert content.endswith("\n") and [json.loads(line) for line in content.splitlines()] == writer.rows
    writer.append({"fits": True})  # in what is left
    assert measure.JsonlWriter(writer.path).rows[-1] == {"fits": True}


def test_a_full_disk_leaves_a_row_that_was_to_be_replaced(small_disk):
    writer = measure.JsonlWriter(small_disk / "results.jsonl")
    writer.append({"old": "x" * 6000})
    with pytest.raises(OSError, match=r"results\.jsonl could not be written, and is as it was"):
        writer.replace(0, {"new": "x" * 12000})
    assert [path.name for path in small_disk.iterdir()] == ["results.jsonl"]
    assert measure.JsonlWriter(writer.path).rows == writer.rows == [{"old": "x" * 6000}]


def test_a_row_is_replaced_in_its_place(tmp_path):
    writer = measure.JsonlWriter(tmp_path / "results.jsonl")
    for i in range(3):
        writer.append({"a": i})
    writer.replace(1, {"a": "new"})
    writer.append({"a": 3})
    assert measure.JsonlWriter(writer.path).rows == writer.rows == [{"a": 0}, {"a": "new"}, {"a": 2}, {"a": 3}]


def test_a_second_writer_is_noticed_before_anything_is_written(tmp_path):
    first, second = (measure.JsonlWriter(tmp_path / "results.jsonl") for _ in range(2))
    first.append({"a": 1})
    with pytest.raises(RuntimeError, match=r"results\.jsonl has 9 bytes and not 0: another process writes to it"):
        second.append({"a": 1})
    assert measure.JsonlWriter(first.path).rows == [{"a": 1}]


def test_rows_of_another_sweep_are_refused_and_left_alone(tmp_path):
    path = tmp_path / "results.jsonl"
    sweep = {"seed": 0, "keys": (8, 16)}
    measure.JsonlWriter(path, sweep).append({"a": 1})
    assert measure.JsonlWriter(path, sweep).rows == [{"a": 1}]
    with pytest.raises(ValueError) as raised:
        measure.JsonlWriter(path, {"seed": 1, "keys": (8, 16), "batch": 2})
    assert f"{tmp_path} holds the results of another sweep: seed is 0 there and 1 here; batch is None there" in str(
        raised.value
    )
    assert measure.JsonlWriter(path, sweep).rows == [{"a": 1}]


def test_a_sweep_that_cannot_be_read_is_one_error(tmp_path):
    (tmp_path / "results.sweep.json").write_text("[1")
    with pytest.raises(ValueError, match=r"results\.sweep\.json should say which sweep lies here"):
        measure.JsonlWriter(tmp_path / "results.jsonl", {"seed": 0})


def test_enough_devices():
    assert devices.ensure_devices(3) == jax.devices()[:3]
    assert len(devices.ensure_devices(8)) == 8


def test_too_late_for_more_devices_says_how_to_get_them():
    with pytest.raises(ValueError, match=r"n_devices=9 .* already started with 8 CPU devices.*jax_num_cpu_devices', 9"):
        devices.ensure_devices(9)


@pytest.mark.parametrize("n_devices", [0, -2, 1.0, "8", True])
def test_bad_device_count(n_devices):
    with pytest.raises(ValueError, match="n_devices must be an integer of at least 1, got"):
        devices.ensure_devices(n_devices)


@pytest.mark.parametrize("flags, count, expected", [("", 5, 5), ("--xla_force_host_platform_device_count=6", 2, 6)])
def test_devices_are_emulated_in_a_fresh_process(flags, count, expected):
    code = f"""
        import jax
        from tree_attn import devices
        assert len(devices.ensure_devices({count})) == {count}
        assert len(jax.devices("cpu")) == {expected}
    """
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, env=environment, timeout=120)
