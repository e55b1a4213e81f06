"""Ways of a decode step in JAX: this library's, and cuDNN's. Each is timed as a chain of dependent steps in one jit."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from tree_attn import attend, bifurcated_decode, paged_decode
from tree_attn.measure.steps import cudnn_ways
from tree_attn.measure.steps.chains import chain_lengths, chained, time_chains
from tree_attn.measure.steps.step import Step

OURS, PICKED = "mosaic_gpu", "None"
# With a compute capability, for which `mosaic_gpu` is compiled; with a layout of the lean kernel. They are no peers.
ELSEWHERE, LAID_OUT = "as on ", "laid out "
_LOWERING = threading.Lock()  # the log does not say whose call it is of
# What a program may call that is not XLA's own: our kernels, and cuDNN's attention without and with a mask.
CUSTOM_CALLS = ("mosaic_gpu_v2", "__cudnn$fmhaSoftmax", "__cudnn$fmhaScaleBiasSoftmax")
FAILURES = (NotImplementedError, ImportError, RuntimeError, ValueError, TypeError, AssertionError)
MAX_XLA_US = 20
MAX_ERROR = 0.05  # of the largest value of the result; bfloat16 and float8 weights reach 0.02


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """One way of a step.

    Attributes:
      name: in rows.
      run: `run(query, *cache)` returns the output, in the query's shape.
      cache: makes the arrays of one copy from those of `draw_cache`.
    """

    name: str
    run: Callable
    cache: Callable[[dict], tuple] = lambda arrays: tuple(arrays.values())


def ways(step: Step) -> list[Way]:
    """Returns the ways of a step, the library's two first."""
    ours = {OURS: OURS, PICKED: None}
    if step.prefix:
        found = [Way(name=way, run=functools.partial(_prefix, name=name)) for way, name in ours.items()]
        return found + [
            Way(
                name=f"cudnn, prefix in {chunks}",
                run=functools.partial(cudnn_ways.with_prefix, step, chunks),
                cache=functools.partial(cudnn_ways.chunked, step, chunks),
            )
            for chunks in cudnn_ways.CHUNKS
        ]
    if step.page is not None:
        found = [Way(name=way, run=functools.partial(_paged, step, name=name)) for way, name in ours.items()]
        cudnn = functools.partial(cudnn_ways.paged, step)
        return [*found, Way(name="cudnn", run=cudnn, cache=functools.partial(cudnn_ways.padded_pages, step))]
    small = ("xla",) if step.bytes_us <= MAX_XLA_US else ()  # it is slow where there is much to read
    found = [named(step, implementation) for implementation in (OURS, None, "cudnn", *small)]
    if step.num_queries > 1 or step.window is not None:
        return found  # jax.nn counts positions from the first key, as in a prompt
    return [*found, Way(name="cudnn, jax.nn", run=cudnn_ways.by_jax)]


def elsewhere(step: Step, capability: str) -> list[Way]:
    """Returns the way of `mosaic_gpu` as a GPU of another compute capability runs it; none with many queries."""
    from tree_attn.kernels import targets

    def run(*arrays, way):
        with targets.assumed(capability):
            return way.run(*arrays)

    found = [way for way in ways(step) if way.name == OURS and not step.prefix]
    return [Way(name=ELSEWHERE + capability, run=functools.partial(run, way=way), cache=way.cache) for way in found]


def laid_out(step: Step, layout: str) -> list[Way]:
    """Returns the way of `mosaic_gpu` with a layout of the lean kernel: "2x64x1", CTAs per SM x keys x stages."""
    from tree_attn.kernels import tuning
    from tree_attn.kernels.lean_layout import LeanConfig, max_smem_bytes
    from tree_attn.kernels.registers import RESERVED_SMEM_BYTES

    ctas_per_sm, block_kv, stages = map(int, layout.split("x"))
    chosen = tuning.lean_config

    def config(shape, is_static, leaves_whole=False):
        if shape.is_many_query:
            return chosen(shape, is_static, leaves_whole)
        ctas = ctas_per_sm * tuning.num_sms()
        num_ctas = tuning.even_ctas(shape, ctas, is_static, block_kv if leaves_whole else None)
        config = LeanConfig(block_kv=block_kv, num_stages=stages, num_ctas=num_ctas)
        if ctas_per_sm * (max_smem_bytes(shape, config) + RESERVED_SMEM_BYTES) > shape.target.smem_bytes_per_sm:
            raise ValueError(
                f"layouts must fit an SM, got {layout} for {shape.key_dtype} and head dim {shape.head_dim}"
            )
        return config

    def run(*arrays, way):
        with mock.patch.object(tuning, "lean_config", config):
            return way.run(*arrays)

    found = [way for way in ways(step) if way.name == OURS]
    return [Way(name=LAID_OUT + layout, run=functools.partial(run, way=way), cache=way.cache) for way in found]


def more_ways(step: Step, capability: str | None, layouts: Sequence[str]) -> list[Way]:
    """Returns `elsewhere` and `laid_out` of what is asked for."""
    found = elsewhere(step, capability) if capability else []
    return found + [way for layout in layouts for way in laid_out(step, layout)]


def way_of(step: Step, name: str) -> Way:
    """Returns the way of a name, among those of `ways` and `more_ways`."""
    capability = name.removeprefix(ELSEWHERE) if name.startswith(ELSEWHERE) else None
    layouts = [name.removeprefix(LAID_OUT)] if name.startswith(LAID_OUT) else []
    return next(way for way in ways(step) + more_ways(step, capability, layouts) if way.name == name)


def named(step: Step, implementation: str | None) -> Way:
    """Returns the way of `attend` by an implementation."""
    return Way(name=str(implementation), run=functools.partial(_dense, step, name=implementation))


def draw_cache(step: Step, draw: Callable) -> dict:
    """Returns the arrays of one copy: random keys and values, and lengths and pages where the call takes them."""
    heads = (step.num_kv_heads, step.head_dim)
    if step.page is not None:
        names, shape = ("key_pages", "value_pages"), (sum(step.pages), step.page, *heads)
    else:
        names, shape = ("key", "value"), (step.batch, step.slots, *heads)
    arrays = {}
    if step.prefix:
        arrays = {name: draw(step.prefix, *heads) for name in ("prefix_key", "prefix_value")}
    return arrays | {name: draw(*shape) for name in names}


def extras(step: Step) -> tuple:
    """Returns what all copies share: the page table and the lengths, on the device, where the call takes them."""
    found = ()
    if step.page is not None:
        table = np.zeros((step.batch, max(step.pages)), np.int32)
        pages = iter(np.random.default_rng(0).permutation(sum(step.pages)))  # as a server that has run for a while
        for b, count in enumerate(step.pages):
            table[b, :count] = list(itertools.islice(pages, count))
        found = (jnp.asarray(table),)
    return (*found, jnp.asarray(step.lengths, jnp.int32)) if step.gives_lengths else found


def inputs(step: Step) -> tuple:
    """Returns the query, the arrays of each copy, and what all copies share."""
    draw = _draw(step)
    query = jax.jit(lambda: jax.random.normal(jax.random.key(1), query_shape(step), "bfloat16"))()
    return query, [draw_cache(step, draw) for _ in range(step.copies)], extras(step)


def time_ways(
    step: Step, chosen: list[Way], options: dict | None = None, n_iters: int = 32, threads: int = 4
) -> Iterator[tuple[str, dict]]:
    """Yields for each way its name and the fields of its row; "error" says why a way has no times.

    Args:
      options: XLA options of the programs.
      n_iters: samples of each chain.
      threads: programs that are compiled at the same time.
    """
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        futures = {way: pool.submit(programs, step, way, options) for way in chosen}
    yield from time_programs(step, {way: future.result for way, future in futures.items()}, n_iters)


def time_programs(
    step: Step, compiled: dict, n_iters: int = 32, reference: Callable | None = None
) -> Iterator[tuple[str, dict]]:
    """Yields what `time_ways` does. A program is timed once: None often runs that of a named backend.

    Args:
      compiled: way -> a function that returns its `Programs`, or raises why there are none.
      reference: what results are compared with, `reference_program` if that is there already.
    """
    query, copies, shared = inputs(step)
    reference = reference or jax.jit(functools.partial(_reference, step))
    expected, timed = expected_output(step, reference, query, copies[0], shared), {}
    for way, programs_of in compiled.items():
        try:
            way_programs = programs_of()
            if way_programs.key in timed:
                name, fields = timed[way_programs.key]
                yield way.name, fields | {"same_program_as": name, "picked": way_programs.picked}
                continue
            caches = [way.cache(arrays) for arrays in copies]
            fields = _time(step, (way_programs.short, way_programs.long), (query, caches, shared), expected, n_iters)
            timed[way_programs.key] = way.name, fields
            yield way.name, fields | {"picked": way_programs.picked, "xla_options": way_programs.options}
        except FAILURES as error:
            yield way.name, {"error": f"{type(error).__name__}: {str(error)[:500]}"}


def query_shape(step: Step) -> tuple[int, ...]:
    """Returns `(B, T, N, H)`."""
    return step.batch, step.num_queries, step.num_heads, step.head_dim


def chains(step: Step) -> tuple[int, int]:
    """Returns the calls of the short and the long chain of a step."""
    return chain_lengths(step.copies, 32 if step.bytes_us < 100 else 16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
    """The short and the long chain of a way, compiled.

    Attributes:
      key: equal keys are of equal programs, compiled with equal options.
      picked: what `implementation=None` picked, from the log.
      options: of XLA.
    """

    short: Callable
    long: Callable
    key: str
    picked: str | None
    options: dict


def programs(step: Step, way: Way, options: dict | None = None, known: dict[str, Programs] | None = None) -> Programs:
    """Compiles a way's chains from shapes alone: no array of the step is made.

    Args:
      options: XLA options of the programs.
      known: programs by their keys; those with the key of one of these are not compiled again.
    """
    draw = lambda *shape: jax.ShapeDtypeStruct(shape, step.dtype)
    arrays = draw_cache(step, draw)
    cache = jax.eval_shape(lambda *values: way.cache(dict(zip(arrays, values))), *arrays.values())
    query = jax.ShapeDtypeStruct(query_shape(step), jnp.bfloat16)
    with _LOWERING, _picks() as picked, _fresh_traces(way.name.startswith(LAID_OUT)):
        run = _lowered_once(way.run, query, *cache, *extras(step))
        lowered = [
            jax.jit(chained(run, calls)).lower(query, [cache] * step.copies, extras(step)) for calls in chains(step)
        ]
    texts = [program.as_text() for program in lowered]
    key = hashlib.sha256("".join([*texts, repr(sorted((options or {}).items()))]).encode()).hexdigest()
    if known is None or key not in known:
        short, long = (program.compile(options or None) for program in lowered)
    else:
        short, long = known[key].short, known[key].long
    return Programs(short=short, long=long, key=key, picked=(picked or [None])[0], options=options or {})


def _lowered_once(run: Callable, *args) -> Callable:
    """Returns `run` as a function that programs take in already lowered: for our kernels that takes seconds."""
    allowed = [export.DisabledSafetyCheck.custom_call(name) for name in CUSTOM_CALLS]
    return jax.jit(export.export(jax.jit(run), disabled_checks=allowed)(*args).call)


def _time(step: Step, compiled: tuple, args: tuple, expected: tuple, n_iters: int) -> dict:
    """Checks the result of the first step, and times the chains."""
    _, first = compiled[0](*args)
    error = _max_error(first, *expected)
    assert error <= MAX_ERROR, f"the result is off by {error:.3g} of its largest value"
    return time_chains(compiled, args, chains(step), n_iters) | {"max_error": error}


@contextlib.contextmanager
def _fresh_traces(is_wanted: bool) -> Iterator[None]:
    """Has nothing in between be traced before or after, if that is wanted: a trace keeps the layout that it was of."""
    if is_wanted:
        jax.clear_caches()
    try:
        yield
    finally:
        if is_wanted:
            jax.clear_caches()


@contextlib.contextmanager
def _picks() -> Iterator[list[str]]:
    """Collects the backends that `implementation=None` picks meanwhile, from the log."""
    picked: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.msg.startswith("implementation=None picked"):
                picked.append(record.getMessage().removeprefix("implementation=None picked ").partition(":")[0])

    log, handler = logging.getLogger("tree_attn"), Handler(logging.INFO)
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield picked
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def _draw(step: Step) -> Callable:
    """Returns `draw(*shape)`: normal numbers in the dtype of keys and values."""
    make = jax.jit(lambda key, shape: jax.random.normal(key, shape, "bfloat16").astype(step.dtype), static_argnums=1)
    numbers = itertools.count()
    return lambda *shape: make(jax.random.fold_in(jax.random.key(0), next(numbers)), shape)


def reference_program(step: Step) -> Callable:
    """Compiles the reference of a step's shortest sequence from shapes alone."""
    keys = jax.ShapeDtypeStruct((1, step.prefix + min(step.lengths), step.num_kv_heads, step.head_dim), step.dtype)
    query = jax.ShapeDtypeStruct((1, *query_shape(step)[1:]), jnp.bfloat16)
    lowered = jax.jit(functools.partial(_reference, step)).lower(query, keys, keys)
    return lowered.compile({"xla_gpu_autotune_level": 0})  # it is not timed


def _reference(step: Step, query, key, value):
    return attend(query, key, value, implementation="xla", **_options(step)).out.astype(jnp.float32)


def expected_output(step: Step, reference: Callable, query, arrays: dict, shared: tuple) -> tuple:
    """Returns the index of the shortest sequence, and its output by XLA, in float32."""
    b = int(np.argmin(step.lengths))
    length = step.lengths[b]
    if step.page is not None:
        pages = shared[0][b, : step.pages[b]]
        parts = [arrays[name][pages].reshape(1, -1, *arrays[name].shape[2:]) for name in ("key_pages", "value_pages")]
    else:
        parts = [arrays[name][b : b + 1] for name in ("key", "value")]
    parts = [x[:, :length] for x in parts]
    if step.prefix:
        prefixes = (arrays[name][None] for name in ("prefix_key", "prefix_value"))
        parts = [jnp.concatenate(pair, axis=1) for pair in zip(prefixes, parts)]
    return b, reference(query[b : b + 1], *parts)[0]


def _max_error(out, b: int, expected) -> float:
    """Returns the largest error of a sequence's output, over the largest value that is expected."""
    return float(jnp.abs(out[b].astype(jnp.float32) - expected).max() / jnp.abs(expected).max())


def _options(step: Step) -> dict:
    options = {"is_causal": True} if step.num_queries > 1 else {}
    return options if step.window is None else options | {"local_window_size": (step.window - 1, None)}


def _dense(step: Step, query, key, value, lengths=None, *, name: str | None):
    return attend(query, key, value, key_value_seq_lengths=lengths, implementation=name, **_options(step)).out


def _paged(step: Step, query, key_pages, value_pages, table, lengths, *, name: str | None):
    return paged_decode(query, key_pages, value_pages, table, lengths, implementation=name, **_options(step))


def _prefix(query, prefix_key, prefix_value, key, value, lengths=None, *, name: str | None, prefix_length=None):
    return bifurcated_decode(
        query, prefix_key, prefix_value, key, value, prefix_length=prefix_length, key_value_seq_lengths=lengths,
        implementation=name,
    )  # fmt: skip
