"""Meetings of devices and of CTAs, in every order in which their stores and reads can happen."""

import arrivals_model
import chain_exchange_model
import chain_model
import epilogue_model
import pytest
from epilogue_model import Meeting
from exchange_model import Protocol, failures

from tree_attn.kernels.exchange_words import exchanging_ctas


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


@pytest.mark.parametrize(
    "meeting",
    [
        Meeting(launches=(3, 1, 3, 2)),  # the kernels of other exchanges are smaller
        Meeting(launches=(3, 3), exchanging=2),
        Meeting(launches=(3, 2, 3), resident=2),
    ],
    ids=str,
)
def test_every_cta_knows_its_step_and_none_waits_for_ever(meeting):
    assert not list(epilogue_model.failures(meeting))


@pytest.mark.parametrize(
    "broken, found",
    [
        (Meeting(launches=(3, 1, 3), counting="own"), "step {2} in launch 2"),  # the small launch counted for itself
        (Meeting(launches=(3, 3), counting="first"), "step {2} in launch 0"),  # before all others had read theirs
        (Meeting(launches=(3,), resident=1), "standstill"),  # who waits keeps the others out
    ],
    ids=str,
)
def test_the_model_of_ctas_finds_what_would_be_wrong(broken, found):
    assert any(found in failure for failure in epilogue_model.failures(broken))


@pytest.mark.parametrize(
    "meeting",
    [
        arrivals_model.Meeting(launches=(3, 2, 3)),
        arrivals_model.Meeting(launches=(4, 1), resident=2),  # no CTA waits, so all need not fit at once
    ],
    ids=str,
)
def test_the_last_cta_alone_merges_and_finds_all_partial_states(meeting):
    assert not list(arrivals_model.failures(meeting))


@pytest.mark.parametrize(
    "broken, found",
    [
        (arrivals_model.Meeting(launches=(3,), fences=False), "read another launch's partial state in launch 0"),
        (arrivals_model.Meeting(launches=(2, 2), resets=False), "merged 0 times in launch 1"),
    ],
    ids=str,
)
def test_the_model_of_arrivals_finds_what_would_be_wrong(broken, found):
    assert any(found in failure for failure in arrivals_model.failures(broken))


@pytest.mark.parametrize(
    "chain",
    [
        chain_model.Chain(ctas=(2, 2, 2)),
        chain_model.Chain(ctas=(2, 1, 2), launches=3),  # a CTA without a part of a product comes all the same
        chain_model.Chain(ctas=(1, 3, 2)),
    ],
    ids=str,
)
def test_each_product_of_a_chain_reads_the_whole_result_before_it(chain):
    assert not list(chain_model.failures(chain))


@pytest.mark.parametrize(
    "broken, found",
    [
        (chain_model.Chain(ctas=(2, 2), fences=False), "read another launch's result of product 0 in launch 1"),
        (chain_model.Chain(ctas=(2, 2), waits=False), "read another launch's result of product 0 in launch 1"),
        (chain_model.Chain(ctas=(1, 2), reads_first=False), "all wait in launch 1"),
        (chain_model.Chain(ctas=(2, 2), resident=1), "all wait in launch 1"),
    ],
    ids=str,
)
def test_the_model_of_chains_finds_what_would_be_wrong(broken, found):
    assert any(found in failure for failure in chain_model.failures(broken))


@pytest.mark.parametrize("broadcasts", [False, True])
def test_devices_overwrite_no_word_of_a_chain_before_it_is_read(broadcasts):
    assert not list(chain_exchange_model.failures(chain_exchange_model.Exchanges(broadcasts=broadcasts)))


def test_ctas_of_one_device_overwrite_no_word_that_is_broadcast():
    exchanges = chain_exchange_model.Exchanges(devices=1, ctas=3, broadcasts=True)
    assert not list(chain_exchange_model.failures(exchanges))


@pytest.mark.parametrize("devices, ctas", [(1, 3), (2, 2)])
def test_ctas_that_attend_get_their_heads_before_others_overwrite_them(devices, ctas):
    exchanges = chain_exchange_model.Exchanges(devices=devices, ctas=ctas, broadcasts=True, attending=1)
    assert not list(chain_exchange_model.failures(exchanges))


@pytest.mark.parametrize("lacking", [(), ((1, 1),), ((3, 1),), ((1, 1), (3, 1))], ids=str)
def test_products_of_a_chain_get_words_before_later_ones_overwrite_them(lacking):
    """Gate and up, and heads, may have fewer CTAs than the other products."""
    assert not list(chain_exchange_model.failures(chain_exchange_model.chain_of_products(lacking=lacking)))


@pytest.mark.parametrize("broken", [{"slots": 1}, {"idle": 1, "lacking": ()}], ids=str)
def test_the_model_of_products_finds_what_would_be_wrong(broken):
    """`few_rows_chain_layout.tells_all_reads` refuses a CTA that receives x for an empty tile."""
    found = chain_exchange_model.failures(chain_exchange_model.chain_of_products(**broken))
    assert "a word of step 0 was overwritten before it was read" in found


@pytest.mark.parametrize(
    "options",
    [
        {}, {"lacking": ((1, 1), (3, 1))}, {"lacking": (), "before_all": ()},
        {"in_parts": (0,), "before_all": ()},  # down is broadcast
    ],
    ids=str,
)  # fmt: skip
def test_parts_of_results_are_read_before_later_exchanges_overwrite_them(options):
    assert not list(chain_exchange_model.failures(chain_exchange_model.chain_in_parts(**options)))


@pytest.mark.parametrize("broken", [{"slots": 1}, {"before_all": ()}], ids=str)
def test_the_model_of_parts_finds_what_would_be_wrong(broken):
    """A CTA without heads may read its sum late: `few_rows_chain_layout.comes_in_parts` asks for a meeting then."""
    found = chain_exchange_model.failures(chain_exchange_model.chain_in_parts(**broken))
    assert "overwritten before it was read" in " ".join(found)


def test_the_model_finds_that_no_cta_attends():
    exchanges = chain_exchange_model.Exchanges(devices=1, ctas=3, broadcasts=True, attending=0)
    assert "all wait" in chain_exchange_model.failures(exchanges)


def test_the_model_finds_that_a_cta_merges_and_has_no_part_of_the_products():
    exchanges = chain_exchange_model.Exchanges(broadcasts=True, working=1)
    assert "a word of step 0 was overwritten before it was read" in chain_exchange_model.failures(exchanges)


@pytest.mark.parametrize("broadcasts", [False, True])
@pytest.mark.parametrize("broken", [{"meets": False}, {"slots": 1}], ids=str)
def test_the_model_of_a_chain_s_exchanges_finds_what_would_be_wrong(broken, broadcasts):
    found = chain_exchange_model.failures(chain_exchange_model.Exchanges(**broken, broadcasts=broadcasts))
    assert "a word of step 0 was overwritten before it was read" in found


@pytest.mark.parametrize(("sms", "ctas"), [(None, 64), (65, 64), (127, 64), (128, 96), (132, 96)])
def test_more_ctas_than_exchange_fit_a_device(sms, ctas):
    assert exchanging_ctas(sms) == ctas
    assert sms is None or ctas < sms
