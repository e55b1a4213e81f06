"""Predictions of attention within prompts, against sums done by hand."""

import dataclasses

import pytest
from fake_machine import make_machine
from steps import make_step

from tree_attn.cost import datasheets, machine, prompt
from tree_attn.cost.prompt import exchange_bytes_sent, predict_prompt

TOKENS, HEADS, DIM = 131_072, 32, 128
QUERY, KEY_VALUE = TOKENS // 8 * HEADS * DIM * 2, 2 * TOKENS // 8 * 8 * DIM * 2  # bytes of one of eight devices
H200 = machine.load("NVIDIA H200")


def prompt_of(**changes):
    return make_step(**{"num_keys": TOKENS, "num_heads": HEADS, "num_kv_heads": 8} | changes)


def test_bytes_are_those_of_the_arrays_that_travel():
    step = prompt_of()
    for ring in ("ring", "ring_joint", "ring_two_way", "ring_zigzag"):
        assert exchange_bytes_sent(step, ring, (8,)) == (7 * KEY_VALUE,)
    assert exchange_bytes_sent(step, "ulysses", (8,)) == (7 / 8 * (2 * QUERY + KEY_VALUE),)
    both = (3 / 4 * (2 * QUERY + KEY_VALUE), KEY_VALUE)
    assert exchange_bytes_sent(step, "ulysses_ring", (4, 2)) == both
    copied = prompt_of(num_kv_heads=2)
    twice = 2 * KEY_VALUE / 4
    assert exchange_bytes_sent(copied, "ulysses_ring", (4, 2)) == (3 / 4 * (2 * QUERY + twice), twice)


def test_a_hop_takes_the_longer_of_transfer_and_attention():
    step = prompt_of()
    local_us = 2 * HEADS * DIM * TOKENS**2 / 8 / datasheets.rates("NVIDIA H200")["product_flops_per_s"] * 1e6
    transfer_us = H200.exchange_us("neighbour", KEY_VALUE, 8)
    found = predict_prompt(step, "ring", machine=H200, axis_sizes=(8,))
    assert found.local_us == pytest.approx(local_us + H200.local_us)
    assert found.exchanges_us == (pytest.approx(7 * max(transfer_us - local_us / 8, 0)),)
    short = predict_prompt(prompt_of(num_keys=8192), "ring", machine=H200, axis_sizes=(8,))
    assert short.exchanges_us[0] > 0
    sent = [7 / 8 * QUERY] * 2 + [7 / 8 * KEY_VALUE / 2] * 2
    expected = sum(H200.exchange_us("neighbour", one, 8) for one in sent)
    assert predict_prompt(step, "ulysses", machine=H200, axis_sizes=(8,)).exchanges_us == (pytest.approx(expected),)


def test_a_gradient_sends_keys_values_and_their_derivatives_which_go_home():
    of_gradient = lambda strategy, sizes: exchange_bytes_sent(prompt_of(), strategy, sizes, has_gradient=True)
    assert of_gradient("ring", (8,)) == (2 * 7 * KEY_VALUE + 8 * 2 * KEY_VALUE,)  # derivatives are float32
    assert of_gradient("ulysses", (8,)) == (2 * 7 / 8 * (2 * QUERY + KEY_VALUE),)
    assert of_gradient("ulysses_ring", (4, 2)) == (2 * 3 / 4 * (2 * QUERY + KEY_VALUE), 2 * KEY_VALUE + 4 * KEY_VALUE)
    forward, both = (
        predict_prompt(prompt_of(), "ring", machine=H200, axis_sizes=(8,), has_gradient=x) for x in (False, True)
    )
    assert both.local_us == pytest.approx(3.5 * (forward.local_us - H200.local_us) + 2 * H200.local_us)
    # Attention hides every hop, but not the last transfer of derivatives.
    assert both.exchanges_us == (pytest.approx(H200.exchange_us("neighbour", 2 * KEY_VALUE, 8)),)
    assert both.memory_bytes == forward.memory_bytes + 2 * QUERY + KEY_VALUE + 3 * 2 * KEY_VALUE


def test_both_ways_gain_on_a_torus_only():
    step = prompt_of(num_keys=8192)
    torus = dataclasses.replace(H200, device_kind="TPU v5p")
    time = lambda strategy, machine: predict_prompt(step, strategy, machine=machine, axis_sizes=(8,)).latency_us
    assert time("ring_two_way", torus) < time("ring", torus)
    assert time("ring_two_way", H200) >= time("ring", H200)


def test_one_device_sends_nothing_and_all_strategies_take_the_same():
    step = prompt_of(n_devices=1)
    found = [predict_prompt(step, name, machine=H200, axis_sizes=(1,)) for name in prompt.STRATEGIES[:-1]]
    assert {one.latency_us for one in found} == {found[0].latency_us} and found[0].bytes_sent == ()
    assert {one.memory_bytes for one in found} == {found[0].memory_bytes}


@pytest.mark.parametrize(
    "strategy, sizes, changes, message",
    [
        ("ulysses", (8,), {"num_heads": 12, "num_kv_heads": 12}, "8 devices of its first axis .*, got N=12 and K=12"),
        ("ulysses_ring", (8,), {}, r"two mesh axes of at least two devices each, got \(8,\)"),
        ("ring_two_way", (8,), {"num_kv_heads": 1}, "there is only 1"),
        ("ring_zigzag", (8,), {"num_keys": 8 * 1001}, "it needs a multiple of 16 tokens, two runs for each device"),
    ],
)
def test_what_cannot_run_is_said(strategy, sizes, changes, message):
    with pytest.raises(NotImplementedError, match=message):
        predict_prompt(prompt_of(**changes), strategy, machine=H200, axis_sizes=sizes)


def test_an_unknown_strategy_or_rate_of_products():
    with pytest.raises(ValueError, match=r"strategy must be one of 'ring', .*, got 'star'"):
        prompt.check_runs(prompt_of(), "star", (8,))
    with pytest.raises(NotImplementedError, match=r"the rate of products of a fake is unknown"):
        predict_prompt(prompt_of(), "ring", machine=make_machine(), axis_sizes=(8,))
