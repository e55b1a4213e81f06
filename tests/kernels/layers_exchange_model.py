"""Words of several layers in one launch, explored over every order of its CTAs' operations.

A layer is five steps: heads, attention, its output, gate and up, and down. Each CTA sends one element of a result, or
none, and waits for what it reads of the one before. Attention is two operations: who attends with a head reads it, and
leaves a partial state. Who merges an element of a head waits for its states.

Words have a place for each element, in one of two slots by the step's parity. With `apart` attention's results have
places of their own. Partial states have a place each. A store is under way until it arrives.

CTAs also meet after down, by a count that is never reset: its side changes when all have come. A CTA that has a part of
the next heads waits for that, by the side. With `meets` false none comes or waits.
"""

import dataclasses
from collections.abc import Iterator

STEPS = ("heads", "attention", "output", "gate", "down")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layers:
    """The parameters.

    layers:   of the launch
    makes:    the head that each CTA makes; None: it has no part of that product
    attends:  the heads with which each CTA attends, one after another
    merges:   the heads of which each CTA merges an element
    apart:    whether attention's results have places of their own
    slots:    places of a word, one after another
    meets:    whether CTAs meet
    """

    layers: int = 2
    makes: tuple[int | None, ...] = (0, 1, None)
    attends: tuple[tuple[int, ...], ...] = ((), (0,), (1,))
    merges: tuple[tuple[int, ...], ...] = ((0,), (), (1,))
    apart: bool = True
    slots: int = 2
    meets: bool = True

    @property
    def programs(self) -> list[list[tuple[str, list]]]:
        """Returns what each CTA does, one after another: an operation, and words or a meeting.

        A word is a place and the number that it bears.
        """
        return [_Program(self, cta).operations for cta in self.ctas]

    @property
    def ctas(self) -> range:
        """Returns the numbers of CTAs."""
        return range(len(self.makes))


class _Program:
    def __init__(self, layers: Layers, cta: int):
        self.layers, self.cta = layers, cta
        self.operations: list[tuple[str, list]] = []
        self._end(-1, "down")
        for layer in range(layers.layers):
            self._run(layer)

    def _run(self, layer: int) -> None:
        layers = self.layers
        if layers.makes[self.cta] is not None:
            self._read(layer - 1, "down")
            if layers.meets:
                self._add("meet", [layer])
            self._end(layer, "heads")
        for head in layers.attends[self.cta]:
            makers = [cta for cta in layers.ctas if layers.makes[cta] == head]
            self._add("read", [self._word(layer, "heads", cta) for cta in makers])
            self._add("send", [self._state(layer, self.cta, head)])
        for head in layers.merges[self.cta]:
            self._add("read", [self._state(layer, cta, head) for cta in layers.ctas if head in layers.attends[cta]])
        attended = {cta: [self._word(layer, "attention", cta)] * bool(layers.merges[cta]) for cta in layers.ctas}
        self._add("send", attended[self.cta])
        self._add("read", [word for words in attended.values() for word in words])
        self._end(layer, "output")
        self._read(layer, "output")
        self._end(layer, "gate")
        self._read(layer, "gate")
        self._end(layer, "down")

    def _end(self, layer: int, step: str) -> None:
        """Sends the CTA's element, and comes to the meeting."""
        self._add("send", [self._word(layer, step, self.cta)])
        if step == "down" and self.layers.meets:
            self._add("come", [])

    def _read(self, layer: int, step: str) -> None:
        """Waits for a whole result, which each CTA has a part of."""
        self._add("read", [self._word(layer, step, cta) for cta in self.layers.ctas])

    def _word(self, layer: int, step: str, cta: int) -> tuple:
        number = (layer + 1) * len(STEPS) + STEPS.index(step)
        apart = self.layers.apart and step == "attention"
        return ("word", number % self.layers.slots, apart, cta), number

    def _state(self, layer: int, cta: int, head: int) -> tuple:
        return ("state", cta, head), layer

    def _add(self, operation: str, operands: list) -> None:
        self.operations.append((operation, operands))


def failures(layers: Layers) -> Iterator[str]:
    """Explores every reachable state once; yields what goes wrong."""
    programs, nothing, size = layers.programs, frozenset(), len(layers.ctas)
    begin = (0,) * len(programs), nothing, nothing, 0  # operations done, words, stores under way, and the count
    seen, todo = {begin}, [begin]
    while todo:
        done, words, flying, count = todo.pop()
        following = [(done, _written(words, store), flying - {store}, count) for store in flying]
        for number, program in enumerate(programs):
            if done[number] == len(program):
                continue
            operation, operands = program[done[number]]
            after = (*done[:number], done[number] + 1, *done[number + 1 :])
            if operation == "send":
                following.append((after, words, flying | set(operands), count))
            elif operation == "come":
                following.append((after, words, flying, count + 1))
            elif operation == "meet":
                (meeting,) = operands
                if count // size % 2 != meeting % 2:  # the side is another than before
                    following.append((after, words, flying, count))
                    if count < (meeting + 1) * size:
                        yield f"CTA {number} has not met all {meeting}"
            else:
                found = dict(words)
                if any(found.get(place, -1) > number for place, number in operands):
                    yield f"CTA {number} reads a word of {operands} that has been overwritten"
                elif all(found.get(place, -1) == number for place, number in operands):
                    following.append((after, words, flying, count))
        if not following and any(place < len(program) for place, program in zip(done, programs)):
            yield "all wait"
        todo += [state for state in following if state not in seen]
        seen.update(following)


def _written(words: frozenset, store: tuple) -> frozenset:
    place, _ = store
    return frozenset(word for word in words if word[0] != place) | {store}
