"""Profiles a step of a Llama's decoding: the times of its kernels.

    python3 scripts/profile_llama.py --config llama-2-7b --context 8192 --samples 16,64,256 --out FILE

Weights are random, all samples share one prompt, and one GPU runs a few layers, since all layers are alike. The file
gets one JSON row per case: `kernels` are name -> microseconds of one launch, and launches a step, by falling time;
`us_per_step` is their sum. The profiler runs no CUDA graphs: gaps between kernels are not those of a run, and no row
has them.
"""

import argparse
import dataclasses
import itertools
import pathlib


def main() -> None:
    """Profiles each case and writes its row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="llama-3.1-8b", help="a published shape")
    parser.add_argument("--context", type=int, default=8192, help="tokens of the prompt")
    parser.add_argument("--samples", default="1", help="sequences, e.g. 1,16")
    parser.add_argument("--new-tokens", type=int, default=65)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="JSONL file, appended to")
    args = parser.parse_args()
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
    generator = Generator(
        Llama(config, sharding, parameters.random(sharding, place.dtype)), by_name("single", sharding)
    )
    writer, origin = MeasuredRows(args.out), provenance.of_script(list(place.devices))
    prompt = [i % config.vocab_size for i in range(args.context)]
    for samples in map(int, args.samples.split(",")):
        kernels = profile(generator, [prompt] * samples, args.new_tokens)
        row = {"config": args.config, "context": args.context, "samples": samples, "new_tokens": args.new_tokens}
        row |= {"layers": args.layers, "us_per_step": sum(us * count for us, count in kernels.values())}
        row |= {"kernels": kernels}
        writer.append(row | provenance.clocks() | origin)
        print(f"{samples:,} x {args.context:,}: {row['us_per_step']:,.0f} us a step of {args.layers} layers")
        for name, (us, count) in itertools.islice(kernels.items(), 15):
            print(f"{us * count / args.layers:10.2f} us a layer in {count / args.layers:5.2f} launches  {name}")


def profile(generator, prompts, new_tokens: int) -> dict[str, tuple[float, float]]:
    """Returns kernels of the steps after the first token: name -> (microseconds of one launch, launches a step)."""
    from tree_attn.measure.device_time import by_name, device_events

    for _ in generator.stream(prompts, new_tokens):  # compiles, and lets clocks rise
        pass
    steps = generator.stream(prompts, new_tokens)
    next(steps)
    events = device_events(lambda: list(steps))
    if not events:
        raise RuntimeError("the profiler saw no device event: this needs a GPU")
    return by_name(events, new_tokens - 1)


if __name__ == "__main__":
    main()
