"""Random sequences of operations of `KVCache`, beside a cache that is a Python list of tokens for each sequence."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import tree_attn
from tree_attn import CacheFullError, KVCache, ring_baseline

from . import Reproducer, oracle, problems

SUBJECT = "caches"
MODES = ("jit", "jit", "donate", "eager", "shard_map")
ATTENTIONS = ("tree_decode", "ring_decode")
NUM_OPERATIONS = 10


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Case(Reproducer):
    """A cache and what is done to it: operations are tuples of a name and its arguments, a seed the last."""

    operations: tuple[tuple, ...]
    mesh: tuple[tuple[str, int], ...] = (("seq", 2),)
    axis: tuple[str, ...] = ("seq",)
    data: str | None = None
    explicit: bool = False
    context: bool = False
    batch: int = 2
    capacity: int = 12
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 4
    dtype: str = "float32"
    new_dtype: str | None = None  # of what is written; None: as `dtype`
    has_scales: bool = False
    block_size: int = 1
    layers: int | None = None
    stacks: bool = True
    sums: bool = False
    by_component: bool = False
    rounds: int | None = None  # the window, in blocks of every shard
    mode: str = "jit"

    @property
    def num_shards(self) -> int:
        """Shards of the sequence."""
        return math.prod(dict(self.mesh)[axis] for axis in self.axis)

    @property
    def window(self) -> int | None:
        """Tokens that the cache keeps; None: all."""
        return None if self.rounds is None else self.rounds * self.num_shards * self.block_size


def draw(rng: np.random.Generator) -> Case:
    """Returns a random cache and operations on it."""
    one = lambda choices: choices[int(rng.integers(len(choices)))]
    sizes = one(((1,), (2,), (3,), (4,), (5,), (7,), (8,), (2, 2), (2, 3), (2, 2, 2)))
    names = ("seq",) if len(sizes) == 1 else tuple(f"seq{i}" for i in range(len(sizes)))
    axes, data = list(zip(names, sizes)), None
    if 2 * math.prod(sizes) <= 8 and rng.random() < 0.4:
        axes.append(("data", 2))
        data = "data" if rng.random() < 0.7 else None
    dtype, layers = one(("float32", "float32", "bfloat16", "float8_e4m3fn", "int8")), one((None, None, 1, 2))
    is_narrow = dtype in ("float8_e4m3fn", "int8")
    case = Case(
        operations=(), mesh=tuple(axes[i] for i in rng.permutation(len(axes))),
        axis=tuple(names[i] for i in rng.permutation(len(names))), data=data, explicit=rng.random() < 0.3,
        context=rng.random() < 0.3, batch=one((1, 2, 3)) * (2 if data else 1), capacity=int(rng.integers(4, 28)),
        kv_heads=one((1, 2)), heads=one((2, 4)), head_dim=one((2, 4, 8)), dtype=dtype,
        new_dtype=one(("float32", "bfloat16")) if is_narrow else None,
        has_scales=dtype == "int8" or (is_narrow and rng.random() < 0.5), block_size=one((1, 1, 2, 3, 8)),
        layers=layers, stacks=rng.random() < 0.6, sums=rng.random() < 0.4, by_component=rng.random() < 0.4,
        mode=one(MODES),
    )  # fmt: skip
    if rng.random() < 0.3:
        case = dataclasses.replace(case, rounds=int(rng.integers(1, 4)), sums=False, by_component=False)
    operations = tuple(_operation(rng, case) for _ in range(NUM_OPERATIONS))
    return dataclasses.replace(case, operations=(*operations, ("attend", 1, "tree_decode", 0)))


def _operation(rng, case: Case) -> tuple:
    seed = int(rng.integers(1 << 16))
    length = lambda: float(np.round(rng.random(), 2))  # a share of what there is
    at_once = lambda several: 1 if case.rounds is not None else int(rng.choice([1, several]))
    in_pieces = bool(rng.random() < 0.4) and case.rounds is None
    kinds = {
        "append": ("append", at_once(3), seed),
        "write": ("write", at_once(3), seed),
        "attend": ("attend", at_once(2), str(rng.choice(ATTENTIONS)), seed),
        "with_lengths": ("with_lengths", tuple(length() for _ in range(case.batch))),
        "spoil": ("spoil", seed),
        "prefix": ("prefix", tuple(length() for _ in range(case.batch)), in_pieces, seed),
        "with_sequence": ("with_sequence", int(rng.integers(case.batch)), length(), seed),
        "prefill": ("prefill", tuple(length() for _ in range(case.batch)), seed),
    }
    chances = {"append": 5, "write": 2, "attend": 3, "with_lengths": 1, "spoil": 1, "prefix": 1, "with_sequence": 1}
    chances["prefill"] = 1 if case.mode != "shard_map" else 0
    names = list(chances)
    return kinds[rng.choice(names, p=np.array(list(chances.values())) / sum(chances.values()))]


def count(case: Case) -> int:
    """Returns the number of operations."""
    return len(case.operations)


def check(case: Case) -> str | None:
    """Returns where the cache and its model come to differ, or None."""
    trial = _Trial(case)
    with jax.set_mesh(trial.mesh) if case.context else contextlib.nullcontext():
        trial.cache = trial.create()
        for i, (name, *arguments) in enumerate(case.operations):
            fault = getattr(trial, f"do_{name}")(*arguments) or trial.difference()
            if fault is not None:
                return f"{fault} (operation {i}: {name})"
    return None


def simpler(case: Case) -> Iterator[Case]:
    """Yields cases with fewer operations, then plainer caches."""
    for i in range(len(case.operations)):
        yield dataclasses.replace(case, operations=case.operations[:i] + case.operations[i + 1 :])
    for name in ("mode", "explicit", "context", "by_component", "sums", "layers", "rounds", "block_size"):
        default = {field.name: field.default for field in dataclasses.fields(Case)}[name]
        if getattr(case, name) != default:
            yield dataclasses.replace(case, **{name: default})
    if case.dtype != "float32":
        yield dataclasses.replace(case, dtype="float32", new_dtype=None, has_scales=False)
    if case.data is not None:
        yield dataclasses.replace(case, data=None)


class _Trial:
    """A cache beside its model: for each layer and sequence the tokens written, and each sequence's length."""

    def __init__(self, case: Case):
        self.case = case
        names, sizes = zip(*case.mesh)
        grid = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
        kind = AxisType.Explicit if case.explicit else AxisType.Auto
        self.mesh = Mesh(grid, names, axis_types=(kind,) * len(names))
        unit = case.num_shards * case.block_size
        self.unit, self.capacity = unit, -(-case.capacity // unit) * unit
        self.num_slots = min(self.capacity, case.window or self.capacity)
        self.num_layers = case.layers or 1
        self.scales = {}
        if case.has_scales:
            shape = ((case.layers,) if case.layers else ()) + (case.kv_heads,)
            rng = np.random.default_rng(0)
            self.scales = {name: rng.uniform(0.02, 0.1, shape).astype(np.float32) for name in ("key", "value")}
        self.tokens = self.empty(case.batch, self.capacity)
        self.lengths, self.overflowed = np.zeros(case.batch, int), np.zeros(case.batch, bool)

    def create(self, **changes) -> KVCache:
        """Returns an empty cache of the case."""
        case = self.case
        scales = {f"{name}_scale": jnp.asarray(scale) for name, scale in self.scales.items()}
        sizes = dict(batch=case.batch, capacity=case.capacity, num_kv_heads=case.kv_heads, head_dim=case.head_dim)
        return KVCache.create(**(sizes | dict(
            dtype=case.dtype, mesh=None if case.context else self.mesh, block_size=case.block_size,
            axis_name=case.axis[0] if len(case.axis) == 1 else case.axis, batch_axis_name=case.data,
            num_layers=case.layers, stacks_layers=case.stacks, keeps_value_sum=case.sums,
            keeps_key_by_component=case.by_component, window=case.window,
        ) | scales | changes))  # fmt: skip

    def empty(self, batch: int, capacity: int) -> np.ndarray:
        """Returns the stored keys and values of no token, `[2, L, B, S, K, H]`."""
        case = self.case
        shape = 2, self.num_layers, batch, capacity, case.kv_heads, case.head_dim
        return np.zeros(shape, problems.dtype_of(case.dtype))

    def new(self, num_tokens: int, seed: int, batch: int | None = None) -> np.ndarray:
        """Draws keys and values of new tokens, `[2, L, B, T, K, H]`, as they are given to the cache."""
        case = self.case
        shape = 2, self.num_layers, batch or case.batch, num_tokens, case.kv_heads, case.head_dim
        numbers = np.random.default_rng(seed).normal(size=shape)
        return numbers.astype(problems.dtype_of(case.new_dtype or case.dtype))

    def stored(self, new: np.ndarray) -> np.ndarray:
        """Returns new keys and values as the cache stores them."""
        dtype = problems.dtype_of(self.case.dtype)
        if new.dtype == dtype:
            return new
        wide = new.astype(np.float32)
        for i, name in enumerate(("key", "value")):
            if name in self.scales:
                wide[i] /= self.scales[name].reshape(-1, 1, 1, self.case.kv_heads, 1)
        is_integer = dtype == np.int8
        wide = np.clip(np.nan_to_num(wide), -127, 127) if is_integer else np.clip(wide, -448, 448)
        return (np.round(wide) if is_integer else wide).astype(dtype)

    def widened(self, stored: np.ndarray, which: int, layer: int) -> np.ndarray:
        """Returns what stored `[..., K, H]` stand for, float64."""
        scale = self.scales.get(("key", "value")[which])
        wide = stored.astype(np.float64)
        return wide if scale is None else wide * scale.reshape(-1, self.case.kv_heads)[layer][:, None]

    def run(self, function, *arguments, **named):
        """Runs `function(cache, ...)` in the case's mode, and takes the cache that it returns."""
        mode = self.case.mode
        if mode == "eager":
            self.cache = function(self.cache, *arguments, **named)
        elif mode == "shard_map":
            batch = P(self.case.data)
            body = functools.partial(function, **named)
            specs = self.cache.specs()
            in_specs = (specs, *[batch if jnp.ndim(x) else P() for x in arguments])
            mapped = jax.shard_map(body, mesh=self.mesh, in_specs=in_specs, out_specs=specs)
            self.cache = jax.jit(mapped)(self.cache, *map(self.sharded, arguments, in_specs[1:]))
        else:
            self.cache = _jitted(function, tuple(named.items()), mode == "donate")(self.cache, *arguments)

    def layer(self, i: int) -> int | None:
        """Returns the i-th layer as the cache's methods name it."""
        return None if self.case.layers is None else i

    def put(self, new: np.ndarray) -> None:
        """Writes new tokens into the model after each sequence's last; marks it where there is no room for all."""
        stored, num_new = self.stored(new), new.shape[3]
        for b, length in enumerate(self.lengths):
            if length + num_new <= self.capacity:
                self.tokens[:, :, b, length : length + num_new] = stored[:, :, b]
            else:
                self.overflowed[b] = True

    def count_new(self, num_new: int) -> None:
        """Counts new tokens of the model."""
        has_room = self.lengths + num_new <= self.capacity
        self.lengths = np.where(has_room, self.lengths + num_new, self.lengths)
        self.overflowed |= ~has_room

    def do_append(self, num_tokens: int, seed: int) -> str | None:
        """Appends tokens; outside jit a sequence without room is an error, and nothing changes."""
        if self.case.layers is not None:
            return self.do_write(num_tokens, seed)
        new = self.new(num_tokens, seed)
        is_refused = bool((self.overflowed | (self.lengths + num_tokens > self.capacity)).any())
        if self.case.mode == "eager" and is_refused:
            try:
                self.cache.append(*map(jnp.asarray, new[:, 0]))
            except CacheFullError:
                return None
            return "full: append did not raise"
        self.run(KVCache.append, *map(jnp.asarray, new[:, 0]))
        self.put(new)
        self.count_new(num_tokens)
        return None

    def do_write(self, num_tokens: int, seed: int) -> str | None:
        """Writes tokens into every layer, attends to them, and counts them."""
        new = self.new(num_tokens, seed)
        for i in range(self.num_layers):
            self.run(_write, *map(jnp.asarray, new[:, i]), layer=self.layer(i))
        self.put(new)
        fault = self.difference(num_new=num_tokens) if self.case.mode != "shard_map" else None
        self.run(_advance, num_tokens=num_tokens)
        self.count_new(num_tokens)
        return fault

    def do_spoil(self, seed: int) -> None:
        """Appends a token that is NaN, and drops it again."""
        if self.case.dtype == "int8":
            return
        before, new = self.lengths.copy(), self.new(1, seed)
        if (before >= self.num_slots).any():  # it would take the place of another token
            return
        new[:] = np.nan
        for i in range(self.num_layers):
            self.run(_write, *map(jnp.asarray, new[:, i]), layer=self.layer(i))
        self.put(new)
        self.run(KVCache.with_lengths, jnp.asarray(before, jnp.int32))

    def do_with_lengths(self, shares: tuple[float, ...]) -> None:
        """Drops the newest tokens of some sequences."""
        shorter = (np.array(shares) * (self.lengths + 1)).astype(int).clip(0, self.lengths)
        self.lengths = np.where(self.lengths <= self.num_slots, shorter, np.where(shorter == 0, 0, self.lengths))
        self.run(KVCache.with_lengths, jnp.asarray(self.lengths, jnp.int32))

    def do_prefix(self, shares: tuple[float, ...], in_pieces: bool, seed: int) -> None:
        """Writes prompts, whole or in two pieces, with NaN as their padding."""
        size = self.unit * max(int(max(shares) * self.capacity / self.unit), 1)
        lengths = (np.array(shares) * size).astype(int)
        new = self.new(size, seed)
        is_padding = np.arange(size) >= lengths[:, None]
        new[:, :, is_padding] = np.nan
        first = size // self.unit // 2 * self.unit if in_pieces else 0
        if self.case.mode == "shard_map":
            first = 0
        for begin, end in ((0, first), (first, size)):
            order = begin + problems.storage_order(end - begin, self.case.num_shards, self.case.block_size)
            for i in range(self.num_layers if end > begin else 0):
                self.run_prefix(new[:, i][:, :, order], self.layer(i), begin, lengths)
        self.tokens[:, :, :, :size] = self.stored(new)
        self.lengths = lengths
        self.run(KVCache.with_lengths, jnp.asarray(lengths, jnp.int32))

    def run_prefix(self, new: np.ndarray, layer: int | None, start: int, lengths: np.ndarray) -> None:
        """Runs `write_prefix` of one layer; in a `shard_map` the prompt is sharded."""
        counts = () if self.case.rounds is None else (jnp.asarray(lengths, jnp.int32),)
        if self.case.mode != "shard_map":
            self.run(_write_prefix, *map(jnp.asarray, new), *counts, layer=layer, start=start)
            return
        specs, of_new = self.cache.specs(), P(self.case.data, self.case.axis)
        specs_of = (of_new, of_new, *[P(self.case.data)] * len(counts))
        body = functools.partial(_write_prefix, layer=layer, start=start)
        mapped = jax.shard_map(body, mesh=self.mesh, in_specs=(specs, *specs_of), out_specs=specs)
        arguments = (self.sharded(x, spec) for x, spec in zip((*new, *counts), specs_of, strict=True))
        self.cache = jax.jit(mapped)(self.cache, *arguments)

    def sharded(self, x, spec: P) -> jax.Array:
        """Returns `x` over the mesh: over Explicit axes a `shard_map` takes arrays whose types say how they lie."""
        return jax.device_put(x, NamedSharding(self.mesh, spec))

    def do_prefill(self, shares: tuple[float, ...], seed: int) -> str | None:
        """Prefills prompts in natural order, and compares their attention."""
        case = self.case
        if case.new_dtype is not None and not self.scales and case.dtype != "float8_e4m3fn":
            return None
        size = max(int(max(shares) * self.capacity), 1)
        lengths = (np.array(shares) * size).astype(int)
        new = self.new(size, seed)
        query = np.random.default_rng(seed + 1).normal(size=(case.batch, size, self.heads, case.head_dim))
        query = query.astype(new.dtype)
        for i in range(self.num_layers):
            function = _prefilled if case.mode == "eager" else jax.jit(_prefilled, static_argnames="layer")
            self.cache, out = function(
                self.cache, jnp.asarray(query), *map(jnp.asarray, new[:, i]), jnp.asarray(lengths, jnp.int32),
                layer=self.layer(i),
            )  # fmt: skip
            positions = np.broadcast_to(np.arange(size), (case.batch, size))
            sees = oracle.visible(size, lengths, positions, is_causal=True, window=self.window)
            exact = oracle.attention(query, new[0, i], new[1, i], sees, scale=case.head_dim**-0.5)
            fault = self.out_fault(np.asarray(out), exact, new[1, i], positions < lengths[:, None])
            if fault:
                return fault
        self.tokens[:, :, :, :size] = self.stored(new)
        self.lengths, self.overflowed = lengths, np.zeros(case.batch, bool)
        return None

    def do_with_sequence(self, row: int, share: float, seed: int) -> None:
        """Replaces one sequence by that of a smaller cache."""
        case = self.case
        size = max(int(share * self.capacity) // self.unit * self.unit, self.unit)
        length = int(share * size)
        other = self.create(batch=1, capacity=size, batch_axis_name=None)
        new = self.new(size, seed, batch=1)
        new[:, :, :, length:] = np.nan
        order = problems.storage_order(size, case.num_shards, case.block_size)
        for i in range(self.num_layers):
            keys, values = (jnp.asarray(x[i][:, order]) for x in new)
            other = other.write_prefix(keys, values, self.layer(i), lengths=[length])
        other = other.with_lengths([length])
        if case.mode == "eager":
            self.cache = self.cache.with_sequence(row, other)
        else:  # in a shard_map too: the other's batch is not sharded, and so another spec
            self.cache = jax.jit(KVCache.with_sequence)(self.cache, row, other)
        self.tokens[:, :, row, :size] = self.stored(new)[:, :, 0]
        self.lengths[row], self.overflowed[row] = length, False

    def do_attend(self, num_queries: int, attention: str, seed: int) -> str | None:
        """Attends to every layer."""
        return self.difference(num_queries=num_queries, attention=attention, seed=seed, attends=True)

    @property
    def window(self) -> tuple[int, None] | None:
        """The window that the oracle's queries see."""
        return None if self.case.window is None else (self.case.window - 1, None)

    @property
    def heads(self) -> int:
        """Query heads."""
        return max(self.case.heads, self.case.kv_heads)

    def difference(
        self, num_new: int = 0, num_queries: int = 1, attention: str = "tree_decode", seed: int = 0, attends=False
    ) -> str | None:
        """Returns how the cache differs from its model in lengths, tokens, sums, or in attention to it."""
        case, lengths = self.case, self.lengths
        if not np.array_equal(self.cache.lengths, lengths):
            return f"lengths: {np.asarray(self.cache.lengths)}, expected {lengths}"
        if not np.array_equal(self.cache.overflowed, self.overflowed):
            return f"overflowed: {np.asarray(self.cache.overflowed)}, expected {self.overflowed}"
        if num_new:
            lengths = np.where(lengths + num_new <= self.capacity, lengths + num_new, lengths)
        positions, first = np.arange(self.capacity), lengths[:, None] - self.num_slots
        is_held = (positions < lengths[:, None]) & (positions >= first)
        order = problems.storage_order(self.num_slots, case.num_shards, case.block_size)
        inverse = np.argsort(order)[positions % self.num_slots]
        for i in range(self.num_layers):
            fault = self.layer_fault(i, is_held, inverse)
            if fault:
                return fault
            if attends or num_new:
                fault = self.attention_fault(i, lengths, num_new, num_queries, attention, seed)
                if fault:
                    return fault
        return None

    def layer_fault(self, i: int, is_held, inverse) -> str | None:
        """Returns how one layer's arrays differ from the model's, or None."""
        of_layer = lambda x: np.asarray(x if self.case.layers is None else x[i]).astype(np.float64)
        for which, name in enumerate(("key", "value")):
            got = of_layer(getattr(self.cache, name))[:, inverse][is_held]
            expected = self.tokens[which, i].astype(np.float64)[is_held]
            # A quotient at a tie may be rounded to either neighbour.
            step = 0.0 if self.case.new_dtype is None else np.maximum(np.abs(expected) / 8, 2.0**-9)
            step = np.ones_like(step) if self.case.dtype == "int8" else step
            wrong = np.abs(got - expected) > step
            if wrong.any() or np.count_nonzero(got != expected) > 2 + got.size / 100:
                return (
                    f"tokens: {name} of layer {i} has {got[got != expected][:4]}, not {expected[got != expected][:4]}"
                )
        if self.case.by_component:
            got = np.moveaxis(of_layer(self.cache.key_by_component), 3, 1)
            if not np.array_equal(got[:, inverse][is_held], of_layer(self.cache.key)[:, inverse][is_held]):
                return f"by component: keys of layer {i} differ"
        if self.case.sums:
            values = np.where(is_held[..., None, None], self.widened(self.tokens[1, i], 1, i), 0.0)
            error = np.abs(of_layer(self.cache.value_sum) - values.sum(1)).max()
            step = 0.0 if self.case.new_dtype is None else 0.2
            if not error <= 1e-4 + step:
                return f"value_sum: off by {error:.3g} in layer {i}"
        return None

    def attention_fault(self, i: int, lengths, num_new: int, num_queries: int, attention: str, seed: int) -> str | None:
        """Returns how attention to one layer differs from the oracle's, or None."""
        case = self.case
        dtype = problems.dtype_of(case.new_dtype or case.dtype)
        rng = np.random.default_rng(seed)
        query = rng.normal(size=(case.batch, num_queries, self.heads, case.head_dim)).astype(dtype)
        function = getattr(tree_attn if attention == "tree_decode" else ring_baseline, attention)
        named = dict(layer=self.layer(i), num_new=num_new, attention=function, is_causal=num_queries > 1)
        if case.mode == "shard_map":
            in_specs = self.cache.specs(), P(case.data)
            body = functools.partial(_attended, **named)
            mapped = jax.shard_map(body, mesh=self.mesh, in_specs=in_specs, out_specs=P(case.data))
            out = jax.jit(mapped)(self.cache, self.sharded(query, P(case.data)))
        elif case.mode == "eager":
            out = _attended(self.cache, jnp.asarray(query), **named)
        else:
            out = _jitted(_attended, tuple(named.items()), False)(self.cache, jnp.asarray(query))
        keys, values = (self.widened(self.tokens[which, i], which, i) for which in (0, 1))
        positions = oracle.last_positions(lengths, num_queries)
        sees = oracle.visible(self.capacity, lengths, positions, is_causal=num_queries > 1, window=self.window)
        exact = oracle.attention(query, keys, values, sees, scale=case.head_dim**-0.5)
        return self.out_fault(np.asarray(out), exact, values, np.ones(sees.shape[:2], bool))

    def out_fault(self, out: np.ndarray, exact: oracle.Attention, values, is_meant) -> str | None:
        """Returns how far `out` is from the exact one, or None where that is near enough."""
        from tree_attn.tolerances import max_abs_error, out_tolerance

        plain = None if out.dtype == np.float32 else oracle.plain(exact, values, out.dtype)[is_meant]
        allowed = out_tolerance(out.dtype, exact.out[is_meant], plain, exact.lse[is_meant])
        allowed += 0.05 if self.case.new_dtype is not None else 0.0  # a quotient at a tie, see `layer_fault`
        error = max_abs_error(out[is_meant], exact.out[is_meant])
        return None if error <= allowed else f"attention: off by {error:.3g}, allowed {allowed:.3g}"


def _write(cache, key, value, *, layer):
    return cache.write(key, value, layer)


def _advance(cache, *, num_tokens: int):
    return cache.advance(num_tokens)


def _write_prefix(cache, key, value, lengths=None, *, layer, start: int):
    return cache.write_prefix(key, value, layer, start, lengths)


def _attended(cache, query, *, layer, num_new: int, attention, is_causal: bool):
    return cache.attend(query, layer=layer, num_new=num_new, attention=attention, is_causal=is_causal)


def _prefilled(cache, query, key, value, lengths, *, layer):
    return ring_baseline.ring_prefill(cache, query, key, value, lengths=lengths, layer=layer)


@functools.lru_cache(maxsize=64)
def _jitted(function, named: tuple, donates: bool):
    return jax.jit(functools.partial(function, **dict(named)), donate_argnums=(0,) if donates else ())
