"""Wrong calls of every public function: each raises a documented error that names the argument, and compiles nothing.

A case is a function and arguments that replace those of a good call: one that is wrong by itself, or several that
contradict each other. Arguments are Python source, so that a case's repr makes it again.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jaxtyping
import numpy as np

import tree_attn
from tree_attn import CacheFullError, KVCache, PrefixLevel, PromptLayout, Shard, SoftmaxState, SparqOptions, make_mesh
from tree_attn.models import llama
from tree_attn.models.llama import LlamaConfig, Sampling
from tree_attn.ring_baseline import ring_attention, ring_decode

IN_EXPRESSIONS = (tree_attn, PromptLayout, Shard, SparqOptions, Sampling, ring_attention, ring_decode)
SUBJECT = "wrong_calls"
DOCUMENTED = (ValueError, TypeError, NotImplementedError)
B, T, N, K, H, S = 2, 1, 4, 2, 8, 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A call of `CALLS[function]` with some arguments replaced by the values of Python expressions."""

    function: str
    changes: tuple[tuple[str, str], ...]


def floats(*shape: int, dtype=np.float32) -> np.ndarray:
    """Returns ones, in float32 unless said otherwise."""
    return np.ones(shape, dtype)


def state(*rows: int) -> SoftmaxState:
    """Returns a state of `rows`, or of two."""
    rows = rows or (2,)
    return SoftmaxState(floats(*rows, H), floats(*rows))


def level(**changes) -> PrefixLevel:
    """Returns a prefix level of one node for both sequences."""
    return PrefixLevel(**{"key": floats(1, S, K, H), "value": floats(1, S, K, H), "sequences": ((0, 1),)} | changes)


@functools.cache
def mesh():
    """Returns a mesh of two devices."""
    return make_mesh({"seq": 2}, jax.devices()[:2])


@functools.cache
def cache(**changes) -> KVCache:
    """Returns an empty cache over two devices."""
    sizes = {"batch": B, "capacity": S, "num_kv_heads": K, "head_dim": H, "dtype": np.float32}
    return KVCache.create(**sizes | {"mesh": mesh(), "axis_name": "seq"} | changes)


@functools.cache
def model():
    """Returns a small Llama on one device."""
    from tree_attn.models.llama import parameters

    config = LlamaConfig(
        num_layers=1, hidden_size=16, intermediate_size=16, num_heads=2, num_kv_heads=1, head_dim=8, vocab_size=64,
        max_position=32,
    )  # fmt: skip
    sharding = llama.spread_over(config, make_mesh({"seq": 1}, jax.devices()[:1]))
    return llama.Llama(config, sharding, parameters.random(sharding, np.float32))


@functools.cache
def generator() -> llama.Generator:
    """Returns a generator of the small Llama."""
    return llama.Generator(model(), llama.by_name("single", model().sharding))


# Wrong values by kind: Python source, some of it with the sizes of the right value in it.
NOT_ANYTHING = ("'text'", "{}", "object()", "3.5j")
NO_ARRAY = ("'text'", "{}", "object()", "3.5", "[[1.0], [2.0]]", "[[1], [1, 2]]")
FLAG = ("'yes'", "1", "None", "np.ones(2)", "[]")
COUNT = ("0", "-1", "2.5", "'2'", "True", "None", "float('nan')", "np.ones(2)", "[3]")
OPTIONAL_COUNT = tuple(x for x in COUNT if x != "None")
SIZE = tuple(x for x in OPTIONAL_COUNT if x not in ("0",))  # 0 is one
NUMBER = ("float('nan')", "float('inf')", "-float('inf')", "'1'", "1j", "np.ones(2)", "10**400", "True", "[1.0]", "{}")
CAP = (*NUMBER, "0", "-2.0", "1e-50", "1e39")
SCALE = (*NUMBER, "1e39", "-3.5e38")
CHOICE = ("'nonsense'", "3", "[]", "{}", "np.ones(2)", "True", "''", "('nonsense',)")
WINDOW = (
    "-1",
    "2.5",
    "'left'",
    "(1,)",
    "(1, 2, 3)",
    "(-1, 2)",
    "(None, 2.5)",
    "[1, 2]",
    "True",
    "np.ones(2)",
    "(1, '2')",
)
AXES = ("'nowhere'", "3", "()", "('seq', 'seq')", "{}", "''", "['seq']", "('seq', 1)")
MESH = ("'mesh'", "3", "{}", "[]", "jax.devices()")
BLOCK = ("0", "-1", "2.5", "'2'", "True", "np.ones(2)", "[1]", "float('nan')")
TOKENS = ("[[1.5]]", "[[1, True]]", "[['1']]", "'text'", "['text']", "[]", "[[]]", "[[1], []]", "[[64]]", "[[-1]]", "3",
          "None", "{}", "np.ones((2, 2))", "[[1] * 40]", "[None]", "[[None]]", "[1, 2]")  # fmt: skip
STATE = ("None", "'text'", "(floats(2, 8), floats(2))", "{}", "floats(2, 8)", "SoftmaxState([1.0], [1.0])",
         "SoftmaxState(floats(2, 8), floats(3))", "SoftmaxState(floats(2, 8), floats(2, dtype=np.float16))",
         "SoftmaxState(floats(2, 8, dtype=np.int32), floats(2))", "SoftmaxState(floats(2, 8), None)")  # fmt: skip


def array(*shape: int, dtypes=("np.int32", "bool", "np.float64", "np.complex64", "np.float16")) -> tuple[str, ...]:
    """Returns wrong values for an array of floats: no array, another shape, another dtype."""
    others = {shape[:-1], (*shape, 1), (shape[0] + 1, *shape[1:]), (*shape[:-1], 0)} - {()}
    return (
        *NO_ARRAY, *(f"floats(*{other})" for other in sorted(others)),
        *(f"floats(*{shape}, dtype={dtype})" for dtype in dtypes),
    )  # fmt: skip


def integers(*shape: int, high: int | None = None, low: int | None = 0) -> tuple[str, ...]:
    """Returns wrong values for integers from `low` to `high`; None: any of int32."""
    high, low = (2**31 - 1 if high is None else high), (-(2**31) if low is None else low)
    others = [(*shape, 1, 1), (3, *shape[1:], 2)]
    wrong = [f"np.full({other}, 1)" for other in others]
    wrong += [f"np.full({shape}, {x})" for x in (0.5, True, 1j, low - 1, high + 1, 2**40, "np.nan", "'1'")]
    return "'text'", "{}", "object()", "[[1], [1, 2]]", *wrong


QUERY, KEYS = array(B, T, N, H), array(B, S, K, H)
PROMPT = array(B, S, N, H)
LENGTHS = integers(B, high=S)
HEAD_SCALE = tuple(x for x in array(K) if x != "{}")
OPTIONS = {
    "is_causal": FLAG, "local_window_size": WINDOW, "logits_soft_cap": CAP, "scale": SCALE,
    "sinks": array(N, dtypes=("bool", "complex")), "key_scale": HEAD_SCALE, "value_scale": HEAD_SCALE,
    "implementation": (*CHOICE, "'cudnn'", "'flash_attn'"), "key_value_seq_lengths": LENGTHS,
    "query_positions": integers(B, T, low=None), "reads_keys_early": FLAG,
}  # fmt: skip
SHARDED = {"axis_name": (*AXES, "None"), "mesh": (*MESH, "None"), "block_size": BLOCK, "return_lse": FLAG}
REDUCED = SHARDED | {"reduction": (*CHOICE, "'hierarchical'", "('gather', 'gather')")}
ON_ONE = {name: wrong for name, wrong in SHARDED.items() if name not in ("axis_name", "mesh")}
ATTENTION = {"query": QUERY, "key": KEYS, "value": KEYS}


def without(options: dict, *names: str) -> dict:
    """Returns options less some."""
    return {name: wrong for name, wrong in options.items() if name not in names}


RAGGED = without(OPTIONS, "key_value_seq_lengths", "query_positions", "reads_keys_early")
NO_POSITIONS = without(OPTIONS, "query_positions", "reads_keys_early")
OF_RING = without(OPTIONS, "reads_keys_early")
OF_PREFIXES = without(NO_POSITIONS, "local_window_size")
OF_ENERGY = without(OPTIONS, "logits_soft_cap", "key_scale", "value_scale", "implementation", "reads_keys_early")
LEVELS = ("None", "3", "'text'", "level()", "{}", "[{}]", "[None]", "[level(sequences=((0.5, 1),))]",
          "[level(sequences=((True,),))]", "[level(sequences=((0, 0),))]", "[level(sequences=((2,),))]",
          "[level(sequences=(0, 1))]", "[level(sequences=None)]", "[level(key=floats(1, 16, 2, 9))]",
          "[level(value=floats(1, 15, 2, 8))]", "[level(lengths=[2.5])]", "[level(lengths=np.array([17]))]",
          "[level(block_size=0)]", "[level(key_scale=floats(3))]", "[level(), level(value=None)]")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Call:
    """A good call, as the expression of a function and of its arguments, and the wrong values of each argument."""

    function: str
    arguments: dict[str, str]
    wrong: dict[str, tuple[str, ...]]
    contradictions: tuple[tuple[tuple[str, str], ...], ...] = ()


_DENSE = {"query": "floats(2, 1, 4, 8)", "key": "floats(2, 16, 2, 8)", "value": "floats(2, 16, 2, 8)"}
_SHARDED = _DENSE | {"axis_name": "'seq'", "mesh": "mesh()", "block_size": "None"}
_PROMPT = _SHARDED | {"query": "floats(2, 16, 4, 8)"}
_NO_LEVELS = {"levels": "[level()]"}
_CONTEXT = {"prefix_key": "floats(16, 2, 8)", "prefix_value": "floats(16, 2, 8)"}
_PAGES = {"query": "floats(2, 1, 4, 8)", "key_pages": "floats(4, 8, 2, 8)", "value_pages": "floats(4, 8, 2, 8)",
          "page_table": "np.array([[0, 1], [2, 3]])", "key_value_seq_lengths": "np.array([16, 3])"}  # fmt: skip
_CACHE = {"batch": "2", "capacity": "16", "num_kv_heads": "2", "head_dim": "8", "dtype": "np.float32",
          "mesh": "mesh()", "axis_name": "'seq'"}  # fmt: skip
_REQUEST = {"generator": "generator()", "prompts": "[[1, 2]]", "max_new_tokens": "2"}
_NEW = array(B, 1, K, H, dtypes=("np.int32", "bool", "np.float64", "np.complex64"))

CALLS = {
    "attend": Call("tree_attn.attend", _DENSE, ATTENTION | OPTIONS | {
        "shard": ("1", "'text'", "Shard(index=5, num_shards=2)", "Shard(num_shards=0)", "Shard(block_size=0)",
                  "Shard(index=0.5)", "Shard(index=None)", "Shard(num_shards=2.0)", "{}")}),
    "tree_decode": Call("tree_attn.tree_decode", _SHARDED, ATTENTION | OPTIONS | REDUCED | {"shard_heads": FLAG}, (
        (("shard_heads", "True"), ("reduction", "'gather'")),
        (("axis_name", "('seq', 'other')"),),
        (("reduction", "('gather', 'nonsense')"),))),
    "ring_decode": Call("ring_decode", _SHARDED, ATTENTION | OF_RING | SHARDED | {"variant": CHOICE}),
    "ring_attention": Call(
        "ring_attention", _PROMPT, ATTENTION | {"query": PROMPT} | NO_POSITIONS | SHARDED, (
            (("query", "floats(2, 8, 4, 8)"),),)),
    "energy": Call("tree_attn.energy", _SHARDED | {"source": "floats(2, 1, 4, 8)"},
                   ATTENTION | {"source": QUERY} | OF_ENERGY | without(SHARDED, "return_lse", "axis_name")
                   | {"axis_name": AXES}, ((("scale", "0"),),)),
    "attention_moments": Call("tree_attn.attention_moments", _SHARDED | {"order": "1"},
                              ATTENTION | {"order": (*COUNT, "5")} | OF_ENERGY),
    "lean_decode": Call(
        "tree_attn.lean_decode", {"query": "floats(2, 1, 4, 8)", "key": "floats(16, 2, 8)", "value": "floats(16, 2, 8)",
                                  "cu_seqlens": "np.array([0, 3, 16])"},
        {"query": QUERY, "key": array(16, 2, 8), "value": array(16, 2, 8), "return_lse": FLAG,
         "cu_seqlens": (*integers(3, high=16), "np.array([0, 9, 3])")} | RAGGED),
    "paged_decode": Call(
        "tree_attn.paged_decode", _PAGES, {
            "query": QUERY, "key_pages": array(4, 8, 2, 8), "value_pages": array(4, 8, 2, 8), "return_lse": FLAG,
            "page_table": (*integers(2, 2, high=3), "np.array([0, 1])"), "key_value_seq_lengths": (*LENGTHS, "None"),
        } | RAGGED),
    "hydragen_decode": Call(
        "tree_attn.hydragen_decode", _SHARDED | _NO_LEVELS,
        ATTENTION | {"levels": LEVELS, "shard_suffix": CHOICE, "axis_name": AXES} | OF_PREFIXES
        | without(REDUCED, "axis_name"), (
            (("axis_name", "None"), ("mesh", "None"), ("reduction", "'gather'")),
            (("axis_name", "None"), ("mesh", "None"), ("shard_suffix", "'batch'")),)),
    "bifurcated_decode": Call(
        "tree_attn.bifurcated_decode", _SHARDED | _CONTEXT | {"prefix_block_size": "None"},
        ATTENTION | {"prefix_block_size": BLOCK,
                     "prefix_key": array(16, 2, 8), "prefix_value": array(16, 2, 8), "shard_suffix": CHOICE,
                     "prefix_length": ("-1", "17", "3.7", "True", "'3'", "[3]", "{}", "2**40", "np.array([[3]])")}
        | OF_PREFIXES | without(REDUCED, "axis_name"), (
            (("prefix_length", "3"), ("prefix_block_size", "tree_attn.placement.UNNAMED")),)),
    "sparq_decode": Call(
        "tree_attn.sparq_decode", _SHARDED | {"num_components": "4", "num_keys": "4"},
        ATTENTION | REDUCED | {"axis_name": AXES} | {
            "num_components": (*COUNT, "9"), "num_keys": COUNT, "local_window": (*SIZE, "None", "5"),
            "value_mean": array(B, K, H, dtypes=("complex",)), "key_by_component": array(B, K, H, S),
            "selection": CHOICE, "score_temperature": CHOICE, "reallocate": ("'yes'", "3", "[]", "np.ones(2)"),
            "key_value_seq_lengths": LENGTHS, "is_causal": FLAG, "scale": SCALE,
            "implementation": (*CHOICE, "'cudnn'")}),
    "SparqOptions": Call("SparqOptions", {"num_components": "4", "num_keys": "4"}, {
        "num_components": COUNT, "num_keys": COUNT, "local_window": (*SIZE, "None", "5"), "selection": CHOICE,
        "score_temperature": CHOICE, "reallocate": ("'yes'", "3", "[]")}),
    "empty_like": Call("tree_attn.empty_like", {"state": "state()"}, {"state": STATE}),
    "merge_state": Call("tree_attn.merge_state", {"a": "state()", "b": "state()"}, {
        "a": STATE, "b": (*STATE, "state(3)", "SoftmaxState(floats(2, 8, dtype=np.float16), floats(2))")}),
    "merge_states": Call("tree_attn.merge_states", {"stacked": "state(3, 2)", "axis": "0"}, {
        "stacked": STATE, "axis": ("2", "-3", "0.5", "'0'", "None", "(0,)", "True", "np.ones(2)")}),
    "merge_segments": Call(
        "tree_attn.merge_segments", {"states": "state(3)", "segment_ids": "np.array([0, 1, 1])", "num_segments": "2"}, {
            "states": STATE, "num_segments": (*SIZE, "None"),
            "segment_ids": ("'text'", "None", "np.zeros(3)", "np.zeros(2, int)", "[True, False, True]", "{}", "3")}),
    "storage_order": Call("tree_attn.storage_order", {"num_tokens": "16", "num_shards": "2", "block_size": "2"}, {
        "num_tokens": (*SIZE, "None", "15"), "num_shards": COUNT, "block_size": BLOCK}),
    "PromptLayout": Call("PromptLayout", {"num_tokens": "16", "num_shards": "2", "block_size": "2"}, {
        "num_tokens": COUNT, "num_shards": COUNT, "block_size": BLOCK}),
    "make_mesh": Call("make_mesh", {"axis_shapes": "{'seq': 2}"}, {
        "axis_shapes": ("[8]", "8", "None", "'seq'", "{}", "{'seq': 0}", "{'seq': 2.0}", "{'seq': '2'}", "{'seq': 9}",
                        "{3: 2}", "('a', 'b', 'c')", "('a', 'a')", "()", "(3,)", "{'seq': True}")}),
    "KVCache.create": Call("KVCache.create", _CACHE, {
        **{name: COUNT for name in ("batch", "capacity", "num_kv_heads", "head_dim")},
        "dtype": ("'wide'", "np.int32", "bool", "3", "np.float64", "{}", "object()"), "axis_name": (*AXES, "None"),
        "mesh": (*MESH, "None"), "block_size": (*BLOCK, "None"), "num_layers": OPTIONAL_COUNT,
        "batch_axis_name": ("'nowhere'", "'seq'", "3", "{}", "()"), "stacks_layers": FLAG, "keeps_value_sum": FLAG,
        "window": (*OPTIONAL_COUNT, "7"),
        "keeps_key_by_component": FLAG, "key_scale": ("floats(2)", "floats(3)", "'text'"),
        "value_scale": ("floats(2)", "3.5")}, (
            (("dtype", "np.int8"), ("key_scale", "floats(2)")),
            (("dtype", "np.int8"), ("key_scale", "-floats(2)"), ("value_scale", "floats(2)")))),
    "KVCache.append": Call("cache().append", {"key": "floats(2, 1, 2, 8)", "value": "floats(2, 1, 2, 8)"}, {
        "key": (*_NEW, "floats(2, 17, 2, 8)"), "value": _NEW}),
    "KVCache.write": Call("cache().write", {"key": "floats(2, 1, 2, 8)", "value": "floats(2, 1, 2, 8)"}, {
        "key": _NEW, "value": _NEW, "layer": ("0", "'0'", "2.5")}),
    "KVCache.write_prefix": Call(
        "cache().write_prefix", {"key": "floats(2, 4, 2, 8)", "value": "floats(2, 4, 2, 8)"}, {
            "key": (*array(B, 4, K, H, dtypes=("np.int32", "bool")), "floats(2, 5, 2, 8)", "floats(2, 32, 2, 8)"),
            "value": array(B, 4, K, H, dtypes=("np.int32", "bool")), "layer": ("0", "'0'"),
            "start": ("-4", "1", "4.0", "'4'", "True", "np.ones(2, int)", "16", "2**40", "{}", "None"),
            "lengths": (*LENGTHS, "[99, -4]", "[1.5, 2.0]", "[1]", "[True, False]")}),
    "KVCache.write_prefix of a window": Call(
        "cache(window=8).write_prefix",
        {"key": "floats(2, 16, 2, 8)", "value": "floats(2, 16, 2, 8)", "lengths": "[3, 16]"},
        {"start": ("8", "0.0"), "lengths": (*LENGTHS, "None", "[99, -4]", "[1.5, 2.0]", "[1]", "[True, False]")}),
    "KVCache.attend to a window": Call("cache(window=8).attend", {"query": "floats(2, 1, 4, 8)"}, {
        "query": QUERY, "num_new": ("-1", "2.5", "'1'", "None", "True", "2"), "attention": ("None", "'tree'", "3"),
        "local_window_size": (*WINDOW, "6"), "is_causal": FLAG, "query_positions": ("np.array([3])", "'3'")}),
    "KVCache.with_sequence": Call(
        "cache().with_sequence", {"sequence": "0", "other": "cache(batch=1)"}, {
            "sequence": ("2", "-1", "0.5", "'0'", "True", "None", "[0]", "2**40"),
            "other": ("None", "'text'", "cache()", "cache(batch=1, capacity=32)", "cache(batch=1, dtype=np.float16)",
                      "{}", "cache(batch=1, head_dim=4)", "cache(batch=1, num_layers=2)")}),
    "KVCache.advance": Call("cache().advance", {"num_tokens": "1"}, {
        "num_tokens": ("-3", "2.5", "'1'", "None", "True", "[1]", "{}")}),
    "KVCache.with_lengths": Call("cache().with_lengths", {"lengths": "[1, 2]"}, {
        "lengths": (*LENGTHS, "None", "[99, -4]", "[1.5, 2.0]", "[1]", "[True, False]")}),
    "KVCache.attend": Call("cache().attend", {"query": "floats(2, 1, 4, 8)"}, {
        "query": QUERY, "layer": ("0", "'0'"), "num_new": ("-1", "2.5", "'1'", "None", "True"),
        "attention": ("None", "'tree'", "3"), "is_causal": FLAG, "scale": SCALE, "reduction": CHOICE}, (
            (("key_value_seq_lengths", "np.array([1, 1])"),), (("block_size", "2"),), (("mesh", "mesh()"),))),
    "KVCache.attend to a layer": Call(
        "cache(num_layers=2, keeps_value_sum=True).attend",
        {"query": "floats(2, 1, 4, 8)", "layer": "0", "num_new": "1", "attention": "tree_attn.tree_decode"}, {
            "query": QUERY, "layer": ("None", "2", "-1", "'0'", "2.5", "True"),
            "num_new": ("-1", "2.5", "'1'", "None", "True"),
            "is_causal": FLAG, "scale": SCALE, "reduction": CHOICE}),
    "Sampling": Call("Sampling", {}, {
        "temperature": (*NUMBER, "-1", "1e-40", "1e39", "None"), "top_k": OPTIONAL_COUNT,
        "top_p": (*NUMBER, "0", "1.5", "-0.1"), "seed": (*SIZE, "None", "2**32")}),
    "Generator": Call("llama.Generator", {"model": "model()", "attention": "generator().attention"}, {
        "model": NOT_ANYTHING, "attention": (*NOT_ANYTHING, "'single'"), "sampling": (*NOT_ANYTHING, "0.7"),
        "tokens_per_dispatch": OPTIONAL_COUNT, "cache_dtype": ("'wide'", "np.int32", "{}", "3", "object()"),
        "cache_scales": ("{'key_scale': 1}",), "prefill_chunk": OPTIONAL_COUNT}),
    "by_name": Call("llama.by_name", {"name": "'tree'", "sharding": "model().sharding"}, {
        "name": (*CHOICE, "None"), "sharding": ("None", *NOT_ANYTHING), "reduction": CHOICE, "implementation": CHOICE,
        "sparq": ("{}", "'text'", "3", "SparqOptions(num_components=4, num_keys=4)")}, (
            (("name", "'ring'"), ("reduction", "'gather'")), (("name", "'sparq'"), ("sparq", "None")))),
    "generate": Call("llama.generate", _REQUEST, {
        "generator": NOT_ANYTHING, "prompts": TOKENS, "max_new_tokens": (*COUNT, "31", "10**6"), "num_samples": COUNT,
        "stop_ids": ("3", "None", "'end'", "[1.5]", "[True]", "['end']"), "on_token": ("3", "'text'", "[]"),
        "done": ("3", "'text'", "[[1.5]]", "[['1']]", "[]", "[[1], [1]]", "[[1, 1]]", "[[64]]", "[[True]]", "{}"),
        "share_prefixes": ("'yes'", "3", "[]"), "max_batch": OPTIONAL_COUNT}),
    "Generator.stream": Call("generator().stream", {"prompts": "[[1, 2]]", "max_new_tokens": "2"}, {
        "prompts": TOKENS, "max_new_tokens": (*COUNT, "31"), "first_step": (*SIZE, "None"),
        "share_prefixes": ("'yes'", "3", "[]")}),
    "stream_queue": Call("llama.stream_queue", _REQUEST | {"max_batch": "1"}, {
        "prompts": TOKENS, "max_new_tokens": COUNT, "max_batch": COUNT, "stop_ids": ("3", "'end'", "[1.5]"),
        "first_step": (*SIZE, "None")}),
    "rank_samples": Call("llama.rank_samples", {"samples": "[]"}, {"top": OPTIONAL_COUNT}),
}  # fmt: skip


ALIASES = {("by_name", "name"): "attention"}  # what commands call it


def draw(rng: np.random.Generator) -> Case:
    """Returns a call with one wrong argument, or with some that contradict each other."""
    name = str(rng.choice(list(CALLS)))
    call = CALLS[name]
    if call.contradictions and rng.random() < 0.15:
        return Case(function=name, changes=call.contradictions[rng.integers(len(call.contradictions))])
    argument = str(rng.choice(list(call.wrong)))
    return Case(function=name, changes=((argument, str(rng.choice(call.wrong[argument]))),))


def cases() -> Iterator[Case]:
    """Yields every case that `draw` can make."""
    for name, call in CALLS.items():
        yield from (Case(function=name, changes=changes) for changes in call.contradictions)
        for argument, values in call.wrong.items():
            yield from (Case(function=name, changes=((argument, value),)) for value in values)


def arguments_of(case: Case) -> dict[str, Any]:
    """Returns the arguments of the call; those that every call shares are made by the way."""
    call = CALLS[case.function]
    return {name: eval(source) for name, source in (call.arguments | dict(case.changes)).items()}


def check(case: Case) -> str | None:
    """Returns what is wrong with the call's error, or None if it is as documented."""
    arguments, function = arguments_of(case), eval(CALLS[case.function].function)
    with _without_annotations(), _compilations() as compiled:
        try:
            function(**arguments)
        except DOCUMENTED as error:
            text = str(error)
            if compiled and not isinstance(error, NotImplementedError):  # a backend knows its part of the arrays only
                return f"compiled: {len(compiled)} programs before the error {text!r}"
            if not any(name in text for name in _names(case)) and not isinstance(error, CacheFullError):
                return f"unnamed: {type(error).__name__}: {text}"
            return None
        except Exception as error:
            return f"undocumented: {type(error).__name__}: {error}"
    return "accepted: no error"


def _names(case: Case) -> set[str]:
    """Returns the arguments that the error may name: those changed, or any where two shapes do not fit each other."""
    changed = {ALIASES.get((case.function, name), name) for name, _ in case.changes}
    is_shape = any(source.startswith("floats(*(") and "dtype" not in source for _, source in case.changes)
    return changed | set(CALLS[case.function].arguments if is_shape else ())


@contextlib.contextmanager
def _without_annotations():
    """Leaves the checks to the functions, where tests check annotations in every call."""
    was_disabled = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", was_disabled)


@contextlib.contextmanager
def _compilations() -> Iterator[list[str]]:
    """Gives a list that grows by one with every program that XLA compiles meanwhile."""
    events: list[str] = []
    _LISTENING.append(events)
    try:
        yield events
    finally:
        _LISTENING.remove(events)


_LISTENING: list[list[str]] = []


def _count(name: str, _seconds: float, **_) -> None:
    if name.endswith("backend_compile_duration"):
        for events in _LISTENING:
            events.append(name)


jax.monitoring.register_event_duration_secs_listener(_count)
