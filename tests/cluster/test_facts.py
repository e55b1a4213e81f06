"""Texts of the facts in which ranks must not differ."""

import json
import os

import pytest

from tree_attn.cluster import facts


def test_long_values_are_a_beginning_and_a_digest():
    one, two = facts.brief(list(range(1000))), facts.brief([*range(999), 0])
    assert one != two and len(one) < 120 and one.startswith("[0, 1, 2")


def test_settings_are_those_that_change_programs_or_what_they_send():
    environ = {
        "XLA_FLAGS": "--xla_b=1 --xla_dump_to=/tmp/3 --xla_a=2 --xla_gpu_cuda_data_dir=/opt/cuda",
        "NCCL_ALGO": "Ring",
        "NCCL_SOCKET_IFNAME": "ib0",
    }
    found = facts.settings(environ | {"SLURM_PROCID": "3", "HOME": "/root", "NCCL_DEBUG_FILE": "3.log"})
    assert {name: found[name] for name in found if name.isupper()} == {
        "NCCL_ALGO": '"Ring"',
        "XLA_FLAGS": '"--xla_a=2 --xla_b=1"',
    }
    assert found["jax_enable_x64"] in ("true", "false")
    assert facts.settings({"XLA_FLAGS": "--xla_dump_to=/tmp/0"}).keys() == facts.settings({}).keys()


def test_arguments_are_named_as_they_are_written():
    arguments = {"max_new_tokens": 3, "prompt": ["a"], "out": "x"}
    assert facts.of_arguments(arguments, without=("out",)) == {"--max-new-tokens": "3", "--prompt": '["a"]'}


@pytest.mark.parametrize("limit", [1 << 30, 0], ids=["whole", "in blocks"])
def test_a_model_with_other_weights_or_another_tokenizer_differs(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(facts, "_WHOLE_BYTES", limit)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(os.urandom(1 << 20))
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "README.md").write_text("anything")
    before = facts.of_model(tmp_path)
    assert list(before) == ["config.json", "model.safetensors", "tokenizer.json"]
    (tmp_path / "README.md").write_text("changed")
    assert facts.of_model(tmp_path) == before
    weights.write_bytes(os.urandom(1 << 20))
    after = facts.of_model(tmp_path)
    assert [name for name in before if before[name] != after[name]] == ["model.safetensors"]
    (tmp_path / "tokenizer.json").write_text("[]")
    assert facts.of_model(tmp_path)["tokenizer.json"] != after["tokenizer.json"]
    assert len(set(facts.of_model(weights).values())) == 1


def test_a_changed_source_file_changes_the_digest(tmp_path, monkeypatch):
    (tmp_path / "one.py").write_text("a = 1")
    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path)]})()
    monkeypatch.setattr(facts.importlib.util, "find_spec", lambda name: spec if name == "tree_attn" else None)
    before = facts.source_digest()
    (tmp_path / "one.py").write_text("a = 2")
    assert facts.source_digest() != before
