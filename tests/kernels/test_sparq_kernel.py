"""SparQ's kernels in Mosaic GPU's interpreter, against the same in XLA, and lowered for CUDA."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lean_cases import thorough
from lean_interpreter import interpreter, needs_interpreter
from sparq_cases import CALLS, COMPILED_GROUPED, GROUPED, Call
from test_lean_compiled import REGISTER_UNIT, REGISTERS_PER_SM, WHEELS, report_of

from tree_attn import make_mesh
from tree_attn.kernels import sparq_attend, sparq_shape, tuning
from tree_attn.local import mosaic_gpu
from tree_attn.sparq import SparqOptions

GROUPED_CTAS_PER_SM = {
    "sparq_components": 4,
    "sparq_select": 2,
    "sparq_logits": 2,
    "sparq_share": 4,
    "sparq_best": 3,
    "sparq_attend": sparq_attend.CTAS_PER_SM,
}
LOWERED = [CALLS[0], CALLS[3], GROUPED[0], GROUPED[5]]  # to three, four, three and five kernels
LIKE_OTHERS = [GROUPED[0], GROUPED[1], GROUPED[5]]
ATOL = {"bfloat16": 1e-2, "float16": 2e-3}  # one rounding of results near 1, more or less


@pytest.fixture
def anywhere(monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "unavailable", lambda: None)


@pytest.fixture
def interpreted(anywhere, time_limit, monkeypatch):
    """Has one SM run all kernels, so that CTAs have several chunks and choices."""
    monkeypatch.setattr(tuning, "num_sms", lambda: 1)


@needs_interpreter
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    "call", [call for call in CALLS + GROUPED if call not in LIKE_OTHERS] + thorough(LIKE_OTHERS), ids=str
)
def test_it_is_what_xla_computes_and_no_thread_races(call):
    arrays = call.arrays()
    expected = jax.jit(functools.partial(call.run, implementation="xla"))(*arrays)
    with interpreter() as found:
        out, lse = jax.block_until_ready(jax.jit(call.run)(*arrays))
    assert [races.races_found for races in found] == [False] * call.num_kernels
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (out, expected[0])), atol=ATOL[call.dtype], rtol=0)
    np.testing.assert_allclose(lse, expected[1], atol=1e-4, rtol=1e-5)


@needs_interpreter
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    "group, reallocate", [(2, False), (4, True), pytest.param(1, True, marks=pytest.mark.thorough)]
)
def test_shards_choose_together(group, reallocate):
    """The shards are mapped, and not on devices, whose barriers the interpreter confuses."""
    call = Call(lengths=(900, 3), slots=1024, heads=1, group=group, queries=1 if reallocate else 3,
                is_causal=True, reallocate=reallocate)  # fmt: skip
    query, *cache, lengths = call.arrays()
    expected = jax.jit(functools.partial(call.run, implementation="xla"))(query, *cache, lengths)
    sharded = [jnp.stack(jnp.split(x, 2, axis=axis)) for x, axis in zip(cache, (1, 1, 3))]
    on_shards = jax.vmap(
        lambda *cache: call.run(query, *cache, lengths, axis_name="seq", block_size=None), axis_name="seq"
    )
    with interpreter() as found:
        out, lse = jax.block_until_ready(jax.jit(on_shards)(*sharded))
    assert [races.races_found for races in found] == [False] * (3 if group == 1 else 4)
    for shard in range(2):
        np.testing.assert_allclose(
            *(np.asarray(x, np.float32) for x in (out[shard], expected[0])), atol=ATOL[call.dtype], rtol=0
        )
        np.testing.assert_allclose(lse[shard], expected[1], atol=1e-4, rtol=1e-5)


def lowered(call: Call, **options) -> str:
    return (
        jax.jit(functools.partial(call.run, **options))
        .trace(*call.shapes())
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="written for JAX 0.11 and newer")
@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("call", LOWERED + thorough([call for call in CALLS + GROUPED if call not in LOWERED]), ids=str)
def test_it_lowers_to_three_kernels_or_as_many_as_a_choice_takes(call):
    assert len(re.findall("custom_call @mosaic_gpu", lowered(call))) == call.num_kernels


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="written for JAX 0.11 and newer")
@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("selection, group, kernels", [("global", 1, 3), ("per_shard", 1, 3), ("global", 4, 4)])
def test_it_lowers_within_a_sharded_program(selection, group, kernels):
    where = dict(axis_name="seq", mesh=make_mesh({"seq": 2}), block_size=None, selection=selection)
    call = Call(lengths=(900,), slots=1024, group=group, reallocate=group == 1)
    assert len(re.findall("custom_call @mosaic_gpu", lowered(call, **where))) == kernels


@pytest.mark.skipif(WHEELS is None, reason="runs where test_lean_compiled.py does")
def test_kernels_of_groups_spill_no_register_and_their_ctas_fit():
    compiled = report_of("compile_lean.py", "grouped")
    assert list(compiled) == [f"sparq {call}" for call in COMPILED_GROUPED]
    kernels = [kernel for _, of_call, *_ in compiled.values() for kernel in of_call.items()]
    assert {name for name, _ in kernels} == set(GROUPED_CTAS_PER_SM)
    for name, (registers, spilled) in kernels:
        per_thread = -(-registers // REGISTER_UNIT) * REGISTER_UNIT
        assert spilled == 0 and 128 * per_thread * GROUPED_CTAS_PER_SM[name] <= REGISTERS_PER_SM, (name, registers)


def refusal(*, group=1, value_dim=None, dtypes=("bfloat16",) * 3, components=8, by_component=True, **sizes):
    call = Call(**{"lengths": (9,)} | sizes)
    query, key, value, of_component, _ = jax.eval_shape(call.arrays)
    shape = lambda x, dtype, last=None: jax.ShapeDtypeStruct((*x.shape[:-1], last or x.shape[-1]), dtype)
    query = jax.ShapeDtypeStruct((*query.shape[:2], query.shape[2] * group, query.shape[3]), dtypes[0])
    key, value = shape(key, dtypes[1]), shape(value, dtypes[2], value_dim)
    options = SparqOptions(num_components=components, num_keys=4)
    return sparq_shape.unsupported(query, key, value, of_component if by_component else None, options)


@pytest.mark.parametrize(
    "changed, named",
    [
        (dict(group=9), "at most 8 query heads per key head, not 18 and 2"),
        (dict(dtypes=("float32",) * 3), "one dtype, .*float32"),
        (dict(dtypes=("bfloat16", "float8_e4m3fn", "float8_e4m3fn")), "one dtype, .*float8"),
        (dict(head_dim=256), "head dim of .* not 256"),
        (dict(value_dim=128), "head dim of .* not 64 for keys and 128 for values"),
        (dict(by_component=False), "key_by_component"),
        (dict(slots=1000), "multiple of 512 .* not 1000 and 8"),
        (dict(components=6), "num_components of 4, not 512 and 6"),
    ],
    ids=str,
)
def test_what_the_kernels_cannot_do_is_named(changed, named):
    assert re.search(named, refusal(**changed))
    assert refusal() is None
