"""CTAs that meet between the products of a chain, explored over every order of their operations.

A device runs launches one after another. In each a CTA has a part of some of the products. One warpgroup moves x. It
reads the side of each count, and goes through the products: for one of which the CTA has a part it waits until the side
of the count before has changed, and reads that product's result. For any other it comes to the meeting after it. The
computing warpgroup needs x, stores its part of the result, waits for its store, and comes to the meeting.

The first CTA adds what changes the side when all have come. A store is under way until it arrives. A launch ends when
all stores have arrived.
"""

import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chain:
    """The parameters. `ctas`: of each product; `launches`: how many; `resident`: how many CTAs run at a time."""

    ctas: tuple[int, ...]
    launches: int = 2
    resident: int = 9
    fences: bool = True
    waits: bool = True
    reads_first: bool = True


@dataclasses.dataclass(frozen=True)
class State:
    """Sides that each CTA has read, products that it moved x of, operations that it computed; memory; flying stores."""

    launch: int
    sides: tuple[tuple[int, ...] | None, ...]
    moved: tuple[int, ...]
    done: tuple[int, ...]
    results: tuple[tuple[int, ...], ...]
    counts: tuple[int, ...]
    flying: frozenset


STORE, FENCE, COME, NUM_OPERATIONS = range(4)
SIDE = 100  # more than all CTAs


def failures(chain: Chain) -> Iterator[str]:
    """Explores every reachable state once; yields what goes wrong."""
    nothing = tuple((0,) * ctas for ctas in chain.ctas)
    empty = State(0, (), (), (), nothing, (0,) * (len(chain.ctas) - 1), frozenset())
    seen, todo = set(), [_launched(chain, empty)]
    while todo:
        state = todo.pop()
        if state in seen or state.launch > chain.launches:
            continue
        seen.add(state)
        if all(_has_ended(chain, state, cta) for cta in range(len(state.done))) and not state.flying:
            if any(count % SIDE for count in state.counts):
                yield f"counts are {state.counts} after launch {state.launch}"
            todo.append(_launched(chain, state))
            continue
        following = list(_following(chain, state))
        if not following:
            yield f"all wait in launch {state.launch}"
        for new in following:
            if isinstance(new, str):
                yield new
            else:
                todo.append(new)


def _products(chain: Chain, cta: int) -> list[int]:
    return [product for product, ctas in enumerate(chain.ctas) if cta < ctas]


def _has_ended(chain: Chain, state: State, cta: int) -> bool:
    has_computed = state.done[cta] == NUM_OPERATIONS * len(_products(chain, cta))
    return has_computed and state.moved[cta] == len(chain.ctas) and state.sides[cta] is not None


def _launched(chain: Chain, state: State) -> State:
    ctas = max(chain.ctas)
    return dataclasses.replace(
        state, launch=state.launch + 1, sides=(None,) * ctas, moved=(0,) * ctas, done=(0,) * ctas
    )


def _following(chain: Chain, state: State) -> Iterator[State | str]:
    ended = sum(_has_ended(chain, state, cta) for cta in range(len(state.done)))
    for cta in range(len(state.done)):
        if cta < chain.resident + ended:  # else it begins when another has ended
            yield from _moved(chain, state, cta)
            yield from _computed(chain, state, cta)
    for store in state.flying:
        product, place, value = store
        results = _with(state.results, product, _with(state.results[product], place, value))
        yield dataclasses.replace(state, flying=state.flying - {store}, results=results)


def _moved(chain: Chain, state: State, cta: int) -> Iterator[State | str]:
    product, has_read = state.moved[cta], state.sides[cta] is not None
    if not has_read:
        sides = tuple(count // SIDE % 2 for count in state.counts)
        yield dataclasses.replace(state, sides=_with(state.sides, cta, sides))
    if product == len(chain.ctas) or (chain.reads_first and not has_read):
        return
    after = dataclasses.replace(state, moved=_with(state.moved, cta, product + 1))
    if cta >= chain.ctas[product]:
        is_last = product == len(chain.ctas) - 1
        yield after if is_last else dataclasses.replace(after, counts=_come(chain, state.counts, product, cta))
    elif product == 0:
        yield after
    elif not chain.waits or (has_read and state.counts[product - 1] // SIDE % 2 != state.sides[cta][product - 1]):
        if any(part != state.launch for part in state.results[product - 1]):
            yield f"read another launch's result of product {product - 1} in launch {state.launch}"
        yield after


def _computed(chain: Chain, state: State, cta: int) -> Iterator[State | str]:
    products, done = _products(chain, cta), state.done[cta]
    if done == NUM_OPERATIONS * len(products):
        return
    number, operation = divmod(done, NUM_OPERATIONS)
    product, store = products[number], (products[number], cta, state.launch)
    after = dataclasses.replace(state, done=_with(state.done, cta, done + 1))
    if operation == STORE:
        if state.moved[cta] > product:
            yield dataclasses.replace(after, flying=state.flying | {store})
    elif operation == FENCE:
        if not chain.fences or store not in state.flying:
            yield after
    elif product == len(chain.ctas) - 1:
        yield after
    else:
        yield dataclasses.replace(after, counts=_come(chain, state.counts, product, cta))


def _come(chain: Chain, counts: tuple[int, ...], product: int, cta: int) -> tuple[int, ...]:
    added = SIDE - (max(chain.ctas) - 1) if cta == 0 else 1
    return _with(counts, product, (counts[product] + added) % (2 * SIDE))


def _with(values: tuple, i: int, value) -> tuple:
    return (*values[:i], value, *values[i + 1 :])
