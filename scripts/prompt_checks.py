"""Checks of `gpu_check.py` of attention within prompts: results, and gradients."""

import functools
import itertools
from collections.abc import Iterator

from oracle_case import OPTIONS, SHAPES, OracleCase, inputs, is_same_everywhere, local_part, refused

BACKENDS = ("xla", "cudnn")
PLACEMENTS = (1, None, "zigzag")


def prefill_checks(num_devices: int) -> Iterator[dict]:
    """Checks rings and Ulysses, striped, contiguous and zigzag, causal, with lengths and windows."""
    shape = dict(SHAPES[1], num_queries=1920, num_keys=1920)
    for (what, call), backend, block_size, name in itertools.product(
        _ways(num_devices, shape), BACKENDS, PLACEMENTS, ("plain", "lengths", "window")
    ):
        options = dict(OPTIONS[name], is_causal=True)
        case = OracleCase(dtype="bfloat16", options=options, num_shards=num_devices, block_size=block_size, **shape)
        call = functools.partial(call, implementation=backend)
        yield case.check(call, what=what, implementation=backend, options_name=name, prefill=True)


def prompt_gradient_checks(num_devices: int) -> Iterator[dict]:
    """Checks the gradients of rings and Ulysses against float64; causal, where the result is the cotangent."""
    import jax

    from tree_attn import storage_order
    from tree_attn.commands.compare.prompts import GRADIENT_ERROR, expected_results
    from tree_attn.tolerances import max_abs_error, relative_out_tolerance

    shape = dict(SHAPES[0], num_queries=480, num_keys=480, num_heads=16, num_kv_heads=8, batch=2)
    sizes = [(shape["batch"], 480, heads, shape["head_dim"]) for heads in (shape["num_heads"], shape["num_kv_heads"])]
    arrays = inputs("bfloat16", *sizes)
    expected = expected_results(*arrays, has_gradient=True)
    for (what, call), backend, block_size in itertools.product(_ways(num_devices, shape), BACKENDS, PLACEMENTS):
        order = storage_order(480, num_devices, block_size)

        def gradients(*arrays, call=call, backend=backend, block_size=block_size):
            out, pull = jax.vjp(functools.partial(call, implementation=backend, block_size=block_size), *arrays)
            return pull(out)

        row = dict(what=f"{what} gradient", implementation=backend, options_name="plain") | shape
        row |= dict(dtype="bfloat16", block_size=block_size)
        try:
            found = jax.jit(gradients)(*(x[:, order] for x in arrays))
        except NotImplementedError as error:
            yield row | refused(error)
            continue
        parts = [local_part(x) for x in found]
        errors = [max_abs_error(x, wanted[:, order[i]]) for (x, i), wanted in zip(parts, expected, strict=True)]
        tolerances = [GRADIENT_ERROR * relative_out_tolerance("bfloat16", wanted) for wanted in expected]
        passed = all(error <= tolerance for error, tolerance in zip(errors, tolerances))
        passed = passed and all(map(is_same_everywhere, found))
        yield row | dict(errors=errors, tolerances=tolerances, passed=bool(passed))


def _ways(num_devices: int, shape: dict):
    """Returns the functions by name that take these heads; each lacks its placement and its backend."""
    from tree_attn import make_mesh
    from tree_attn.ring_baseline import ring_attention, ulysses_attention

    where = dict(mesh=make_mesh({"seq": num_devices}), axis_name="seq")
    ring = functools.partial(ring_attention, **where)
    ways = {"ring_attention": ring, "ring_joint": functools.partial(ring, rotation="joint")}
    ways["ring_two_way"] = functools.partial(ring, rotation="two_way")
    if shape["num_heads"] % num_devices == shape["num_kv_heads"] % num_devices == 0:
        ways["ulysses_attention"] = functools.partial(ulysses_attention, **where)
    return ways.items()
