"""Compiles a decoding program of a small Llama for an absent H200, and prints as JSON what is launched.

`launches` are those of the second of three layers, by the scopes that they come from; `kernels` are this library's, of
all layers and of what follows; `others` are how many kernels of XLA's run between two of these; `copies` are shapes
of copies. `schedules` is how many pairs of tables attention's launches have. The last line is of the program that a
generation compiles, which has several steps without a loop.
"""

import dataclasses
import gc
import itertools
import json
import os
import pathlib
import re

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "0"}
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tree_attn.cache import KVCache
from tree_attn.cache_layer import LayerCache, LayerTuple
from tree_attn.kernels import tuning
from tree_attn.local import mosaic_gpu
from tree_attn.models.llama import Llama, LlamaConfig, by_name, parameters, spread_over
from tree_attn.models.llama.generation.layout import BatchSlots
from tree_attn.models.llama.generation.programs import Programs
from tree_attn.models.llama.generation.sampling import Sampling

H200 = pathlib.Path(__file__).with_name("h200.txtpb").read_text()
CONFIG = LlamaConfig(
    num_layers=3, hidden_size=512, intermediate_size=1024, num_heads=8, num_kv_heads=2, head_dim=64, vocab_size=1024,
    max_position=4096,
)  # fmt: skip
# Of its layers each CTA has a part of every product, so that they can be one launch.
LARGE = dataclasses.replace(CONFIG, hidden_size=2048, intermediate_size=8192, num_heads=32, num_kv_heads=8)
NUM_TOKENS = 8  # of a call, in a loop
UNROLLED = 3  # of a call without one


def main():
    mosaic_gpu.unavailable = lambda: None
    tuning.device_kind = lambda: "NVIDIA H200"
    topology = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x1")
    mesh = Mesh(np.array(topology.devices), "seq")
    for products in ("xla", "mosaic_gpu", "mosaic_gpu_chain"):
        report(CONFIG, products, products, mesh)
    report(LARGE, "mosaic_gpu_chain", "several layers", mesh)
    report_generation(dataclasses.replace(LARGE, vocab_size=128256), mesh)


def report(config: LlamaConfig, products: str, name: str, mesh: Mesh) -> None:
    model, state, cache, of = made(config, products, mesh)
    attention = by_name("single", model.sharding, implementation="mosaic_gpu")
    structure, _ = nnx.split(model)

    def decode(state, tokens, cache):
        def step(carry, _):
            logits, cache = nnx.merge(structure, state).decode(*carry, attention)
            return (logits.argmax(axis=-1).astype(jnp.int32), cache), None

        return jax.lax.scan(step, (tokens, cache), length=NUM_TOKENS)[0]

    traced = jax.jit(decode, donate_argnums=2).trace(state, of(jnp.int32, P(), 1, 1), cache)
    print(json.dumps({"products": name} | launched(traced.lower().compile().as_text())), flush=True)


def report_generation(config: LlamaConfig, mesh: Mesh) -> None:
    model, _, cache, of = made(config, "mosaic_gpu_chain", mesh)
    attention = by_name("single", model.sharding, implementation="mosaic_gpu")
    programs = Programs(model, attention, Sampling(), None, tokens_per_dispatch=UNROLLED)
    slots = BatchSlots(*(of(jnp.int32, P(), 1) for _ in BatchSlots._fields))
    text = programs.compile_decode(slots, (), cache).as_text()
    print(json.dumps({"products": "generation"} | launched(text)), flush=True)


def made(config: LlamaConfig, products: str, mesh: Mesh):
    """Returns a model, its state, a cache, and a function of dtype, partition and size that describes an array."""
    sharding = spread_over(config, mesh, "seq")
    create = parameters.abstract(sharding, jnp.bfloat16)
    of = lambda dtype, spec, *size: jax.ShapeDtypeStruct(size, dtype, sharding=NamedSharding(mesh, spec))
    stored = of(jnp.bfloat16, P(None, "seq"), 1, config.max_position, config.num_kv_heads, config.head_dim)
    layer = LayerCache(key=stored, value=stored, mesh=mesh, axis_name="seq", block_size=1)
    layers = LayerTuple((layer,) * config.num_layers)
    cache = KVCache(arrays=layers, lengths=of(jnp.int32, P(), 1), overflowed=of(bool, P(), 1))
    model = Llama(config, sharding, create, unroll_layers=True, products=products)
    return model, nnx.state(model), cache, of


def launched(text: str) -> dict:
    launches, kernels, copies, order, schedules = [], [], [], [], set()
    for computation in re.split(r"\n\n", text):
        if re.match(r"%?(fused|wrapped|command_buffer)", computation.lstrip()):
            continue
        for line in computation.splitlines():
            if (scope := re.search(r"layer_1/([\w/]+)", line)) and re.search(r" (fusion|custom-call)\(", line):
                launches.append(scope[1])
            kernels += (found := re.findall(r" custom-call\(.*?(\w+)/mpmd_map\"", line))
            order += found or re.findall(r" (fusion)\(", line)
            if found == ["lean_attention"]:
                _, _, _, *tables = re.search(r" custom-call\((.*?)\)", line)[1].split(", ")  # query, key and value
                schedules.add(tuple(tables[:2]))
            copies += re.findall(r"= (\S+?)(?:\{\S*)? copy\(", line)
    ours = [place for place, name in enumerate(order) if name != "fusion"]
    others = [after - before - 1 for before, after in itertools.pairwise(ours)]
    found = {"launches": launches, "kernels": kernels, "others": others, "copies": copies}
    return found | {"schedules": len(schedules)}


if __name__ == "__main__":
    gc.disable()  # tracing makes so many objects that a twentieth of the time would go to looking through them
    main()
