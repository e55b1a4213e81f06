"""Exchanges of several devices within one chain, explored over every order of their CTAs' operations.

In each exchange a CTA sends its element to all devices, and waits for the same element of all. Then it counts itself
in, and waits until the CTAs of its device have met. Or it broadcasts the result to them, and waits for all of theirs.
A later exchange may give an element to another CTA. A word has a place for each element and rank. One that is broadcast
has a place for each element. Both are in one of two slots by the step's parity. A store is under way until it arrives.

With attention the first exchange is that of heads. CTAs that attend wait for all of them, and the others for none. The
second is that of the merge. Its CTAs wait for those that attend.

In a merge CTAs also read what other devices keep, and broadcast nothing of that. With `working` the first exchange is
such a merge for the CTAs from that number on, and they have no part of the others.

A chain whose attention is a launch of its own has four products. The second, gate and up, is broadcast without an
exchange, and the result of the last, the heads, is exchanged and not broadcast (`chain_of_products`). There slots are
of the exchanges' numbers, and of the broadcasts'. A CTA may lack a product. It may also receive x for an empty tile.
Of `in_parts` CTAs read what each device adds, in the exchange's words, and nothing is broadcast. A fifth step is then
of the next launch, which a device begins when all of its CTAs have ended this one.
"""

import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchanges:
    """The parameters.

    slots:       places of a word, one after another
    meets:       whether CTAs meet after an exchange, or get what is broadcast
    broadcasts:  whether results are broadcast
    attending:   how many CTAs attend after the first exchange; None: there is no attention
    working:     how many CTAs have a part of all exchanges; None: all
    local:       steps without an exchange
    unsent:      steps whose result is not broadcast
    lacking:     `(step, CTA)`: of which the CTA has no part
    in_parts:    steps of which CTAs read what each device adds
    before_all:  steps after which CTAs meet, when all have received their element
    launch:      steps of a launch; None: all are of one
    idle:        the CTA that receives the first result after it has sent the second; None: there is none
    """

    devices: int = 2
    ctas: int = 2
    steps: int = 3
    slots: int = 2
    meets: bool = True
    broadcasts: bool = False
    attending: int | None = None
    working: int | None = None
    local: tuple[int, ...] = ()
    unsent: tuple[int, ...] = ()
    lacking: tuple[tuple[int, int], ...] = ()
    idle: int | None = None
    in_parts: tuple[int, ...] = ()
    before_all: tuple[int, ...] = ()
    launch: int | None = None


def chain_of_products(**others) -> Exchanges:
    """Returns the output, gate and up, down, and heads, of which the last CTA has no part."""
    options = dict(steps=4, broadcasts=True, local=(1,), unsent=(3,)) | others
    last = options.get("ctas", 2) - 1
    return Exchanges(**{"lacking": ((3, last),)} | options)


def chain_in_parts(**others) -> Exchanges:
    """Returns the same where CTAs add up the output and down themselves, and the exchange of the next launch."""
    return chain_of_products(**dict(steps=5, unsent=(3, 4), in_parts=(0, 2), before_all=(2,), launch=4) | others)


@dataclasses.dataclass(frozen=True)
class State:
    """`done[d][c]` operations of each CTA, words by device and place, CTAs that have met, and stores under way."""

    done: tuple[tuple[int, ...], ...]
    words: tuple[tuple[tuple, int], ...]
    met: tuple[tuple[int, ...], ...]
    flying: frozenset


SEND, RECEIVE, COUNT, MEET, NUM_OPERATIONS = range(5)
OWN = -1  # the rank of words that are broadcast


def failures(exchanges: Exchanges) -> Iterator[str]:
    """Explores every reachable state once; yields what goes wrong."""
    nothing = ((0,) * exchanges.ctas,) * exchanges.devices
    seen, todo = set(), [State(nothing, (), ((0,) * exchanges.steps,) * exchanges.devices, frozenset())]
    while todo:
        state = todo.pop()
        if state in seen:
            continue
        seen.add(state)
        following = list(_following(exchanges, state))
        has_ended = all(done == NUM_OPERATIONS * exchanges.steps for ctas in state.done for done in ctas)
        if not following and not has_ended:
            yield "all wait"
        for new in following:
            if isinstance(new, str):
                yield new
            else:
                todo.append(new)


def _following(exchanges: Exchanges, state: State) -> Iterator[State | str]:
    for device, ctas in enumerate(state.done):
        for cta, done in enumerate(ctas):
            step, operation = divmod(done, NUM_OPERATIONS)
            if step < exchanges.steps:
                after = dataclasses.replace(state, done=_with(state.done, device, _with(ctas, cta, done + 1)))
                yield from _done(exchanges, state, after, device, cta, step, operation)
    for store in state.flying:
        words = dict(state.words) | {store[0]: store[1]}
        yield dataclasses.replace(state, flying=state.flying - {store}, words=tuple(sorted(words.items())))


def _done(exchanges: Exchanges, state: State, after: State, device: int, cta: int, step: int, operation: int):
    element, slot = (cta + step // 2) % exchanges.ctas, step % exchanges.slots
    attends = exchanges.attending is not None and step < 2
    working = range(exchanges.ctas if exchanges.working is None else exchanges.working)
    if cta not in working and (step > 0 or operation in (COUNT, MEET)):
        yield after
        return
    if exchanges.local:
        yield from _done_of_products(exchanges, state, after, device, cta, step, operation)
        return
    if attends and step == 0 and operation == MEET and cta >= exchanges.attending:
        yield after
    elif attends and step == 1 and operation == SEND and not _have_attended(exchanges, state.done[device]):
        return
    elif operation == SEND:
        places = [(other, slot, device, element) for other in range(exchanges.devices)]
        yield dataclasses.replace(after, flying=state.flying | {(place, step + 1) for place in places})
    elif operation == RECEIVE:
        yield from _received(state, after, step, [(device, slot, rank, element) for rank in range(exchanges.devices)])
    elif exchanges.broadcasts and operation == COUNT:
        yield dataclasses.replace(after, flying=state.flying | {((device, slot, OWN, element), step + 1)})
    elif exchanges.broadcasts and exchanges.meets:
        elements = [(other + step // 2) % exchanges.ctas for other in working]
        yield from _received(state, after, step, [(device, slot, OWN, element) for element in elements])
    elif operation == COUNT:
        counts = state.met[device]
        yield dataclasses.replace(after, met=_with(state.met, device, _with(counts, step, counts[step] + 1)))
    elif not exchanges.meets or state.met[device][step] == exchanges.ctas:
        yield after


def _done_of_products(
    exchanges: Exchanges, state: State, after: State, device: int, cta: int, step: int, operation: int
):
    """Does `_done` for a chain of products, whose elements are the CTAs'."""
    has = lambda step, cta: (step, cta) not in exchanges.lacking
    of_exchange = step - sum(local < step for local in exchanges.local)
    slot = of_exchange % exchanges.slots
    slot_of = lambda step: sum(other not in exchanges.in_parts for other in range(step)) % exchanges.slots
    words = lambda step: [
        (device, slot if step in exchanges.in_parts else slot_of(step), rank, other)
        for other in range(exchanges.ctas) if has(step, other)
        for rank in (range(exchanges.devices) if step in exchanges.in_parts else [OWN])
    ]  # fmt: skip
    if operation == MEET:  # x of the next product
        has_met = all(done > NUM_OPERATIONS * step + RECEIVE for done in state.done[device])
        if step in exchanges.unsent or not has(step + 1, cta):
            yield after
        elif step in exchanges.before_all and not has_met:
            return
        elif step == 1 and cta == exchanges.idle:  # the first result is received for a tile of which nothing is sent
            yield from (
                second
                for first in _received(state, after, 0, words(0))
                for second in ([first] if isinstance(first, str) else _received(state, first, 1, words(1)))
            )
        else:
            yield from _received(state, after, step, words(step))
    elif not has(step, cta) or (step in exchanges.local and operation != COUNT):
        yield after
    elif operation == SEND:
        is_next = step == exchanges.launch
        if is_next and any(done < NUM_OPERATIONS * step for done in state.done[device]):
            return
        places = [(other, slot, device, cta) for other in range(exchanges.devices)]
        yield dataclasses.replace(after, flying=state.flying | {(place, step + 1) for place in places})
    elif operation == RECEIVE:
        yield from _received(state, after, step, [(device, slot, rank, cta) for rank in range(exchanges.devices)])
    elif step in (*exchanges.unsent, *exchanges.in_parts):
        yield after
    else:
        yield dataclasses.replace(after, flying=state.flying | {((device, slot_of(step), OWN, cta), step + 1)})


def _have_attended(exchanges: Exchanges, ctas: tuple[int, ...]) -> bool:
    return all(done >= NUM_OPERATIONS for done in ctas[: exchanges.attending])


def _received(state: State, after: State, step: int, places: list[tuple]) -> Iterator[State | str]:
    found = [dict(state.words).get(place, 0) for place in places]
    if any(number > step + 1 for number in found):
        yield f"a word of step {step} was overwritten before it was read"
    elif all(number == step + 1 for number in found):
        yield after


def _with(values: tuple, i: int, value) -> tuple:
    return (*values[:i], value, *values[i + 1 :])
