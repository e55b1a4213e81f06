"""Calls of chains, checked and planned: what lies between the attention of two layers, or a whole layer.

This is the entry for models.
"""

import dataclasses
import math
from typing import Any

import jax

from tree_attn.kernels.epilogue import PARTIALS_AT_ONCE
from tree_attn.kernels.few_rows_broadcast import MAX_ROWS
from tree_attn.kernels.few_rows_call import places_of_rows
from tree_attn.kernels.few_rows_chain import multiply_chain
from tree_attn.kernels.few_rows_chain_attention import AttentionLayout, keys_of_stage, unsupported_attention
from tree_attn.kernels.few_rows_chain_layout import chain_configs, num_ctas, tells_all_reads
from tree_attn.kernels.few_rows_layout import FewRowsConfig, FewRowsShape, Heads, unsupported, unsupported_cache
from tree_attn.kernels.interpreter import is_interpreted
from tree_attn.kernels.launch_order import runs_kernels_in_order
from tree_attn.kernels.lean_call import lean_shape, plan_call
from tree_attn.kernels.lean_layout import LeanConfig, partial_spans
from tree_attn.kernels.registers import WRITES_IN_PLACE
from tree_attn.kernels.tuning import num_sms


class Unchained(ValueError):
    """One launch cannot do it; the message says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Norm:
    """An RMSNorm as `few_rows_product` takes it: its scale `[D]`, eps, and whether it adds one."""

    scale: Any
    eps: float
    adds_one: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewHeads:
    """Queries, keys and values of new tokens, which a chain makes for a layer's attention.

    Keys and values go to the layer's cache.

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

    def unsupported(self, dtype) -> str | None:
        """Returns why a chain cannot make them, or None."""
        return unsupported_cache(self.weights.shape[2], dtype, self.key.dtype)

    def product(self, tokens: int) -> tuple[Any, dict[str, Any]]:
        """Returns the shape of the weights, and what is special about their product, for so many of a sequence."""
        num_kv_heads, members, head_dim, in_features = self.weights.shape
        weights = jax.ShapeDtypeStruct((num_kv_heads * members * head_dim, in_features), self.weights.dtype)
        heads = Heads(head_dim=head_dim, group=members - 2, tokens=tokens)
        return weights, _options(self.norm) | {"heads": heads}

    def operands(self, shape: FewRowsShape) -> tuple[Any, ...]:
        """Returns angles, slots, keys and values as `multiply_chain` takes them."""
        return *places_of_rows(self.cosine_sine, self.slots, shape), self.key, self.value


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Chain:
    """The products of a layer after attention: `y = r + (activation(norm(r) W_g^T) * (norm(r) W_u^T)) W_d^T`.

    There `r = x + attended W_o^T`.

    Attributes:
      x: `[B, T, D]`, of 1 to 16 tokens.
      output: `W_o`, `[D, N, H]`; gate_up: `W_g` and `W_u`, `[2, F, D]`; down: `W_d`, `[D, F]`.
      norm: the MLP's; activation: "silu".
      meeting: `tree_attn.reduce.fused.meeting`, where each device has a part of the in-features of `output` and `down`,
        of F, and of KV heads that are made; attended, x and the results are the same on all. None: of one device.
    """

    x: Any
    output: Any
    gate_up: Any
    down: Any
    norm: Norm
    activation: str
    meeting: tuple[Any, Any] | None = None

    @property
    def _after(self) -> list[tuple[Any, dict[str, Any]]]:
        hidden, *heads = self.output.shape
        output = jax.ShapeDtypeStruct((hidden, math.prod(heads)), self.output.dtype)
        mlp = _options(self.norm) | {"activation": self.activation, "parts": 2}
        return [(output, {"has_residual": True}), (self.gate_up, mlp), (self.down, {"has_residual": True})]

    def _shapes(self, products: list, arrays: list) -> tuple[FewRowsShape, ...] | str:
        """Returns the shapes of products, of `arrays` and others, or why there can be no chain of them."""
        dtype, rows = self.output.dtype, math.prod(self.x.shape[:-1])
        dtypes = {str(array.dtype) for array in (self.x, *arrays, *(weights for weights, _ in products))}
        if len(dtypes) > 1:
            return f"few rows have one dtype, not {sorted(dtypes)}"
        shapes = []
        for weights, options in products:
            sizes = {"rows": rows, "out_features": weights.shape[-2], "in_features": weights.shape[-1]}
            has = {"activation": options.get("activation"), "has_norm": "eps" in options}
            if (reason := unsupported(**sizes, dtype=dtype, **has)) is not None:
                return reason
            shapes.append(FewRowsShape(dtype=dtype, out_dtype=dtype, **sizes, **{"parts": 1} | options))
        if jax.__version_info__ < WRITES_IN_PLACE:
            return f"a chain reads what it has written from JAX 0.11 on, not with {jax.__version__}"
        if not runs_kernels_in_order():
            return "a chain's CTAs meet by counts that kernels share, which XLA_FLAGS lets run at once"
        return tuple(shapes)

    def _flat(self, x):
        return x.reshape(math.prod(self.x.shape[:-1]), -1)

    @property
    def _may_be_compact(self) -> bool:
        """Returns whether x need not be padded; over devices that was not timed, and the interpreter cannot."""
        return self.meeting is None and not is_interpreted()

    @property
    def _weights(self) -> tuple[Any, ...]:
        return self.output.reshape(1, self.output.shape[0], -1), self.gate_up, self.down[None]

    @property
    def _scales(self) -> tuple[Any, ...]:
        return None, self.norm.scale, None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AfterAttention(_Chain):
    """The products of a layer after attention, and then the next one's queries, keys and values.

    Attributes:
      attended: `[B, T, N, H]`.
      following: of the next layer; None: there is none, or it does this itself.
      others: of `_Chain`.
    """

    attended: Any
    following: NewHeads | None = None

    def plan(self) -> tuple[tuple[FewRowsShape, ...], tuple[FewRowsConfig, ...]] | str:
        """Returns the products and their layouts, or why the kernel cannot multiply them in one launch."""
        products, arrays = self._after, [self.attended, self.norm.scale]
        if (following := self.following) is not None:
            if (reason := following.unsupported(self.output.dtype)) is not None:
                return reason
            products.append(following.product(self.x.shape[1]))
            arrays.append(following.norm.scale)
        shapes = self._shapes(products, arrays)
        if isinstance(shapes, str):
            return shapes
        configs = chain_configs(shapes, num_sms(), may_be_compact=self._may_be_compact)
        return configs if isinstance(configs, str) else (shapes, configs)

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
        x, following = self.x, self.following
        arrays = self._flat(self.attended), self._flat(x)
        if following is None:
            return multiply_chain(*arrays, self._weights, self._scales, **options).reshape(x.shape)
        weights = *self._weights, following.weights.reshape(1, -1, x.shape[-1])
        scales = *self._scales, following.norm.scale
        heads = following.operands(shapes[-1])
        y, query, key, value = multiply_chain(*arrays, weights, scales, heads, **options)
        return y.reshape(x.shape), query.reshape(*x.shape[:2], *query.shape[1:]), key, value


@dataclasses.dataclass(frozen=True, kw_only=True)
class WholeLayer(_Chain):
    """A layer, of one token for each sequence: queries, keys and values, attention to the cache, and what follows.

    Attributes:
      heads: of the layer.
      spans: first and end of the slots that each query sees when the new tokens are in the cache, as
        `lean_call.plan_call` takes them.
      scale, logits_soft_cap: of attention.
      exchange: merges with the states of other devices (`tree_attn.reduce.fused.Exchange`), or None.
      others: of `_Chain`.
    """

    heads: NewHeads
    spans: tuple[Any, Any] | None
    scale: float
    logits_soft_cap: float | None = None
    exchange: Any = None

    @property
    def all_weights(self) -> tuple[Any, ...]:
        """Returns those of all products, `[parts, O, I]`."""
        return self.heads.weights.reshape(1, -1, self.x.shape[-1]), *self._weights

    @property
    def all_scales(self) -> tuple[Any, ...]:
        """Returns the scale of each product's norm, or None."""
        return self.heads.norm.scale, *self._scales

    def plan(self) -> tuple[tuple[FewRowsShape, ...], tuple[FewRowsConfig, ...], AttentionLayout, dict] | str:
        """Returns products and layouts, attention's layout and its tables; or why one launch cannot do the layer."""
        batch, tokens, _ = self.x.shape
        heads = self.heads
        if tokens > 1 or batch > MAX_ROWS:
            return f"a chain attends with one query of each of up to {MAX_ROWS} sequences, not {tokens} of {batch}"
        if is_interpreted():
            return "a chain's CTAs meet, which the interpreter has no atomics for"
        if (reason := heads.unsupported(self.output.dtype)) is not None:
            return reason
        shapes = self._shapes([heads.product(tokens), *self._after], [self.norm.scale, heads.norm.scale])
        if isinstance(shapes, str):
            return shapes
        group, num_kv_heads, head_dim = heads.weights.shape[1] - 2, *heads.key.shape[2:]
        query = jax.ShapeDtypeStruct((batch, tokens, num_kv_heads * group, head_dim), self.x.dtype)
        num_slots = heads.key.shape[1]
        options = dict(num_slots=num_slots, scale=self.scale, logits_soft_cap=self.logits_soft_cap)
        lean = lean_shape(query, heads.key, **options)
        if (reason := unsupported_attention(lean, group)) is not None:
            return reason
        configs = chain_configs(shapes, num_sms(), attention=lean, may_be_compact=self._may_be_compact)
        if isinstance(configs, str):
            return configs
        if not tells_all_reads(shapes, configs, has_attention=True):
            return f"a chain needs out-features in all tiles of the output, which {shapes[1].out_features} do not fill"
        config = LeanConfig(
            block_kv=keys_of_stage(head_dim), num_stages=configs[0].num_stages, num_ctas=num_ctas(configs),
            short_runs=PARTIALS_AT_ONCE,
        )  # fmt: skip
        call = plan_call(query, heads.key, self.spans, config=config, leaves_partials=True, **options)
        tables = {name: table for name, table in call.tables.items() if table is not None}
        tables |= {"spans": partial_spans(call.shape, config, tables)}
        layout = AttentionLayout(shape=call.shape, config=config, group=group)
        if self.exchange is not None:
            result = jax.ShapeDtypeStruct((lean.num_output_tiles, group, head_dim), lean.dtype)
            count, _ = layout.partials
            if self.exchange.epilogue(result, config.num_ctas, count, lean.padded_head_dim) is None:
                return "a chain's attention exchanges as many partial states as have room"
            layout = dataclasses.replace(layout, buffers=self.exchange.buffers)
        return shapes, configs, layout, tables

    def run(self):
        """Computes the layer in one launch.

        With JAX 0.12 or newer weights are read before the previous kernel has ended. No kernel of the program may write
        them.

        Returns:
          `y`, `[B, 1, D]`, and the cache's keys and values.

        Raises:
          Unchained: one launch cannot do the layer.
        """
        planned = self.plan()
        if isinstance(planned, str):
            raise Unchained(planned)
        shapes, configs, layout, tables = planned
        rank, buffers = self.meeting or (None, None)
        x = self._flat(self.x)
        y, key, value = multiply_chain(
            x, x, self.all_weights, self.all_scales, self.heads.operands(shapes[0]), rank, tables,
            shapes=shapes, configs=configs, attention=layout, buffers=buffers,
        )  # fmt: skip
        return y.reshape(self.x.shape), key, value


def _options(norm: Norm) -> dict[str, Any]:
    return {"eps": norm.eps, "adds_one": norm.adds_one}
