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
Bound = Callable[[Arrays, MpiWire], Arrays]  # a step bound to a rank
One = Callable[[np.ndarray, MpiWire], np.ndarray]  # the same of one operand
PeerBox = tuple[int, int, Box]  # device id of the peer, which array of the step, the part of it
Round = TypeVar("Round")
MOST_KEPT = 256  # an op in more rounds than these makes each round, and its datatypes, when its turn comes


@dataclass(slots=True)
class Binding:
    """What the steps of a program share on one device: their datatypes, and the groups that need a communicator."""

    device: int  # its id
    types: Types = field(default_factory=Types)
    groups: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])  # device ids, in member order


def maker(t: TensorType, device: int) -> Callable[[], np.ndarray]:
    """Return how the shard of a device, given by id, is allocated."""
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
    parts: Sequence[PeerBox],
    shapes: Sequence[tuple[int, ...]],
    widths: Sequence[int],
    chunk: int,
    chunks: int,
    types: Types,
) -> Messages:
    """Return what each peer gets, or gives, in round `chunk` of `chunks`, by device id.

    The arrays have these shapes, and elements of these widths in bytes.
    """
    out: Messages = {}
    for peer, k, box in parts:
        boxes = flat_boxes(box, *chunk_of(box_elements(box), chunk, chunks))
        if boxes:
            out[peer] = (*out.get(peer, ()), types.piece(k, shapes[k], widths[k], boxes))
    return out


def bound_rounds(count: int, make: Callable[[int, Types], Round], types: Types) -> Callable[[], Iterator[Round]]:
    """Return how a run goes through the rounds of an op; `make` works one out, with datatypes of the `Types` given."""
    if count <= MOST_KEPT:
        made = [make(c, types) for c in range(count)]
        return lambda: iter(made)

    def one_by_one() -> Iterator[Round]:
        for c in range(count):
            own = Types()
            try:
                yield make(c, own)  # a round in its turn; its datatypes are freed once the next is asked for
            finally:
                own.free()

    return one_by_one
