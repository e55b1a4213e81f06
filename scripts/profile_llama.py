"""What a step of a Llama's decoding is made of: its kernels' times, by the profiler.

    python3 scripts/profile_llama.py --config llama-2-7b --context 8192 --samples 16,64,256 --out FILE

Random weights and one prompt that all samples share, on one GPU; a few layers do, since all are alike. One JSON row per
case: `kernels` are name -> microseconds of one launch and launches a step, what takes longest first; `us_per_step` is
their sum. The profiler runs no CUDA graphs, so gaps between kernels are not those of a run: nothing is said of them.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import sys


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
    from tree_attn.models.llama import Generator, Llama, by_name, parameters
    from tree_attn.models.llama.presets import preset

    config = dataclasses.replace(
        preset(args.config), num_layers=args.layers, max_position=args.context + args.new_tokens
    )
    place = session.Place(devices=session.choose_devices(1), two_levels=False)
    sharding = place.sharding(config)
    generator = Generator(
        Llama(config, sharding, parameters.random(sharding, place.dtype)), by_name("single", sharding)
    )
    prompt = [i % config.vocab_size for i in range(args.context)]
    for samples in map(int, args.samples.split(",")):
        kernels = profile(generator, [prompt] * samples, args.new_tokens)
        row = {"config": args.config, "context": args.context, "samples": samples, "new_tokens": args.new_tokens}
        row |= {"layers": args.layers, "us_per_step": sum(us * count for us, count in kernels.values())}
        row |= {"kernels": kernels}
        row |= {"hardware": provenance.hardware(list(place.devices)), "versions": provenance.versions()}
        row |= {"git_commit": provenance.git_commit(), "command": " ".join(["python3", *sys.argv])}
        with args.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{samples:,} x {args.context:,}: {row['us_per_step']:,.0f} us a step of {args.layers} layers")
        for name, (us, count) in itertools.islice(kernels.items(), 15):
            print(f"{us * count / args.layers:10.2f} us a layer in {count / args.layers:5.2f} launches  {name}")


def profile(generator, prompts, new_tokens: int) -> dict[str, tuple[float, float]]:
    """Kernels of the steps after the first token: name -> (microseconds of one launch, launches a step)."""
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
