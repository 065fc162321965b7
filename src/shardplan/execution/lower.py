"""What one device has of values and of groups, and parts of its arrays as boxes and as views.

A part is a box in the indices of a device's own, contiguous array, whose elements go in row-major order. `device` is a
device id, as everywhere outside of a mesh; a place is an index in mesh order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardplan.core.box_table import strides
from shardplan.core.ids import check_shard_ids
from shardplan.core.messages import at_root
from shardplan.core.op import Op
from shardplan.core.ops.compute import LocalRun, at_place, computing
from shardplan.core.program import Program
from shardplan.core.tensor import Box, TensorType
from shardplan.errors import BackendError, LayoutError


def place_of(t: TensorType, device: int) -> int | None:
    """Return the place of a device id in the mesh of a type, or None where it is not in it."""
    found = np.flatnonzero(t.mesh.ids == device)
    return int(found[0]) if len(found) else None


def group_of(op: Op, t: TensorType, place: int) -> list[int]:
    """Return the places of the group of `place` in an op on a value of type `t`, in member order."""
    groups = t.mesh.group_places(op.members(t))
    return groups[np.flatnonzero((groups == place).any(axis=1))[0]].tolist()


def members_of(op: Op, t: TensorType, device: int) -> tuple[int, ...]:
    """Return the device ids of the group in member order; nothing where the device does not hold the value."""
    place = place_of(t, device)
    if place is None or not at_root(t)[place]:
        return ()
    return tuple(t.mesh.devices[m] for m in group_of(op, t, place))


def shape_of(t: TensorType, device: int) -> tuple[int, ...]:
    """Return the shape of the shard of a device; empty arrays stand for values on meshes without it."""
    place = place_of(t, device)
    return (0,) if place is None else t.local_shape(place)


def own_shards(program: Program, inputs: Sequence[Sequence[Any]], rank: int) -> dict[str, tuple[int, Any] | None]:
    """Return, by input, the place and the shard that the process of `rank` passes; None for a mesh without it.

    Raises `LayoutError` for a wrong number of inputs or shards.
    """
    if len(inputs) != len(program.inputs):
        raise LayoutError(f"{len(inputs)} inputs given, but the program has {len(program.inputs)}")
    found: dict[str, tuple[int, Any] | None] = {}
    for (name, t), shards in zip(program.inputs, inputs, strict=True):
        place = place_of(t, rank)
        if len(shards) != (place is not None):
            raise LayoutError(
                f"input %{name}: rank {rank} passes {len(shards)} shards of {t}; legal is "
                f"{'1, its own' if place is not None else '0, since its mesh does not have this rank'}"
            )
        found[name] = None if place is None else (place, shards[0])
    return found


def by_output(program: Program, results: Sequence[Any], rank: int) -> list[list[Any]]:
    """Return one array a result whose mesh has this rank, else none."""
    return [[] if place_of(t, rank) is None else [x] for t, x in zip(program.output_types, results, strict=True)]


def bind_local(
    op: Op, operands: Sequence[TensorType], result: TensorType, device: int, backend: str
) -> LocalRun | None:
    """Return what a device computes in an op on its shards; None where it holds nothing of the results.

    Raises `BackendError`, in the name of the backend, for an op that does not compute.
    """
    local, place = computing(op), place_of(result, device)
    if local is None:
        raise BackendError(f"{backend} cannot run {op.name}")
    return local.bind(operands, at_place(place)) if place is not None and at_root(result)[place] else None


def check_own_ids(program: Program, values: Mapping[str, Any], rank: int) -> None:
    """Raise `LayoutError` for an id that none is, of what the process of `rank` passes in the memory of its host."""

    def own(name: str, t: TensorType) -> Iterator[tuple[int, np.ndarray]]:
        place, x = place_of(t, rank), values[name]
        if place is not None and getattr(x, "is_cpu", True):
            yield place, np.asarray(x)

    check_shard_ids(program, own)


def box_elements(box: Box) -> int:
    """Return the number of elements of a box."""
    return math.prod(hi - lo for lo, hi in box)


def chunk_of(n: int, chunk: int, chunks: int) -> tuple[int, int]:
    """Return the elements of a part of `n` that its round `chunk` moves: start and stop."""
    return n * chunk // chunks, n * (chunk + 1) // chunks


def flat_boxes(box: Box, start: int, stop: int) -> list[Box]:
    """Return boxes that hold, in row-major order, the elements `start` to `stop` of a box.

    >>> flat_boxes(((0, 3), (5, 9)), 2, 8)
    [((0, 1), (7, 9)), ((1, 2), (5, 9))]
    """
    if stop <= start:
        return []
    if (start, stop) == (0, box_elements(box)):
        return [box]
    (lo, _), *rest = box
    inner = math.prod(hi - low for low, hi in rest)
    row, out = start // inner, list[Box]()
    if start % inner:  # the end of a row
        end = min(stop, (row + 1) * inner)
        tail = flat_boxes(tuple(rest), start - row * inner, end - row * inner)
        out += [((lo + row, lo + row + 1), *b) for b in tail]
        row, start = row + 1, end
    last = stop // inner
    if last > row:  # whole rows
        out.append(((lo + row, lo + last), *rest))
        start = last * inner
    if start < stop:  # the start of a row
        head = flat_boxes(tuple(rest), 0, stop - start)
        out += [((lo + last, lo + last + 1), *b) for b in head]
    return out


@dataclass(frozen=True, slots=True)
class View:
    """A box of a contiguous array as size, stride and offset, in elements."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.size)

    @property
    def contiguous(self) -> bool:
        """Whether the box is one run of the array."""
        step = 1
        for n, stride in zip(reversed(self.size), reversed(self.stride), strict=True):
            if n != 1 and stride != step:
                return False
            step *= n
        return True


def view_of(shape: Sequence[int], box: Box) -> View:
    """Return the view of a box of a contiguous array of `shape`."""
    stride = strides(shape)
    offset = sum(lo * s for (lo, _), s in zip(box, stride, strict=True))
    return View(tuple(hi - lo for lo, hi in box), stride, offset)
