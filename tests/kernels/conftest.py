"""Fixtures of tests that run kernels in Mosaic GPU's interpreter."""

import jax
import mma_threads
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from lean_interpreter import set_layout

from tree_attn.local import mosaic_gpu


@pytest.fixture
def small_layout(time_limit, monkeypatch):
    """Sets five CTAs: they divide no number of KV tiles here, so runs begin and end within output tiles."""
    set_layout(monkeypatch)
    monkeypatch.setattr(mosaic_gpu, "unavailable", lambda: None)


@pytest.fixture
def fresh_traces():
    """Clears JAX's traces, before and after a test that replaces a kernel's code.

    `jax.jit` keeps them by shapes and layout, and would give this test's to another test, or another's to this one.
    """
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.fixture
def watched_products(monkeypatch, fresh_traces):
    """Has registers read the tensor core's operands too, by the proxy through which it reads them.

    The race detector does not see the reads of the tensor core itself.
    """
    wgmma = plgpu.wgmma

    def watched(acc_ref, left, right):
        _ = left[...], right[...]
        plgpu.commit_smem()
        wgmma(acc_ref, left, right)

    monkeypatch.setattr(plgpu, "wgmma", watched)


@pytest.fixture
def memory(monkeypatch):
    """Shared memory of 128 threads in NumPy, which run what kernels emit."""
    with mma_threads.threads(monkeypatch) as memory:
        yield memory
