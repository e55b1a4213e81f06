"""Reading GGUF: a file written here is read back, and what is damaged or another model is refused."""

import dataclasses
import re
import struct
import sys
import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest

from tree_attn.extras import how_to_install
from tree_attn.models.llama import Llama, Llama3RopeScaling, parameters
from tree_attn.models.llama.checkpoint import gguf as llama_gguf
from tree_attn.models.llama.checkpoint.gguf import GGUFFile, from_gguf, read_config
from tree_attn.models.llama.checkpoint.reading import CheckpointError
from tree_attn.models.llama.config import LlamaConfig
from tree_attn.models.llama.rope import frequency_divisors

gguf = pytest.importorskip("gguf", reason="needs gguf: pip install 'tree-attn[demo]'")


def pairs_together(heads: np.ndarray) -> np.ndarray:
    """Puts rows half a head apart next to each other, as converters to GGUF do: the inverse of reading."""
    num_heads, head_dim, hidden_size = heads.shape
    return heads.reshape(num_heads, 2, head_dim // 2, hidden_size).swapaxes(1, 2).reshape(-1, hidden_size)


Q8_0 = gguf.GGMLQuantizationType.Q8_0


def write_gguf(
    path, model: Llama, *, metadata=(), tensors=(), without=(), architecture="llama", is_quantized=False
) -> None:
    """Writes a model; `metadata` and `tensors` are added or replace, `without` names tensors that are left out."""
    config: LlamaConfig = model.config
    values = {
        "llama.block_count": config.num_layers,
        "llama.context_length": config.max_position,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_heads,
        "llama.attention.head_count_kv": config.num_kv_heads,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.freq_base": config.rope_theta,
        "llama.vocab_size": config.vocab_size,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    values = {key.replace("llama.", f"{architecture}."): value for key, value in values.items()} | dict(metadata)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in values.items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(key, value)
    for name, tensor in {**checkpoint_tensors(model), **dict(tensors)}.items():
        if name not in without:
            if is_quantized and tensor.ndim == 2:
                writer.add_tensor(name, gguf.quants.quantize(tensor, Q8_0), raw_dtype=Q8_0)
            else:
                writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def checkpoint_tensors(model: Llama) -> dict[str, np.ndarray]:
    attention, mlp = model.layers.attention, model.layers.mlp
    tensors = {
        "token_embd.weight": model.embedding[...],
        "output_norm.weight": model.final_norm.scale[...],
        "output.weight": model.head[...],
    }
    for i in range(model.config.num_layers):
        hidden_size = model.config.hidden_size
        group = model.config.group_size
        of_kv_heads = np.asarray(attention.query_key_value[...][i])
        query = of_kv_heads[:, :group].reshape(-1, model.config.head_dim, hidden_size)
        is_llama = attention.bias is None and attention.query_norm is None
        rows = pairs_together if is_llama else lambda heads: heads.reshape(-1, heads.shape[-1])
        layer = {
            "attn_norm": model.layers.attention_norm.scale[...][i],
            "attn_q": rows(query),
            "attn_k": rows(of_kv_heads[:, group]),
            "attn_v": of_kv_heads[:, group + 1].reshape(-1, hidden_size),
            "attn_output": attention.output[...][i].reshape(hidden_size, -1),
            "ffn_norm": model.layers.mlp_norm.scale[...][i],
            "ffn_gate": mlp.gate_up[...][i, 0],
            "ffn_up": mlp.gate_up[...][i, 1],
            "ffn_down": mlp.down[...][i],
        }
        if attention.query_norm is not None:
            layer |= {
                "attn_q_norm": attention.query_norm.scale[...][i],
                "attn_k_norm": attention.key_norm.scale[...][i],
            }
        tensors |= {f"blk.{i}.{name}.weight": tensor for name, tensor in layer.items()}
        if attention.bias is not None:
            parts = {"q": slice(0, group), "k": group, "v": group + 1}
            bias = np.asarray(attention.bias[...][i])
            tensors |= {f"blk.{i}.attn_{name}.bias": bias[:, part].reshape(-1) for name, part in parts.items()}
    return {name: np.asarray(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    "num_devices, is_quantized, cut",
    [(1, False, {}), (2, False, {}), (8, False, {}), (2, True, {}), (8, True, {"kv_head_dim": "seq"})],
)
def test_a_model_written_as_gguf_is_read_back(
    tmp_path, tiny_model, tiny_config, sharding_over, num_devices, is_quantized, cut
):
    written = tiny_model(1)
    write_gguf(tmp_path / "tiny.gguf", written, is_quantized=is_quantized)
    file = GGUFFile(tmp_path / "tiny.gguf")
    # Metadata is float32.
    assert read_config(file) == dataclasses.replace(tiny_config, rms_norm_eps=float(np.float32(1e-5)))
    sharding = dataclasses.replace(sharding_over(tiny_config, num_devices), **cut)
    read = Llama(tiny_config, sharding, from_gguf(file, sharding, jnp.float32))
    for name, expected in checkpoint_tensors(written).items():
        if is_quantized and expected.ndim == 2:
            expected = gguf.quants.dequantize(gguf.quants.quantize(expected, Q8_0), Q8_0)
        np.testing.assert_array_equal(checkpoint_tensors(read)[name], expected, err_msg=name)


@pytest.mark.parametrize(
    "architecture, fields", [("qwen2", {"query_key_value_bias": True}), ("qwen3", {"query_key_norm": True})]
)
def test_a_qwen_written_as_gguf_is_read_back_on_any_devices(tmp_path, tiny_config, sharding_over, architecture, fields):
    """Rows are in the model's order, and each device reads its part of the biases."""
    config = dataclasses.replace(tiny_config, rms_norm_eps=2.0**-16, **fields)
    written = Llama(config, sharding_over(config, 1), parameters.random(sharding_over(config, 1), jnp.float32))
    write_gguf(tmp_path / "qwen.gguf", written, architecture=architecture)
    file = GGUFFile(tmp_path / "qwen.gguf")
    assert read_config(file) == config
    for cut in ({}, {"kv_heads": None, "kv_head_dim": "seq"}):
        sharding = dataclasses.replace(sharding_over(config, 2), **cut)
        read = Llama(config, sharding, from_gguf(file, sharding, jnp.float32))
        for name, expected in checkpoint_tensors(written).items():
            np.testing.assert_array_equal(checkpoint_tensors(read)[name], expected, err_msg=name)


def test_of_kernels_that_lie_together_each_device_reads_its_rows_of_each_tensor(
    tmp_path, tiny_model, tiny_config, sharding_over, monkeypatch
):
    write_gguf(tmp_path / "tiny.gguf", tiny_model(1))
    read, rows = [], GGUFFile.rows
    monkeypatch.setattr(GGUFFile, "rows", lambda file, name, of: read.append((name, len(of))) or rows(file, name, of))
    file, sharding = GGUFFile(tmp_path / "tiny.gguf"), sharding_over(tiny_config, 2)
    Llama(tiny_config, sharding, from_gguf(file, sharding, jnp.float32))
    for name, num_rows in {"attn_q": 32, "attn_k": 16, "attn_v": 16, "ffn_gate": 64, "ffn_up": 64}.items():
        assert [count for of, count in read if of == f"blk.1.{name}.weight"] == [num_rows // 2] * 2


def test_quantized_tensors_are_dequantized_row_by_row(smollm2_path):
    file = GGUFFile(smollm2_path)
    name = "blk.3.ffn_up.weight"
    tensor = file.tensors[name]
    assert tensor.tensor_type.name == "Q4_1"
    whole = gguf.quants.dequantize(file.data(name), tensor.tensor_type)
    assert whole.shape == (1536, 576)
    np.testing.assert_array_equal(file.rows(name, slice(192, 384)), whole[192:384])


def test_a_mistral_has_its_window_on_all_layers(tmp_path, tiny_model):
    write_gguf(tmp_path / "mistral.gguf", tiny_model(1), metadata={"llama.attention.sliding_window": 16})
    config = read_config(GGUFFile(tmp_path / "mistral.gguf"))
    assert [config.window_of(layer) for layer in range(2)] == [16, 16]


def test_the_scaling_of_llama_3_is_found_from_its_table(tmp_path, tiny_model, tiny_config):
    scaling = Llama3RopeScaling(factor=32.0)
    frequencies = 500000.0 ** (-np.arange(0, tiny_config.head_dim, 2) / tiny_config.head_dim)
    table = {"rope_freqs.weight": frequency_divisors(frequencies, scaling).astype(np.float32)}
    write_gguf(tmp_path / "scaled.gguf", tiny_model(1), metadata={"llama.rope.freq_base": 500000.0}, tensors=table)
    assert read_config(GGUFFile(tmp_path / "scaled.gguf")).rope_scaling == scaling


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "qwen2moe"}, "general.architecture must be one of .*'llama'.*, got 'qwen2moe'"),
        (
            {"architecture": "qwen3", "metadata": {"qwen3.attention.sliding_window": 4096}},
            "qwen3.attention.sliding_window must be 0 or absent, got 4096",
        ),
        (
            {"metadata": {"llama.attention.sliding_window": "4"}},
            "llama.attention.sliding_window must be an integer of 1 or more, got '4'",
        ),
        (
            {"tensors": {"blk.0.attn_q.bias": np.zeros(32, np.float32)}},
            "unexpected tensor blk.0.attn_q.bias; this model",
        ),
        ({"metadata": {"llama.expert_count": 8}}, "mixtures of experts are not supported"),
        (
            {"architecture": "gpt-oss", "metadata": {"gpt-oss.expert_count": 32}},
            "gpt-oss.expert_count: mixtures of experts are not supported",
        ),
        (
            {"metadata": {"llama.rope.dimension_count": 4}},
            "dimension_count must be 8, the head's dimension, got 4",
        ),
        (
            {"metadata": {"llama.rope.scaling.type": "yarn"}},
            "llama.rope.scaling.type must be 'none' or absent, got 'yarn'",
        ),
        ({"tensors": {"rope_freqs.weight": np.float32([1, 2, 3, 4])}}, "rope_freqs.weight is not the scaling"),
        ({"without": ["blk.1.ffn_up.weight"]}, "wrong.gguf: tensor blk.1.ffn_up.weight is missing"),
        (
            {"tensors": {"blk.0.ffn_up.weight": np.zeros((32, 64), np.float32)}},
            r"tensor blk.0.ffn_up.weight has shape \[32, 64\]; the configuration needs \[64, 32\]",
        ),
    ],
)
def test_another_model_is_refused_by_key_or_tensor(tmp_path, tiny_model, sharding_over, changes, message):
    write_gguf(tmp_path / "wrong.gguf", tiny_model(1), **changes)
    file = GGUFFile(tmp_path / "wrong.gguf")
    with pytest.raises(CheckpointError, match=message):
        config = read_config(file)
        Llama(config, sharding_over(config, 1), from_gguf(file, sharding_over(config, 1), jnp.float32))


@pytest.mark.parametrize("num_bytes", [0, 3, 100, 20_000])
def test_a_truncated_file_is_refused(tmp_path, tiny_model, num_bytes):
    path = tmp_path / "cut.gguf"
    write_gguf(path, tiny_model(1))
    assert path.stat().st_size > 20_000
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(CheckpointError, match=r"cut.gguf: damaged, truncated or not GGUF"):
        GGUFFile(path)


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def pair(key: str, value_type: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", value_type) + value


def header(*pairs: bytes, tensors: tuple[bytes, ...] = (), num_pairs: int | None = None) -> bytes:
    counts = struct.pack("<IQQ", 3, len(tensors), len(pairs) if num_pairs is None else num_pairs)
    return b"GGUF" + counts + b"".join(pairs) + b"".join(tensors)


def tensor(name: str, *sizes: int, kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def array(element_type: int, count: int, elements: bytes = b"") -> bytes:
    return struct.pack("<IQ", element_type, count) + elements


def with_data(head: bytes, num_bytes: int) -> bytes:
    return head + bytes(-len(head) % 32 + num_bytes)


ALIGNMENT = "general.alignment"
STRUCTURES = {
    **{
        f"10^18 elements of type {kind}": (header(pair("x", 9, array(kind, 10**18))) + bytes(64), "of a file of")
        for kind in (0, 1, 2, 5, 6, 7, 11)
    },
    "10^18 texts": (header(pair("x", 9, array(8, 10**18))) + bytes(64), "metadata x: text 8 of 10+ lies beyond"),
    "10^18 empty arrays": (
        header(pair("x", 9, array(9, 10**18))) + bytes(4096),
        "x is an array of type 9",
    ),
    "deep arrays": (header(pair("x", 9, array(9, 1) * 5000)), "x is an array of type 9"),
    "a long text": (
        header(pair("x", 8, struct.pack("<Q", 2**64 - 1))),
        "metadata x: text 0 of 1 ends at byte 1844674",
    ),
    "a long key": (header(struct.pack("<Q", 2**63)), "a key of 9223372036854775808 bytes"),
    "2^64 pairs": (
        header(pair("x", 4, bytes(4)), num_pairs=2**64 - 1) + bytes(32),
        "and 18446744073709551615 metadata, at most",
    ),
    "10^5 pairs": (header(pair("x", 4, bytes(4)), num_pairs=10**5) + bytes(32), "metadata occurs twice"),
    "a key twice": (header(*[pair("x", 4, bytes(4))] * 2), "metadata x occurs twice"),
    "an unknown type": (header(pair("x", 13, bytes(8))), "metadata x has the unknown type 13"),
    "a key that is no text": (header(string("ab").replace(b"ab", b"\xff\xfe") + bytes(8)), "codec can't decode"),
    "a boolean of 2": (header(pair("x", 7, b"\2")), "metadata x must be 0 or 1"),
    "another version": (header().replace(b"\3", b"\7"), "it has version 7"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "it is big-endian"),
    "an alignment of 0": (header(pair(ALIGNMENT, 4, bytes(4))), "general.alignment must be a power of two"),
    "an alignment of 24": (header(pair(ALIGNMENT, 4, struct.pack("<I", 24))), "general.alignment must be a power"),
    "an alignment as text": (header(pair(ALIGNMENT, 8, string("32"))), "general.alignment must be a power of two"),
    "a tensor twice": (
        with_data(header(tensors=(tensor("a", 8), tensor("a", 8, offset=32))), 64),
        "tensor a occurs twice",
    ),
    "an unknown tensor type": (
        with_data(header(tensors=(tensor("a", 8, kind=999),)), 32),
        "the unknown type 999",
    ),
    "five dimensions": (with_data(header(tensors=(tensor("a", 1, 1, 1, 1, 8),)), 32), "a has 5 dimensions"),
    "10^9 dimensions": (header(tensors=(string("a") + struct.pack("<I", 10**9),)), "a has 1000000000 dimensions"),
    "half a block": (with_data(header(tensors=(tensor("a", 8, kind=8),)), 32), r"Q8_0 has blocks of 32, got \[8\]"),
    "a size of 2^63": (with_data(header(tensors=(tensor("a", 2**63, 2**63),)), 32), "tensor a ends at byte 3402823"),
    "not aligned": (
        with_data(header(tensors=(tensor("a", 8), tensor("b", 4, offset=36))), 64),
        "tensor b is at byte 36 of the data, expected 32: tensors must follow one another, aligned to 32",
    ),
    "an offset that wraps": (
        with_data(header(tensors=(tensor("a", 8, offset=2**64 - 32),)), 32),
        "tensor a is at byte 18446744073709551584 of the data, expected 0",
    ),
    "an overlap": (with_data(header(tensors=(tensor("a", 16), tensor("b", 8, offset=32))), 64), "b is at byte 32"),
    "a hole": (with_data(header(tensors=(tensor("a", 8), tensor("b", 8, offset=64))), 96), "b is at byte 64"),
    "a type of another length": (with_data(header(tensors=(tensor("a", 64, kind=1),)), 256), "128 bytes follow"),
    "data behind the last tensor": (with_data(header(tensors=(tensor("a", 8),)), 65), "33 bytes follow the last"),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_no_structure_is_read_beyond_what_the_file_holds(tmp_path, name):
    content, message = STRUCTURES[name]
    path = tmp_path / "wrong.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=rf"wrong.gguf: damaged, truncated or not GGUF: .*({message})"):
            GGUFFile(path)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_metadata_take_no_more_memory_than_a_small_multiple_of_their_bytes(tmp_path):
    """The package's reader makes several arrays of each number and each text."""
    num_values = 50_000
    numbers, texts = array(0, num_values, bytes(num_values)), array(8, num_values, bytes(8 * num_values))
    (tmp_path / "many.gguf").write_bytes(header(pair("numbers", 9, numbers), pair("texts", 9, texts)))
    tracemalloc.start()
    try:
        file = GGUFFile(tmp_path / "many.gguf")
        assert tracemalloc.get_traced_memory()[1] < 100_000
        assert len(file.get("numbers")) == len(file.get("texts")) == file.count("texts") == num_values
        assert tracemalloc.get_traced_memory()[1] < 6_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.block_count", 10**9, "tensor blk.2.attn_norm.weight is missing"),
        ("llama.block_count", "2", "llama.block_count must be an integer of 1 or more, got '2'"),
        ("llama.attention.head_count", 0, "llama.attention.head_count must be an integer of 1 or more, got 0"),
        ("llama.attention.head_count", 3, "head_count must be a multiple of llama.attention.head_count_kv=2, got 3"),
        ("llama.attention.key_length", 7, "llama.attention.key_length must be even"),
        ("llama.rope.freq_base", "x", "llama.rope.freq_base must be a number above 0, got 'x'"),
        ("llama.rope.freq_base", float("inf"), "llama.rope.freq_base must be a finite number"),
        ("llama.expert_count", "many", "mixtures of experts are not supported"),
        ("tokenizer.ggml.eos_token_id", 64, r"eos_token_id must be in \[0, llama.vocab_size=64\), got 64"),
        ("tokenizer.ggml.eos_token_id", "2", "tokenizer.ggml.eos_token_id must be an integer, got '2'"),
        ("llama.rope.scaling.type", 3, "llama.rope.scaling.type must be 'none' or absent, got 3"),
    ],
)
def test_a_wrong_value_is_refused_by_the_files_own_key(tmp_path, tiny_model, sharding_over, key, value, message):
    write_gguf(tmp_path / "wrong.gguf", tiny_model(1), metadata={key: value})
    file = GGUFFile(tmp_path / "wrong.gguf")
    with pytest.raises(CheckpointError, match=f"wrong.gguf: .*{message}"):
        config = read_config(file)
        sharding = sharding_over(config, 1)
        Llama(config, sharding, from_gguf(file, sharding, jnp.float32))


def test_text_that_is_not_utf_8_is_refused_when_it_is_read(tmp_path):
    text = pair("general.architecture", 8, struct.pack("<Q", 2) + b"\xff\xfe")
    (tmp_path / "wrong.gguf").write_bytes(header(text))
    file = GGUFFile(tmp_path / "wrong.gguf")
    with pytest.raises(CheckpointError, match=r"wrong.gguf: metadata general.architecture holds text that is not"):
        read_config(file)


@pytest.mark.parametrize("name", ["missing.gguf", "folder.gguf", "x" * 5000 + ".gguf"])
def test_what_is_no_file_is_refused(tmp_path, name):
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(CheckpointError, match=rf"{name[:150]}.*: damaged, .*(No such|directory|name)"):
        GGUFFile(tmp_path / name)


def test_without_the_gguf_package_it_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=re.escape(how_to_install("demo"))):
        llama_gguf.GGUFFile(tmp_path / "model.gguf")
