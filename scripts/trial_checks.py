"""Random calls with NaN beyond the lengths, from the generator of `tests/trials`, as rows of `gpu_check.py`."""

import pathlib
import sys
import time
from collections.abc import Iterator

import numpy as np
from oracle_case import refused

TESTS = pathlib.Path(__file__).parent.parent / "tests"


def trial_checks(num_devices: int, num_draws: int, seed: int) -> Iterator[dict]:
    """Yields a row per program until `num_draws` calls have run; a case that a backend refuses has its reason."""
    sys.path.insert(0, str(TESTS))
    from trials import attention, gpu_draws

    rng, ran = np.random.default_rng([seed, num_devices]), 0
    while ran < num_draws:
        case = gpu_draws.draw_on_gpu(rng, num_devices)
        row = dict(what="trial", case=repr(case), draws=len(case.fills))
        begin = time.monotonic()
        try:
            fault = attention.fault(case)
        except NotImplementedError as error:
            yield row | refused(error)
            continue
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
        ran += len(case.fills)
        yield row | dict(passed=fault is None, fault=fault, seconds=round(time.monotonic() - begin, 2))
