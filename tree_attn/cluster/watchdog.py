"""Watches the other processes for the whole run: when one is lost, all others end within a time limit and name it.

The connections of the roll call stay open. Over them every rank sends rank 0 a sign of life every second or so, and
rank 0 sends one to every rank. A thread does it, so it goes on while the program waits in a collective. Frames:

    both ways:  {"frame": "alive"}   {"frame": "bye"}: this rank comes to its end, and in good order
    to rank 0:  {"frame": "stage", "stage": 2}
                {"frame": "failed", "message": "ValueError: ...", "is_consequence": false}
    to others:  {"frame": "verdict", "faults": [[2, "rank 2 on n2: connection closed"]]}

A rank that dies closes its connection; one that is stopped or cut off falls silent. Rank 0 then sends the verdict to
those that remain. Each prints it and ends with status `LOST_STATUS`, whatever it is waiting in. Where rank 0 is lost,
each of the others finds that by itself.
"""

import contextlib
import dataclasses
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import NoReturn

from tree_attn.cluster.channel import Channel, readable
from tree_attn.cluster.faults import CONSEQUENCE_SETTLES_S, Fault, Faults
from tree_attn.cluster.launch import Launch
from tree_attn.cluster.rollcall import Members, reject

LOST_STATUS = 75  # EX_TEMPFAIL of sysexits.h: nothing is wrong with the command, and it may be run again
_PART_S = 2.0  # rank 0 stays so long until all have the verdict, for JAX's service dies with it


@dataclasses.dataclass
class _Peer:
    """The state of another rank, as far as this one knows it."""

    rank: int
    node: str
    channel: Channel
    heard_s: float
    stage: int = 0
    is_leaving: bool = False

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.node}"


class Watchdog:
    """Watches the other ranks in a thread of its own; one per process, which it ends only by a verdict."""

    def __init__(self, launch: Launch, members: Members, stages: Sequence[str], stage_limit_s: float, silence_s: float):
        """Starts watching `members`.

        Args:
          stages: names of the steps that all ranks take after the roll call; see `reach`.
          stage_limit_s: seconds that any rank may need for one of them, once all others are there.
          silence_s: seconds that a rank may be silent before it counts as lost.
        """
        self.launch, self.stages, self.stage_limit_s, self.silence_s = launch, stages, stage_limit_s, silence_s
        self._name = launch.name_of(launch.process_id)
        self._beat_s = min(1.0, silence_s / 5)
        now = time.monotonic()
        self._peers = {
            rank: _Peer(rank, members.hellos[rank]["node"], channel, now) for rank, channel in members.channels.items()
        }
        self._listener = members.listener
        self._strangers: list[Channel] = []  # came too late, and have got their error
        self._bell, self._ring = socket.socketpair()
        self._ring.setblocking(False)
        self._bell.setblocking(False)
        self._stage, self._all_reached, self._stage_began_s = 0, 0, now
        self._faults = Faults(silence_s)
        self._is_leaving = False
        self._own_fault: Fault | None = None
        self._own_verdict = threading.Event()
        self._is_first = launch.process_id == 0
        self._thread = threading.Thread(target=self._watch, name="tree_attn watchdog", daemon=True)
        self._thread.start()

    def reach(self, stage: int) -> None:
        """Reports that this process has come through `stages[:stage]`."""
        self._stage = stage
        self._wake()

    def leave(self) -> None:
        """Reports that this process ends in good order: the end of its connection is no fault from now on."""
        self._is_leaving = True
        self._wake()

    def fail(self, message: str, *, is_consequence: bool) -> None:
        """Reports that this process cannot go on; returns once the others know, or ends it if they are the cause.

        Args:
          message: the error, one line.
          is_consequence: it may follow from another rank's end, as a broken collective does. Where that is so, this
            process ends with the verdict about the other.
        """
        order = 2 if is_consequence else 1
        self._own_fault = Fault(self.launch.process_id, f"{self._name} failed: {message}", order)
        self._wake()
        # A rank that was stopped or cut off breaks collectives only when it has been silent for long.
        if self._thread.is_alive():
            silence_s = self.silence_s if is_consequence else 0
            self._own_verdict.wait(CONSEQUENCE_SETTLES_S + _PART_S + 1 + silence_s)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._ring.send(b"x")

    def _watch(self) -> None:
        try:
            next_beat_s, sent = 0.0, (0, False, None)
            while self._peers or self._faults:  # with the last peer gone, the verdict is still due
                # The bell wakes it for a report of this process.
                sources = [self._bell, *([self._listener] if self._listener else [])]
                sources += [peer.channel for peer in self._peers.values()] + self._strangers
                due_s = min(next_beat_s, self._faults.due_s(len(self._peers)))
                for source in readable(sources, due_s - time.monotonic()):
                    self._take(source)
                if sent != (sent := (self._stage, self._is_leaving, self._own_fault)):
                    self._send_reports()
                if time.monotonic() >= next_beat_s:
                    next_beat_s = time.monotonic() + self._beat_s
                    for peer in self._peers.values():
                        peer.channel.send("alive")
                self._check()
        except Exception as error:  # a fault of this module must not leave the program unwatched
            self._end([f"the watchdog of {self._name} failed: {type(error).__name__}: {error}"])

    def _take(self, source) -> None:
        if source is self._bell:
            self._bell.recv(1 << 12)
        elif source is self._listener:
            stranger = reject(self.launch, self._listener)
            self._strangers += [stranger] if stranger else []
        elif source in self._strangers:
            source.receive()
            if source.lost:
                self._strangers.remove(source)
                source.close()
        else:
            peer = next(peer for peer in self._peers.values() if peer.channel is source)
            for frame in source.receive():
                peer.heard_s = time.monotonic()
                self._handle(peer, frame)
            if source.lost:
                self._drop(peer)

    def _handle(self, peer: _Peer, frame: dict) -> None:
        if frame["frame"] == "stage":
            peer.stage = frame["stage"]
        elif frame["frame"] == "bye":
            peer.is_leaving = True
        elif frame["frame"] == "failed":
            order = 2 if frame["is_consequence"] else 1
            self._faults.add(Fault(peer.rank, f"{peer.name} failed: {frame['message']}", order))
        elif frame["frame"] == "verdict":
            self._carry_out([Fault(rank, text, 0) for rank, text in frame["faults"]])

    def _drop(self, peer: _Peer) -> None:
        del self._peers[peer.rank]
        reason = peer.channel.lost
        peer.channel.close()
        if not peer.is_leaving:
            self._faults.add(Fault(peer.rank, f"{peer.name}: {reason}", 0))

    def _send_reports(self) -> None:
        """Sends the others the latest reports of this process."""
        fault = self._own_fault
        if self._is_first and fault:
            self._faults.add(fault)
        for peer in self._peers.values():
            if not self._is_first:
                peer.channel.send("stage", stage=self._stage)
                if fault:
                    message = fault.text.removeprefix(f"{self._name} failed: ")
                    peer.channel.send("failed", message=message, is_consequence=fault.order == 2)
            if self._is_leaving:
                peer.channel.send("bye")

    def _check(self) -> None:
        """Looks for ranks that are silent or late; rank 0 sends the verdict when it is due."""
        now = time.monotonic()
        for peer in self._peers.values():
            silence_s = now - peer.heard_s
            # Ranks of one node fall silent together: the next one is part of the same verdict.
            is_next = self._faults and silence_s > self.silence_s - self._beat_s
            # A rank that is leaving may be busy taking itself down; JAX has its own limit for that.
            if (silence_s > self.silence_s or is_next) and not peer.is_leaving:
                self._faults.add(Fault(peer.rank, f"{peer.name}: silent for {self.silence_s:g} s", 0))
        if not self._is_first:
            if self._faults:
                self._carry_out(self._faults.all())
            return
        self._check_stages(now)
        if now >= self._faults.due_s(len(self._peers)):
            self._send_verdict()

    def _check_stages(self, now: float) -> None:
        """Adds the ranks that are behind, where all have waited for them for too long."""
        reached = {peer.rank: peer.stage for peer in self._peers.values()} | {0: self._stage}
        last = min(reached.values())
        if last != self._all_reached:
            self._all_reached, self._stage_began_s = last, now
        if last < len(self.stages) and now - self._stage_began_s > self.stage_limit_s:
            for rank in [rank for rank, stage in reached.items() if stage == last]:
                text = f"did not come through {self.stages[last]} in {self.stage_limit_s:g} s"
                self._faults.add(Fault(rank, f"{self.launch.name_of(rank)}: {text}", 0))

    def _send_verdict(self) -> None:
        """Sends rank 0's verdict to those that remain, waits until they have left, and carries it out here."""
        faults = self._faults.gravest()
        for peer in self._peers.values():
            peer.channel.send("verdict", faults=[(fault.rank, fault.text) for fault in faults])
        deadline = time.monotonic() + _PART_S
        lost = {fault.rank for fault in faults if fault.order == 0}
        waited_for = [peer.channel for peer in self._peers.values() if peer.rank not in lost]
        while waited_for and (remaining := deadline - time.monotonic()) > 0:
            for channel in readable(waited_for, remaining):
                channel.receive()
            waited_for = [channel for channel in waited_for if channel.lost is None]
        self._carry_out(faults)

    def _carry_out(self, faults: list[Fault]) -> None:
        """Ends this process; where the verdict is its own failure, leaves the end to the program."""
        if self._own_fault and self.launch.process_id in [fault.rank for fault in faults]:
            self._peers, self._faults = {}, Faults(self.silence_s)
            self._own_verdict.set()
            return
        self._end([fault.text for fault in faults])

    def _end(self, texts: list[str]) -> NoReturn:
        exit_now(LOST_STATUS, f"tree-attn: {'; '.join(texts)}. {self._name} ends, with status {LOST_STATUS}")


def exit_now(status: int, line: str | None = None) -> NoReturn:
    """Ends the process at once, whatever its other threads wait for, after a flush of its output.

    No cleaning up: JAX's would wait for the ranks that are lost.
    """

    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # closed, full, broken: nothing is worth staying for
                stream.flush()

    # Another thread may hold a stream's lock, and may itself be stuck.
    flushing = threading.Thread(target=flush, daemon=True)
    flushing.start()
    flushing.join(1.0)
    if line is not None:
        with contextlib.suppress(OSError):
            os.write(2, (line + "\n").encode(errors="replace"))
    os._exit(status)
