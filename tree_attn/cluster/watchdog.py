"""Watches the other processes for the whole run: when one is lost, all others end within a time limit, saying which.

The connections of the roll call stay open. Over them every rank tells rank 0 every second or so that it lives, and rank
0 tells every rank; a thread does it, so it goes on while the program waits in a collective. Frames:

    both ways:  {"frame": "alive"}   {"frame": "bye"}: this rank comes to its end, and in good order
    to rank 0:  {"frame": "stage", "stage": 2}   {"frame": "failed", "message": "ValueError: ...", "by_others": false}
    to others:  {"frame": "verdict", "faults": [[2, "rank 2 on n2: connection closed"]]}

A rank that dies closes its connection; one that is stopped or cut off falls silent. Rank 0 then tells the verdict to
those that remain, and each prints it and ends with status `LOST_STATUS`, whatever it is waiting in. Where rank 0 is
lost, each of the others finds that by itself.
"""

import contextlib
import dataclasses
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import NoReturn

from tree_attn.cluster.launch import Launch
from tree_attn.cluster.rollcall import Channel, Members, readable, reject

LOST_STATUS = 75  # EX_TEMPFAIL of sysexits.h: nothing is wrong with the command, and it may be run again
# How long rank 0 waits for more before it speaks its verdict. A cause is told at once, for whoever started the ranks
# may end them all when one has ended; an error that may be a consequence waits for its cause.
_CAUSE_SETTLES_S, _CONSEQUENCE_SETTLES_S = 0.05, 0.5
_PART_S = 2.0  # how long rank 0 stays until all have heard the verdict, for JAX's service dies with it


@dataclasses.dataclass
class _Peer:
    """What is known of another rank."""

    rank: int
    node: str
    channel: Channel
    heard_s: float
    stage: int = 0
    said_bye: bool = False

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.node}"


@dataclasses.dataclass(frozen=True)
class _Fault:
    rank: int
    text: str
    order: int  # 0: the rank is lost; 1: it failed by itself; 2: it failed, likely because another one is lost


class Watchdog:
    """One per process; starts its thread at once and never stops the program but for a verdict."""

    def __init__(self, launch: Launch, members: Members, stages: Sequence[str], stage_limit_s: float, silence_s: float):
        """Watches `members`.

        Args:
            stages: what all ranks go through after the roll call; see `reach`.
            stage_limit_s: the most that any rank may need for one of them, once all others are there.
            silence_s: how long a rank may say nothing before it counts as lost.
        """
        self.launch, self.stages, self.stage_limit_s, self.silence_s = launch, stages, stage_limit_s, silence_s
        self._name = launch.name_of(launch.process_id)
        self._beat_s = min(1.0, silence_s / 5)
        now = time.monotonic()
        self._peers = {
            rank: _Peer(rank, members.hellos[rank]["node"], channel, now) for rank, channel in members.channels.items()
        }
        self._listener = members.listener
        self._strangers: list[Channel] = []  # came too late, and have been told so
        self._bell, self._ring = socket.socketpair()
        self._ring.setblocking(False)
        self._bell.setblocking(False)
        self._stage, self._all_reached, self._stage_began_s = 0, 0, now
        self._faults: dict[int, _Fault] = {}
        self._verdict_s = math.inf  # rank 0: when it will be spoken
        self._said_bye = False
        self._own_fault: _Fault | None = None
        self._own_verdict = threading.Event()
        self._is_first = launch.process_id == 0
        self._thread = threading.Thread(target=self._watch, name="tree_attn watchdog", daemon=True)
        self._thread.start()

    def reach(self, stage: int) -> None:
        """Says that this process has come through `stages[:stage]`."""
        self._stage = stage
        self._wake()

    def bye(self) -> None:
        """Says that this process ends in good order: that its connection closes is no fault from now on."""
        self._said_bye = True
        self._wake()

    def fail(self, message: str, *, by_others: bool) -> None:
        """Tells the others that this process cannot go on; returns once they know, or ends it if they are the cause.

        Args:
            message: the error, one line.
            by_others: it may be the consequence of another rank's end, such as a broken collective. Where that is so,
                this process ends with the verdict about the other.
        """
        self._own_fault = _Fault(self.launch.process_id, f"{self._name} failed: {message}", 2 if by_others else 1)
        self._wake()
        # A rank that was stopped or cut off breaks collectives only when it has been silent for long.
        if self._thread.is_alive():
            self._own_verdict.wait(_CONSEQUENCE_SETTLES_S + _PART_S + 1 + (self.silence_s if by_others else 0))

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._ring.send(b"x")

    def _watch(self) -> None:
        try:
            next_beat_s, said = 0.0, (0, False, None)
            while self._peers or self._faults:  # with the last peer gone, the verdict is still to be spoken
                # The bell wakes it for what must be told now.
                sources = [self._bell, *([self._listener] if self._listener else [])]
                sources += [peer.channel for peer in self._peers.values()] + self._strangers
                for source in readable(sources, min(next_beat_s, self._due_s()) - time.monotonic()):
                    self._take(source)
                if said != (said := (self._stage, self._said_bye, self._own_fault)):
                    self._tell_own()
                if time.monotonic() >= next_beat_s:
                    next_beat_s = time.monotonic() + self._beat_s
                    for peer in self._peers.values():
                        peer.channel.send("alive")
                self._judge()
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
                self._hear(peer, frame)
            if source.lost:
                self._part(peer)

    def _hear(self, peer: _Peer, frame: dict) -> None:
        if frame["frame"] == "stage":
            peer.stage = frame["stage"]
        elif frame["frame"] == "bye":
            peer.said_bye = True
        elif frame["frame"] == "failed":
            order = 2 if frame["by_others"] else 1
            self._note(_Fault(peer.rank, f"{peer.name} failed: {frame['message']}", order))
        elif frame["frame"] == "verdict":
            self._obey([_Fault(rank, text, 0) for rank, text in frame["faults"]])

    def _part(self, peer: _Peer) -> None:
        del self._peers[peer.rank]
        reason = peer.channel.lost
        peer.channel.close()
        if not peer.said_bye:
            self._note(_Fault(peer.rank, f"{peer.name}: {reason}", 0))

    def _tell_own(self) -> None:
        """Tells the others what the program has said of this rank since."""
        fault = self._own_fault
        if self._is_first and fault:
            self._note(fault)
        for peer in self._peers.values():
            if not self._is_first:
                peer.channel.send("stage", stage=self._stage)
                if fault:
                    message = fault.text.removeprefix(f"{self._name} failed: ")
                    peer.channel.send("failed", message=message, by_others=fault.order == 2)
            if self._said_bye:
                peer.channel.send("bye")

    def _note(self, fault: _Fault) -> None:
        settles_s = _CONSEQUENCE_SETTLES_S if fault.order == 2 else _CAUSE_SETTLES_S
        known = self._faults.get(fault.rank)
        # A rank that failed by itself goes afterwards; that it is gone says less than why.
        if known is None or known.order == 2 > fault.order:
            self._faults[fault.rank] = fault
            self._verdict_s = min(self._verdict_s, time.monotonic() + settles_s)

    def _judge(self) -> None:
        now = time.monotonic()
        for peer in self._peers.values():
            # Who has said bye may be busy taking itself down; JAX has its own limit for that.
            is_next_silent = (
                self._faults and now - peer.heard_s > self.silence_s - self._beat_s
            )  # of the same node, say
            if (now - peer.heard_s > self.silence_s or is_next_silent) and not peer.said_bye:
                self._note(_Fault(peer.rank, f"{peer.name}: silent for {self.silence_s:g} s", 0))
        if not self._is_first:
            if self._faults:
                self._obey(list(self._faults.values()))
            return
        self._judge_stages(now)
        if now >= self._due_s():
            self._speak()

    def _due_s(self) -> float:
        """Rank 0: when the verdict is to be spoken. Errors that speak of others wait for those to fall silent."""
        has_cause = any(fault.order < 2 for fault in self._faults.values())
        all_failed = len(self._faults) > len(self._peers)  # nobody is left to be the cause
        return self._verdict_s + (0 if has_cause or all_failed else self.silence_s)

    def _judge_stages(self, now: float) -> None:
        """Notes the ranks that are behind, where all wait for them for too long."""
        reached = {peer.rank: peer.stage for peer in self._peers.values()} | {0: self._stage}
        last = min(reached.values())
        if last != self._all_reached:
            self._all_reached, self._stage_began_s = last, now
        if last < len(self.stages) and now - self._stage_began_s > self.stage_limit_s:
            for rank in [rank for rank, stage in reached.items() if stage == last]:
                text = f"did not come through {self.stages[last]} in {self.stage_limit_s:g} s"
                self._note(_Fault(rank, f"{self.launch.name_of(rank)}: {text}", 0))

    def _speak(self) -> None:
        """Rank 0: tells the verdict to those that remain, waits until they have left, and obeys it too."""
        least = min(fault.order for fault in self._faults.values())
        faults = [fault for fault in self._faults.values() if fault.order == least]
        for peer in self._peers.values():
            peer.channel.send("verdict", faults=[(fault.rank, fault.text) for fault in faults])
        deadline = time.monotonic() + _PART_S
        lost = {fault.rank for fault in faults if fault.order == 0}
        waited_for = [peer.channel for peer in self._peers.values() if peer.rank not in lost]
        while waited_for and (remaining := deadline - time.monotonic()) > 0:
            for channel in readable(waited_for, remaining):
                channel.receive()
            waited_for = [channel for channel in waited_for if channel.lost is None]
        self._obey(faults)

    def _obey(self, faults: list[_Fault]) -> None:
        """Ends this process, or, where the verdict is its own failure, leaves the last words to the program."""
        if self._own_fault and self.launch.process_id in [fault.rank for fault in faults]:
            self._peers, self._faults = {}, {}
            self._own_verdict.set()
            return
        self._end([fault.text for fault in faults])

    def _end(self, texts: list[str]) -> NoReturn:
        exit_now(LOST_STATUS, f"tree-attn: {'; '.join(texts)}. {self._name} ends, with status {LOST_STATUS}")


def exit_now(status: int, line: str | None = None) -> NoReturn:
    """Ends the process at once, whatever its other threads wait for, once what it has printed is out.

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
