"""The cases that `tree-attn compare` runs, and their rows before they have run."""

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tree_attn import tree_decode
from tree_attn.arguments import AttentionOptions
from tree_attn.commands.units import count
from tree_attn.cost import predict
from tree_attn.cost.step import DecodeStep, itemsize
from tree_attn.local import choose
from tree_attn.masking import visibility
from tree_attn.measure import provenance
from tree_attn.measure.rows import strategy_label
from tree_attn.mesh import NODE_AXES, make_mesh, node_axes
from tree_attn.placement import Shard
from tree_attn.reduce import REDUCTIONS
from tree_attn.ring_baseline import ring_decode

SHARD_HEADS = "shard_heads"  # stands among the reductions: an all-to-all, after which each device has its heads

_log = logging.getLogger("tree_attn")

# The fields of a row that name its case; the others are results.
KEY_FIELDS = (
    "strategy", "reduction", "implementation", "n_devices", "n_processes", "batch", "num_keys", "num_heads",
    "num_kv_heads", "head_dim", "dtype", "hardware", "jax_version", "nccl_setting",
)  # fmt: skip
_RESULT_FIELDS = (
    "latency_us_median", "latency_us_p10", "latency_us_p90", "program_us", "n_iters", "chain", "long_chain", "timing",
    "compile_s",
    "peak_memory_bytes_compiled", "peak_memory_bytes_runtime", "peak_memory_bytes_runtime_at_most",
    "collectives_lowered", "collectives_compiled", "bytes_sent_per_device_compiled", "max_abs_error", "tolerance",
    "oracle_num_keys", "oracle_batch", "oracle_num_kv_heads", "sent_gb_per_s", "neighbour_gb_per_s",
    "transfers_gb_per_s", "error",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One row: a strategy of `predict.STRATEGIES`, a reduction (tree only), the local kernel, and the step.

    With `SHARD_HEADS` every device has its part of the heads. The step then ends in a gather of the heads, because the
    next query is whole on every device.

    `axis_sizes` has one entry, or two for "hierarchical": devices of a node, and nodes. `rotation` is that of an
    overlapped ring. The strategies "ring_joint" and "ring_two_way" are "ring_overlapped" by the rotation of that name,
    and send as much.
    """

    strategy: str
    reduction: str | None
    implementation: str
    step: DecodeStep
    axis_sizes: tuple[int, ...]
    rotation: str | None = None

    @property
    def label(self) -> str:
        """Name of the strategy in tables and plots: "tree allreduce", "ring overlapped"."""
        return strategy_label(self.strategy, self.reduction)

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that the keys are sharded over, fastest links first: their shards come in this order."""
        return NODE_AXES[: len(self.axis_sizes)]

    @property
    def obstacle(self) -> str | None:
        """Why these devices cannot run the case, or None: they divide the heads, or factor into two axes."""
        devices = count(self.step.n_devices, "device")
        if self.reduction == SHARD_HEADS and self.step.num_heads % self.step.n_devices:
            return f"shard_heads needs heads that {devices} divide, got {self.step.num_heads}"
        if self.reduction == "hierarchical" and len(self.axis_sizes) != 2:
            return (
                f"reduction 'hierarchical' needs two mesh axes of at least two devices each, and {devices} cannot be "
                "arranged so"
            )
        return None

    @property
    def bytes_sent(self) -> float | None:
        """Bytes that a device sends in a step, by the paper's equations; None where the case is not possible."""
        if self.obstacle:
            return None
        if self.reduction == SHARD_HEADS:
            step = self.step
            heads = step.batch * step.num_queries * step.hidden_size * itemsize(step.dtype)
            return (step.n_devices - 1) / step.n_devices * (step.packed_state_bytes + heads)
        return predict.bytes_sent_per_device(self.step, self._plain, self.reduction, axis_sizes=self.axis_sizes)

    @property
    def peak_memory_bytes(self) -> int | None:
        """Peak memory of a device, by the paper's equations."""
        return predict.peak_memory_bytes(self.step, self._plain)

    @property
    def _plain(self) -> str:
        """The strategy of the paper's equations, which know no rotation."""
        return self.strategy if self.strategy in predict.STRATEGIES else "ring_overlapped"

    def mesh(self, devices: Sequence[jax.Device]) -> Mesh:
        """Returns the devices as one axis, or as two for "hierarchical"."""
        return make_mesh(dict(zip(self.axes, self.axis_sizes)), devices)

    def decode(self, mesh: Mesh) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
        """Returns the function that is compared, of (query, key, value)."""
        options = dict(axis_name=self.axes, mesh=mesh, implementation=self.implementation)
        if self.reduction == SHARD_HEADS:
            decode, everyone = functools.partial(tree_decode, shard_heads=True, **options), NamedSharding(mesh, P())
            return lambda *arrays: jax.lax.with_sharding_constraint(decode(*arrays), everyone)
        if self.strategy == "tree":
            return functools.partial(tree_decode, reduction=self.reduction, **options)
        if self.strategy == "ring_public":
            return functools.partial(ring_decode, variant="public", **options)
        return functools.partial(ring_decode, rotation=self.rotation, **options)


def plan(
    steps: Sequence[DecodeStep],
    reductions: Sequence[str],
    implementations: Sequence[str | None],
    platform: str,
    *,
    rotations: Sequence[str] = (),
    fastest: Mapping[DecodeStep, str] | None = None,
) -> list[Case]:
    """Lists all cases: for each step and implementation, tree with every reduction and then the rings.

    Args:
      reductions: of the tree, with `SHARD_HEADS`; if empty, all on GPUs, and elsewhere those without "fused" and it.
      implementations: local kernels; None is the one that the library would choose.
      platform: of the devices, e.g. "gpu".
      rotations: the rings include these beside "ring_overlapped", each as a strategy of its own.
      fastest: by step, the rotation of "ring_overlapped"; default: "one_way".
    """
    for name in implementations if steps else ():
        if name is None:
            _log.info("implementation=None picked %r", _automatic_implementation(steps[0], platform))
    on_gpus_only = {"fused", SHARD_HEADS}
    usual = [name for name in (*REDUCTIONS, SHARD_HEADS) if name not in on_gpus_only or platform == "gpu"]
    reductions = reductions or usual
    cases = []
    for step, named in itertools.product(steps, implementations):
        case = functools.partial(Case, step=step, implementation=named or _automatic_implementation(step, platform))
        for reduction in reductions:
            axes = node_axes(step.n_devices) if reduction == "hierarchical" else None
            sizes = tuple(axes.values()) if axes else (step.n_devices,)
            cases.append(case(strategy="tree", reduction=reduction, axis_sizes=sizes))
        in_ring = named or _automatic_implementation(step, platform, beside_transfers=True)
        ring = functools.partial(case, reduction=None, implementation=in_ring, axis_sizes=(step.n_devices,))
        chosen = (fastest or {}).get(step, "one_way")
        cases.append(ring(strategy="ring_overlapped", rotation=chosen))
        cases += [ring(strategy=f"ring_{rotation}", rotation=rotation) for rotation in rotations]
        cases.append(ring(strategy="ring_public"))
    return cases


def new_row(
    case: Case, *, hardware: str, git_commit: str | None, command: str, nccl_setting: str | None = None
) -> dict[str, Any]:
    """Returns the row of a case before it has run: the case and its predictions; results are None.

    Args:
      nccl_setting: of `tree_attn.measure.transfer_settings`; None where none was named.
    """
    step = case.step
    sizes = dataclasses.asdict(step)
    row = {"strategy": case.strategy, "reduction": case.reduction, "implementation": case.implementation}
    row |= {"n_devices": step.n_devices, "n_processes": jax.process_count(), "axis_sizes": list(case.axis_sizes)}
    row |= {name: sizes[name] for name in ("batch", "num_keys", "num_heads", "num_kv_heads", "head_dim", "dtype")}
    row |= {"rotation": case.rotation} | dict.fromkeys(_RESULT_FIELDS)
    row["peak_memory_bytes_predicted"] = case.peak_memory_bytes
    row["bytes_sent_per_device_predicted"] = case.bytes_sent
    return row | {
        "hardware": hardware, "jax_version": jax.__version__,
        "nccl_setting": nccl_setting, "nccl": provenance.nccl_settings(),
        "git_commit": git_commit, "command": command,
    }  # fmt: skip


def row_key(row: dict[str, Any]) -> tuple:
    """Returns the fields that two rows of the same case have in common."""
    return tuple(row.get(field) for field in KEY_FIELDS)


def _automatic_implementation(step: DecodeStep, platform: str, beside_transfers: bool = False) -> str:
    """Returns the choice of `implementation=None` for one shard of this step, in tree attention or in a ring."""
    if platform == "cpu":
        return "xla"  # beside a GPU, the library would choose for the GPU and not for the emulated devices
    batch, keys, heads, dim = step.batch, step.keys_per_device, step.num_kv_heads, step.head_dim
    query = jax.ShapeDtypeStruct((batch, step.num_queries, step.num_heads, dim), step.dtype)
    key = jax.ShapeDtypeStruct((batch, keys, heads, dim), step.dtype)
    visible = visibility(AttentionOptions(), batch=batch, num_queries=step.num_queries, num_slots=keys, shard=Shard())
    return choose(
        query, key, key, logits_soft_cap=None, visible=visible, implementation=None, beside_transfers=beside_transfers
    )
