"""`LibraryCall`: the steps that a library of collectives can run itself, and how much goes into each of its calls.

A step whose pattern is one collective in groups that every library has (`Groups.composed`) is one call for each chunk
and element width, of a reduction for each dtype. Who calls the library and who foretells its messages ask here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardplan.core.lowering import Ints
from shardplan.core.op import Op
from shardplan.core.ops.collective import PADDED, result_type
from shardplan.core.ops.grouped import grouped, slot_elements
from shardplan.core.pattern import Groups
from shardplan.core.tensor import TensorType


class LibraryCall(NamedTuple):
    """How a member of a group stands to a collective, of a kind that `Groups` names.

    `gives` and `gets` say whether a member has a part for, and gets one from, each of them; where neither holds, it
    runs on a copy of the operand in place.
    """

    kind: str
    gives: bool = False
    gets: bool = False
    folds: bool = False  # whether parts are reduced
    slots: tuple[Ints, ...] = ()  # of padded parts, the elements of a slot in a chunk, by operand: int64 [devices]
    in_result: bool = False  # whether slots go where the result is, whose storage is as long as all of them

    @property
    def in_place(self) -> bool:
        """Whether what goes in is what comes out."""
        return not (self.gives or self.gets)

    def packs(self, operands: Sequence[TensorType]) -> list[list[int]]:
        """Return the numbers of the operands that go into one call, call by call."""
        alike: dict[object, list[int]] = {}
        for k, t in enumerate(operands):
            alike.setdefault(t.dtype if self.folds else t.itemsize, []).append(k)
        return list(alike.values())

    def sizes(
        self, chunks: int, operands: Sequence[TensorType], results: Sequence[TensorType], places: Sequence[int]
    ) -> Iterator[tuple[int, int]]:
        """Yield what a member of a group puts into each call: its bytes, and those of an element; else of bytes."""
        own, parts = results if self.in_place else operands, len(places) if self.gives else 1
        for numbers, chunk in itertools.product(self.packs(operands), range(chunks)):
            nbytes = 0
            for k, t in ((k, own[k]) for k in numbers):
                n = int(t.elements()[places[0]]) // parts
                here = n * (chunk + 1) // chunks - n * chunk // chunks
                nbytes += (int(self.slots[k][places[0]]) if self.slots else here) * parts * t.itemsize
            if nbytes:
                yield nbytes, operands[numbers[0]].itemsize if self.folds else 1


_CALLS = {
    call.kind: call
    for call in (
        LibraryCall("all_gather", gets=True),
        LibraryCall("all_to_all", gives=True, gets=True),
        LibraryCall("reduce_scatter", gives=True, folds=True),
        LibraryCall("all_reduce", folds=True),
        LibraryCall("reduce", folds=True),
        LibraryCall("broadcast"),
    )
}


def library_call(op: Op, operands: Sequence[TensorType]) -> LibraryCall | None:
    """Return how a library runs a step; None where none of its collectives does it.

    >>> from shardplan.core.ops import AllReduce
    >>> call = library_call(AllReduce(("x",)), [TensorType.parse("f32[8]{+x}", "x=2")])
    >>> call.kind, call.folds
    ('all_reduce', True)
    """
    pattern = op.pattern(*operands)
    if not isinstance(pattern, Groups) or pattern.composed is not None:
        return None
    call, move = _CALLS.get(pattern.kind), grouped(op)
    if call is None or move is None or op.algorithm != PADDED:
        return call
    behind = move.overhang(operands[0], result_type(move, operands[0])) if len(operands) == 1 else None
    return call._replace(slots=tuple(slot_elements(move, t) for t in operands), in_result=behind is not None)
