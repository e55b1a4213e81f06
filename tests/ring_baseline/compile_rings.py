"""Compiles rings for four absent H200s, and prints what lies between start and end of each transfer, as JSON lines.

A program of its own, since JAX's backends are chosen once per process. The attention is XLA's: cuDNN's cannot be
compiled without a GPU.
"""

import functools
import json
import os
import pathlib
import re

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "0"}
# No GPU is here to time candidates on.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tree_attn.measure import links
from tree_attn.ring_baseline import hops, ring_attention, ring_decode

H200 = (pathlib.Path(__file__).parents[1] / "kernels" / "h200.txtpb").read_text()
TOKENS = 65_536
WORK = ("fusion", "custom-call", "while", "conditional", "call", "dot")


def main():
    links.join_transfers()
    hops.default_platform = lambda: "gpu"  # hops are unrolled there
    topology = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x4")
    mesh = Mesh(np.array(topology.devices), "seq")
    shape = lambda spec, *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
    where = dict(axis_name="seq", mesh=mesh, implementation="xla")
    stored = shape(P(None, "seq"), 1, TOKENS, 8, 64)  # K and V of a shard have 34 MB
    for rotation in ("one_way", "joint"):
        decode = functools.partial(ring_decode, rotation=rotation, block_size=None, **where)
        report(f"decode {rotation}", decode, shape(P(), 1, 1, 8, 64), stored, stored)
    prompt = shape(P(None, "seq"), 1, TOKENS // 64, 8, 64)
    for block_size in (1, "zigzag"):
        attend = functools.partial(ring_attention, rotation="one_way", block_size=block_size, **where)
        report(f"prompt {block_size}", attend, *3 * (prompt,))
        gradient = jax.grad(lambda *arrays, attend=attend: attend(*arrays).astype(jnp.float32).sum(), (0, 1, 2))
        report(f"gradient {block_size}", gradient, *3 * (prompt,))


def report(name: str, program, *shapes) -> None:
    """Prints how many transfers the device waits for, and what runs between start and end of each of the others."""
    text = jax.jit(program).trace(*shapes).lower().compile().as_text()
    waited = len(re.findall(r" collective-permute\(", text))
    print(json.dumps({"name": name, "waited": waited, "beside": beside(text)}), flush=True)


def beside(text: str) -> list[int]:
    """Returns, of each transfer in the entry computation, how many instructions of the attention run beside it."""
    entry = text[text.index("\nENTRY ") :].splitlines()
    found, running = [], {}
    for line in entry:
        match = re.match(r"\s*(?:ROOT )?%?([\w.-]+) = .*? ([\w-]+)\((.*)", line)
        if match is None:
            continue
        name, opcode, rest = match.groups()
        if opcode == "collective-permute-start":
            running[name] = 0
        elif opcode == "collective-permute-done":
            started = next(one for one in running if re.search(rf"%?{re.escape(one)}\b", rest))
            found.append(running.pop(started))
        elif re.search(r"ring_\w+hop", line) and opcode in WORK:
            running = {one: count + 1 for one, count in running.items()}
    return found


if __name__ == "__main__":
    main()
