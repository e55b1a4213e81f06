"""The roll call: before JAX connects, every rank reports to rank 0, which starts all of them or sends all the reason.

There is one connection from each rank to rank 0, on which lines of JSON pass in both directions:

    rank 0:  {"frame": "welcome", "tree_attn": 1, "job": ..., "remaining_s": 58.2}
    rank r:  {"frame": "hello", "rank": 2, "num_processes": 4, "node": "n2", "pid": 77, "versions": {...}, ...}
    rank 0:  {"frame": "go", "jax_port": 41234, "hosts": ["n1", ...], "token": "9f3c", "addresses": {"1": [...], ...}}
             or  {"frame": "error", "message": ...}

It stays open afterwards for the frames of `watchdog.py`. It carries no secret and runs nothing that it reads.
"""

import dataclasses
import errno
import ipaddress
import os
import secrets
import socket
import time
from collections.abc import Mapping
from typing import Any

from tree_attn.cluster.agreement import misfit, name_of
from tree_attn.cluster.channel import Channel, readable
from tree_attn.cluster.launch import PORT_VARIABLE, Launch

PROTOCOL = 1
_WELCOME_S = 5.0  # rank 0 sends its line at once; a program that is silent for so long is another one
_GRACE_S = 5.0  # for how long rank 0 sends ranks that come late the reason why the others have gone


@dataclasses.dataclass(frozen=True)
class Members:
    """The result of a roll call, for the watchdog: the ranks, and the connections to them.

    hellos:   the `hello` of each rank; on ranks other than 0, only the rank and its node
    channels: rank 0: to every other rank; others: to rank 0
    listener: rank 0's, open so that no other program takes the port; None elsewhere
    jax_port: of rank 0's machine, for JAX's coordinator
    address:  this machine's, as the others reach it
    token:    a word of this run, for the datagrams of `probes.py`
    addresses: host and port of the datagrams of every other rank
    """

    hellos: dict[int, dict]
    channels: dict[int, Channel]
    listener: socket.socket | None
    jax_port: int
    address: str
    token: str = ""
    addresses: dict[int, tuple[str, int]] = dataclasses.field(default_factory=dict)


def hold(launch: Launch, hello: Mapping[str, Any], timeout_s: float) -> Members:
    """Holds the roll call on rank 0, and answers it on others; returns once all ranks are there and fit together.

    Args:
      hello: this rank's description, see `describe`. A `problem` in it is sent to all.
      timeout_s: the longest wait for the others, in seconds.
    Raises:
      ValueError: the ranks do not fit together, or another program has the port; the same text on every rank.
      TimeoutError: not all came in time; names those that are missing, and where they ought to be.
    """
    return _Caller(launch, hello, timeout_s).call() if launch.process_id == 0 else _answer(launch, hello, timeout_s)


def report_problem(launch: Launch, hello: Mapping[str, Any]) -> None:
    """Sends the others, as far as they are there, the `problem` for which this rank cannot take part."""
    try:
        hold(launch, hello, _GRACE_S)
    except (ValueError, OSError):
        return


def describe(launch: Launch, **facts: Any) -> dict[str, Any]:
    """Returns the `hello` of this process: its place, and the facts that must be alike everywhere."""
    place = {"rank": launch.process_id, "num_processes": launch.num_processes, "node": launch.node, "job": launch.job}
    return place | {"tree_attn": PROTOCOL, "pid": os.getpid(), "problem": None} | facts


class _Caller:
    """Rank 0's part of the roll call."""

    def __init__(self, launch: Launch, hello: Mapping[str, Any], timeout_s: float):
        self.launch, self.timeout_s = launch, timeout_s
        self.deadline = time.monotonic() + timeout_s
        self.hellos: dict[int, dict] = {0: dict(hello)}
        self.channels: dict[int, Channel] = {}
        self.unnamed: list[Channel] = []  # connected, without a `hello` yet
        self.num_informed = 0
        self.error: str | None = hello["problem"]

    def call(self) -> Members:
        listener = _listen(self.launch)
        try:
            self._gather(listener)
        except BaseException:
            listener.close()
            for channel in (*self.channels.values(), *self.unnamed):
                channel.close()
            raise
        hosts = [self.hellos[rank]["node"] for rank in range(self.launch.num_processes)]
        jax_port, token, addresses = _free_port(), secrets.token_hex(8), self._addresses()
        for channel in self.channels.values():
            channel.send("go", jax_port=jax_port, hosts=hosts, token=token, addresses=addresses)
        return Members(self.hellos, self.channels, listener, jax_port, self._own_address(), token, addresses)

    def _gather(self, listener: socket.socket) -> None:
        grace: float | None = None
        while len(self.hellos) < self.launch.num_processes or self.error:
            now = time.monotonic()
            if self.error and grace is None:
                grace = now + _GRACE_S
                self._send_error(list(self.channels.values()))
            if self.error and (now > grace or self.num_informed >= self.launch.num_processes - 1):
                raise ValueError(self.error)
            if not self.error and now > self.deadline:
                self._give_up()
            for one in readable([listener, *self.unnamed, *self.channels.values()], 0.2):
                self._welcome(listener) if one is listener else self._read(one)

    def _welcome(self, listener: socket.socket) -> None:
        channel = Channel(listener.accept()[0])
        remaining_s = max(0.0, self.deadline - time.monotonic())
        facts = {"remaining_s": remaining_s, "probe_port": self.hellos[0].get("probe_port", 0)}
        channel.send("welcome", tree_attn=PROTOCOL, job=self.launch.job, **facts)
        self.unnamed.append(channel)

    def _read(self, channel: Channel) -> None:
        frames = channel.receive()
        if channel in self.unnamed and frames:
            self.unnamed.remove(channel)
            self._admit(channel, frames[0])
        elif channel.lost:
            self._part(channel)

    def _part(self, channel: Channel) -> None:
        """Drops a connection that has ended; a rank's ends the roll call."""
        channel.close()
        if channel in self.unnamed:
            self.unnamed.remove(channel)
            return
        rank = next(rank for rank, one in self.channels.items() if one is channel)
        del self.channels[rank]
        self.error = self.error or f"{name_of(self.hellos[rank])} ended before all ranks were there"

    def _admit(self, channel: Channel, hello: dict) -> None:
        try:
            if hello["tree_attn"] != PROTOCOL or hello["job"] != self.launch.job:
                channel.send("error", message=_other_job(self.launch, hello["job"]), missing=False)
                return channel.close()
            self.error = self.error or misfit(self.hellos, hello)
            if self.error:
                return self._send_error([channel])
        except (KeyError, TypeError):
            return channel.close()  # JSON of another program
        self.hellos[hello["rank"]] = hello
        self.channels[hello["rank"]] = channel

    def _send_error(self, channels: list[Channel]) -> None:
        for channel in channels:
            channel.send("error", message=self.error, missing=False)
            self.num_informed += 1

    def _give_up(self) -> None:
        missing = [rank for rank in range(self.launch.num_processes) if rank not in self.hellos]
        message = (
            f"after {self.timeout_s:g} s, {len(missing)} of {self.launch.num_processes} ranks are missing: "
            f"{', '.join(self.launch.name_of(rank) for rank in missing)}. Those that are there: "
            f"{', '.join(map(name_of, self.hellos.values()))}. See the logs of the missing ones; where they "
            f"only start slowly, set TREE_ATTN_TIMEOUT_S to more than {self.timeout_s:g}"
        )
        for channel in self.channels.values():
            channel.send("error", message=message, missing=True)
        raise TimeoutError(message)

    def _own_address(self) -> str:
        """Returns the address that the others came to; of several, one that is not loopback."""
        addresses = {_plain(channel.socket.getsockname()[0]) for channel in self.channels.values()}
        return min(addresses, key=lambda one: (_is_loopback(one), one))

    def _addresses(self) -> dict[int, tuple[str, int]]:
        """Returns host and port for the datagrams of every other rank; some on this machine came by loopback."""
        hosts = {rank: _plain(channel.socket.getpeername()[0]) for rank, channel in self.channels.items()}
        here = self._own_address()
        return {
            rank: (here if _is_loopback(host) else host, self.hellos[rank].get("probe_port", 0))
            for rank, host in hosts.items()
        }


def _answer(launch: Launch, hello: Mapping[str, Any], timeout_s: float) -> Members:
    """Answers the roll call, as every rank but 0 does."""
    deadline = time.monotonic() + timeout_s
    channel = _connect(launch, deadline, timeout_s)
    try:
        channel.send(**hello, frame="hello")
        welcome = channel.wait(_WELCOME_S)
        if welcome is None:
            raise ValueError(_not_ours(launch, channel.lost or f"it said nothing for {_WELCOME_S:g} s"))
        if welcome["frame"] != "welcome" or welcome.get("tree_attn") != PROTOCOL:
            raise ValueError(_not_ours(launch, "it speaks another protocol"))
        if welcome["job"] != launch.job:
            raise ValueError(_other_job(launch, welcome["job"]))
        answer = channel.wait(welcome["remaining_s"] + _GRACE_S)
        if answer is None or answer["frame"] not in ("go", "error"):
            reason = channel.lost or "it has stopped answering"
            raise ConnectionError(f"{launch.name_of(0)} was there and let no rank begin: {reason}; see its log")
        if answer["frame"] == "error":
            raise (TimeoutError if answer["missing"] else ValueError)(answer["message"])
    except BaseException:
        channel.close()
        raise
    hosts = dict(enumerate(answer["hosts"]))
    hellos = {rank: {"rank": rank, "node": node, "pid": None} for rank, node in hosts.items()}
    addresses = {int(rank): tuple(where) for rank, where in answer["addresses"].items()}
    addresses.pop(launch.process_id)
    addresses[0] = (_plain(channel.socket.getpeername()[0]), welcome["probe_port"])
    here = _plain(channel.socket.getsockname()[0])
    return Members(hellos, {0: channel}, None, answer["jax_port"], here, answer["token"], addresses)


def _connect(launch: Launch, deadline: float, timeout_s: float) -> Channel:
    """Returns a connection to rank 0, which may start later than this rank does."""
    where = (launch.coordinator_host, launch.coordinator_port)
    while True:
        try:
            connection = socket.create_connection(where, timeout=max(0.1, min(5.0, deadline - time.monotonic())))
            # Where no program listens, a port of this machine that happens to be its own peer answers itself.
            if connection.getsockname() != connection.getpeername():
                return Channel(connection)
            connection.close()
            problem = "no program listens"
        except OSError as error:
            problem = str(error)
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"after {timeout_s:g} s, {launch.name_of(0)} is missing: rank {launch.process_id} on {launch.node} "
                f"could not reach it at {where[0]}:{where[1]} ({problem}). See the log of rank 0; a firewall between "
                "the nodes, or a name that means another machine here, looks the same"
            )
        time.sleep(0.1)


def _listen(launch: Launch) -> socket.socket:
    port = launch.coordinator_port
    try:
        if socket.has_dualstack_ipv6():
            try:
                return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise  # otherwise IPv6 is compiled in and turned off
        return socket.create_server(("", port), backlog=4096)
    except OSError as error:
        reason = os.strerror(error.errno)
        raise ValueError(
            f"rank 0 on {launch.node} cannot listen on port {port} ({reason}): another program has it. "
            f"{port_remedy(launch)}"
        ) from None


def port_remedy(launch: Launch) -> str:
    """Returns the remedy for a port that another program has."""
    if launch.source == "arguments":
        return "Give another port in coordinator_address"
    return f"Set {PORT_VARIABLE} to a free port, the same for all ranks"


def _free_port() -> int:
    """Returns a port that is free now, for JAX's own coordinator."""
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def _not_ours(launch: Launch, reason: str) -> str:
    return (
        f"what listens at {launch.coordinator_host}:{launch.coordinator_port}, where rank 0 on "
        f"{launch.hosts[0] if launch.hosts else launch.coordinator_host} should, is another program: {reason}. "
        f"{port_remedy(launch)}"
    )


def _other_job(launch: Launch, job: str | None) -> str:
    return (
        f"port {launch.coordinator_port} of {launch.coordinator_host} is used by two jobs at once: "
        f"{job or 'one without a job id'} and {launch.job or 'one without a job id'}. {port_remedy(launch)}"
    )


def _plain(address: str) -> str:
    """Returns an address without the prefix that a socket for both families writes before IPv4."""
    return address.removeprefix("::ffff:")


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
