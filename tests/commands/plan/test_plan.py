"""`tree-attn plan`: the same numbers as the cost model, the choice that the library would make, one error each."""

import dataclasses
import json
import re

import pytest
from fake_machine import make_machine

from tree_attn import cli
from tree_attn.cost import datasheets, machine, predict, prompt
from tree_attn.cost.step import DecodeStep

CLUSTER = ("--nodes", "16", "--gpus-per-node", "8", "--keys", "5120000")


def planned(capsys, *options: str) -> dict:
    assert cli.main(["plan", *options, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_strategy_has_what_the_model_says(capsys):
    document = planned(capsys, *CLUSTER)
    step = DecodeStep(**document["step"])
    assert (step.n_devices, document["axis_sizes"]) == (128, [8, 16])
    assert {one["label"] for one in document["strategies"]} >= {"tree gather", "ring overlapped", "ring public"}
    for one in document["strategies"]:
        reduction = tuple(one["reduction"]) if isinstance(one["reduction"], list) else one["reduction"]
        predicted = predict.predict_step(
            step, one["strategy"], reduction, machine=machine.load("NVIDIA H200"), axis_sizes=(8, 16)
        )
        assert one["latency_us"] == predicted.latency_us
        assert tuple(one["bytes_sent"]) == predicted.bytes_sent
    times = [one["latency_us"] for one in document["strategies"]]
    assert times == sorted(times)


@pytest.mark.parametrize("sizes", [(8, 16), (4, 2), (4,)])
def test_the_choice_is_the_librarys(capsys, sizes):
    options = ["--gpus-per-node", str(sizes[0]), "--nodes", str(sizes[1] if len(sizes) > 1 else 1), "--keys", "100000"]
    document = planned(capsys, *options)
    h200 = dataclasses.replace(machine.load("NVIDIA H200"), gpus_per_node=sizes[0])
    cheapest = predict.cheapest_reduction(
        predict.candidates(len(sizes)), elements=16 * 129, axis_sizes=sizes, machine=h200
    )
    best = document["strategies"][0]
    assert document["choice"] == best["label"] and document["reason"].startswith(best["label"])
    assert best["reduction"] == (list(cheapest) if isinstance(cheapest, tuple) else cheapest)


@pytest.mark.parametrize(
    "options, said",
    [
        (("--gpus-per-node", "2"), None),  # as many as were measured
        (("--gpus-per-node", "8"), "constants fitted to 2 GPUs stand for more"),
        (CLUSTER[:4], "constants fitted to 2 GPUs stand for more"),
        (("--device-kind", "H100"), "no constant was measured on such a device"),
        (("--device-kind", "A100", "--gpus-per-node", "1"), "no constant was measured on such a device"),
        (("--device-kind", "A100 40GB"), "no constant was measured on such a device"),
        (("--device-kind", "RTX 4090"), "no constant was measured on such a device"),
        (("--device-kind", "RTX 5090"), "no constant was measured on such a device"),
        (("--device-kind", "B200"), "no constant was measured on such a device"),
        (("--device-kind", "TPU v5e"), "no constant was measured on such a device"),
        (("--device-kind", "TPU v6e"), "no constant was measured on such a device"),
    ],
)
def test_assumed_constants_give_a_range(capsys, options, said):
    document = planned(capsys, *options, "--keys", "81920")
    for one in document["strategies"]:
        low_high = one["latency_range_us"]
        assert low_high is None if said is None else low_high[0] < one["latency_us"] < low_high[1]
    assert cli.main(["plan", *options, "--keys", "81920"]) == 0
    text = capsys.readouterr().out
    assert (
        ("Below each time is its range" in text) == (said is not None) == bool(re.search(r"[0-9.]+ to [0-9.]+", text))
    )
    assert said is None or said in " ".join(text.split())


@pytest.mark.parametrize("name", ["A100 40GB", "RTX 5090", "TPU v6e"])
def test_a_datasheet_as_a_file_is_still_marked_and_has_its_ranges(capsys, tmp_path, name):
    machine.write(datasheets.load(name), tmp_path / "machine.json")
    options = ("--gpus-per-node", "4", "--keys", "81920")
    document = planned(capsys, *options, "--machine", str(tmp_path / "machine.json"))
    assert document == planned(capsys, *options, "--device-kind", name)
    assert document["fitted_devices"] == 0 and document["datasheet"]


def test_a_machine_of_ones_own_and_what_does_not_fit(capsys, tmp_path):
    machine.write(make_machine(memory_bytes=4_000_000), tmp_path / "machine.json")
    options = ("--machine", str(tmp_path / "machine.json"), "--heads", "2")
    document = planned(capsys, *options, "--keys", "8000")  # 4 GPUs, as the file says; 2 MB of keys and values on each
    assert document["axis_sizes"] == [4]
    fits = {one["strategy"]: one["fits"] for one in document["strategies"]}
    assert fits == {"tree": True, "ring_overlapped": False, "ring_public": False}
    document = planned(capsys, *options, "--keys", "80000")
    assert document["choice"] is None
    assert document["reason"] == "Nothing fits: keys and values alone take 20.5 MB of each GPU, which has 4 MB."


def test_prompts_have_what_the_model_says(capsys):
    options = ("--prefill", "--keys", "1048576", "--heads", "32", "--kv-heads", "8")
    document = planned(capsys, *options, "--nodes", "4")
    step = DecodeStep(**document["step"])
    assert {one["strategy"] for one in document["strategies"]} == set(prompt.STRATEGIES)
    for one in document["strategies"]:
        h200 = machine.load("NVIDIA H200")
        predicted = prompt.predict_prompt(step, one["strategy"], machine=h200, axis_sizes=(8, 4))
        assert one["latency_us"] == predicted.latency_us and tuple(one["bytes_sent"]) == predicted.bytes_sent
    assert cli.main(["plan", *options]) == 0
    text = capsys.readouterr().out
    assert "PREDICTED per prompt, forward: 1,048,576 keys" in text and "ulysses ring" in text
    left_out = planned(capsys, *options, "--gpus-per-node", "7")["left_out"]
    assert set(left_out) == {"ulysses", "ulysses ring", "ring zigzag"}
    # Which rotation a ring without a named one takes: on a torus both directions are free at once.
    assert list(document["rotations"]) == ["one_way", "joint", "two_way"] and min(document["rotations"].values()) >= 0
    assert "A ring without a named rotation turns 'one_way'. Predicted to be added to its attention: one_way" in text
    torus = planned(capsys, "--device-kind", "TPU v5p", "--keys", "65536", "--kv-heads", "8", "--gpus-per-node", "4")
    assert min(torus["rotations"], key=torus["rotations"].get) == "two_way"
    alone = planned(capsys, *options, "--gpus-per-node", "1")
    assert alone["rotations"] == {}


def test_gradients_of_prompts_have_what_the_model_says(capsys):
    options = ("--prefill", "--gradient", "--keys", "65536", "--heads", "32", "--kv-heads", "8", "--gpus-per-node", "8")
    document = planned(capsys, *options)
    step, h200 = DecodeStep(**document["step"]), machine.load("NVIDIA H200")
    assert document["gradient"] and document["prefill"]
    one = next(one for one in document["strategies"] if one["strategy"] == "ulysses")
    predicted = prompt.predict_prompt(step, "ulysses", machine=h200, axis_sizes=(8,), has_gradient=True)
    assert one["latency_us"] == predicted.latency_us and one["memory_bytes"] == predicted.memory_bytes
    assert cli.main(["plan", *options]) == 0
    text = capsys.readouterr().out
    assert "PREDICTED per prompt, forward and backward: 65,536 keys" in text
    assert "added to its attention in the forward pass, by which it chooses: one_way" in text
    assert cli.main(["plan", "--gradient", "--keys", "65536"]) == 2
    assert "--gradient needs --prefill" in capsys.readouterr().err


def test_fused_stays_in_a_node_and_among_small_states(capsys):
    alone = "fused writes to the memory of other GPUs, which it can inside a node only"
    assert planned(capsys, *CLUSTER)["left_out"]["tree fused"] == alone
    left_out = planned(capsys, "--gpus-per-node", "4", "--keys", "8", "--batch", "1000")["left_out"]
    assert left_out == {"tree fused": "fused exchanges up to 524,288 elements, and this state has 2,064,000"}


def test_one_gpu_exchanges_nothing(capsys):
    document = planned(capsys, "--gpus-per-node", "1", "--keys", "1000")
    assert document["reason"].startswith("One GPU holds all keys and exchanges nothing")
    assert len({one["latency_us"] for one in document["strategies"]}) == 1
    assert cli.main(["plan", "--gpus-per-node", "1", "--keys", "1000"]) == 0
    text = capsys.readouterr().out
    assert len(re.findall(r"^ any .* us ", text, re.MULTILINE)) == 1 and not re.search("tree|ring|links", text)
    document = planned(capsys, "--gpus-per-node", "1", "--keys", "1000", "--device-kind", "TPU v5e")
    assert document["reason"].startswith("One chip holds all keys")
    assert document["left_out"] == {"tree fused": "fused is a kernel for NVIDIA GPUs"}


def test_words_and_figures_of_other_devices(capsys):
    """A megabyte's rounding is a gigabyte, a ratio has no decimals that it cannot have, and a TPU has no GPUs."""
    assert cli.main(["plan", "--keys", "976352", "--device-kind", "TPU v5e", "--gpus-per-node", "16"]) == 0
    text = capsys.readouterr().out
    assert "e+0" not in text and "attention on each chip" in text and "not possible: tree fused: fused is a" in text
    assert cli.main(["plan", "--keys", "5120000", "--nodes", "16"]) == 0
    assert re.search(r"the faster ring takes [0-9],[0-9]{3} times as long", capsys.readouterr().out)
    for kind in ("A100", "B200", "L40S", "RTX 4090", "RTX 5090"):
        reason = planned(capsys, "--keys", "81920", "--device-kind", kind)["left_out"]["tree fused"]
        assert reason.startswith("the time of fused is known on H200s")


def test_tables_say_what_is_predicted_and_what_is_assumed(capsys):
    assert cli.main(["plan", *CLUSTER]) == 0
    text = capsys.readouterr().out
    assert "PREDICTED per step: 5,120,000 keys" in text
    assert "links inside a node: measured" in text
    assert "links across nodes: assumed" in text and "not measured" in text
    assert "is predicted to be the fastest that fits" in text


def test_a_datasheet_is_marked_and_a_short_name_is_the_measured_machine(capsys):
    assert planned(capsys, "--keys", "81920", "--device-kind", "h200") == planned(capsys, "--keys", "81920")
    document = planned(capsys, "--keys", "1000000", "--device-kind", "TPU v5e", "--gpus-per-node", "16")
    assert (document["machine"], document["axis_sizes"]) == ("TPU v5e", [16])
    assert "819 GB/s" in document["datasheet"] and document["links"]["inside a node"].startswith("assumed: ")
    assert cli.main(["plan", "--keys", "81920", "--device-kind", "H100"]) == 0
    text = capsys.readouterr().out
    assert "on 8 x NVIDIA H100 SXM" in text and "FROM A DATASHEET, NOT MEASURED: NVIDIA's datasheet" in text


@pytest.mark.parametrize(
    "options, message",
    [
        (("--keys", "0"), "--keys must be an integer of at least 1, got 0"),
        (("--keys", "8", "--machine", __file__), "--machine must be a file of a machine's parameters: "),
        (("--keys", "8", "--nodes", "0"), "--nodes must be at least 1, got 0"),
        (("--keys", "8", "--gpus-per-node", "-1"), "--gpus-per-node must be at least 1, got -1"),
        (("--keys", "8", "--dtype", "foo"), "--dtype must be a floating dtype such as 'bfloat16'"),
        (("--keys", "8", "--dtype", "int8"), "dtype must be a floating dtype"),
        (("--keys", "8", "--kv-heads", "3"), "--heads must be a multiple of --kv-heads"),
        (("--keys", "8", "--device-kind", "fake"), "--device-kind must be one of H200, H100, A100, A100 40GB, B200, "),
        (
            ("--keys", "8", "--device-kind", "fake"),
            "or --machine given for 'fake'; `tree-attn doctor",
        ),
        (("--keys", "8", "--device-kind", "TPU v5e", "--nodes", "2"), "--nodes must be 1 for a TPU v5e, got 2"),
        (
            ("--keys", "8", "--machine", "/nowhere.json"),
            "--machine must be a file that can be read, got /nowhere.json: N",
        ),
    ],
)
def test_a_wrong_option_is_one_line(capsys, options, message):
    assert cli.main(["plan", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tree-attn plan: error: ") and message in error and error.count("\n") == 1
