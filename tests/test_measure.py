"""Timers, memory, provenance and the row file; and which devices a command gets."""

import json
import os
import subprocess
import sys
import textwrap
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from tree_attn import devices, hlo, measure


def test_latency_is_that_of_the_work_and_excludes_compiling():
    def slow(x):
        return jax.pure_callback(lambda y: (time.sleep(0.02), np.asarray(y))[1], jax.typeof(x), x)

    timing = measure.latency_us(slow, jnp.ones(3), n_iters=5, warmup=1)
    assert 20_000 <= timing.p10_us <= timing.median_us <= timing.p90_us < 200_000
    assert (timing.n_iters, timing.chain) == (5, 1)
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


def test_chain_feeds_each_call_with_the_last_output():
    chained = measure.chain_calls(lambda query, key: query * key, 5)
    assert float(chained(jnp.float32(3), jnp.float32(2))) == 3 * 2**5


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


@pytest.mark.parametrize("options", [{"n_iters": 0}, {"warmup": -1}, {"chain": 0}, {"chain": 1.5}])
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


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((None, 2, 0), "coordinator_address must be given too"),
        (("localhost:1", None, 0), "num_processes must be given too"),
        (("localhost:1", 2, None), "process_id must be given too"),
        (("localhost:1", 2, 2), r"process_id must lie in 0 .. num_processes - 1 = 1, got 2"),
        (("localhost:1", 2, 0, None, 7), "n_devices must be a multiple of num_processes=2, got 7"),
    ],
)
def test_start_distributed_refuses_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        devices.start_distributed(*arguments)


def test_start_distributed_without_arguments_is_one_process():
    devices.start_distributed(None, None, None)
    assert jax.process_count() == 1
