"""Datagrams between any two ranks, by which a cut between them shows where both still reach rank 0."""

import contextlib
import ipaddress
import socket
from collections.abc import Sequence

from tree_attn.cluster.rollcall import Members

_MOST_PARTNERS = 128  # a socket's buffer holds some 250 datagrams, and is read once in a beat


def partners(rank: int, hosts: Sequence[str]) -> set[int]:
    """Returns the ranks that `rank` exchanges datagrams with: all others, or in large runs one rank of each other node.

    On more than 128 nodes those are the 128 nearest ones and rank 0's, by which a rank knows that datagrams pass.

    Example:
      >>> partners(1, ["n1", "n2", "n3"])
      {0, 2}
    """
    ranks = list(range(len(hosts)))
    if len(hosts) > _MOST_PARTNERS:
        ranks = sorted({host: rank for rank, host in reversed(list(enumerate(hosts)))}.values())
    if rank not in ranks:
        return set()
    if rank and len(ranks) > _MOST_PARTNERS:
        place = ranks.index(rank)
        near = range(place - _MOST_PARTNERS // 2, place + _MOST_PARTNERS // 2 + 1)
        ranks = [0, *(ranks[number % len(ranks)] for number in near)]
    return set(ranks) - {rank}


class Probes:
    """One socket of this rank, and the time at which it last heard each of its partners."""

    def __init__(self) -> None:
        """Binds a port; `begin` tells it from whom to expect datagrams."""
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        try:
            self._socket = socket.socket(family, socket.SOCK_DGRAM)
            if family == socket.AF_INET6:
                self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            self._socket.bind(("", 0))
        except OSError:  # IPv6 is compiled in and turned off
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            self._socket.bind(("", 0))
        self._socket.setblocking(False)
        self._message, self._token = b"", b""
        self._addresses: dict[int, tuple] = {}
        self._heard_s: dict[int, float] = {}
        self._began_s = 0.0

    @property
    def port(self) -> int:
        """The port at which the others reach this rank."""
        return self._socket.getsockname()[1]

    def begin(self, rank: int, hosts: Sequence[str], members: Members, now_s: float) -> None:
        """Starts to expect the partners of `rank`.

        Args:
          rank: this rank.
          hosts: the node of every rank.
          members: their addresses, and the token that the datagrams of other runs do not have.
          now_s: the time.
        """
        self._token, self._began_s = members.token.encode(), now_s
        self._message = self._token + b" %d" % rank
        for other in partners(rank, hosts):
            host, port = members.addresses[other]
            with contextlib.suppress(OSError):  # an address of another family: it is never heard
                self._addresses[other] = self._reachable(host, port)

    def close(self) -> None:
        """Closes the socket: no run has begun."""
        self._socket.close()

    def exchange(self, now_s: float) -> None:
        """Sends every partner a datagram, and reads those that have come."""
        for address in self._addresses.values():
            with contextlib.suppress(OSError):  # no route, no room: the other side does not hear it
                self._socket.sendto(self._message, address)
        with contextlib.suppress(BlockingIOError):
            while True:
                with contextlib.suppress(ConnectionError):  # the answer to a datagram that was not taken
                    self._hear(self._socket.recv(256), now_s)

    def silent(self, now_s: float, limit_s: float) -> list[int]:
        """Returns the partners that were heard once, and have been silent for `limit_s` seconds."""
        return [rank for rank, heard_s in self._heard_s.items() if now_s - heard_s > limit_s]

    def never_heard(self, now_s: float, limit_s: float) -> list[int]:
        """Returns the partners that were never heard, `limit_s` seconds after the beginning."""
        if now_s - self._began_s <= limit_s:
            return []
        return [rank for rank in self._addresses if rank not in self._heard_s]

    def _hear(self, message: bytes, now_s: float) -> None:
        token, _, rank = message.partition(b" ")
        if token == self._token and rank.isdigit() and int(rank) in self._addresses:
            self._heard_s[int(rank)] = now_s

    def _reachable(self, host: str, port: int) -> tuple:
        if self._socket.family == socket.AF_INET6 and ipaddress.ip_address(host.partition("%")[0]).version == 4:
            host = f"::ffff:{host}"
        return socket.getaddrinfo(host, port, self._socket.family, socket.SOCK_DGRAM)[0][4]
