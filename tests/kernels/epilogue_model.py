"""The meeting of one device's CTAs where the exchange ends their kernel, explored over every order of their operations.

A device runs launches one after another. A CTA reads its counter and stores its partial state with the step's number.
One of the first CTAs then waits until its output tile's partial states, its own and the next, bear that number. Then a
CTA counts for itself, and for the CTAs beyond this launch. A store is under way until it arrives; a launch ends when
all stores have arrived.
"""

import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True, kw_only=True)
class Meeting:
    """The parameters. `launches`: the CTAs of each; `resident`: how many run at a time."""

    launches: tuple[int, ...]
    exchanging: int = 1
    counters: int = 3
    resident: int = 3
    counting: str = "own and absent"  # the kernel's; or "own", or "first", which counts for all


@dataclasses.dataclass(frozen=True)
class State:
    """A state: `done[c]` operations of CTA c so far, the number `steps[c]` that it read, memory, stores under way."""

    launch: int
    done: tuple[int, ...]
    steps: tuple[int, ...]
    parts: tuple[int, ...]
    counters: tuple[int, ...]
    flying: frozenset


def failures(meeting: Meeting) -> Iterator[str]:
    """Explores every reachable state once; yields what goes wrong: a wrong number, or a standstill."""
    start = _launched(meeting, State(-1, (), (), (0,) * max(meeting.launches), (0,) * meeting.counters, frozenset()))
    seen, todo = {start}, [start]
    while todo:
        state = todo.pop()
        if state.launch == len(meeting.launches):
            continue
        wrong = {step for step, done in zip(state.steps, state.done) if done} - {state.launch + 1}
        if wrong:
            yield f"step {wrong} in launch {state.launch}"
            continue
        following = list(_following(meeting, state))
        if not following:
            yield f"standstill at {state}"
        for new in following:
            if new not in seen:
                seen.add(new)
                todo.append(new)


def _launched(meeting: Meeting, state: State) -> State:
    """Returns the beginning of the next launch; past the last it has no CTA."""
    launch = state.launch + 1
    ctas = meeting.launches[launch] if launch < len(meeting.launches) else 0
    return dataclasses.replace(state, launch=launch, done=(0,) * ctas, steps=(0,) * ctas)


def _following(meeting: Meeting, state: State) -> Iterator[State]:
    ctas = len(state.done)
    reads = [range(cta, min(cta + 2, ctas)) if cta < meeting.exchanging else () for cta in range(ctas)]
    ends = [3 + len(parts) for parts in reads]  # begin, part, parts read, count
    running = sum(0 < done < end for done, end in zip(state.done, ends))
    for cta, done in enumerate(state.done):
        step = state.steps[cta]
        if done == ends[cta] or (done == 0 and running == meeting.resident):
            continue
        after = dataclasses.replace(state, done=_with(state.done, cta, done + 1))
        if done == 0:
            yield dataclasses.replace(after, steps=_with(state.steps, cta, state.counters[cta] + 1))
        elif done == 1:
            yield dataclasses.replace(after, flying=state.flying | {("parts", cta, step)})
        elif done == ends[cta] - 1:
            counted = {("counters", reader, step) for reader in _counted(meeting, cta, ctas)}
            yield dataclasses.replace(after, flying=state.flying | counted)
        elif state.parts[reads[cta][done - 2]] == step:  # else it waits
            yield after
    for store in state.flying:
        where, place, value = store
        arrived = {where: _with(getattr(state, where), place, value)}
        yield dataclasses.replace(state, flying=state.flying - {store}, **arrived)
    if not state.flying and state.done == tuple(ends):
        yield _launched(meeting, state)


def _counted(meeting: Meeting, cta: int, ctas: int) -> range:
    """Returns the CTAs whose counters a CTA sets."""
    return {
        "own and absent": range(cta, meeting.counters, ctas),
        "own": range(cta, cta + 1),
        "first": range(meeting.counters if cta == 0 else 0),
    }[meeting.counting]


def _with(values: tuple[int, ...], i: int, value: int) -> tuple[int, ...]:
    return (*values[:i], value, *values[i + 1 :])
