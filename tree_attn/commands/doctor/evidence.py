"""Evidence that a feature works on a device: rows of measurements, or kernels compiled ahead of time for it.

These are facts about what was run, which no function can be asked for. Tests compare them with the rows, and with the
targets of the compilations.
"""

from typing import NamedTuple

import jax

MEASURED, RUNS, COMPILED = "measured", "runs (interpreter, compiled)", "compiled only"
TESTED, UNTRIED = "tested", "not tried"


class Evidence(NamedTuple):
    """One of the words above, and for `MEASURED` the folder of docs/results that has the rows."""

    word: str
    folder: str = ""


# By device kind and backend: the folder of docs/results that has the rows of a feature.
ROWS = {
    ("NVIDIA H200", "mosaic_gpu"): {
        "decode": "sweep_h200",
        "decode, lengths": "sweep_h200",
        "decode, soft cap": "garbage_h200",
        "decode, float8 cache": "sweep_h200",
        "packed ragged batch": "garbage_h200",
        "paged cache": "sweep_h200",
        "shared prefix": "prefix_h200",
        "SparQ": "sparq_h200",
        "fused": "reduce_8xh200",
    },
    ("NVIDIA H100 80GB HBM3", "mosaic_gpu"): {
        "decode": "sweep_h100",
        "decode, lengths": "sweep_h100",
        "decode, soft cap": "checks_h100",
        "decode, float8 cache": "sweep_h100",
        "packed ragged batch": "checks_h100",
        "paged cache": "sweep_h100",
        "shared prefix": "sweep_h100",
        "SparQ": "reproduced_h100",
        "fused": "layer_h100",
    },
    ("NVIDIA H200", "cudnn"): {"prompt": "llama_h200"},
    ("NVIDIA H100 80GB HBM3", "cudnn"): {"gradient of a prompt": "prompt_gradient_h100"},
    ("NVIDIA H200", "xla"): {"decode, int8 cache": "llama_h200"},
}
# The compute capabilities for which all kernels of a backend are compiled ahead of time (tests/kernels).
COMPILED_FOR = {"mosaic_gpu": ("8.0", "8.9", "9.0", "10.0", "12.0")}
NOT_INTERPRETED = {"fused"}  # the interpreter has no memory of peers
# By device kind: features that are compiled ahead of time through xla (tests/test_tpu_compiled.py).
_STEPS = ("decode", "decode, lengths")
COMPILED_STEPS = {"TPU v5 lite": _STEPS, "TPU v6 lite": _STEPS, "TPU7x": _STEPS}


def find(feature: str, backend: str, device: jax.Device) -> Evidence:
    """Returns what is known of `feature` by `backend` on devices like this one."""
    folder = ROWS.get((device.device_kind, backend), {}).get(feature)
    if folder is not None:
        return Evidence(MEASURED, folder)
    if device.platform == "cpu":
        return Evidence(TESTED)
    if backend == "xla" and feature in COMPILED_STEPS.get(device.device_kind, ()):
        return Evidence(COMPILED)
    if getattr(device, "compute_capability", None) in COMPILED_FOR.get(backend, ()):
        return Evidence(COMPILED if feature in NOT_INTERPRETED else RUNS)
    return Evidence(UNTRIED)
