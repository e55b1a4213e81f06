"""The paper's reduction: three all-reduces."""

import jax
import jax.numpy as jnp

from tree_attn.reduce.collectives import pmax, psum
from tree_attn.state import SoftmaxState, finite_max, from_sums, numerator_and_denominator


def allreduce(state: SoftmaxState, axes: tuple[str, ...]) -> SoftmaxState:
    """Merges over `axes` as Tree Attention, Algorithm 3, lines 3 to 6 (and appendix D) write it.

    m = Allreduce(max, lse);  n = out exp(lse - m),  d = exp(lse - m);
    n_g = Allreduce(sum, n),  d_g = Allreduce(sum, d);  out = n_g / d_g,  lse = m + log d_g

    The compiled program has three collectives too: XLA would combine the two sums into one, and a comparison with the
    paper would time a program that the paper did not run. Payload in float32: `B T N (H + 2)`.

    Source: Tree Attention, Algorithm 3 and appendix D.
    """
    max_lse = finite_max(pmax(jax.lax.stop_gradient(state.lse), axes))
    numerator, denominator = numerator_and_denominator(state, max_lse)
    numerator = psum(numerator, axes)
    # The second sum is made to depend on the first, since XLA joins sums that do not. (A barrier would read better, but
    # the CPU compiler of JAX 0.10 drops barriers first.) It changes a denominator only where the result is NaN anyway.
    first = numerator[..., 0]
    denominator = psum(jnp.where(jnp.isnan(first), first, denominator), axes)
    return from_sums(numerator, denominator, max_lse, state.out.dtype)
