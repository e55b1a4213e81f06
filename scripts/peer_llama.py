"""Times what a user would otherwise run: a Llama's decoding step in PyTorch, with FlashInfer and cuBLAS.

    python3 scripts/peer_llama.py --config llama-3.2-1b --context 1024,8192 --flashinfer FOLDER --out FILE

FlashInfer runs attention, norms and rotation, cuBLAS the products, and one CUDA graph a token's step. Weights and
caches are random, bf16. On several GPUs (`--devices`) weights and KV heads are cut, with one process per GPU: by NCCL's
all-reduces ("nccl") and by one-shot sums through symmetric memory ("one_shot"). The file gets one JSON row for each
context, batch, attention and kind of sum; the fastest is the peer.

A sample is `--replays` steps that the host enqueues at once, over their number. All steps are at one position: what
planning FlashInfer's attention costs the host at every token is in no time.

`--check` compares logits with a plain float32 forward at a small size first, on GPUs or with `--device cpu`. FlashInfer
compiles its kernels at their first use, for minutes; `FLASHINFER_WORKSPACE_BASE` names the folder that keeps them.
"""

import argparse
import dataclasses
import functools
import itertools
import os
import pathlib
import socket
import sys
import time
import types
from collections.abc import Callable, Iterator

MAX_ERROR, MAX_PLAIN_ERROR = 0.05, 1e-4  # of the largest logit: in bfloat16, and in float32
CHECK_TOKENS = 70  # more than a page
WARM_UP = 5  # samples
PROFILED = 4  # steps, of which a time line is drawn
OPTIONS_OF_OTHERS = (
    "query_key_value_bias", "query_key_norm", "window", "norms_add_one", "post_norms", "scales_embedding",
    "attention_scale", "attention_soft_cap", "logit_soft_cap",
)  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Starts a process per GPU; returns 0, or 1 where a check failed or a case has no time."""
    args = parse(arguments)
    if args.flashinfer:
        sys.path.insert(0, args.flashinfer)  # which torch's processes inherit
        os.environ["PYTHONPATH"] = os.pathsep.join([args.flashinfer, os.environ.get("PYTHONPATH", "")])
    import torch

    if args.devices == 1:
        return run(0, args, None)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    try:
        torch.multiprocessing.spawn(_run_as_process, (args, port), nprocs=args.devices)
    except torch.multiprocessing.ProcessExitedException as error:
        return error.exit_code
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Returns the checked arguments, with the shape as `args.shape`."""
    from tree_attn.models.llama.presets import preset

    numbers = lambda text: [int(part) for part in text.split(",")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="llama-3.1-8b", help="a published shape of a Llama")
    parser.add_argument("--layers", type=int, help="default: all of them")
    parser.add_argument("--context", type=numbers, default=[8192], help="tokens before the new one, e.g. 1024,8192")
    parser.add_argument("--batch", type=numbers, default=[1], help="sequences, each with its own context, e.g. 1,16")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: plain torch in float32")
    parser.add_argument("--attention", default="decode,xqa", help="FlashInfer's ways: decode, xqa or both (default)")
    parser.add_argument("--sums", default="nccl,one_shot", help="on several GPUs: nccl, one_shot or both (default)")
    parser.add_argument("--n-iters", type=int, default=32, help="samples; default 32")
    parser.add_argument("--replays", type=int, default=8, help="steps of a sample; default 8")
    parser.add_argument("--events", action="store_true", help="rows get a step's kernels, for profile_llama.py")
    parser.add_argument("--flashinfer", metavar="FOLDER", help="where it lies, if it is not installed")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help="JSONL file, appended to")
    args = parser.parse_args(arguments)
    if args.out is None and not args.check:
        parser.error("--out is needed, but for --check")
    shape = preset(args.config)
    others = [name for name in OPTIONS_OF_OTHERS if getattr(shape, name)]
    if others:
        parser.error(f"--config must be a plain Llama, got {args.config}, which has {', '.join(others)}")
    if shape.num_kv_heads % args.devices or shape.vocab_size % args.devices:
        parser.error(f"--devices must divide {shape.num_kv_heads} KV heads and the vocabulary, got {args.devices}")
    is_cpu = args.device == "cpu"
    args.ways = ["plain"] if is_cpu else one_or_all("--attention", args.attention, ("decode", "xqa"), parser)
    args.kinds = one_or_all("--sums", args.sums, ("nccl", "one_shot"), parser)
    args.kinds = [None] if args.devices == 1 else ["nccl"] if is_cpu else args.kinds
    args.shape = dataclasses.replace(shape, num_layers=args.layers or shape.num_layers)
    return args


def one_or_all(option: str, text: str, allowed: tuple[str, ...], parser: argparse.ArgumentParser) -> list[str]:
    """Returns the names in a comma-separated text."""
    names = text.split(",")
    if set(names) - set(allowed):
        parser.error(f"{option} must be of {', '.join(allowed)}, got {text}")
    return names


def _run_as_process(rank: int, args: argparse.Namespace, port: int) -> None:
    if run(rank, args, port):
        raise SystemExit(1)


def run(rank: int, args: argparse.Namespace, port: int | None) -> int:
    """Checks or times as one of `args.devices` processes; returns 0, or 1 as `main` does."""
    import torch

    if args.device == "cuda":
        torch.cuda.set_device(rank)
    if port is not None:
        torch.distributed.init_process_group(
            "gloo" if args.device == "cpu" else "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank,
            world_size=args.devices, device_id=torch.device("cuda", rank) if args.device == "cuda" else None,
        )  # fmt: skip
    try:
        if args.check and any([check(args, rank, *case) for case in cases(args)]):
            return 1
        return time_cases(args, rank) if args.out else 0
    finally:
        if port is not None:
            torch.distributed.destroy_process_group()


def cases(args: argparse.Namespace) -> Iterator[tuple]:
    """Yields attention and kind of sum."""
    return itertools.product(args.ways, args.kinds)


def make(args, shape, weights, attention: str, sums: str | None, *, batch: int, capacity: int):
    """Returns the model of one process."""
    import peer_llama_model as model

    dtype, count = weights.head.dtype, args.devices
    options = dict(count=count, batch=batch, capacity=capacity, dtype=dtype, device=args.device)
    if attention == "plain":
        operations = model.PlainOperations(shape, **options)
    else:
        operations = model.FlashInferOperations(shape, attention=attention, **options)
    groups = {None: model.Alone, "nccl": model.Nccl}
    one_shot = functools.partial(model.OneShot, batch, shape.hidden_size, dtype)
    return model.Peer(weights, operations, (groups | {"one_shot": one_shot})[sums]())


def check(args: argparse.Namespace, rank: int, attention: str, sums: str | None) -> bool:
    """Returns whether the last logits differ from a plain float32 forward's, of two narrow layers; prints how much."""
    import peer_llama_model as model
    import torch

    shape = dataclasses.replace(
        args.shape, num_layers=2, hidden_size=512, intermediate_size=1024, vocab_size=1024, eos_token_ids=(),
        bos_token_id=None,
    )  # fmt: skip
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    draw = functools.partial(model.random_weights, shape, dtype=dtype, device=args.device)
    peer = make(args, shape, draw(rank=rank, count=args.devices), attention, sums, batch=3, capacity=CHECK_TOKENS)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(shape.vocab_size, (3, CHECK_TOKENS), generator=generator).to(args.device)
    for position in range(CHECK_TOKENS):
        peer.operations.place(position)
        is_last = position == CHECK_TOKENS - 1
        replay = captured(peer) if is_last and args.device == "cuda" else peer.step
        peer.tokens.copy_(tokens[:, position])
        replay()
    found = torch.cat(list(peer.group.gathered(peer.logits.float())), -1)
    expected = model.full_logits(draw(), shape, tokens)[:, -1]
    error = float((found - expected).abs().max() / expected.abs().max())
    best = expected.gather(1, peer.tokens[:, None])[:, 0]  # of two that nearly tie either may be taken
    is_best = bool((best >= expected.amax(-1) - 2 * error * expected.abs().max()).all())
    is_wrong = not (error <= (MAX_PLAIN_ERROR if args.device == "cpu" else MAX_ERROR) and is_best)
    if rank == 0:
        print(f"{'WRONG' if is_wrong else 'ok'} {attention} {sums or ''}: logits differ by {error:.1e}", flush=True)
    return is_wrong


def captured(peer) -> Callable[[], None]:
    """Returns a function that replays a CUDA graph of the peer's step; its steps so far are at the same position."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # libraries choose their kernels
            peer.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        peer.step()
    torch.cuda.synchronize()
    return graph.replay


def time_cases(args: argparse.Namespace, rank: int) -> int:
    """Writes a row for each case, prints the fastest of each context and batch; returns 1 where one has no time."""
    import peer_llama_model as model
    import torch

    from tree_attn.measure.rows import MeasuredRows

    writer, origin = MeasuredRows(args.out, is_writer=rank == 0), provenance_fields(args)
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    weights = model.random_weights(args.shape, dtype=dtype, device=args.device, rank=rank, count=args.devices)
    num_failed = 0
    for context, batch in itertools.product(args.context, args.batch):
        timed = []
        for attention, sums in cases(args):
            row = {
                "way": way_of(attention, sums), "config": args.config, "context": context, "batch": batch,
                "layers": args.shape.num_layers, "n_devices": args.devices,
                "dtype": str(dtype).removeprefix("torch."), "attention": attention, "sums": sums,
            }  # fmt: skip
            try:
                row |= measure(args, weights, row)
                timed.append((row["per_token_ms_median"], row["way"], row["floor_ms"]))
            except Exception as error:  # a way that this version, or this shape, does not have
                row |= {"error": f"{type(error).__name__}: {str(error)[:500]}"}
            writer.append(row | origin)
            if rank == 0:
                text = row.get("error") or f"{row['per_token_ms_median']:.3f} ms a token"
                print(f"{args.config}, {context:,} x {batch}: {row['way']}: {text}", flush=True)
        if timed and rank == 0:
            ms, way, floor = min(timed)
            words = f"{args.config}, {context:,} x {batch}: the fastest is {way}, {ms:.3f} ms"
            print(words if floor is None else f"{words}; reading its bytes takes {floor} ms", flush=True)
        num_failed += not timed
    return int(num_failed > 0)


def way_of(attention: str, sums: str | None) -> str:
    """Returns the words for a way in tables and pictures."""
    parts = ["plain torch"] if attention == "plain" else ["torch", f"FlashInfer {attention}", "cuBLAS"]
    return ", ".join([*parts, sums] if sums else parts)


def measure(args: argparse.Namespace, weights, labels: dict) -> dict:
    """Returns the times of a case, and the bytes that a GPU reads for its token."""
    import numpy as np
    import torch

    from tree_attn.measure.provenance import clocks_during

    peer = make(
        args, args.shape, weights, labels["attention"], labels["sums"], batch=labels["batch"],
        capacity=labels["context"] + 1,
    )  # fmt: skip
    peer.operations.place(labels["context"])
    is_cuda = args.device == "cuda"
    replay, wait = (captured(peer), torch.cuda.synchronize) if is_cuda else (peer.step, lambda: None)

    def sample() -> float:
        start = time.perf_counter()
        for _ in range(args.replays):
            replay()
        wait()
        return (time.perf_counter() - start) / args.replays * 1e3

    samples = [sample() for _ in range(WARM_UP + args.n_iters)][WARM_UP:]
    p10, median, p90 = map(float, np.percentile(samples, [10, 50, 90]))
    fields = {"per_token_ms_median": median, "per_token_ms_p10": p10, "per_token_ms_p90": p90}
    fields |= {"n_iters": args.n_iters, "replays": args.replays, "timing": "host: replays of a step, then a wait"}
    fields |= bytes_read(args, weights, labels) | clocks_during(sample, repetitions=args.n_iters)
    if args.events and is_cuda:
        fields |= {"steps": PROFILED} | events_of(replay)
    return fields


def bytes_read(args: argparse.Namespace, weights, labels: dict) -> dict:
    """Returns the bytes of a step and of a layer on one GPU, and the least time of a step."""
    from layer_timeline import read_rate

    shape, dtype = args.shape, weights.head.dtype
    cache = 2 * labels["batch"] * labels["context"] * shape.num_kv_heads * shape.head_dim * dtype.itemsize
    cache = cache // args.devices  # of a layer
    of_layer = sum(tensor.nbytes for tensor in vars(weights.layers[0]).values())
    found = {"weights_bytes_per_device": weights.num_bytes, "cache_bytes_per_device": shape.num_layers * cache}
    found |= {"layer_weights_bytes": of_layer, "layer_cache_bytes": cache}
    rate = read_rate(device_kind(args))
    if rate is None:
        return found | {"read_bytes_per_s": None, "floor_ms": None}
    floor = (weights.num_bytes + shape.num_layers * cache) / rate * 1e3
    return found | {"read_bytes_per_s": rate, "floor_ms": round(floor, 3)}


def events_of(replay: Callable[[], None]) -> dict:
    """Returns a row's fields of the kernels, copies and memsets of a few replays."""
    import torch
    from layer_timeline import packed

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(PROFILED):
            replay()
        torch.cuda.synchronize()
    on_device = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return packed((1e3 * event.time_range.start, 1e3 * event.time_range.end, event.name) for event in on_device)


def device_kind(args: argparse.Namespace) -> str:
    """Returns the name that JAX calls `device_kind`."""
    import torch

    return torch.cuda.get_device_name() if args.device == "cuda" else "cpu"


def provenance_fields(args: argparse.Namespace) -> dict:
    """Returns the fields of a row that say when, where and by what it was measured; JAX starts no device for them."""
    import torch

    from tree_attn.measure import provenance

    is_cuda = args.device == "cuda"
    device = types.SimpleNamespace(platform="gpu" if is_cuda else "cpu", device_kind=device_kind(args))
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if is_cuda:
        import flashinfer

        versions |= {"flashinfer": flashinfer.__version__}
    return provenance.of_script([device] * args.devices) | {"peer_versions": versions}


if __name__ == "__main__":
    raise SystemExit(main())
