"""Processes that come after the roll call: they get their error, while the ranks go on."""

import socket

from tree_attn.cluster.channel import Channel
from tree_attn.cluster.launch import Launch
from tree_attn.cluster.rollcall import PROTOCOL, port_remedy


class Strangers:
    """The listener of the roll call, which stays open, and the connections of those that came too late."""

    def __init__(self, launch: Launch, listener: socket.socket | None):
        """Watches `listener`; None, on ranks other than 0, is watched by none."""
        self._launch, self._listener = launch, listener
        self._rejected: list[Channel] = []

    def sources(self) -> list:
        """Returns what to wait for."""
        return [*([self._listener] if self._listener else []), *self._rejected]

    def take(self, source) -> None:
        """Rejects a process that comes, or closes the connection of one that has gone."""
        if source is self._listener:
            stranger = _reject(self._launch, self._listener)
            self._rejected += [stranger] if stranger else []
            return
        source.receive()
        if source.lost:
            self._rejected.remove(source)
            source.close()


def _reject(launch: Launch, listener: socket.socket) -> Channel | None:
    """Sends a process that comes after the roll call the reason: another job on the port, or a rank too many.

    Returns:
      The connection, to be closed when the other side has: closed before, it would take the message with it.
    """
    try:
        channel = Channel(listener.accept()[0])
    except OSError:
        return None
    message = (
        f"the roll call at {launch.coordinator_host}:{launch.coordinator_port} is over: all {launch.num_processes} "
        f"ranks of {launch.job or 'the job there'} are running. Two jobs have one port, or a rank was started twice. "
        f"{port_remedy(launch)}"
    )
    channel.send("welcome", tree_attn=PROTOCOL, job=launch.job, remaining_s=0.0)
    channel.send("error", message=message, missing=False)
    return channel
