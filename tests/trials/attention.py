"""Attention functions over devices, meshes, placements, dtypes, options, garbage, gradients and modes.

A case is one program. Its fills are values, lengths and garbage that run through it: most of a trial is compilation.
"""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from . import Reproducer, oracle, problems, programs

SUBJECT = "attention"
MODES = ("jit", "eager", "vmap", "remat", "x64", "shard_map", "shard_map_unchecked")
FUNCTIONS = (*programs.SHARDED, "attend", "lean_decode", "paged_decode")
DENSE = {"lengths", "causal", "scale", "sinks", "positions", "window"}
NARROW = {"cap", "key_scale", "value_scale"}
OPTIONS = {
    "attend": DENSE | NARROW, "tree_decode": DENSE | NARROW, "ring_decode": DENSE | NARROW,
    "ring_attention": (DENSE | NARROW) - {"positions"}, "ulysses_attention": (DENSE | NARROW) - {"positions"},
    "energy": DENSE,
    "hydragen_decode": (DENSE | NARROW) - {"positions", "window"},
    "bifurcated_decode": (DENSE | NARROW) - {"positions", "window"},
    "lean_decode": (DENSE | NARROW) - {"positions"}, "paged_decode": (DENSE | NARROW) - {"positions"},
    "sparq_decode": {"lengths", "causal", "scale"},
}  # fmt: skip
WINDOWS = (0, 1, 3, (4, None), (None, 2), (6, 1), (2, 0), (None, None), np.int64(3), 2**31 - 1, (2**31 - 1, 2))
MAX_SPARQ_KEYS = 2000
GAP = 1e-4  # between scores of SparQ, relative: below it rounding may choose other keys


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Level(Reproducer):
    """A level of a prefix tree: its nodes' sequences, keys of each, and whether lengths and own scales are given."""

    sequences: tuple[tuple[int, ...], ...]
    keys: int
    block_size: int | None = None
    lengths: bool = False
    scales: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Fill(Reproducer):
    """The values of one call: their seed, lengths, positions, garbage, and one query that is NaN."""

    seed: int = 0
    lengths: tuple[int, ...] | None = None
    positions: tuple | None = None
    garbage: str = "ordinary"
    spoils_queries: bool = False
    size: float = 1.0  # standard deviation of the logits at the default scale
    poison: tuple[int, int, int] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Case(Reproducer):
    """One program, and the values that it is given."""

    function: str
    mesh: tuple[tuple[str, int], ...] = ()
    axis: tuple[str, ...] = ()
    data: str | None = None
    explicit: bool = False
    context: bool = False  # jax.set_mesh instead of mesh=
    placed: bool = False  # operands are sharded over the mesh before the call
    block_size: int | str | None = None  # "zigzag"; "unnamed": not given
    batch: int = 2
    queries: int = 1
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 4
    value_dim: int = 4
    keys: int = 8
    page: int = 1
    dtype: str = "float32"
    stored: str | None = None
    causal: bool = False
    window: int | tuple | None = None
    cap: float | None = None
    scale: float | None = None
    sinks: bool = False
    key_scale: bool = False
    value_scale: bool = False
    positions: str | None = None  # "each" or "shared"
    levels: tuple[Level, ...] = ()
    shards: int = 1  # of attend
    arguments: tuple[tuple[str, object], ...] = ()
    extra: tuple[str, ...] = ()  # operands that SparQ need not have: "by_component", "value_mean"
    mode: str = "jit"
    gradient: str | None = None  # "outside" or "inside" of the shard_map
    fills: tuple[Fill, ...] = (Fill(),)

    @property
    def num_shards(self) -> int:
        """Shards of the sequence."""
        return math.prod(dict(self.mesh)[axis] for axis in self.axis) if self.axis else self.shards

    @property
    def placement(self) -> int | str | None:
        """The placement that the arrays are in."""
        return None if self.block_size == "unnamed" else self.block_size

    @property
    def unit(self) -> int:
        """The number of which the placement takes multiples of tokens."""
        return self.num_shards * (2 if self.placement == "zigzag" else self.placement or 1)

    @property
    def shards_heads(self) -> bool:
        """The result is sharded over heads."""
        return dict(self.arguments).get("shard_heads", False)

    @property
    def has_whole_suffixes(self) -> bool:
        """Each sequence's suffix lies on one device."""
        return dict(self.arguments).get("shard_suffix") == "batch"

    @property
    def integer_dtype(self):
        """The dtype of lengths and positions."""
        return np.int64 if self.mode == "x64" else np.int32


def count(case: Case) -> int:
    """Returns the number of draws in a case."""
    return len(case.fills)


def check(case: Case) -> str | None:
    """Returns what is wrong with a call's result, its gradient, or its copies on other devices; or None."""
    try:
        return fault(case)
    except NotImplementedError as error:
        # A backend that is named may lack an option: it says so before anything runs.
        return None if "implementation" in dict(case.arguments) else f"NotImplementedError: {error}"


def fault(case: Case) -> str | None:
    """Returns what `check` does; raises what the call raises."""
    try:
        for fill in case.fills:
            problem = problems.make(case, fill)
            check_one = _check_sparq if case.function == "sparq_decode" else _check
            found = check_one(case, fill, problem)
            if found is not None:
                return f"{found} ({fill!r})"
    finally:
        programs.program_of.cache_clear()
    return None


def _check(case: Case, fill: Fill, problem: problems.Problem) -> str | None:
    state = problem.exact()
    cotangents = None
    if case.gradient is not None:
        cotangents = _cotangents(case, fill, problem, state)
    (out, lse), gradients = programs.run(case, problem.operands, cotangents)
    if problem.query_order is None:
        is_meant = np.ones(state.lse.shape[:2], bool)
        natural = np.asarray
    else:  # queries beyond a prompt's length are padding: their result is no one's
        is_meant = np.arange(state.lse.shape[1]) < problem.lengths[:, None]
        natural = lambda x: np.asarray(x)[:, np.argsort(problem.query_order)]
    if case.function == "energy":
        found = _result_fault(case, None, natural(lse), state, None, is_meant)
    else:
        plain = None
        if case.dtype != "float32":
            plain = oracle.plain(state, problem._gathered(1), problems.dtype_of(case.dtype))
        found = _result_fault(case, natural(out), natural(lse), state, plain, is_meant)
        found = found or _copies_fault("out", out)
    found = found or _copies_fault("lse", lse)
    if found is None and cotangents is not None:
        found = _gradient_fault(case, problem, state, cotangents, gradients)
    return found


def _result_fault(case: Case, out, lse, state, plain, is_meant) -> str | None:
    from tree_attn.tolerances import ROUNDINGS, lse_tolerance, max_abs_error, out_tolerance

    if lse.dtype != np.float32:
        return f"dtype of lse: {lse.dtype}"
    if lse.shape != state.lse.shape:
        return f"shape of lse: {lse.shape}, expected {state.lse.shape}"
    lse, expected = lse[is_meant].astype(np.float64), state.lse[is_meant]
    where = ~np.isnan(expected)
    if not np.isnan(lse[~where]).all():
        return "NaN hidden: lse is a number where a query is NaN"
    if not np.array_equal(np.isneginf(lse[where]), np.isneginf(expected[where])):
        return f"empty: lse is {lse.ravel()[:12]}, expected {expected.ravel()[:12]}"
    error, allowed = max_abs_error(lse[where], expected[where]), lse_tolerance(expected[where])
    if state.is_capped:  # a logit near 0 has the rounding of its large products
        allowed += ROUNDINGS * np.finfo(np.float32).eps * state.largest_logit
    if not error <= allowed:
        return f"lse: off by {error:.3g}, allowed {allowed:.3g}; got {lse.ravel()[:6]}, expected {expected.ravel()[:6]}"
    if out is None:
        return None
    if str(out.dtype) != case.dtype:
        return f"dtype of out: {out.dtype}"
    if out.shape != state.out.shape:
        return f"shape of out: {out.shape}, expected {state.out.shape}"
    out, exact = out[is_meant][where].astype(np.float64), state.out[is_meant][where]
    plain = None if plain is None else plain[is_meant][where]
    allowed = out_tolerance(case.dtype, exact, plain, np.append(expected[where], state.largest_logit))
    error = max_abs_error(out, exact)
    if not error <= allowed:
        return f"out: off by {error:.3g}, allowed {allowed:.3g}; got {out.ravel()[:6]}, expected {exact.ravel()[:6]}"
    if out[np.isneginf(expected[where])].any():
        return "empty: out of a query that sees nothing is not 0"
    return None


def _copies_fault(name: str, x) -> str | None:
    """Returns whether devices that hold the same part hold other bits."""
    parts: dict = {}
    for shard in x.addressable_shards:
        parts.setdefault(str(shard.index), []).append(np.asarray(shard.data))
    is_same = all(np.array_equal(part[0], copy, equal_nan=True) for part in parts.values() for copy in part)
    return None if is_same else f"copies: {name} has other bits on other devices"


def _cotangents(case: Case, fill: Fill, problem: problems.Problem, state) -> tuple:
    """Draws the cotangents of out and lse, in their stored order; 0 for a prompt's padding."""
    rng = np.random.default_rng(fill.seed + 1)
    of_out, of_lse = rng.normal(size=state.out.shape), rng.normal(size=state.lse.shape)
    if problem.query_order is not None:
        is_meant = np.arange(state.lse.shape[1]) < problem.lengths[:, None]
        of_out, of_lse = of_out * is_meant[:, :, None, None], of_lse * is_meant[:, :, None]
        of_out, of_lse = of_out[:, problem.query_order], of_lse[:, problem.query_order]
    of_out = None if case.function == "energy" else of_out.astype(problems.dtype_of(case.dtype))
    return of_out, of_lse.astype(np.float32)


def _gradient_fault(case: Case, problem: problems.Problem, state, cotangents, gradients) -> str | None:
    of_out, of_lse = cotangents
    of_out = np.zeros(state.out.shape) if of_out is None else np.asarray(of_out, np.float64)
    if problem.query_order is not None:
        natural = np.argsort(problem.query_order)
        of_out, of_lse = of_out[:, natural], of_lse[:, natural]
    expected = problem.gradient(state, of_out, of_lse)
    bounds = problem.gradient(state, of_out, of_lse, absolute=True)
    of_logits = 4 * float(np.finfo(np.float32).eps) * state.largest_logit
    rounding = 2e-5 if case.dtype == "float32" else 8 * 2.0 ** (-8 if case.dtype == "bfloat16" else -11)
    for name, got in gradients.items():
        got = np.asarray(got).astype(np.float64)
        if got.shape != expected[name].shape:
            return f"shape of gradient of {name}: {got.shape}, expected {expected[name].shape}"
        error = np.abs(got - expected[name]).max(initial=0.0)
        allowed = (rounding + of_logits) * (np.abs(bounds[name]).max(initial=0.0) + 1e-3)
        if not error <= allowed:
            at = np.unravel_index(np.argmax(np.nan_to_num(np.abs(got - expected[name]), nan=np.inf)), got.shape)
            numbers = f"{got[at]:.6g} at {tuple(map(int, at))}, expected {expected[name][at]:.6g}"
            return f"gradient of {name}: off by {error:.3g}, allowed {allowed:.3g}; got {numbers}"
    return None


def _check_sparq(case: Case, fill: Fill, problem: problems.Problem) -> str | None:
    named, options = problem.operands, dict(case.arguments)
    (out, lse), _ = programs.run(case, named)
    found = _copies_fault("out", out) or _copies_fault("lse", lse)
    if found is not None:
        return found
    exact = None if case.keys > MAX_SPARQ_KEYS else _exact_sparq(case, problem, options)
    if exact is None or exact.gap < GAP:  # rounding decides which keys are kept, and garbage does not
        others = problems.make(case, dataclasses.replace(fill, garbage="ordinary")).operands
        (other_out, other_lse), _ = programs.run(case, others)
        is_same = np.array_equal(out, other_out) and np.array_equal(lse, other_lse)
        return None if is_same else "garbage: out depends on what lies beyond the lengths"
    dense, plain = problem.exact(), None
    if case.dtype != "float32":
        plain = exact.out + oracle.plain(dense, problem.pools[0].value, problems.dtype_of(case.dtype)) - dense.out
    state = dataclasses.replace(dense, out=exact.out, lse=exact.lse)
    return _result_fault(case, np.asarray(out), np.asarray(lse), state, plain, np.ones(lse.shape[:2], bool))


def _exact_sparq(case: Case, problem: problems.Problem, options: dict) -> oracle.Sparq:
    pool, options = problem.pools[0], dict(options)
    selection = options.pop("selection", "global")
    options.setdefault("reallocate", case.heads == case.kv_heads)
    shard_of = None
    if selection == "per_shard" and case.num_shards > 1:
        slots = -(-case.keys // case.num_shards)
        at = np.arange(case.keys)
        shard_of = at // slots if case.placement is None else at // case.placement % case.num_shards
    return oracle.sparq(
        problem.operands["query"], pool.key, pool.value, problem.lengths, scale=case.scale, is_causal=case.causal,
        num_shards=case.num_shards, shard_of=shard_of, value_mean=problem.operands.get("value_mean"),
        **{name: x for name, x in options.items() if name not in ("reduction", "implementation")},
    )  # fmt: skip


def simpler(case: Case) -> Iterator[Case]:
    """Yields cases with one thing less each, the largest things first."""
    replaced = lambda **changes: dataclasses.replace(case, **changes)
    if len(case.fills) > 1:
        yield from (replaced(fills=(fill,)) for fill in case.fills)
    defaults = {field.name: field.default for field in dataclasses.fields(Case)}
    names = ("gradient", "mode", "explicit", "context", "placed", "cap", "scale", "sinks", "key_scale", "value_scale")
    for name in (*names, "window", "causal"):
        if getattr(case, name) != defaults[name]:
            yield replaced(**{name: defaults[name]})
    for field, plain in (("garbage", "ordinary"), ("spoils_queries", False), ("poison", None), ("size", 1.0)):
        if any(getattr(fill, field) != plain for fill in case.fills):
            yield replaced(fills=tuple(dataclasses.replace(fill, **{field: plain}) for fill in case.fills))
    if case.positions:
        fills = tuple(dataclasses.replace(fill, positions=None) for fill in case.fills)
        yield replaced(positions=None, fills=fills)
    for argument in case.arguments:
        if argument[0] not in ("num_components", "num_keys"):
            yield replaced(arguments=tuple(other for other in case.arguments if other != argument))
    needs_heads = case.shards_heads or case.function == "ulysses_attention" or ("rotation", "two_way") in case.arguments
    if (case.kv_heads > 1 or case.heads > 1) and not needs_heads:
        yield replaced(heads=1, kv_heads=1)
    if case.queries > 1 and case.function not in problems.PROMPTS and not case.positions:
        yield replaced(queries=1)
    if case.stored is not None:
        yield replaced(stored=None, key_scale=False, value_scale=False)
    if case.dtype != "float32":
        yield replaced(dtype="float32")
    if case.data is not None:
        yield replaced(data=None, mesh=tuple(axis for axis in case.mesh if axis[0] != case.data))
    if len(case.axis) > 1 and case.function != "ulysses_attention":
        size = case.num_shards
        others = tuple(axis for axis in case.mesh if axis[0] not in case.axis)
        yield replaced(axis=("seq",), mesh=(*others, ("seq", size)))
    for keys in (case.unit, case.keys // case.unit // 2 * case.unit):
        fits = 0 < keys < case.keys and all(max(fill.lengths or (0,)) <= keys for fill in case.fills)
        if fits and not case.levels:
            yield replaced(keys=keys, queries=keys if case.function in problems.PROMPTS else case.queries)


def draw(rng: np.random.Generator, **wanted) -> Case:
    """Returns a random case; `wanted` as in `draws.draw`."""
    from . import draws

    return draws.draw(rng, **wanted)
