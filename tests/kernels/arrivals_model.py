"""The last CTA of an output tile merges its partial states, explored over every order of the CTAs' operations.

A device runs launches one after another. In each a CTA stores its partial state, fences, and adds one to the count. The
CTA that finds the others counted reads all partial states and sets the count to zero. A store is under way until it
arrives; a fence waits for the CTA's own. A launch ends when all stores have arrived.
"""

import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True, kw_only=True)
class Meeting:
    """The parameters. `launches`: the CTAs that cut the output tile in each; `resident`: how many run at a time."""

    launches: tuple[int, ...]
    resident: int = 3
    fences: bool = True
    resets: bool = True


@dataclasses.dataclass(frozen=True)
class State:
    """`done[c]` operations of CTA c so far, `before[c]` that it found, memory, and stores under way."""

    launch: int
    done: tuple[int, ...]
    before: tuple[int, ...]
    parts: tuple[int, ...]
    count: int
    merged: int
    flying: frozenset


STORE, FENCE, COUNT, MERGE, END = range(5)


def failures(meeting: Meeting) -> Iterator[str]:
    """Explores every reachable state once; yields what goes wrong."""
    empty = State(-1, (), (), (0,) * max(meeting.launches), 0, 1, frozenset())
    seen, todo = set(), list(_launched(meeting, empty))
    while todo:
        state = todo.pop()
        if state in seen or state.launch == len(meeting.launches):
            continue
        seen.add(state)
        if all(done == END for done in state.done) and not state.flying:
            if state.merged != 1:
                yield f"merged {state.merged} times in launch {state.launch}"
            todo.extend(_launched(meeting, state))
            continue
        for new in _following(meeting, state):
            if isinstance(new, str):
                yield new
            else:
                todo.append(new)


def _launched(meeting: Meeting, state: State) -> list[State]:
    launch = state.launch + 1
    ctas = meeting.launches[launch] if launch < len(meeting.launches) else 0
    return [dataclasses.replace(state, launch=launch, done=(STORE,) * ctas, before=(0,) * ctas, merged=0)]


def _following(meeting: Meeting, state: State) -> Iterator[State | str]:
    running = sum(STORE < done < END for done in state.done)
    number, ctas = state.launch + 1, len(state.done)
    for cta, done in enumerate(state.done):
        if done == END or (done == STORE and running == meeting.resident):
            continue
        after = dataclasses.replace(state, done=_with(state.done, cta, done + 1))
        if done == STORE:
            yield dataclasses.replace(after, flying=state.flying | {("part", cta, number)})
        elif done == FENCE:
            if not meeting.fences or ("part", cta, number) not in state.flying:
                yield after
        elif done == COUNT:
            yield dataclasses.replace(after, before=_with(state.before, cta, state.count), count=state.count + 1)
        elif state.before[cta] != ctas - 1:
            yield after
        else:
            if any(part != number for part in state.parts[:ctas]):
                yield f"read another launch's partial state in launch {state.launch}"
            reset = {("count", 0, 0)} if meeting.resets else set()
            yield dataclasses.replace(after, merged=state.merged + 1, flying=state.flying | reset)
    for store in state.flying:
        where, place, value = store
        arrived = {"count": value} if where == "count" else {"parts": _with(state.parts, place, value)}
        yield dataclasses.replace(state, flying=state.flying - {store}, **arrived)


def _with(values: tuple[int, ...], i: int, value: int) -> tuple[int, ...]:
    return (*values[:i], value, *values[i + 1 :])
