"""Mosaic GPU's interpreter, for tests: it runs kernels on the CPU and finds races between their threads."""

import contextlib
import types

import jax
import numpy as np
import pytest
from assertions import assert_attention
from jax.experimental.pallas import mosaic_gpu as plgpu
from lean_cases import Call

from tree_attn.kernels import lean, lean_call, tuning
from tree_attn.kernels.interpreter import interpreted_kernels
from tree_attn.kernels.lean_layout import LeanConfig

needs_interpreter = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="runs with JAX 0.11 or newer, whose interpreter knows transposed operands"
)


def set_layout(monkeypatch, *, merge_kv_tiles: int = -1000, **layout):
    """Sets the layout, and how many KV tiles a merge is worth: by default so few that runs cut."""
    monkeypatch.setattr(lean_call, "MERGE_KV_TILES", merge_kv_tiles)
    config = LeanConfig(**{"num_ctas": 5, "block_kv": 64, "num_stages": 2} | layout)
    monkeypatch.setattr(tuning, "lean_config", lambda shape, **_: config)
    monkeypatch.setattr(lean, "num_sms", lambda: config.num_ctas)  # as where a GPU is full


@contextlib.contextmanager
def arguments_by_numpy():
    """Has callbacks take arrays of NumPy, of which a kernel's run has thousands.

    JAX places each argument on a device before, which takes half of the interpreter's time.
    """
    from jax._src import callback

    with pytest.MonkeyPatch.context() as patch:
        if jax.__version_info__ >= (0, 12):
            from jax._src.pallas.mosaic_gpu.interpret import shared_memory

            to_int = shared_memory._to_int
            patch.setattr(shared_memory, "_to_int", lambda x: x.item() if isinstance(x, np.ndarray) else to_int(x))
            copied = types.SimpleNamespace(device_put=lambda arrays, _: tuple(map(np.array, arrays)))
            patch.setattr(callback, "api", copied)
        yield


@contextlib.contextmanager
def interpreter():
    """Yields the list of each interpreted kernel's races; JAX itself keeps the last kernel's only."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, interpret_pallas_call

    detection = gpu_callbacks.GPURaceDetectionState
    found = []
    gpu_callbacks.GPURaceDetectionState = lambda *args, **kwargs: found.append(detection(*args, **kwargs)) or found[-1]
    try:
        with (
            arguments_by_numpy(),
            interpreted_kernels(),
            plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)),
        ):
            yield found
    finally:
        gpu_callbacks.GPURaceDetectionState = detection
        interpret_pallas_call.reset_gpu_interpret_mode_state()  # a kernel that raised would spoil the next


def has_race(call: Call, *, kernel: int = 0, or_is_unawaited: bool = False) -> bool:
    """Returns whether kernel number `kernel` races.

    With `or_is_unawaited`, an arrival that no thread waited for counts too. JAX 0.12 raises an error for a race. For
    such an arrival it raises one of three: which one depends on the order in which the threads run.
    """
    error = ""
    with interpreter() as found:
        try:
            jax.block_until_ready(jax.jit(call.run)(*call.inputs()))
        except jax.errors.JaxRuntimeError as raised:
            error = str(raised)
    unawaited = "no threads observed phase", "arrivals pending", "barrier is already at phase"
    is_unawaited = any(complaint in error for complaint in unawaited)
    is_found = any(races.races_found for races in found[kernel : kernel + 1])  # not there if the one before raised
    return is_found or "RACE DETECTED" in error or (or_is_unawaited and is_unawaited)


def interpreted(call: Call, num_kernels: int = 2):
    """Returns the result of `call`, in which no race may be found."""
    with interpreter() as found:
        state = jax.block_until_ready(jax.jit(call.run)(*call.inputs()))
    flags = [races.races_found for races in found]
    assert flags == [False] * num_kernels, flags
    return state


def check(call: Call, num_kernels: int = 2):
    """Asserts that `call` is exact, has no race, and takes so many kernels."""
    lengths = {"key_value_seq_lengths": np.array(call.valid)}
    assert_attention(interpreted(call, num_kernels), *call.arrays(), **lengths, **call.options)
