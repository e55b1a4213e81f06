"""The programs of a generation: their size, scopes, memory, products and options, and when they are called."""

import dataclasses
import gc
import math
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tree_attn.cache import KVCache
from tree_attn.measure.memory import bytes_per_device
from tree_attn.models.llama import (
    Generator,
    Llama,
    LlamaSharding,
    by_name,
    parameters,
)
from tree_attn.models.llama.generation import memory
from tree_attn.models.llama.generation import programs as programs_module
from tree_attn.models.llama.storage import empty_cache
from tree_attn.sparq import SparqOptions


@pytest.mark.slow
def test_the_program_does_not_grow_with_the_depth(tiny_config, sharding_over):
    def num_lines(num_layers: int) -> int:
        config = dataclasses.replace(tiny_config, num_layers=num_layers)
        sharding = sharding_over(config, 1)
        model = Llama(config, sharding, parameters.random(sharding, jnp.float32))
        generator = Generator(model, by_name("single", sharding))
        return generator.compile([[1, 2]], 2).decode.as_text().count("\n")

    # XLA writes loops of different lengths a little differently; a layer of its own would be some hundred lines.
    assert num_lines(9) < 1.05 * num_lines(2)


@pytest.mark.slow
def test_a_profile_reads_like_the_source(tiny_model):
    model = tiny_model(8)
    text = Generator(model, by_name("tree", model.sharding)).compile([[1, 2]], 2).decode.as_text()
    for scope in ("/embed/", "/layers/", "/attention/rope/", "/attention/attend/", "/mlp/", "/head/", "/choose/"):
        assert scope in text


def test_programs_are_compiled_at_once_but_in_several_processes_in_order(monkeypatch):
    both = threading.Barrier(2, timeout=60)  # who comes alone would wait for ever
    assert sorted(programs_module._at_once([both.wait, both.wait])) == [0, 1]
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    order = []
    calls = [lambda name=name: order.append((name, threading.current_thread())) or name for name in "ab"]
    assert programs_module._at_once(calls) == ["a", "b"]
    assert order == [("a", threading.current_thread()), ("b", threading.current_thread())]


def test_the_decode_step_updates_its_cache_in_place(tiny_model, tiny_config):
    model = tiny_model(8)
    generator = Generator(model, by_name("tree", model.sharding))
    analysis = generator.compile([[1, 2, 3]], 61).decode.memory_analysis()
    keys_and_values = 2 * tiny_config.num_layers * 64 // 8 * tiny_config.num_kv_heads * tiny_config.head_dim * 4
    assert analysis.alias_size_in_bytes >= keys_and_values


@pytest.mark.slow
def test_what_is_predicted_to_be_held_is_what_is_alive(tiny_model):
    model, options = tiny_model(3), dict(share_prefixes=True)
    generator = Generator(model, by_name("tree", model.sharding))
    prompts = [[*range(3, 20), *rest] for rest in ([5], [9, 8, 7])]
    predicted, programs = memory.predict(generator, prompts, 7, **options), generator.compile(prompts, 7, **options)

    def alive() -> int:
        gc.collect()
        device = model.sharding.mesh.devices.flat[0]
        shards = [shard for array in jax.live_arrays() for shard in array.addressable_shards if shard.device == device]
        return sum({shard.data.unsafe_buffer_pointer(): shard.data.nbytes for shard in shards}.values())

    before = alive()
    stream = generator.stream(prompts, 7, **options)
    next(stream)
    logits = next(stream).logits
    results = bytes_per_device(logits) + 4 * len(prompts)  # log-probabilities, kept by the generation besides
    # Results of two steps: after the first token the next one runs, with a few integers of each sequence.
    assert 0 <= alive() - before - (predicted.cache + predicted.inputs + 2 * results) <= 16 * len(prompts)
    parameters_held = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert predicted.weights == sum(array.addressable_shards[0].data.nbytes for array in parameters_held)
    # XLA drops arguments that are not read: a few integers of each sequence, as the token before the first one.
    assert 0 <= predicted.arguments - programs.prefill.memory_analysis().argument_size_in_bytes <= 64
    needs = [getattr(programs, phase).memory_analysis() for phase in ("prefill", "decode")]
    temporaries = [need.temp_size_in_bytes for need in needs]
    assert (
        predicted.arguments + max(temporaries)
        < predicted.peak
        < predicted.arguments + max(temporaries) + 2 * results + 1024
    )


def test_xla_options_of_decoding_on_gpus_depend_on_the_batch_and_devices(tiny_model, monkeypatch):
    on_one, on_two = (Generator(tiny_model(n), by_name("tree", tiny_model(n).sharding)) for n in (1, 2))
    assert on_one.programs.xla_options(17) == {}
    monkeypatch.setattr(LlamaSharding, "is_on_gpus", True)
    always = {"xla_gpu_enable_dynamic_slice_fusion": False}
    by_cublas = {"xla_gpu_enable_triton_gemm": False}
    side_by_side = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    assert on_one.programs.xla_options(16) == always | side_by_side
    assert on_one.programs.xla_options(17) == on_one.programs.xla_options(128) == always | by_cublas | side_by_side
    assert on_one.programs.xla_options(129) == always | by_cublas
    assert on_two.programs.xla_options(1) == always  # kernels that exchange would wait for one another
    generator = lambda: Generator(tiny_model(1), by_name("tree", tiny_model(1).sharding), xla_options=side_by_side)
    assert generator().programs.xla_options(16) == always | side_by_side
    monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))
    assert on_one.programs.xla_options(16) == always  # kernels that count arrivals would share their counts
    with pytest.raises(ValueError, match=r"xla_options must have .* LHS, SERIALIZE .* got 'CONCURRENT'"):
        generator()
    monkeypatch.setattr(programs_module, "is_rocm", lambda device: True)
    generator()
    assert on_one.programs.xla_options(16) == {}


@pytest.mark.parametrize("count, num_loops", [(3, 0), (20, 1)])
def test_steps_of_few_launches_follow_one_another_in_one_turn_of_the_loop(tiny_model, monkeypatch, count, num_loops):
    model = tiny_model(1)

    def tokens_and_loops(unrolls: bool):
        monkeypatch.setattr(
            programs_module, "unrolls_steps", lambda _, cache, *__, **___: unrolls and len(cache.lengths) == 2
        )
        generator = Generator(model, by_name("single", model.sharding), tokens_per_dispatch=count)
        prompts = [[5, 3, 9], [7]]
        loops = re.findall(r" while\(.*op_name=\"(\S+)\"", generator.compile(prompts, 30).decode.as_text())
        # A loop over layers has their name.
        return [step.tokens.tolist() for step in generator.stream(prompts, 30)], sum("layers" not in x for x in loops)

    in_loop, unrolled = tokens_and_loops(False), tokens_and_loops(True)
    assert unrolled[0] == in_loop[0] and len(in_loop[0]) == 30
    assert (in_loop[1], unrolled[1]) == (1, num_loops)


@pytest.mark.parametrize(
    "name, windows, options, expected",
    [
        ("single", {}, {}, [False, True, True]),
        ("tree", {}, {}, [False, True, True]),
        ("tree", {"window": 8}, {}, [False, True, True]),
        ("ring", {}, {}, [False] * 3),
        ("single", {}, {"stacks_layers": True}, [False] * 3),  # a layer of stacked ones is a copy
        ("single", {"window": 8, "global_layers": (1,)}, {}, [False] * 3),  # the first layer of each kind has its own
        ("single", {"window": 8}, {"window": 8}, [False] * 3),  # slots are in no order
    ],
)
def test_layers_after_one_that_is_alike_read_old_keys_early(
    tiny_config, tiny_model, monkeypatch, name, windows, options, expected
):
    config, sharding = dataclasses.replace(tiny_config, num_layers=3, **windows), tiny_model(1).sharding
    found, attend = [], KVCache.attend
    monkeypatch.setattr(
        KVCache,
        "attend",
        lambda cache, query, **options: (
            found.append(options.get("reads_keys_early", False)) or attend(cache, query, **options)
        ),
    )

    def step(tokens):
        model = Llama(config, sharding, parameters.random(sharding, jnp.float32), unroll_layers=True)
        sizes = dict(batch=1, capacity=16, dtype=jnp.float32, stacks_layers=False)
        cache = empty_cache(config, sharding, **sizes | options)
        return model.decode(tokens, cache, by_name(name, sharding))[0]

    jax.eval_shape(step, jnp.zeros((1, 1), jnp.int32))
    assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("dtype, batch", [(jnp.float32, 1), (jnp.bfloat16, 3)])
def test_a_step_multiplies_once_by_the_kernels_of_one_operand_as_they_lie(tiny_config, tiny_model, dtype, batch):
    config = dataclasses.replace(tiny_config, intermediate_size=56, vocab_size=80)
    sharding = tiny_model(1).sharding
    model = Llama(config, sharding, parameters.random(sharding, dtype))
    generator = Generator(model, by_name("single", sharding))

    def shapes(program, *kinds) -> list[tuple[int, ...]]:
        found = re.findall(rf"= \w+\[([\d,]+)\]\S* (?:{'|'.join(kinds)})\(", program.as_text())
        return [tuple(map(int, dims.split(","))) for dims in found]

    long, short = (generator.compile([[1] * count] * batch, 3) for count in (60, 3))
    for program in (long.prefill, short.decode):
        widths = sorted(shape[1] for shape in shapes(program, "dot") if len(shape) == 2)  # attention's have more
        assert widths == sorted([(4 + 2 + 2) * 8, 32, 2 * 56, 32, 80]), "query, key and value; output; MLP; head"
    smallest = min(math.prod(kernel.shape[1:]) for kernel in jax.tree.leaves(nnx.state(model.layers.attention)))
    moved = shapes(short.decode, "copy", "transpose", "concatenate")
    assert moved and max(map(math.prod, moved)) < smallest


def test_the_first_token_is_read_before_more_is_launched_and_then_one_call_is_ahead(tiny_model, monkeypatch):
    generator = Generator(tiny_model(1), by_name("single", tiny_model(1).sharding))
    programs, launched = generator.compile([[1, 2, 3]], 4), []
    decode = lambda *args, **options: launched.append(1) or programs.decode(*args, **options)
    monkeypatch.setattr(generator.programs, "of_tree", lambda *args: programs._replace(decode=decode))
    stream = generator.stream([[1, 2, 3]], 4)
    assert [(next(stream) and len(launched)) for _ in range(4)] == [0, 2, 3, 3]


def test_what_the_host_reads_of_a_call_is_copied_before_it_is_waited_for(tiny_model, monkeypatch):
    class Watched:
        def __init__(self, array, call):
            self.array, self.call = array, call

        def copy_to_host_async(self):
            copied.append(self.call)

        def __array__(self, *_, **__):
            return np.asarray(self.array)

    def decode(*args, **options):
        calls.append(len(calls))
        slots, *results, logits, arrays = programs.decode(*args, **options)
        return slots, *(Watched(result, calls[-1]) for result in results), logits, arrays

    generator, calls, copied = Generator(tiny_model(1), by_name("single", tiny_model(1).sharding)), [], []
    programs = generator.compile([[1, 2, 3]], 6)
    monkeypatch.setattr(generator.programs, "of_tree", lambda *_: programs._replace(decode=decode))
    stream = generator.stream([[1, 2, 3]], 6)
    next(stream), next(stream)
    assert calls == [0, 1] and copied.count(1) == 2, "the second call's tokens and log-probabilities"


def test_a_call_makes_several_tokens_by_default_on_gpus_only(tiny_model, monkeypatch):
    model = tiny_model(1)
    make = lambda **options: Generator(model, by_name("single", model.sharding), **options).tokens_per_dispatch
    assert make() == 1
    monkeypatch.setattr(LlamaSharding, "is_on_gpus", True)
    assert make() == 8 and make(tokens_per_dispatch=1) == 1


def test_slots_come_in_the_multiples_of_kernels_where_that_pads_little(tiny_model):
    sharding = tiny_model(3).sharding
    tree, sparq = (
        by_name("tree", sharding),
        by_name("sparq", sharding, sparq=SparqOptions(num_components=4, num_keys=8)),
    )
    assert [tree.slot_multiple(3 * count) for count in (7, 8, 4096)] == [1, 8, 8]
    assert [sparq.slot_multiple(3 * count) for count in (7, 8, 4095, 4096)] == [1, 8, 8, 512]


def test_a_step_that_fails_does_not_take_the_one_before_with_it(tiny_model, monkeypatch):
    model = tiny_model(1)
    generator, calls = Generator(model, by_name("single", model.sharding)), []
    programs = generator.compile([[1, 2, 3]], 6)

    def decode(*args, **options):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return programs.decode(*args, **options)

    monkeypatch.setattr(generator.programs, "of_tree", lambda *_: programs._replace(decode=decode))
    tokens = []
    with pytest.raises(RuntimeError, match="out of memory"):
        for step in generator.stream([[1, 2, 3]], 6):
            tokens.append(step.tokens)
    assert len(tokens) == 2 and len(calls) == 2
