"""Measures the error of narrow caches in SmolLM2's next tokens: logits and greedy choices beside the float32 model's.

    python3 scripts/cache_error.py --text bible.txt --out docs/results/cache_error_smollm2/results.jsonl

The texts are eight questions with the 128 tokens that the float32 model answers, and passages of `--text` of 1,024
tokens with the 128 that follow. Contexts are read in the model's dtype. The tokens after them attend to the cache, and
are the same for every model and cache.

Rows have, over all those tokens, the share whose most likely token is the same (`greedy_agreement`), and the mean
Kullback-Leibler divergence. They also have the root mean square error of the log-probabilities, over tokens weighted by
the float32 model's probabilities.
"""

import argparse
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tree_attn import make_mesh
from tree_attn.measure import provenance
from tree_attn.measure.rows import MeasuredRows
from tree_attn.models.llama import Generator, Llama, by_name, generate, parameters, spread_over
from tree_attn.models.llama.checkpoint import hub
from tree_attn.models.llama.checkpoint.open import open_checkpoint
from tree_attn.models.llama.generation.int8_scales import MARGIN, cache_scales
from tree_attn.models.llama.storage import empty_cache

TAIL = 128
CONTEXT = 1024
QUESTIONS = (
    "Name three rivers in Europe and say where they end.",
    "Explain why the sky is blue to a child.",
    "Write a short story about a lighthouse keeper.",
    "How do I boil an egg?",
    "What is the difference between a virus and a bacterium?",
    "Give me a plan for a weekend in Lisbon.",
    "Translate 'good morning' into French, German and Italian.",
    "Who was Ada Lovelace and what is she known for?",
)
# Model's dtype, cache's dtype, and for int8 the margin of its scales and the tokens that they were measured over.
CASES = (
    ("float32", "float8_e4m3fn", None, None),
    *(("float32", "int8", margin, "random tokens") for margin in (0.75, 1.0, MARGIN, 1.5, 2.0)),
    ("float32", "int8", MARGIN, "the text's beginning"),
    ("bfloat16", None, None, None),
    ("bfloat16", "float8_e4m3fn", None, None),
    ("bfloat16", "int8", MARGIN, "random tokens"),
)


def main() -> None:
    """Measures every case and appends its row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=pathlib.Path, required=True, help="English text, long enough for the passages")
    parser.add_argument("--passages", type=int, default=2)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="JSONL file, appended to")
    args = parser.parse_args()
    writer = MeasuredRows(args.out)
    checkpoint = open_checkpoint(hub.resolve(hub.SMOLLM2))
    sharding = spread_over(checkpoint.config, make_mesh({"seq": 1}, jax.devices()[:1]), "seq")
    wide = checkpoint.load(sharding, jnp.float32)
    attention = by_name("single", sharding)
    text = checkpoint.tokenizer.encode(args.text.read_text(), add_special_tokens=False)
    batches = [_answers(wide, attention, checkpoint.tokenizer), _passages(text, args.passages)]
    exact = [_log_p(wide, attention, batch) for batch in batches]
    models = {"float32": wide, "bfloat16": Llama(wide.config, sharding, _as_bfloat16(wide))}
    for model_dtype, cache_dtype, margin, measured_over in CASES:
        model, scales = models[model_dtype], {}
        if margin is not None:
            tokens = None if measured_over == "random tokens" else np.array(text[:512])
            scales = cache_scales(model, attention, tokens=tokens, margin=margin)
        narrow = [_log_p(model, attention, batch, cache_dtype, scales) for batch in batches]
        row = {"model_dtype": model_dtype, "cache_dtype": cache_dtype or model_dtype}
        row |= {"margin": margin, "scales_from": measured_over, "passages": args.passages}
        row |= {"answers": _errors(narrow[0], exact[0]), "passages_of_text": _errors(narrow[1], exact[1])}
        row |= provenance.of_script(jax.devices()[:1])
        print(json.dumps(row))
        writer.append(row)


def _answers(model: Llama, attention, tokenizer) -> list[tuple[list[int], list[int]]]:
    """Returns questions, and the first tokens of the model's answers to them."""
    prompts = [tokenizer.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    answers = generate(Generator(model, attention), prompts, TAIL)
    return [(prompt, answer.new_ids) for prompt, answer in zip(prompts, answers, strict=True)]


def _passages(text: list[int], count: int) -> list[tuple[list[int], list[int]]]:
    starts = np.linspace(CONTEXT, len(text) - CONTEXT - TAIL, count).astype(int)  # scales were not measured over these
    return [(text[i : i + CONTEXT], text[i + CONTEXT : i + CONTEXT + TAIL]) for i in starts]


def _as_bfloat16(model: Llama):
    moved = parameters.moved(model, model.sharding)
    return lambda parameter: moved(parameter).astype(jnp.bfloat16)


def _log_p(model: Llama, attention, batch, cache_dtype: str | None = None, scales: dict | None = None) -> np.ndarray:
    """Returns log-probabilities of the token after each of the tail's, `[B, TAIL, V]`."""
    structure, weights = nnx.split(model)
    longest = max(len(context) for context, _ in batch)
    contexts, lengths = np.zeros((len(batch), longest), np.int32), np.array([len(context) for context, _ in batch])
    for padded, (context, _) in zip(contexts, batch, strict=True):
        padded[: len(context)] = context

    @jax.jit
    def run(weights, contexts, lengths, tails, cache):
        model = nnx.merge(structure, weights)
        _, cache = model.prefill(contexts, lengths, cache, attention)
        return jax.nn.log_softmax(model.decode(tails, cache, attention)[0], axis=-1)

    dtype = jnp.dtype(cache_dtype or model.embedding[...].dtype)
    sizes = dict(batch=len(batch), capacity=longest + TAIL, dtype=dtype)
    cache = empty_cache(model.config, model.sharding, **sizes, **(scales or {}))
    tails = np.array([tail for _, tail in batch], np.int32)
    return np.asarray(run(weights, contexts, lengths.astype(np.int32), tails, cache))


def _errors(narrow: np.ndarray, exact: np.ndarray) -> dict[str, float]:
    probabilities, difference = np.exp(exact), exact - narrow
    return {
        "tokens": int(np.prod(exact.shape[:2])),
        "greedy_agreement": float((narrow.argmax(-1) == exact.argmax(-1)).mean()),
        "kl_nats": float((probabilities * difference).sum(-1).mean()),
        "log_p_rms": float(np.sqrt((probabilities * difference**2).sum(-1).mean())),
    }


if __name__ == "__main__":
    main()
