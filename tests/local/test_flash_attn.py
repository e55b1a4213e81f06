"""flash-attn-jax: its absence on any machine, shapes and lowering where the package is, the result on a GPU."""

import importlib
import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_attention

from tree_attn import Shard, SoftmaxState, attend
from tree_attn.arguments import AttentionOptions
from tree_attn.local import flash_attn
from tree_attn.masking import visibility

is_installed = importlib.util.find_spec("flash_attn_jax") is not None
needs_package = pytest.mark.skipif(not is_installed, reason=f"runs where the package is: {flash_attn.INSTALL}")
needs_gpu = pytest.mark.skipif(
    not is_installed or jax.default_backend() != "gpu",
    reason=f"runs with TREE_ATTN_TEST_GPU=1 where JAX finds a CUDA GPU and the package is: {flash_attn.INSTALL}",
)
INSTALL = re.escape("pip install --no-deps flash-attn-jax==0.6.2")


def shapes(dtype=jnp.bfloat16, head_dim=64, value_dim=None, keys=48, stored_dtype=None):
    stored = lambda *shape: jax.ShapeDtypeStruct(shape, stored_dtype or dtype)
    query = jax.ShapeDtypeStruct((2, 3, 4, head_dim), dtype)
    return query, stored(2, keys, 2, head_dim), stored(2, keys, 2, value_dim or head_dim)


def view_of(query, key, **options):
    return visibility(
        AttentionOptions(**options),
        batch=query.shape[0],
        num_queries=query.shape[1],
        num_slots=key.shape[1],
        shard=Shard(),
    )


def test_absence_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    query = jnp.zeros((1, 1, 1, 8), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=f"flash-attn-jax is not installed.*{INSTALL}"):
        attend(query, query, query, implementation="flash_attn")


def test_a_missing_library_says_which_and_how_to_install_it(monkeypatch):
    def without_cuda_runtime(name):
        raise ImportError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name.startswith("nvidia") else object())
    monkeypatch.setattr(importlib, "import_module", without_cuda_runtime)
    with pytest.raises(ImportError, match=f"does not load .*libcudart.so.12.*{INSTALL}"):
        flash_attn.load()


@pytest.mark.parametrize(
    "arrays, soft_cap, options, named",
    [
        (shapes(), 2.0, {}, "logits_soft_cap"),
        (shapes(), None, {"key_value_seq_lengths": np.array([1, 2])}, "key_value_seq_lengths"),
        (shapes(), None, {"is_causal": True}, "is_causal"),
        (shapes(), None, {"local_window_size": 3}, "local_window_size"),
        (shapes(dtype=jnp.float32), None, {}, "dtype .* not float32"),
        (shapes(head_dim=264), None, {}, "head dim up to 256, not 264"),
        (shapes(value_dim=32), None, {}, "head dim .* 32"),
        (shapes(keys=0), None, {}, "S = 0"),
        (shapes(stored_dtype=jnp.float8_e4m3fn), None, {}, "float8_e4m3fn key and value"),
    ],
)
def test_what_it_cannot_do_is_named(arrays, soft_cap, options, named):
    reason = flash_attn.unsupported(*arrays, logits_soft_cap=soft_cap, visible=view_of(*arrays[:2], **options))
    assert re.search(f"flash_attn .*{named}", reason)


def test_what_it_can_do_is_not_refused():
    arrays = shapes(head_dim=256)
    assert flash_attn.unsupported(*arrays, logits_soft_cap=None, visible=view_of(*arrays[:2])) is None


def call_adapter(query, key, value):
    return flash_attn.attend(query, key, value, scale=0.5, logits_soft_cap=None, visible=view_of(query, key))


@needs_package
def test_package_imports_and_gives_the_state_of_every_module_boundary():
    assert flash_attn.load().__name__ == "flash_attn_jax.flash_fwd"
    state = jax.eval_shape(call_adapter, *shapes())
    assert isinstance(state, SoftmaxState)
    assert (state.out.shape, state.out.dtype) == ((2, 3, 4, 64), jnp.bfloat16)
    assert (state.lse.shape, state.lse.dtype) == ((2, 3, 4), jnp.float32)


@needs_package
def test_package_lowers_to_its_kernel_for_cuda(monkeypatch):
    monkeypatch.setattr(flash_attn, "_sm_count", lambda: 132)  # asked of the GPU, which is not here
    lowered = jax.jit(lambda *arrays: call_adapter(*arrays)).trace(*shapes()).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert re.search(r"custom_call @flash_mha_fwd\(", text)
    assert re.search(r"softmax_scale = 5.0*e-01", text) and "is_causal = false" in text


@needs_package
@pytest.mark.skipif(jax.default_backend() == "gpu", reason="runs where JAX finds no GPU")
def test_package_without_a_gpu_says_so():
    with pytest.raises(NotImplementedError, match="flash_attn needs a CUDA GPU"):
        attend(*(jnp.zeros(x.shape, x.dtype) for x in shapes()), implementation="flash_attn")


@needs_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_on_a_gpu_it_is_attention(dtype):
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=x.shape), dtype) for x in shapes(keys=384)]
    call = jax.jit(lambda *arrays: attend(*arrays, implementation="flash_attn"))
    assert_attention(call(*arrays), *arrays)
    assert "flash_mha_fwd" in call.lower(*arrays).compile().as_text()
