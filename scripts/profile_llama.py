"""Profiles a step of a Llama's decoding: the times of its kernels, and a picture of one layer's.

    python3 scripts/profile_llama.py --config llama-2-7b --context 8192 --samples 16,64,256 --out FILE
    python3 scripts/profile_llama.py --config llama-3.2-1b --context 1024 --new-tokens 17 --out FILE --timeline DIR
    python3 scripts/profile_llama.py --saved --out FILE --peer PEER_FILE --timeline DIR

Weights are random, all samples share one prompt, and one GPU runs a few layers, since all layers are alike. The file
gets one JSON row per case: `kernels` are name -> microseconds of one launch, and launches a step, by falling time;
`us_per_step` is their sum. The profiler runs no CUDA graphs: gaps between kernels are not those of a run, and no row
has them.

With `--timeline` it does run them, and rows have the start and end of every kernel too. Each case of the file is then
drawn as a time line of one layer: `layer_CONFIG_CONTEXT_BATCH.png`, and its numbers as `.json`. Beside it are the time
to read the layer's bytes, and the peer by rows of `peer_llama.py --events` (`--peer`). `--saved` draws without
profiling.
"""

import argparse
import dataclasses
import itertools
import os
import pathlib

RUN_GRAPHS = "--xla_enable_command_buffers_during_profiling=true"


def main(arguments: list[str] | None = None) -> None:
    """Profiles each case and writes its row, unless the rows are there; and draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="llama-3.1-8b", help="a published shape")
    parser.add_argument("--context", type=int, default=8192, help="tokens of the prompt")
    parser.add_argument("--samples", default="1", help="sequences, e.g. 1,16")
    parser.add_argument("--new-tokens", type=int, default=65)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--products", default="xla", help="xla, mosaic_gpu or mosaic_gpu_chain")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="JSONL file, appended to")
    parser.add_argument("--timeline", type=pathlib.Path, metavar="DIR", help="draws one layer of each case there")
    parser.add_argument("--peer", type=pathlib.Path, metavar="FILE", help="rows of the peer, to be drawn beside")
    parser.add_argument("--saved", action="store_true", help="profile nothing: draw rows that --out has")
    args = parser.parse_args(arguments)
    if (args.saved or args.peer) and not args.timeline:
        parser.error("--saved and --peer need --timeline")
    for option, path in (("--peer", args.peer), ("--out", args.out if args.saved else None)):
        if path is not None and not path.is_file():
            parser.error(f"{option} must be a file of rows, got {path}")
    if not args.saved:
        if args.timeline:  # before JAX starts its devices
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {RUN_GRAPHS}".strip()
        profile_cases(args)
    if args.timeline:
        import layer_timeline

        from tree_attn.measure import rows

        of_peer = rows.read(args.peer) if args.peer else []
        for picture in layer_timeline.draw_rows([*rows.read(args.out), *of_peer], args.timeline):
            print(f"Written: {picture}, and {picture.with_suffix('.json').name}")


def profile_cases(args: argparse.Namespace) -> None:
    """Profiles each number of samples, and writes its row."""
    from tree_attn.commands import session
    from tree_attn.measure import provenance
    from tree_attn.measure.rows import MeasuredRows
    from tree_attn.models.llama import Generator, Llama, by_name, parameters
    from tree_attn.models.llama.presets import preset

    config = dataclasses.replace(
        preset(args.config), num_layers=args.layers, max_position=args.context + args.new_tokens
    )
    place = session.Place(devices=session.choose_devices(1), has_two_axes=False)
    sharding = place.sharding(config)
    model = Llama(config, sharding, parameters.random(sharding, place.dtype), products=args.products)
    generator = Generator(model, by_name("single", sharding))
    writer, origin = MeasuredRows(args.out), provenance.of_script(list(place.devices))
    prompt = [i % config.vocab_size for i in range(args.context)]
    for samples in map(int, args.samples.split(",")):
        kernels, events = profile(generator, [prompt] * samples, args.new_tokens)
        row = {"config": args.config, "context": args.context, "samples": samples, "new_tokens": args.new_tokens}
        row |= {"layers": args.layers, "products": args.products}
        row |= {"us_per_step": sum(us * count for us, count in kernels.values()), "kernels": kernels}
        if args.timeline:
            row |= timeline_fields(config, args, place.devices[0].device_kind, events)
        writer.append(row | provenance.clocks() | origin)
        print(f"{samples:,} x {args.context:,}: {row['us_per_step']:,.0f} us a step of {args.layers} layers")
        for name, (us, count) in itertools.islice(kernels.items(), 15):
            print(f"{us * count / args.layers:10.2f} us a layer in {count / args.layers:5.2f} launches  {name}")


def profile(generator, prompts, new_tokens: int) -> tuple[dict[str, tuple[float, float]], list]:
    """Returns kernels of the steps after the first token: name -> (microseconds of one launch, launches a step).

    The events beside them are start and end in ns, and name, of every launch.
    """
    from tree_attn.measure.device_time import by_name, device_events

    for _ in generator.stream(prompts, new_tokens):  # compiles, and lets clocks rise
        pass
    steps = generator.stream(prompts, new_tokens)
    next(steps)
    events = device_events(lambda: list(steps))
    if not events:
        raise RuntimeError("the profiler saw no device event: this needs a GPU")
    return by_name(events, new_tokens - 1), events


def timeline_fields(config, args: argparse.Namespace, device_kind: str, events: list) -> dict:
    """Returns the fields of a row that its time line is drawn from."""
    from layer_timeline import packed, read_rate

    heads = config.num_heads + config.num_kv_heads  # twice each: queries and their output, keys and values
    weights = config.hidden_size * (2 * heads * config.head_dim + 3 * config.intermediate_size + 2)
    cache = 2 * args.context * config.num_kv_heads * config.head_dim  # once: all samples share the prompt
    fields = {"way": f"tree-attn, products {args.products}", "steps": args.new_tokens - 1}
    fields |= {"layer_weights_bytes": 2 * weights, "layer_cache_bytes": 2 * cache}  # bfloat16
    return fields | {"read_bytes_per_s": read_rate(device_kind)} | packed(events)


if __name__ == "__main__":
    main()
