"""Products with weights, and what goes before and after them, as XLA runs them or a kernel does.

`layers.py` names the operations, and `ForwardContext.products` runs them. XLA's run everywhere. The kernel
(`tree_attn/kernels/few_rows_call.py`) makes one launch of an operation, of 1 to 16 rows on a Hopper GPU. Over several
GPUs it multiplies by the part of a weight that each of them has. XLA multiplies what the kernel cannot.
"""

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tree_attn.models.llama.layer_caches import AnyCache, unwritable, written_by
from tree_attn.models.llama.sharding import LlamaSharding, as_tuple
from tree_attn.reduce import fused
from tree_attn.reduce.activations import exchanges, sum_activations

# By the names in `config.ACTIVATIONS`.
ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True)}
_log = logging.getLogger("tree_attn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Branch:
    """A residual branch: `x + post_norm(f(norm(x)))`.

    Attributes:
      x: `[B, T, D]`.
      norm: before the branch, `layers.RMSNorm`.
      post_norm: after it, or None.
    """

    x: jax.Array
    norm: Callable
    post_norm: Callable | None = None

    def normed(self) -> jax.Array:
        """Returns the input of the branch, `norm(x)`."""
        return self.norm(self.x)

    def plus(self, update: jax.Array) -> jax.Array:
        """Returns x with the branch's result added."""
        return self.x + (update if self.post_norm is None else self.post_norm(update))


def product_of(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Multiplies `[B, T, D]` by `[..., D]` to `[B, T, ...]`.

    All outputs are one axis in the product: XLA on CPU would transpose weights of more axes at every step, which takes
    ten times as long as the product of a single token.
    """
    out = jnp.einsum("btd,fd->btf", x, kernel.reshape(-1, kernel.shape[-1]))
    return out.reshape(*x.shape[:2], *kernel.shape[:-1])


@dataclasses.dataclass(frozen=True)
class XlaProducts:
    """XLA's products; they may be cut over devices."""

    def name_of(self, rows: int) -> str:
        """Returns which of `product_choice.PRODUCTS` multiply so many new tokens at a time."""
        return "xla"

    def unrolls_steps(self, layers: Sequence[Any], x: jax.ShapeDtypeStruct, cache: AnyCache, context: Any) -> bool:
        """Returns whether a step is so few launches that a program has several steps without a loop over them.

        In a loop each step is a CUDA graph of its own. What a step does before its layers then waits for the last
        step's end. But a program without a loop takes longer to compile, by what is compiled of a step.

        Args:
          x: shape and dtype of what the first layer takes; others as of `run_layers`.
        """
        return False

    @property
    def of_shard(self) -> "XlaProducts":
        """The products of a device's own part of the weights, within a `shard_map` over all devices."""
        return self

    def run_layers(self, layers: Sequence[Callable], x: jax.Array, cache: AnyCache, context: Any):
        """Runs layers that lie apart, one after another: maps `x`, `[B, T, D]`, to the same shape, and the cache."""
        for i, layer in enumerate(layers):
            with jax.named_scope(f"layer_{i}"):
                x, cache = layer(x, cache, i, context)
        return x, cache

    def project(self, branch: Branch, kernel: jax.Array) -> jax.Array:
        """Multiplies a branch's input by `[..., D]` to `[B, T, ...]`."""
        return product_of(branch.normed(), kernel)

    def append(
        self, branch: Branch, kernel: jax.Array, cosine_sine: tuple[jax.Array, jax.Array], cache: AnyCache, layer
    ) -> tuple[jax.Array, AnyCache] | None:
        """Makes rotated queries, and writes keys and values of new tokens to the cache, where one launch does all.

        Args:
          kernel: `[K, G + 2, H, D]`; cosine_sine: of `rope.rotation`; layer: number of the layer in the cache.

        Returns:
          Queries `[B, T, N, H]` and the cache; or None: product, rotation and write are operations of their own.
        """
        return None

    def gate(self, branch: Branch, activation: str, kernel: jax.Array) -> jax.Array:
        """Computes `activation(gate(x)) * up(x)` of a branch's input, `[B, T, F]`, by weights `[2, F, D]`."""
        gate_and_up = product_of(branch.normed(), kernel)
        return ACTIVATIONS[activation](gate_and_up[:, :, 0]) * gate_and_up[:, :, 1]

    def add(self, branch: Branch, x: jax.Array, kernel: jax.Array) -> jax.Array:
        """Multiplies `[B, T, F]` by `[D, F]`, and adds it to the branch's `x`, `[B, T, D]`."""
        return branch.plus(jnp.einsum("btf,df->btd", x, kernel))

    def total(
        self, x: jax.Array, kernel: jax.Array, axes: tuple[str, ...], mesh: Mesh, residual: jax.Array | None
    ) -> jax.Array:
        """Multiplies `[B, T, F]` by `[D, F]`, and adds over devices and to a residual, `[B, T, D]`.

        The result is of the residual's dtype, and float32 where there is none.

        Args:
          x, kernel: this device's part of F.
          axes, mesh: of `sum_activations`.
        """
        part = jnp.einsum("btf,df->btd", x, kernel, preferred_element_type=jnp.float32)
        return sum_activations(part, axes, mesh, residual)

    def logits(self, branch: Branch, table: jax.Array) -> jax.Array:
        """Multiplies a branch's input by `[V, D]` to float32 `[B, T, V]`: bfloat16 logits would tie unlike tokens."""
        return jnp.einsum("btd,vd->btv", branch.normed(), table, preferred_element_type=jnp.float32)


@dataclasses.dataclass(frozen=True)
class FewRowsProducts(XlaProducts):
    """Products by the kernel for few rows, which takes norm, gate and residual along; others by XLA.

    The product of query, key and value ends in rotation and the cache's write, where the cache is one for it.

    Attributes:
      is_early: whether weights are read before the previous kernel has ended: no kernel of the program may write them.
      max_rows: with more, XLA multiplies.
    """

    is_early: bool = False
    max_rows: int = 16

    def name_of(self, rows: int) -> str:
        """Does `XlaProducts.name_of`."""
        if rows > self.max_rows:
            return "xla"
        return "mosaic_gpu"

    def project(self, branch: Branch, kernel: jax.Array) -> jax.Array:
        """Does `XlaProducts.project`, in one launch."""
        if self._is_refused("project", branch.x, kernel, norm=branch.norm):
            return super().project(branch, kernel)
        return self._run(branch.x, kernel.reshape(-1, kernel.shape[-1]), kernel.shape[:-1], norm=branch.norm)

    def append(
        self, branch: Branch, kernel: jax.Array, cosine_sine: tuple[jax.Array, jax.Array], cache: AnyCache, layer
    ) -> tuple[jax.Array, AnyCache] | None:
        """Does `XlaProducts.append`, where the cache is of the dtype of `x` and its layers lie apart."""
        from tree_attn.kernels.few_rows_call import few_rows_into_cache
        from tree_attn.kernels.few_rows_layout import unsupported_cache

        if self._is_refused("append", branch.x, kernel, norm=branch.norm):
            return None
        reason = unwritable(cache) or unsupported_cache(kernel.shape[2], branch.x.dtype, cache.arrays.dtype)
        if reason is not None:
            _log.info("products: append by xla: %s", reason)
            return None
        options = _norm_options(branch.norm) | {"is_early": self.is_early}
        write = lambda key, value, slots: few_rows_into_cache(
            branch.x, kernel, key, value, slots, cosine_sine, **options
        )  # fmt: skip
        return written_by(write, cache, layer, branch.x.shape[1])

    def gate(self, branch: Branch, activation: str, kernel: jax.Array) -> jax.Array:
        """Does `XlaProducts.gate`, in one launch."""
        if self._is_refused("gate", branch.x, kernel, norm=branch.norm, activation=activation):
            return super().gate(branch, activation, kernel)
        return self._run(branch.x, kernel, kernel.shape[1:2], norm=branch.norm, activation=activation)

    def add(self, branch: Branch, x: jax.Array, kernel: jax.Array) -> jax.Array:
        """Does `XlaProducts.add`, in one launch."""
        if self._is_refused("add", x, kernel):
            return super().add(branch, x, kernel)
        if branch.post_norm is not None:
            return branch.plus(self._run(x, kernel, kernel.shape[:1]))
        return self._run(x, kernel, kernel.shape[:1], residual=branch.x.reshape(-1, branch.x.shape[-1]))

    def total(
        self, x: jax.Array, kernel: jax.Array, axes: tuple[str, ...], mesh: Mesh, residual: jax.Array | None
    ) -> jax.Array:
        """Does `XlaProducts.total`, in one launch where the sum goes by the exchange kernel."""
        from tree_attn.kernels.few_rows_call import few_rows_total

        if self._is_refused("total", x, kernel):
            return super().total(x, kernel, axes, mesh, residual)
        rows, features = math.prod(x.shape[:-1]), kernel.shape[0]
        if exchanges(rows * features, axes, mesh):
            flat = None if residual is None else residual.reshape(rows, features)
            meeting = fused.meeting(axes, mesh, rows * features)
            total = few_rows_total(x.reshape(rows, -1), kernel, flat, *meeting)
            if total is not None:
                return total.reshape(*x.shape[:-1], features)
        part = self._run(x, kernel, kernel.shape[:1], out_dtype=jnp.float32)
        return sum_activations(part, axes, mesh, residual)

    def logits(self, branch: Branch, table: jax.Array) -> jax.Array:
        """Does `XlaProducts.logits`, in one launch."""
        if self._is_refused("logits", branch.x, table, norm=branch.norm):
            return super().logits(branch, table)
        # No kernel follows that would begin early.
        options = dict(out_dtype=jnp.float32, shares_sm=False)
        return self._run(branch.x, table, table.shape[:1], norm=branch.norm, **options)

    def _is_refused(self, name: str, x, kernel, *, norm: Any = None, activation: str | None = None) -> bool:
        """Returns whether the kernel cannot multiply these, and logs why."""
        from tree_attn.kernels.few_rows_layout import unsupported

        rows, dtypes = math.prod(x.shape[:-1]), {x.dtype, kernel.dtype} | ({norm.scale[...].dtype} if norm else set())
        out_features = math.prod(kernel.shape[:-1]) // (1 if activation is None else 2)
        reason = unsupported(rows, out_features, kernel.shape[-1], x.dtype, activation, has_norm=norm is not None)
        if reason is None and rows > self.max_rows:
            reason = f"by default few rows are at most {self.max_rows}, not {rows}"
        if reason is None and len(dtypes) > 1:
            reason = f"few rows have one dtype, not {sorted(map(str, dtypes))}"
        if reason is not None:
            _log.info("products: %s by xla: %s", name, reason)
        return reason is not None

    def _run(self, x, kernel, out_shape, *, norm: Any = None, **options) -> jax.Array:
        """Multiplies `[B, T, I]` to `[B, T, *out_shape]`."""
        from tree_attn.kernels.few_rows_call import few_rows_product

        if norm is not None:
            options |= _norm_options(norm)
        out = few_rows_product(x.reshape(-1, x.shape[-1]), kernel, is_early=self.is_early, **options)
        return out.reshape(*x.shape[:-1], *out_shape)


def _norm_options(norm: Any) -> dict[str, Any]:
    return {"scale": norm.scale[...], "eps": norm.eps, "adds_one": norm.adds_one}


@dataclasses.dataclass(frozen=True)
class ProductsOfShards(XlaProducts):
    """Products of weights that are cut over GPUs: by the kernel where a device multiplies by its own part.

    XLA multiplies by weights that every device has whole: it cannot cut a kernel over devices.

    Attributes:
      sharding: of the model; its sequence is cut over all axes of the mesh.
      max_rows: with more, XLA multiplies.
    """

    sharding: LlamaSharding
    max_rows: int = 16

    def name_of(self, rows: int) -> str:
        """Does `XlaProducts.name_of`."""
        return self.of_shard.name_of(rows)

    @property
    def of_shard(self) -> XlaProducts:
        """The kernel's products."""
        return FewRowsProducts(max_rows=self.max_rows)

    def logits(self, branch: Branch, table: jax.Array) -> jax.Array:
        """Does `XlaProducts.logits`; each device makes those of its part of the vocabulary."""
        sharding = self.sharding
        if as_tuple(sharding.vocab) != as_tuple(sharding.sequence) or sharding.embed is not None:
            return super().logits(branch, table)

        def on_shard(x, table):
            return self.of_shard.logits(dataclasses.replace(branch, x=x), table)

        axes = as_tuple(sharding.vocab)
        specs = dict(in_specs=(P(), P(axes)), out_specs=P(None, None, axes))
        return jax.shard_map(on_shard, mesh=sharding.mesh, axis_names=set(axes), check_vma=False, **specs)(
            branch.x, table
        )
