"""Calls for the lean kernel: drawn, laid out padded, packed or paged, and made through the public functions."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import rounded

from tree_attn import PrefixLevel, Shard, attend, hydragen_decode, lean_decode, paged_decode
from tree_attn.arguments import AttentionOptions
from tree_attn.kernels.exchange_words import Buffers
from tree_attn.kernels.lean_layout import is_few_query_rows, is_many_query
from tree_attn.kernels.targets import HOPPER
from tree_attn.local import attend_shard, shard_attention
from tree_attn.reduce import fused

PAGE = 64
WHOLE = 128  # slots with which no output tile is cut in two, for a run has two KV tiles at least
MANY = {"queries": 40, "group": 4}  # rows of the tensor core, and in the fewer cases columns
GARBAGE = np.nan  # where no sequence has a key; it would spoil any result it got into, by a weight of zero too
HEAD_SCALES = {"key_scale": np.array([0.3, 1.7], np.float32), "value_scale": np.array([5.1, 0.2], np.float32)}
# Of calls that are compiled only.
LENGTHS, LONG = {"lengths": (250, 70)}, {"slots": 704, "first": 640, "lengths": (700, 70)}
ODD, PAGES = {"slots": 251, "lengths": (250, 70)}, {"layout": "paged", "lengths": (250, 70)}
CAUSAL = {"options": {"is_causal": True}}
FIVE_CAUSAL = {"queries": 5} | CAUSAL
CAUSAL_CAPPED = {"options": {"is_causal": True, "logits_soft_cap": 30.0}}
WINDOW = {"options": {"local_window_size": (70, 0)}}
CAPPED_WINDOW = {"options": {"logits_soft_cap": 30.0} | WINDOW["options"]}
WIDE = {"queries": 8, "group": 16}  # more columns than one block of them holds
FLOAT8 = {"stored_dtype": "float8_e4m3fn"}
MANY_HEADS = FLOAT8 | {"kv_heads": 600}  # so many that KV tiles are large
AFTER = {"lengths": (1040,) * 20, "spare_slots": 70}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """One call. `lengths` None means that every slot is valid, which only the padded layout can say.

    `page` is for the paged layout. `spare` is for the packed one: slots of garbage at the end, default up to a multiple
    of 8.
    """

    layout: str = "padded"
    lengths: tuple[int, ...] | None = None
    batch: int = 1
    slots: int = 256
    queries: int = 1
    kv_heads: int = 2
    group: int = 1
    head_dim: int = 64
    dtype: str = "bfloat16"
    stored_dtype: str | None = None  # of key and value, where it is not the query's
    logit_size: float = 1.0
    page: int = PAGE
    spare: int | None = None
    is_early: bool = False  # for the padded layout: old keys are read before the previous kernel has ended
    options: dict = dataclasses.field(default_factory=dict)

    def __str__(self):
        """A test's name: what differs from the default."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values |= {"options": "+".join(self.options)}
        changed = (f"{name}={value}" for name, value in values.items() if value != getattr(Call, name, ""))
        return " ".join(changed).replace(", ", "_") or "default"

    @property
    def are_rows(self) -> bool:
        """Returns whether the query columns are rows of the many-query kernel on Hopper."""
        few = self.head_dim, self.stored_dtype is not None, HOPPER
        is_alone = type(self) is Call  # not merged with others
        return is_many_query(self.queries, self.group) or (
            is_alone and is_few_query_rows(self.queries, self.group, *few)
        )

    @property
    def valid(self) -> tuple[int, ...]:
        return (self.slots,) * self.batch if self.lengths is None else self.lengths

    def arrays(self, garbage: float = 0.0, draw=None):
        """Query, key and value as the oracle takes them, `[B, slots, K, H]`, with `garbage` beyond the lengths."""
        draw = np.random.default_rng(0).normal if draw is None else draw
        shape = (len(self.valid), self.slots, self.kv_heads, self.head_dim)
        query = self.logit_size * draw(size=(shape[0], self.queries, self.kv_heads * self.group, self.head_dim))
        is_valid = np.arange(self.slots)[None, :, None, None] < np.array(self.valid)[:, None, None, None]
        stored = (np.where(is_valid, draw(size=shape), garbage) for _ in range(2))
        return rounded(query, self.dtype), *(rounded(x, self.stored_dtype or self.dtype) for x in stored)

    def inputs(self, draw=None):
        """The arrays that `run` takes: query, key, value, and what the layout needs."""
        query, key, value = self.arrays(GARBAGE, draw)
        lengths = np.array(self.valid, np.int32)
        if self.layout == "packed":
            key, value = (_packed(np.asarray(x), lengths, self.spare) for x in (key, value))
            return query, key, value, jnp.asarray([0, *np.cumsum(lengths)], jnp.int32)
        if self.layout == "paged":
            (key, table), (value, _) = (_paged(np.asarray(x), self.page) for x in (key, value))
            return query, key, value, table, jnp.asarray(lengths)
        return query, key, value, *([] if self.lengths is None else [jnp.asarray(lengths)])

    def shapes(self, sharding=None):
        """The shapes of `inputs`; arrays of one KV head are made for them, since those of a thousand take a second."""
        draw = lambda size: np.zeros(size, np.float32)
        query, key, value, *rest = dataclasses.replace(self, kv_heads=1).inputs(draw)
        for x in (query, key, value):
            *others, heads, last = x.shape
            yield jax.ShapeDtypeStruct((*others, heads * self.kv_heads, last), x.dtype, sharding=sharding)
        yield from (jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in rest)

    def run(self, query, key, value, *rest):
        options = self.options | {"implementation": "mosaic_gpu"}
        if self.layout == "packed":
            return lean_decode(query, key, value, *rest, return_lse=True, **options)
        if self.layout == "paged":
            return paged_decode(query, key, value, *rest, return_lse=True, **options)
        lengths = {"key_value_seq_lengths": rest[0]} if rest else {}
        return attend(query, key, value, reads_keys_early=self.is_early, **lengths, **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MergedWith(Call):
    """A call for the first 192 keys, the result merged with the state over the others."""

    first: int = 192

    def run(self, query, key, value, *lengths):
        count = lambda of: {"key_value_seq_lengths": of(lengths[0])} if lengths else {}
        others = count(lambda x: jnp.maximum(x - self.first, 0))
        other_state = attend(
            query, key[:, self.first :], value[:, self.first :], implementation="xla", **others, **self.options
        )
        options = AttentionOptions(
            implementation="mosaic_gpu", **count(lambda x: jnp.minimum(x, self.first)), **self.options
        )
        return attend_shard(
            query, key[:, : self.first], value[:, : self.first], options, Shard(), merge_with=other_state
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AfterPrefix(Call):
    """A call whose sequences share their first 192 keys with the others of their node, and hold them once.

    `spare_slots` of garbage follow a node's keys, whose number is then an array.
    """

    first: int = 192
    nodes: int = 1
    spare_slots: int = 0

    def arrays(self, garbage: float = 0.0, draw=None):
        query, *stored = super().arrays(garbage, draw)
        share = len(self.valid) // self.nodes
        shared = lambda x: jnp.concatenate([jnp.repeat(x[::share, : self.first], share, axis=0), x[:, self.first :]], 1)
        return query, *map(shared, stored)

    def run(self, query, key, value, *lengths):
        of_suffix = {"key_value_seq_lengths": lengths[0] - self.first} if lengths else {}
        share = query.shape[0] // self.nodes
        slots = [(0, 0), (0, self.spare_slots), (0, 0), (0, 0)]
        of_nodes = lambda x: jnp.pad(x[::share, : self.first], slots, constant_values=GARBAGE)
        level = PrefixLevel(
            key=of_nodes(key),
            value=of_nodes(value),
            lengths=jnp.full(self.nodes, self.first, jnp.int32) if self.spare_slots else None,
            sequences=tuple(tuple(range(node * share, (node + 1) * share)) for node in range(self.nodes)),
        )
        options = of_suffix | self.options | {"implementation": "mosaic_gpu"}
        return hydragen_decode(query, [level], key[:, self.first :], value[:, self.first :], return_lse=True, **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchanged(Call):
    """A call, and its own `tree_attn.local.Exchange`, between no devices, which cannot end the attention's kernel.

    Exchanges that can are not for the interpreter: their memory is not JAX's.
    """

    rank: ClassVar[None] = None
    requests: ClassVar[set] = set()  # shape of the results, and padded head dims, of each epilogue that was requested

    def run(self, query, key, value, *lengths):
        lengths = {"key_value_seq_lengths": lengths[0]} if lengths else {}
        options = AttentionOptions(implementation="mosaic_gpu", **lengths, **self.options)
        return shard_attention(query, key, value, options, Shard()).run(exchange=self)

    def epilogue(self, result, num_ctas, num_partials, padded_head_dim):
        assert num_partials == num_ctas + result.shape[0]
        self.requests.add((result.shape, padded_head_dim))

    def merge(self, state):
        return state


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fused(Call):
    """A call and the exchange of `reduction="fused"` between four devices: to be compiled, for there are none."""

    def __str__(self):
        return f"fused {super().__str__()}"

    def run(self, query, key, value, *lengths):
        lengths = {"key_value_seq_lengths": lengths[0]} if lengths else {}
        options = AttentionOptions(
            implementation="mosaic_gpu", reads_keys_early=self.is_early, **lengths, **self.options
        )
        buffers = Buffers(table=0x5D00_0000_0000, num_ranks=4, capacity=fused.MAX_ELEMENTS)
        exchange = fused.Exchange(None, buffers)
        return shard_attention(query, key, value, options, Shard()).run(exchange=exchange)


def thorough(parameters: list) -> list:
    """Returns parameters of tests that CI leaves out, since they are like others (CONTRIBUTING.md)."""
    of = lambda parameter: parameter if isinstance(parameter, tuple) else (parameter,)
    return [pytest.param(*of(parameter), marks=pytest.mark.thorough) for parameter in parameters]


def variants() -> list[Call]:
    """Returns calls that differ in the compiled kernel: head dims, dtypes, masks, layouts, query columns.

    Each compiles for seconds, so CI has these and not `more_variants`. Head dim 96 is in neither: it is padded to 128
    as 80 is, and their kernels need the same registers.
    """
    return [
        Call(),
        *(Call(head_dim=head_dim, **LENGTHS | WIDE) for head_dim in (128, 256)),
        Call(head_dim=256, **FLOAT8, **LENGTHS | WIDE),
        # Old keys are read early, also where an exchange ends the kernel.
        Call(slots=8192, kv_heads=4, group=4, head_dim=128, lengths=(8000,), is_early=True),
        Fused(head_dim=128, slots=1024, lengths=(1000, 70), is_early=True),
        # So many output tiles that their last KV tiles are read to a multiple of 8 keys.
        Call(kv_heads=1200, head_dim=128, layout="packed", **LENGTHS | {"queries": 3} | CAUSAL_CAPPED),
        Call(
            queries=3,
            group=8,
            head_dim=128,
            **MANY_HEADS,
            **LENGTHS,
            options=head_scales(600) | CAUSAL_CAPPED["options"],
        ),
        # Few queries as rows, each with keys of its own; threads copy numbers that 8 does not divide.
        Call(queries=5, group=11, head_dim=128, lengths=(600, 70), slots=635, **WINDOW),
        Call(queries=8, group=16, head_dim=128, lengths=(600, 70), slots=640, layout="paged", page=16, **CAUSAL),
        # The same in two streams.
        Call(queries=8, group=8, head_dim=128, lengths=(300, 70), slots=320, **CAPPED_WINDOW),
        # 48 query columns, whose merge is the kernel's too.
        Call(queries=7, group=6, head_dim=128, **LENGTHS, **CAUSAL),
        # 15 columns, which 8 does not divide: threads copy them, and write their results.
        Call(queries=3, group=5, head_dim=256, **LENGTHS, options=CAUSAL["options"] | WINDOW["options"]),
        Call(layout="paged", head_dim=128, **LENGTHS, **MANY_HEADS, options=head_scales(600)),
        Call(**MANY, head_dim=256, **LENGTHS),
        # More than two KV tiles, so that there is a merge, which takes the other state along. 8 divides no number of
        # queries: threads copy their rows.
        MergedWith(queries=42, group=8, head_dim=128, **LONG),
        MergedWith(queries=58, group=4, head_dim=256, slots=703, first=643, lengths=(700, 70)),
        MergedWith(queries=16, head_dim=80, **LONG),
        Call(kv_heads=1, group=5, head_dim=80, slots=65_536),  # results and partial states in shared memory
        # KV tiles of 128 keys: 40 query columns, with which no register is left.
        Fused(queries=5, group=8, slots=635, lengths=(600, 70), **CAUSAL_CAPPED),
        # Many short output tiles, for three CTAs of an SM.
        Call(kv_heads=1600, head_dim=128, lengths=(200, 70), queries=2, group=2, slots=222, **CAUSAL),
        # Many output tiles of large heads: two CTAs of one stage.
        Call(layout="packed", kv_heads=140, head_dim=256, **LENGTHS | FIVE_CAUSAL),
        # Output tiles that begin with a prefix's states: one CTA of an SM and two, and rows that blocks cut.
        AfterPrefix(slots=1364, first=1000, kv_heads=8, group=7, head_dim=128, **AFTER),
        AfterPrefix(slots=1300, first=1000, kv_heads=16, group=16, head_dim=128, **AFTER),
        Call(lengths=(40, 7), slots=40, head_dim=128),  # one KV tile holds a sequence
        # Two CTAs of an SM: an output tile each, and many KV heads.
        Call(kv_heads=144, head_dim=128, slots=1880),
        Call(kv_heads=160, group=4, head_dim=128, slots=1304, lengths=(1300, 70)),
        # KV tiles that are copied in parts: odd numbers of slots, and small pages.
        Call(head_dim=256, **ODD, **WIDE),
        Call(layout="packed", head_dim=128, lengths=(250, 71), spare=0, **MANY),
        Call(page=8, head_dim=128, **PAGES),
        Call(page=16, head_dim=256, **PAGES, **WIDE),
        *exchanges(),
    ]


def more_variants() -> list[Call]:
    """Returns further calls, most of which differ from one of `variants` by a head dim, a layout, or a number."""
    return [
        # Of so many keys that CTAs have most SMs.
        *(Call(head_dim=head_dim, slots=8192, kv_heads=8, is_early=True) for head_dim in (64, 128, 256)),
        Call(head_dim=256, **ODD, **FIVE_CAUSAL, is_early=True),
        *(Call(head_dim=head_dim, **LENGTHS | FIVE_CAUSAL, is_early=True) for head_dim in (64, 80, 128, 256)),
        *(Call(head_dim=head_dim, **MANY_HEADS, **LENGTHS | WIDE, is_early=True) for head_dim in (64, 128, 256)),
        Call(queries=7, group=6, head_dim=128, **ODD, **CAUSAL_CAPPED, is_early=True),
        Call(kv_heads=1200, head_dim=128, **LENGTHS | {"queries": 3} | CAUSAL_CAPPED, is_early=True),
        *(Call(head_dim=head_dim) for head_dim in (80, 128, 256)),
        *(Call(head_dim=head_dim, **LENGTHS | FIVE_CAUSAL) for head_dim in (64, 80, 128, 256)),
        *(Call(head_dim=head_dim, **LENGTHS | WIDE) for head_dim in (64, 80)),
        *(Call(head_dim=head_dim, **MANY_HEADS, options=head_scales(600)) for head_dim in (64, 80, 256)),
        *(Call(head_dim=head_dim, **MANY_HEADS, **LENGTHS | WIDE) for head_dim in (64, 128, 256)),
        Call(head_dim=128, **FLOAT8, **LENGTHS | WIDE),
        *(
            Call(kv_heads=1200, head_dim=head_dim, **LENGTHS | {"queries": 3} | CAUSAL_CAPPED)
            for head_dim in (128, 256)
        ),
        Call(kv_heads=1200, head_dim=256, slots=251, **LENGTHS),
        Call(head_dim=80, dtype="float16"),
        Call(head_dim=128, dtype="float16", **MANY_HEADS, **LENGTHS),
        Call(group=16, head_dim=128, **MANY_HEADS, **LENGTHS, options=head_scales(600) | WINDOW["options"]),
        Call(queries=8, group=4, head_dim=128, **LENGTHS),
        *(
            Call(queries=queries, group=group, head_dim=head_dim, lengths=(600, 70), **options)
            for head_dim, queries, group, options in (
                (64, 5, 11, {"slots": 635} | WINDOW),
                (64, 7, 11, {"slots": 635} | WINDOW),
                (64, 8, 16, {"slots": 640, "layout": "paged", "page": 16} | CAUSAL),
                (64, 8, 8, {"slots": 640} | CAUSAL_CAPPED),
                (128, 8, 8, {"slots": 640} | CAUSAL_CAPPED),
                (128, 7, 11, {"slots": 635} | WINDOW),
            )
        ),
        Call(queries=5, group=11, head_dim=128, lengths=(300, 70), slots=315, **CAUSAL),
        Call(queries=4, group=16, head_dim=128, lengths=(300, 70), slots=320, layout="packed", **CAUSAL),
        *(
            Call(
                queries=4, group=16, head_dim=head_dim, lengths=(300, 70), slots=320, layout="paged", page=32, **CAUSAL
            )
            for head_dim in (64, 128)
        ),
        Call(queries=5, group=8, **LENGTHS, **CAUSAL),
        Call(queries=2, group=3, **LENGTHS, **CAUSAL),  # fewer columns than a copy moves
        Call(queries=4, group=3, head_dim=128, **LENGTHS, **CAUSAL),
        Call(queries=5, group=5, **LENGTHS, **CAUSAL_CAPPED),
        Call(queries=3, group=3, head_dim=128, **FLOAT8, **LENGTHS),
        Call(queries=5, group=3, head_dim=128, slots=WHOLE),
        Call(queries=7, group=6, head_dim=128, **ODD, **CAUSAL_CAPPED),
        *(Call(head_dim=head_dim, slots=WHOLE) for head_dim in (64, 128, 256)),
        *(Call(head_dim=head_dim, slots=WHOLE, **MANY_HEADS, **WIDE) for head_dim in (64, 128, 256)),
        Call(layout="packed", head_dim=128, group=16, **LENGTHS),
        Call(layout="paged", head_dim=128, **LENGTHS | FIVE_CAUSAL),
        Call(**MANY, head_dim=64),
        Call(**MANY, head_dim=128, **LENGTHS),
        *(MergedWith(queries=40, group=group, head_dim=128, **LONG) for group in (1, 3, 8, 16)),
        *(MergedWith(queries=58, group=group, head_dim=128, **LONG) for group in (1, 2, 4)),
        MergedWith(queries=42, group=8, **LONG),
        MergedWith(queries=133, head_dim=128, dtype="float16", **LONG),
        *(
            MergedWith(queries=queries, group=group, head_dim=256, **LONG)
            for queries, group in ((58, 1), (58, 4), (42, 2))
        ),
        MergedWith(queries=30, head_dim=256, **LONG),
        # KV tiles of 128 keys: 32 query columns, and 40.
        Call(queries=4, group=8, slots=640, lengths=(600, 70), **CAUSAL),
        Call(queries=5, group=8, slots=635, lengths=(600, 70), **CAUSAL_CAPPED),
        *(Call(queries=58, head_dim=head_dim, **LENGTHS) for head_dim in (128, 256)),
        MergedWith(queries=40, **LONG),
        Call(queries=16, head_dim=128, **LENGTHS),
        *(Call(lengths=(40, 7), slots=40, head_dim=128, **options) for options in (FIVE_CAUSAL, MANY_HEADS)),
        Call(lengths=(100, 7), slots=104, head_dim=128),  # two KV tiles, left whole
        Call(kv_heads=1600, head_dim=128, lengths=(200, 70), queries=2, group=2, layout="paged", page=32),
        Call(**MANY, head_dim=128, slots=200, options=HEAD_SCALES | {"logits_soft_cap": 30.0}),
        *(Call(kv_heads=140, head_dim=256, **options) for options in ({"batch": 2}, LENGTHS | FIVE_CAUSAL, ODD)),
        Fused(kv_heads=140, head_dim=256, slots=1024, batch=2),
        Fused(kv_heads=140, head_dim=256, slots=1019, lengths=(1000, 70), options={"logits_soft_cap": 100.0}),
        Call(layout="paged", kv_heads=140, head_dim=256, **LENGTHS, **WINDOW),
        *(Call(kv_heads=300, head_dim=head_dim, slots=slots) for head_dim, slots in ((64, 200), (128, 251))),
        Call(kv_heads=300, group=4, head_dim=128, slots=200),  # an output tile for each of three CTAs of an SM
        Call(kv_heads=300, slots=1024),  # the kernel before it ends first
        Call(head_dim=128, slots=200),
        Call(head_dim=128, **LENGTHS, **CAPPED_WINDOW),
        AfterPrefix(batch=20, slots=1064, first=1000, kv_heads=8, group=4, head_dim=128),
        AfterPrefix(slots=1049, first=1000, kv_heads=40, group=8, **AFTER),
        AfterPrefix(batch=40, slots=1096, first=1000, kv_heads=4, group=2, head_dim=256),
        Call(head_dim=64, slots=251),
        Call(head_dim=80, **ODD, **FLOAT8),
        Call(head_dim=128, **ODD, **FIVE_CAUSAL),
        Call(head_dim=128, slots=37, lengths=(37, 3)),
        *(Call(**MANY, head_dim=head_dim, **ODD) for head_dim in (64, 256)),
        Call(layout="packed", head_dim=128, lengths=(250, 71), spare=0),
        MergedWith(queries=40, head_dim=128, slots=703, first=643, lengths=(700, 70)),
        *(Call(page=page, head_dim=128, **PAGES) for page in (16, 32)),
        *(Call(page=16, head_dim=128, queries=7, group=group, **PAGES, **CAUSAL) for group in (6, 8)),
        Call(page=16, head_dim=128, **PAGES, **FLOAT8 | WIDE),
        Call(page=16, head_dim=128, **PAGES, **FIVE_CAUSAL),
        Call(page=128, head_dim=256, **PAGES, **MANY),
    ]


def variants_elsewhere() -> list[Call]:
    """Returns calls that differ in the kernel compiled for GPUs other than Hopper's, of four kinds."""
    return [
        Call(head_dim=256, **LENGTHS, **WIDE),
        Call(head_dim=256, **MANY_HEADS, **LENGTHS, **WIDE),
        Call(layout="paged", page=16, head_dim=128, **LENGTHS, options={"logits_soft_cap": 30.0}),
        *exchanges()[:2],
        Fused(head_dim=128, group=16),  # more accumulators than a kernel that ends in an exchange has
    ]


def more_variants_elsewhere() -> list[Call]:
    """Returns calls that are to `variants_elsewhere` what `more_variants` are to `variants`."""
    return [
        *(Call(head_dim=head_dim) for head_dim in (64, 256)),
        Call(head_dim=128, **LENGTHS, **WIDE),
        Call(head_dim=128, **MANY_HEADS, options=head_scales(600)),
        Call(head_dim=80, dtype="float16", **ODD, **FIVE_CAUSAL),
        Call(head_dim=128, slots=WHOLE, **MANY_HEADS),
        Call(head_dim=128, **MANY_HEADS, **LENGTHS, **WIDE),
        Call(**LENGTHS | FIVE_CAUSAL, group=3),
        Call(head_dim=80, **LENGTHS, **WIDE),
        Call(layout="packed", head_dim=128, **LENGTHS, **FIVE_CAUSAL),
    ]


def head_scales(heads: int) -> dict:
    """Returns scales of stored keys and values for a call that is compiled only."""
    return dict.fromkeys(HEAD_SCALES, np.ones(heads, np.float32))


def exchanges() -> list[Call]:
    """Returns calls whose kernel ends in an exchange, and some where it has too few registers for that."""
    long, float8 = {"slots": 1024, "lengths": (1000, 70)}, {"stored_dtype": "float8_e4m3fn", "kv_heads": 100}
    return [
        Fused(head_dim=128),
        Fused(group=8, **float8, **long),
        Fused(queries=5, group=3, head_dim=256, kv_heads=1, slots=1024),  # 8 does not divide its columns
        Fused(head_dim=128, group=8, **float8, **long),
        Fused(queries=2, group=6, **long, options={"is_causal": True}),
        Fused(queries=3, kv_heads=140, head_dim=256, **long, options={"is_causal": True}),
    ]


def _packed(stored, lengths, spare: int | None):
    """Returns `[total, K, H]`, ending in garbage."""
    packed = np.concatenate([x[:length] for x, length in zip(stored, lengths)])
    spare = 8 + -len(packed) % 8 if spare is None else spare
    padding = np.full((spare, *packed.shape[1:]), GARBAGE, stored.dtype)
    return jnp.asarray(np.concatenate([packed, padding]))


def _paged(stored, page: int):
    """Returns pages in some order with one of garbage among them, and the table that names them."""
    batch, slots, *rest = stored.shape
    count = batch * slots // page
    order = np.random.default_rng(1).permutation(count + 1)
    pages = np.full((count + 1, page, *rest), GARBAGE, stored.dtype)
    pages[order[:count]] = stored.reshape(count, page, *rest)
    return jnp.asarray(pages), jnp.asarray(order[:count].reshape(batch, -1), jnp.int32)
