"""Checks continuous batching on this machine's first GPU: each sequence of a queue beside its prompt by itself.

    python3 scripts/check_queue.py --out docs/results/llama_h200/continuous_batching.jsonl

Weights are random. Batches of other sizes round differently, so tokens may differ where two logits are nearly equal,
and the texts differ from there on. The row of a prompt has the number of equal tokens, and the largest difference of a
logit up to the first token that differs. It also has the gap between that token's logit and the best. A sequence passes
if the gap is at most twice the difference, because both logits may have moved.
"""

import argparse
import pathlib
import sys
import time

import numpy as np

LENGTHS = (50, 3000, 700, 1, 4000, 1200, 64, 65, 2500, 129, 900, 17)


def main() -> int:
    """Runs the queue twice (the first time compiles) and each prompt by itself; returns 1 if a sequence is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="llama-3.2-1b", help="a published shape")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)), help="tokens of each prompt")
    parser.add_argument("--new-tokens", type=int, default=40)
    parser.add_argument("--max-batch", type=int, default=4)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="JSONL file, appended to")
    args = parser.parse_args()
    from tree_attn.commands import session
    from tree_attn.measure import provenance
    from tree_attn.measure.rows import MeasuredRows
    from tree_attn.models.llama import Generator, Llama, by_name, parameters
    from tree_attn.models.llama.generation.queue import stream_queue
    from tree_attn.models.llama.presets import preset

    config, place = preset(args.config), session.Place(devices=session.choose_devices(1), has_two_axes=False)
    sharding, rng = place.sharding(config), np.random.default_rng(0)
    generator = Generator(
        Llama(config, sharding, parameters.random(sharding, place.dtype)), by_name("single", sharding)
    )
    prompts = [rng.integers(0, config.vocab_size, int(length)).tolist() for length in args.lengths.split(",")]
    for _ in range(2):
        start = time.perf_counter()
        outputs = [[] for _ in prompts]
        for step in stream_queue(generator, prompts, args.new_tokens, max_batch=args.max_batch):
            for batch_slot, sequence in enumerate(step.sequences):
                if sequence is not None:
                    outputs[sequence].append(
                        (int(step.tokens[batch_slot]), np.asarray(step.logits[batch_slot], np.float32))
                    )
        queue_s = time.perf_counter() - start
    failed, writer, origin = 0, MeasuredRows(args.out), provenance.of_script(list(place.devices))
    for prompt, of_queue in zip(prompts, outputs):
        steps = generator.stream([prompt], args.new_tokens)
        row = _compared(of_queue, [(int(step.tokens[0]), np.asarray(step.logits[0], np.float32)) for step in steps])
        failed += not row["passed"]
        row |= dict(config=args.config, prompt_tokens=len(prompt), max_batch=args.max_batch, queue_s=queue_s)
        writer.append(row | origin)
    print(f"{len(prompts)} sequences in {queue_s:.2f} s, {failed} failed")
    return int(failed > 0)


def _compared(of_queue, alone) -> dict:
    """Returns a row's fields: tokens and logits of one sequence by both ways, up to the first token that differs."""
    same = next((i for i, (a, b) in enumerate(zip(of_queue, alone)) if a[0] != b[0]), len(alone))
    until = min(same + 1, len(alone))
    error = max(float(np.abs(a[1] - b[1]).max()) for a, b in zip(of_queue[:until], alone[:until]))
    gap = 0.0 if same == len(alone) else float(alone[same][1].max() - alone[same][1][of_queue[same][0]])
    row = dict(new_tokens=len(alone), same_tokens=same, max_abs_error=error, gap_at_first_other=gap)
    return row | dict(
        largest_logit=float(np.abs(alone[0][1]).max()), passed=len(of_queue) == len(alone) and gap <= 2 * error
    )


if __name__ == "__main__":
    sys.exit(main())
