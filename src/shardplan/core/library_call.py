"""`LibraryCall`: the steps that a library of collectives can run itself, and how much goes into each of its calls.

A step whose pattern is one collective in groups that every library has (`Groups.composed`) is one call for each chunk
and element width, of a reduction for each dtype. Who calls the library and who foretells its messages ask here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardplan.core.op import Op
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
            for t in (own[k] for k in numbers):
                n = int(t.elements()[places[0]]) // parts
                nbytes += (n * (chunk + 1) // chunks - n * chunk // chunks) * parts * t.itemsize
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
    return _CALLS.get(pattern.kind) if isinstance(pattern, Groups) and pattern.composed is None else None
