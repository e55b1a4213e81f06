"""The detour of JAX's connection to its coordinator, between plain sockets."""

import socket

from tree_attn.cluster import relay


def carried(server: socket.socket, port: int):
    """Returns both ends of a connection through the relay: the near one, and the far one that the server has."""
    server.settimeout(10)
    near = socket.create_connection(("127.0.0.1", port), timeout=10)
    far, _ = server.accept()
    far.settimeout(10)
    return near, far


def test_what_a_side_sends_arrives_and_a_near_end_that_closes_closes_the_far_one():
    with socket.create_server(("127.0.0.1", 0)) as server:
        near, far = carried(server, relay.start(*server.getsockname()))
        near.sendall(b"there")
        far.sendall(b"back")
        assert (far.recv(16), near.recv(16)) == (b"there", b"back")
        near.close()
        assert far.recv(16) == b""


def test_a_far_end_that_closes_is_not_passed_on_and_the_relay_lives_on_when_the_near_one_follows():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = relay.start(*server.getsockname())
        near, far = carried(server, port)
        far.close()
        near.settimeout(0.3)
        try:
            heard = near.recv(16)
        except TimeoutError:
            heard = None
        assert heard is None
        near.close()
        again, far = carried(server, port)
        again.sendall(b"still there")
        assert far.recv(16) == b"still there"
