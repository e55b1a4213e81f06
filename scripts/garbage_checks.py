"""Checks of `gpu_check.py` in which most is garbage: packed and paged batches among NaN, and gradients beside NaN."""

import functools
import itertools
from collections.abc import Iterator

import numpy as np
from oracle_case import LEAN_SHAPES, OPTIONS, SHAPES, OracleCase, refused


def packed(query, key, value, *, key_value_seq_lengths, spare=None, **options):
    """Returns `lean_decode` of a padded batch packed end to end, then `spare` NaN; None: up to a multiple of 8."""
    import jax.numpy as jnp

    from tree_attn import lean_decode

    ends = np.cumsum(key_value_seq_lengths)
    spare = 8 + -ends[-1] % 8 if spare is None else spare
    spoiled = lambda x: jnp.full((spare, *x.shape[2:]), jnp.nan, x.dtype)
    parts = lambda x: [x[b, :length] for b, length in enumerate(key_value_seq_lengths)]
    key, value = (jnp.concatenate([*parts(x), spoiled(x)]) for x in (key, value))
    return lean_decode(query, key, value, np.array([0, *ends], np.int32), **options)


def paged(query, key, value, *, key_value_seq_lengths, page_size=64, **options):
    """Returns `paged_decode` of a padded batch in pages in some order, one of them NaN."""
    import jax.numpy as jnp

    from tree_attn import paged_decode

    pages = key.shape[0] * key.shape[1] // page_size
    order = np.random.default_rng(1).permutation(pages + 1)
    in_pages = lambda x: x.reshape(pages, page_size, *x.shape[2:])
    spoiled = lambda x: jnp.concatenate([in_pages(x), jnp.full((1, page_size, *x.shape[2:]), jnp.nan, x.dtype)])
    table = np.argsort(order)[:pages].astype(np.int32).reshape(key.shape[0], -1)
    arrays = [spoiled(x)[order] for x in (key, value)]
    return paged_decode(query, *arrays, table, key_value_seq_lengths, **options)


def ragged_checks() -> Iterator[dict]:
    """Checks packed and paged batches on one device, among slots and pages of NaN."""
    names = [name for name, options in OPTIONS.items() if "key_value_seq_lengths" in options]
    for shape, (way, call), name in itertools.product(
        SHAPES + LEAN_SHAPES, (("packed", packed), ("paged", paged)), names
    ):
        case = OracleCase(dtype="bfloat16", options=OPTIONS[name], **shape)
        call = functools.partial(call, implementation="mosaic_gpu")
        labels = dict(what="ragged", how=way, implementation="mosaic_gpu", options_name=name)
        yield case.check(lambda *args, block_size, call=call, **options: call(*args, **options), **labels)


def gradient_checks() -> Iterator[dict]:
    """Checks on one device that NaN beyond the lengths changes neither gradients nor results."""
    import jax
    import jax.numpy as jnp

    from tree_attn.local import IMPLEMENTATIONS, attend
    from tree_attn.tolerances import max_abs_error

    for implementation, name, num_queries in itertools.product(sorted(IMPLEMENTATIONS), OPTIONS, (1, 5, 40)):
        case = OracleCase(dtype="bfloat16", options=OPTIONS[name], **SHAPES[1] | dict(num_queries=num_queries))

        def loss(query, key, value, case=case, implementation=implementation):
            out, lse = attend(query, key, value, implementation=implementation, **case.options)
            return out.astype(jnp.float32).sum() + jnp.where(jnp.isneginf(lse), 0.0, lse).sum(), (out, lse)

        row = dict(what="gradients", implementation=implementation, options_name=name) | case.shape
        run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
        try:
            found, expected = (run(case.query, *stored) for stored in (case.spoiled(), (case.key, case.value)))
        except (NotImplementedError, ImportError) as error:
            yield row | refused(error)
            continue
        pairs = zip(*(jax.tree.leaves(jax.tree.map(np.asarray, x)) for x in (found, expected)))
        # The products of garbage, zeros now, and of other numbers may be summed in another order.
        errors = [max_abs_error(a, b) for a, b in pairs]
        yield row | dict(errors=errors, passed=max(errors) <= 0.05)
