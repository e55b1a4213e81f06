"""The one adapter to JAX's private constructor of Gloo, which runs the collectives of CPUs in several processes."""

import functools


def listen_on(address: str) -> None:
    """Makes Gloo listen on `address`, by which the other machines reach this one; call it before JAX connects.

    By default Gloo takes the address that the host name resolves to, on many machines 127.0.1.1. JAX has no option for
    it, only an argument that its CPU client does not pass on.
    """
    from jax._src.lib import _jax

    original = getattr(_jax.make_gloo_tcp_collectives, "func", _jax.make_gloo_tcp_collectives)
    _jax.make_gloo_tcp_collectives = functools.partial(original, hostname=address)
