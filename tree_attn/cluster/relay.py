"""A detour of JAX's connection to its coordinator, so that JAX does not abort before the reason can be printed.

JAX's client aborts its process, in the middle of a C++ stack trace, at the moment at which the connection to rank 0
closes. Through this relay the connection only falls silent. The watchdog, whose own connection closes, then has the
time to name the lost rank. JAX's own time limit for a silent coordinator stays as the backstop.
"""

import contextlib
import selectors
import socket
import threading


def start(host: str, port: int) -> int:
    """Carries connections to a port of this machine on to `host:port`, in a thread; returns that port.

    When one side closes, the relay closes the other too, with one exception: a close by `host` is not passed on.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_carry, args=(listener, host, port), name="tree_attn relay", daemon=True).start()
    return listener.getsockname()[1]


def _carry(listener: socket.socket, host: str, port: int) -> None:
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                _accept(listener, host, port, selector)
            elif key.fileobj.fileno() != -1:  # closed meanwhile
                _pass_on(key.fileobj, *key.data, selector)


def _accept(listener: socket.socket, host: str, port: int, selector: selectors.BaseSelector) -> None:
    near, _ = listener.accept()
    try:
        far = socket.create_connection((host, port), timeout=10)
    except OSError:
        near.close()  # JAX tries again, for as long as its own limit lets it
        return
    for one, other, is_far in ((near, far, False), (far, near, True)):
        one.settimeout(None)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        selector.register(one, selectors.EVENT_READ, (other, is_far))


def _pass_on(source: socket.socket, target: socket.socket, is_far: bool, selector: selectors.BaseSelector) -> None:
    try:
        part = source.recv(1 << 16)
    except OSError:
        part = b""
    if part:
        with contextlib.suppress(OSError):  # a target that is gone shows when it is read
            target.sendall(part)
        return
    selector.unregister(source)
    source.close()
    if not is_far:
        with contextlib.suppress(KeyError, ValueError):  # closed and unregistered before, when its own side closed
            selector.unregister(target)
        target.close()
