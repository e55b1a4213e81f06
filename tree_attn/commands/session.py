"""The devices that a command runs on, their mesh, and a model read with a progress bar."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tree_attn import topology
from tree_attn.commands import processes
from tree_attn.commands.phases import phase
from tree_attn.commands.units import count
from tree_attn.devices import ensure_devices, request_cpu_devices, started_devices
from tree_attn.measure import provenance
from tree_attn.mesh import make_mesh, node_axes
from tree_attn.models.llama.checkpoint import hub
from tree_attn.models.llama.checkpoint.open import Checkpoint, open_checkpoint
from tree_attn.models.llama.config import LlamaConfig
from tree_attn.models.llama.model import Llama
from tree_attn.models.llama.sharding import LlamaSharding, spread_over
from tree_attn.reduce import Reduction, cheapest

DEFAULT_DEVICES = 8

_log = logging.getLogger("tree_attn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """The devices that a model runs on, in order, and the axes of their mesh.

    Attributes:
      devices: in the order of the mesh.
      has_two_axes: two axes, ("device", "node"), for a hierarchical reduction; else one, "seq".

    Raises:
      ValueError: two axes, of a number of devices without two factors.
    """

    devices: tuple[jax.Device, ...]
    has_two_axes: bool = False

    def __post_init__(self) -> None:
        if self.has_two_axes and node_axes(self.devices) is None:
            count = len(self.devices)
            raise ValueError(f"--devices must be a product of two numbers for a hierarchical reduction, got {count}")

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Mesh axes of the sequence and their sizes, fastest links first."""
        return node_axes(self.devices) if self.has_two_axes else {"seq": len(self.devices)}

    def picked_reduction(self, config: LlamaConfig, batch: int) -> Reduction:
        """Returns the reduction that is taken where none is named, for a new token of each of `batch` sequences."""
        elements = batch * config.num_heads * (config.head_dim + 1)
        return cheapest(elements, self.axis_sizes, make_mesh(self.axis_sizes, self.devices))

    def sharding(self, config: LlamaConfig) -> LlamaSharding:
        """Returns the sharding with the sequence over all devices; MLP and vocabulary too where they divide."""
        axes = tuple(self.axis_sizes)
        mesh = make_mesh(self.axis_sizes, self.devices)
        return spread_over(config, mesh, sequence=axes if self.has_two_axes else axes[0])

    @property
    def dtype(self) -> DTypeLike:
        """float32 on CPUs, where nothing is faster; bfloat16 elsewhere."""
        return jnp.float32 if self.devices[0].platform == "cpu" else jnp.bfloat16


def choose_devices(requested: int | None) -> tuple[jax.Device, ...]:
    """Returns the requested number of devices, emulated if there are too few.

    By default it returns up to 8 accelerators, or 8 emulated devices.
    In a run of several processes it returns all devices, node by node: each must take part in the collectives.

    Raises:
      ValueError: the number is not positive, or, in a run of several processes, not that of all devices.
    """
    if jax.distributed.is_initialized():  # to count processes would start JAX too early where there is one
        if requested not in (None, jax.device_count()):
            raise ValueError(f"--devices must be all {jax.device_count()} devices of all processes, got {requested}")
        return tuple(topology.node_by_node(jax.devices()))
    if requested is not None:
        return tuple(ensure_devices(requested))
    with phase("starting devices"):
        request_cpu_devices(DEFAULT_DEVICES)  # JAX must have started before it is known that they are needed
        devices = tuple(started_devices()[:DEFAULT_DEVICES])
    _log.info("devices=None picked %s", provenance.hardware(devices))
    return devices


def open_with_progress(model: str) -> Checkpoint:
    """Returns `open_checkpoint(resolve(model))`, the same on all ranks; a spinner names the step that runs."""
    remark = " (the first time, it is downloaded)" if hub.is_downloaded(model) else ""
    with phase(f"finding {model}{remark} ..."):
        path = hub.resolve(model)
    with phase(f"opening {path.resolve().name} ..."):
        checkpoint = open_checkpoint(path)
        processes.agree_on_model(path, checkpoint.config)
    return checkpoint


def load_with_progress(checkpoint: Checkpoint, sharding: LlamaSharding, dtype: DTypeLike) -> Llama:
    """Returns `checkpoint.load(...)` with the fastest products for new tokens; a bar on stderr shows its bytes."""
    title, total = f"reading weights onto {count(sharding.mesh.size, 'device')}", checkpoint.num_bytes(dtype)
    with phase(title, total, is_bytes=True) as reading:
        return checkpoint.load(sharding, dtype, reading.advance, products=None)
