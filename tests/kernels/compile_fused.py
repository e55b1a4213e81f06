"""Compiles exchanges within kernels for four absent H200s: states, sums, gathers, attention, a Llama.

Prints the collectives and kernels of the programs as lines of JSON.

A program of its own, since JAX's backends are chosen once per process, and ptxas reports on the process's output.
"""

import functools
import gc
import itertools
import json
import os
import pathlib
import re

os.environ |= {"JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_PTXAS": "1", "JAX_ENABLE_COMPILATION_CACHE": "0"}
# XLA's own kernels beside ours are compiled once each, for no GPU is here to time candidates on.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tree_attn import SoftmaxState, tree_decode
from tree_attn.local import mosaic_gpu
from tree_attn.models.llama import model
from tree_attn.reduce import peer_memory, reduce_state
from tree_attn.reduce.activations import gather_activations, sum_activations

NUM_TOKENS = 4096
H200 = pathlib.Path(__file__).with_name("h200.txtpb").read_text()


def main():
    peer_memory.peer_memory = lambda groups, num_bytes: 0x5D00_0000_0000
    peer_memory.check_platform = lambda devices: None
    topology = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x4")
    mesh = Mesh(np.array(topology.devices), "seq")
    shape = lambda *sizes, dtype: jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, P()))
    for dtype, way in itertools.product((jnp.bfloat16, jnp.float32), ("merge", "sum", "gather")):
        state = SoftmaxState(shape(2, 3, 16, 128, dtype=dtype), shape(2, 3, 16, dtype=jnp.float32))
        on_device = {
            "merge": lambda state: reduce_state(state, ("seq",), "fused", mesh),
            "sum": lambda state: sum_activations(state.out, ("seq",), mesh),
            "gather": lambda state: gather_activations(state.out, ("seq",), mesh),
        }[way]
        program = jax.shard_map(on_device, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        report(jax.jit(program).trace(state).lower().compile().as_text())
    lengths = {"key_value_seq_lengths": shape(1, dtype=jnp.int32)}
    causal, float8 = lengths | {"is_causal": True}, {"stored_dtype": jnp.float8_e4m3fn}
    # Few columns, so that two CTAs share an SM; more; and too many accumulators to end in an exchange.
    report(step_of_attention(mesh, 16, 1, {}))
    report(step_of_attention(mesh, 2, 4, lengths))
    report(step_of_attention(mesh, 1, 8, causal, num_queries=2))
    report(step_of_attention(mesh, 2, 8, {}, **float8))
    report(step_of_attention(mesh, 1, 8, causal, num_queries=4))
    report(step_of_attention(mesh, 1, 8, causal, num_queries=4, head_dim=64))
    report(step_of_attention(mesh, 2, 8, causal, num_queries=2, head_dim=256))
    report(step_of_attention(mesh, 2, 8, {}, num_queries=2, head_dim=80))
    report(step_of_attention(mesh, 2, 8, {}, num_queries=8))
    report(step_of_attention(mesh, 2, 8, causal, num_queries=2, head_dim=256, **float8))
    decode, _ = programs_of_a_llama(mesh, 2)
    text = decode().compile().as_text()
    report(text)
    for products in ("mosaic_gpu", "mosaic_gpu_chain"):
        report(programs_of_a_llama(mesh, 2, products)[0]().compile().as_text())
    put_back = text.count(" dynamic-update-slice(")
    growth = prefill_bytes(mesh, 6) - prefill_bytes(mesh, 2)
    model._write_first = lambda *both: both
    without = prefill_bytes(mesh, 6) - prefill_bytes(mesh, 2)
    found = {"put_back": put_back, "growth": growth, "growth_where_writes_are_put_off": without}
    print(json.dumps(found), flush=True)


def step_of_attention(
    mesh: Mesh, num_kv_heads: int, group: int, options: dict, *, num_queries=1, head_dim=128, stored_dtype=jnp.bfloat16
) -> str:
    """Compiles a step of `tree_decode` by the lean kernel; it ends in the exchange if it has few columns."""
    shape = lambda spec, dtype, *sizes: jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, spec))
    stored = shape(P(None, "seq"), stored_dtype, 1, 81_920, num_kv_heads, head_dim)
    arrays = {name: x for name, x in options.items() if isinstance(x, jax.ShapeDtypeStruct)}
    static = {name: x for name, x in options.items() if name not in arrays}
    mosaic_gpu.unavailable = lambda: None
    static |= dict(axis_name="seq", mesh=mesh, block_size=None, reduction="fused", implementation="mosaic_gpu")
    step = functools.partial(tree_decode, **static)
    operands = shape(P(), jnp.bfloat16, 1, num_queries, num_kv_heads * group, head_dim), stored, stored
    return jax.jit(step).trace(*operands, **arrays).lower().compile().as_text()


def programs_of_a_llama(mesh: Mesh, num_layers: int, products: str = "xla"):
    """Returns functions that lower a decoding step and a prefill in chunks, of a Llama that the devices share."""
    from flax import nnx

    from tree_attn.cache import KVCache
    from tree_attn.cache_layer import LayerCache, LayerTuple
    from tree_attn.models.llama import Llama, LlamaConfig, by_name, parameters, spread_over

    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_layers=num_layers, num_heads=8, num_kv_heads=4,
        head_dim=64, max_position=4096,
    )  # fmt: skip
    sharding = spread_over(config, mesh, "seq")
    create = parameters.abstract(sharding, jnp.bfloat16)
    structure, state = nnx.split(Llama(config, sharding, create, unroll_layers=True, products=products))
    attention = by_name("tree", sharding, implementation="xla", reduction="fused")
    shape = lambda dtype, spec, *sizes: jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, spec))
    stored = shape(jnp.bfloat16, P(None, "seq"), 1, NUM_TOKENS, 4, 64)
    layer = LayerCache(key=stored, value=stored, mesh=mesh, axis_name="seq", block_size=1)
    counts = {"lengths": shape(jnp.int32, P(), 1), "overflowed": shape(bool, P(), 1)}
    cache = KVCache(arrays=LayerTuple((layer,) * num_layers), **counts)
    of_state = lambda state: nnx.merge(structure, state)
    decode = lambda state, tokens, cache: of_state(state).decode(tokens, cache, attention)
    prefill = lambda state, tokens, lengths, cache: of_state(state).prefill(
        tokens, lengths, cache, attention, chunk=NUM_TOKENS // 4
    )
    tokens = shape(jnp.int32, P(), 1, 1), shape(jnp.int32, P(None, "seq"), 1, NUM_TOKENS)
    return (
        lambda: jax.jit(decode, donate_argnums=2).trace(state, tokens[0], cache).lower(),
        lambda: jax.jit(prefill, donate_argnums=3).trace(state, tokens[1], counts["lengths"], cache).lower(),
    )


def prefill_bytes(mesh: Mesh, num_layers: int) -> int:
    return programs_of_a_llama(mesh, num_layers)[1]().compile().memory_analysis().temp_size_in_bytes


def report(text: str) -> None:
    names = r"all-reduce|all-gather|all-to-all|reduce-scatter|collective-\w+"
    collectives = re.findall(rf"= .*(?:{names})(?:-start)?\(", text)
    kernels = re.findall(r"custom_call_target=\"mosaic_gpu", text)
    print(json.dumps({"collectives": len(collectives), "kernels": len(kernels)}), flush=True)


if __name__ == "__main__":
    gc.disable()  # tracing makes so many objects that a twentieth of the time would go to looking through them
    main()
