"""Watches the other processes for the whole run: when one is lost, all others end within a time limit and name it.

The connections of the roll call stay open. Over them every rank sends rank 0 a sign of life every second or so, and
rank 0 sends one to every rank. A thread does it, so it goes on while the program waits in a collective. Frames:

    both ways:  {"frame": "alive", "stage": 2, "steps": 17, "silent": [3], ...}, see `Report`
                {"frame": "bye"}: this rank comes to its end, and in good order
    to rank 0:  {"frame": "failed", "message": "ValueError: ...", "is_consequence": false}
                {"frame": "facts", "number": 1, "facts": {"num_layers": "30"}}
    to others:  {"frame": "agreed", "number": 1, "error": null}
                {"frame": "verdict", "faults": [[2, "rank 2 on n2: connection closed"]]}

A rank that dies closes its connection; one that is stopped or cut off falls silent; one that is stuck ends no step; and
two that are cut off from each other do not hear each other's datagrams (`probes.py`). Rank 0 then sends the verdict to
those that remain. Each prints it and ends with status `LOST_STATUS`, whatever it is waiting in. Where rank 0 is lost,
each of the others finds that by itself.
"""

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Mapping, Sequence

from tree_attn.cluster.agreement import Agreement
from tree_attn.cluster.channel import Channel, readable
from tree_attn.cluster.clock import AwakeClock
from tree_attn.cluster.ending import LOST_STATUS, exit_now, say
from tree_attn.cluster.faults import CONSEQUENCE_SETTLES_S, Fault, Faults
from tree_attn.cluster.launch import Launch
from tree_attn.cluster.memory import free_share
from tree_attn.cluster.probes import Probes
from tree_attn.cluster.progress import Limits, Progress, Report
from tree_attn.cluster.rollcall import Members
from tree_attn.cluster.strangers import Strangers
from tree_attn.cluster.verdict import PART_S, deliver

_REST_S = 1e-4  # for each peer: of hundreds, the reports of several are read at once, not each by a look at all


@dataclasses.dataclass
class _Peer:
    """The state of another rank, as far as this one knows it."""

    rank: int
    name: str
    channel: Channel
    heard_s: float
    is_leaving: bool = False


class Watchdog:
    """Watches the other ranks in a thread of its own; one per process, which it ends only by a verdict."""

    def __init__(self, launch: Launch, members: Members, stages: Sequence[str], limits: Limits, probes: Probes):
        """Starts watching `members`.

        Args:
          stages: names of the steps that all ranks take after the roll call; see `reach`.
          limits: see `Limits`.
          probes: this rank's socket for datagrams, whose port the roll call has given to the others.
        """
        self.launch, self.limits = launch, limits
        self._name = launch.name_of(launch.process_id)
        self._clock = AwakeClock(longest_gap_s=2 * limits.beat_s + 1)
        now = self._clock.now()
        self._peers = {
            rank: _Peer(rank, launch.name_of(rank), channel, now) for rank, channel in members.channels.items()
        }
        self._strangers = Strangers(launch, members.listener)
        self._bell, self._ring = socket.socketpair()
        for end in (self._bell, self._ring):
            end.setblocking(False)
        self._probes = probes
        probes.begin(launch.process_id, launch.hosts, members, now)
        self._stage, self._steps = 0, None
        self._progress = Progress(range(launch.num_processes), stages, limits, now)
        self.agreement = Agreement(launch)
        self._faults = Faults(limits.silence_s, self._clock)
        self._is_first, self._is_leaving = launch.process_id == 0, False
        self._own_fault: Fault | None = None
        self._own_verdict = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tree_attn watchdog", daemon=True)
        self._thread.start()

    def reach(self, stage: int) -> None:
        """Reports that this process has come through `stages[:stage]`."""
        self._stage = stage
        self._wake()

    def step(self, number: int | None) -> None:
        """Reports that this process has ended `number` steps of a loop; None: it is in none."""
        self._steps = number  # goes with the next sign of life: steps may be short

    def agree(self, facts: Mapping[str, str]) -> str | None:
        """Returns None once all ranks have given the same facts, or which rank differs in what."""
        number = self.agreement.propose(facts)
        self._wake()
        return self.agreement.wait(number)

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
            silence_s = self.limits.silence_s if is_consequence else 0
            self._own_verdict.wait(CONSEQUENCE_SETTLES_S + PART_S + 1 + silence_s)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._ring.send(b"x")

    def _watch(self) -> None:
        try:
            next_beat_s, sent = 0.0, (0, False, None)
            while self._peers or self._faults:  # with the last peer gone, the verdict is still due
                # The bell wakes it for a report of this process.
                sources = [self._bell, *(peer.channel for peer in self._peers.values()), *self._strangers.sources()]
                due_s = min(next_beat_s, self._faults.due_s(len(self._peers)))
                arrived = readable(sources, due_s - self._clock.now())
                time.sleep(_REST_S * len(self._peers))
                for source in arrived:
                    self._take(source)
                is_new = sent != (sent := (self._stage, self._is_leaving, self._own_fault))
                now = self._clock.now()
                if is_new or now >= next_beat_s:
                    next_beat_s = now + self.limits.beat_s
                    self._send_report(now)
                if is_new:
                    self._send_news()
                staying = [rank for rank, peer in self._peers.items() if not peer.is_leaving]
                self.agreement.pass_on({rank: peer.channel for rank, peer in self._peers.items()}, staying)
                self._check(now)
            self.agreement.close()
        except Exception as error:  # a fault of this module must not leave the program unwatched
            self._say([f"the watchdog of {self._name} failed: {type(error).__name__}: {error}"])
            exit_now(LOST_STATUS)

    def _take(self, source) -> None:
        if source is self._bell:
            self._bell.recv(1 << 12)
        elif source in self._strangers.sources():
            self._strangers.take(source)
        else:
            peer = next(peer for peer in self._peers.values() if peer.channel is source)
            for frame in source.receive():
                peer.heard_s = self._clock.now()
                self._handle(peer, frame)
            if source.lost:
                self._drop(peer)

    def _handle(self, peer: _Peer, frame: dict) -> None:
        kind = frame.pop("frame")
        if kind == "alive":
            self._progress.note(peer.rank, Report(**frame), peer.heard_s)
        elif kind == "bye":
            peer.is_leaving = True
            self._progress.forget(peer.rank)
        elif kind == "failed":
            self._faults.add(Fault(peer.rank, f"{peer.name} failed: {frame['message']}", 1 + frame["is_consequence"]))
        elif kind == "facts":
            self.agreement.take(peer.rank, frame["number"], frame["facts"])
        elif kind == "agreed":
            self.agreement.conclude(frame["number"], frame["error"])
        elif kind == "verdict":
            self._carry_out([Fault(rank, text, 0) for rank, text in frame["faults"]])

    def _drop(self, peer: _Peer) -> None:
        del self._peers[peer.rank]
        reason = peer.channel.lost + self._progress.low_memory(peer.rank)
        self._progress.forget(peer.rank)
        peer.channel.close()
        if not peer.is_leaving:
            self._faults.add(Fault(peer.rank, f"{peer.name}: {reason}", 0))

    def _send_report(self, now: float) -> None:
        """Sends the others a sign of life, with the progress of this process."""
        self._probes.exchange(now)
        limit_s = self.limits.silence_s
        silent, never_heard = self._probes.silent(now, limit_s), self._probes.never_heard(now, limit_s)
        report = Report(self._stage, self._steps, silent, never_heard, free_share())
        if self._is_first:
            self._progress.note(0, report, now)
        for peer in self._peers.values():
            peer.channel.send("alive", **dataclasses.asdict(report))

    def _send_news(self) -> None:
        """Sends the others the failure of this process, or its end."""
        fault = self._own_fault
        if self._is_first and fault:
            self._faults.add(fault)
        for peer in self._peers.values():
            if fault and not self._is_first:
                message = fault.text.removeprefix(f"{self._name} failed: ")
                peer.channel.send("failed", message=message, is_consequence=fault.order == 2)
            if self._is_leaving:
                peer.channel.send("bye")

    def _check(self, now: float) -> None:
        """Looks for ranks that are silent or behind; rank 0 sends the verdict when it is due."""
        silence_s = self.limits.silence_s
        for peer in self._peers.values():
            peer_silent_s = now - peer.heard_s
            # Ranks of one node fall silent together: the next one is part of the same verdict.
            is_next = self._faults and peer_silent_s > silence_s - self.limits.beat_s
            # A rank that is leaving may be busy taking itself down; JAX has its own limit for that.
            if (peer_silent_s > silence_s or is_next) and not peer.is_leaving:
                self._faults.add(Fault(peer.rank, f"{peer.name}: silent for {silence_s:g} s", 0))
        if not self._is_first:
            if self._faults:
                self._carry_out(self._faults.all())
            return
        for rank, text in self._progress.faults(now, self.launch.name_of):
            self._faults.add(Fault(rank, text, 0))
        if now >= self._faults.due_s(len(self._peers)):
            self._carry_out(self._faults.gravest())

    def _carry_out(self, faults: list[Fault]) -> None:
        """Ends this process; where the verdict is its own failure, leaves the end to the program."""
        is_own = bool(self._own_fault) and self.launch.process_id in [fault.rank for fault in faults]
        if not is_own:
            self._say([fault.text for fault in faults])  # at once: a launcher may end all ranks when one has ended
        if self._is_first:
            deliver(faults, {rank: peer.channel for rank, peer in self._peers.items()})
        if not is_own:
            exit_now(LOST_STATUS)
        self._peers, self._faults = {}, Faults(self.limits.silence_s, self._clock)
        self._own_verdict.set()

    def _say(self, texts: list[str]) -> None:
        say(f"tree-attn: {'; '.join(texts)}. {self._name} ends, with status {LOST_STATUS}")
