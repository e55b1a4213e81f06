"""Profiles a ring on GPUs: which part of its transfers is hidden behind attention, and a picture of both.

    python3 scripts/ring_timeline.py --devices 2 --keys 65536 --heads 32 --kv-heads 8 --gradient --out DIR
    python3 scripts/ring_timeline.py --saved docs/results/ring_timeline_h100/decode.json --out DIR   # the picture alone

One process has all GPUs. `timeline.json` has the events of one call, in us from its first one. `timeline.png` shows
them: for each device a line of transfers, and one of everything else. Without `--prefill` or `--gradient` the call is a
step of `ring_decode`. Kernels of NCCL, and copies between devices, are transfers. The limit is the longest of sending,
reading and products, each by the datasheet's rate.
"""

import argparse
import functools
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Event = tuple[float, float, str]  # start, end, name
TRANSFERS = ("nccl", "p2p", "peer")  # in names of kernels and copies, in small letters
COLOURS = {"transfer": "#d95f02", "attention": "#1b9e77"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Profiles the call, prints what is hidden of each device's transfers, and writes events and picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--keys", type=int, default=65_536, help="of all devices; with --prefill the prompt's tokens")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--prefill", action="store_true", help="ring_attention, forward")
    parser.add_argument("--gradient", action="store_true", help="ring_attention, forward and backward")
    parser.add_argument("--block-size", default="1", help="placement of a prompt: 1 (default), another number, zigzag")
    parser.add_argument("--rotation", help="one_way, joint or two_way (default: the library's choice)")
    parser.add_argument("--saved", type=pathlib.Path, metavar="FILE", help="draw this file's events; profile nothing")
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="DIR")
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.saved:
        picture = args.out / args.saved.with_suffix(".png").name
        draw(json.loads(args.saved.read_text()), picture)
        print(f"Written: {picture}")
        return
    from tree_attn.measure import links, provenance

    links.spread_transfers()
    links.join_transfers()
    timelines = profile(args)
    if not any(timelines.values()):
        raise SystemExit("the profiler saw no device event: this needs GPUs")
    import jax

    found = provenance.of_script(jax.devices()[: args.devices]) | setting(args) | {"events": timelines}
    (args.out / "timeline.json").write_text(json.dumps(found) + "\n")
    for device, events in timelines.items():
        transfers, hidden = overlap(events)
        print(f"{device}: {transfers:,.0f} us of transfers, {hidden:,.0f} us of them beside other work")
    draw(found, args.out / "timeline.png")
    print(f"Written: {args.out / 'timeline.json'}, {args.out / 'timeline.png'}")


def setting(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the call and its shape, as fields beside its events."""
    call = "gradient" if args.gradient else "prefill" if args.prefill else "decode"
    heads = {"num_heads": args.heads, "num_kv_heads": args.kv_heads, "head_dim": args.head_dim}
    where = {"n_devices": args.devices, "rotation": args.rotation}
    return {"call": call, "block_size": args.block_size, "num_keys": args.keys} | heads | where


def profile(args: argparse.Namespace) -> dict[str, list[Event]]:
    """Returns the events of one call, by device, in us from the first one."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from tree_attn import make_mesh
    from tree_attn.devices import ensure_devices
    from tree_attn.measure.device_time import events_of_devices
    from tree_attn.ring_baseline import ring_attention, ring_decode

    mesh = make_mesh({"seq": args.devices}, ensure_devices(args.devices))
    is_prompt = args.prefill or args.gradient
    block_size = args.block_size if args.block_size == "zigzag" else int(args.block_size)
    where = dict(axis_name="seq", mesh=mesh, rotation=args.rotation)
    attention = functools.partial(ring_attention, block_size=block_size, **where)
    program = attention if is_prompt else functools.partial(ring_decode, **where)
    if args.gradient:
        program = lambda *arrays: jax.vjp(attention, *arrays)[1](arrays[0])
    along = NamedSharding(mesh, P(None, "seq"))

    def array(tokens, heads, sharding):
        shape = 1, tokens, heads, args.head_dim
        return jax.jit(lambda: jax.random.normal(jax.random.key(0), shape, jnp.bfloat16), out_shardings=sharding)()

    query = array(args.keys, args.heads, along) if is_prompt else array(1, args.heads, NamedSharding(mesh, P()))
    arrays = query, *(array(args.keys, args.kv_heads, along) for _ in range(2))
    compiled = jax.jit(program).lower(*arrays).compile()
    for _ in range(3):  # clocks rise, and NCCL connects
        jax.block_until_ready(compiled(*arrays))
    return from_first(events_of_devices(lambda: jax.block_until_ready(compiled(*arrays))))


def from_first(events: Mapping[str, Sequence[Event]]) -> dict[str, list[Event]]:
    """Returns events in ns as events in us from the first of all devices."""
    first = min((event[0] for found in events.values() for event in found), default=0.0)
    moved = lambda event: ((event[0] - first) / 1e3, (event[1] - first) / 1e3, event[2])
    return {device: [moved(event) for event in found] for device, found in events.items()}


def is_transfer(name: str) -> bool:
    """Returns whether an event moves keys and values between devices."""
    return any(part in name.lower() for part in TRANSFERS)


def overlap(events: Iterable[Event]) -> tuple[float, float]:
    """Returns the time in which a transfer ran, and how much of it other work ran beside."""
    steps = []
    for start, end, name in events:
        kind = 0 if is_transfer(name) else 1
        steps += [(start, kind, 1), (end, kind, -1)]
    running, before, sending, hidden = [0, 0], 0.0, 0.0, 0.0
    for time, kind, change in sorted(steps):
        sending += (time - before) * (running[0] > 0)
        hidden += (time - before) * (min(running) > 0)
        running[kind] += change
        before = time
    return sending, hidden


def limit(found: Mapping[str, Any]) -> tuple[str, float] | None:
    """Returns the longest thing that a device must do, and its us by the datasheet's rate; None without a datasheet."""
    from tree_attn.cost import datasheets, prompt
    from tree_attn.cost.step import DecodeStep

    try:
        rates = datasheets.constants(found["hardware"].partition(" x ")[2])
    except KeyError:
        return None
    link, read, products = (rates[name] for name in ("link_bytes_per_s", "read_bytes_per_s", "product_flops_per_s"))
    shape = {name: found[name] for name in ("n_devices", "num_keys", "num_heads", "num_kv_heads", "head_dim")}
    step = DecodeStep(batch=1, dtype="bfloat16", **shape)
    shard_bytes, has_gradient = step.key_value_bytes_per_device, found["call"] == "gradient"
    if found["call"] == "decode":
        sent_bytes = (step.n_devices - 1) * shard_bytes
        num_flops = 4 * step.n_devices * step.num_keys * step.hidden_size  # every device attends to all keys
    else:
        (sent_bytes,) = prompt.exchange_bytes_sent(step, "ring", (step.n_devices,), has_gradient=has_gradient)
        num_flops = 2 * step.num_keys**2 * step.hidden_size * (1 + prompt.BACKWARD * has_gradient)
    what = "K and V, and their derivatives," if has_gradient else "K and V"
    parts = {
        f"{what} over the link at {link / 1e9:.0f} GB/s": sent_bytes / link * 1e6,
        f"reading every shard at {read / 1e12:.3g} TB/s": step.n_devices * shard_bytes / read * 1e6,
        f"products at {products / 1e12:.4g} TFLOP/s": num_flops / products / step.n_devices * 1e6,
    }
    return max(parts.items(), key=lambda part: part[1])


def title(found: Mapping[str, Any]) -> str:
    """Returns two lines: the call and its shape; hardware, date and commit."""
    from tree_attn.commands import units

    call, of_prompt = found["call"], f"ring_attention, block_size={found['block_size']}"
    names = {"decode": "a step of ring_decode", "prefill": of_prompt, "gradient": f"{of_prompt}, forward and backward"}
    heads = f"{found['num_heads']} query and {found['num_kv_heads']} KV heads of {found['head_dim']}"
    shape = f"{units.length(found['num_keys'])} {'keys' if call == 'decode' else 'tokens'}, {heads}"
    commit = (found["git_commit"] or "unknown")[:7]
    return f"{names[call]}: {shape}\n{found['hardware']}, {found['date'][:10]}, commit {commit}"


def draw(found: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draws two lines for each device, transfers and everything else, and the limit, from what `main` writes."""
    from tree_attn.commands import drawing, units

    timelines = found["events"]
    figure = drawing.new_figure(8, 1.5 + 0.5 * len(timelines))
    axes, labels = figure.subplots(), []
    for device, events in timelines.items():
        for kind, colour in COLOURS.items():
            spans = [(s / 1e3, (e - s) / 1e3) for s, e, name in events if is_transfer(name) == (kind == "transfer")]
            axes.broken_barh(spans, (len(labels) - 0.4, 0.8), facecolors=colour)
            labels.append(f"{device.rsplit('/', 1)[-1].removeprefix('device:').replace(':', ' ')}, {kind}")
    drawing.plain(axes)
    axes.set_axisbelow(True)  # the grid lies behind the bars
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    if longest := limit(found):
        what, us = longest
        axes.axvline(us / 1e3, color="black", linestyle=":")
        place = {"xytext": (0, 3), "textcoords": "offset points", "ha": "center", "va": "bottom", "fontsize": 9}
        axes.annotate(f"limit: {what}, {units.time(us)}", (us / 1e3, 1), xycoords=axes.get_xaxis_transform(), **place)
    axes.set_xlim(left=0)
    figure.suptitle(title(found), fontsize=10, x=0.01, ha="left")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
