"""The order in which XLA runs the kernels of a program on a GPU: by default one after another.

Kernels that count in memory of their own, behind XLA's back, need that (`arrivals.py`). Otherwise XLA may run at once
what does not depend on one another. With a JAX before 0.12 Mosaic GPU's kernels are not in CUDA graphs, and keep their
order whatever the option says.
"""

import os

ORDER_OPTION = "xla_gpu_command_buffer_scheduling_mode"  # of XLA
MODES_IN_ORDER = ("LHS", "SERIALIZE")
KERNELS_ARE_RECORDED = (0, 12)  # the version of JAX from which Mosaic GPU's kernels are in CUDA graphs


def runs_kernels_in_order() -> bool:
    """Returns whether XLA_FLAGS leaves kernels in their order."""
    flag = f"--{ORDER_OPTION}="
    modes = [word.removeprefix(flag) for word in os.environ.get("XLA_FLAGS", "").split() if word.startswith(flag)]
    return not modes or modes[-1] in MODES_IN_ORDER
