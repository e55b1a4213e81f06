"""Calls of launches of several layers, checked and planned. This is the entry for models."""

import dataclasses
from collections.abc import Sequence

import jax

from tree_attn.kernels.few_rows_chain import run_layers
from tree_attn.kernels.few_rows_chain_call import Unchained, WholeLayer
from tree_attn.kernels.few_rows_chain_layout import num_ctas, receives_in_vain
from tree_attn.kernels.launch_order import KERNELS_ARE_RECORDED

# A launch has parameters for each of its layers: 8 descriptors of 128 bytes, and two addresses, of 32,764 bytes.
MAX_LAYERS = 16


@dataclasses.dataclass(frozen=True)
class Layers:
    """Several layers, each of which adds to the result of the one before.

    Of others than the first neither x is read, nor slots, angles and spans: these are the same for all.
    """

    layers: Sequence[WholeLayer]

    def plan(self):
        """Returns what `WholeLayer.plan` does for the first, or why one launch cannot do all."""
        first = self.layers[0]
        if not 2 <= len(self.layers) <= MAX_LAYERS:
            return f"a launch has 2 to {MAX_LAYERS} layers, not {len(self.layers)}"
        if jax.__version_info__ < KERNELS_ARE_RECORDED:
            return f"a launch of several layers needs JAX 0.12, not {jax.__version__}"
        if any(_describe(layer) != _describe(first) for layer in self.layers):
            return "layers of one launch are alike"
        if first.meeting is not None:
            return "several layers are one launch on one device"
        planned = first.plan()
        if isinstance(planned, str):
            return planned
        shapes, configs, layout, tables = planned
        counts = [config.num_ctas for config in configs[1:]]
        if any(count != num_ctas((*configs, layout.config)) for count in counts):
            return f"each CTA has a part of all products of several layers but the heads', of {counts} CTAs"
        if any(receives_in_vain(shape, config, receives_all=True) for shape, config in zip(shapes, configs)):
            return "each CTA has out-features in all of its tiles, where layers follow one another"
        steps = sum(config.tiles * config.blocks(shape) for shape, config in zip(shapes[1:], configs[1:]))
        if steps < configs[0].num_stages:
            return f"products after attention fill the ring, which {steps} steps of {configs[0].num_stages} do not"
        return shapes, configs, layout, tables

    def run(self):
        """Computes the layers in one launch.

        With JAX 0.12 or newer weights are read before the previous kernel has ended. No kernel of the program may write
        them.

        Returns:
          `y`, `[B, 1, D]`, and keys and values of each layer's cache.

        Raises:
          Unchained: one launch cannot do them.
        """
        planned = self.plan()
        if isinstance(planned, str):
            raise Unchained(planned)
        shapes, configs, layout, tables = planned
        first = self.layers[0]
        weights = tuple(layer.all_weights for layer in self.layers)
        scales = tuple(layer.all_scales for layer in self.layers)
        *places, _, _ = first.heads.operands(shapes[0])
        caches = tuple((layer.heads.key, layer.heads.value) for layer in self.layers)
        x = first.x.reshape(first.x.shape[0], -1)
        options = dict(shapes=shapes, configs=configs, attention=layout)
        y, caches = run_layers(x, weights, scales, tuple(places), caches, tables, **options)
        return y.reshape(first.x.shape), caches


def _describe(layer: WholeLayer) -> tuple:
    """Returns what layers of one launch have in common."""
    heads = layer.heads
    arrays = layer.output, layer.gate_up, layer.down, heads.weights, heads.key, heads.value, layer.x
    norms = [(norm.eps, norm.adds_one, norm.scale.dtype) for norm in (layer.norm, heads.norm)]
    shapes = [(array.shape, array.dtype) for array in arrays]
    return shapes, norms, layer.activation, layer.scale, layer.logits_soft_cap
