"""The lean kernel as GPUs other than Hopper's run it: in the interpreter, against the oracle, and its barriers."""

import pytest
from lean_cases import HEAD_SCALES, Call, thorough
from lean_interpreter import check, needs_interpreter, set_layout

from tree_attn.kernels import targets

pytestmark = [needs_interpreter, pytest.mark.usefixtures("small_layout")]
CAUSAL, WINDOW = {"is_causal": True}, {"local_window_size": (70, 0)}
RAGGED = (200, 0, 77, 1)
FLOAT8 = {"stored_dtype": "float8_e4m3fn", "options": HEAD_SCALES}
CALLS = [
    (Call(head_dim=80, lengths=(190, 64), slots=191, dtype="float16"), 2),
    (Call(head_dim=256, lengths=(100,), slots=192, group=3, dtype="float16"), 2),
    (Call(queries=5, group=3, options=CAUSAL, lengths=(250,), slots=251), 2),
    (Call(queries=8, group=16, kv_heads=1, slots=131, head_dim=128, lengths=(130,)), 2),  # six blocks of columns
    (Call(**FLOAT8, layout="paged", lengths=RAGGED, group=3, head_dim=128), 2),
    (Call(layout="packed", lengths=(70, 2, 129), queries=3, options=CAUSAL | WINDOW, slots=192, spare=1), 2),
    (Call(lengths=(40, 0, 9, 33, 1), slots=40, head_dim=80, group=2, logit_size=1e4), 1),
    (Call(lengths=(250, 0, 70, 180, 3), kv_heads=3, logit_size=1e4), 2),
]
MORE = [
    (Call(group=4), 2),
    (Call(queries=8, group=4, options=CAUSAL | WINDOW, lengths=(130, 3), head_dim=128, kv_heads=1), 2),
    (Call(layout="paged", page=24, lengths=(70, 2, 129), queries=3, slots=192), 2),
    (Call(**FLOAT8, layout="packed", lengths=RAGGED, group=3, head_dim=128), 2),
    (Call(logit_size=1e4, lengths=(200, 13)), 2),
    (Call(head_dim=96, lengths=(130, 0), slots=192, group=3), 2),
    (Call(slots=201, options={"logits_soft_cap": 2.0}, logit_size=4.0), 2),
    (Call(**FLOAT8, head_dim=80, dtype="float16", slots=191, group=3), 2),
    (Call(layout="paged", page=128, lengths=(250, 0, 129), slots=256), 2),
    (Call(batch=5, slots=72, kv_heads=3, queries=2, group=4, head_dim=128, dtype="float16"), 1),
    (Call(layout="paged", lengths=(500, 64, 0), slots=512, kv_heads=2, head_dim=128), 2),
]


@pytest.mark.parametrize("call, num_kernels", CALLS + thorough(MORE), ids=str)
def test_elsewhere_than_on_hopper_it_is_exact_and_has_no_race(call, num_kernels):
    with targets.assumed("8.0"):
        check(call, num_kernels)


STATIC, OF_LENGTHS = Call(slots=512, kv_heads=1), Call(lengths=(500, 0, 77), slots=511)


@pytest.mark.parametrize(
    "call, num_stages", [(STATIC, 1), (OF_LENGTHS, 3), *thorough([(STATIC, 3), (OF_LENGTHS, 1)])], ids=str
)
def test_no_number_of_stages_changes_the_result(call, num_stages, monkeypatch):
    set_layout(monkeypatch, num_stages=num_stages, num_ctas=2)
    with targets.assumed("8.0"):
        check(call)
