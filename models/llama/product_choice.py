"""The choice of products by name: XLA's, or a kernel's where it runs."""

import logging

import jax

from tree_attn.local import mosaic_gpu
from tree_attn.models.llama.chained_products import ChainedProducts, ChainedProductsOfShards
from tree_attn.models.llama.products import FewRowsProducts, ProductsOfShards, XlaProducts
from tree_attn.models.llama.sharding import LlamaSharding, as_tuple

PRODUCTS = ("xla", "mosaic_gpu", "mosaic_gpu_chain")
# Over several GPUs whole steps of so many rows were checked, with attention in a layer's launch and in its own. In the
# launch a token takes 5 to 8 % longer on two H200s with JAX 0.12 (docs/log/llama.md).
OVER_GPUS = {"max_rows": 3, "joins_attention": False}
CUT_AXES = ("heads", "kv_heads", "kv_head_dim", "mlp", "vocab")  # of `LlamaSharding`, along which weights are cut
_log = logging.getLogger("tree_attn")


def by_name(name: str | None, sharding: LlamaSharding, *, unrolls_layers: bool) -> XlaProducts:
    """Returns the products called `name`, one of `PRODUCTS`.

    Args:
      name: `xla`; `mosaic_gpu`, the kernel; or `mosaic_gpu_chain`, by which a layer of one token for each sequence is
        one launch with its attention, and else the products between two layers' attention are. With JAX 0.12 that reads
        weights before the previous kernel has ended, and on one GPU up to 16 layers are one launch. So the program must
        take them as arguments, and none of its kernels may write them. None is the fastest where the kernel runs, for
        up to 16 tokens at a time; over several GPUs for up to 3, with attention in a launch of its own; and else `xla`.
        The fastest is `mosaic_gpu_chain` (docs/log/llama.md). With a loop over layers it is `mosaic_gpu` on one GPU.
        The kernel has no gradient.
      sharding: of the model. Over several devices the kernel needs weights that are cut, and a sequence that is cut
        over all of the mesh.
      unrolls_layers: of the model. A loop over layers copies their weights, so they cannot be read ahead.

    Raises:
      ValueError: an unknown name.
      NotImplementedError: the kernel does not run here, or not with such a model.
    """
    if name not in (None, *PRODUCTS):
        raise ValueError(f"products must be None or one of {list(PRODUCTS)}, got {name!r}")
    if name == "xla":
        return XlaProducts()
    reason = _unavailable(sharding)
    if name is None:
        if reason is None and not sharding.is_on_gpus:
            reason = "the model's devices are no GPUs"
        can_chain = reason is None and unrolls_layers and _writes_in_place()
        if reason is None and sharding.mesh.size > 1 and not can_chain:
            reason = f"on {sharding.mesh.size} GPUs the kernel needs layers that are unrolled, and JAX 0.11"
        if reason is not None:
            _log.info("products: xla, for %s", reason)
            return XlaProducts()
        name = "mosaic_gpu_chain" if can_chain else "mosaic_gpu"
        products = _by_kernel(name, sharding, **(OVER_GPUS if sharding.mesh.size > 1 else {}))
        _log.info("products: %s, for up to %d tokens at a time", name, products.max_rows)
        return products
    if reason is None and name == "mosaic_gpu_chain" and not unrolls_layers:
        reason = "a loop over layers copies weights, which cannot be read ahead: unroll_layers must be True"
    if reason is not None:
        raise NotImplementedError(f"products={name!r}: {reason}")
    return _by_kernel(name, sharding)


def _writes_in_place() -> bool:
    from tree_attn.kernels.registers import WRITES_IN_PLACE

    return jax.__version_info__ >= WRITES_IN_PLACE


def _by_kernel(name: str, sharding: LlamaSharding, **options) -> XlaProducts:
    """Returns the products by the kernel called `name`; options are fields of their classes."""
    from tree_attn.kernels.overlap import overlaps

    is_chained = name == "mosaic_gpu_chain"
    if sharding.mesh.size > 1:
        return (ChainedProductsOfShards if is_chained else ProductsOfShards)(sharding, **options)
    return ChainedProducts(is_early=overlaps(), **options) if is_chained else FewRowsProducts(**options)


def _unavailable(sharding: LlamaSharding) -> str | None:
    """Returns why the kernel cannot multiply for such a model, or None."""
    if (reason := mosaic_gpu.unavailable()) is not None:
        return reason
    from tree_attn.kernels import targets

    if not targets.current().is_hopper:
        return "the kernel multiplies by wgmma, which Hopper GPUs have"
    if sharding.mesh.size > 1 and set(as_tuple(sharding.sequence)) != set(sharding.mesh.axis_names):
        return (
            f"over several devices the kernel needs a sequence that is cut over all axes of the mesh, "
            f"{sharding.mesh.axis_names}, got {sharding.sequence!r}"
        )
    if sharding.mesh.size > 1 and all(sharding.num_shards(axis) == 1 for axis in CUT_AXES):
        return f"over several devices the kernel multiplies by weights that are cut, and none of {CUT_AXES} is"
    return None
