"""Every test sees eight CPU devices and JAX's strictest promotion rules (they hide shape and dtype bugs).

`TREE_ATTN_TEST_GPU=1 python3 -m pytest tests/local -k on_a_gpu` runs the tests that need a GPU, on one.
"""

import contextlib
import faulthandler
import functools
import gc
import os
import pathlib

# One thread for NumPy's and PyTorch's matrix products, before either starts its own: the workers share the cores, and
# two threads in each spend most of their time waiting for one another, in loops that keep a core busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import jax
import jaxtyping
import pytest

# The annotations of these modules are checked in every call of every test: dtypes, and shapes that belong together.
CHECKED = (
    "decode",
    "prefix_level",
    "shared_prefix",
    "ragged",
    "energy_function",
    "local",
    "state",
    "masking",
    "placement",
    "ring_baseline",
    "sparq",
    "cache",
    "cache_layer",
    "cache_writes",
    "models.llama.evaluation.baselines",
)
jaxtyping.install_import_hook([f"tree_attn.{name}" for name in CHECKED], "typechecker.checked")

from tree_attn import sharded  # noqa: E402  (after the hook)

_raises = pytest.raises


@contextlib.contextmanager
def raises(*expected, **options):
    """Acts as `pytest.raises` and checks no annotations, so that a wrong call reaches the function's own checks."""
    with _raises(*expected, **options) as raised:
        jaxtyping.config.update("jaxtyping_disable", True)
        try:
            yield raised
        finally:
            jaxtyping.config.update("jaxtyping_disable", False)


pytest.raises = raises

ON_CPU = not os.environ.get("TREE_ATTN_TEST_GPU")
if ON_CPU:
    # Also where there are GPUs: fewer than eight of them would not do.
    jax.config.update("jax_platforms", "cpu")
# LLVM's, which the CPU's code is made with: most of a test is the compilation of programs that run once. XLA's own
# passes stay as they are, and so does what the tests read in the compiled program.
jax.config.update("jax_disable_most_optimizations", ON_CPU)
# Its older generator of code takes 40 % less time, with one LLVM module per program. JAX 0.12 has only the newer one,
# and aborts at an option that it does not know. Commands that the tests start inherit both.
if ON_CPU and jax.__version_info__ < (0, 11):
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1")
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


# A worker takes a file at a time; with the longest first, none waits at the end for another that has just begun one.
LONGEST = ("test_llama_parity.py", "test_lean_compiled.py", "test_lean_kernel.py", "test_tpu_compiled.py")
LONGEST += ("test_few_rows_compiled.py", "test_fused.py", "test_sparq_kernel.py", "test_products.py")
LONGEST += ("test_generate.py", "test_demo.py", "test_compare.py", "test_modes.py", "test_watchdog.py")
LONGEST += ("test_examples.py", "test_xla.py", "test_shared_prefix.py", "test_ring_attention.py", "test_trials.py")
LONGEST += ("test_llama_sharding.py",)


def pytest_collection_modifyitems(items):
    """Files in the order of `LONGEST`, then the others in theirs."""
    rank = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(LONGEST)))


def pytest_collection_finish():
    """Keeps the modules of JAX and of the tests out of what the garbage collector looks through, and has it run less.

    Tracing makes so many objects that it would look through all of them again and again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


INTERPRETED_SECONDS = 120  # for a kernel in the interpreter, which takes four


@pytest.fixture
def time_limit():
    """Ends the process if a barrier hangs for good, in threads that no exception reaches."""
    faulthandler.dump_traceback_later(INTERPRETED_SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def _optimized():
    """For SmolLM2, which runs for longer than it takes to compile: three times as long without LLVM's optimizations.

    Those of a tiny model take twenty times as long as its run.
    """
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", ON_CPU)


optimized = pytest.fixture(_optimized)
optimized_module = pytest.fixture(_optimized, scope="module")  # for fixtures of a module


@pytest.fixture(autouse=True)
def no_nodes_recorded():
    """Commands that ran before in this process have recorded the node that they ran on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tree_attn.topology._nodes", ())
        yield


@pytest.fixture(autouse=True)
def flags_as_before():
    """Commands lift XLA's limit of joined transfers in their process, and predictions read it there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
        yield


@pytest.fixture(autouse=True)
def traced_anew(request):
    """Programs of other tests do not serve those that patch what is traced, or read what tracing logs."""
    if not {"monkeypatch", "caplog"}.isdisjoint(request.fixturenames):
        clear = sharded._run_over_shards.clear_cache
        clear()
        request.addfinalizer(clear)


@pytest.fixture(scope="session", autouse=True)
def gguf_read_once():
    """The index of SmolLM2's file takes seconds to read, in Python: once for all who open it, transformers among them.

    The tables of tensor names, which transformers makes anew for each of its modules, are made once too.
    """
    try:
        import gguf
    except ImportError:  # the tests that need it say so
        yield
        return
    read = functools.cache(lambda path, changed_ns, reader=gguf.GGUFReader: reader(path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", lambda path: read(str(path), pathlib.Path(path).stat().st_mtime_ns))
        patch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
        yield
