"""Compiles products of few rows for an absent H200, and prints a line of JSON for each, as `compile_lean.py` does.

With the argument `more` it compiles those that CI leaves out.
"""

import gc
import json
import os
import pathlib
import sys

os.environ |= {"JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_PTXAS": "1", "JAX_ENABLE_COMPILATION_CACHE": "0"}
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"

import few_rows_cases as cases
import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

H200 = pathlib.Path(__file__).with_name("h200.txtpb").read_text()


def main():
    topology = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x1")
    sharding = NamedSharding(Mesh(np.array(topology.devices), "device"), PartitionSpec())
    if sys.argv[1:] == ["more"]:
        products, chains = cases.more_compiled_products(), cases.more_compiled_several()
    else:
        products = [*cases.compiled_products(), *cases.compiled_appends()]
        chains = [*cases.compiled_chains(), *cases.compiled_layers(), *cases.compiled_several()]
    for product in products:
        jax.jit(product.run).trace(*product.shapes(sharding)).lower().compile()
        print(json.dumps({"call": str(product), "ctas_per_sm": product.ctas_per_sm}), flush=True)
    for chain in chains:
        jax.jit(chain.run).trace(*chain.array_shapes(sharding)).lower().compile()
        print(json.dumps({"call": str(chain), "ctas_per_sm": 1}), flush=True)


if __name__ == "__main__":
    gc.disable()  # tracing makes so many objects that a twentieth of the time would go to looking through them
    main()
