"""Llama configurations: the published sizes, and what a `config.json` may and may not say."""

import dataclasses

import pytest

from tree_attn.local import mosaic_gpu
from tree_attn.models.llama import PRESETS, Llama3RopeScaling, LlamaConfig, from_huggingface, preset
from tree_attn.models.llama.checkpoint.open import num_parameters

LLAMA_3_2_1B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-2-7b", 6.738),
        ("llama-2-13b", 13.016),
        ("llama-2-70b", 68.977),
        ("llama-3-8b", 8.030),
        ("llama-3-70b", 70.554),
        ("llama-3.1-8b", 8.030),
        ("llama-3.1-70b", 70.554),
        ("llama-3.1-405b", 405.853),
        ("llama-3.2-1b", 1.236),
        ("llama-3.2-3b", 3.213),
        ("smollm2-135m", 0.135),
        ("smollm2-360m", 0.362),
        ("smollm2-1.7b", 1.711),
        ("qwen2.5-0.5b", 0.494),
        ("qwen2.5-1.5b", 1.544),
        ("qwen2.5-7b", 7.616),
        ("qwen2.5-72b", 72.706),
        ("qwen3-0.6b", 0.596),
        ("qwen3-8b", 8.191),
        ("qwen3-32b", 32.762),
        ("mistral-7b-v0.1", 7.242),
        ("mistral-7b-v0.3", 7.248),
        ("gemma-2-2b", 2.614),
        ("gemma-2-9b", 9.242),
        ("gemma-2-27b", 27.227),
        ("gemma-3-270m", 0.268),
        ("gemma-3-1b", 1.000),
        ("gemma-3-4b", 3.880),
        ("gemma-3-12b", 11.766),
        ("gemma-3-27b", 27.009),
    ],
)
def test_presets_have_the_published_number_of_parameters(name, billions):
    assert num_parameters(preset(name)) / 1e9 == pytest.approx(billions, abs=5e-4)


def test_parameters_are_counted_where_there_is_a_gpu_too(monkeypatch):
    """The model then has no devices, and chooses no kernel."""
    monkeypatch.setattr(mosaic_gpu, "unavailable", lambda: None)
    assert num_parameters(preset("smollm2-135m")) == 134_515_008


def test_every_preset_is_counted_above():
    assert len(PRESETS) == 30


def test_config_json_as_transformers_4_writes_it():
    assert from_huggingface(LLAMA_3_2_1B) == preset("llama-3.2-1b")


def test_config_json_as_transformers_5_writes_it():
    source = dict(LLAMA_3_2_1B)
    scaling = source.pop("rope_scaling")
    source["rope_parameters"] = {**scaling, "rope_theta": source.pop("rope_theta")}
    assert from_huggingface(source) == preset("llama-3.2-1b")


def test_config_json_of_llama_2_leaves_things_out():
    source = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "vocab_size": 32000,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert from_huggingface(source) == preset("llama-2-7b")


QWEN_2_5_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "bos_token_id": 151643,
    "eos_token_id": [151643, 151645],
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 26,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "vocab_size": 152064,
}


def test_config_json_of_qwen():
    """Its biases are no field of the file; its window counts if `use_sliding_window` says so, in the last layers."""
    assert from_huggingface(QWEN_2_5_7B) == preset("qwen2.5-7b")
    windowed = from_huggingface({**QWEN_2_5_7B, "use_sliding_window": True})
    assert [windowed.window_of(layer) for layer in (0, 25, 26, 27)] == [None, None, 131072, 131072]
    assert windowed.has_layer_kinds
    by_type = from_huggingface(
        {**QWEN_2_5_7B, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"] * 14}
    )
    assert by_type.global_layers == tuple(range(1, 28, 2))
    norms = {**QWEN_2_5_7B, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    config = from_huggingface(norms)
    assert (config.query_key_norm, config.query_key_value_bias, config.head_dim) == (True, False, 128)


def test_config_json_of_mistral_leaves_its_window_out():
    source = {
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "rms_norm_eps": 1e-5,
        "vocab_size": 32000,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert from_huggingface(source) == preset("mistral-7b-v0.1")
    assert from_huggingface({**source, "sliding_window": None}).window is None
    assert from_huggingface(source).attention_options(0) == {"local_window_size": (4095, None)}


GEMMA_2_2B = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 107],
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 256000,
}


def test_config_json_of_gemma_2():
    """It ties its embeddings without saying so. Caps may be null; `layer_types` may name other global layers."""
    config = from_huggingface(GEMMA_2_2B)
    assert config == preset("gemma-2-2b")
    assert config.attention_options(0) == {"local_window_size": (4095, None), "scale": 1 / 16, "logits_soft_cap": 50.0}
    assert config.attention_options(1) == {"scale": 1 / 16, "logits_soft_cap": 50.0}
    uncapped = from_huggingface({**GEMMA_2_2B, "attn_logit_softcapping": None, "final_logit_softcapping": None})
    assert (uncapped.attention_soft_cap, uncapped.logit_soft_cap) == (None, None)
    by_type = {**GEMMA_2_2B, "layer_types": ["full_attention", "sliding_attention"] * 13}
    assert from_huggingface(by_type).global_layers == tuple(range(0, 26, 2))
    left_out = {key: value for key, value in GEMMA_2_2B.items() if not key.endswith("softcapping")}
    assert from_huggingface(left_out) == config


GEMMA_3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}


def test_config_json_of_gemma_3():
    """Five layers with the window to one without, each kind with its own rotation; as transformers 4 and 5 write it."""
    config = from_huggingface(GEMMA_3_1B)
    assert config == preset("gemma-3-1b")
    assert [config.window_of(layer) for layer in range(4, 7)] == [512, None, 512]
    scaled = dataclasses.replace(config, rope_linear_factor=8.0)
    assert from_huggingface({**GEMMA_3_1B, "rope_scaling": {"rope_type": "linear", "factor": 8}}) == scaled
    ropes = ("rope_local_base_freq", "rope_scaling", "rope_theta", "sliding_window_pattern")
    written_by_5 = {key: value for key, value in GEMMA_3_1B.items() if key not in ropes}
    written_by_5["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    assert from_huggingface(written_by_5) == scaled


def test_config_json_of_a_gemma_that_reads_images_has_its_text_model_as_a_part():
    """Such a file leaves out what its family has by default. Stop tokens are those of the whole file."""
    source = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "model_type": "gemma3",
        "text_config": {
            "eos_token_id": 1,
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
    }
    assert from_huggingface(source) == preset("gemma-3-4b")
    with pytest.raises(ValueError, match="text_config must be an object or null, got 3"):
        from_huggingface({**source, "text_config": 3})
    with pytest.raises(ValueError, match="hidden_size is missing"):
        from_huggingface({**source, "text_config": None})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("rope_scaling", {"rope_type": "yarn", "factor": 8}, "rope_type must be 'default' or 'linear', got 'yarn'"),
        ("rope_scaling", {"rope_type": "linear"}, "factor is missing"),
        ("rope_scaling", {"rope_type": "linear", "factor": 0}, "factor must be a number above 0, got 0"),
        (
            "rope_parameters",
            {"rope_type": "default"},
            r"rope_parameters must be one of \['full_attention', .*'rope_type'",
        ),
        (
            "rope_parameters",
            {"sliding_attention": {"rope_type": "linear", "factor": 8}},
            "rope_type must be 'default' for sliding_attention, got 'linear'",
        ),
        ("rope_local_base_freq", None, "rope_local_base_freq is missing"),
        ("rope_local_base_freq", "1", "rope_local_base_freq must be a number above 0, got '1'"),
        ("sliding_window_pattern", 0, "sliding_window_pattern must be an integer of 1 or more, got 0"),
        ("sliding_window", None, "sliding_window must be an integer of 1 or more, got None"),
        ("attn_logit_softcapping", 50.0, "attn_logit_softcapping must be one of"),
    ],
)
def test_config_json_of_another_gemma_3_is_refused_by_field(field, value, message):
    with pytest.raises(ValueError, match=message):
        from_huggingface({**GEMMA_3_1B, field: value})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_activation", "silu", r"hidden_activation must be one of \['gelu_pytorch_tanh'\], .*, got 'silu'"),
        ("attn_logit_softcapping", -1, "attn_logit_softcapping must be a number above 0, got -1"),
        ("final_logit_softcapping", "30", "final_logit_softcapping must be a number above 0, got '30'"),
        ("query_pre_attn_scalar", 0, "query_pre_attn_scalar must be a number above 0, got 0"),
        ("use_bidirectional_attention", True, "use_bidirectional_attention must be one of"),
    ],
)
def test_config_json_of_another_gemma_is_refused_by_field(field, value, message):
    with pytest.raises(ValueError, match=message):
        from_huggingface({**GEMMA_2_2B, field: value})


@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe", "qwen3_moe", "gpt2", ["llama"]])
def test_another_family_is_refused_by_name(model_type):
    with pytest.raises(
        ValueError, match=r"model_type must be one of \['llama', .*'qwen3'.*\], .*, got .*" + model_type[0]
    ):
        from_huggingface({**QWEN_2_5_7B, "model_type": model_type})


# What `config.json` of gpt-oss-20b has beside the sizes.
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "model_type": "gpt_oss",
    "num_experts_per_tok": 4,
    "num_local_experts": 32,
    "quantization_config": {"quant_method": "mxfp4"},
    "sliding_window": 128,
}


@pytest.mark.parametrize(
    "source",
    [
        GPT_OSS,
        {"model_type": "gpt_oss"},
        {"model_type": "mixtral", "num_local_experts": 8},
        {"model_type": "qwen3_moe", "num_experts": 128},
    ],
)
def test_a_mixture_of_experts_is_refused_as_such(source):
    """It has no other fault to mend: the message says no word about biases or quantized weights."""
    message = "MLPs are dense; this one is a mixture of experts, got '{}'"
    with pytest.raises(
        ValueError, match=r"model_type must be one of \['llama', .*" + message.format(source["model_type"])
    ):
        from_huggingface(source)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("attention_bias", True, r"attention_bias must be .*, got True"),
        ("use_sliding_window", 1, "use_sliding_window must be one of"),
        ("max_window_layers", "3", "max_window_layers must be an integer of 0 or more, got '3'"),
        ("num_hidden_layers", 10**9, "num_hidden_layers must be at most 10000 where layers differ, got 1000000000"),
        ("sliding_window", 0, "sliding_window must be an integer of 1 or more, got 0"),
        (
            "layer_types",
            ["full_attention"],
            r"layer_types must be a list of 28 names, each one of \['full_attention', ",
        ),
        ("layer_types", ["chunked_attention"] * 28, r"layer_types must be a list of 28 names, each one of"),
    ],
)
def test_config_json_of_another_qwen_is_refused_by_field(field, value, message):
    source = {**QWEN_2_5_7B, "model_type": "qwen3", "architectures": None, "use_sliding_window": True}
    with pytest.raises(ValueError, match=message):
        from_huggingface({**source, field: value})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model_type", "mixtral", r"model_type must be .*, got 'mixtral'"),
        (
            "architectures",
            ["LlamaForSequenceClassification"],
            r"architectures must be .*, got 'LlamaForSeq",
        ),
        ("hidden_act", "gelu", r"hidden_act must be .*, got 'gelu'"),
        ("attention_bias", True, r"attention_bias must be .*, got True"),
        ("mlp_bias", True, r"mlp_bias must be .*, got True"),
        ("quantization_config", {"bits": 4}, "quantization_config"),
        ("rope_scaling", {"rope_type": "yarn", "factor": 2.0}, "rope_type must be 'default' or 'llama3', got 'yarn'"),
        ("rope_scaling", {"type": "linear", "factor": 2.0}, "rope_type must be 'default' or 'llama3', got 'linear'"),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}, "low_freq_factor is missing"),
        (
            "rope_scaling",
            {"rope_type": "default", "partial_rotary_factor": 0.5},
            r"rotary_factor must be .*, got 0.5",
        ),
        ("hidden_size", None, "hidden_size is missing"),
        ("vocab_size", "many", "vocab_size must be an integer of 1 or more, got 'many'"),
        ("num_key_value_heads", 5, "num_attention_heads must be a multiple of num_key_value_heads=5, got 32"),
        ("num_key_value_heads", 0, "num_key_value_heads must be an integer of 1 or more, got 0"),
        ("num_attention_heads", 0, "num_attention_heads must be an integer of 1 or more, got 0"),
        ("num_hidden_layers", 2**63, "num_hidden_layers must be at most 2147483647"),
        ("hidden_size", "32", "hidden_size must be an integer of 1 or more, got '32'"),
        ("max_position_embeddings", 131072.0, "max_position_embeddings must be an integer of 1 or more"),
        ("tie_word_embeddings", "false", "tie_word_embeddings must be true or false, got 'false'"),
        ("tie_word_embeddings", 1, "tie_word_embeddings must be true or false, got 1"),
        ("attention_bias", 0, "attention_bias must be one of"),
        ("architectures", 1.0, "architectures must be a list of names, got 1.0"),
        ("rms_norm_eps", {}, "rms_norm_eps must be a number above 0, got {}"),
        ("rms_norm_eps", float("inf"), "rms_norm_eps must be a finite number that float32 holds, got inf"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps must be a number above 0, got nan"),
        ("rope_theta", float("inf"), "rope_theta must be a finite number that float32 holds, got inf"),
        ("rope_theta", 10**400, "rope_theta must be a finite number that float32 holds"),
        ("rope_theta", None, "rope_theta must be a number above 0, got None"),
        ("rope_theta", "500000", "rope_theta must be a number above 0, got '500000'"),
        ("rope_scaling", "llama3", "rope_scaling must be an object or null, got 'llama3'"),
        (
            "rope_scaling",
            {**LLAMA_3_2_1B["rope_scaling"], "original_max_position_embeddings": 0.5},
            "original_max_position_embeddings must be an integer of 1 or more, got 0.5",
        ),
        ("eos_token_id", "2", "eos_token_id must be an integer, got '2'"),
        ("eos_token_id", True, "eos_token_id must be an integer, got True"),
        ("eos_token_id", 2.0, "eos_token_id must be an integer, got 2.0"),
        ("eos_token_id", [2, {}], "eos_token_id must be an integer, got {}"),
        ("bos_token_id", 128256, r"bos_token_id must be in \[0, vocab_size=128256\), got 128256"),
    ],
)
def test_config_json_of_another_model_is_refused_by_field(field, value, message):
    with pytest.raises(ValueError, match=message):
        from_huggingface({**LLAMA_3_2_1B, field: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers must be an integer of 1 or more, got 0"),
        ({"hidden_size": 2.5}, "hidden_size must be an integer of 1 or more, got 2.5"),
        ({"num_heads": True}, "num_heads must be an integer of 1 or more, got True"),
        ({"num_heads": 3}, "num_heads must be a multiple of num_kv_heads=2, got 3"),
        ({"head_dim": 7}, r"head_dim must be even, .*, got 7"),
        ({"rope_theta": -1.0}, "rope_theta must be a number above 0, got -1.0"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps must be a number above 0, got 0.0"),
        ({"tie_embeddings": "no"}, "tie_embeddings must be true or false, got 'no'"),
        ({"rope_scaling": {"factor": 8.0}}, "rope_scaling must be a Llama3RopeScaling or None"),
        ({"query_key_norm": 1}, "query_key_norm must be true or false, got 1"),
        ({"activation": "relu"}, r"activation must be one of \['silu', 'gelu_tanh'\], got 'relu'"),
        ({"attention_soft_cap": 0}, "attention_soft_cap must be a number above 0, got 0"),
        ({"window": 0}, "window must be an integer of 1 or more, got 0"),
        ({"global_layers": (2,)}, r"global_layers must be a tuple of layers below num_layers=2, got \(2,\)"),
        ({"eos_token_ids": [2]}, r"eos_token_ids must be a tuple of token ids, got \[2\]"),
        ({"eos_token_ids": (64,)}, r"eos_token_ids must be in \[0, vocab_size=64\), got 64"),
    ],
)
def test_config_checks_itself(tiny_config: LlamaConfig, changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(tiny_config, **changes)


def test_rope_scaling_checks_itself():
    with pytest.raises(ValueError, match="factor must be a number above 0, got 0"):
        Llama3RopeScaling(factor=0)
    with pytest.raises(ValueError, match=r"high_freq_factor must be above low_freq_factor=1.0, got 1.0"):
        Llama3RopeScaling(factor=8.0, high_freq_factor=1.0)


def test_an_unknown_preset_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"name must be one of 'llama-2-7b', .*'mistral-7b-v0.3', .*got 'llama-4'"):
        preset("llama-4")
