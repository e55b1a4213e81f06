"""Compiles every variant of the kernels for an absent H200, and prints a line of JSON for each.

The argument `grouped` selects SparQ's kernels for groups of query heads; without it all others are compiled.

A program of its own, for ptxas reports registers and spills on the process's output. A kernel's report comes before
its variant's line.
"""

import json
import os
import pathlib
import sys

os.environ |= {"JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_PTXAS": "1"}
# XLA's own kernels beside ours are compiled once each, for no GPU is here to time candidates on.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"

import jax
import numpy as np
import sparq_cases
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from lean_cases import variants

from tree_attn.kernels import tuning
from tree_attn.local import mosaic_gpu

H200 = pathlib.Path(__file__).with_name("h200.txtpb").read_text()
SMS = 132


def main():
    topology = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x1")
    sharding = NamedSharding(Mesh(np.array(topology.devices), "device"), PartitionSpec())
    configs, choose = [], tuning.lean_config
    mosaic_gpu.unavailable = lambda: None
    tuning.lean_config = lambda *args, **kwargs: configs.append(choose(*args, **kwargs)) or configs[-1]
    tuning.device_kind = lambda: "NVIDIA H200"
    is_grouped = sys.argv[1:] == ["grouped"]
    for call in () if is_grouped else variants():
        jax.jit(call.run).trace(*call.shapes(sharding)).lower().compile()
        print(json.dumps({"call": str(call), "ctas_per_sm": -(-configs[-1].num_ctas // SMS)}), flush=True)
    for call in sparq_cases.COMPILED_GROUPED if is_grouped else sparq_cases.COMPILED:
        jax.jit(call.run).trace(*call.shapes(sharding)).lower().compile()
        print(json.dumps({"call": f"sparq {call}", "ctas_per_sm": 0}), flush=True)


if __name__ == "__main__":
    main()
