"""Times FlashInfer's ways of a decode step: CUDA graphs of dependent steps over rotating copies of the cache.

`sweep_flashinfer.Worker` runs this file as a process, so that JAX and torch do not meet. Each line on stdin asks for
one way of one step. Each line of an answer begins with REPLY and is a JSON object.
"""

import contextlib
import ctypes
import functools
import json
import sys
from collections.abc import Callable

from sweep_flashinfer import DEFAULT_PAGE, REPLY

from tree_attn.measure.steps.step import Step

BATCH_ATTENTION_BYTES = 2 << 30
MAX_ERROR, MAX_FLOAT8_ERROR = 0.05, 0.2  # of the largest value; XQA rounds the weights and the query to float8


def main() -> None:
    """Answers requests until stdin ends."""
    ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)  # XQA's kernels of float8 are not linked with it
    data: Data | None = None
    for line in sys.stdin:
        request = json.loads(line)
        step = Step(**request["step"] | {"lengths": tuple(request["step"]["lengths"])})
        try:
            if data is None or data.step != step:
                data = None  # its memory goes before more is taken
                data = Data(step, copies=1 if request["only_build"] else step.copies)
            reply = _build(data, request["way"]) if request["only_build"] else _time(data, **request)
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
        print(REPLY + json.dumps(reply), flush=True)


class Data:
    """A step's tensors on the device: queries, pages of K and V for each copy, and FlashInfer's indices.

    Attributes:
      step: the step.
      caches: `[pages, 2, page, K, H]`; the prefix's pages come first, then those of each sequence.
      starts, pages: of the sequences, int32 `[B + 1]` and `[all their pages]`.
      last: keys in each sequence's last page.
    """

    def __init__(self, step: Step, copies: int):
        """Draws the tensors; pages lie in a random order."""
        import torch

        self.step, self.page = step, step.page or DEFAULT_PAGE
        self.int32 = functools.partial(torch.tensor, dtype=torch.int32, device="cuda")
        torch.cuda.empty_cache()
        counts = [-(-length // self.page) for length in step.lengths]
        self.counts = counts
        self.prefix_pages = -(-step.prefix // self.page)
        torch.manual_seed(0)
        order = torch.randperm(sum(counts)) if step.page is not None else torch.arange(sum(counts))
        self.starts = self.int32([0, *torch.tensor(counts).cumsum(0).tolist()])
        self.pages = (self.prefix_pages + order).to(device="cuda", dtype=torch.int32)
        self.last = self.int32([(length - 1) % self.page + 1 for length in step.lengths])
        self.queries = self.int32(range(0, step.batch * step.num_queries + 1, step.num_queries))
        self.dtype = getattr(torch, step.dtype)
        shape = (self.prefix_pages + sum(counts), 2, self.page, step.num_kv_heads, step.head_dim)
        draw = lambda *shape: torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        self.caches = [draw(*shape).to(self.dtype) for _ in range(copies)]
        self.query = draw(step.batch * step.num_queries, step.num_heads, step.head_dim)

    @property
    def workspace(self):
        """Memory for the partial results of one plan; zeros, as XQA needs it."""
        import torch

        return torch.zeros(512 << 20, dtype=torch.uint8, device="cuda")

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, KV heads, head dim."""
        return self.step.num_heads, self.step.num_kv_heads, self.step.head_dim

    @property
    def window_left(self) -> int:
        """Keys before the query's own that it sees; -1 is all."""
        return -1 if self.step.window is None else self.step.window - 1

    def dtypes(self) -> dict:
        """Returns the keyword arguments of `plan` for dtypes."""
        import torch

        return {"q_data_type": torch.bfloat16, "kv_data_type": self.dtype}


def _build(data: Data, way: str) -> dict:
    import torch

    RUNS[way](data)(data.query, data.caches[0])
    torch.cuda.synchronize()
    return {"built": True}


def _time(data: Data, *, way: str, n_iters: int, **request) -> dict:
    """Checks one step, times graphs of a short and a long chain in turn, and profiles the short one."""
    import flashinfer
    import torch

    from tree_attn.measure.latency import time_in_turn
    from tree_attn.measure.provenance import clocks_during
    from tree_attn.measure.steps.chains import PROFILED, chain_fields, sampling
    from tree_attn.measure.steps.ways import chains

    run = RUNS[way](data)
    out = run(data.query, data.caches[0])
    error = _max_error(data, out)
    allowed = MAX_FLOAT8_ERROR if data.step.dtype != "bfloat16" else MAX_ERROR
    assert error <= allowed, f"the result is off by {error:.3g} of its largest value"
    calls, long_calls = chains(data.step)
    short, long = (_replay(functools.partial(_chain, run, data, count)) for count in (calls, long_calls))
    in_flight, n_iters = sampling(short, (calls, long_calls), n_iters)
    short, long = (functools.partial(replay, in_flight) for replay in (short, long))
    timing = time_in_turn(short, long, chain=calls, long_chain=long_calls, in_flight=in_flight, n_iters=n_iters)
    versions = {"flashinfer": flashinfer.__version__, "torch": torch.__version__}
    profiled = min(n_iters, PROFILED)
    kernels = _kernels(functools.partial(_chain, run, data, calls), calls, profiled) | clocks_during(short)
    kernels["profiled_runs"] = profiled
    return kernels | chain_fields(timing) | {"max_error": error, "peer_versions": versions}


def _chain(run: Callable, data: Data, calls: int) -> None:
    """Makes dependent steps, one after another, over the copies in turn."""
    query = data.query
    for i in range(calls):
        query = run(query, data.caches[i % len(data.caches)])


def _replay(chain: Callable[[], None]) -> Callable[..., None]:
    """Returns a function that replays a CUDA graph of `chain()` some times and waits for its end."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        chain()
        with torch.cuda.graph(graph, stream=stream):
            chain()
    torch.cuda.synchronize()

    def replay(count: int = 1):
        for _ in range(count):
            graph.replay()
        torch.cuda.synchronize()

    return replay


def _kernels(chain: Callable[[], None], calls: int, n_iters: int) -> dict:
    """Returns the sum of kernel times of a step, by torch's profiler, without the graph."""
    import numpy as np
    import torch

    from tree_attn.measure.device_time import by_name

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(n_iters):
            chain()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    times = sorted((1e3 * event.time_range.start, 1e3 * event.time_range.end, event.name) for event in events)
    runs = np.array_split([end - start for start, end, _ in times], n_iters)
    return {
        "device_us_median": float(np.median([run.sum() for run in runs])) / 1e3 / calls,
        "timing": "torch.profiler: kernel, copy and memset times summed over calls; planning excluded",
        "kernels": by_name(times, n_iters * calls),
    }


def _max_error(data: Data, out) -> float:
    """Returns the largest error of the shortest sequence's output, over the largest value of a float32 reference."""
    import torch

    step = data.step
    b = min(range(step.batch), key=lambda b: step.lengths[b])
    indices = [*range(data.prefix_pages), *data.pages[data.starts[b] : data.starts[b + 1]].tolist()]
    key, value = (data.caches[0][indices, i].float().flatten(0, 1) for i in range(2))  # [S, K, H]
    at = data.prefix_pages * data.page
    key, value = (torch.cat([x[: step.prefix], x[at : at + step.lengths[b]]]) for x in (key, value))
    query = data.query[b * step.num_queries : (b + 1) * step.num_queries].float()
    slot = torch.arange(len(key), device="cuda")
    position = (len(key) - step.num_queries + torch.arange(step.num_queries, device="cuda"))[:, None]
    mask = slot <= position
    if step.window is not None:
        mask &= slot > position - step.window
    group = step.num_heads // step.num_kv_heads
    expected = torch.empty_like(query)
    for head in range(step.num_heads):  # one at a time: a group's keys are not repeated
        logits = query[:, head] @ key[:, head // group].T * step.head_dim**-0.5
        weights = logits.masked_fill(~mask, -torch.inf).softmax(-1)
        expected[:, head] = weights @ value[:, head // group]
    found = out[b * step.num_queries : (b + 1) * step.num_queries].float()
    return float((found - expected).abs().max() / expected.abs().max())


def _decode(data: Data, *, use_tensor_cores: bool) -> Callable:
    import flashinfer

    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(data.workspace, "NHD", use_tensor_cores=use_tensor_cores)
    several = {"q_len_per_req": data.step.num_queries} if data.step.num_queries > 1 else {}
    wrapper.plan(
        data.starts, data.pages, data.last, *data.heads, data.page, window_left=data.window_left, **several,
        **data.dtypes(),
    )  # fmt: skip
    return lambda query, cache: wrapper.run(query, cache)


def _prefill(data: Data, *, backend: str) -> Callable:
    import flashinfer

    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(data.workspace, "NHD", backend=backend)
    wrapper.plan(
        data.queries, data.starts, data.pages, data.last, *data.heads, data.page, causal=data.step.num_queries > 1,
        window_left=data.window_left, **data.dtypes(),
    )  # fmt: skip
    return lambda query, cache: wrapper.run(query, cache)


def _batch_attention(data: Data) -> Callable:
    import flashinfer
    import torch

    wrapper = flashinfer.BatchAttention("NHD", device="cuda")
    # Its own memory of partial results is too small for 32 KV heads.
    wrapper.float_workspace_buffer = torch.empty(BATCH_ATTENTION_BYTES, dtype=torch.uint8, device="cuda")
    lengths = data.int32(data.step.lengths)
    wrapper.plan(
        data.queries, data.starts, data.pages, lengths, *data.heads, data.step.head_dim, data.page,
        causal=data.step.num_queries > 1, **data.dtypes(),
    )  # fmt: skip
    return lambda query, cache: wrapper.run(query, cache)[0]


def _xqa(data: Data) -> Callable:
    import torch
    from flashinfer.decode import xqa_batch_decode_with_kv_cache

    step, table = data.step, torch.zeros(data.step.batch, max(data.counts), dtype=torch.int32)
    for b, pages in enumerate(data.pages.cpu().split(data.counts)):
        table[b, : len(pages)] = pages
    table, lengths = table.cuda(), torch.tensor(step.lengths, dtype=torch.uint32, device="cuda")
    options = {"bmm1_scale": step.head_dim**-0.5, "window_left": data.window_left, "q_len_per_req": step.num_queries}
    if step.num_queries > 1:  # bit s of row t: whether query t sees the s-th new token
        rows = torch.tensor([[(2 << t) - 1, 0] for t in range(step.num_queries)], dtype=torch.int32)
        options["mask"] = rows.expand(step.batch, -1, -1).contiguous().to(torch.uint16).cuda()
    workspace = data.workspace
    return lambda query, cache: xqa_batch_decode_with_kv_cache(
        query, cache, workspace, table, lengths, max(step.lengths), kv_layout="NHD", **options
    ).view(query.shape)


def _prefix_indices(data: Data) -> tuple:
    """Returns the prefix's queries, start, pages and keys in its last page, as for one sequence."""
    last = (data.step.prefix - 1) % data.page + 1
    bounds = data.int32([0, data.step.batch]), data.int32([0, data.prefix_pages])
    return *bounds, data.int32(range(data.prefix_pages)), data.int32([last])


def _cascade(data: Data) -> Callable:
    import flashinfer

    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, data.workspace, "NHD")
    queries, starts, pages, last = _prefix_indices(data)
    levels = [queries, data.queries], [starts, data.starts], [pages, data.pages], [last, data.last]
    wrapper.plan(*levels, *data.heads, data.page, **data.dtypes())
    return lambda query, cache: wrapper.run(query, cache)


def _prefill_and_decode(data: Data, *, backend: str) -> Callable:
    import flashinfer

    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(data.workspace, "NHD", backend=backend)
    queries, starts, pages, last = _prefix_indices(data)
    prefill.plan(queries, starts, pages, last, *data.heads, data.page, causal=False, **data.dtypes())
    is_grouped = data.step.num_heads > data.step.num_kv_heads
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(data.workspace, "NHD", use_tensor_cores=is_grouped)
    decode.plan(data.starts, data.pages, data.last, *data.heads, data.page, **data.dtypes())

    def run(query, cache):
        states = (*prefill.run(query, cache, return_lse=True), *decode.run(query, cache, return_lse=True))
        return flashinfer.merge_state(*states)[0]

    return run


# Way -> what plans it and returns `run(query, cache)`.
RUNS: dict[str, Callable[[Data], Callable]] = {
    "flashinfer decode, tensor cores": functools.partial(_decode, use_tensor_cores=True),
    "flashinfer decode": functools.partial(_decode, use_tensor_cores=False),
    "flashinfer prefill fa2": functools.partial(_prefill, backend="fa2"),
    "flashinfer prefill fa3": functools.partial(_prefill, backend="fa3"),
    "flashinfer BatchAttention": _batch_attention,
    "flashinfer XQA": _xqa,
    "flashinfer cascade": _cascade,
    "flashinfer prefill fa2 + decode + merge": functools.partial(_prefill_and_decode, backend="fa2"),
    "flashinfer prefill fa3 + decode + merge": functools.partial(_prefill_and_decode, backend="fa3"),
}


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
