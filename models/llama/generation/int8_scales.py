"""Scales for an int8 cache: the largest keys and values of each head, measured once for a model."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tree_attn.models.llama.attention import Attention
from tree_attn.models.llama.model import Llama
from tree_attn.models.llama.storage import empty_cache

NUM_TOKENS = 512
# SmolLM2's largest keys and values over English text are up to 1.5 and 2 times those over random tokens, but in most
# heads they are not. A larger margin rounds every number more coarsely, a smaller one clips too many.
# docs/log/llama.md: "int8 caches diverge a little less than float8, and both several times as much as bfloat16".
MARGIN = 1.25
LARGEST_INT8 = 127


def cache_scales(
    model: Llama, attention: Attention, *, tokens: np.ndarray | None = None, margin: float = MARGIN
) -> dict[str, jax.Array]:
    """Measures the `key_scale` and `value_scale` of a `KVCache` in int8, by one prefill.

      scale[l, k] = margin max_{t, h} |x[l, t, k, h]| / 127,    x the keys (after RoPE) or the values of these tokens

    They belong to the model and to no prompt. So the stored keys of a sequence do not depend on its batch. A prefix, a
    chunk or an interrupted generation is stored as the whole would be. Values beyond `margin` times the largest of
    these tokens are clipped.

    Args:
      model: makes the keys and values.
      attention: from `attention.by_name`, made with the model's sharding.
      tokens: int32 `[T]`, repeated up to a multiple of the shards; default: `NUM_TOKENS` random ones.
      margin: see above.

    Returns:
      `{"key_scale": ..., "value_scale": ...}`, float32 `[L, K]` each, on every device.

    Raises:
      ValueError: no tokens, or a margin that is not positive.

    Example:
      >>> Generator(model, attention, cache_dtype="int8", cache_scales=cache_scales(model, attention, tokens=my_text))

    Source: static scales from a calibration run, as for quantized KV caches in TensorRT-LLM and vLLM.
    """
    config, sharding = model.config, model.sharding
    if tokens is None:
        tokens = np.random.default_rng(0).integers(0, config.vocab_size, size=min(NUM_TOKENS, config.max_position))
    if len(tokens) == 0 or not margin > 0:
        raise ValueError(f"tokens must be one or more, and margin positive, got {len(tokens)} tokens and {margin=}")
    layout = attention.prompt_layout(len(tokens))
    count = layout.padded_tokens
    cache = empty_cache(config, sharding, batch=1, capacity=count, dtype=model.embedding[...].dtype)
    structure, parameters = nnx.split(model)

    def measure(parameters, tokens, lengths, cache):
        _, cache = nnx.merge(structure, parameters).prefill(tokens, lengths, cache, attention)
        largest = lambda x: jnp.max(jnp.abs(x), axis=(1, 2, 4)).astype(jnp.float32)
        # For a head with nothing but zeros any scale is right, but a division by it must not fail.
        scale = lambda x: jnp.maximum(margin * largest(x) / LARGEST_INT8, jnp.finfo(jnp.float32).tiny)
        return {"key_scale": scale(cache.key), "value_scale": scale(cache.value)}

    laid_out = np.resize(np.asarray(tokens, np.int32), count)[layout.positions][None]
    return jax.jit(measure, out_shardings=NamedSharding(sharding.mesh, P()))(
        parameters,
        sharding.place(laid_out, None, "sequence"),
        sharding.place(np.array([count], np.int32), None),
        cache,
    )
