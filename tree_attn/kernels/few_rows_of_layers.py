"""Arguments that each layer of a launch has its own of: which one is read or written is known when the kernel runs.

Weights and caches of layers are arrays of their own. A loop over layers needs one of them by a number. For a copy by
TMA that is a descriptor: those of all layers lie one behind another among the kernel's parameters. For writes it is an
address, and these lie there too.
"""

import dataclasses
from typing import Any

from jax.experimental.mosaic.gpu import launch_context, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from tree_attn.kernels import mlir as ops

DESCRIPTOR_BYTES, ADDRESS_BYTES = launch_context.TMA_DESCRIPTOR_BYTES, 8


@dataclasses.dataclass(frozen=True)
class OfLayers:
    """References to an argument of all layers, and the number of the layer whose argument is meant, int32."""

    refs: tuple
    layer: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of one layer's."""
        return self.refs[0].shape

    @property
    def dtype(self):
        """Returns the dtype of one layer's."""
        return self.refs[0].dtype


def all_refs(ref) -> tuple:
    """Returns the references of all layers, or the one that there is."""
    return ref.refs if isinstance(ref, OfLayers) else (ref,)


def layer_of(refs):
    """Returns the number of the layer that is meant by several arguments, or 0."""
    return next((ref.layer for ref in refs if isinstance(ref, OfLayers)), 0)


def grouped(values, refs) -> list[list]:
    """Returns, for each of `refs`, those of `values` that belong to it; `values` are of all of `all_refs`."""
    values = iter(values)
    return [[next(values) for _ in all_refs(ref)] for ref in refs]


def of_layer(ctx, arrays: list, layer):
    """Emits the choice of one of several arrays of one shape in global memory.

    Args:
      ctx: the launch context; layer: the number, i32.
    """
    if len(arrays) == 1:
        return arrays[0]
    # Addresses as values of the kernel would all be held in registers.
    of_host = list(map(launch_context._find_kernel_argument_for_gmem_ref, arrays))

    def write(table):
        for number, array in enumerate(of_host):
            place = utils.getelementptr(table, [number * ADDRESS_BYTES], ir.IntegerType.get_signless(8))
            llvm.store(llvm.ptrtoint(ops.i64(), utils.memref_ptr(array)), place)

    size = -(-len(arrays) * ADDRESS_BYTES // DESCRIPTOR_BYTES) * DESCRIPTOR_BYTES
    table = ctx._alloc_scratch(size, alignment=DESCRIPTOR_BYTES, host_init=write, prefetch=False)
    place = utils.getelementptr(
        table, [arith.muli(layer, ops.int32(ADDRESS_BYTES))], ir.IntegerType.get_signless(8)
    )  # fmt: skip
    address = llvm.load(ops.i64(), place)
    kind = ir.MemRefType(arrays[0].type)
    return utils.ptr_as_memref(llvm.inttoptr(ir.Type.parse("!llvm.ptr"), address), kind)


def compute_within_loop() -> None:
    """Has the compiler move nothing out of the loop around: what is moved out is held in registers throughout."""

    @plgpu.inline_mgpu(arg_types=())
    def emit(_):
        loop = ir.InsertionPoint.current.block.owner.parent
        assert loop.name == "scf.for", loop.name
        loop.attributes["llvm.loop_annotation"] = ir.Attribute.parse("#llvm.loop_annotation<licm = <disable = true>>")

    emit()


class CopiesOfLayer:
    """A launch context whose copies from the first of several arrays are from that of a layer.

    Attributes:
      ctx: the kernel's; arrays: of all layers, of one shape; layer: the number, i32.
    """

    def __init__(self, ctx, arrays: list, layer):
        self._ctx, self._arrays, self._layer = ctx, arrays, layer

    def __getattr__(self, name: str):
        return getattr(self._ctx, name)

    def async_copy(self, **options) -> None:
        """Does `LaunchContext.async_copy`, of which `src_ref` is not an argument."""
        launch_context.LaunchContext.async_copy(self, src_ref=self._arrays[0], **options)

    def _get_tma_desc(self, _, *options, **more):
        """Returns the address of the layer's descriptor."""
        all_of = [self._ctx._get_tma_desc(array, *options, **more) for array in self._arrays]
        first = _offset(all_of[0])
        places = [_offset(descriptor) for descriptor in all_of]
        assert places == [first + number * DESCRIPTOR_BYTES for number in range(len(places))], places
        distance = arith.muli(self._layer, ops.int32(DESCRIPTOR_BYTES))
        return utils.getelementptr(all_of[0], [distance], ir.IntegerType.get_signless(8))


def _offset(descriptor) -> int:
    """Returns where a descriptor lies among the kernel's parameters, in bytes."""
    (offset,) = ir.DenseI32ArrayAttr(descriptor.owner.attributes["rawConstantIndices"])
    return offset
