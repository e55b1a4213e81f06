"""The fused exchange's protocol, in every order in which its stores and reads can happen."""

import pytest
from exchange_model import Protocol, failures


@pytest.mark.parametrize(
    "protocol",
    [Protocol(devices=2, steps=5), Protocol(devices=2, steps=4, words=2), Protocol(devices=3, steps=3)],
    ids=str,
)
def test_every_read_gets_its_step_and_no_device_waits_for_ever(protocol):
    assert not list(failures(protocol))


@pytest.mark.parametrize(
    "broken, found",
    [
        (Protocol(devices=2, steps=3, slots=1), "standstill"),  # a fast device overwrites what a slow one has not read
        (Protocol(devices=2, steps=3, is_whole=False), "read payload"),  # a number that does not vouch for its payload
    ],
    ids=str,
)
def test_the_model_finds_what_would_be_wrong(broken, found):
    assert any(found in failure for failure in failures(broken))
