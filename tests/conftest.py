"""Every test sees eight CPU devices and JAX's strictest promotion rules (they hide shape and dtype bugs).

`TREE_ATTN_TEST_GPU=1 python3 -m pytest tests/local -k gpu` runs the tests that need a GPU, on one.
"""

import os

import jax
import pytest

ON_CPU = not os.environ.get("TREE_ATTN_TEST_GPU")
if ON_CPU:
    # Also where there are GPUs: fewer than eight of them would not do.
    jax.config.update("jax_platforms", "cpu")
# LLVM's, which the CPU's code is made with: most of a test is the compilation of programs that run once. XLA's own
# passes stay as they are, and so does what the tests read in the compiled program.
jax.config.update("jax_disable_most_optimizations", ON_CPU)
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(scope="module")
def optimized():
    """For SmolLM2, which runs for longer than it takes to compile: three times as long without LLVM's optimizations."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", ON_CPU)
