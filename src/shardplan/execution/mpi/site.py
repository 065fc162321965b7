"""What the steps of a program bound to one device of MPI share: datatypes, groups, and how messages are laid out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from shardplan.core.dtypes import numpy_dtype
from shardplan.core.tensor import Box, TensorType
from shardplan.execution.lower import box_elements, chunk_of, flat_boxes, shape_of
from shardplan.execution.mpi.wire import Messages, MpiWire, Types

Arrays = list[np.ndarray]
Bound = Callable[[Arrays, MpiWire], Arrays]
One = Callable[[np.ndarray, MpiWire], np.ndarray]  # the step of one operand
Entry = tuple[int, int, Box]  # peer, operand, part
R = TypeVar("R")
KEPT = 256  # an op in more rounds than these makes each round, and its datatypes, when its turn comes


@dataclass(slots=True)
class Site:
    """What the steps of a program share on one device: their datatypes, and the groups that need a communicator."""

    device: int
    types: Types = field(default_factory=Types)
    groups: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])


def maker(t: TensorType, device: int) -> Callable[[], np.ndarray]:
    """Return how the shard of a device is allocated."""
    shape, dtype = shape_of(t, device), numpy_dtype(t.dtype)
    return lambda: np.empty(shape, dtype=dtype)


def at(x: np.ndarray, box: Box) -> np.ndarray:
    """Return a view of a box of an array."""
    return x[(*(slice(lo, hi) for lo, hi in box), ...)]  # without the ellipsis no view of an array without dims


def idle(u: TensorType, device: int) -> One:
    """Return the step of a device that holds nothing of the value: its result must not be read."""
    make = maker(u, device)
    return lambda x, wire: make()


def messages_of(
    entries: Sequence[Entry],
    shapes: Sequence[tuple[int, ...]],
    widths: Sequence[int],
    part: tuple[int, int],
    types: Types,
) -> Messages:
    """Return what each peer gets, or gives, in round `part[0]` of `part[1]`, of arrays of these shapes and widths."""
    out: Messages = {}
    for peer, k, box in entries:
        boxes = flat_boxes(box, *chunk_of(box_elements(box), *part))
        if boxes:
            out[peer] = (*out.get(peer, ()), types.piece(k, shapes[k], widths[k], boxes))
    return out


def rounds_of(count: int, make: Callable[[int, Types], R], types: Types) -> Callable[[], Iterator[R]]:
    """Return how a run goes through the rounds of an op; `make` works one out, with datatypes of the `Types` given."""
    if count <= KEPT:
        made = [make(c, types) for c in range(count)]
        return lambda: iter(made)

    def one_by_one() -> Iterator[R]:
        for c in range(count):
            own = Types()
            try:
                yield make(c, own)
            finally:
                own.free()

    return one_by_one
