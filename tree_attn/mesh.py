"""Meshes and their axes: types, order, the axes of nodes, and what a surrounding `shard_map` binds and checks."""

import collections
import math
from collections.abc import Collection, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from tree_attn import topology
from tree_attn.arguments import check_integer
from tree_attn.devices import check_nccl

AxisName = str | tuple[str, ...]
NODE_AXES = ("device", "node")  # inside a node and between nodes, the fastest links first


def make_mesh(axis_shapes: dict[str, int] | tuple[str, ...], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns a mesh with the named axes, all of type Auto. (Those of `jax.make_mesh` are Explicit by default.)

    Args:
      axis_shapes: axis name -> size, fastest link first, e.g. `{"device": 4, "node": 2}` for `axis_name=("device",
        "node")`: four neighbours in each of two nodes. (`mesh.axis_names` then lists them slowest first.) Or the names
        alone: `("device", "node")` has the sizes of the real topology, the devices of each node and the nodes, as
        `tree_attn.initialize` found them, and `("seq",)` is all devices, node by node.
      devices: the devices, in order; default: the first ones of `jax.devices()`. For names alone all, in any order. On
        one axis TPUs of a slice are arranged as `jax.make_mesh` does, by which more of them are linked to the next.
    Raises:
      TypeError: `axis_shapes` is neither a dict nor a tuple of names.
      ValueError: a size is not a positive integer, or there are fewer devices than the axes need. For names alone: the
        nodes have unequal numbers of devices, or there are several processes that `initialize` has not joined.
      NotImplementedError: several GPUs, and an NCCL that is too old for this JAX.

    Example:
      >>> mesh = make_mesh({"seq": 8})
      >>> mesh = make_mesh(("device", "node"))

    Source: Tree Attention, section 5.3 (two-level topologies); `jax.sharding.Mesh`.
    """
    if isinstance(axis_shapes, tuple):
        return _real_mesh(axis_shapes, topology.by_node(jax.devices() if devices is None else devices))
    if not isinstance(axis_shapes, dict):
        raise TypeError(
            "axis_shapes must be a dict of sizes by axis name, such as {'seq': 8}, or a tuple of names, got "
            f"{axis_shapes!r}"
        )
    if not axis_shapes or not all(isinstance(name, str) for name in axis_shapes):
        raise ValueError(f"axis_shapes must name its axes by strings, got {axis_shapes}")
    for name, size in axis_shapes.items():
        check_integer(f"axis_shapes[{name!r}]", size, minimum=1)
    needed = math.prod(axis_shapes.values())
    devices = list(jax.devices() if devices is None else devices)
    if len(devices) < needed:
        raise ValueError(
            f"axis_shapes {axis_shapes} needs {needed} devices, got {len(devices)}; for emulated ones call "
            f"tree_attn.devices.ensure_devices({needed}) before JAX uses any device"
        )
    check_nccl(devices[:needed])
    if len(axis_shapes) == 1:
        devices = _ring_order(devices[:needed])
    # Neighbours in the device order share the fastest link, so the first axis varies fastest: it comes last in the
    # grid. (A transposed grid would do as well, but XLA's GPU compiler wants programs that list devices in order.)
    names, sizes = tuple(reversed(axis_shapes)), tuple(reversed(axis_shapes.values()))
    return with_auto_axes(Mesh(np.array(devices[:needed]).reshape(sizes), names))


def _ring_order(devices: list[jax.Device]) -> list[jax.Device]:
    """Returns TPUs of one slice in JAX's order for a ring; all others as they are.

    See docs/log/tpu.md: "JAX's order of a TPU slice makes shorter rings".
    """
    if devices[0].platform != "tpu" or len({getattr(device, "slice_index", None) for device in devices}) > 1:
        return devices
    try:
        return mesh_utils.create_device_mesh((len(devices),), devices).tolist()
    except AssertionError:  # it wants a box of the slice without holes, and one device per chip before v7
        return devices


def with_auto_axes(mesh: Mesh) -> Mesh:
    """Returns a mesh of the same devices and names whose axes are all of type Auto."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def node_axes(devices: Sequence[jax.Device] | int) -> dict[str, int] | None:
    """Returns the sizes of the two axes of a hierarchical reduction, `{"device": per_node, "node": nodes}`.

    For several nodes with equally many devices, more than one each, these are the devices of a node and the nodes.
    Otherwise they are the two factors of the number of devices that are closest to each other, the larger one first.

    Args:
      devices: the devices of the mesh, grouped by node (see `topology.node_by_node`). Or their number, if every process
        that `tree_attn.initialize` joined has equally many.
    Returns:
      axis name -> size as `make_mesh` takes it; None for a number without two factors above 1.

    Example:
      >>> node_axes(16)
      {'device': 4, 'node': 4}
      >>> mesh = make_mesh(node_axes(devices), topology.node_by_node(devices))
    """
    is_number = isinstance(devices, int)
    count = devices if is_number else len(devices)
    on_nodes = collections.Counter(topology.nodes() if is_number else map(topology.node_of, devices))
    num_nodes = len(on_nodes)
    if 1 < num_nodes < count and len(set(on_nodes.values())) == 1 and count % num_nodes == 0:
        return dict(zip(NODE_AXES, (count // num_nodes, num_nodes)))
    small = next((size for size in range(math.isqrt(count), 1, -1) if count % size == 0), None)
    return small and dict(zip(NODE_AXES, (count // small, small)))


def _real_mesh(names: tuple[str, ...], nodes: dict[str, list[jax.Device]]) -> Mesh:
    """Returns a mesh of one axis over all devices, or of two, over the devices of a node and over the nodes."""
    try:
        axis_tuple(names)
    except ValueError as error:
        raise ValueError(f"axis_shapes: {error}") from None
    if len(names) > 2:
        raise ValueError(f"axis_shapes {names} must be one name, or two for devices and nodes; give sizes for more")
    counts = {name: len(devices) for name, devices in nodes.items()}
    in_order = [device for devices in nodes.values() for device in devices]
    if len(names) == 1:
        return make_mesh({names[0]: len(in_order)}, in_order)
    if len(set(counts.values())) > 1:
        raise ValueError(
            f"axis_shapes {names} needs as many devices on every node, got {counts}: use one axis over all, "
            f"make_mesh({names[:1]}), or as many devices on each"
        )
    return make_mesh(dict(zip(names, (len(in_order) // len(nodes), len(nodes)))), in_order)


def axis_tuple(axis_name: AxisName, name: str = "axis_name") -> tuple[str, ...]:
    """Returns `axis_name`, the argument called `name`, as a tuple of distinct names.

    Raises:
      ValueError: it is neither a name nor a non-empty tuple of names, or a name occurs twice.
    """
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    if not isinstance(names, tuple) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{name} must be a mesh axis or a non-empty tuple of axes, got {axis_name!r}")
    if len(set(names)) != len(names):
        raise ValueError(f"{name} must not name an axis twice, got {axis_name!r}")
    return names


def check_axes(axes: tuple[str, ...], mesh: Mesh | AbstractMesh) -> None:
    """Raises TypeError unless `mesh` is a mesh, and ValueError unless it has all of `axes`."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}")
    missing = [axis for axis in axes if axis not in mesh.axis_names]
    if missing:
        raise ValueError(f"axis_name {axes} must name axes of the mesh {mesh.axis_names}, not found: {missing}")


def bound_axis_sizes(axes: tuple[str, ...]) -> tuple[int, ...] | None:
    """Returns the axes' sizes where they are bound (inside `shard_map`), None where none of them is.

    Raises:
      ValueError: some of the axes are bound and others are not.
    """
    sizes = []
    for axis in axes:
        try:
            sizes.append(jax.lax.axis_size(axis))
        except NameError:
            sizes.append(None)
    if all(size is None for size in sizes):
        return None
    if None in sizes:
        missing = [axis for axis, size in zip(axes, sizes) if size is None]
        raise ValueError(f"axis_name {axes} is bound only in part: not bound here are {missing}")
    return tuple(sizes)


def checks_replication(axes: tuple[str, ...]) -> bool:
    """Returns whether a surrounding `shard_map` binds `axes` and types values by the axes they vary over.

    That is its `check_vma=True`. There a collective must type a result as the same on every device if it is returned as
    such. The gradient is then that of one result, not of one for every device.
    """
    return bool(varying_axes(jax.lax.axis_index(axes)))


def is_sharded_by_xla() -> bool:
    """Returns whether a surrounding `shard_map` leaves axes of its mesh to XLA: it is manual in some of them only.

    XLA's partitioner knows `psum` and `ppermute` there. For any other collective it first gathers the operand over
    those axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return any(size > 1 and kind != AxisType.Manual for size, kind in zip(mesh.axis_sizes, mesh.axis_types or ()))


def are_auto(axes: Collection[str], mesh: Mesh | AbstractMesh) -> bool:
    """Returns whether all of `axes` are Auto axes of `mesh`: no array's type says how it lies on them."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types))
    return all(kinds[axis] == AxisType.Auto for axis in axes)


def varying_axes(tree) -> frozenset[str]:
    """Returns the mesh axes over which some array of `tree` varies by its type; none without `check_vma`."""
    return frozenset().union(*(jax.typeof(x).mat.varying for x in jax.tree.leaves(tree)))


def vary_as(tree, *others, but_for: tuple[str, ...] = ()):
    """Returns `tree` with all arrays typed as varying over the axes over which any array of it or of `others` varies.

    The values stay. Where arrays meet in a loop or leave a kernel, JAX does not do so itself.

    Args:
      but_for: axes over which nothing is made to vary.
    """
    axes = varying_axes((tree, others)) - set(but_for)

    def cast(x):
        missing = axes - varying_axes(x)
        return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing and hasattr(x, "dtype") else x

    return jax.tree.map(cast, tree)
