"""Words of several layers in one launch, explored over every order of the operations of all devices' CTAs.

A layer is five steps: heads, attention, its output, gate and up, and down. Each CTA sends one element of a result, or
none, and waits for what it reads of the one before. Attention is two operations: who attends with a head reads it, and
leaves a partial state. Who merges an element of a head waits for its states.

Words that a device's CTAs send one another have a place for each element, in one of two slots by the step's parity.
With several devices all steps but gate and up end in an exchange: each CTA sends its element to all devices, and waits
for all devices' elements of the same number. Then it sends what these give to its device's CTAs. Or all read the words
of the exchange: `in_parts`. These have slots of their own, by the number of the exchange, and a place for each element
and device. With `apart` attention's results have places of their own, of both kinds. Partial states have a place each.
A store is under way until it arrives, or with `delays` false arrives at once.

CTAs also meet after down, by a count that is never reset: its side changes when all have come. A CTA that has a part of
the next heads waits for that, by the side. With `meets` false none comes or waits.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator

STEPS = ("heads", "attention", "output", "gate", "down")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layers:
    """The parameters; a CTA is `(device, number)`, and the CTAs of devices have the same parts.

    layers:   of the launch
    devices:  each of which makes its own heads, as many as others, and multiplies by the attention of these
    makes:    the head that each CTA makes of its device's; None: it has no part of that product
    attends:  the heads with which each CTA attends, one after another, of all devices'
    merges:   the heads of which each CTA merges an element
    in_parts: of "output" and "down" those of which CTAs read what each device adds
    apart:    whether attention's results have places of their own
    slots:    places of a word, one after another
    meets:    whether CTAs meet
    delays:   whether stores take a time
    """

    layers: int = 2
    devices: int = 1
    makes: tuple[int | None, ...] = (0, 1, None)
    attends: tuple[tuple[int, ...], ...] = ((), (0,), (1,))
    merges: tuple[tuple[int, ...], ...] = ((0,), (), (1,))
    in_parts: tuple[str, ...] = ()
    apart: bool = True
    slots: int = 2
    meets: bool = True
    delays: bool = True

    @property
    def programs(self) -> list[list[tuple[str, int, list]]]:
        """Returns what each CTA does, one after another: an operation, its device, and words or a meeting.

        A word is a place and the number that it bears.
        """
        return [_Program(self, device, cta).operations for device in range(self.devices) for cta in self.ctas]

    @property
    def ctas(self) -> range:
        """Returns the numbers of a device's CTAs."""
        return range(len(self.makes))

    @property
    def num_heads(self) -> int:
        """Returns how many heads a device makes."""
        return 1 + max(head for head in self.makes if head is not None)


class _Program:
    def __init__(self, layers: Layers, device: int, cta: int):
        self.layers, self.device, self.cta = layers, device, cta
        self.sent = [step for step in STEPS if step not in layers.in_parts]
        self.exchanged = [step for step in STEPS if step != "gate"] if layers.devices > 1 else []
        self.operations: list[tuple[str, int, list]] = []
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
            rank, of_rank = divmod(head, layers.num_heads)
            makers = [cta for cta in layers.ctas if layers.makes[cta] == of_rank]
            self._add("read", [self._word(layer, "heads", (rank, cta)) for cta in makers])
            self._add("send", [self._state(layer, self.cta, head)])
        heads = layers.merges[self.cta]
        for number, head in enumerate(heads):
            self._add("read", [self._state(layer, cta, head) for cta in layers.ctas if head in layers.attends[cta]])
            self._exchange(layer, "attention", number)
        # Those of the heads that this device makes: of others it has no weights.
        of_cta = lambda cta: [
            self._word(layer, "attention", (self.device + number, cta))
            for number, _ in enumerate(filter(self._is_kept, layers.merges[cta]))
        ]
        self._add("send", of_cta(self.cta))
        self._add("read", [word for cta in layers.ctas for word in of_cta(cta)])
        self._end(layer, "output")
        self._read(layer, "output")
        self._end(layer, "gate")
        self._read(layer, "gate")
        self._end(layer, "down")

    def _is_kept(self, head: int) -> bool:
        """Returns whether the device makes a head."""
        return head // self.layers.num_heads == self.device

    def _end(self, layer: int, step: str) -> None:
        """Sends the CTA's element, and comes to the meeting."""
        self._exchange(layer, step)
        if step in self.sent:
            # Of heads each CTA sends those of all devices.
            ranks = range(self.layers.devices) if step == "heads" else [self.device]
            self._add("send", [self._word(layer, step, (rank, self.cta)) for rank in ranks])
        if step == "down" and self.layers.meets:
            self._add("come", [])

    def _exchange(self, layer: int, step: str, number: int = 0) -> None:
        """Sends the CTA's element to all devices, and waits for theirs."""
        if step in self.exchanged:
            element, ranks = (number, self.cta), range(self.layers.devices)
            self._add("send", [self._exchanged(layer, step, self.device, element, to) for to in ranks])
            self._add("read", [self._exchanged(layer, step, rank, element, self.device) for rank in ranks])

    def _read(self, layer: int, step: str) -> None:
        """Waits for a whole result, which each CTA has a part of."""
        layers = self.layers
        if step in layers.in_parts:
            of = itertools.product(range(layers.devices), layers.ctas)
            self._add("read", [self._exchanged(layer, step, rank, (0, cta), self.device) for rank, cta in of])
        else:
            self._add("read", [self._word(layer, step, (self.device, cta)) for cta in layers.ctas])

    def _word(self, layer: int, step: str, element) -> tuple:
        number = (layer + 1) * len(self.sent) + self.sent.index(step)
        apart = self.layers.apart and step == "attention"
        return (self.device, "word", number % self.layers.slots, apart, element), number

    def _exchanged(self, layer: int, step: str, rank: int, element, to: int) -> tuple:
        number = (layer + 1) * len(self.exchanged) + self.exchanged.index(step)
        apart = self.layers.apart and step == "attention"
        return (to, "exchange", number % self.layers.slots, apart, rank, element), number

    def _state(self, layer: int, cta: int, head: int) -> tuple:
        return (self.device, "state", cta, head), layer

    def _add(self, operation: str, operands: list) -> None:
        self.operations.append((operation, self.device, operands))


def failures(layers: Layers) -> Iterator[str]:
    """Explores every reachable state once; yields what goes wrong."""
    programs, nothing = layers.programs, frozenset()
    begin = (0,) * len(programs), nothing, nothing, (0,) * layers.devices  # done, words, stores under way, and counts
    seen, todo = {begin}, [begin]
    while todo:
        done, words, flying, counts = todo.pop()
        following = [(done, _written(words, store), flying - {store}, counts) for store in flying]
        for number, program in enumerate(programs):
            if done[number] == len(program):
                continue
            operation, device, operands = program[done[number]]
            after = (*done[:number], done[number] + 1, *done[number + 1 :])
            if operation == "send" and not layers.delays:
                following.append((after, functools.reduce(_written, operands, words), flying, counts))
            elif operation == "send":
                following.append((after, words, flying | set(operands), counts))
            elif operation == "come":
                count = counts[device] + 1
                following.append((after, words, flying, (*counts[:device], count, *counts[device + 1 :])))
            elif operation == "meet":
                (meeting,), size = operands, len(layers.ctas)
                if counts[device] // size % 2 != meeting % 2:  # the side is another than before
                    following.append((after, words, flying, counts))
                    if counts[device] < (meeting + 1) * size:
                        yield f"CTA {number} has not met all {meeting}"
            else:
                found = dict(words)
                if any(found.get(place, -1) > number for place, number in operands):
                    yield f"CTA {number} reads a word of {operands} that has been overwritten"
                elif all(found.get(place, -1) == number for place, number in operands):
                    following.append((after, words, flying, counts))
        if not following and any(count < len(program) for count, program in zip(done, programs)):
            yield "all wait"
        todo += [state for state in following if state not in seen]
        seen.update(following)


def _written(words: frozenset, store: tuple) -> frozenset:
    place, _ = store
    return frozenset(word for word in words if word[0] != place) | {store}
