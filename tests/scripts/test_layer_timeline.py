"""The time line of a layer: which kernels are a layer's, and the picture that a saved profile gives."""

import json

import layer_timeline
import profile_llama
import pytest
from layer_timeline import kind_of, layer_of, packed, unpacked

from tree_attn.measure.rows import RowWriter

ATTENTION, PRODUCT = "lean_attention_mosaic_gpu_kernel", "gemm_fusion_dot_7"
PEER_ATTENTION = "void flashinfer::BatchPrefillWithPagedKVCacheKernel<...>"


def made_up(layers: int, steps: int, attention: str = ATTENTION, late_us: float = 0.0) -> list[tuple]:
    """Returns the events, in ns, of steps of layers of 60 us, each layer `late_us` after the one before, and a head."""
    events, now = [], 1e6
    for _ in range(steps):
        for layer in range(layers):
            for start, us, name in ((0, 10, attention), (11, 2, "lean_merge"), (13, 20, PRODUCT), (30, 25, "few_rows")):
                events.append((now + 1e3 * start, now + 1e3 * (start + us), name))
            now += 1e3 * (60 + late_us * layer)
        events.append((now, now + 90e3, PRODUCT))
        now += 100e3
    return events


def row(way: str, events: list[tuple], **fields) -> dict:
    fields |= {"hardware": "1 x GPU", "git_commit": way[:5]}
    fields |= {"way": way, "config": "llama-3.2-1b", "context": 1024, "layers": 3, "steps": 2}
    of_bytes = {"layer_weights_bytes": 144e6, "layer_cache_bytes": 24e6, "read_bytes_per_s": 4.8e12}
    return fields | of_bytes | packed(events)


def test_events_come_back_in_us_from_the_first():
    found = packed([(3000.0, 4500.0, "b"), (1000.0, 2000.0, "a"), (5000.0, 5001.0, "b")])
    assert found["kernel_names"] == ["a", "b"]
    assert unpacked(found) == [(0.0, 1.0, "a"), (2.0, 3.5, "b"), (4.0, 4.001, "b")]


def test_a_layer_runs_from_attention_to_attention_without_the_head():
    events = unpacked(packed(made_up(layers=3, steps=2, late_us=4.0)))
    kernels, layer_us = layer_of(events, 3, 2)
    assert layer_us == pytest.approx(64)  # lengths are 60, 64, 60, 64: a layer that the head follows does not count
    assert [(round(start), round(end), name) for start, end, name in kernels] == [
        (0, 10, ATTENTION), (11, 13, "lean_merge"), (13, 33, PRODUCT), (30, 55, "few_rows"),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="no kernel runs once in each of 5 layers of 2 steps"):
        layer_of(events, 5, 2)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (ATTENTION, "attention"),
        ("lean_exchange_mosaic_gpu_kernel", "attention"),
        (PEER_ATTENTION, "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma", "attention"),
        ("void flashinfer::PersistentVariableLengthMergeStatesKernel<...>", "attention"),
        ("void flashinfer::AppendPagedKVCacheDecodeKernel<...>", "other"),
        ("kernel_cutlass_kernel_flashinfernorm_fused_add_rmsnorm", "other"),
        ("void flashinfer::BatchQKApplyRotaryPosIdsCosSinCacheKernel<...>", "other"),
        ("loop_add_fusion_15", "other"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_splitK_TNT", "product"),
        ("few_rows_mosaic_gpu_kernel", "product"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16>", "product"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "sum over GPUs"),
        ("void one_shot_all_reduce_kernel<...>", "sum over GPUs"),
    ],
)
def test_kernels_are_told_apart_by_their_names(name, kind):
    assert kind_of(name) == kind


def test_a_saved_profile_is_drawn_beside_the_peers(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    ours = RowWriter(tmp_path / "ours.jsonl", is_writer=True)
    ours.append({"config": "llama-3.2-1b", "context": 1024, "samples": 1, "kernels": {}})  # of a run without events
    ours.append(row("tree-attn, products xla", made_up(3, 2), samples=1))
    ours.append(row("tree-attn, products xla", made_up(3, 2), samples=4))
    peer = RowWriter(tmp_path / "peer.jsonl", is_writer=True)
    peer.append(row("torch, FlashInfer xqa, cuBLAS", made_up(3, 2)[4:], batch=1))  # a layer is lost
    peer.append(row("torch, FlashInfer decode, cuBLAS", made_up(3, 2, PEER_ATTENTION, late_us=9.0), batch=1))
    files = ["--out", str(ours.path), "--peer", str(peer.path), "--timeline", str(tmp_path / "pictures")]
    profile_llama.main(["--saved", *files])
    picture = tmp_path / "pictures" / "layer_llama-3.2-1b_1024_1.png"
    printed = capsys.readouterr().out
    assert str(picture) in printed and picture.read_bytes().startswith(b"\x89PNG")
    assert "FlashInfer xqa, cuBLAS: no kernel runs once in each of 3 layers of 2 steps: 5 x lean_attention" in printed
    drawn = json.loads(picture.with_suffix(".json").read_text())
    assert drawn["floor_us"] == {"weights": 30.0, "keys and values": 5.0}
    assert [(way["way"], way["layer_us"], way["busy_us"]) for way in drawn["ways"]] == [
        ("tree-attn, products xla", 60.0, 54.0), ("torch, FlashInfer decode, cuBLAS", 69.0, 54.0),
    ]  # fmt: skip
    assert [(way["hardware"], way["git_commit"]) for way in drawn["ways"]] == [
        ("1 x GPU", "tree-"),
        ("1 x GPU", "torch"),
    ]
    assert (tmp_path / "pictures" / "layer_llama-3.2-1b_1024_1_4_samples.png").is_file()
    assert [kernel[2] for kernel in drawn["ways"][1]["kernels"]] == ["attention", "attention", "product", "product"]


def test_rows_without_events_are_named(tmp_path):
    with pytest.raises(ValueError, match="rows must have way, config"):
        layer_timeline.draw_rows([{"config": "llama-3.2-1b"}], tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--saved"], "--saved and --peer need --timeline"),
        (["--saved", "--timeline", "pictures"], "--out must be a file of rows, got"),
        (["--peer", "none.jsonl", "--timeline", "pictures"], "--peer must be a file of rows, got none.jsonl"),
    ],
)
def test_wrong_options_are_named_before_anything_is_profiled(tmp_path, capsys, options, message):
    with pytest.raises(SystemExit):
        profile_llama.main(["--out", str(tmp_path / "none.jsonl"), *options])
    assert message in capsys.readouterr().err


def test_kernels_that_overlap_lie_in_lanes_of_their_own():
    assert layer_timeline.lanes([(0, 4), (1, 3), (3, 5), (4, 6), (4, 5)]) == [0, 1, 1, 0, 2]


def test_each_kind_is_named_once_at_its_longest_kernel():
    names: list[tuple] = []

    class Axes:
        def annotate(self, name, place, **options):
            names.append((name, *place, options["ha"], options["va"]))

    short, long = [0, 4, "attention", ""], [10, 30, "product", ""]
    bands = [[short, [4, 9, "product", ""], long, [12, 16, "other", ""]], [short, [5, 90, "other", ""]]]
    named: set[str] = set()
    for band, kernels in enumerate(bands, 1):
        layer_timeline._name_kinds(Axes(), band, kernels, named)
    assert names == [
        ("attention", 0, pytest.approx(0.64), "left", "bottom"),
        ("product", 20, pytest.approx(0.64), "center", "bottom"),
        ("other", 14, pytest.approx(1.36), "center", "top"),  # in the second lane
    ]
    assert named == {"attention", "product", "other"}
