"""A call of the chain of products between the attention of two layers, checked and planned: the entry for models."""

import dataclasses
import math
from typing import Any

import jax

from tree_attn.kernels.few_rows_call import places_of_rows
from tree_attn.kernels.few_rows_chain import multiply_chain
from tree_attn.kernels.few_rows_chain_layout import chain_configs
from tree_attn.kernels.few_rows_layout import FewRowsConfig, FewRowsShape, Heads, unsupported, unsupported_cache
from tree_attn.kernels.launch_order import runs_kernels_in_order
from tree_attn.kernels.registers import WRITES_IN_PLACE
from tree_attn.kernels.tuning import num_sms


@dataclasses.dataclass(frozen=True, kw_only=True)
class Norm:
    """An RMSNorm as `few_rows_product` takes it: its scale `[D]`, eps, and whether it adds one."""

    scale: Any
    eps: float
    adds_one: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class NextHeads:
    """Queries, keys and values that a chain makes for the next layer's attention; keys and values go to its cache.

    Attributes:
      norm: before the product.
      weights, key, value, slots, cosine_sine: as `few_rows_into_cache` takes them.
    """

    norm: Norm
    weights: Any
    key: Any
    value: Any
    slots: Any
    cosine_sine: tuple[Any, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AfterAttention:
    """The products of a layer after attention, and of the next one before it.

    That is `y = r + (activation(norm(r) W_g^T) * (norm(r) W_u^T)) W_d^T`, of `r = x + attended W_o^T`. Then come the
    next layer's queries, keys and values.

    Attributes:
      attended: `[B, T, N, H]`, of 1 to 16 tokens; x: `[B, T, D]`.
      output: `W_o`, `[D, N, H]`; gate_up: `W_g` and `W_u`, `[2, F, D]`; down: `W_d`, `[D, F]`.
      norm: the MLP's; activation: "silu".
      following: of the next layer; None: there is none, or it does this itself.
      meeting: `tree_attn.reduce.fused.meeting`, where each device has a part of the in-features of `output` and `down`,
        of F, and of the next layer's KV heads; attended, x and the results are the same on all. None: of one device.
    """

    attended: Any
    x: Any
    output: Any
    gate_up: Any
    down: Any
    norm: Norm
    activation: str
    following: NextHeads | None = None
    meeting: tuple[Any, Any] | None = None

    def plan(self) -> tuple[tuple[FewRowsShape, ...], tuple[FewRowsConfig, ...]] | str:
        """Returns the products and their layouts, or why the kernel cannot multiply them in one launch."""
        (batch, tokens, *_), dtype = self.attended.shape, self.output.dtype
        hidden, *heads = self.output.shape
        output = jax.ShapeDtypeStruct((hidden, math.prod(heads)), dtype)
        mlp = _options(self.norm) | {"activation": self.activation, "parts": 2}
        products = [(output, {"has_residual": True}), (self.gate_up, mlp), (self.down, {"has_residual": True})]
        if (following := self.following) is not None:
            num_kv_heads, members, head_dim, in_features = following.weights.shape
            if (reason := unsupported_cache(head_dim, dtype, following.key.dtype)) is not None:
                return reason
            weights = jax.ShapeDtypeStruct((num_kv_heads * members * head_dim, in_features), following.weights.dtype)
            heads = Heads(head_dim=head_dim, group=members - 2, tokens=tokens)
            products.append((weights, _options(following.norm) | {"heads": heads}))
        scales = [norm.scale for norm in (self.norm, following and following.norm) if norm is not None]
        arrays = (self.attended, self.x, *(weights for weights, _ in products), *scales)
        dtypes = {str(array.dtype) for array in arrays}
        if len(dtypes) > 1:
            return f"few rows have one dtype, not {sorted(dtypes)}"
        shapes = []
        for weights, options in products:
            sizes = {"rows": batch * tokens, "out_features": weights.shape[-2], "in_features": weights.shape[-1]}
            has = {"activation": options.get("activation"), "has_norm": "eps" in options}
            if (reason := unsupported(**sizes, dtype=dtype, **has)) is not None:
                return reason
            shapes.append(FewRowsShape(dtype=dtype, out_dtype=dtype, **sizes, **{"parts": 1} | options))
        if jax.__version_info__ < WRITES_IN_PLACE:
            return f"a chain reads what it has written from JAX 0.11 on, not with {jax.__version__}"
        if not runs_kernels_in_order():
            return "a chain's CTAs meet by counts that kernels share, which XLA_FLAGS lets run at once"
        configs = chain_configs(tuple(shapes), num_sms())
        return configs if isinstance(configs, str) else (tuple(shapes), configs)

    def run(self):
        """Computes all of it in one launch.

        With JAX 0.12 or newer weights are read before the previous kernel has ended. No kernel of the program may write
        them.

        Returns:
          `y`, `[B, T, D]`; and, with `following`, what `few_rows_into_cache` returns.

        Raises:
          ValueError: the kernel cannot multiply these.
        """
        planned = self.plan()
        if isinstance(planned, str):
            raise ValueError(planned)
        shapes, configs = planned
        rank, buffers = self.meeting or (None, None)
        options = dict(shapes=shapes, configs=configs, rank=rank, buffers=buffers)
        x, following, rows = self.x, self.following, shapes[0].rows
        arrays = self.attended.reshape(rows, -1), x.reshape(rows, -1)
        output = self.output.reshape(1, self.output.shape[0], -1)
        weights, scales = (output, self.gate_up, self.down[None]), (None, self.norm.scale, None)
        if following is None:
            y = multiply_chain(*arrays, weights, scales, **options)
            return y.reshape(x.shape)
        weights += (following.weights.reshape(1, -1, x.shape[-1]),)
        places = places_of_rows(following.cosine_sine, following.slots, shapes[-1])
        scales, heads = (*scales, following.norm.scale), (*places, following.key, following.value)
        y, query, key, value = multiply_chain(*arrays, weights, scales, heads, **options)
        return y.reshape(x.shape), query.reshape(*x.shape[:2], *query.shape[1:]), key, value


def _options(norm: Norm) -> dict[str, Any]:
    return {"eps": norm.eps, "adds_one": norm.adds_one}
