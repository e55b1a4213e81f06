"""All CTAs of an output tile merge a part each, or give up waiting, explored over every order of their operations.

A device runs launches one after another. In each a CTA stores its partial state, fences, and counts itself in. It reads
the count until all have arrived and merges its part, or gives up. Then it counts itself out. The last to leave sets the
count to zero, and merges all parts again if one had given up. A store is under way until it arrives; a fence waits for
the CTA's own. A launch ends when all stores have arrived.
"""

import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True, kw_only=True)
class Meeting:
    """The parameters. `launches`: the CTAs that cut the output tile in each; `resident`: how many run at a time.

    Attributes:
      gives_up: a CTA may give up waiting; merges_again: the last then merges all parts.
    """

    launches: tuple[int, ...]
    resident: int = 3
    fences: bool = True
    resets: bool = True
    gives_up: bool = True
    merges_again: bool = True


@dataclasses.dataclass(frozen=True)
class State:
    """`done[c]` operations of CTA c so far, memory, parts that are merged, and stores under way.

    The count has three parts: CTAs that arrived, that left, and that had given up.
    """

    launch: int
    done: tuple[int, ...]
    has_given_up: tuple[bool, ...]
    stored: tuple[int, ...]
    count: tuple[int, int, int]
    merged: frozenset
    flying: frozenset


STORE, FENCE, ARRIVE, WAIT, DEPART, END = range(6)


def failures(meeting: Meeting) -> Iterator[str]:
    """Explores every reachable state once; yields what goes wrong."""
    empty = State(-1, (), (), (0,) * max(meeting.launches), (0, 0, 0), frozenset(), frozenset())
    seen, todo = set(), [_launched(meeting, empty)]
    while todo:
        state = todo.pop()
        if state in seen or state.launch == len(meeting.launches):
            continue
        seen.add(state)
        if all(done == END for done in state.done) and not state.flying:
            yield from (f"part {i} is missed in launch {state.launch}" for i in _missed(state))
            todo.append(_launched(meeting, state))
            continue
        following = list(_following(meeting, state))
        if not following:
            yield f"standstill in launch {state.launch}"
        for new in following:
            if isinstance(new, str):
                yield new
            else:
                todo.append(new)


def _launched(meeting: Meeting, state: State) -> State:
    launch = state.launch + 1
    ctas = meeting.launches[launch] if launch < len(meeting.launches) else 0
    return dataclasses.replace(
        state, launch=launch, done=(STORE,) * ctas, has_given_up=(False,) * ctas, merged=frozenset()
    )


def _missed(state: State) -> list[int]:
    return [cta for cta in range(len(state.done)) if cta not in state.merged]


def _following(meeting: Meeting, state: State) -> Iterator[State | str]:
    running = sum(STORE < done < END for done in state.done)
    number, ctas = state.launch + 1, len(state.done)
    for cta, done in enumerate(state.done):
        if done == END or (done == STORE and running == meeting.resident):
            continue
        after = dataclasses.replace(state, done=_with(state.done, cta, done + 1))
        arrived, left, given_up = state.count
        if done == STORE:
            yield dataclasses.replace(after, flying=state.flying | {("stored", cta, number)})
        elif done == FENCE:
            if not meeting.fences or ("stored", cta, number) not in state.flying:
                yield after
        elif done == ARRIVE:
            yield dataclasses.replace(after, count=(arrived + 1, left, given_up))
        elif done == WAIT:
            if arrived == ctas:
                yield from _read(state)
                yield dataclasses.replace(after, merged=state.merged | {cta})
            if meeting.gives_up:
                yield dataclasses.replace(after, has_given_up=_with(state.has_given_up, cta, True))
        else:
            count = (arrived, left + 1, given_up + state.has_given_up[cta])
            if count[1] < ctas:
                yield dataclasses.replace(after, count=count)
                continue
            merged = state.merged
            if count[2] and meeting.merges_again:
                yield from _read(state)
                merged = frozenset(range(ctas))
            reset = {("count", 0, (0, 0, 0))} if meeting.resets else set()
            yield dataclasses.replace(after, count=count, merged=merged, flying=state.flying | reset)
    for store in state.flying:
        where, place, value = store
        memory = {"count": value} if where == "count" else {"stored": _with(state.stored, place, value)}
        yield dataclasses.replace(state, flying=state.flying - {store}, **memory)


def _read(state: State) -> Iterator[str]:
    if any(found != state.launch + 1 for found in state.stored[: len(state.done)]):
        yield f"read another launch's partial state in launch {state.launch}"


def _with(values: tuple, i: int, value) -> tuple:
    return (*values[:i], value, *values[i + 1 :])
