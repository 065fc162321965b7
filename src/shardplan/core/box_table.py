"""`BoxTable`: which device holds which boxes of an array, and where in its storage, for what no layout names.

Uneven strided shards and flat shards of optimizers are such. A row (device, box, offset, strides) puts the element i of
its box at offset + sum((i - start) * stride) of the device's storage, which is one-dimensional. The rows of a device
fill its storage from 0 on, and none of its elements, of storage or of the array, is there twice; padding is no part of
it, so whoever has some leaves it out. A device without rows holds nothing. Where a table serves as the layout of a
type, the rows lie inside the array and hold all of it; a row may be on several devices.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from shardplan.core import validation
from shardplan.core.notation import Scanner
from shardplan.errors import LayoutError, excerpt

Box = tuple[tuple[int, int], ...]
NAME = re.compile(r"boxes#[0-9a-f]{8}")


class BoxRow(NamedTuple):
    """A box of an array on a device, and where it lies in the storage there.

    >>> print(BoxRow(3, ((0, 2), (4, 8)), 10, (4, 1)))
    3 [0:2, 4:8] at 10 by (4, 1)
    """

    device: int
    box: Box
    offset: int
    strides: tuple[int, ...]

    def __str__(self) -> str:
        """Return `3 [0:2, 4:8] at 10 by (4, 1)`."""
        box = ", ".join(f"{lo}:{hi}" for lo, hi in self.box)
        return f"{self.device} [{box}] at {self.offset} by ({', '.join(map(str, self.strides))})"


@dataclass(frozen=True, slots=True, init=False, repr=False, eq=False)
class BoxTable:
    """The rows, by device and box; tables are equal when they have the same rows. Raises `LayoutError`.

    >>> flat = BoxTable([(0, ((0, 1), (0, 3)), 0, (3, 1)), (1, ((1, 2), (0, 3)), 0, (3, 1))])
    >>> print(flat, flat.elements(np.array([0, 1, 2])))
    boxes#54bd394b [3 3 0]
    """

    rows: tuple[BoxRow, ...]
    name: str  # "boxes#" and a hash of the rows
    ids: np.ndarray  # of the rows' devices, int64 [rows]
    boxes: np.ndarray  # int64 [rows, ndim, 2]
    offsets: np.ndarray  # int64 [rows]
    strides: np.ndarray  # int64 [rows, ndim]
    _held: dict[int, int]  # elements by device

    def __init__(self, rows: Iterable[tuple[int, Box, int, tuple[int, ...]]]) -> None:
        """Check and order the rows."""
        found = sorted(_row(k, value) for k, value in enumerate(validation.items("rows", rows, "rows")))
        ndims = {len(row.box) for row in found}
        if len(ndims) != 1:
            some = "no rows" if not ndims else f"boxes of {' and '.join(map(str, sorted(ndims)))} dims"
            raise LayoutError(f"a table of boxes has {some}; legal is at least one row, and boxes of one tensor")
        devices, boxes, offsets, strides = zip(*found, strict=True)
        digest = hashlib.sha256("\n".join(map(str, found)).encode()).hexdigest()
        for field_name, value in {
            "rows": tuple(found),
            "name": f"boxes#{digest[:8]}",
            "ids": np.array(devices, dtype=np.int64),
            "boxes": np.array(boxes, dtype=np.int64).reshape(len(found), ndims.pop(), 2),
            "offsets": np.array(offsets, dtype=np.int64),
            "strides": np.array(strides, dtype=np.int64).reshape(len(found), -1),
            "_held": {d: stored_elements(list(own)) for d, own in itertools.groupby(found, key=lambda row: row.device)},
        }.items():
            if isinstance(value, np.ndarray):
                value.setflags(write=False)
            object.__setattr__(self, field_name, value)

    @property
    def ndim(self) -> int:
        """The number of dims of the array."""
        return self.boxes.shape[1]

    def elements(self, ids: np.ndarray) -> np.ndarray:
        """Return the elements that the devices of those ids hold, int64 [devices]."""
        return np.array([self._held.get(d, 0) for d in ids.tolist()], dtype=np.int64)

    def views(self, device: int, storage: np.ndarray) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
        """Yield where in the array each row of a device lies, and its view of the device's storage."""
        for row in self.rows[slice(*np.searchsorted(self.ids, [device, device + 1]))]:
            sizes = [hi - lo for lo, hi in row.box]
            yield tuple(slice(*pair) for pair in row.box), region_view(storage, row.offset, sizes, row.strides)

    def __eq__(self, other: object) -> bool:
        """Tables are equal when their rows are."""
        return self is other or (isinstance(other, BoxTable) and self.name == other.name and self.rows == other.rows)

    def __hash__(self) -> int:
        """Hash the name, which stands for the rows."""
        return hash(self.name)

    def __str__(self) -> str:
        """Return `boxes#1a2b3c4d`, a hash of the rows."""
        return self.name

    def __repr__(self) -> str:
        """Show the name and the number of rows."""
        return f"<BoxTable {self.name}, {len(self.rows)} rows>"


def _row(k: int, value: Any) -> BoxRow:
    """Return one row of the caller's, checked by itself."""
    what = f"row {k} of a table of boxes"
    if not isinstance(value, tuple) or len(value) != 4:  # pyright: ignore[reportUnknownArgumentType]
        raise LayoutError(f"{what} is {excerpt(value)}; legal is a tuple (device, box, offset, strides)")
    device, given, offset, strides = value  # pyright: ignore[reportUnknownVariableType]
    box: list[tuple[int, int]] = []
    for d, pair in enumerate(validation.items(f"the box of {what}", given, "pairs (start, stop)")):
        ends = validation.items(f"dim {d} of the box of {what}", pair, "two numbers, start and stop")
        if len(ends) != 2:
            raise LayoutError(f"dim {d} of the box of {what} is {excerpt(pair)}; legal is a pair (start, stop)")
        lo = validation.whole_number(f"the start of dim {d} of {what}", ends[0])
        box.append((lo, validation.whole_number(f"the stop of dim {d} of {what}", ends[1], least=lo + 1)))
    steps = [
        validation.whole_number(f"a stride of {what}", n, least=1)
        for n in validation.items(f"the strides of {what}", strides, "numbers")
    ]
    if len(steps) != len(box):
        raise LayoutError(f"{what} has {len(steps)} strides for a box of {len(box)} dims; give one a dim")
    device, offset = (
        validation.whole_number(f"the device of {what}", device),
        validation.whole_number(f"the offset of {what}", offset),
    )
    return BoxRow(device, tuple(box), offset, tuple(steps))


def stored_elements(rows: list[BoxRow]) -> int:
    """Return the elements that a device's rows fill; raises `LayoutError` where one is there twice, or not at all."""
    for a, b in itertools.combinations(rows, 2):
        first = tuple(max(x[0], y[0]) for x, y in zip(a.box, b.box, strict=True))
        if all(lo < min(x[1], y[1]) for lo, x, y in zip(first, a.box, b.box, strict=True)):
            raise LayoutError(f"device {a.device} holds the element {first} twice: in the rows {a}, and {b}")
    starts: list[np.ndarray] = []
    ends: list[np.ndarray] = []
    for row in rows:
        # By stride, so that what is stored as one run is one, whatever the order of the dims.
        dims = sorted(zip(row.strides, (hi - lo for lo, hi in row.box), strict=True), reverse=True)
        at, length = runs(row.offset, [n for _, n in dims], [stride for stride, _ in dims])
        starts.append(at)
        ends.append(at + length)
    order = np.argsort(np.concatenate(starts))
    start, end = np.concatenate(starts)[order], np.concatenate(ends)[order]
    wanted = np.concatenate([[0], end[:-1]])
    wrong = np.flatnonzero(start != wanted)
    if len(wrong):
        k = wrong[0]
        where = f"device {rows[0].device}: element {min(start[k], wanted[k])} of its storage is in"
        raise LayoutError(
            f"{where} {'two rows' if start[k] < wanted[k] else 'no row'}; the rows of a device fill its storage from 0 "
            "on, each element once, without padding"
        )
    return int(end[-1])


def runs(offset: int, sizes: list[int], strides: list[int]) -> tuple[np.ndarray, int]:
    """Return the starts and the common length of the runs of storage in which a box lies, in row-major order of it.

    >>> runs(4, [2, 2, 3], [20, 3, 1])
    (array([ 4, 24]), 6)
    """
    dims = list(zip(sizes, strides, strict=True))
    length = 1
    while dims and (dims[-1][0] == 1 or dims[-1][1] == length):
        length *= dims.pop()[0]
    starts = np.array([offset], dtype=np.int64)
    for size, stride in dims:
        starts = (starts[:, None] + np.arange(size) * stride).reshape(-1)
    return starts, length


def strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous array, in elements.

    >>> strides((2, 3, 4))
    (12, 4, 1)
    """
    out: list[int] = []
    step = 1
    for n in reversed(shape):
        out.append(step)
        step *= max(n, 1)
    return tuple(reversed(out))


def region_view(
    array: np.ndarray, offset: int, sizes: Sequence[int] | np.ndarray, strides: Sequence[int] | np.ndarray
) -> np.ndarray:
    """Return a view of an array made flat: the block of these sizes and strides, in elements, from an offset."""
    flat = array.reshape(-1)
    return np.lib.stride_tricks.as_strided(flat[offset:], tuple(sizes), [int(n) * flat.strides[0] for n in strides])


def split(boxes: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the parts of boxes [n, ndim, 2] inside another one [ndim, 2], and boxes that hold the rest of them."""
    low, high = np.maximum(boxes[..., 0], other[:, 0]), np.minimum(boxes[..., 1], other[:, 1])
    meets = (low < high).all(axis=1)
    inside, left = np.stack([low, high], axis=2)[meets], boxes[meets]
    rest = [boxes[~meets]]
    for d in range(boxes.shape[1]):
        for side in (0, 1):  # what lies before and behind in this dim, and within in the dims before it
            out = left.copy()
            out[:, d, 1 - side] = inside[:, d, side]
            rest.append(out[out[:, d, 0] < out[:, d, 1]])
        left = left.copy()
        left[:, d] = inside[:, d]
    return inside, np.concatenate(rest)


@lru_cache(maxsize=256)
def check_covers(table: BoxTable, shape: tuple[int, ...]) -> None:
    """Raise `LayoutError` unless the rows lie inside an array of `shape` and hold all of it."""
    if table.ndim != len(shape):
        raise LayoutError(f"{table} has boxes of {table.ndim} dims, but the tensor has {len(shape)}")
    for row in table.rows:
        if any(hi > n for (_, hi), n in zip(row.box, shape, strict=True)):
            raise LayoutError(f"the row {row} of {table} reaches beyond the shape {shape}")
    rest = np.array([(0, n) for n in shape], dtype=np.int64).reshape(1, -1, 2)
    for box in np.unique(table.boxes, axis=0):
        rest = split(rest, box)[1]
    if len(rest):
        first = min(map(tuple, rest[:, :, 0].tolist()))
        raise LayoutError(f"no row of {table} holds the element {first} of the shape {shape}")


def scan_row(scanner: Scanner) -> BoxRow:
    """Read `3 [0:2, 4:8] at 10 by (4, 1)` at the scanner's position."""
    device = scanner.integer("a device")
    box: list[tuple[int, int]] = []
    scanner.expect("[", "the box of a row")
    for _ in scanner.items("]", "the box of a row"):
        low = scanner.integer("the start of a dim")
        scanner.expect(":", "the box of a row")
        box.append((low, scanner.integer("the stop of a dim")))
    scanner.expect("at ", "a row")
    offset = scanner.integer("an offset")
    scanner.expect("by ", "a row")
    scanner.expect("(", "the strides of a row")
    strides = scanner.integers(")", "a stride", "the strides of a row")
    return BoxRow(device, tuple(box), offset, tuple(strides))
