"""The programs of all cases of `tree-attn bench` are compiled before the first is timed."""

import gc
import threading
import time
import weakref

import jax
import pytest

from tree_attn import cli
from tree_attn.commands.bench import ahead, timing
from tree_attn.models.llama import LlamaConfig, presets

SIZES = dict(hidden_size=16, intermediate_size=32, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=64)


def test_programs_are_compiled_while_others_are_traced(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    traced, at_once = [], threading.Barrier(3, timeout=60)  # who comes alone would wait for ever
    lower = lambda generator, number: traced.append((generator, number)) or at_once.wait
    assert ahead.compile_all(["a", "b", "c"], lower) == [None, None, None]
    assert traced == [("a", 0), ("b", 1), ("c", 2)]


def test_several_processes_compile_in_order_and_trace_nothing_meanwhile(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    events = []

    def lower(generator, number):
        def compile_programs():
            time.sleep(0.2)  # in which another could be traced
            events.append(f"compile {generator}")

        events.append(f"trace {generator}")
        return compile_programs

    ahead.compile_all(["a", "b"], lower)
    assert events == ["trace a", "compile a", "trace b", "compile b"]


@pytest.mark.parametrize("phase", ["tracing", "compiling"])
def test_no_case_after_one_that_failed_is_traced_and_nothing_holds_what_failed(monkeypatch, phase):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    model = type("Model", (), {})()
    alive = weakref.ref(model)

    def fail():
        raise RuntimeError("no memory")

    def lower(generator, number):
        return (fail() if phase == "tracing" else fail) if number == 1 else lambda: generator

    gc.disable()
    try:
        errors = ahead.compile_all([model] * 3, lower)
        assert errors[0] is None and str(errors[1]) == "no memory" and len(errors) == 2
        del errors, model
        assert alive() is None
    finally:
        gc.enable()


def test_the_programs_of_a_case_are_dropped_with_it(monkeypatch, capsys):
    monkeypatch.setitem(presets.PRESETS, "tiny", LlamaConfig(num_layers=2, max_position=32, **SIZES))
    programs, alive, time_case = [], [], timing.time_case

    def watch(args, model, place, generator, prompts):
        found = time_case(args, model, place, generator, prompts)
        gc.collect()
        alive.append([one() is not None for one in programs])
        programs.append(weakref.ref(generator.compile(prompts, args.new_tokens).decode))
        return found

    monkeypatch.setattr(timing, "time_case", watch)
    few = ["--attention", "single", "--context", "8", "--new-tokens", "3", "--prefill-trials", "1", "--json"]
    assert cli.main(["bench", "llama", "--config", "tiny", "--devices", "1", "--samples", "1,2,3", *few]) == 0
    assert alive == [[], [False], [False, False]]
