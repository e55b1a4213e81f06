"""The families that share a Llama's shape against transformers: tiny random models, prefill and every step to 1e-5."""

import jax.numpy as jnp
import numpy as np
import pytest

from tree_attn.models.llama import Generator, Llama, by_name
from tree_attn.models.llama.checkpoint import huggingface as weights

REASON = "needs torch and transformers: pip install torch==2.13.0 transformers accelerate"
torch = pytest.importorskip("torch", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)

PLACES = [("tree", 2), ("ring", 2), ("single", 1)]
PROMPTS, NUM_TOKENS = ((23, 1, 11), 8)

# The class of each family's configuration, and what it has of its own. Windows are shorter than the longest prompt, and
# than the new tokens. Caches keep a window of 6 over one or two devices, and one of 5 over one only.
FAMILIES = {
    "qwen2": ("Qwen2", dict(num_key_value_heads=2, tie_word_embeddings=True)),
    "qwen2_window": (
        "Qwen2",
        dict(num_key_value_heads=2, use_sliding_window=True, sliding_window=6, max_window_layers=1),
    ),
    "qwen3": ("Qwen3", dict(num_key_value_heads=2, head_dim=24)),
    "mistral": ("Mistral", dict(num_key_value_heads=2, sliding_window=6)),
    # Caps and scale that bend these small logits. The embedding of a padding token would be all zeros.
    "gemma2": (
        "Gemma2",
        dict(
            num_key_value_heads=2,
            head_dim=24,
            sliding_window=5,
            pad_token_id=None,
            query_pre_attn_scalar=6,
            attn_logit_softcapping=1.5,
            final_logit_softcapping=2.0,
        ),
    ),
    # Thetas so small that they and the factor show within the prompts.
    "gemma3": (
        "Gemma3Text",
        dict(
            num_key_value_heads=2,
            head_dim=24,
            sliding_window=6,
            pad_token_id=None,
            query_pre_attn_scalar=6,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
            },
        ),
    ),
}


@pytest.fixture(scope="module")
def family_reference(tmp_path_factory):
    """`family_reference(name)`: a random transformers model of a family, and the folder it was saved to."""
    saved = {}

    def make(name: str):
        if name not in saved:
            saved[name] = _save(name, tmp_path_factory.mktemp(name))
        return saved[name]

    return make


def _save(name: str, folder):
    class_name, options = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{class_name}Config")(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=64,
        max_position_embeddings=64,
        # What transformers initialises to 0 or 1 has to differ from that, so that it shows.
        initializer_range=0.1,
        eos_token_id=2,
        attn_implementation="eager",
        **options,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model, folder


SLOW = [("qwen2_window", "ring"), ("qwen2_window", "single")]
CASES = [
    pytest.param(name, *place, marks=[pytest.mark.slow] * ((name, place[0]) in SLOW))
    for name in FAMILIES
    for place in PLACES
]


@pytest.mark.parametrize(("name", "attention", "num_devices"), CASES)
def test_a_family_gives_transformers_logits_in_prefill_and_in_each_step(
    family_reference, sharding_over, name, attention, num_devices
):
    reference, folder = family_reference(name)
    config = weights.read_config(folder)
    sharding = sharding_over(config, num_devices)
    model = Llama(config, sharding, weights.from_safetensors(folder, sharding, jnp.float32))
    generator = Generator(model, by_name(attention, sharding))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 64, size=length).tolist() for length in PROMPTS]
    steps = list(generator.stream(prompts, NUM_TOKENS))
    for row, prompt in enumerate(prompts):
        new_ids = [int(step.tokens[row]) for step in steps]
        with torch.no_grad():
            expected = reference(torch.tensor([prompt + new_ids[:-1]])).logits[0, len(prompt) - 1 :].numpy()
        actual = np.stack([np.asarray(step.logits[row]) for step in steps])
        assert np.abs(expected).max() > 0.5
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)
