"""Timers: a call is timed without the cost of compiling and of its program."""

import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from tree_attn.measure import hlo
from tree_attn.measure.latency import _split, chain_calls, latency_us, time_in_turn


def test_latency_is_that_of_the_work_and_excludes_compiling():
    def slow(x):
        return jax.pure_callback(lambda y: (time.sleep(0.02), np.asarray(y))[1], jax.typeof(x), x)

    timing = latency_us(slow, jnp.ones(3), n_iters=5, warmup=1)
    assert 20_000 <= timing.p10_us <= timing.median_us <= timing.p90_us < 200_000
    assert (timing.n_iters, timing.chain, timing.long_chain, timing.program_us) == (5, 1, None, None)
    assert timing.compile_s > 0
    assert "launch included" in timing.method


def test_latency_of_a_chain_is_per_call():
    def slow(x):
        return jax.pure_callback(lambda y: (time.sleep(0.01), np.asarray(y))[1], jax.typeof(x), x)

    samples = []
    timing = latency_us(slow, jnp.ones(3), n_iters=3, warmup=1, chain=5, on_sample=lambda: samples.append(1))
    assert 10_000 <= timing.median_us < 40_000
    assert len(samples) == 4
    assert "chain of 5" in timing.method


def test_two_chains_tell_calls_from_what_a_program_costs(monkeypatch):
    def slow(x):
        return jax.pure_callback(lambda y: (time.sleep(0.01), np.asarray(y))[1], jax.typeof(x), x)

    wait = jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda x: (wait(x), time.sleep(0.1))[0])
    samples, programs = [], []
    timing = latency_us(
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
    call_us, program_us = _split(np.array([[340.0, 1300.0], [345.0, 1305.0], [440.0, 1280.0]]), (32, 128))
    assert call_us.tolist() == [10.0, 10.0, 8.75]
    assert program_us == 25.0  # the median of 20, 25 and 160


def test_two_programs_are_timed_in_turn():
    runs = []
    short = lambda: (runs.append("short"), time.sleep(0.005))
    long = lambda: (runs.append("long"), time.sleep(0.045))
    timing = time_in_turn(short, long, chain=2, long_chain=6, n_iters=4, warmup=1)
    assert runs == ["short", "long"] * 5
    assert 5_000 < timing.p10_us <= timing.median_us <= timing.p90_us < 40_000  # 10 ms a call
    assert (timing.n_iters, timing.chain, timing.long_chain) == (4, 2, 6)
    assert timing.method.endswith("divided by 4")
    two = time_in_turn(short, long, chain=2, long_chain=6, in_flight=2, n_iters=3, warmup=1)
    assert 2_500 < two.median_us < 20_000 and two.method.endswith("2 of each dispatched before the host waits")
    with pytest.raises(RuntimeError, match="6 calls took no longer than 2"):
        time_in_turn(long, short, chain=2, long_chain=6, n_iters=3)


def test_a_difference_that_noise_hides_is_an_error(monkeypatch):
    wait, sleeps = jax.block_until_ready, itertools.cycle([0.1, 0.0])
    monkeypatch.setattr(jax, "block_until_ready", lambda x: (wait(x), time.sleep(next(sleeps)))[0])
    with pytest.raises(RuntimeError, match="8 calls took no longer than 2: noise hides what a call takes"):
        latency_us(lambda x: x + 1, jnp.ones(3), n_iters=3, warmup=1, chain=2, long_chain=8)


def test_chain_feeds_each_call_with_the_last_output():
    chained = chain_calls(lambda query, key: query * key, 5)
    assert float(chained(jnp.float32(3), jnp.float32(2))) == 3 * 2**5


def test_chain_carries_several_arrays_in_their_dtypes():
    chained = chain_calls(lambda pair, x: (pair[1] * x, pair[0].astype(x.dtype) + x), 2)
    narrow, wide = chained((jnp.bfloat16(1), jnp.float32(2)), jnp.float32(3))
    assert (float(narrow), float(wide)) == (12, 9)
    assert (narrow.dtype, wide.dtype) == (jnp.bfloat16, jnp.float32)


def test_chain_repeats_transfers_that_do_not_depend_on_the_query():
    """A chained ring is honest: K and V go round once per call, not once per program."""
    mesh = Mesh(np.array(jax.devices()), ("d",))

    def ring(query, key):
        def on_shard(query, key):
            return query * jax.lax.ppermute(key, "d", [(i, (i + 1) % 8) for i in range(8)]).sum()

        specs = dict(in_specs=(PartitionSpec(), PartitionSpec("d")), out_specs=PartitionSpec())
        return jax.shard_map(on_shard, mesh=mesh, check_vma=False, **specs)(query, key)

    compiled = jax.jit(chain_calls(ring, 6)).lower(jnp.ones(4), jnp.ones((8, 16))).compile()
    assert hlo.counts(compiled.as_text()) == {"collective-permute": 6}


@pytest.mark.parametrize(
    "options", [{"n_iters": 0}, {"warmup": -1}, {"chain": 0}, {"chain": 1.5}, {"chain": 4, "long_chain": 4}]
)
def test_timer_refuses_bad_counts(options):
    with pytest.raises(ValueError, match="at least"):
        latency_us(lambda x: x, jnp.ones(3), **options)
