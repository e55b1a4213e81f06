"""Every test sees eight CPU devices and JAX's strictest promotion rules (they hide shape and dtype bugs)."""

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
