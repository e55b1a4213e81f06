"""A connection between two ranks on which JSON objects pass, one a line; it runs nothing that it reads."""

import errno
import json
import selectors
import socket
import time
from collections.abc import Sequence
from typing import Any

_LONGEST_LINE = 1 << 20


def readable(sources: Sequence[Any], timeout_s: float) -> list[Any]:
    """Returns those of `sources` (sockets, channels) with something to read, after at most `timeout_s` seconds."""
    with selectors.DefaultSelector() as selector:  # select.select knows no more than 1024 connections
        for source in sources:
            selector.register(source, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(max(0.0, timeout_s))]


class Channel:
    """A connection on which JSON objects pass, one a line; `lost` says why it ended, once it has."""

    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.lost: str | None = None
        self._arrived, self._to_send = b"", b""
        self._unread: list[dict] = []

    def fileno(self) -> int:
        """Returns the number of the connection's file, by which selectors find it."""
        return self.socket.fileno()

    def send(self, frame: str, **content: Any) -> None:
        """Sends an object; what the network does not take now goes with the next one."""
        self._to_send += json.dumps({"frame": frame} | content).encode() + b"\n"
        try:
            while self._to_send and self.lost is None:
                self._to_send = self._to_send[self.socket.send(self._to_send) :]
        except BlockingIOError:
            if len(self._to_send) > _LONGEST_LINE:
                self._to_send = b""  # unread for hours: the watchdog will notice it
        except OSError as error:
            self._lose(error)

    def receive(self) -> list[dict]:
        """Returns all objects that have arrived."""
        while self.lost is None:
            try:
                part = self.socket.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError as error:
                self._lose(error)
                break
            self._arrived += part
            if not part:
                self.lost = "connection closed"
            elif len(self._arrived) > _LONGEST_LINE:
                self.lost = "it does not speak this protocol"
        *lines, self._arrived = self._arrived.split(b"\n")
        frames = self._unread + [frame for line in lines if (frame := self._parse(line)) is not None]
        self._unread = []
        return frames

    def wait(self, timeout_s: float) -> dict | None:
        """Returns the next object, or None if none comes in time or the connection ends before."""
        deadline = time.monotonic() + timeout_s
        while not (frames := self.receive()):
            remaining = deadline - time.monotonic()
            if self.lost or remaining <= 0:
                return None
            readable([self], remaining)
        self._unread = frames[1:]
        return frames[0]

    def close(self) -> None:
        """Closes the connection."""
        self.lost = self.lost or "closed here"
        self.socket.close()

    def _parse(self, line: bytes) -> dict | None:
        try:
            frame = json.loads(line)
            return {"frame": str(frame["frame"])} | frame
        except (ValueError, TypeError, KeyError):
            self.lost = "it does not speak this protocol"
            return None

    def _lose(self, error: OSError) -> None:
        # The kernel resets the connection of a process that died with something left to read.
        has_died = error.errno in (errno.ECONNRESET, errno.EPIPE)
        self.lost = "connection closed" if has_died else f"connection lost ({error.strerror})"
