"""The rounds of collectives on slots of one size: what a library does with padded parts, as messages.

A slot holds a part, and behind it what nobody reads. A part that fills its slot travels as it is; the slots of shorter
ones are staged: those that are sent in "s", those that come in "t", one behind the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from shardplan.core.group_rounds import Of
from shardplan.core.lowering import Action, Buffer, Copy, Group, Ints, Region, Round, run_of


class _PaddedSlot(NamedTuple):
    """The part that a device has for a member, or gets from one, and where its slot is staged."""

    part: Region  # empty on the member itself
    short: Ints  # bool [devices]: whether it does not fill its slot, on devices that have one
    staged: Region

    @property
    def full(self) -> Region:
        """The part where it fills its slot."""
        return self.part.restrict(~self.short)


def _slots(group: Group, buffer: str, parts: Sequence[Region], slot: Ints, together: bool = False) -> list[_PaddedSlot]:
    """Return the slot of every member; `together`: they hold the same, and are one."""
    found: list[_PaddedSlot] = []
    begin = 0 * slot
    for k, part in enumerate(parts):
        others = group.live & (group.me != k)
        short = others & (part.elements() < slot)
        found.append(_PaddedSlot(part.restrict(others), short, run_of(buffer, begin, slot * short)))
        begin = begin + (0 if together else slot * short)
    return found


def _chunk(of: Of, group: Group, chunk: int, chunks: int) -> list[Region]:
    return [of(k).cut(chunk, chunks) for k in range(group.size)]


def _fill(slots: Sequence[_PaddedSlot]) -> Round:
    """The round in which parts that do not fill their slots are copied to where these begin."""
    parts = ((one.part.restrict(one.short), one.staged) for one in slots)
    return Round.of((Copy(part, _start(slot, part)) for part, slot in parts), closes=False)


def _start(slot: Region, part: Region) -> Region:
    """The start of a slot that is as long as a part."""
    return run_of(slot.buffer, slot.box[:, 0, 0], part.elements())


def _puts(group: Group, slots: Sequence[_PaddedSlot]) -> list[Action]:
    return [group.put(k, region) for k, one in enumerate(slots) for region in (one.full, one.staged)]


def _exchange(group: Group, given: Sequence[_PaddedSlot], taken: Sequence[_PaddedSlot]) -> Round:
    """The round in which slots are given and taken."""
    takes = [group.take(k, region) for k, one in enumerate(taken) for region in (one.full, one.staged)]
    parts = ((one.part.restrict(one.short), one.staged) for one in taken)
    return Round.of([*_puts(group, given), *takes, *(Copy(_start(slot, part), part) for part, slot in parts)])


def gathered_slots(group: Group, own: Region, block: Of, slot: Ints, chunks: int) -> Iterator[Round]:
    """Yield the rounds in which every member's piece `own` gets to all others, where it is `block` of that member."""
    for c in range(chunks):
        given = _slots(group, "s", [own.cut(c, chunks)] * group.size, slot, together=True)
        yield _fill(given[:2])  # one of these two members is another one than the device itself
        yield _exchange(group, given, _slots(group, "t", _chunk(block, group, c, chunks), slot))


def dealt_slots(group: Group, given: Of, taken: Of, slot: Ints, chunks: int) -> Iterator[Round]:
    """Yield the rounds in which every member gives every other a part, and takes one."""
    for c in range(chunks):
        ours = _slots(group, "s", _chunk(given, group, c, chunks), slot)
        yield _fill(ours)
        yield _exchange(group, ours, _slots(group, "t", _chunk(taken, group, c, chunks), slot))


def summed_slots(group: Group, addend: Of, total: Region, reduction: str, slot: Ints, chunks: int) -> Iterator[Round]:
    """Yield the rounds in which every member gets the reduction of its part, the addends taken in member order."""
    own = addend(group.me)
    for c in range(chunks):
        ours, here = _slots(group, "s", _chunk(addend, group, c, chunks), slot), total.cut(c, chunks)
        yield _fill(ours)
        messages: list[Action] = []
        sums: list[Action] = []
        for k in range(group.size):
            others, fold = group.live & (group.me != k), reduction if k else None
            begin = (k - (group.me < k)) * slot
            messages.append(group.take(k, run_of("t", begin, slot).restrict(others)))
            sums.append(Copy(own.restrict(~others).cut(c, chunks), here.restrict(~others), fold))
            sums.append(Copy(run_of("t", begin, here.elements()).restrict(others), here.restrict(others), fold))
        yield Round.of([*_puts(group, ours), *messages, *sums])


def slot_buffers(
    group: Group, given: Of | None, taken: Of | None, slot: Ints, chunks: int, dtype: str
) -> dict[str, Buffer]:
    """Return room for the slots that a member sends and that come; where they are not said, for one, or for all."""

    def room(of: Of, name: str) -> Ints:
        each = (_slots(group, name, _chunk(of, group, c, chunks), slot) for c in range(chunks))
        return np.max([sum((one.short for one in slots), 0 * slot) for slots in each], axis=0)

    sent = 1 if given is None else room(given, "s")
    came = group.size - 1 if taken is None else room(taken, "t")
    return {"s": Buffer(sent * slot, dtype), "t": Buffer(came * slot, dtype)}
