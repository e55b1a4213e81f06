"""Times a Llama's decoding on one GPU by XLA's options, and by the layout of its weight kernels.

    python3 scripts/tune_decode.py products --out docs/results/llama_h200/products_7b.jsonl
    python3 scripts/tune_decode.py options --out docs/results/llama_h200/xla_options_7b.jsonl

products: the profiler times the products of layers of Llama 2's 7B shape, and the operations between them. Query, key
and value are apart or one weight kernel, and so are gate and up. options: the clock times a step of that model with
fewer layers, whose sequences share a prompt. The field `told` names XLA's additional options (`OPTIONS`), and `rows`
counts sequences. The file gets one JSON row per case.
"""

import argparse
import dataclasses
import itertools
import pathlib
import statistics

OPTIONS = {
    "": {},
    "no Triton": {"xla_gpu_enable_triton_gemm": False},
    "merge products": {"xla_gpu_dot_merger_threshold_mb": 1 << 20},
    "exhaustive": {"xla_gpu_exhaustive_tiling_search": True},
    "CONCURRENT": {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"},
    "LHS": {"xla_gpu_command_buffer_scheduling_mode": "LHS"},
    "launch early": {"xla_gpu_enable_pdl_launch": True},
    "unroll loops": {"xla_gpu_command_buffer_unroll_loops": True},
    "no split": {"xla_gpu_experimental_force_split_k": 1},
    "cuDNN": {"xla_gpu_cudnn_gemm_fusion_level": 3},
    "fusion v2": {"xla_gpu_experimental_gemm_fusion_v2": True},
    "PDL": {"xla_gpu_enable_pdl": True},
}
LAYERS = {"products": 4, "options": 8}
CALLS = 32


def main() -> None:
    """Times every case and writes its row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("products", "options"))
    parser.add_argument("--config", default="llama-2-7b", help="a published shape")
    parser.add_argument("--batch", "--rows", default="1,16,64,256", help="sequences, e.g. 1,16")
    parser.add_argument("--context", type=int, default=8192, help="tokens of the prompt, of options")
    parser.add_argument("--options", "--told", help="names in OPTIONS, comma-separated (default: the part's own)")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="JSONL file, appended to")
    args = parser.parse_args()
    import jax

    from tree_attn.commands.session import choose_devices
    from tree_attn.kernels.launch_order import KERNELS_ARE_RECORDED
    from tree_attn.measure import provenance
    from tree_attn.measure.rows import MeasuredRows
    from tree_attn.models.llama.presets import preset

    side_by_side = "" if jax.__version_info__ >= KERNELS_ARE_RECORDED else ",CONCURRENT"
    parts = {"products": (products, ",no Triton"), "options": (options, side_by_side)}
    cases, usual_names = parts[args.part]
    config = dataclasses.replace(preset(args.config), num_layers=LAYERS[args.part])
    names = (usual_names if args.options is None else args.options).split(",")
    writer, origin = MeasuredRows(args.out), provenance.of_script(choose_devices(1))
    for batch, name in itertools.product(map(int, args.batch.split(",")), names):
        for found in cases(config, batch, args.context, OPTIONS[name]):
            row = {"config": args.config, "layers": config.num_layers, "rows": batch, "told": name} | found
            writer.append(row | provenance.clocks() | origin)
            print({key: value for key, value in (row | {"kernels": None}).items() if key in ("rows", "told", *found)})


def products(config, batch: int, context: int, xla_options: dict):
    """Yields rows `{stored, us_per_layer, kernels}`; `context` is not read."""
    import jax
    import jax.numpy as jnp

    from tree_attn.measure.device_time import by_name, device_events
    from tree_attn.models.llama import parameters
    from tree_attn.models.llama.layers import RMSNorm

    wide, narrow = config.intermediate_size, config.hidden_size
    shapes = {"query": narrow, "key": narrow, "value": narrow, "output": narrow, "gate": wide, "up": wide}
    shapes = {name: (size, narrow) for name, size in shapes.items()} | {"down": (narrow, wide)}
    keys = iter(jax.random.split(jax.random.key(0), config.num_layers * len(shapes) + 1))
    draw = lambda shape: (jax.random.normal(next(keys), shape) * shape[-1] ** -0.5).astype(jnp.bfloat16)
    apart = [{name: draw(shape) for name, shape in shapes.items()} for _ in range(config.num_layers)]
    of_one = (("query", "key", "value"), ("gate", "up"))
    together = [{names: jnp.concatenate([layer[name] for name in names]) for names in of_one} for layer in apart]
    scale = parameters.Parameter(name="scale", shape=(narrow,), axes=("embed",))
    norm = RMSNorm(scale, config.rms_norm_eps, lambda parameter: jnp.ones(parameter.shape, jnp.bfloat16))

    def run(x, apart, together):
        for layer, merged in zip(apart, together or [None] * len(apart), strict=True):
            multiply = lambda x, kernel: jnp.einsum("bd,fd->bf", x, kernel)

            def multiplied(x, names, layer=layer, merged=merged, multiply=multiply):
                if merged is None:
                    return [multiply(x, layer[name]) for name in names]
                return jnp.split(multiply(x, merged[names]), len(names), axis=1)

            query, key, value = multiplied(norm(x), of_one[0])
            x = x + multiply(query * key + value, layer["output"])
            gate, up = multiplied(norm(x), of_one[1])
            x = x + multiply(jax.nn.silu(gate) * up, layer["down"])
        return x

    x = draw((batch, narrow))
    for stored, merged in (("apart", None), ("together", together)):
        compiled = jax.jit(run).lower(x, apart, merged).compile(compiler_options=xla_options)
        call = lambda compiled=compiled, merged=merged: jax.block_until_ready(compiled(x, apart, merged))
        for _ in range(3):
            call()
        events = device_events(lambda call=call: [call() for _ in range(CALLS)])
        if not events:
            raise RuntimeError("the profiler saw no device event: this needs a GPU")
        kernels = by_name(events, CALLS * config.num_layers)
        yield {"stored": stored, "us_per_layer": sum(us * n for us, n in kernels.values()), "kernels": kernels}


def options(config, batch: int, context: int, xla_options: dict):
    """Yields one row, `{context, new_tokens, per_token_ms_median}`."""
    import jax

    from tree_attn.commands import session
    from tree_attn.models.llama import Generator, Llama, by_name, parameters

    new_tokens = 265  # 32 calls of 8 after the first, which is left out
    config = dataclasses.replace(config, max_position=context + new_tokens)
    place = session.Place(devices=session.choose_devices(1), has_two_axes=False)
    sharding = place.sharding(config)
    model = Llama(config, sharding, parameters.random(sharding, place.dtype))
    xla_options = xla_options if sharding.is_on_gpus else {}
    generator = Generator(model, by_name("single", sharding), xla_options=xla_options)
    prompts = [[i % config.vocab_size for i in range(context)]] * batch
    for _ in generator.stream(prompts, new_tokens):  # compiles, and lets clocks rise
        pass
    steps = [step.seconds for step in generator.stream(prompts, new_tokens)]
    jax.clear_caches()
    first = generator.tokens_per_dispatch + 1
    median = statistics.median(steps[first:])
    yield {"context": context, "new_tokens": new_tokens, "per_token_ms_median": 1e3 * median}


if __name__ == "__main__":
    main()
