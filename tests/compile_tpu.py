"""Compiles decoding steps for absent TPUs, and prints a line of JSON for each.

The argument is a topology as libtpu names it, such as v5e:2x4. It is a program of its own: libtpu reads its settings
from the environment when it is loaded, and no other test should meet a second platform.
"""

import functools
import json
import os
import sys

# Only the compiler runs: without these libtpu looks for a TPU, and asks its host for the slice that it belongs to.
os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "JAX_ENABLE_COMPILATION_CACHE": "0"}
os.environ |= {"TPU_ACCELERATOR_TYPE": "v5litepod-8", "TPU_WORKER_HOSTNAMES": "localhost"}
# There is no TPU that two processes could not share, and its logs would stay in /tmp.
os.environ |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_LOG_DIR": "disabled"}

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tree_attn import make_mesh, tree_decode
from tree_attn.cost.step import DecodeStep
from tree_attn.measure import hlo, hlo_text
from tree_attn.measure.memory import bytes_per_device, compiled_memory
from tree_attn.models.llama import Llama, LlamaConfig, by_name, parameters, spread_over
from tree_attn.models.llama.generation.layout import BatchSlots, Layout
from tree_attn.models.llama.generation.programs import Programs
from tree_attn.models.llama.generation.sampling import Sampling
from tree_attn.models.llama.storage import empty_cache
from tree_attn.ring_baseline import ring_decode

# A shard's keys are 134 MB: more than VMEM holds, so that what is read is read from HBM.
KEYS_PER_DEVICE = 65_536
CONFIG = LlamaConfig(
    num_layers=2,
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=32_000,
    max_position=1 << 20,
)
DECODES = {
    "gather": functools.partial(tree_decode, reduction="gather"),
    "allreduce": functools.partial(tree_decode, reduction="allreduce"),
    "overlapped": functools.partial(ring_decode, variant="overlapped"),
    "public": functools.partial(ring_decode, variant="public"),
}


def make_step(num_devices: int) -> DecodeStep:
    heads = dict(num_heads=CONFIG.num_heads, num_kv_heads=CONFIG.num_kv_heads, head_dim=CONFIG.head_dim)
    return DecodeStep(batch=1, num_keys=KEYS_PER_DEVICE * num_devices, dtype="bfloat16", n_devices=num_devices, **heads)


def compile_attention(decode, mesh: Mesh) -> jax.stages.Compiled:
    step = make_step(mesh.size)
    shape = (1, step.num_keys, step.num_kv_heads, step.head_dim)
    query = jax.ShapeDtypeStruct((1, 1, step.num_heads, step.head_dim), step.dtype, sharding=NamedSharding(mesh, P()))
    key = jax.ShapeDtypeStruct(shape, step.dtype, sharding=NamedSharding(mesh, P(None, "seq")))
    return jax.jit(functools.partial(decode, axis_name="seq", mesh=mesh)).lower(query, key, key).compile()


def compile_llama(mesh: Mesh, **options) -> tuple[jax.stages.Compiled, dict[str, int]]:
    """Returns a decoding step, and the bytes of its weights and of its cache on a device."""
    sharding = spread_over(CONFIG, mesh)
    model = Llama(CONFIG, sharding, parameters.abstract(sharding, jnp.bfloat16), **options)
    attention = by_name("tree", sharding)
    layout = Layout(num_shards=mesh.size, slot_multiple=attention.slot_multiple, prefill_chunk=None)
    programs = Programs(model, attention, Sampling(), layout, tokens_per_dispatch=1)
    sizes = dict(batch=1, capacity=KEYS_PER_DEVICE * mesh.size, dtype=jnp.bfloat16, window=None)
    cache = jax.eval_shape(lambda: empty_cache(CONFIG, sharding, stacks_layers=not model.unroll_layers, **sizes))
    cache = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)), cache, cache.specs()
    )
    number = jax.ShapeDtypeStruct((1,), jnp.int32, sharding=sharding.named("batch"))
    compiled = programs.compile_decode(BatchSlots(number, number, number), (), cache)
    return compiled, {"weights": bytes_per_device(programs.parameters), "cache": bytes_per_device(cache)}


def reads_beside_transfers(text: str, shard_bytes: int) -> list[int]:
    """Returns, for each transfer, how many operations the schedule has beside it that read a shard."""
    module = hlo_text.parse(text)
    entry = module.computations[module.entry]
    order = {name: place for place, name in enumerate(entry)}
    readers = [
        order[name]
        for name, instruction in entry.items()
        if instruction.opcode == "fusion"
        and any(hlo_text.type_bytes(entry[operand].type) == shard_bytes for operand in instruction.operands)
    ]
    ends = {x.operands[0]: order[name] for name, x in entry.items() if x.opcode == "collective-permute-done"}
    return [sum(order[start] < reader < end for reader in readers) for start, end in ends.items()]


def num_links(devices) -> int:
    """Returns the links that a ring of the devices crosses; links around the ends of the grid are not counted on."""
    distance = lambda one, other: sum(abs(a - b) for a, b in zip(one.coords, other.coords, strict=True))
    return sum(map(distance, devices, [*devices[1:], devices[0]]))


def report(name: str, compiled: jax.stages.Compiled, **facts) -> None:
    memory, cost = compiled_memory(compiled), compiled.cost_analysis()
    sent = [
        [one.opcode, one.bytes_payload, one.bytes_sent_per_device, one.count]
        for one in hlo.collectives(compiled.as_text())
    ]
    facts |= {"sent": sent, "accessed_bytes": cost["bytes accessed"]}
    facts |= {field: getattr(memory, field) for field in ("argument_bytes", "temp_bytes", "alias_bytes")}
    print(json.dumps({"name": name, **facts}), flush=True)


def main() -> None:
    devices = topologies.get_topology_desc(platform="tpu", topology_name=sys.argv[1]).devices
    mesh = make_mesh({"seq": len(devices)}, devices)
    shard_bytes = make_step(mesh.size).key_value_bytes_per_device // 2
    for name, decode in DECODES.items():
        compiled = compile_attention(decode, mesh)
        is_ring = name == "overlapped"
        reads = {"reads_beside": reads_beside_transfers(compiled.as_text(), shard_bytes)} if is_ring else {}
        report(name, compiled, **reads)
    compiled, sizes = compile_llama(mesh)
    report("llama", compiled, **sizes)
    links = {"links": num_links(mesh.devices.tolist()), "links_in_order": num_links(devices)}
    print(json.dumps({"name": "devices", "kind": devices[0].device_kind, "count": len(devices), **links}))


if __name__ == "__main__":
    main()
