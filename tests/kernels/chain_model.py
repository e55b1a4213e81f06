"""CTAs that meet between the products of a chain, explored over every order of their operations.

A device runs launches one after another. In each a CTA has a part of some of the products, one after another. Its
moving warpgroup waits until the product before is counted whole, and reads that product's result for x. The computing
one waits likewise, for what it adds. It needs x, stores its part of the result, fences, and counts the CTA in. The CTA
that is counted last sets counts to zero that nothing waits for. A store is under way until it arrives; a fence waits
for the CTA's own. A launch ends when all stores have arrived.
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
    resets: bool = True


@dataclasses.dataclass(frozen=True)
class State:
    """`moved[c]` products whose x CTA c has, `done[c]` operations of its computing warpgroup, memory, flying stores."""

    launch: int
    moved: tuple[int, ...]
    done: tuple[int, ...]
    before: tuple[int, ...]
    results: tuple[tuple[int, ...], ...]
    counts: tuple[int, ...]
    flying: frozenset


WAIT, STORE, FENCE, COUNT, RESET, NUM_OPERATIONS = range(6)


def failures(chain: Chain) -> Iterator[str]:
    """Explores every reachable state once; yields what goes wrong."""
    nothing = tuple((0,) * ctas for ctas in chain.ctas)
    empty = State(0, (), (), (), nothing, (0,) * len(chain.ctas), frozenset())
    seen, todo = set(), [_launched(chain, empty)]
    while todo:
        state = todo.pop()
        if state in seen or state.launch > chain.launches:
            continue
        seen.add(state)
        has_ended = all(done == NUM_OPERATIONS * _parts(chain, cta) for cta, done in enumerate(state.done))
        if has_ended and not state.flying:
            if any(state.counts):
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


def _parts(chain: Chain, cta: int) -> int:
    return len(_products(chain, cta))


def _launched(chain: Chain, state: State) -> State:
    zeros = (0,) * max(chain.ctas)
    return dataclasses.replace(state, launch=state.launch + 1, moved=zeros, done=zeros, before=zeros)


def _following(chain: Chain, state: State) -> Iterator[State | str]:
    for cta in range(len(state.done)):
        ended = [done == NUM_OPERATIONS * _parts(chain, c) for c, done in enumerate(state.done)]
        if cta >= chain.resident + sum(ended):
            continue  # it begins when another has ended
        yield from _moved(chain, state, cta)
        yield from _computed(chain, state, cta)
    for store in state.flying:
        where, product, place, value = store
        if where == "count":
            arrived = {"counts": _with(state.counts, product, value)}
        else:
            arrived = {"results": _with(state.results, product, _with(state.results[product], place, value))}
        yield dataclasses.replace(state, flying=state.flying - {store}, **arrived)


def _moved(chain: Chain, state: State, cta: int) -> Iterator[State | str]:
    products, number = _products(chain, cta), state.moved[cta]
    if number == len(products) or not _is_whole(chain, state, products[number] - 1):
        return
    yield from _reads(chain, state, products[number] - 1)
    yield dataclasses.replace(state, moved=_with(state.moved, cta, number + 1))


def _computed(chain: Chain, state: State, cta: int) -> Iterator[State | str]:
    products, done = _products(chain, cta), state.done[cta]
    if done == NUM_OPERATIONS * len(products):
        return
    number, operation = divmod(done, NUM_OPERATIONS)
    product, launch = products[number], state.launch
    after = dataclasses.replace(state, done=_with(state.done, cta, done + 1))
    if operation == WAIT:
        if _is_whole(chain, state, product - 1):
            yield from _reads(chain, state, product - 1)
            yield after
    elif operation == STORE:
        if state.moved[cta] > number:
            yield dataclasses.replace(after, flying=state.flying | {("result", product, cta, launch)})
    elif operation == FENCE:
        if not chain.fences or ("result", product, cta, launch) not in state.flying:
            yield after
    elif operation == COUNT:
        counts = _with(state.counts, product, state.counts[product] + 1)
        yield dataclasses.replace(after, before=_with(state.before, cta, state.counts[product]), counts=counts)
    else:
        is_last = state.before[cta] == chain.ctas[product] - 1
        zeroed = [product - 1] * (product > 0) + [product] * (product == len(chain.ctas) - 1)
        stores = {("count", which, 0, 0) for which in zeroed if is_last and chain.resets}
        yield dataclasses.replace(after, flying=state.flying | stores)


def _is_whole(chain: Chain, state: State, product: int) -> bool:
    return product < 0 or not chain.waits or state.counts[product] >= chain.ctas[product]


def _reads(chain: Chain, state: State, product: int) -> Iterator[str]:
    if product >= 0 and any(part != state.launch for part in state.results[product]):
        yield f"read another launch's result of product {product} in launch {state.launch}"


def _with(values: tuple, i: int, value) -> tuple:
    return (*values[:i], value, *values[i + 1 :])
