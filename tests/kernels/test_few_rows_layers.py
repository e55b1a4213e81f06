"""Several layers in one launch: what may be one, what their words hold, and every order of their CTAs' operations."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import pytest
from few_rows_cases import OF_1B, Layer
from layers_exchange_model import Layers as Exchanges
from layers_exchange_model import failures

from tree_attn.kernels import (
    few_rows_chain,
    few_rows_chain_call,
    few_rows_chain_messages,
    few_rows_layers,
    few_rows_layers_call,
)
from tree_attn.kernels.few_rows_chain_call import Unchained
from tree_attn.kernels.few_rows_chain_cta import CtaChain
from tree_attn.kernels.few_rows_chain_layout import chain_buffers, first_attended
from tree_attn.kernels.few_rows_layers import CtaLayers
from tree_attn.kernels.few_rows_layers_call import MAX_LAYERS, Layers
from tree_attn.kernels.launch_order import KERNELS_ARE_RECORDED

needs_launches = pytest.mark.skipif(
    jax.__version_info__ < KERNELS_ARE_RECORDED, reason="with an older JAX each layer is a launch of its own"
)


@pytest.fixture
def on_h200(monkeypatch):
    monkeypatch.setattr(few_rows_chain_call, "num_sms", lambda: 132)
    monkeypatch.setattr(few_rows_chain_call, "is_interpreted", lambda: False)


def calls(count: int = 2, layer: Layer | None = None) -> list:
    """Returns so many layers of one shape, of arrays that are never read."""
    arrays = [jnp.zeros(x.shape, x.dtype) for x in (layer or Layer(**OF_1B | {"slots": 64})).array_shapes()]
    return [Layer.call(Layer(), *arrays)] * count


@needs_launches
def test_layers_of_a_model_are_one_launch(on_h200):
    shapes, configs, layout, tables = Layers(calls()).plan()
    assert [config.num_ctas for config in configs] == [96, 128, 128, 128]  # of 3,072 heads' features pairs of 8 rows
    assert layout.config.num_ctas == 128
    assert set(tables) == {"sequences", "runs", "spans"}
    assert len(shapes) == 4


@needs_launches
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda layers: layers[:1], "a launch has 2 to 16 layers, not 1"),
        (lambda layers: layers * MAX_LAYERS, "a launch has 2 to 16 layers, not 32"),
        (lambda layers: [layers[0], dataclasses.replace(layers[1], scale=0.2)], "layers of one launch are alike"),
        (lambda _: calls(layer=Layer(**OF_1B | {"intermediate": 1792, "slots": 64})), "a part of all products"),
        (lambda layers: [dataclasses.replace(layers[0], meeting=(0, None))] * 2, "one launch on one device"),
        (lambda _: calls(layer=Layer(**OF_1B | {"batch": 5, "slots": 64})), "up to 4 sequences, not 1 of 5"),
    ],
    ids=["one", "many", "scale", "a part", "devices", "sequences"],
)
def test_what_cannot_be_one_launch_has_a_reason(change, reason, on_h200):
    with pytest.raises(Unchained, match=reason):
        Layers(change(calls())).run()


def test_with_an_older_jax_each_layer_is_a_launch(on_h200, monkeypatch):
    monkeypatch.setattr(few_rows_layers_call, "KERNELS_ARE_RECORDED", (99, 0))
    assert Layers(calls()).plan() == f"a launch of several layers needs JAX 0.12, not {jax.__version__}"


@needs_launches
def test_what_attention_gives_has_words_of_its_own(on_h200):
    shapes, _, layout, _ = Layers(calls()).plan()
    one, several = (chain_buffers(shapes, layout, num_layers=number) for number in (None, 2))
    assert first_attended(shapes, layout) == one.capacity
    assert several.capacity == one.capacity + layout.num_features
    assert several.partial_words == one.partial_words


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layers": 3},
        {"makes": (0, 1, 1)},
        {"makes": (None, 0, 1), "attends": ((0,), (1,), (0,)), "merges": ((0,), (1,), (1,))},
        {"attends": ((0,), (0,), (1,)), "merges": ((1,), (0,), (1,))},
        {"meets": False},
    ],
    ids=str,
)
def test_words_are_read_before_they_are_overwritten(changes):
    assert list(failures(Exchanges(**changes))) == []


def test_words_of_attention_among_others_are_overwritten_too_early():
    """Who merges a head's states has waited for those who made it, and not for those who receive x for others."""
    assert any("overwritten" in failure for failure in failures(Exchanges(apart=False)))


def test_one_slot_does_not_suffice():
    assert any(failures(Exchanges(slots=1)))


@pytest.fixture
def recorded(monkeypatch):
    """A CTA of two layers, all of whose waits and work are only recorded, in `calls`.

    Of its three operations each of two CTAs has a part, but of the first only CTA 0.
    """
    calls = []
    record = lambda name, result=None: lambda *_, **__: calls.append(name) or result
    for name in ("await_previous_kernel", "begin_next_kernel", "clear"):
        monkeypatch.setattr(few_rows_chain, name, record(name))
    monkeypatch.setattr(few_rows_layers.plgpu, "barrier_wait", lambda barrier: calls.append(f"wait {barrier}"))
    monkeypatch.setattr(few_rows_layers.plgpu, "barrier_arrive", lambda barrier: calls.append(f"arrive {barrier}"))
    for name in ("begin_steps", "count_steps", "read_counts", "come_without"):
        monkeypatch.setattr(CtaLayers, name, record(name))
    monkeypatch.setattr(CtaLayers, "come", lambda _, number: calls.append(f"come {number}"))
    monkeypatch.setattr(CtaLayers, "prepared", lambda self: self)
    monkeypatch.setattr(CtaLayers, "of_layer", lambda self, *_: self)
    for name in ("_product", "_broadcast", "steps_of_layer"):
        product = types.SimpleNamespace(send_before=record("send x"))
        monkeypatch.setattr(CtaLayers, name, record(name, product))
    of_heads, of_all = (types.SimpleNamespace(is_compact=True, num_ctas=count) for count in (1, 2))
    properties = {"refs": [None], "operations": [(0, of_heads), (1, of_all), (2, of_all)], "broadcasts": [0, 1, 2]}
    for name, value in properties.items():
        monkeypatch.setattr(CtaLayers, name, property(lambda _, value=value: value))
    compute = lambda number: lambda tell_sent=lambda: None: calls.append(f"compute {number}") or tell_sent()
    operations = [
        types.SimpleNamespace(move_x=record(f"receive {number}"), compute=compute(number)) for number in range(3)
    ]
    monkeypatch.setattr(few_rows_chain_messages.lax, "axis_index", lambda _: 0)
    for name in ("run", "run_to_end"):
        monkeypatch.setattr(CtaLayers, name, lambda *_: operations)
    monkeypatch.setattr(CtaLayers, "in_turn", lambda self, steps, body: calls.append("in_turn") or body(self, steps))
    monkeypatch.setattr(few_rows_layers.pl, "when", lambda condition: lambda body: body() if condition else None)
    smem = {"x_written": "x_written", "sent": types.SimpleNamespace(at=["sent 0", "sent 1", "sent 2"])}
    fields = dict(
        shapes=(None,), configs=(of_heads, of_all), attention=None, buffers=None, named={"x": None}, outputs=()
    )
    chain = CtaLayers(**fields, ends=[], fulls=[], free=None, smem=smem, num_layers=2)
    return types.SimpleNamespace(chain=chain, calls=calls)


def test_computing_waits_until_x_is_written(recorded):
    """A CTA without heads and KV tiles reads the residual at once, which another of its warpgroups writes."""
    calls = recorded.calls
    few_rows_chain._compute(recorded.chain)
    assert calls.index("wait x_written") < calls.index("in_turn")
    calls.clear()
    few_rows_chain._move_x(recorded.chain)
    assert calls.index("read_counts") < calls.index("send x") < calls.index("arrive x_written") < calls.index("come 2")


@pytest.mark.parametrize("cta", [0, 1])
@pytest.mark.parametrize("layer", [0, 1])
def test_x_is_received_when_the_cta_has_sent_its_part(layer, cta, recorded, monkeypatch):
    """The first layer's x is of no operation. Who makes no heads has none to send."""
    monkeypatch.setattr(few_rows_chain_messages.lax, "axis_index", lambda _: cta)
    few_rows_chain._move_x(dataclasses.replace(recorded.chain, layer=layer))
    awaited = [call for call in recorded.calls if call.startswith(("wait", "receive"))]
    heads = [["receive 0", "wait sent 0"], []][cta]
    assert awaited == ["wait sent 2"] * layer + [*heads, "receive 1", "wait sent 1", "receive 2"]
    recorded.calls.clear()
    few_rows_chain._compute(dataclasses.replace(recorded.chain, layer=layer))
    done = [call for call in recorded.calls if call.startswith(("compute", "arrive"))]
    assert done == [f"{what} {number}" for number in range(cta, 3) for what in ("compute", "arrive sent")]


@pytest.mark.parametrize(
    "kind, order",
    [(CtaChain, ("compute", "arrive sent", "come")), (CtaLayers, ("compute", "come", "arrive sent"))],
)
def test_a_chain_tells_within_its_operations_and_layers_tell_last(kind, order, recorded, monkeypatch):
    monkeypatch.setattr(CtaLayers, "compute", kind.compute)
    few_rows_chain._compute(recorded.chain)
    done = [call for call in recorded.calls if call.startswith(("compute", "arrive", "come"))]
    assert done == [f"{what} {number}" for number in range(3) for what in order]


@pytest.mark.parametrize("cta", [0, 1])
def test_in_a_chain_x_that_comes_by_words_is_received_so_too(cta, recorded, monkeypatch):
    monkeypatch.setattr(few_rows_chain_messages.lax, "axis_index", lambda _: cta)
    for broadcasts in ([], [0, 1]):
        monkeypatch.setattr(CtaLayers, "broadcasts", broadcasts)
        for number in range(3):
            CtaChain.await_sent(recorded.chain, number)
            CtaChain.tell_sent(recorded.chain, number)
    heads = [["wait sent 0"], []][cta]
    assert recorded.calls == ["arrive sent 0", *heads, "arrive sent 1", "wait sent 1"]
