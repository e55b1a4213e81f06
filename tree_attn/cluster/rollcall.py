"""The roll call: before JAX connects, every rank says who it is, and rank 0 lets all begin or tells all why not.

One connection from each rank to rank 0, on which lines of JSON pass in both directions:

    rank 0:  {"frame": "welcome", "tree_attn": 1, "job": ..., "remaining_s": 58.2}
    rank r:  {"frame": "hello", "rank": 2, "num_processes": 4, "node": "n2", "pid": 77, "versions": {...}, ...}
    rank 0:  {"frame": "go", "jax_port": 41234, "hosts": ["n1", ...]}  or  {"frame": "error", "message": ...}

and that stays open afterwards for the frames of `watchdog.py`. It carries no secret and runs nothing that it reads.
"""

import dataclasses
import errno
import ipaddress
import json
import os
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tree_attn.cluster.launch import PORT_VARIABLE, Launch

PROTOCOL = 1
_LONGEST_LINE = 1 << 20
_WELCOME_S = 5.0  # rank 0 says its line at once; whoever says nothing for so long is someone else
_GRACE_S = 5.0  # for how long rank 0 tells those who come late why the others have gone


def readable(sources: Sequence[Any], timeout_s: float) -> list[Any]:
    """Those of `sources` (sockets, channels) that have something to read, after at most `timeout_s`."""
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
        return self.socket.fileno()

    def send(self, frame: str, **content: Any) -> None:
        """Sends an object; what the network does not take now goes with the next one."""
        self._to_send += json.dumps({"frame": frame} | content).encode() + b"\n"
        try:
            while self._to_send and self.lost is None:
                self._to_send = self._to_send[self.socket.send(self._to_send) :]
        except BlockingIOError:
            if len(self._to_send) > _LONGEST_LINE:
                self._to_send = b""  # nobody has read for hours: that is for the watchdog to notice
        except OSError as error:
            self._lose(error)

    def receive(self) -> list[dict]:
        """All objects that have come."""
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
        """The next object, or None if none comes in time or the connection ends before."""
        deadline = time.monotonic() + timeout_s
        while not (frames := self.receive()):
            remaining = deadline - time.monotonic()
            if self.lost or remaining <= 0:
                return None
            readable([self], remaining)
        self._unread = frames[1:]
        return frames[0]

    def close(self) -> None:
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
        # A reset is what the kernel says for a process that has died with something left to read.
        has_died = error.errno in (errno.ECONNRESET, errno.EPIPE)
        self.lost = "connection closed" if has_died else f"connection lost ({error.strerror})"


@dataclasses.dataclass(frozen=True)
class Members:
    """What the roll call leaves to the watchdog: who is there, and the connections."""

    hellos: dict[int, dict]  # by rank; on ranks other than 0, only what rank 0 has told
    channels: dict[int, Channel]  # rank 0: to every other rank; others: to rank 0
    listener: socket.socket | None  # rank 0's, kept so that nobody else takes the port
    jax_port: int
    address: str  # this machine's, as the others reach it


def hold(launch: Launch, hello: Mapping[str, Any], timeout_s: float) -> Members:
    """Calls the roll (rank 0) or answers it; returns once every rank is there and all fit together.

    Args:
        hello: what this rank says of itself; `describe` makes it. A `problem` in it is told to all.
        timeout_s: the most to wait for the others.

    Raises:
        ValueError: the ranks do not fit together, or the port belongs to someone else; the same text on every rank.
        TimeoutError: not all came in time; names those that are missing, and where they ought to be.
    """
    return _Caller(launch, hello, timeout_s).call() if launch.process_id == 0 else _answer(launch, hello, timeout_s)


def tell_problem(launch: Launch, hello: Mapping[str, Any]) -> None:
    """Tells the others, as far as they are there, that this rank cannot take part; its `hello` says why."""
    try:
        hold(launch, hello, _GRACE_S)
    except (ValueError, OSError):
        return


def describe(launch: Launch, **facts: Any) -> dict[str, Any]:
    """The `hello` of this process: its place, and what must be alike everywhere."""
    place = {"rank": launch.process_id, "num_processes": launch.num_processes, "node": launch.node, "job": launch.job}
    return place | {"tree_attn": PROTOCOL, "pid": os.getpid(), "problem": None} | facts


def reject(launch: Launch, listener: socket.socket) -> Channel | None:
    """Tells whoever comes after the roll call that it is over: another job on the same port, or a rank too many.

    Returns:
        the connection, to be closed when the other side has: closed before, it would take the message with it.
    """
    try:
        channel = Channel(listener.accept()[0])
    except OSError:
        return None
    message = (
        f"the roll call at {launch.coordinator_host}:{launch.coordinator_port} is over: all {launch.num_processes} "
        f"ranks of {launch.job or 'the job there'} are running. Two jobs have one port, or a rank was started twice. "
        f"{_port_remedy(launch)}"
    )
    channel.send("welcome", tree_attn=PROTOCOL, job=launch.job, remaining_s=0.0)
    channel.send("error", message=message, missing=False)
    return channel


class _Caller:
    """Rank 0's part."""

    def __init__(self, launch: Launch, hello: Mapping[str, Any], timeout_s: float):
        self.launch, self.timeout_s = launch, timeout_s
        self.deadline = time.monotonic() + timeout_s
        self.hellos: dict[int, dict] = {0: dict(hello)}
        self.channels: dict[int, Channel] = {}
        self.unnamed: list[Channel] = []  # connected, and have not said who they are
        self.told = 0
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
        jax_port = _free_port()
        for channel in self.channels.values():
            channel.send("go", jax_port=jax_port, hosts=hosts)
        return Members(self.hellos, self.channels, listener, jax_port, self._own_address())

    def _gather(self, listener: socket.socket) -> None:
        grace: float | None = None
        while len(self.hellos) < self.launch.num_processes or self.error:
            now = time.monotonic()
            if self.error and grace is None:
                grace = now + _GRACE_S
                self._tell(list(self.channels.values()))
            if self.error and (now > grace or self.told >= self.launch.num_processes - 1):
                raise ValueError(self.error)
            if not self.error and now > self.deadline:
                self._give_up()
            for one in readable([listener, *self.unnamed, *self.channels.values()], 0.2):
                self._welcome(listener) if one is listener else self._read(one)

    def _welcome(self, listener: socket.socket) -> None:
        channel = Channel(listener.accept()[0])
        remaining_s = max(0.0, self.deadline - time.monotonic())
        channel.send("welcome", tree_attn=PROTOCOL, job=self.launch.job, remaining_s=remaining_s)
        self.unnamed.append(channel)

    def _read(self, channel: Channel) -> None:
        frames = channel.receive()
        if channel in self.unnamed and frames:
            self.unnamed.remove(channel)
            self._admit(channel, frames[0])
        elif channel.lost:
            self._part(channel)

    def _part(self, channel: Channel) -> None:
        """Forgets a connection that has ended; one of a rank ends the roll call."""
        channel.close()
        if channel in self.unnamed:
            self.unnamed.remove(channel)
            return
        rank = next(rank for rank, one in self.channels.items() if one is channel)
        del self.channels[rank]
        self.error = self.error or f"{_who(self.hellos[rank])} ended before all ranks were there"

    def _admit(self, channel: Channel, hello: dict) -> None:
        try:
            if hello["tree_attn"] != PROTOCOL or hello["job"] != self.launch.job:
                channel.send("error", message=_other_job(self.launch, hello["job"]), missing=False)
                return channel.close()
            self.error = self.error or self._misfit(hello)
            if self.error:
                return self._tell([channel])
        except (KeyError, TypeError):
            return channel.close()  # it speaks JSON and is none of ours
        self.hellos[hello["rank"]] = hello
        self.channels[hello["rank"]] = channel

    def _misfit(self, hello: dict) -> str | None:
        """Why this rank cannot join those that are there."""
        first, rank = self.hellos[0], hello["rank"]
        if hello["problem"]:
            return f"{_who(hello)} cannot take part: {hello['problem']}"
        if hello["num_processes"] != self.launch.num_processes:
            return _unlike("num_processes", hello, first, "start all with the same number")
        if rank in self.hellos:
            return (
                f"rank {rank} is there twice: {_who(self.hellos[rank])} and {_who(hello)}. Every process needs a "
                "process_id (SLURM_PROCID, RANK) of its own"
            )
        for package, version in first["versions"].items():
            if hello["versions"].get(package) != version:
                return (
                    f"the ranks run different versions of {package}: {version} in {_who(first)}, "
                    f"{hello['versions'].get(package)} in {_who(hello)}. Use one environment on all nodes"
                )
        if hello["platform"] != first["platform"]:
            return _unlike("platform", hello, first, "look for the driver and the JAX plugin where it is cpu")
        if hello["n_local_devices"] != first["n_local_devices"]:
            return _unlike("n_local_devices", hello, first, "every process must have as many devices as the others")
        for other in self.hellos.values():
            shared = sorted(set(other["gpus"]) & set(hello["gpus"])) if other["node"] == hello["node"] else []
            if shared:
                return (
                    f"{_who(other)} and {_who(hello)} both take GPU {shared[0]}: every process needs GPUs of its own "
                    "(local_device_ids, or let every task see all GPUs of its node)"
                )
        return None

    def _tell(self, channels: list[Channel]) -> None:
        for channel in channels:
            channel.send("error", message=self.error, missing=False)
            self.told += 1

    def _give_up(self) -> None:
        missing = [rank for rank in range(self.launch.num_processes) if rank not in self.hellos]
        message = (
            f"after {self.timeout_s:g} s, {len(missing)} of {self.launch.num_processes} ranks are missing: "
            f"{', '.join(self.launch.name_of(rank) for rank in missing)}. Those that are there: "
            f"{', '.join(_who(hello) for hello in self.hellos.values())}. See the logs of the missing ones; where they "
            f"only start slowly, set TREE_ATTN_TIMEOUT_S to more than {self.timeout_s:g}"
        )
        for channel in self.channels.values():
            channel.send("error", message=message, missing=True)
        raise TimeoutError(message)

    def _own_address(self) -> str:
        """The address that the others came to; of several, one that is not loopback."""
        addresses = {_plain(channel.socket.getsockname()[0]) for channel in self.channels.values()}
        return min(addresses, key=lambda one: (ipaddress.ip_address(one.partition("%")[0]).is_loopback, one))


def _answer(launch: Launch, hello: Mapping[str, Any], timeout_s: float) -> Members:
    """The part of every rank but 0."""
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
            raise ConnectionError(f"{launch.name_of(0)} was there and let nobody begin: {reason}; see its log")
        if answer["frame"] == "error":
            raise (TimeoutError if answer["missing"] else ValueError)(answer["message"])
    except BaseException:
        channel.close()
        raise
    hosts = dict(enumerate(answer["hosts"]))
    hellos = {rank: {"rank": rank, "node": node, "pid": None} for rank, node in hosts.items()}
    return Members(hellos, {0: channel}, None, answer["jax_port"], _plain(channel.socket.getsockname()[0]))


def _connect(launch: Launch, deadline: float, timeout_s: float) -> Channel:
    """A connection to rank 0, which may start later than this rank does."""
    where = (launch.coordinator_host, launch.coordinator_port)
    while True:
        try:
            connection = socket.create_connection(where, timeout=max(0.1, min(5.0, deadline - time.monotonic())))
            # Where nobody listens, a port of this machine that happens to be its own peer answers itself.
            if connection.getsockname() != connection.getpeername():
                return Channel(connection)
            connection.close()
            problem = "nobody listens"
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
            f"{_port_remedy(launch)}"
        ) from None


def _port_remedy(launch: Launch) -> str:
    if launch.source == "arguments":
        return "Give another port in coordinator_address"
    return f"Set {PORT_VARIABLE} to a free port, the same for all ranks"


def _free_port() -> int:
    """A port that is free now, for JAX's own coordinator."""
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def _not_ours(launch: Launch, reason: str) -> str:
    return (
        f"what listens at {launch.coordinator_host}:{launch.coordinator_port}, where rank 0 on "
        f"{launch.hosts[0] if launch.hosts else launch.coordinator_host} should, is another program: {reason}. "
        f"{_port_remedy(launch)}"
    )


def _other_job(launch: Launch, job: str | None) -> str:
    return (
        f"port {launch.coordinator_port} of {launch.coordinator_host} is used by two jobs at once: "
        f"{job or 'one without a job id'} and {launch.job or 'one without a job id'}. {_port_remedy(launch)}"
    )


def _who(hello: Mapping[str, Any]) -> str:
    return f"rank {hello['rank']} on {hello['node']} (pid {hello['pid']})"


def _unlike(name: str, hello: Mapping, first: Mapping, remedy: str) -> str:
    return f"the ranks do not agree on {name}: {first[name]} in {_who(first)}, {hello[name]} in {_who(hello)}; {remedy}"


def _plain(address: str) -> str:
    """Without the prefix that a socket for both families writes before an IPv4 address."""
    return address.removeprefix("::ffff:")
