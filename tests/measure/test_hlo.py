"""The collective counter, against hand-written HLO whose answer is plain to see and against programs XLA compiles."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from tree_attn.measure import hlo

ADD = """
add {
  x = f32[] parameter(0)
  y = f32[] parameter(1)
  ROOT z = f32[] add(x, y)
}
"""


def module(entry: str, *computations: str, header: str = "HloModule test, num_partitions=8") -> str:
    return "\n".join([header, ADD, *computations, "ENTRY main {", entry, "}"])


def loop_module(condition: str, body_step: str, start: str = "constant(0)", attributes: str = "") -> str:
    """A while loop with one all-reduce of 64 bytes in its body."""
    body = f"""body {{
  carry = (s32[], f32[16], s32[]) parameter(0)
  i = s32[] get-tuple-element(carry), index=0
  x = f32[16]{{0}} get-tuple-element(carry), index=1
  limit = s32[] get-tuple-element(carry), index=2
  r = f32[16]{{0}} all-reduce(x), replica_groups={{{{0,1,2,3}}}}, to_apply=add
  step = s32[] constant(2)
  next = s32[] {body_step}
  ROOT out = (s32[], f32[16], s32[]) tuple(next, r, limit)
}}"""
    condition = f"""cond {{
  carry = (s32[], f32[16], s32[]) parameter(0)
  i = s32[] get-tuple-element(carry), index=0
  limit = s32[] get-tuple-element(carry), index=2
  ten = s32[] constant(10)
  ROOT p = pred[] {condition}
}}"""
    entry = f"""  a = f32[16]{{0}} parameter(0)
  zero = s32[] {start}
  limit = s32[] constant(7)
  init = (s32[], f32[16], s32[]) tuple(zero, a, limit)
  loop = (s32[], f32[16], s32[]) while(init), condition=cond, body=body{attributes}
  ROOT r = f32[16]{{0}} get-tuple-element(loop), index=1"""
    return module(entry, body, condition)


ONE = {  # instruction: (opcode, payload, sent, group size)
    "r = f32[16]{0} all-reduce(a), channel_id=3, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=add": (
        "all-reduce",
        64,
        96.0,
        4,
    ),
    "r = f32[16]{0} all-reduce(a), replica_groups={}, to_apply=add": ("all-reduce", 64, 112.0, 8),
    "r = f32[16]{0} all-reduce(a), replica_groups=[2,4]<=[8], to_apply=add": ("all-reduce", 64, 96.0, 4),
    "r = f32[16]{0} all-reduce(a), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=add": ("all-reduce", 64, 64.0, 2),
    "r = f32[16]{0} all-reduce(a), replica_groups=mesh['x'=4,'y'=2] {'y'}, to_apply=add": ("all-reduce", 64, 64.0, 2),
    "r = f32[16]{0} all-reduce(a), replica_groups=mesh['x'=4,'y'=2] {'x','y'}, to_apply=add": (
        "all-reduce",
        64,
        112.0,
        8,
    ),
    "r = f32[16]{0} all-reduce(a), replica_groups=mesh['x'=8] {'x':(1)2}, to_apply=add": ("all-reduce", 64, 64.0, 2),
    "r = f32[16]{0} all-reduce(f32[16]{0} %a), replica_groups={{0,1,2,3}}, to_apply=%add": ("all-reduce", 64, 96.0, 4),
    "r = f32[128]{0} all-gather(a), dimensions={0}, replica_groups=[1,8]<=[8]": ("all-gather", 512, 448.0, 8),
    "r = f32[4]{0} reduce-scatter(a), dimensions={0}, replica_groups=[2,4]<=[8], to_apply=add": (
        "reduce-scatter",
        64,
        48.0,
        4,
    ),
    "r = f32[16]{0} all-to-all(a), dimensions={0}, replica_groups=[2,4]<=[8]": ("all-to-all", 64, 48.0, 4),
    "r = f32[16]{0} collective-broadcast(a), replica_groups=[2,4]<=[8]": ("collective-broadcast", 64, 48.0, 4),
    "r = f32[16]{0} collective-permute(a), source_target_pairs={{0,1},{1,2},{2,0}}": (
        "collective-permute",
        64,
        64.0,
        3,
    ),
    "r = f32[16]{0} collective-permute(a), source_target_pairs={{0,0}}": ("collective-permute", 64, 0.0, 0),
    # GPU programs: asynchronous forms, with the types they really print.
    "r = f32[16]{0} all-reduce-start(a), channel_id=1, replica_groups=[1,8]<=[8], to_apply=add": (
        "all-reduce",
        64,
        112.0,
        8,
    ),
    "r = (f32[16]{0}, f32[128]{0}) all-gather-start(a), dimensions={0}, replica_groups=[1,8]<=[8]": (
        "all-gather",
        512,
        448.0,
        8,
    ),
    "r = (f32[16]{0}, f32[16]{0}, u32[], u32[]) collective-permute-start(a), source_target_pairs={{0,1},{1,0}}": (
        "collective-permute",
        64,
        64.0,
        2,
    ),
    "r = ((f32[16]{0}), f32[4]{0}) reduce-scatter-start(a), replica_groups=[2,4]<=[8], to_apply=add": (
        "reduce-scatter",
        64,
        48.0,
        4,
    ),
    "r = (f32[16]{0}, u32[], token[]) send(a, t), frontend_attributes={_xla_send_recv_source_target_pairs="
    '"{{0,1},{1,0}}"}': ("collective-permute", 64, 64.0, 2),
}


@pytest.mark.parametrize("line", ONE)
def test_one_instruction(line):
    (item,) = hlo.collectives(module(f"  a = f32[16]{{0}} parameter(0)\n  t = token[] after-all()\n  ROOT {line}"))
    assert (item.opcode, item.bytes_payload, item.bytes_sent_per_device, item.group_size) == ONE[line]
    assert (item.count, item.dtype) == (1, "f32")


def test_done_is_not_counted_again_and_channels_are_read():
    text = module("""  a = bf16[4,8]{1,0:T(8,128)(2,1)} parameter(0)
  s = (bf16[4,8]{1,0}, bf16[4,8]{1,0}) collective-permute-start(a), channel_id=7, source_target_pairs={{0,1},{1,0}}
  d = bf16[4,8]{1,0} collective-permute-done(s)
  g = (bf16[4,8]{1,0}, bf16[32,8]{1,0}) all-gather-start(d), channel_id=8, dimensions={0}, replica_groups=[1,8]<=[8]
  ROOT e = bf16[32,8]{1,0} all-gather-done(g)""")
    permute, gather = hlo.collectives(text)
    assert (permute.channel, permute.bytes_payload, permute.dtype) == (7, 64, "bf16")
    assert (gather.channel, gather.bytes_payload) == (8, 512)


def test_async_start_counts_what_it_wraps_once():
    wrapped = """wrapped {
  p = f32[16]{0} parameter(0)
  ROOT rs = f32[2]{0} reduce-scatter(p), dimensions={0}, replica_groups={}, to_apply=add
}"""
    text = module(
        """  a = f32[16]{0} parameter(0)
  s = ((f32[16]{0}), f32[2]{0}, u32[]) async-start(a), calls=wrapped
  u = ((f32[16]{0}), f32[2]{0}, u32[]) async-update(s), calls=wrapped
  ROOT d = f32[2]{0} async-done(u), calls=wrapped""",
        wrapped,
    )
    assert hlo.summarize(text) == {"reduce-scatter": hlo.Total(1, 64, 56.0)}


def test_a_call_begun_on_a_sparse_core_counts_what_it_calls():
    """TPU v7 programs give the call's operand later, by `call-update`."""
    called = """called {
  p = f32[1,16]{1,0:T(8,128)} parameter(0)
  ROOT g = f32[8,16]{1,0:T(8,128)} all-gather(p), channel_id=2, replica_groups=mesh['seq'=8] {'seq'}, dimensions={0}
}, execution_thread="sparsecore"
"""
    text = module(
        """  a = f32[1,16]{1,0:T(8,128)S(1)} parameter(0)
  s = ((), (), (s32[1]{0:T(128)S(2)})) call-start(), async_execution_thread="sparsecore", to_apply=%called
  u = ((f32[1,16]{1,0:T(8,128)}), f32[8,16]{1,0:T(8,128)}) call-update(s, a)
  ROOT d = f32[8,16]{1,0:T(8,128)} call-done(u)""",
        called,
    )
    assert hlo.summarize(text) == {"all-gather": hlo.Total(1, 512, 448.0)}


def test_variadic_collective_is_one_with_its_bytes_summed():
    text = module("""  a = f32[16]{0} parameter(0)
  b = bf16[3,5]{1,0} parameter(1)
  ROOT r = (f32[16]{0}, /*index=1*/bf16[3,5]{1,0}) all-reduce(a, b), replica_groups={{0,1,2,3}}, to_apply=add""")
    assert hlo.summarize(text) == {"all-reduce": hlo.Total(1, 64 + 30, 1.5 * 94)}


def test_fusions_calls_and_custom_calls_are_followed_but_reducers_are_not():
    inner = """inner {
  p = f32[16]{0} parameter(0)
  ROOT r = f32[16]{0} all-reduce(p), replica_groups={{0,1}}, to_apply=add
}"""
    text = module(
        """  a = f32[16]{0} parameter(0)
  b = f32[16]{0} call(a), to_apply=inner
  c = f32[16]{0} fusion(b), kind=kCustom, calls=%inner
  d = f32[16]{0} custom-call(c), custom_call_target="x", called_computations={%inner}
  z = f32[] constant(0)
  ROOT e = f32[] reduce(d, z), dimensions={0}, to_apply=inner""",
        inner,
    )
    assert hlo.counts(text) == {"all-reduce": 3}


def test_conditional_takes_the_branch_that_sends_most():
    branch = """{name} {{
  p = f32[16]{{0}} parameter(0)
  q = f32[16]{{0}} all-reduce(p), replica_groups={{{{0,1}}}}, to_apply=add
  ROOT r = f32[16]{{0}} {last}
}}"""
    small = branch.format(name="small", last="add(q, q)")
    large = branch.format(name="large", last="collective-permute(q), source_target_pairs={{0,1},{1,0}}")
    for attributes in (
        "conditional(s, a, a), branch_computations={small, large}",
        "conditional(s, a, a), true_computation=large, false_computation=small",
    ):
        entry = f"  s = pred[] parameter(0)\n  a = f32[16]{{0}} parameter(1)\n  ROOT r = f32[16]{{0}} {attributes}"
        assert hlo.counts(module(entry, small, large)) == {"all-reduce": 1, "collective-permute": 1}


LOOPS = {
    ("compare(i, ten), direction=LT", "add(i, step)", "constant(0)"): 5,
    ("compare(i, ten), direction=LT", "add(step, i)", "constant(3)"): 4,
    ("compare(i, ten), direction=LE", "add(i, step)", "constant(0)"): 6,
    ("compare(ten, i), direction=GT", "add(i, step)", "constant(0)"): 5,
    ("compare(i, ten), direction=GT", "subtract(i, step)", "constant(20)"): 5,
    ("compare(i, ten), direction=NE", "add(i, step)", "constant(4)"): 3,
    ("compare(i, limit), direction=LT", "add(i, step)", "constant(0)"): 4,
    ("compare(i, ten), direction=LT", "add(i, step)", "constant(12)"): 0,
}


@pytest.mark.parametrize("condition, step, start", LOOPS)
def test_trip_count_from_the_condition(condition, step, start):
    expected = LOOPS[condition, step, start]
    assert hlo.counts(loop_module(condition, step, start)).get("all-reduce", 0) == expected


def test_known_trip_count_is_believed_first():
    known = ', backend_config={"known_induction_variable":{"tuple_index":"0"},"known_trip_count":{"n":"3"}}'
    assert hlo.counts(loop_module("compare(i, ten), direction=LT", "add(i, step)", attributes=known)) == {
        "all-reduce": 3
    }


@pytest.mark.parametrize(
    "condition, step",
    [
        ("compare(i, ten), direction=LT", "multiply(i, step)"),
        ("compare(i, ten), direction=GT", "add(i, step)"),
        ("compare(limit, ten), direction=LT", "add(i, step)"),
    ],
)
def test_unknown_trip_count_is_an_error_never_one(condition, step):
    text = loop_module(condition, step)
    with pytest.raises(ValueError, match=r"loop 'loop' holds 1 collectives and its trip count cannot be read"):
        hlo.collectives(text)
    assert hlo.summarize(hlo.collectives(text, unknown_trip_count=9)) == {"all-reduce": hlo.Total(9, 9 * 64, 9 * 96.0)}


def test_group_of_unknown_size_is_an_error():
    text = module(
        "  a = f32[16]{0} parameter(0)\n  ROOT r = f32[16]{0} all-reduce(a), replica_groups={}, to_apply=add",
        header="HloModule test",
    )
    with pytest.raises(ValueError, match="pass num_devices"):
        hlo.collectives(text)
    assert hlo.collectives(text, num_devices=4)[0].bytes_sent_per_device == 96.0


@pytest.mark.parametrize("text", ["module @jit_f attributes {}", "", "HloModule x\n"])
def test_other_text_is_an_error(text):
    with pytest.raises(ValueError, match="hlo_text must be an HLO module with an ENTRY"):
        hlo.collectives(text)


def test_bytes_sent_rejects_an_unknown_opcode():
    with pytest.raises(ValueError, match="opcode must be one of 'all-reduce'"):
        hlo.bytes_sent("psum", 4, 2)


def both_texts(function, n_devices, *args):
    """The lowered and the compiled HLO text of `function`, sharded over the first axis of every argument."""
    mesh = Mesh(np.array(jax.devices()[:n_devices]), ("d",))
    spec = PartitionSpec("d")
    mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    lowered = jax.jit(mapped).lower(*args)
    return lowered.as_text(dialect="hlo"), lowered.compile().as_text()


@pytest.mark.parametrize("n_devices", [3, 8])
def test_psum_in_a_scan(n_devices):
    def function(x):
        return jax.lax.scan(lambda carry, _: (jax.lax.psum(carry, "d") * 0.5, None), x, None, length=5)[0]

    for text in both_texts(function, n_devices, jnp.ones((24, 4))):
        size = 24 // n_devices * 4 * 4
        expected = 5 * 2 * (n_devices - 1) / n_devices * size
        assert hlo.summarize(text) == {"all-reduce": hlo.Total(5, 5 * size, pytest.approx(expected))}


def test_nested_loops_and_a_conditional_in_real_programs():
    hop = functools.partial(jax.lax.ppermute, axis_name="d", perm=[(i, (i + 1) % 8) for i in range(8)])

    def function(x):
        def outer(carry, _):
            carry = jax.lax.fori_loop(0, 3, lambda _, y: hop(y) + 1, carry)
            return jax.lax.cond(carry.sum() > 0, lambda y: jax.lax.psum(y, "d"), lambda y: y, carry), None

        return jax.lax.scan(outer, x, None, length=4)[0] + jax.lax.all_gather(x, "d").sum(0)

    for text in both_texts(function, 8, jnp.ones((8, 4))):
        assert hlo.counts(text) == {"collective-permute": 12, "all-reduce": 4, "all-gather": 1}
        assert hlo.summarize(text)["all-gather"].bytes_sent_per_device == 7 * 16
