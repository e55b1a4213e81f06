"""Tiny valid checkpoints of every kind, written by the formats' rules, which the trials of files mutate."""

import functools
import json
import struct

import numpy as np

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "tie_word_embeddings": False,
    "vocab_size": 288,
    "bos_token_id": 257,
    "eos_token_id": [258],
}
LAYER_SHAPES = {
    "input_layernorm": (32,),
    "self_attn.q_proj": (32, 32),
    "self_attn.k_proj": (16, 32),
    "self_attn.v_proj": (16, 32),
    "self_attn.o_proj": (32, 32),
    "post_attention_layernorm": (32,),
    "mlp.gate_proj": (64, 32),
    "mlp.up_proj": (64, 32),
    "mlp.down_proj": (32, 64),
}
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
F32, Q8_0 = 0, 8


@functools.cache
def _tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens": (288, 32), "model.norm": (32,), "lm_head": (288, 32)}
    shapes |= {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in LAYER_SHAPES.items()}
    return {f"{name}.weight": rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


@functools.cache
def files(kind: str) -> dict[str, bytes]:
    """Returns the files of a checkpoint by name; `kind` is "folder", "sharded" or "gguf"."""
    if kind == "gguf":
        return {"model.gguf": gguf()[0]}
    settings = {"bos_token": {"content": "<s>"}, "eos_token": "<end>", "chat_template": TEMPLATE, "clean_up": False}
    contents = {
        "config.json": CONFIG,
        "tokenizer.json": json.loads(_tokenizer()),
        "tokenizer_config.json": settings,
        "generation_config.json": {"eos_token_id": [258, 12], "temperature": 0.5},
    }
    tensors = _tensors()
    if kind == "folder":
        weights = {"model.safetensors": _safetensors_file(tensors)}
    else:
        places = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(tensors)}
        part = lambda file: {name: tensors[name] for name in tensors if places[name] == file}
        weights = {file: _safetensors_file(part(file)) for file in sorted(set(places.values()))}
        contents["model.safetensors.index.json"] = {"metadata": {"total_size": 1}, "weight_map": places}
    return {name: json.dumps(content).encode() for name, content in contents.items()} | weights


def _safetensors_file(tensors: dict[str, np.ndarray]) -> bytes:
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, tensor in tensors.items():
        offsets = [len(data), len(data) + tensor.nbytes]
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": offsets}
        data += tensor.tobytes()
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@functools.cache
def _vocabulary() -> list[str]:
    import tokenizers

    return [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), "12", "<s>", "<end>"]


@functools.cache
def _tokenizer() -> str:
    import tokenizers

    vocabulary = {token: i for i, token in enumerate(_vocabulary()[:257])}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("1", "2")]))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    core.add_special_tokens(["<s>", "<end>"])
    core.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 257)])
    return core.to_str()


class _Writer:
    """Bytes of a GGUF file, and where its numbers are, with their struct codes."""

    def __init__(self):
        self.bytes, self.numbers = bytearray(b"GGUF"), []

    def number(self, code: str, value) -> None:
        self.numbers.append((len(self.bytes), code))
        self.bytes += struct.pack("<" + code, value)

    def text(self, text: str) -> None:
        self.number("Q", len(text.encode()))
        self.bytes += text.encode()

    def value(self, value) -> None:
        if isinstance(value, list):
            self.number("I", 9)
            self.number("I", 8 if isinstance(value[0], str) else 5)
            self.number("Q", len(value))
            for element in value:
                self.text(element) if isinstance(element, str) else self.number("i", element)
        elif isinstance(value, str):
            self.number("I", 8)
            self.text(value)
        elif isinstance(value, bool):
            self.number("I", 7)
            self.number("?", value)
        else:
            self.number("I", 6 if isinstance(value, float) else 4)
            self.number("f" if isinstance(value, float) else "I", value)

    def align(self) -> None:
        self.bytes += bytes(-len(self.bytes) % 32)


@functools.cache
def gguf() -> tuple[bytes, list[tuple[int, str]], int]:
    """Returns a GGUF file, the offsets and codes of its numbers, and the length of all before its data."""
    metadata = {
        "general.architecture": "llama",
        "general.alignment": 32,
        "llama.block_count": 2,
        "llama.context_length": 64,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 64,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.key_length": 8,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": 8,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.scaling.type": "none",
        "llama.vocab_size": 288,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": [*_vocabulary(), *(f"<{i}>" for i in range(29))],
        "tokenizer.ggml.token_type": [1] * 257 + [3] * 31,
        "tokenizer.ggml.merges": ["1 2"],
        "tokenizer.ggml.bos_token_id": 257,
        "tokenizer.ggml.eos_token_id": 258,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": TEMPLATE,
    }
    tensors = {_gguf_name(name): tensor for name, tensor in _tensors().items()}
    writer, data = _Writer(), bytearray()
    writer.number("I", 3)
    writer.number("Q", len(tensors))
    writer.number("Q", len(metadata))
    for key, value in metadata.items():
        writer.text(key)
        writer.value(value)
    for name, tensor in tensors.items():
        writer.text(name)
        writer.number("I", tensor.ndim)
        for size in reversed(tensor.shape):
            writer.number("Q", size)
        is_quantized = tensor.ndim == 2
        writer.number("I", Q8_0 if is_quantized else F32)
        writer.number("Q", len(data))
        data += _quantized(tensor) if is_quantized else tensor.tobytes()
        data += bytes(-len(data) % 32)
    length = len(writer.bytes)
    writer.align()
    return bytes(writer.bytes + data), writer.numbers, length


def _gguf_name(name: str) -> str:
    parts = name.removesuffix(".weight").split(".")
    if parts[1:2] == ["layers"]:
        return f"blk.{parts[2]}.{GGUF_NAMES['.'.join(parts[3:])]}.weight"
    return f"{GGUF_NAMES['.'.join(parts)]}.weight"


def _quantized(tensor: np.ndarray) -> bytes:
    """Returns Q8_0: of 32 numbers a float16 scale and 32 int8."""
    blocks = tensor.reshape(-1, 32)
    scale = (np.abs(blocks).max(axis=1, keepdims=True) / 127).astype(np.float16)
    quantized = np.round(blocks / scale.astype(np.float32)).clip(-127, 127).astype(np.int8)
    return b"".join(s.tobytes() + q.tobytes() for s, q in zip(scale, quantized))
