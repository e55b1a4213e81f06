"""Attention within sharded prompts beside dense attention: output, lse and derivatives of one compiled program."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from assertions import assert_attention, assert_gradients
from attention_cases import Case
from dense import dense_attention, without_padding

from tree_attn import make_mesh, storage_order

TOKENS = 120  # divided by every number of devices here
LENGTHS = np.array([TOKENS, 53], np.int32)


def assert_as_dense(
    function, axis_sizes, block_size, options, *, lengths=None, heads=4, kv_heads=2, tokens=TOKENS, **more
):
    """Asserts that output and lse are the oracle's, and the derivatives those of dense attention.

    Args:
      function: `ring_attention` or `ulysses_attention`.
      options: of attention; derivatives are taken with respect to those that are arrays too.
      more: arguments of `function` alone.
    """
    order = storage_order(tokens, int(np.prod(list(axis_sizes.values()))), block_size)
    arrays = Case(queries=tokens, keys=tokens, heads=heads, kv_heads=kv_heads, value_dim=5).arrays()
    sharded = partial(
        function, axis_name=tuple(axis_sizes), mesh=make_mesh(axis_sizes), block_size=block_size, return_lse=True,
        key_value_seq_lengths=lengths, **more,
    )  # fmt: skip

    def in_natural_order(*arrays, **options):
        stored = sharded(*(x[:, order] for x in arrays), **options)
        return jax.tree.map(lambda x: x[:, np.argsort(order)], stored)

    options = {"is_causal": True} | options
    where = {"query_positions": np.arange(tokens), "key_value_seq_lengths": lengths}
    got, derivatives = results(in_natural_order, arrays, options)
    assert_attention(got, without_padding(arrays[0], lengths), *arrays[1:], **where | options)
    dense = lambda query, *rest, **options: dense_attention(without_padding(query, lengths), *rest, **where, **options)
    _, expected = results(dense, arrays, options)
    assert_gradients(derivatives, expected)


def assert_value_and_gradients(ring, query, key, value, **options):
    """Asserts that `ring`'s output and lse are the oracle's, and its gradients those of dense attention.

    Args:
      ring: takes query, key and value only, and returns lse too.
      options: of attention, with which `ring` is made.
    """

    def loss(attention, *arrays):
        state = attention(*arrays)
        return jnp.sum(state[0] ** 2), state

    gradient = lambda attention: jax.jit(jax.grad(partial(loss, attention), argnums=(0, 1, 2), has_aux=True))
    found, state = gradient(ring)(query, key, value)
    assert_attention(state, query, key, value, **options)
    assert_gradients(found, gradient(partial(dense_attention, **options))(query, key, value)[0])


def results(attention, arrays, options):
    """Returns `(out, lse)`, and the derivatives of a weighted sum of both by all arrays, those of options too."""
    rng = np.random.default_rng(1)
    rows, dim = arrays[0].shape[:3], arrays[2].shape[-1]
    of_out, of_lse = (jnp.asarray(rng.normal(size=(*rows, *last)), jnp.float32) for last in ((dim,), ()))

    def loss(arrays, numbers):
        out, lse = attention(*arrays, **options | numbers)
        return jnp.vdot(out, of_out) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0.0) * of_lse), (out, lse)

    numbers = {name: jnp.asarray(x) for name, x in options.items() if isinstance(x, np.ndarray)}
    derivatives, state = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(arrays, numbers)
    return state, derivatives
