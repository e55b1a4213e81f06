"""A few hundred draws of the trials, with a fixed seed: each function and each mode is met.

`python3 -m tests.trials` runs more of them.
"""

import itertools

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from . import attention, caches, minimal

# Every function in the first mode, then each mode with as many functions as it takes to meet each function three times.
MODES = ("jit", "shard_map", "remat", "vmap", "shard_map_unchecked", "x64", "eager")
PROGRAMS = [(function, "jit", None) for function in attention.FUNCTIONS]
PROGRAMS += [
    (function, mode, "inside" if mode.startswith("shard_map") and i % 2 else None)
    for i, (mode, function) in enumerate(zip(itertools.cycle(MODES[1:]), 2 * attention.FUNCTIONS))
]
NUM_CACHES = 6

pytestmark = pytest.mark.slow


def assert_nothing_wrong(subject, case):
    fault = subject.check(case)
    if fault is not None:
        pytest.fail("{1}\n{0!r}".format(*minimal(subject, case, fault, seconds=60)))


@pytest.fixture
def compiled_once(request, tmp_path):
    """Keeps what a case compiles until it ends: each eager gradient asks for most of the last one's programs again."""
    if PROGRAMS[request.getfixturevalue("number")][1] != "eager":
        yield
        return
    cached = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in cached}
    configure(cached)
    yield
    configure(before)


def configure(options):
    for name, value in options.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # JAX reads them at the first compilation


@pytest.mark.usefixtures("compiled_once")
@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_attention(number):
    function, mode, gradient = PROGRAMS[number]
    rng = np.random.default_rng([21, number])
    num_fills = 2 if mode == "eager" else 8  # JAX 0.10 compiles an eager gradient at each call
    case = attention.draw(rng, function=function, mode=mode, gradient=gradient, num_fills=num_fills)
    assert_nothing_wrong(attention, case)


@pytest.mark.parametrize("number", range(NUM_CACHES))
def test_caches(number):
    assert_nothing_wrong(caches, caches.draw(np.random.default_rng([21, number])))


def test_a_reproducer_is_the_case():
    for subject in (attention, caches):
        case = subject.draw(np.random.default_rng(1))
        assert eval(repr(case), dict(vars(subject))) == case
