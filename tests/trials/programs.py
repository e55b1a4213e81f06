"""The calls of the library that attention cases stand for, in each of the modes in which users make them."""

import contextlib
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import tree_attn
from tree_attn import ring_baseline

from . import problems

SHARDED = ("tree_decode", "ring_decode", "ring_attention", "energy", "hydragen_decode", "bifurcated_decode")
SHARDED += ("sparq_decode", "ulysses_attention")
BATCHED = ("lengths", "positions", "query", "key", "value", "source", "key_by_component", "value_mean")
INTEGERS = ("lengths", "positions", "cu_seqlens", "page_table")


def run(case, operands: dict, cotangents=None) -> tuple:
    """Runs a case's program: returns `(out, lse)` as JAX arrays, and the gradients by operand, or None.

    Args:
      cotangents: of out and lse, numpy; None: no gradient.
    """
    mesh, program = program_of(case, cotangents is not None)
    with _mode(case, mesh):
        arrays = {name: _placed(case, mesh, name, x) for name, x in operands.items()}
        more = ()
        if cotangents is not None:
            named = zip(("out", "lse"), cotangents)
            more = (tuple(None if x is None else _placed(case, mesh, name, x) for name, x in named),)
        return program(arrays, *more)


@functools.lru_cache(maxsize=4)
def program_of(case, has_gradient: bool):
    """Returns the mesh and the function `(operands, cotangents) -> (out, lse), gradients`, for all fills of a case."""
    mesh = _mesh(case)
    call = functools.partial(_call, case, mesh if not case.context else None)
    if case.mode.startswith("shard_map"):
        return mesh, _in_shard_map(case, mesh, has_gradient)
    if case.mode == "vmap":
        call = _over_batch(case, mesh if not case.context else None)
    if case.mode == "remat":
        call = jax.checkpoint(call)
    without_gradient = lambda operands: (call(operands), None)
    function = functools.partial(_with_gradient, case, call) if has_gradient else without_gradient
    return mesh, function if case.mode == "eager" else jax.jit(function)


def specs(case) -> dict[str, P]:
    """Returns how each operand is sharded over the case's mesh; `out` and `lse` too."""
    sequence, data = case.axis, case.data
    of_levels = {f"level{i}_{name}": P(None, sequence) for i in range(len(case.levels)) for name in ("key", "value")}
    if case.function == "bifurcated_decode":
        of_levels = dict.fromkeys(of_levels, P(sequence))
    along_sequence = P(data, sequence)
    if case.has_whole_suffixes:
        along_sequence = P((*([data] if data else []), *sequence))
    is_prompt = case.function in problems.PROMPTS
    result = along_sequence if is_prompt else P(data, None, sequence) if case.shards_heads else P(data)
    shared = case.positions == "shared"
    return of_levels | {
        "query": along_sequence if is_prompt else P(data), "key": along_sequence, "value": along_sequence,
        "source": P(data), "value_mean": P(data), "key_by_component": P(data, None, None, sequence),
        "lengths": P(data), "positions": P() if shared else P(data), "out": result, "lse": result,
    }  # fmt: skip


def _mesh(case) -> Mesh | None:
    if case.function not in SHARDED or not case.mesh:
        return None
    names, sizes = zip(*case.mesh)
    grid = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
    return Mesh(grid, names, axis_types=((AxisType.Explicit if case.explicit else AxisType.Auto),) * len(names))


@contextlib.contextmanager
def _mode(case, mesh):
    """Sets the mesh and the width of numbers as the case has them."""
    with contextlib.ExitStack() as stack:
        if case.mode == "x64":
            stack.enter_context(jax.enable_x64(True))
        if case.context and mesh is not None:
            stack.enter_context(jax.set_mesh(mesh))
        yield


def _placed(case, mesh, name: str, x):
    needs_place = case.placed or (case.explicit and case.mode.startswith("shard_map"))
    if not needs_place or mesh is None:
        return x if case.mode == "eager" and name in INTEGERS else jnp.asarray(x)
    return jax.device_put(x, NamedSharding(mesh, specs(case).get(name, P())))


def _call(case, mesh, operands: dict):
    """Returns `(out, lse)` of the call; `out` is None for the energy."""
    function = getattr(ring_baseline if case.function in ring_baseline.__all__ else tree_attn, case.function)
    names = {"lengths": "key_value_seq_lengths", "positions": "query_positions"}
    named = {names.get(name, name): x for name, x in operands.items() if not name.startswith("level")}
    if case.causal or case.function in problems.PROMPTS:
        named["is_causal"] = case.causal
    options = {"local_window_size": case.window, "logits_soft_cap": case.cap, "scale": case.scale}
    named |= {name: x for name, x in options.items() if x is not None}
    if case.function in SHARDED and case.mesh:
        named |= {"axis_name": case.axis[0] if len(case.axis) == 1 else case.axis, "mesh": mesh}
        named |= {} if case.block_size == "unnamed" else {"block_size": case.block_size}
    named |= dict(case.arguments)
    if case.function == "energy":
        return None, function(**named)
    if case.function == "attend":
        return _attended(case, function, named)
    if case.function == "hydragen_decode":
        named["levels"] = [_level(case, i, operands) for i in range(len(case.levels))]
    if case.function == "bifurcated_decode":
        named |= {f"prefix_{name}": operands[f"level0_{name}"] for name in ("key", "value")}
        named |= {"prefix_block_size": case.levels[0].block_size} if case.axis else {}
        if "level0_lengths" in operands:
            named["prefix_length"] = operands["level0_lengths"][0]
        if case.mesh:
            named["prefix_block_size"] = case.levels[0].block_size
    return function(**named, return_lse=True)


def _attended(case, attend, named: dict):
    """Attends to each of the case's shards and merges the states; to the whole where it has one."""
    if case.num_shards == 1:
        return tuple(attend(**named))
    size, sinks = case.keys // case.num_shards, named.pop("sinks", None)
    states = []
    for index in range(case.num_shards):
        part = {name: named[name][:, index * size : (index + 1) * size] for name in ("key", "value")}
        sink = {} if sinks is None or index else {"sinks": sinks}
        shard = tree_attn.Shard(index=index, num_shards=case.num_shards, block_size=case.placement)
        states.append(attend(**named | part | sink, shard=shard))
    return tuple(tree_attn.merge_states(jax.tree.map(lambda *x: jnp.stack(x), *states), axis=0))


def _level(case, i: int, operands: dict):
    fields = ("key", "value", "lengths", "key_scale", "value_scale")
    arrays = {name: operands[f"level{i}_{name}"] for name in fields if f"level{i}_{name}" in operands}
    level = case.levels[i]
    return tree_attn.PrefixLevel(sequences=level.sequences, block_size=level.block_size, **arrays)


def differentiated(case, operands: dict) -> list[str]:
    """Returns the names of the operands with respect to which the case's gradients are taken."""
    return [name for name, x in operands.items() if x.dtype == case.dtype or str(x.dtype) == "float32"]


def _with_gradient(case, call, operands: dict, cotangents):
    chosen = {name: operands[name] for name in differentiated(case, operands)}
    result, pull = jax.vjp(lambda chosen: call(operands | chosen), chosen)
    like = lambda x, of_x: None if x is None else _sharded_as(case, x, of_x.astype(x.dtype))
    return result, pull(tuple(map(like, result, cotangents)))[0]


def _sharded_as(case, x, of_x):
    """Returns a cotangent with the type of its result, which on Explicit meshes names the sharding."""
    is_typed = case.explicit and (case.mode != "eager" or case.context)
    return jax.sharding.reshard(of_x, jax.typeof(x).sharding) if is_typed else of_x


def _over_batch(case, mesh):
    """Returns the call of a batch, as `jax.vmap` of a call without a batch."""

    def call(operands: dict):
        axes = {name: 0 if name in BATCHED and not (name == "positions" and x.ndim == 1) else None
                for name, x in operands.items()}  # fmt: skip

        def of_one(operands: dict):
            whole = {name: x[None] if axes[name] == 0 else x for name, x in operands.items()}
            return jax.tree.map(lambda x: x[0], _call(case, mesh, whole))

        return jax.vmap(of_one, in_axes=(axes,))(operands)

    return call


def _in_shard_map(case, mesh, has_gradient: bool):
    """Returns the call within a `shard_map` of the user's own, checked or not, its gradient taken outside or inside."""
    by_name, is_checked = specs(case), case.mode == "shard_map"
    sequence = case.axis
    given_mesh = None if case.context else mesh
    is_whole = case.function not in problems.PROMPTS and not case.shards_heads

    def in_specs(operands):
        return {name: by_name.get(name, P()) for name in operands}

    out_specs = None if case.function == "energy" else by_name["out"], by_name["lse"]
    mapped = functools.partial(jax.shard_map, mesh=given_mesh, check_vma=is_checked)
    call = functools.partial(_call, case, None)

    def outside(operands: dict):
        return mapped(call, in_specs=(in_specs(operands),), out_specs=out_specs)(operands)

    def inside(operands: dict, cotangents):
        names = differentiated(case, operands)

        def of_shard(operands: dict, cotangents):
            def loss(chosen: dict):
                out, lse = call(operands | chosen)
                of_out, of_lse = cotangents
                total = jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0.0) * of_lse)
                total = total if out is None else total + jnp.sum((out * of_out).astype(jnp.float32))
                # Unchecked, each device's loss counts: of equal ones each is a share.
                return total if is_checked or not is_whole else total / num_shards, (out, lse)

            num_shards = math.prod(jax.lax.axis_size(axis) for axis in sequence)
            gradients, result = jax.grad(loss, has_aux=True)({name: operands[name] for name in names})
            if not is_checked:
                gradients = {name: _summed(case, x, by_name.get(name, P())) for name, x in gradients.items()}
            return result, gradients

        operand_specs = in_specs(operands)
        of_gradients = {name: operand_specs[name] for name in names}
        body = mapped(of_shard, in_specs=(operand_specs, out_specs), out_specs=(out_specs, of_gradients))
        return body(operands, cotangents)

    if not has_gradient:
        return jax.jit(lambda operands: (outside(operands), None))
    return jax.jit(inside if case.gradient == "inside" else functools.partial(_with_gradient, case, outside))


def _summed(case, x, spec: P):
    """Returns the sum over the axes over which an operand is replicated: each device has its own copy's gradient."""
    used = {axis for axes in spec if axes is not None for axis in ((axes,) if isinstance(axes, str) else axes)}
    rest = tuple(axis for axis in (case.data, *case.axis) if axis is not None and axis not in used)
    return jax.lax.psum(x, rest) if rest else x
