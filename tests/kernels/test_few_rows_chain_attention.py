"""Attention within a chain, of one CTA's three warpgroups, in Mosaic GPU's interpreter.

The interpreter has no inline MLIR. So what CTAs tell each other by words is arrays to them here, and the partial states
that they leave are merged here. What is tested is the rest: the ring of KV tiles, the new token's row that is written
over in one, and what the lean kernel's computing makes of it.
"""

import dataclasses
import functools
import types
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from lean_interpreter import has_race, interpreted, needs_interpreter

from tree_attn.kernels import few_rows_chain_attention
from tree_attn.kernels.few_rows_chain_attention import (
    AttentionLayout,
    CtaAttention,
    attention_barriers,
    attention_scratch,
    keys_of_stage,
    kv_scratch,
    unsupported_attention,
)
from tree_attn.kernels.few_rows_ring import Ring
from tree_attn.kernels.lean_call import plan_call
from tree_attn.kernels.lean_compute import RunCompute
from tree_attn.kernels.lean_layout import LeanConfig, num_partials, partial_spans
from tree_attn.kernels.lean_results import StoredResults
from tree_attn.kernels.lean_walk import run_of_cta
from tree_attn.kernels.registers import launch

pytestmark = pytest.mark.usefixtures("time_limit")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A decoding step of one token for each sequence.

    ends:   of the slots that a sequence sees, its new token's included
    start:  of them, with a window
    slots:  of the new tokens, or beyond the last
    """

    ends: tuple[int, ...]
    num_slots: int
    start: int = 0
    slots: tuple[int, ...] | None = None
    num_kv_heads: int = 1
    group: int = 4
    head_dim: int = 64
    num_ctas: int = 1
    num_stages: int = 4
    logits_soft_cap: float | None = None

    @property
    def new_slots(self) -> np.ndarray:
        """Slots of the new tokens, int32 `[B]`."""
        return np.asarray([end - 1 for end in self.ends] if self.slots is None else self.slots, np.int32)

    def _call(self):
        """Returns the lean kernel's shape and tables, by which a chain attends."""
        batch, num_heads = len(self.ends), self.num_kv_heads * self.group
        query = jax.ShapeDtypeStruct((batch, 1, num_heads, self.head_dim), jnp.bfloat16)
        key = jax.ShapeDtypeStruct((batch, self.num_slots, self.num_kv_heads, self.head_dim), jnp.bfloat16)
        ends = jnp.asarray(self.ends, jnp.int32)[:, None]
        spans = jnp.full_like(ends, self.start), ends
        options = dict(num_slots=self.num_slots, scale=self.head_dim**-0.5, logits_soft_cap=self.logits_soft_cap)
        return plan_call(query, key, spans, config=self.config, leaves_partials=True, **options)

    @property
    def config(self) -> LeanConfig:
        """Layout of the attention over CTAs."""
        return LeanConfig(block_kv=keys_of_stage(self.head_dim), num_stages=self.num_stages, num_ctas=self.num_ctas)

    def inputs(self):
        """Queries `[B, K, G, H]`, new keys and values `[2, B, K, H]`, and the caches, NaN beyond what is stored."""
        rng, batch = np.random.default_rng(0), len(self.ends)
        normal = lambda *shape: rng.normal(size=shape).astype(jnp.bfloat16)
        query = normal(batch, self.num_kv_heads, self.group, self.head_dim)
        new = normal(2, batch, self.num_kv_heads, self.head_dim)
        stored = normal(2, batch, self.num_slots, self.num_kv_heads, self.head_dim)
        number = np.arange(self.num_slots)[None, :]
        # The row of the new token too: what a copy finds there may be anything.
        ends, slots = np.asarray(self.ends)[:, None], self.new_slots[:, None]
        is_stored = (number >= self.start // 8 * 8) & (number < ends) & (number != slots)
        return query, new, np.where(is_stored[None, :, :, None, None], stored, np.asarray(np.nan, stored.dtype))

    def run(self, query, new, caches):
        """Attends in one launch: partial states, as the lean kernel leaves them, and which are an output tile's."""
        call, config, group = self._call(), self.config, self.group
        shape, tiles = call.shape, call.shape.num_output_tiles
        assert unsupported_attention(shape, group) is None
        queries = jnp.pad(query.reshape(tiles, group, -1), [(0, 0), (0, shape.cols - group), (0, 0)])
        heads = jnp.swapaxes(new, 0, 1).swapaxes(1, 2).reshape(tiles, 2 * self.head_dim)
        named = {"queries": queries, "heads": heads, "key": caches[0], "value": caches[1]}
        named |= {"slots": jnp.asarray(self.new_slots)}
        tables = {name: table for name, table in call.tables.items() if table is not None}
        named |= tables | {"spans": partial_spans(shape, config, tables)}  # as of `few_rows_chain_call.WholeLayer`
        count = num_partials(shape, config)
        sizes = (count, shape.padded_head_dim, shape.cols), (count, 2, shape.cols)
        partials = launch(
            functools.partial(_attend, tuple(named), AttentionLayout(shape=shape, config=config, group=group)),
            out_type=tuple(jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes),
            grid=(config.num_ctas,), grid_names=("cta",), num_threads=3, thread_name="warpgroup", scratch_bytes=1024,
            name="chain_attention",
        )(*named.values())  # fmt: skip
        return *partials, named["spans"]

    def merged(self, accs, stats, spans) -> np.ndarray:
        """Returns out of partial states, `[B, K, G, H]`, float64."""
        accs, stats, found = np.asarray(accs, np.float64), np.asarray(stats, np.float64), []
        for first, last in np.asarray(spans):
            top, total = stats[first:last, 0], stats[first:last, 1]
            weights = np.exp2(top - top.max(0))
            total = (weights * total).sum(0)
            out = (weights[:, None] * accs[first:last]).sum(0) / np.where(total == 0, 1, total)
            found.append(np.where(total == 0, 0, out).T[: self.group, : self.head_dim])
        return np.stack(found).reshape(len(self.ends), self.num_kv_heads, self.group, self.head_dim)

    def expected(self, query, new, caches):
        """The same in float64, of the caches with the new tokens in them; 0 where nothing is seen."""
        query, new, caches = (np.asarray(x, np.float64) for x in (query, new, caches))
        out = np.zeros(query.shape)
        for b, (end, slot) in enumerate(zip(self.ends, self.new_slots, strict=True)):
            key, value = caches[:, b].copy()
            if slot < self.num_slots:
                key[slot], value[slot] = new[:, b]
            for head in range(self.num_kv_heads) if end > 0 else ():
                seen = slice(self.start, end)
                logits = query[b, head] @ key[seen, head].T * self.head_dim**-0.5
                if (cap := self.logits_soft_cap) is not None:
                    logits = cap * np.tanh(logits / cap)
                weights = np.exp(logits - logits.max(-1, keepdims=True))
                out[b, head] = weights @ value[seen, head] / weights.sum(-1, keepdims=True)
        return out


def _attend(names, layout: AttentionLayout, *refs):
    """Runs the three warpgroups of a CTA, as `few_rows_chain` does those of a chain."""
    named, outputs = dict(zip(names, refs)), refs[len(names) :]
    shape, config = layout.shape, layout.config
    run = run_of_cta(named, shape, config)

    def attend(kv_smem, copied, received, free, **smem):
        ring = Ring(full=(copied, received), free=free, num_stages=config.num_stages, num_steps=run.num_kv_tiles)
        arrays = types.SimpleNamespace(queries=named["queries"], heads=named["heads"])
        left = types.SimpleNamespace(words_ref=None, buffers=None, step=None, outputs=outputs)
        attention = CtaAttention(
            layout=layout, refs=named, run=run, ring=ring, x_broadcast=arrays, broadcast=left, exchange_step=None,
            kv_smem=kv_smem, **smem,
        )  # fmt: skip
        works = attention.compute, attention.move_weights, lambda: attention.move_x(None)
        for number, work in enumerate(works):
            pl.when(lax.axis_index("warpgroup") == number)(work)

    stages = dict(num_barriers=config.num_stages)
    pl.run_scoped(
        attend,
        kv_smem=kv_scratch(shape, config.num_stages),
        copied=plgpu.Barrier(num_arrivals=2, **stages),
        received=plgpu.Barrier(**stages),
        free=plgpu.Barrier(**stages),
        **attention_scratch(shape),
        **attention_barriers(),
        collective_axes="warpgroup",
    )


@pytest.fixture
def without_inline_code(monkeypatch):
    """Has attention take what comes by words from arrays, leave partial states in arrays, and copy by Pallas."""

    def receive_heads(arrays, first, query_smem, new_smem, *, group):
        output_tile = lax.div(first, (group + 2) * query_smem.shape[-1])
        query_smem[...] = arrays.queries[output_tile]
        new_smem[...] = arrays.heads[output_tile]

    def write_over(new_smem, kv_smem, rows):
        head_dim = kv_smem.shape[-1]
        for number, row in enumerate(rows):
            kv_smem[row] = new_smem[pl.ds(number * head_dim, head_dim)]

    def copy_kv_together(refs, smem, barriers, stage, place, *, block_kv):
        sequence, first_slot, head = place
        for number, ref in enumerate(refs):
            rows = pl.ds((2 * stage + number) * block_kv, block_kv)
            slots = ref.at[sequence, pl.ds(first_slot, block_kv), head]
            plgpu.copy_gmem_to_smem(slots, smem.at[rows], barriers.at[stage])

    def await_copies(barriers, step, num_stages):
        plgpu.barrier_wait(barriers.at[lax.rem(step, num_stages)])

    def run_compute(*, outputs, shape, **fields):
        (broadcast,) = outputs
        results = StoredResults(shape=shape, outputs=broadcast.outputs)
        fields |= dict(epilogue=None, results=results, outputs=broadcast.outputs, tables=fields["tables"])
        return RunCompute(shape=shape, **fields)

    for function in (receive_heads, write_over, copy_kv_together, await_copies):
        monkeypatch.setattr(few_rows_chain_attention, function.__name__, function)
    monkeypatch.setattr(few_rows_chain_attention, "RunCompute", run_compute)
    monkeypatch.setattr(AttentionLayout, "end", lambda self, local: None)


STEPS = [
    Step(ends=(700, 130), num_slots=768, num_kv_heads=2, num_ctas=5),  # runs that begin and end within output tiles
    Step(ends=(129, 300), num_slots=384, num_stages=3),  # a ring that is refilled; two new rows in one stage
    Step(ends=(1,), num_slots=64, head_dim=128, group=8),  # nothing but the new token
    Step(ends=(256, 200), num_slots=256, slots=(256, 199), group=1, num_ctas=2),  # one has no room for it
    Step(ends=(0, 128), num_slots=128, slots=(128, 127), num_ctas=2),  # one sees nothing, as on another device
    Step(ends=(500, 300), num_slots=512, start=203, num_ctas=3),
    Step(ends=(90,), num_slots=128, head_dim=128, group=16, num_ctas=2, logits_soft_cap=5.0),
]


@needs_interpreter
@pytest.mark.parametrize("step", STEPS, ids=lambda step: f"{step.ends} of {step.num_slots}, {step.num_ctas} CTAs")
@pytest.mark.usefixtures("without_inline_code")
def test_it_is_exact_and_has_no_race_whatever_the_new_row_holds_before(step):
    out, expected = step.merged(*interpreted(step, num_kernels=1)), step.expected(*step.inputs())
    assert np.abs(out - expected).max() <= 2 * float(jnp.finfo(jnp.bfloat16).eps) * max(np.abs(expected).max(), 1)


@needs_interpreter
@pytest.mark.usefixtures("without_inline_code")
def test_without_waiting_for_the_new_row_it_has_a_race(monkeypatch):
    await_copies_only = lambda self, step: plgpu.barrier_wait(self.full[0].at[self.stage(step)])
    monkeypatch.setattr(Ring, "await_full", await_copies_only)
    assert has_race(STEPS[1], or_is_unawaited=True)


def test_attention_tells_when_it_has_sent_its_part(monkeypatch):
    calls = []
    computing = types.SimpleNamespace(compute=lambda: calls.append("compute"))
    monkeypatch.setattr(few_rows_chain_attention, "RunCompute", lambda **_: computing)
    monkeypatch.setattr(few_rows_chain_attention, "products_of", lambda _: lambda **_: None)
    of_cta = types.MethodType(CtaAttention.compute, unittest.mock.MagicMock(refs={}))
    of_cta(lambda: calls.append("tell"))
    assert calls == ["compute", "tell"]
