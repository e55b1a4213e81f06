"""Random attention cases for GPUs: the backends that these have, with NaN as garbage in every fill."""

import dataclasses

from . import programs
from .attention import Case, Level
from .draws import fill_of, often, one, options_of

# Head dim and group.
GPU_SHAPES = ((64, 1), (64, 2), (64, 8), (80, 2), (96, 1), (128, 1), (128, 4), (128, 7), (128, 16), (256, 2))


def draw_on_gpu(rng, num_devices: int, *, num_fills: int = 6) -> Case:
    """Returns a random case of the backends that GPUs have, with NaN as garbage in every fill.

    A named backend may say that it cannot do an option: that is no fault (`attention.check`).
    """
    functions = [
        "attend",
        "sparq_decode",
        "tree_decode",
        "tree_decode",
        "lean_decode",
        "paged_decode",
        "bifurcated_decode",
    ]
    functions += ["ring_decode", "ring_attention"] if num_devices > 1 else []
    fields: dict = {"function": one(rng, functions)}
    is_sharded = fields["function"] in programs.SHARDED and (num_devices > 1 or fields["function"] == "tree_decode")
    if is_sharded:
        fields |= {"mesh": (("seq", num_devices),), "axis": ("seq",)}
    head_dim, group = one(rng, GPU_SHAPES)
    kv_heads = one(rng, (1, 2))
    fields |= dict(
        batch=one(rng, (1, 2, 3)), queries=one(rng, (1, 1, 1, 2, 5, 8)), kv_heads=kv_heads, heads=group * kv_heads,
        head_dim=head_dim, value_dim=head_dim, dtype=one(rng, ("bfloat16", "bfloat16", "float16")),
    )  # fmt: skip
    block = one(rng, (None, 1, 16)) if is_sharded else None
    unit = 8 * (num_devices if is_sharded else 1) * (2 if block == 16 else 1)
    fields |= dict(block_size=block, keys=unit * int(rng.integers(1, max(one(rng, (64, 300, 2000)) // unit, 2))))
    if fields["function"] == "ring_attention":
        fields["keys"] = min(fields["keys"], 512 // unit * unit)
        fields["queries"] = fields["keys"]
    if fields["function"] == "paged_decode":
        fields["page"] = 64
        fields["keys"] = -(-fields["keys"] // 64) * 64
    if fields["function"] == "sparq_decode":
        return _sparq_on_gpu(rng, fields, num_fills)
    if fields["function"] == "bifurcated_decode":
        fields["batch"] = one(rng, (1, 2, 3, 13, 40))
        shape = dict(sequences=(tuple(range(fields["batch"])),), keys=unit * int(rng.integers(1, 40)))
        fields["levels"] = (Level(**shape, block_size=None, lengths=often(rng, 0.6)),)
    options = options_of(rng, fields) | {"dtype": fields["dtype"]}
    options.pop("block_size", None)
    if options.get("stored") == "int8":
        options["stored"] = "float8_e4m3fn"
    arguments = _gpu_arguments(rng, fields, num_devices if is_sharded else 1)
    case = Case(**(fields | options), arguments=arguments)
    fills = tuple(fill_of(rng, case, True, i) for i in range(num_fills))
    fills = tuple(dataclasses.replace(fill, garbage="nan", poison=None, size=min(fill.size, 5.0)) for fill in fills)
    return dataclasses.replace(case, fills=fills)


def _sparq_on_gpu(rng, fields: dict, num_fills: int) -> Case:
    """Returns a case of SparQ's kernels: sizes that they have, and keys by component."""
    p = Case(**fields).num_shards
    group = one(rng, (1, 2, 8))
    fields = fields | dict(
        keys=512 * p * one(rng, (1, 4, 8)), queries=one(rng, (1, 3)), kv_heads=2, heads=2 * group,
        head_dim=one(rng, (64, 80, 128)), extra=one(rng, (("by_component",), ("by_component", "value_mean"))),
    )  # fmt: skip
    fields |= {"value_dim": fields["head_dim"], "causal": often(rng, 0.5) and fields["queries"] > 1}
    arguments = dict(implementation="mosaic_gpu", num_components=16, num_keys=one(rng, (64, 128)))
    arguments |= dict(local_window=16, reallocate=often(rng, 0.6))
    case = Case(**fields, arguments=tuple(arguments.items()))
    fills = (dataclasses.replace(fill_of(rng, case, True, i), garbage="nan", size=1.0) for i in range(num_fills))
    return dataclasses.replace(case, fills=tuple(fills))


def _gpu_arguments(rng, fields: dict, num_shards: int) -> tuple:
    function = fields["function"]
    ragged = ("mosaic_gpu",) * 3 + ("xla", None)
    backends = ragged if function in ("lean_decode", "paged_decode") else (*ragged, "cudnn", "cudnn")
    arguments = {"implementation": one(rng, backends)}
    if function == "tree_decode" and num_shards > 1:
        arguments["reduction"] = one(rng, ("allreduce", "gather", "fused", "fused", None))
    if function == "ring_decode":
        arguments["variant"] = one(rng, ("overlapped", "public"))
    return tuple((name, x) for name, x in arguments.items() if x is not None)
