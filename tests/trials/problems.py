"""The arrays of an attention case as a call takes them, and what the oracle says of them.

The keys of every function are one or more pools of slots, `[M, K, H]`. An index `[B, S]` names the slot of each
sequence's keys in natural order. Slots that no sequence holds are garbage in every function: padding, the rest of a
packed array, unused pages, the ends of prefix nodes.
"""

import dataclasses

import ml_dtypes
import numpy as np

from . import oracle

PROMPTS = ("ring_attention", "ulysses_attention")  # functions of self-attention
GARBAGE = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf, "huge": 3e38, "300": 300.0}
KINDS_OF_GARBAGE = ("ordinary", "mixed", *GARBAGE)


@dataclasses.dataclass
class Pool:
    """Keys and values of one pair of operands: names, natural arrays `[rows, slots, K, H]`, and their stored order."""

    key: np.ndarray
    value: np.ndarray
    names: tuple[str, str] = ("key", "value")
    scale_names: tuple[str | None, str | None] = (None, None)  # the operands that multiply them
    order: np.ndarray | None = None  # along the slots; None: as they are
    is_flat: bool = False  # the operand has no axis of rows


@dataclasses.dataclass
class Problem:
    """One call's operands, by name, and what the oracle needs beside them."""

    case: object
    operands: dict[str, np.ndarray]
    pools: list[Pool]
    index: np.ndarray  # [B, S] into all slots of all pools; -1: none
    lengths: np.ndarray  # [B], of the index
    sees: np.ndarray  # [B, T, S]
    query_order: np.ndarray | None = None

    def __post_init__(self):
        self.sees = self.sees & (self.index >= 0)[:, None]

    def exact(self) -> oracle.Attention:
        """Returns the attention that the call should compute, with keys and values multiplied out."""
        case, named = self.case, self.operands
        key, value = (self._gathered(which) for which in (0, 1))
        return oracle.attention(
            self.query, key, value, self.sees, scale=_scale(case), cap=case.cap,
            sinks=named.get("sinks"), source=named.get("source"),
        )  # fmt: skip

    @property
    def query(self) -> np.ndarray:
        """The queries in natural order."""
        query = self.operands["query"]
        if self.query_order is None:
            return query
        query = query[:, np.argsort(self.query_order)]
        is_padding = np.arange(query.shape[1]) >= self.lengths[:, None]
        return np.where(is_padding[:, :, None, None], np.zeros_like(query), query)

    def gradient(self, state: oracle.Attention, of_out, of_lse, *, absolute: bool = False) -> dict[str, np.ndarray]:
        """Returns the gradient with respect to each operand, in its stored order; see `oracle.Attention.gradient`."""
        dense = state.gradient(of_out, of_lse, absolute=absolute)
        query = dense["query"] if self.query_order is None else dense["query"][:, self.query_order]
        gradient = {"query": query} | {name: dense[name] for name in ("sinks", "source") if name in dense}
        for which, name in enumerate(("key", "value")):
            num_kv_heads = self.pools[0].key.shape[2]
            grouped = dense[name].reshape(*dense[name].shape[:2], num_kv_heads, -1, dense[name].shape[3]).sum(3)
            slots = np.concatenate([_slots(pool, which).astype(np.float64) for pool in self.pools])
            of_slots = np.zeros(slots.shape)
            np.add.at(of_slots, self.index[self.index >= 0], grouped[self.index >= 0])
            start = 0
            for pool in self.pools:
                array = (pool.key, pool.value)[which]
                size = array.shape[0] * array.shape[1]
                part, stored = of_slots[start : start + size], slots[start : start + size]
                start += size
                if pool.scale_names[which] is not None:
                    finite = np.where(np.isfinite(stored), stored, 0.0)  # garbage, whose part is 0
                    touched = part * (np.abs(finite) if absolute else finite)
                    gradient.setdefault(pool.scale_names[which], np.zeros(part.shape[1]))
                    gradient[pool.scale_names[which]] += touched.sum((0, 2))
                    part = part * _wide(self.operands[pool.scale_names[which]])[None, :, None]
                part = part.reshape(array.shape)
                part = part if pool.order is None else part[:, pool.order]
                gradient[pool.names[which]] = part[0] if pool.is_flat else part
        return gradient

    def _gathered(self, which: int) -> np.ndarray:
        parts = []
        for pool in self.pools:
            slots = _wide(_slots(pool, which))
            name = pool.scale_names[which]
            with np.errstate(invalid="ignore", over="ignore"):
                parts.append(slots if name is None else slots * _wide(self.operands[name])[None, :, None])
        slots = np.concatenate(parts)
        slots = slots if len(slots) else np.zeros((1, *slots.shape[1:]))
        return np.where((self.index >= 0)[..., None, None], slots[self.index], 0.0)


def make(case, fill) -> Problem:
    """Returns the problem of one fill of a case."""
    rng = np.random.default_rng(fill.seed)
    problem = _MAKERS.get(case.function, _dense)(case, fill, rng)
    if fill.poison is not None:
        b, t, n = fill.poison
        problem.operands["query"][b, t, n, 0] = np.nan
    return problem


def dtype_of(name: str) -> np.dtype:
    """Returns a dtype by name, narrow ones too."""
    return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)


def storage_order(num_tokens: int, num_shards: int, block_size: int | str | None) -> np.ndarray:
    """Returns `p` with `stored = natural[p]`: shard by shard, each shard's tokens in the order of their positions."""
    positions = np.arange(num_tokens)
    if block_size == "zigzag":
        runs = np.split(positions, 2 * num_shards)
        return np.concatenate([np.append(runs[shard], runs[-1 - shard]) for shard in range(num_shards)])
    return positions if block_size is None else np.argsort(positions // block_size % num_shards, kind="stable")


def _dense(case, fill, rng) -> Problem:
    """Keys `[B, S, K, H]` of a sequence each: every function but those of prefixes and ragged batches."""
    batch, num_keys = case.batch, case.keys
    operands, pool = _common(case, fill, rng), _pool(case, rng, batch, num_keys)
    pool.order = storage_order(num_keys, case.num_shards, case.placement)
    lengths = np.full(batch, num_keys)
    if fill.lengths is not None:
        operands["lengths"] = np.array(fill.lengths, case.integer_dtype)
        lengths = np.clip(np.array(fill.lengths), 0, num_keys)
    is_prompt = case.function in PROMPTS
    positions = oracle.last_positions(lengths, case.queries)
    if is_prompt:
        positions = np.broadcast_to(np.arange(num_keys), (batch, num_keys))
    elif fill.positions is not None:
        operands["positions"] = np.array(fill.positions, case.integer_dtype)
        positions = np.broadcast_to(operands["positions"], (batch, case.queries))
    index = np.arange(batch)[:, None] * num_keys + np.arange(num_keys)
    _spoil([pool], index, lengths, case, fill, rng)
    _store(operands, [pool])
    sees = oracle.visible(num_keys, lengths, positions, is_causal=case.causal, window=case.window)
    if is_prompt:
        is_padding = positions >= lengths[:, None]
        if fill.spoils_queries:
            operands["query"] = _spoiled(operands["query"], is_padding, fill.garbage, rng)
        operands["query"] = operands["query"][:, pool.order]
    if "by_component" in case.extra:
        operands["key_by_component"] = np.ascontiguousarray(np.moveaxis(operands["key"], 1, 3))
    if "value_mean" in case.extra:
        mean = lambda x: x.mean(0) if len(x) else np.zeros(x.shape[1:])
        means = [mean(_wide(pool.value[b, :length])) for b, length in enumerate(lengths)]
        operands["value_mean"] = np.array(means, np.float32)
    return Problem(case, operands, [pool], index, lengths, sees, pool.order if is_prompt else None)


def _prefix(case, fill, rng) -> Problem:
    """Suffixes and the nodes of a prefix tree."""
    operands, suffix = _common(case, fill, rng), _pool(case, rng, case.batch, case.keys)
    suffix.order = None if case.has_whole_suffixes else storage_order(case.keys, case.num_shards, case.placement)
    pools, paths, nodes_held = [suffix], [[] for _ in range(case.batch)], []
    start = case.batch * case.keys
    for i, level in enumerate(case.levels):
        nodes = len(level.sequences)
        pool = _pool(case, rng, nodes, level.keys)
        pool.names = f"level{i}_key", f"level{i}_value"
        if level.scales:
            pool.scale_names = f"level{i}_key_scale", f"level{i}_value_scale"
            for name in pool.scale_names:
                operands[name] = rng.uniform(0.3, 2.0, case.kv_heads).astype(np.float32)
        pool.order = storage_order(level.keys, case.num_shards, level.block_size)
        node_lengths = np.full(nodes, level.keys)
        if level.lengths:
            node_lengths = rng.integers(0, level.keys + 1, nodes)
            operands[f"level{i}_lengths"] = node_lengths.astype(case.integer_dtype)
        for node, served in enumerate(level.sequences):
            for b in served:
                paths[b] += list(start + node * level.keys + np.arange(node_lengths[node]))
        nodes_held.append((start, level, node_lengths))
        start += nodes * level.keys
        pools.append(pool)
    lengths = np.full(case.batch, case.keys)
    if fill.lengths is not None:
        operands["lengths"] = np.array(fill.lengths, case.integer_dtype)
        lengths = np.clip(np.array(fill.lengths), 0, case.keys)
    width = max(len(path) for path in paths) + case.keys
    index = np.full((case.batch, width), -1)
    sees = np.zeros((case.batch, case.queries, width), bool)
    of_suffix = oracle.visible(
        case.keys, lengths, oracle.last_positions(lengths, case.queries), is_causal=case.causal, window=None
    )
    for b, path in enumerate(paths):
        whole = path + list(b * case.keys + np.arange(lengths[b]))
        index[b, : len(whole)] = whole
        sees[b, :, : len(path)] = True
        sees[b, :, len(path) : len(whole)] = of_suffix[b, :, : lengths[b]]
    # The keys of a node that serves no sequence are no garbage: its length says that they are valid.
    unserved = [
        pool_start + node * level.keys + np.arange(node_lengths[node])
        for pool_start, level, node_lengths in nodes_held for node, served in enumerate(level.sequences) if not served
    ]  # fmt: skip
    _spoil(pools, index, np.full(case.batch, width), case, fill, rng, valid=unserved)
    _store(operands, pools)
    if case.function == "bifurcated_decode":
        for name in pools[1].names:
            operands[name] = operands[name][0]
        pools[1].is_flat = True
    return Problem(case, operands, pools, index, (index >= 0).sum(1), sees)


def _packed(case, fill, rng) -> Problem:
    """Keys `[total, K, H]`, end to end."""
    lengths = np.clip(np.array(fill.lengths), 0, case.keys)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    pool = _pool(case, rng, 1, case.batch * case.keys)
    pool.is_flat = True
    index = np.where(np.arange(case.keys) < lengths[:, None], ends[:-1, None] + np.arange(case.keys), -1)
    operands = {"cu_seqlens": ends.astype(case.integer_dtype)}
    return _ragged(case, fill, rng, operands, pool, index, lengths)


def _paged(case, fill, rng) -> Problem:
    """Keys in pages, `[P, page, K, H]`; sequences may share pages that hold the same prompt."""
    page = case.page
    pages_each = -(-case.keys // page)
    num_pages = case.batch * pages_each + 2
    table = rng.permutation(num_pages)[: case.batch * pages_each].reshape(case.batch, pages_each)
    lengths = np.clip(np.array(fill.lengths), 0, pages_each * page)
    if case.batch > 1 and rng.random() < 0.3:
        table[1, 0] = table[0, 0]
    slots = np.arange(pages_each * page)
    index = np.where(slots < lengths[:, None], table[:, slots // page] * page + slots % page, -1)
    pool = _pool(case, rng, num_pages, page)
    operands = {"page_table": table.astype(case.integer_dtype), "lengths": np.array(fill.lengths, case.integer_dtype)}
    return _ragged(case, fill, rng, operands, pool, index, lengths)


def _ragged(case, fill, rng, operands, pool, index, lengths) -> Problem:
    pool.names = ("key_pages", "value_pages") if case.function == "paged_decode" else ("key", "value")
    operands |= _common(case, fill, rng)
    _spoil([pool], index, np.full(case.batch, index.shape[1]), case, fill, rng)
    _store(operands, [pool])
    positions = oracle.last_positions(lengths, case.queries)
    sees = oracle.visible(index.shape[1], lengths, positions, is_causal=case.causal, window=case.window)
    return Problem(case, operands, [pool], index, lengths, sees)


_MAKERS = {
    "hydragen_decode": _prefix, "bifurcated_decode": _prefix, "lean_decode": _packed, "paged_decode": _paged,
}  # fmt: skip


def _scale(case) -> float:
    return case.head_dim**-0.5 if case.scale is None else case.scale


def _common(case, fill, rng) -> dict[str, np.ndarray]:
    """Returns queries, sinks, scales and the energy's source."""
    dtype = dtype_of(case.dtype)
    shape = case.batch, case.keys if case.function in PROMPTS else case.queries, case.heads
    divisor = 20.0 if case.stored == "int8" else 1.0
    operands = {"query": (rng.normal(size=(*shape, case.head_dim)) * fill.size / divisor).astype(dtype)}
    if case.sinks:
        sinks = (3 * rng.normal(size=case.heads)).astype(np.float32)
        operands["sinks"] = np.where(rng.random(case.heads) < 0.1, np.float32(30), sinks)
    for name in ("key_scale", "value_scale"):
        if getattr(case, name):
            operands[name] = rng.uniform(0.3, 2.0, case.kv_heads).astype(np.float32)
    if case.function == "energy":
        operands["source"] = (0.5 * rng.normal(size=(*shape, case.value_dim))).astype(dtype)
    return operands


def _pool(case, rng, rows: int, slots: int) -> Pool:
    dtype = dtype_of(case.stored or case.dtype)
    is_integer = case.stored == "int8"
    draw = lambda width: rng.normal(size=(rows, slots, case.kv_heads, width)) * (20 if is_integer else 1)
    as_stored = lambda x: (np.clip(np.round(x), -127, 127) if is_integer else x).astype(dtype)
    scale_names = tuple(name if getattr(case, name) else None for name in ("key_scale", "value_scale"))
    return Pool(as_stored(draw(case.head_dim)), as_stored(draw(case.value_dim)), scale_names=scale_names)


def _spoil(pools: list[Pool], index, lengths, case, fill, rng, valid=()) -> None:
    """Puts garbage into every slot that no sequence holds, and that is none of the `valid` ones."""
    is_held = np.zeros(sum(pool.key.shape[0] * pool.key.shape[1] for pool in pools), bool)
    is_valid = (np.arange(index.shape[1]) < np.asarray(lengths)[:, None]) & (index >= 0)
    is_held[index[is_valid]] = True
    for slots in valid:
        is_held[slots] = True
    start = 0
    for pool in pools:
        rows, slots = pool.key.shape[:2]
        is_free = ~is_held[start : start + rows * slots].reshape(rows, slots)
        start += rows * slots
        pool.key = _spoiled(pool.key, is_free, fill.garbage, rng)
        pool.value = _spoiled(pool.value, is_free, fill.garbage, rng)


def _spoiled(x, is_free, garbage: str, rng) -> np.ndarray:
    """Returns `x` with garbage where `is_free`; of a dtype without it, the largest number."""
    if garbage == "ordinary":
        return x
    kinds = list(GARBAGE.values()) if garbage == "mixed" else [GARBAGE[garbage]]
    wanted = rng.choice(kinds, size=x.shape)
    if x.dtype == np.int8:
        stored = np.where(np.isnan(wanted), 127, np.clip(wanted, -127, 127)).astype(np.int8)
    elif x.dtype == ml_dtypes.float8_e4m3fn:
        stored = np.where(np.isnan(wanted), np.nan, np.clip(wanted, -448, 448)).astype(x.dtype)
    else:
        with np.errstate(over="ignore"):
            stored = wanted.astype(x.dtype)
    return np.where(is_free.reshape(*is_free.shape, *[1] * (x.ndim - is_free.ndim)), stored, x)


def _store(operands: dict, pools: list[Pool]) -> None:
    for pool in pools:
        for name, x in zip(pool.names, (pool.key, pool.value)):
            x = x if pool.order is None else x[:, pool.order]
            operands[name] = x[0] if pool.is_flat else x


def _slots(pool: Pool, which: int) -> np.ndarray:
    x = (pool.key, pool.value)[which]
    return x.reshape(-1, *x.shape[2:])


def _wide(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)
