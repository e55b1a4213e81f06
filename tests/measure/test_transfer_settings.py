"""Settings of transfers: what the environment becomes, and which is the fastest for a size."""

import os

import pytest

from tree_attn.measure import transfer_settings
from tree_attn.measure.transfer_settings import SETTINGS


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for setting in SETTINGS.values():
        for variable in setting:
            monkeypatch.setenv(variable, "before")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_replaces_those_of_others_and_nothing_else(name):
    transfer_settings.apply(name)
    variables = {variable for setting in SETTINGS.values() for variable in setting} - {"XLA_FLAGS"}
    found = {variable: os.environ[variable] for variable in variables if variable in os.environ}
    assert found == {key: value for key, value in SETTINGS[name].items() if key != "XLA_FLAGS"}
    assert os.environ["XLA_FLAGS"] == f"before {SETTINGS[name].get('XLA_FLAGS', '')}".strip()
    assert os.environ["NCCL_DEBUG"] == "INFO"


def test_the_first_is_nccls_own_and_an_unknown_one_is_named():
    assert next(iter(SETTINGS.items())) == ("own", {})
    with pytest.raises(ValueError, match=r"setting must be one of 'own', 'chunks-128k', .* got 'fast'"):
        transfer_settings.apply("fast")


def test_the_fastest_depends_on_the_size():
    rows = [(8, "own", 80.0), (8, "chunks-64k", 300.0), (9, "own", 350.0), (9, "chunks-64k", 340.0), (7, "own", 1.0)]
    rows += [(7, "chunks-64k", 1.0)]
    found = transfer_settings.fastest(
        {"bytes": num_bytes, "nccl_setting": name, "gb_per_s": rate} for num_bytes, name, rate in rows
    )
    assert found == {8: "chunks-64k", 9: "own", 7: "own"}
