"""Every test sees eight CPU devices and JAX's strictest promotion rules (they hide shape and dtype bugs).

`TREE_ATTN_TEST_GPU=1 python3 -m pytest tests/local -k gpu` runs the tests that need a GPU, on one.
"""

import os

import jax

if not os.environ.get("TREE_ATTN_TEST_GPU"):
    # Also where there are GPUs: fewer than eight of them would not do.
    jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
