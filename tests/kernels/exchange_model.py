"""The protocol of the fused exchange as a model of its memory, explored over every order in which things can happen.

A device runs steps one after another; in each it stores every word of its payload to every device, then waits for
every word of every device and reads it. A store is under way until it arrives: stores of one device to one word arrive
in order, all others in any. Reads happen at once. A state is how far each device is and how many stores of each stream
have arrived, which says all: a word has one writer.
"""

import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True, kw_only=True)
class Protocol:
    """The parameters. The kernel has two slots, and a word whose payload and number arrive as one."""

    devices: int
    steps: int
    words: int = 1
    slots: int = 2
    is_whole: bool = True  # else the number arrives first, the payload at some later time


@dataclasses.dataclass(frozen=True)
class State:
    """A state: `done[d]` operations of device d so far; `arrived[stream]` stores that have arrived."""

    done: tuple[int, ...]
    arrived: tuple[int, ...]


def failures(protocol: Protocol) -> Iterator[str]:
    """Explores every reachable state once; yields what goes wrong: a stale or torn read, or a standstill."""
    streams = _streams(protocol)
    start = State((0,) * protocol.devices, (0,) * len(streams))
    seen, todo = {start}, [start]
    while todo:
        state = todo.pop()
        following, wrong = _following(protocol, streams, state)
        yield from wrong
        if not following and any(count < protocol.steps * _per_step(protocol) for count in state.done):
            yield f"standstill at {state}"
        for new in following:
            if new not in seen:
                seen.add(new)
                todo.append(new)


def _streams(protocol: Protocol) -> dict[tuple, int]:
    """Returns the streams whose stores arrive in order: (from, to, slot, word, part); part 0 is the number."""
    every = range(protocol.devices)
    parts = (0,) if protocol.is_whole else (0, 1)
    keys = [
        (a, b, slot, word, part)
        for a in every
        for b in every
        for slot in range(protocol.slots)
        for word in range(protocol.words)
        for part in parts
    ]
    return {key: i for i, key in enumerate(keys)}


def _per_step(protocol: Protocol) -> int:
    return 2 * protocol.devices * protocol.words


def _following(protocol: Protocol, streams, state: State) -> tuple[list[State], list[str]]:
    following, wrong = [], []
    for device, done in enumerate(state.done):
        if done == protocol.steps * _per_step(protocol):
            continue
        step, operation = divmod(done, _per_step(protocol))
        is_read, which = divmod(operation, protocol.devices * protocol.words)
        peer, word = divmod(which, protocol.words)
        if is_read:
            found = _read(protocol, streams, state, (peer, device, step % protocol.slots, word))
            if found[0] != step:
                continue  # it waits
            if found[1] != step:
                wrong.append(f"device {device} read payload {found[1]} of device {peer} in step {step}")
        following.append(State(_plus_one(state.done, device), state.arrived))
    for key, stream in streams.items():
        if state.arrived[stream] < _stored(protocol, state, key):
            following.append(State(state.done, _plus_one(state.arrived, stream)))
    return following, wrong


def _read(protocol: Protocol, streams, state: State, place) -> tuple[int, int]:
    """Returns the steps whose number and whose payload lie in a word; below 0 where nothing has arrived."""
    counts = [state.arrived[streams[(*place, part)]] for part in ((0, 0) if protocol.is_whole else (0, 1))]
    slot = place[2]
    return tuple(slot + protocol.slots * (count - 1) for count in counts)


def _stored(protocol: Protocol, state: State, key) -> int:
    """Returns how many stores to this word its device has made: those of the steps that use the slot."""
    sender, receiver, slot, word, _ = key
    done = state.done[sender]
    steps, within = divmod(done, _per_step(protocol))
    operation = receiver * protocol.words + word
    begun = steps + (within > operation)  # steps in which this word has been stored
    return max(0, -(-(begun - slot) // protocol.slots))


def _plus_one(counts: tuple[int, ...], i: int) -> tuple[int, ...]:
    return (*counts[:i], counts[i] + 1, *counts[i + 1 :])
