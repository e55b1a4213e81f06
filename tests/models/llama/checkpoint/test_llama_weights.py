"""Reading safetensors folders: what is placed where, and every way a folder can be wrong."""

import json
import os
import re
import struct

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tree_attn.cli import main
from tree_attn.models.llama import Llama
from tree_attn.models.llama.checkpoint import huggingface as weights
from tree_attn.models.llama.checkpoint import open as load
from tree_attn.models.llama.checkpoint.huggingface import find_tensors, from_safetensors
from tree_attn.models.llama.checkpoint.reading import CheckpointError
from tree_attn.models.llama.checkpoint.safetensors import Tensor, read_header

CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "vocab_size": 40,
}

LAYER_SHAPES = {
    "input_layernorm.weight": (16,),
    "self_attn.q_proj.weight": (16, 16),
    "self_attn.k_proj.weight": (8, 16),
    "self_attn.v_proj.weight": (8, 16),
    "self_attn.o_proj.weight": (16, 16),
    "post_attention_layernorm.weight": (16,),
    "mlp.gate_proj.weight": (24, 16),
    "mlp.up_proj.weight": (24, 16),
    "mlp.down_proj.weight": (16, 24),
}

DTYPE_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64", "int8": "I8"}


def random_tensors(dtype=np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (40, 16), "model.norm.weight": (16,), "lm_head.weight": (40, 16)}
    shapes |= {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in LAYER_SHAPES.items()}
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def write_safetensors(path, tensors) -> None:
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, tensor in tensors.items():
        raw = tensor.tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype.name], "shape": list(tensor.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def edit_header(path, edit) -> None:
    """Rewrites the header of a file by `edit(header)`, leaving the data as they are."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


@pytest.fixture
def folder(tmp_path):
    """A checkpoint in one file."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_safetensors(tmp_path / "model.safetensors", random_tensors())
    return tmp_path


@pytest.fixture
def indexed_folder(tmp_path):
    """The same checkpoint in two files with an index."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    tensors = random_tensors()
    weight_map = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file_name in set(weight_map.values()):
        write_safetensors(tmp_path / file_name, {n: t for n, t in tensors.items() if weight_map[n] == file_name})
    write_index(tmp_path, weight_map)
    return tmp_path


def test_a_gemma_folder_has_norms_before_and_after(folder, sharding_over):
    """`post_attention_layernorm` is a Llama's norm before its MLP; a Gemma's is what it says."""
    config = CONFIG | {"model_type": "gemma2", "head_dim": 4, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.0\.pre_feedforward_layernorm\.weight is missing"):
        load.open_checkpoint(folder)
    norms = {
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }
    added = [f"model.layers.{i}.{norms[name]}.weight" for i in range(2) for name in ("mlp_norm", "mlp_post_norm")]
    tensors = random_tensors() | dict(zip(added, np.random.default_rng(1).random((4, 16)), strict=True))
    write_safetensors(folder / "model.safetensors", tensors)
    config = weights.read_config(folder)
    sharding = sharding_over(config, 1)
    model = Llama(config, sharding, from_safetensors(folder, sharding, jnp.float32))
    for name, in_file in norms.items():
        expected = np.stack([tensors[f"model.layers.{i}.{in_file}.weight"] for i in range(2)])
        np.testing.assert_allclose(getattr(model.layers, name).scale[...], expected, rtol=1e-6)


def test_the_text_model_of_a_folder_that_has_images_too_is_read_alone(folder, sharding_over):
    """Biases of the other part are none of this model's; its own are refused."""
    in_text = {f"language_model.{name}": tensor for name, tensor in random_tensors().items()}
    of_images = {"vision_tower.layers.0.self_attn.q_proj.bias": np.zeros(4, np.float32)}
    write_safetensors(folder / "model.safetensors", in_text | of_images)
    config = weights.read_config(folder)
    sharding = sharding_over(config, 1)
    model = Llama(config, sharding, from_safetensors(folder, sharding, jnp.float32))
    np.testing.assert_array_equal(model.head[...], random_tensors()["lm_head.weight"])
    bias = {"language_model.model.layers.0.self_attn.q_proj.bias": np.zeros(16, np.float32)}
    write_safetensors(folder / "model.safetensors", in_text | bias)
    with pytest.raises(CheckpointError, match=r"unexpected tensor language_model\.model\.layers\.0\.self_attn\.q_proj"):
        weights.SafetensorsFolder(folder)


def write_index(folder, weight_map) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def read_weight_map(folder) -> dict[str, str]:
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


@pytest.fixture
def load_folder(sharding_over):
    def run(folder, num_devices=8, dtype=jnp.float32, on_bytes=None) -> Llama:
        config = weights.read_config(folder)
        sharding = sharding_over(config, num_devices)
        return Llama(config, sharding, from_safetensors(folder, sharding, dtype, on_bytes))

    return run


def check_values(model: Llama, tensors) -> None:
    def layer(name: str) -> np.ndarray:
        return np.stack([np.float32(tensors[f"model.layers.{i}.{name}.weight"]) for i in range(2)])

    attention, mlp = model.layers.attention, model.layers.mlp
    np.testing.assert_array_equal(model.embedding[...], np.float32(tensors["model.embed_tokens.weight"]))
    np.testing.assert_array_equal(model.head[...], np.float32(tensors["lm_head.weight"]))
    np.testing.assert_array_equal(model.final_norm.scale[...], np.float32(tensors["model.norm.weight"]))
    of_kv_heads = attention.query_key_value[...]  # [layers, KV heads, two query heads, key and value, H, D]
    np.testing.assert_array_equal(of_kv_heads[:, :, :2].reshape(2, 16, 16), layer("self_attn.q_proj"))
    np.testing.assert_array_equal(of_kv_heads[:, :, 2].reshape(2, 8, 16), layer("self_attn.k_proj"))
    np.testing.assert_array_equal(of_kv_heads[:, :, 3].reshape(2, 8, 16), layer("self_attn.v_proj"))
    np.testing.assert_array_equal(attention.output[...].reshape(2, 16, 16), layer("self_attn.o_proj"))
    np.testing.assert_array_equal(mlp.gate_up[...][:, 0], layer("mlp.gate_proj"))
    np.testing.assert_array_equal(mlp.gate_up[...][:, 1], layer("mlp.up_proj"))
    np.testing.assert_array_equal(mlp.down[...], layer("mlp.down_proj"))
    np.testing.assert_array_equal(model.layers.mlp_norm.scale[...], layer("post_attention_layernorm"))


@pytest.mark.parametrize("num_devices", [1, 2, 3, 8])
def test_every_tensor_arrives_whatever_the_sharding(folder, load_folder, num_devices):
    check_values(load_folder(folder, num_devices), random_tensors())


def test_every_tensor_arrives_where_heads_are_cut_over_their_dimensions(folder, load_folder, monkeypatch):
    monkeypatch.setattr("tree_attn.models.llama.sharding.MIN_BYTES_CUT_OVER_HEAD_DIM", 0)
    model = load_folder(folder, 4)
    assert model.sharding.kv_head_dim == "seq"
    check_values(model, random_tensors())


def test_many_files_are_one_checkpoint(indexed_folder, load_folder):
    check_values(load_folder(indexed_folder), random_tensors())


def test_files_without_an_index_are_all_read(indexed_folder, load_folder):
    (indexed_folder / "model.safetensors.index.json").unlink()
    check_values(load_folder(indexed_folder), random_tensors())


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float64])
def test_other_float_types_are_converted(folder, load_folder, dtype):
    tensors = random_tensors(dtype)
    write_safetensors(folder / "model.safetensors", tensors)
    check_values(load_folder(folder), tensors)


def test_weights_can_be_stored_as_bfloat16(folder, load_folder):
    model = load_folder(folder, dtype=jnp.bfloat16)
    expected = random_tensors()["model.embed_tokens.weight"].astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.asarray(model.embedding[...]), expected)


def test_each_device_reads_only_its_part_and_progress_adds_up(folder, load_folder):
    counted = []
    model = load_folder(folder, 8, on_bytes=counted.append)
    assert {shard.data.shape for shard in model.layers.mlp.gate_up[...].addressable_shards} == {(2, 2, 3, 16)}
    # Replicated parameters are read once, sharded ones in pieces: either way each byte once.
    checkpoint_bytes = sum(tensor.nbytes for tensor in random_tensors().values())
    assert sum(counted) == checkpoint_bytes
    assert load.num_parameters(model.config) * 4 == checkpoint_bytes


def test_of_kernels_that_lie_together_each_device_reads_its_rows_of_each_tensor(folder, load_folder, monkeypatch):
    pieces, read = {}, Tensor.read

    def spy(tensor, index):
        piece = read(tensor, index)
        pieces.setdefault(tensor.name, []).append(piece.shape)
        return piece

    monkeypatch.setattr(Tensor, "read", spy)
    load_folder(folder, 2)
    for name, shape in {
        "self_attn.q_proj": (8, 16),
        "self_attn.k_proj": (4, 16),
        "self_attn.v_proj": (4, 16),
        "mlp.gate_proj": (12, 16),
        "mlp.up_proj": (12, 16),
    }.items():
        for layer in range(2):
            assert pieces[f"model.layers.{layer}.{name}.weight"] == [shape] * 2, "on two devices"


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def truncate_header(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def relabel(name, **changes):
    return lambda folder: edit_header(folder / "model.safetensors", lambda header: header[name].update(changes))


def rename(name):
    def edit(header):
        header["other.weight"] = header.pop(name)

    return lambda folder: edit_header(folder / "model.safetensors", edit)


def configure(**changes):
    return lambda folder: (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))


def write_text(file_name, text):
    return lambda folder: (folder / file_name).write_text(text)


def add_bias(folder):
    bias = {"model.layers.0.self_attn.q_proj.bias": np.zeros(16, np.float32)}
    write_safetensors(folder / "model.safetensors", random_tensors() | bias)


def add_second_copy(folder):
    write_safetensors(folder / "copy.safetensors", random_tensors())


def shift_offsets(folder, by):
    """Moves the tensor that follows the first one, and all behind it, in the header alone."""

    def edit(header):
        for name, entry in header.items():
            if name not in ("__metadata__", "model.embed_tokens.weight", "model.norm.weight"):
                entry["data_offsets"] = [offset + by for offset in entry["data_offsets"]]

    edit_header(folder / "model.safetensors", edit)


def append_data(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes() + bytes(8))


def repeat_header(folder):
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    entry = json.dumps({"model.norm.weight": json.loads(raw[8 : 8 + length])["model.norm.weight"]})[:-1]
    text = (entry + ", ").encode() + raw[9 : 8 + length]
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def nest_header(folder):
    text = b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)


def replace_by_folder(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()


def replace_by_pipe(folder):
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


DAMAGES = {
    "truncated data": (
        truncate,
        r"model.safetensors: damaged, truncated .*: incomplete metadata",
    ),
    "truncated header": (
        truncate_header,
        r"model.safetensors: .* invalid header length",
    ),
    "empty file": (
        write_text("model.safetensors", ""),
        r"model.safetensors: .* header too small",
    ),
    "text file": (write_text("model.safetensors", "version https://git-lfs"), "truncated or not safetensors"),
    "header is no JSON": (
        write_text("model.safetensors", "\4\0\0\0\0\0\0\0{a:}"),
        r"model.safetensors: .* invalid JSON in header",
    ),
    "header is a list": (
        write_text("model.safetensors", "\2\0\0\0\0\0\0\0[]"),
        r"model.safetensors: .* invalid type: sequence, expected struct HashMetadata",
    ),
    "shape against its bytes": (
        relabel("model.norm.weight", shape=[17]),
        r"model.safetensors: .* invalid shape, data type, or offset for tensor",
    ),
    "dtype against its bytes": (
        relabel("model.norm.weight", dtype="BF16"),
        r"model.safetensors: .* invalid shape, data type",
    ),
    "dtype that is no float": (
        relabel("model.norm.weight", dtype="I32"),
        "tensor model.norm.weight has dtype I32; this reads F64, F32, F16, BF16",
    ),
    "negative offsets": (relabel("model.norm.weight", data_offsets=[-4, 60]), "model.safetensors: .* integer `-4`"),
    "offsets are no pair": (relabel("model.norm.weight", data_offsets=[0]), "model.safetensors: .* a tuple of size 2"),
    "dtype is a list": (relabel("model.norm.weight", dtype=["F32"]), "model.safetensors: .* expected string"),
    "shape is a boolean": (relabel("model.norm.weight", shape=[True]), "model.safetensors: .* boolean `true`"),
    "tensors overlap": (
        lambda folder: shift_offsets(folder, -64),
        "model.safetensors: .* invalid offset for tensor `lm_head.weight`",
    ),
    "a hole": (lambda folder: shift_offsets(folder, 64), "model.safetensors: .* invalid offset for tensor `lm_head.we"),
    "data behind the last tensor": (append_data, "model.safetensors: .* file not fully covered"),
    "a name twice": (repeat_header, "model.safetensors: .* 'model.norm.weight' occurs twice in one object"),
    "a deeply nested header": (nest_header, "model.safetensors: .* recursion limit exceeded"),
    "a folder as a file": (replace_by_folder, "model.safetensors: must be a file"),
    "a deeply nested config": (
        write_text("config.json", '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"),
        "config.json: not JSON that can be read: it is nested too deeply",
    ),
    "a pipe as config": (replace_by_pipe, "config.json: must be a file"),
    "a billion layers": (
        configure(num_hidden_layers=10**9),
        "model.safetensors: tensor model.layers.2.* is missing from .*; config.json needs it",
    ),
    "2^63 layers": (configure(num_hidden_layers=2**63), "config.json: num_hidden_layers must be at most 2147483647"),
    "a name twice in config": (
        write_text("config.json", '{"vocab_size": 40, "vocab_size": 41}'),
        "config.json: not JSON: 'vocab_size' occurs twice",
    ),
    "a wrong type in config": (
        configure(tie_word_embeddings="false"),
        "config.json: tie_word_embeddings must be true or false, got 'false'",
    ),
    "transposed": (
        relabel("model.layers.1.mlp.down_proj.weight", shape=[24, 16]),
        r"tensor model.layers.1.mlp.down_proj.weight has shape \[24, 16\]; config.json needs \[16, 24\]",
    ),
    "too few key rows": (
        configure(num_key_value_heads=4),
        r"model.safetensors: tensor model.layers.0.self_attn.k_proj.weight has shape \[8, 16\]; .* needs \[16, 16\]",
    ),
    "up and gate unlike": (
        relabel("model.layers.1.mlp.up_proj.weight", shape=[16, 24]),
        r"tensor model.layers.1.mlp.up_proj.weight has shape \[16, 24\]; config.json needs \[24, 16\]",
    ),
    "other size in config": (
        configure(vocab_size=48),
        r"embed_tokens.weight has shape \[40, 16\]; config.json needs \[48, 16\]",
    ),
    "more layers in config": (configure(num_hidden_layers=3), "tensor model.layers.2.* is missing"),
    "missing tensor": (rename("lm_head.weight"), "tensor lm_head.weight is missing"),
    "a bias": (add_bias, "unexpected tensor model.layers.0.self_attn.q_proj.bias"),
    "a tensor twice": (add_second_copy, "tensor .* is in both copy.safetensors and model.safetensors"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "no .safetensors file in"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json is missing from"),
    "config is no JSON": (write_text("config.json", "{"), "config.json: not JSON"),
    "config is a list": (write_text("config.json", "[]"), "config.json: must hold a JSON object"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused_by_file_and_tensor(folder, load_folder, damage):
    harm, message = DAMAGES[damage]
    harm(folder)
    with pytest.raises(CheckpointError, match=message):
        load_folder(folder)


@pytest.mark.parametrize("damage", ["missing tensor", "transposed", "a billion layers", "a name twice"])
def test_a_damaged_folder_is_refused_as_it_is_opened(folder, damage):
    DAMAGES[damage][0](folder)
    with pytest.raises(CheckpointError, match=DAMAGES[damage][1]):
        load.open_checkpoint(folder)
    with pytest.raises(CheckpointError, match="File name too long"):
        load.open_checkpoint(folder / ("x" * 5000))


@pytest.mark.parametrize("damage", ["a deeply nested config", "a wrong type in config", "a folder as a file"])
def test_the_command_line_prints_one_line_for_a_damaged_folder(folder, damage, capfd):
    harm, message = DAMAGES[damage]
    harm(folder)
    assert main(["generate", "--model", str(folder), "--prompt", "x"]) == 2
    output = capfd.readouterr()
    assert output.out == "" and re.fullmatch(rf"tree-attn generate: error: {message}.*\n", output.err)


@pytest.mark.parametrize("path", ["../model.safetensors", "/tmp/model.safetensors", "sub/../../model.safetensors"])
def test_an_index_cannot_lead_out_of_its_folder(indexed_folder, path):
    write_index(indexed_folder, read_weight_map(indexed_folder) | {"model.norm.weight": path})
    with pytest.raises(CheckpointError, match="leads out of the folder"):
        find_tensors(indexed_folder)


def test_an_index_is_held_to_its_files(indexed_folder):
    weight_map = read_weight_map(indexed_folder)
    write_index(indexed_folder, weight_map | {"model.norm.weight": "model-7.safetensors"})
    with pytest.raises(CheckpointError, match=r"names model-7.safetensors, which is missing"):
        find_tensors(indexed_folder)
    write_index(indexed_folder, weight_map | {"model.extra.weight": "model-0.safetensors"})
    with pytest.raises(CheckpointError, match=r"model-0.safetensors: tensor model.extra.weight is missing"):
        find_tensors(indexed_folder)
    write_index(indexed_folder, ["model-0.safetensors"])
    with pytest.raises(CheckpointError, match="weight_map must be an object"):
        find_tensors(indexed_folder)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "weight_map must be an object of tensor name to file name"),
        ({}, "weight_map must be an object of tensor name to file name"),
        ("x" * 5000, r"model.safetensors.index.json: weight_map names 'x{200}\.\.\.': File name too long"),
        ("model\0.safetensors", r"model.safetensors.index.json names model\\x00.safetensors, which is missing"),
        ("a\nb\x1b\ud800", r"model.safetensors.index.json: .*(surrogates not allowed|a\\nb\\x1b\\ud800)"),
        (".", r"model.safetensors.index.json names ., which is missing"),
    ],
)
def test_names_of_files_in_an_index_are_checked(indexed_folder, value, message):
    write_index(indexed_folder, read_weight_map(indexed_folder) | {"model.norm.weight": value})
    with pytest.raises(CheckpointError, match=message):
        find_tensors(indexed_folder)


def test_headers_of_the_safetensors_package_are_read(tmp_path):
    safetensors_numpy = pytest.importorskip("safetensors.numpy", reason="needs safetensors: pip install safetensors")
    expected = np.arange(12, dtype=np.float32).reshape(3, 4)
    safetensors_numpy.save_file({"x": expected}, tmp_path / "x.safetensors")
    tensor = read_header(tmp_path / "x.safetensors")["x"]
    np.testing.assert_array_equal(tensor.read([slice(None), slice(1, 3)]), expected[:, 1:3])
