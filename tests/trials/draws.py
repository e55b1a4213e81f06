"""Random attention cases: all of them are calls that the documentation allows."""

import dataclasses

import numpy as np

from . import attention, problems, programs
from .attention import Case, Fill, Level

NUM_DEVICES = 8
# Sizes of the axes of the sequence, and of an axis over which the batch is sharded.
SEQUENCES = ((1,), (2,), (3,), (4,), (5,), (6,), (7,), (8,), (2, 2), (4, 2), (2, 3), (3, 2), (2, 4), (2, 2, 2))
FILLS = 4
CONTEXT_MODES = ("jit", "eager", "x64", "remat", "shard_map", "shard_map_unchecked")


def draw(rng, *, function=None, mode=None, gradient=None, num_fills=FILLS) -> Case:
    """Returns a random case of eight emulated devices.

    Args:
      function, mode, gradient: of the case; None: drawn. A mode that the function has not becomes "jit".
    """
    function = function or one(rng, attention.FUNCTIONS, p=_weights())
    allowed = _modes(function)
    mode = mode or one(rng, allowed, p=_mode_weights(allowed))
    fields = {"function": function, "mode": mode if mode in allowed else "jit"}
    fields |= _where(rng, fields)
    fields |= _shape(rng, fields)
    fields |= options_of(rng, fields)
    fields |= _gradient(rng, fields, gradient)
    case = Case(**fields)
    return _with_fills(rng, case, num_fills)


def one(rng, choices, p=None):
    return choices[int(rng.choice(len(choices), p=p))]


def often(rng, probability: float) -> bool:
    return bool(rng.random() < probability)


def _weights() -> np.ndarray:
    weights = np.array([3.0 if name in ("tree_decode", "attend") else 1.0 for name in attention.FUNCTIONS])
    return weights / weights.sum()


def _modes(function: str) -> tuple[str, ...]:
    if function in programs.SHARDED:
        no_vmap = function in ("hydragen_decode", "bifurcated_decode")
        return tuple(mode for mode in attention.MODES if not (no_vmap and mode == "vmap"))
    modes = ("jit", "eager", "remat", "x64")
    return (*modes, "vmap") if function == "attend" else modes


def _mode_weights(modes) -> np.ndarray:
    weights = np.array([4.0 if mode == "jit" else 1.0 for mode in modes])
    return weights / weights.sum()


def _where(rng, fields: dict) -> dict:
    """Draws the mesh, the axes and how operands lie on it."""
    if fields["function"] not in programs.SHARDED:
        return {}
    optional = fields["function"] in ("energy", "hydragen_decode", "bifurcated_decode", "sparq_decode")
    if optional and not fields["mode"].startswith("shard_map") and often(rng, 0.2):
        return {}
    sizes = one(rng, SEQUENCES)
    names = tuple(f"seq{i}" for i in range(len(sizes))) if len(sizes) > 1 else ("seq",)
    axes, total = list(zip(names, sizes)), int(np.prod(sizes))
    data = None
    if 2 * total <= NUM_DEVICES and len(sizes) < 3 and often(rng, 0.5):
        name = one(rng, ("data", "data", "unused"))
        axes.append((name, 2))
        data = "data" if name == "data" and fields["mode"] != "vmap" else None
    mesh = tuple(axes[i] for i in rng.permutation(len(axes)))
    axis = tuple(names[i] for i in rng.permutation(len(names)))
    context = fields["mode"] in CONTEXT_MODES and often(rng, 0.4)
    return dict(mesh=mesh, axis=axis, data=data, explicit=often(rng, 0.4), context=context, placed=often(rng, 0.5))


def _shape(rng, fields: dict) -> dict:
    """Draws sizes, placement and what belongs to one function only."""
    function, mode = fields["function"], fields["mode"]
    part = Case(**fields)
    p = part.num_shards
    group, kv_heads = one(rng, (1, 1, 2, 3)), one(rng, (1, 2, 3))
    shape = dict(
        batch=one(rng, (1, 2, 3)) * (2 if part.data else 1), queries=one(rng, (1, 1, 2, 3, 5)), kv_heads=kv_heads,
        heads=group * kv_heads, head_dim=one(rng, (3, 4, 8, 16)), arguments=(), extra=(),
    )  # fmt: skip
    shape["value_dim"] = shape["head_dim"] if often(rng, 0.7) else one(rng, (1, 5, 8))
    block = one(rng, (None, 1, 2, 3, 8))
    if function == "ring_attention" or (function == "ulysses_attention" and len(part.axis) == 1):
        block = one(rng, (None, 1, 2, 3, 8, "zigzag", "zigzag"))
    if function == "ulysses_attention":
        shape |= _exchanged_heads(rng, dict(part.mesh)[part.axis[0]])
    if function == "attend":
        shape["shards"] = p = one(rng, (1, 1, 2, 3))
        block = block if p > 1 else None
    needs_even = block is not None or fields.get("placed") or mode.startswith("shard_map")
    needs_even = needs_even or function in (*problems.PROMPTS, "attend")
    unit = dataclasses.replace(part, block_size=block, shards=p).unit if needs_even else 1
    longest = 24 if often(rng, 0.9) or function in problems.PROMPTS else 1100
    shape["keys"] = unit * int(rng.integers(1, max(longest // unit, 1) + 1))
    if function in ("tree_decode", "ring_decode", "attend", "sparq_decode") and often(rng, 0.02):
        shape["keys"] = 0
    shape["block_size"] = block if part.axis or function == "attend" else None
    if function in problems.PROMPTS:
        shape["queries"] = shape["keys"]
    return shape | _special(rng, fields, shape, p)


def _exchanged_heads(rng, u: int) -> dict:
    """Draws numbers of heads that u devices exchange: u divides the query heads, and the KV heads or they u."""
    kv_heads = one(rng, [count for count in (1, 2, 3, u, 2 * u) if count % u == 0 or u % count == 0])
    groups = [group for group in (1, 2, 3, u) if group * kv_heads % u == 0]
    return {"kv_heads": kv_heads, "heads": one(rng, groups) * kv_heads}


def _special(rng, fields: dict, shape: dict, p: int) -> dict:
    """Draws the arguments that one function has."""
    function, axes = fields["function"], len(fields.get("axis", ()))
    arguments: dict = {}
    extra: list[str] = []
    changes: dict = {}
    if function == "tree_decode" and often(rng, 0.15):
        arguments["shard_heads"] = True
        changes["kv_heads"] = shape["kv_heads"]
        changes["heads"] = shape["kv_heads"] * p * (shape["heads"] // shape["kv_heads"])
    elif axes and function in ("tree_decode", "hydragen_decode", "bifurcated_decode", "sparq_decode"):
        each = tuple(one(rng, ("allreduce", "gather")) for _ in range(axes))
        reduction = one(rng, (None, "allreduce", "gather", *(("hierarchical", each) if axes > 1 else (each,))))
        arguments |= {} if reduction is None else {"reduction": reduction}
    if function == "ring_decode":
        arguments["variant"] = one(rng, ("overlapped", "public"))
    if function in problems.PROMPTS or arguments.get("variant") == "overlapped":
        is_split = shape["kv_heads"] > 1 and function != "ulysses_attention"  # whose ring has a part of the heads
        rotation = one(rng, (None, "one_way", "joint", *(("two_way", "two_way") if is_split else ())))
        arguments |= {} if rotation is None else {"rotation": rotation}
    if function == "paged_decode":
        changes["page"] = one(rng, (1, 2, 4))
        changes["keys"] = -(-shape["keys"] // changes["page"]) * changes["page"]
    if function in ("lean_decode", "paged_decode"):
        changes["value_dim"] = shape["head_dim"]
    if function == "bifurcated_decode":
        everyone = tuple(range(shape["batch"]))
        changes["levels"] = (_level(rng, fields, (everyone,), p, block=None),)
    if function == "hydragen_decode":
        # In one's own `shard_map` levels name sequences of each part of the batch; the oracle's are of the whole.
        is_part = fields.get("data") and fields["mode"].startswith("shard_map")
        depth = 0 if is_part else one(rng, (0, 1, 1, 2))
        changes["levels"] = tuple(_level(rng, fields, _nodes(rng, shape["batch"]), p) for _ in range(depth))
    is_prefix = function in ("hydragen_decode", "bifurcated_decode")
    if is_prefix and axes and fields.get("data") is None and often(rng, 0.3):
        arguments["shard_suffix"] = "batch"
        changes["batch"] = p * one(rng, (1, 2))
        if function == "bifurcated_decode":
            served = (tuple(range(changes["batch"])),)
            changes["levels"] = (_level(rng, fields, served, p, block=None),)
        else:
            changes["levels"] = (_level(rng, fields, _nodes(rng, changes["batch"]), p),)
    if function == "sparq_decode":
        more, names = _sparq(rng, shape, p)
        arguments |= more
        extra += names
    return changes | {"arguments": tuple(arguments.items()), "extra": tuple(extra)}


def _nodes(rng, batch: int) -> tuple[tuple[int, ...], ...]:
    """Draws nodes and the sequences of each; some sequences have none."""
    nodes = int(rng.integers(1, 4))
    of = rng.integers(-1, nodes, batch)
    return tuple(tuple(int(b) for b in rng.permutation(np.flatnonzero(of == node))) for node in range(nodes))


def _level(rng, fields: dict, sequences, p: int, block="drawn") -> Level:
    block = one(rng, (None, 1, 2)) if block == "drawn" else block
    is_even = block is not None or fields.get("placed") or fields["mode"].startswith("shard_map")
    unit = p * (block or 1) if is_even else 1
    is_bifurcated = fields["function"] == "bifurcated_decode"
    return Level(
        sequences=sequences, keys=unit * int(rng.integers(1, max(16 // unit, 1) + 1)), block_size=block,
        lengths=often(rng, 0.6), scales=not is_bifurcated and often(rng, 0.1),
    )  # fmt: skip


def _sparq(rng, shape: dict, p: int) -> tuple[dict, list[str]]:
    k = one(rng, (1, 2, 4, 100))
    arguments = dict(num_components=int(rng.integers(1, shape["head_dim"] + 1)), num_keys=k)
    arguments["local_window"] = int(rng.integers(0, min(k, 4) + 1))
    arguments["score_temperature"] = one(rng, ("coverage", "coverage", "head_dim", "num_components"))
    if often(rng, 0.5):
        arguments["reallocate"] = often(rng, 0.6)
    if p > 1:
        arguments["selection"] = one(rng, ("global", "per_shard"))
    is_even = shape["keys"] % p == 0 and shape["keys"] > 0
    extra = [name for name in ("by_component", "value_mean") if often(rng, 0.3)]
    return arguments, [name for name in extra if is_even or name != "by_component"]


def options_of(rng, fields: dict) -> dict:
    """Draws dtypes and the attention options."""
    function, names = fields["function"], attention.OPTIONS[fields["function"]]
    options: dict = {"dtype": one(rng, ("float32",) * 4 + ("bfloat16", "float16"))}
    if "key_scale" in names and often(rng, 0.2):
        options["stored"] = one(rng, ("float8_e4m3fn", "int8"))
    chance = 0.5 if options.get("stored") else 0.15
    options |= {name: often(rng, chance) for name in ("key_scale", "value_scale") if name in names}
    if "sinks" in names:
        options["sinks"] = often(rng, 0.2)
    if "causal" in names:
        options["causal"] = often(rng, 0.8 if function in problems.PROMPTS else 0.4)
    if "window" in names and often(rng, 0.25):
        options["window"] = one(rng, attention.WINDOWS)
    if "cap" in names and often(rng, 0.2):
        options["cap"] = one(rng, (0.5, 3.0, 30.0, 1e4))
    if often(rng, 0.2):
        options["scale"] = one(rng, (0.1, 0.7, 2.0, -0.4))
    if "positions" in names and often(rng, 0.25):
        options["positions"] = one(rng, ("each", "shared"))
    needs_placement = options.get("causal") or options.get("window") is not None or options.get("positions")
    needs_placement = needs_placement or dict(fields.get("arguments", ())).get("local_window")
    levels_differ = any(level.lengths for level in fields.get("levels", ()))
    is_even = fields["keys"] % max(Case(**fields).num_shards, 1) == 0
    if fields.get("axis") and not needs_placement and not levels_differ and is_even and often(rng, 0.2):
        options["block_size"] = "unnamed"
    return options


def _gradient(rng, fields: dict, wanted: str | None) -> dict:
    if fields["function"] == "sparq_decode" or fields["keys"] == 0:
        return {}
    is_taken = wanted is not None or often(rng, 0.9 if fields["mode"] == "remat" else 0.3)
    inside = fields["mode"].startswith("shard_map")
    side = wanted or one(rng, ("outside", "inside"))
    # XLA's CPU compiler ends the process over a 16-bit all-reduce of some of a mesh's axes (AllReducePromotion).
    safe = {} if len(fields.get("mesh", ())) == len(fields.get("axis", ())) else {"dtype": "float32"}
    return {"gradient": side if inside else "outside"} | safe if is_taken else {}


def _with_fills(rng, case: Case, num_fills: int) -> Case:
    has_lengths = case.function in ("lean_decode", "paged_decode")
    has_lengths = has_lengths or (case.block_size != "unnamed" and often(rng, 0.75))
    fills = tuple(fill_of(rng, case, has_lengths, i) for i in range(num_fills))
    return dataclasses.replace(case, fills=fills)


def fill_of(rng, case: Case, has_lengths: bool, i: int) -> Fill:
    fields: dict = dict(seed=int(rng.integers(1 << 20)), size=one(rng, (1.0, 1.0, 1.0, 5.0, 1e4)))
    # The first fill's garbage is the worst, since a case may have one fill only.
    fields["garbage"] = "mixed" if i == 0 else one(rng, problems.KINDS_OF_GARBAGE)
    if has_lengths:
        fields["lengths"] = tuple(int(_length(rng, case)) for _ in range(case.batch))
    if case.positions:
        at = lambda: tuple(int(_position(rng, case)) for _ in range(case.queries))
        fields["positions"] = at() if case.positions == "shared" else tuple(at() for _ in range(case.batch))
    if case.function in problems.PROMPTS:
        fields["spoils_queries"] = often(rng, 0.3)
    can_poison = case.gradient is None and case.function not in (*problems.PROMPTS, "sparq_decode")
    if can_poison and often(rng, 0.1):
        fields["poison"] = tuple(int(rng.integers(n)) for n in (case.batch, case.queries, case.heads))
    if case.function == "sparq_decode" or case.gradient is not None:
        fields["size"] = min(fields["size"], 5.0)
    return Fill(**fields)


def _length(rng, case: Case) -> int:
    kind = rng.random()
    if kind < 0.15:
        return 0
    if kind < 0.3:
        return case.keys
    return rng.integers(0, case.keys + 1)


def _position(rng, case: Case) -> int:
    if rng.random() < 0.08:
        return one(rng, (2**31 - 1, -(2**31), -1, -2))
    return rng.integers(-4, case.keys + 6)
