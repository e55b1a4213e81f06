"""Compiles the fused reduction for four H200s that are not there; prints what its programs hold as lines of JSON.

A program of its own, since JAX's backends are chosen once per process, and ptxas reports on the process's output.
"""

import json
import os
import pathlib
import re
import sys

os.environ |= {"JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_PTXAS": "1"}

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tree_attn import SoftmaxState
from tree_attn.reduce import reduce_state

H200 = (pathlib.Path(__file__).parents[1] / "local" / "h200.txtpb").read_text()


def main():
    sys.modules["tree_attn.reduce.fused"].peer_memory = lambda groups, num_bytes: 0x5D00_0000_0000
    topology = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x4")
    mesh = Mesh(np.array(topology.devices), "seq")
    shape = lambda *sizes, dtype: jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, P()))
    for dtype in (jnp.bfloat16, jnp.float32):
        state = SoftmaxState(shape(2, 3, 16, 128, dtype=dtype), shape(2, 3, 16, dtype=jnp.float32))
        on_device = lambda state: reduce_state(state, ("seq",), "fused", mesh)
        program = jax.shard_map(on_device, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        text = jax.jit(program).trace(state).lower().compile().as_text()
        collectives = re.findall(r"= .*(?:all-reduce|all-gather|all-to-all|reduce-scatter|collective-\w+)\(", text)
        kernels = re.findall(r"custom_call_target=\"mosaic_gpu", text)
        print(json.dumps({"collectives": len(collectives), "kernels": len(kernels)}), flush=True)


if __name__ == "__main__":
    main()
