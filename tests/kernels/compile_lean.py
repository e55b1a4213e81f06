"""Compiles variants of the kernels for an absent GPU, and prints a line of JSON for each.

The argument is a compute capability: for "9.0", an H200, all kernels but one kind are compiled, for others the lean
kernel as it is there. `grouped` selects the kind left out: SparQ's kernels for groups of query heads, for an H200. With
`more` behind a capability, other calls of the lean kernel are compiled, and only those.

A program of its own, for ptxas reports registers and spills on the process's output. A kernel's report comes before
its variant's line.
"""

import gc
import json
import os
import sys

os.environ |= {"JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_PTXAS": "1", "JAX_ENABLE_COMPILATION_CACHE": "0"}
# XLA's own kernels beside ours are compiled once each, for no GPU is here to time candidates on.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"

import jax
import numpy as np
import sparq_cases
from gpus import GPUS, target_config
from jax.experimental import topologies
from jax.experimental.mosaic.gpu import core, utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from lean_cases import AfterPrefix, more_variants, more_variants_elsewhere, variants, variants_elsewhere
from lean_launches import count_launches

from tree_attn.kernels import lean, lean_merge, lean_prefix, targets, tuning
from tree_attn.kernels.lean_layout import max_smem_bytes, padding_bytes
from tree_attn.local import mosaic_gpu


def main(chosen: str, *more: str):
    capability = "9.0" if chosen == "grouped" else chosen
    name, sms, _ = GPUS[capability]
    topology = topologies.get_topology_desc(platform="cuda", target_config=target_config(capability), topology="1x1x1")
    sharding = NamedSharding(Mesh(np.array(topology.devices), "device"), PartitionSpec())
    planned, choose, launched, launch = [], tuning.lean_config, [], core._launch
    mosaic_gpu.unavailable = lambda: None
    tuning.lean_config = lambda shape, **options: planned.append((shape, choose(shape, **options))) or planned[-1][1]
    core._launch = lambda *args, **options: launched.append(core._smem_tree_size(args[4])) or launch(*args, **options)
    tuning.device_kind = lambda: name
    tuning.num_sms = lean.num_sms = lean_merge.num_sms = lean_prefix.num_sms = lambda: sms
    if capability != "9.0":  # what JAX takes a GPU to be that is not there
        utils._infer_arch = lambda: tuple(map(int, capability.split(".")))

    def compile(call, title, ctas_per_sm=lambda: 0):
        launched.clear()
        lowered = jax.jit(call.run).trace(*call.shapes(sharding)).lower()
        lowered.compile()
        # Of the first of its kernels; after a prefix of the last.
        smem_bytes = launched[-1:] if isinstance(call, AfterPrefix) else launched[:1]
        line = {"call": title, "ctas_per_sm": ctas_per_sm(), "smem_bytes": smem_bytes}
        line["launches"] = count_launches(lowered.as_text())
        print(json.dumps(line | {"planned_smem_bytes": planned_bytes(*planned[-1]) if planned else 0}), flush=True)

    def planned_bytes(shape, config):
        is_padded = not shape.is_many_query and lean.begins_early(shape, config)
        padding = padding_bytes(shape, config, -(-config.num_ctas // sms)) if is_padded else 0
        return max_smem_bytes(shape, config) + padding

    def ctas_per_sm(shape, config):
        return -(-config.num_ctas // (shape.streams * sms))

    on_hopper, elsewhere = (more_variants, more_variants_elsewhere) if more else (variants, variants_elsewhere)
    calls = {"grouped": list, "9.0": on_hopper}.get(chosen, elsewhere)()
    with targets.assumed(capability):
        for call in calls:
            compile(call, str(call), lambda: ctas_per_sm(*planned[-1]))
    of_sparq = {"grouped": sparq_cases.COMPILED_GROUPED, "9.0": sparq_cases.COMPILED}
    for call in () if more else of_sparq.get(chosen, ()):
        compile(call, f"sparq {call}")


if __name__ == "__main__":
    gc.disable()  # tracing makes so many objects that a twentieth of the time would go to looking through them
    main(*sys.argv[1:])
