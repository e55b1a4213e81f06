"""What the commands share: devices, a mesh, and a model read with a progress bar."""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tree_attn import topology
from tree_attn.devices import ensure_devices, request_cpu_devices
from tree_attn.mesh import make_mesh, node_axes
from tree_attn.models.llama.checkpoint import hub
from tree_attn.models.llama.checkpoint.open import Checkpoint, open_checkpoint
from tree_attn.models.llama.config import LlamaConfig
from tree_attn.models.llama.model import Llama
from tree_attn.models.llama.sharding import LlamaSharding, spread_over

DEFAULT_DEVICES = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """The devices that a model runs on, in order, and whether the mesh has two levels of links.

    Raises:
      ValueError: two levels of a number of devices that has no two factors.
    """

    devices: tuple[jax.Device, ...]
    two_levels: bool = False

    def __post_init__(self) -> None:
        if self.two_levels and node_axes(self.devices) is None:
            raise ValueError(
                f"devices={len(self.devices)}: a hierarchical reduction needs a product of two numbers above 1"
            )

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Mesh axes of the sequence and their sizes, fastest links first."""
        return node_axes(self.devices) if self.two_levels else {"seq": len(self.devices)}

    def sharding(self, config: LlamaConfig) -> LlamaSharding:
        """Returns the sharding with the sequence over all devices; MLP and vocabulary too where they divide."""
        axes = tuple(self.axis_sizes)
        mesh = make_mesh(self.axis_sizes, self.devices)
        return spread_over(config, mesh, sequence=axes if self.two_levels else axes[0])

    @property
    def dtype(self) -> DTypeLike:
        """float32 on CPUs, which have no faster kind; bfloat16 elsewhere."""
        return jnp.float32 if self.devices[0].platform == "cpu" else jnp.bfloat16


def choose_devices(requested: int | None) -> tuple[jax.Device, ...]:
    """The requested number of devices, emulated if there are too few; by default up to 8 accelerators, or 8 emulated.

    Of several processes, all devices, node by node: each must have a part in what the others wait for.

    Raises:
      ValueError: the number is not positive, or not that of all devices of several processes.
    """
    if jax.distributed.is_initialized():  # to count processes would start JAX too early where there is one
        if requested not in (None, jax.device_count()):
            raise ValueError(f"devices={requested} must be all {jax.device_count()} devices of all processes")
        return tuple(topology.node_by_node(jax.devices()))
    if requested is not None:
        return tuple(ensure_devices(requested))
    request_cpu_devices(DEFAULT_DEVICES)  # whether they are needed is known only once JAX has started
    return tuple(jax.devices()[:DEFAULT_DEVICES])


@contextlib.contextmanager
def phase(description: str) -> Iterator[None]:
    """A spinner on stderr while something without a measure runs."""
    import rich.console

    console = rich.console.Console(stderr=True)
    with console.status(description) if console.is_terminal else contextlib.nullcontext():
        yield


def open_with_progress(model: str) -> Checkpoint:
    """`open_checkpoint(resolve(model))`, saying what it waits for."""
    with phase(f"finding {model} (the first time, it is downloaded) ..."):
        path = hub.resolve(model)
    with phase(f"opening {path.name} ..."):
        return open_checkpoint(path)


def load_with_progress(checkpoint: Checkpoint, sharding: LlamaSharding, dtype: DTypeLike) -> Llama:
    """`checkpoint.load`, with a bar over its bytes on stderr."""
    import rich.console
    from rich import progress

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TimeElapsedColumn(),
    )
    console = rich.console.Console(stderr=True)
    with progress.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"reading weights onto {sharding.mesh.size} devices", total=checkpoint.num_bytes(dtype))
        return checkpoint.load(sharding, dtype, lambda count: bar.advance(task, count))
