"""Provenance: hardware, commit and versions."""

import jax

import tree_attn
from tree_attn.measure import provenance


def test_hardware_names_emulated_devices_as_such():
    assert provenance.hardware(jax.devices("cpu")[:3]).startswith("3 emulated CPU devices on ")


def test_git_commit_is_a_hash_or_none():
    commit = provenance.git_commit()
    assert commit is None or len(commit.removesuffix("-dirty")) == 40


def test_versions_say_what_is_missing():
    found = provenance.versions()
    assert found["jax"] == jax.__version__
    assert found["tree-attn"] == tree_attn.__version__  # in a checkout that is not installed too
    assert set(found) >= {"python", "jaxlib", "flash-attn-jax"}
