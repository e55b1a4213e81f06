"""Counts the collectives of a program, and the bytes they send, in its lowered and in its compiled HLO text.

Both texts are worth counting. The lowered one has the collectives as written, the compiled one those that run: XLA
combines neighbouring all-reduces, splits collectives into start and done, and moves loop-invariant ones out of loops.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator

from tree_attn.measure import hlo_loops, hlo_text

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective instruction of a program.

    Attributes:
      opcode: one of `COLLECTIVES`.
      name: the instruction's name in the text.
      dtype: of the first operand, as HLO writes it ("f32").
      bytes_payload: bytes of one execution, per device: the output of an all-gather, the input of every other
        collective; summed over the operands of a variadic collective.
      bytes_sent_per_device: bytes that each device puts on its links in one execution (see `bytes_sent`).
      group_size: the number of devices in one group.
      count: the number of executions: the product of the trip counts of the loops around it.
      channel: XLA's channel id, or None.
    """

    opcode: str
    name: str
    dtype: str
    bytes_payload: int
    bytes_sent_per_device: float
    group_size: int
    count: int
    channel: int | None


@dataclasses.dataclass(frozen=True)
class Total:
    """Executions of one collective, and the bytes of all of them together, per device."""

    count: int = 0
    bytes_payload: int = 0
    bytes_sent_per_device: float = 0.0


def collectives(
    text: str, *, num_devices: int | None = None, unknown_trip_count: int | None = None
) -> list[Collective]:
    """Lists the collectives that one execution of a program runs on each device.

    Follows loops (counts are multiplied by trip counts), calls, fusions and asynchronous wrappers. Of a conditional it
    takes the branch that sends most. A `-start` counts once and its `-done` not at all. A variadic collective, with
    several operands in one instruction, is one collective whose bytes are summed.

    Args:
      text: `lowered.as_text(dialect="hlo")` or `compiled.as_text()`.
      num_devices: the size of a group where the text writes "all of them" without their number.
      unknown_trip_count: the factor for a loop whose trip count the text does not reveal; None raises.

    Returns:
      One `Collective` per instruction, in the order of the text.

    Raises:
      ValueError: the text is not HLO, a loop around a collective has an unknown trip count, or a group an unknown size.

    Example:
      >>> step = jax.jit(f).lower(x)
      >>> [c.opcode for c in collectives(step.compile().as_text())]
      ['all-reduce', 'all-reduce', 'all-reduce']
    """
    module = hlo_text.parse(text)
    walk = _Walk(module, num_devices or module.num_devices, unknown_trip_count)
    return list(walk.computation(module.entry, 1))


def summarize(program: str | Iterable[Collective]) -> dict[str, Total]:
    """Returns the total of each collective that occurs in HLO text, or in a list from `collectives`.

    Example:
      >>> summarize(compiled.as_text())
      {'all-gather': Total(count=1, bytes_payload=66048, bytes_sent_per_device=57792.0)}
    """
    totals: dict[str, Total] = {}
    for item in collectives(program) if isinstance(program, str) else program:
        total = totals.get(item.opcode, Total())
        totals[item.opcode] = Total(
            total.count + item.count,
            total.bytes_payload + item.count * item.bytes_payload,
            total.bytes_sent_per_device + item.count * item.bytes_sent_per_device,
        )
    return totals


def counts(program: str | Iterable[Collective]) -> dict[str, int]:
    """Returns the number of executions of each collective: `{"all-reduce": 3}`."""
    return {opcode: total.count for opcode, total in summarize(program).items()}


def total_bytes_sent_per_device(program: str | Iterable[Collective]) -> float:
    """Returns the bytes that each device sends in one execution of a program, over all its collectives."""
    return sum(total.bytes_sent_per_device for total in summarize(program).values())


def bytes_sent(opcode: str, bytes_payload: float, group_size: int) -> float:
    """Returns the bytes that each of `group_size` = p devices sends for one collective, by the ring model.

        all-reduce                      2 (p - 1) / p * payload    (equation 12 of Tree Attention)
        all-gather                        (p - 1) / p * output
        reduce-scatter, all-to-all        (p - 1) / p * input
        collective-broadcast              (p - 1) / p * input      (a chain: all but the last device forward it)
        collective-permute                              input

    The ring is bandwidth-optimal. A library may send other amounts (NCCL's tree and one-shot algorithms do); the model
    makes programs comparable.

    Raises:
      ValueError: `opcode` is not one of `COLLECTIVES`.

    Source: Tree Attention, section 6.3, after Anthony et al. 2024.
    """
    if opcode not in COLLECTIVES:
        raise ValueError(f"opcode must be one of {', '.join(map(repr, COLLECTIVES))}, got {opcode!r}")
    if opcode == "collective-permute":
        return float(bytes_payload)
    factor = 2 if opcode == "all-reduce" else 1
    return factor * (group_size - 1) * bytes_payload / group_size


class _Walk:
    """Visits the instructions of a module in the way an execution does."""

    def __init__(self, module: hlo_text.Module, num_devices: int | None, unknown_trip_count: int | None):
        self.module = module
        self.num_devices = num_devices
        self.unknown_trip_count = unknown_trip_count

    def computation(self, name: str | None, count: int) -> Iterator[Collective]:
        computation = self.module.computations.get(name or "", {})
        for instruction in computation.values():
            opcode = _collective_opcode(instruction)
            if opcode is not None:
                yield self._collective(computation, instruction, opcode, count)
            elif instruction.opcode == "while":
                yield from self._loop(computation, instruction, count)
            elif instruction.opcode == "conditional":
                yield from self._conditional(instruction, count)
            elif instruction.opcode in ("call", "fusion", "custom-call", "async-start", "call-start", "fusion-start"):
                for called in _called(instruction):
                    yield from self.computation(called, count)

    def _loop(self, computation: hlo_text.Computation, loop: hlo_text.Instruction, count: int) -> Iterator[Collective]:
        names = loop.called_computation("body"), loop.called_computation("condition")
        once = [item for name in names for item in self.computation(name, 1)]
        if not once:
            return
        trips = hlo_loops.trip_count(self.module, computation, loop)
        trips = self.unknown_trip_count if trips is None else trips
        if trips is None:
            raise ValueError(
                f"the loop {loop.name!r} holds {len(once)} collectives and its trip count cannot be read from the "
                "text; give it a constant number of iterations, or pass unknown_trip_count"
            )
        yield from self.computation(names[0], count * trips)
        yield from self.computation(names[1], count * (trips + 1))

    def _conditional(self, instruction: hlo_text.Instruction, count: int) -> Iterator[Collective]:
        names = instruction.called_computations("branch_computations")
        names += [instruction.called_computation(branch) for branch in ("true_computation", "false_computation")]
        branches = [list(self.computation(name, count)) for name in names if name]
        cost = lambda branch: (total_bytes_sent_per_device(branch), sum(item.count for item in branch))
        yield from max(branches, key=cost, default=[])

    def _collective(
        self, computation: hlo_text.Computation, instruction: hlo_text.Instruction, opcode: str, count: int
    ) -> Collective:
        operands = [computation[name].type for name in instruction.operands if name in computation]
        if instruction.opcode == "send":
            operands = operands[:1]  # the second is a token
        group_size = self._group_size(instruction, opcode)
        payload = sum(map(hlo_text.type_bytes, operands)) * (group_size if opcode == "all-gather" else 1)
        channel = re.search(r"channel_id=(\d+)", instruction.attributes)
        return Collective(
            opcode=opcode,
            name=instruction.name,
            dtype=hlo_text.first_dtype(operands[0]) if operands else "",
            bytes_payload=payload,
            bytes_sent_per_device=bytes_sent(opcode, payload, group_size) if group_size > 1 else 0.0,
            group_size=group_size,
            count=count,
            channel=int(channel.group(1)) if channel else None,
        )

    def _group_size(self, instruction: hlo_text.Instruction, opcode: str) -> int:
        if opcode == "collective-permute":
            pairs = re.search(r'source_target_pairs="?\{(\{[\d,{} ]*\})?\}', instruction.attributes)
            links = re.findall(r"\{(\d+)\s*,\s*(\d+)\}", pairs.group(1) or "") if pairs else []
            return len({device for link in links if link[0] != link[1] for device in link})
        size = hlo_text.replica_group_size(instruction.attributes, self.num_devices)
        if size is None:
            raise ValueError(
                f"the collective {instruction.name!r} runs over all devices and the text does not say how many there "
                "are: pass num_devices"
            )
        return size


def _collective_opcode(instruction: hlo_text.Instruction) -> str | None:
    """Returns the collective that an instruction begins, or None."""
    opcode = instruction.opcode.removesuffix("-start")
    # XLA's GPU pipeliner may turn a permute into send and recv; host transfers use the same opcodes.
    if instruction.opcode == "send" and "is_host_transfer=true" not in instruction.attributes:
        return "collective-permute"
    return opcode if opcode in COLLECTIVES else None


def _called(instruction: hlo_text.Instruction) -> list[str]:
    names = [instruction.called_computation("calls")]
    if instruction.opcode in ("call", "call-start"):  # on TPUs a collective may be a call of the SparseCore's
        names.append(instruction.called_computation("to_apply"))
    return [name for name in (*names, *instruction.called_computations("called_computations")) if name]
