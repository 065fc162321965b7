"""Lowering: each dim of a stored tensor alone, to runs; a parameter is their product, so nothing lists boxes.

For one logical dim and one coordinate on the axes that cut it, a run says: the logical indices from `start`, `length`
of them, stand under the name number `name` (one name a step where `name_step` is 1) at the local index `at` of every
storage dim, `step` further from one to the next. Logical steps are always 1. A dim that stands in the name and one that
stands in memory are lowered alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from shardplan.errors import LayoutError
from shardplan.movement.weights.logical import LogicalTensor
from shardplan.movement.weights.pieces import DigitBox, HeldPiece

Rows = list[tuple[int, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class DimRuns:
    """The runs of one logical dim: those of coordinate c, row-major over `axes`, are rows `ptr[c]` to `ptr[c + 1]`.

    int64: `ptr` [coordinates + 1], `start`, `length`, `name`, `name_step` [runs], `at`, `step` [runs, storage dims].
    """

    axes: tuple[str, ...]
    ptr: np.ndarray
    start: np.ndarray
    length: np.ndarray
    name: np.ndarray
    name_step: np.ndarray
    at: np.ndarray
    step: np.ndarray
    hole: int = -1  # which of the family's names stands along this dim, -1 where none does

    def rows(self, coordinate: int) -> slice:
        """Return where the runs of a coordinate stand."""
        return slice(int(self.ptr[coordinate]), int(self.ptr[coordinate + 1]))

    @property
    def coordinates(self) -> int:
        """The number of coordinates."""
        return len(self.ptr) - 1


@dataclass(frozen=True, slots=True, eq=False)
class HoleNames:
    """The names along one logical dim: per coordinate, row-major over `axes`, the values that fill a name."""

    axes: tuple[str, ...]
    fields: tuple[str, ...]
    values: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def counts(self) -> np.ndarray:
        """The number of names of every coordinate, int64."""
        return np.array([len(v) for v in self.values], dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class DimSizes:
    """The local size of one storage dim, by coordinate, row-major over `axes`: int64."""

    axes: tuple[str, ...]
    sizes: np.ndarray


@dataclass(frozen=True, slots=True)
class DimDigits:
    """The digits of one logical dim: atom -> logical steps from one value to the next; and its legal indices."""

    weights: Mapping[str, int]
    legal: range


@dataclass(frozen=True, slots=True)
class HolePlace:
    """One name along a dim: the logical indices it stands for begin at `value`."""

    value: int
    fields: tuple[int, ...]


def coordinates(axes: Sequence[str], sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yield every coordinate on axes, row-major; raises `LayoutError` for an axis that has no size."""
    strange = [a for a in axes if a not in sizes]
    if strange:
        raise LayoutError(f"the axis {strange[0]} is not one of the mesh; legal are {', '.join(sizes)}")
    for values in product(*(range(sizes[a]) for a in axes)):
        yield dict(zip(axes, values, strict=True))


def run_rows(
    digits: DimDigits, ndim: int, places: Sequence[HolePlace] | None, held: Sequence[tuple[int, Sequence[HeldPiece]]]
) -> Rows:
    """Return the runs of one logical dim at one coordinate: (start, length, name, name step, at..., step...).

    `places` are the names along it (None: it does not stand in the name), `held` the pieces of each storage dim that
    has digits of it. Runs outside the dim's range are dropped, and names then count those that are left.
    """
    memory: Rows = []
    for pieces in product(*(pieces for _, pieces in held)):
        memory += _piece_rows(digits, ndim, [d for d, _ in held], pieces)
    if places is None:
        return _merge_runs(memory, ndim)
    rows: Rows = []
    whole = len(memory) == 1 and memory[0][1] == 1
    for number, place in enumerate(places):
        for row in memory:
            start = place.value + row[0]
            if whole and rows and rows[-1][0] + rows[-1][1] == start and rows[-1][2] + rows[-1][1] == number:
                rows[-1] = (rows[-1][0], rows[-1][1] + 1, rows[-1][2], 1, *row[4:])
            else:
                rows.append((start, row[1], number, 0, *row[4:]))
    return rows


def _piece_rows(digits: DimDigits, ndim: int, dims: Sequence[int], pieces: Sequence[HeldPiece]) -> Rows:
    """The runs of one box of digits, one piece a storage dim."""
    at, start = [0] * ndim, 0
    several: list[tuple[int, int, int, int]] = []  # logical weight, count, storage dim, local weight
    for d, piece in zip(dims, pieces, strict=True):
        at[d] += piece.base
        for box in piece.digits:
            start += box.first * digits.weights.get(box.atom, 0)  # an atom of size 1 that no dim has
            if box.count > 1:
                several.append((digits.weights[box.atom], box.count, d, box.weight))
            elif not box.count:
                return []
    several.sort(reverse=True)
    length, step = 1, [0] * ndim
    if several and several[-1][0] == 1:
        _, length, run_dim, weight = several.pop()
        step[run_dim] = weight
        while several and several[-1][0] == length and several[-1][2] == run_dim and several[-1][3] == weight * length:
            length *= several.pop()[1]
    rows: Rows = []
    for values in product(*(range(count) for _, count, _, _ in several)):
        here, first = list(at), start
        for value, (weight, _, d, local) in zip(values, several, strict=True):
            first += value * weight
            here[d] += value * local
        rows.append((first, length, 0, 0, *here, *step))
    return rows


def _merge_runs(rows: Rows, ndim: int) -> Rows:
    """The runs with neighbours that go on joined: the same step, and where the one before ends."""
    out: Rows = []
    for row in rows:
        if out:
            last = out[-1]
            steps = row[4 + ndim :] if row[1] > 1 else last[4 + ndim :]
            known = last[4 + ndim :] if last[1] > 1 else steps
            if last[0] + last[1] == row[0] and steps == known and any(steps):
                if all(row[4 + d] == last[4 + d] + last[1] * steps[d] for d in range(ndim)):
                    out[-1] = (last[0], last[1] + row[1], 0, 0, *last[4 : 4 + ndim], *steps)
                    continue
        out.append(row)
    return out


def table_of(axes: tuple[str, ...], ndim: int, rows: Sequence[Rows], hole: int) -> DimRuns:
    """Return the runs of every coordinate as arrays."""
    ptr = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    flat = np.array([row for some in rows for row in some], dtype=np.int64).reshape(-1, 4 + 2 * ndim)
    start, length, name, name_step = (flat[:, k].copy() for k in range(4))
    return DimRuns(
        axes, ptr, start, length, name, name_step, flat[:, 4 : 4 + ndim].copy(), flat[:, 4 + ndim :].copy(), hole
    )


def digit_weights(tensor: LogicalTensor, dim: int, digits: Sequence[tuple[str, int]]) -> DimDigits:
    """Return the logical steps of the digits of a dim, which stand major first with their sizes."""
    weights: dict[str, int] = {}
    weight = 1
    for atom, size in reversed(digits):
        weights[atom] = weight
        weight *= size
    return DimDigits(weights, tensor.ranges[dim])


def expand_digits(pieces: Sequence[HeldPiece]) -> list[dict[str, int]]:
    """Return the value of every digit at every local position, in order: for dims that stand in a name."""
    found: list[tuple[int, dict[str, int]]] = []
    for piece in pieces:
        boxes: tuple[DigitBox, ...] = piece.digits
        for values in product(*(range(box.count) for box in boxes)):
            position = piece.base + sum(v * box.weight for v, box in zip(values, boxes, strict=True))
            found.append((position, {box.atom: box.first + v for v, box in zip(values, boxes, strict=True)}))
    return [values for _, values in sorted(found, key=lambda entry: entry[0])]
