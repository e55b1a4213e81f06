"""The private function of JAX that takes Gloo's address: it is where the adapter looks, and JAX calls it."""

import jax
import pytest
from jax._src import distributed, xla_bridge
from jax._src.lib import _jax

from tree_attn.cluster import gloo


class Reached(Exception):
    """The CPU client asks for its collectives."""


def test_jax_makes_gloo_with_the_address(monkeypatch):
    """Fails where JAX has moved, renamed or bypassed the private function that `listen_on` replaces."""
    arguments = {}

    def make(distributed_client, hostname=None, interface=None):
        arguments.update(client=distributed_client, hostname=hostname)
        raise Reached

    monkeypatch.setattr(_jax, "make_gloo_tcp_collectives", make)
    monkeypatch.setattr(distributed.global_state, "client", "a client")
    gloo.listen_on("10.0.0.1")
    gloo.listen_on("10.0.0.2")  # the second address replaces the first
    before = jax.config.jax_cpu_collectives_implementation
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        with pytest.raises(Reached):
            xla_bridge.make_cpu_client()
    finally:
        jax.config.update("jax_cpu_collectives_implementation", before)
    assert arguments == {"client": "a client", "hostname": "10.0.0.2"}


def test_the_function_takes_an_address():
    """A wrong argument would be reported by its name; this one is refused only for its client."""
    with pytest.raises(TypeError, match="incompatible function arguments") as error:
        _jax.make_gloo_tcp_collectives(distributed_client="no client", hostname="127.0.0.1")
    assert "hostname: " in str(error.value)
