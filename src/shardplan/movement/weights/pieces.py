"""What one device holds of one dim: pieces, each a box of digits at consecutive local positions.

A dim is a product of factors; a factor's index space is cut into intervals (`cuts`), and what is held is the
concatenation of them. An interval of a product of k digits is at most 2k - 1 boxes: the rest of the first major digit,
the whole ones, the start of the last. So a cut may halve heads, or the borders of q, k and v, and nothing is listed
element by element.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shardplan.errors import LayoutError
from shardplan.movement.weights.cuts import Intervals, OwnerTable, intervals
from shardplan.movement.weights.form import FormAlternative, FormFactor


@dataclass(frozen=True, slots=True)
class DigitBox:
    """A range of a digit: its atom, first value, count, and the local positions from one value to the next."""

    atom: str
    first: int
    count: int
    weight: int


@dataclass(frozen=True, slots=True)
class HeldPiece:
    """A box of digits that starts at local position `base`; `tensor` is None where the expression names one for all."""

    base: int
    digits: tuple[DigitBox, ...]
    tensor: str | None = None
    padding: bool = False  # its digits then include one without an atom, which counts the padding


@dataclass(frozen=True, slots=True)
class FormContext:
    """What an expression is read with: sizes of atoms, sizes of axes, tables of owners, and one's coordinates."""

    sizes: Mapping[str, int]
    axes: Mapping[str, int]
    tables: Mapping[str, OwnerTable]
    at: Mapping[str, int]

    def size(self, atom: str) -> int:
        """Return the size of an atom; raises `LayoutError`."""
        if atom.isdigit():
            return int(atom)
        if atom not in self.sizes:
            raise LayoutError(f"the atom {atom} has no size; legal are {', '.join(self.sizes)}")
        return self.sizes[atom]

    def place(self, axes: tuple[str, ...]) -> tuple[int, int]:
        """Return one's number over axes, major first, and how many there are; raises `LayoutError`."""
        number, count = 0, 1
        for axis in axes:
            if axis not in self.axes:
                raise LayoutError(f"the axis {axis} is not one of the mesh; legal are {', '.join(self.axes)}")
            number, count = number * self.axes[axis] + self.at[axis], count * self.axes[axis]
        return number, count


# What is held of a factor: an atom's intervals, a sum, a product, or intervals of one of these.
@dataclass(frozen=True, slots=True)
class _HeldAtom:
    atom: str
    size: int


@dataclass(frozen=True, slots=True)
class _HeldSum:
    parts: tuple[tuple[str | None, _HeldNode | None, int], ...]  # tensor, what of it (None: padding), size
    size: int


@dataclass(frozen=True, slots=True)
class _HeldProduct:
    nodes: tuple[_HeldNode, ...]
    size: int


@dataclass(frozen=True, slots=True)
class _HeldIntervals:
    node: _HeldNode
    intervals: Intervals
    size: int


_HeldNode = _HeldAtom | _HeldSum | _HeldProduct | _HeldIntervals


def local_pieces(factors: tuple[FormFactor, ...], scenery: FormContext) -> tuple[int, tuple[HeldPiece, ...]]:
    """Return the local size of a dim for one device, and its pieces, in local order; raises `LayoutError`."""
    node = _product(factors, scenery)
    return node.size, tuple(_pieces(node, 0, node.size))


def _product(factors: tuple[FormFactor, ...], scenery: FormContext) -> _HeldNode:
    nodes = tuple(_factor(f, scenery) for f in factors)
    if len(nodes) == 1:
        return nodes[0]
    return _HeldProduct(nodes, math.prod(node.size for node in nodes))


def _factor(factor: FormFactor, scenery: FormContext) -> _HeldNode:
    if isinstance(factor.item, str):
        node: _HeldNode = _HeldAtom(factor.item, scenery.size(factor.item))
    elif len(factor.item) == 1 and factor.item[0].tensor is None and factor.item[0].padding is None:
        node = _product(factor.item[0].factors, scenery)
    else:
        parts = tuple(_alternative(a, scenery) for a in factor.item)
        node = _HeldSum(parts, sum(size for _, _, size in parts))
    for cut in factor.cuts:
        number, owners = scenery.place(cut.axes)
        if owners > 1 or cut.rule in scenery.tables:
            found = intervals(cut, node.size, owners, number, scenery.tables, str(FormFactor(factor.item)))
            node = _HeldIntervals(node, found, sum(stop - start for start, stop in found))
    return node


def _alternative(alternative: FormAlternative, scenery: FormContext) -> tuple[str | None, _HeldNode | None, int]:
    if alternative.padding is not None:
        return None, None, scenery.size(alternative.padding)
    node = _product(alternative.factors, scenery)
    return alternative.tensor, node, node.size


def _pieces(node: _HeldNode, start: int, stop: int) -> list[HeldPiece]:
    """The pieces at positions [start, stop) of a node, counted from start."""
    if stop <= start:
        return []
    match node:
        case _HeldAtom(atom, _):
            return [HeldPiece(0, (DigitBox(atom, start, stop - start, 1),))]
        case _HeldSum(parts, _):
            return _of_sum(parts, start, stop)
        case _HeldIntervals(inner, found, _):
            out: list[HeldPiece] = []
            before = 0
            for first, end in found:
                a, b = max(start, before), min(stop, before + end - first)
                moved = a - before + first
                out += _shift_pieces(_pieces(inner, moved, moved + b - a), a - start)
                before += end - first
            return out
        case _HeldProduct(nodes, _):
            return _of_product(nodes, start, stop)


def _of_sum(parts: tuple[tuple[str | None, _HeldNode | None, int], ...], start: int, stop: int) -> list[HeldPiece]:
    out: list[HeldPiece] = []
    before = 0
    for tensor, inner, size in parts:
        a, b = max(start, before), min(stop, before + size)
        if b > a and inner is None:
            out.append(HeldPiece(a - start, (DigitBox("", 0, b - a, 1),), None, True))
        elif b > a and inner is not None:
            for piece in _shift_pieces(_pieces(inner, a - before, b - before), a - start):
                named = piece.tensor or tensor
                out.append(HeldPiece(piece.base, piece.digits, named, piece.padding))
        before += size
    return out


def _of_product(nodes: tuple[_HeldNode, ...], start: int, stop: int) -> list[HeldPiece]:
    if not nodes:
        return [HeldPiece(0, ())]
    major, rest = nodes[0], nodes[1:]
    if not rest:
        return _pieces(major, start, stop)
    minor = _HeldProduct(rest, 1)
    inner = math.prod(node.size for node in rest)
    out: list[HeldPiece] = []
    # the rest of the first value of the major digit, the whole ones, and the start of the last
    position = start
    while position < stop:
        value, offset = divmod(position, inner)
        if offset or stop - position < inner:
            values, end = 1, min(stop, (value + 1) * inner)
            box = (offset, offset + end - position)
        else:
            values = (stop - position) // inner
            end, box = position + values * inner, (0, inner)
        lower = _pieces(minor, *box)
        for upper in _pieces(major, value, value + values):
            for piece in lower:
                out.append(_combine_pieces(upper, piece, inner, position - start))
        position = end
    return out


def _combine_pieces(upper: HeldPiece, lower: HeldPiece, inner: int, shift: int) -> HeldPiece:
    major = tuple(DigitBox(d.atom, d.first, d.count, d.weight * inner) for d in upper.digits)
    tensor, padding = upper.tensor or lower.tensor, upper.padding or lower.padding
    return HeldPiece(shift + upper.base * inner + lower.base, major + lower.digits, tensor, padding)


def _shift_pieces(pieces: list[HeldPiece], by: int) -> list[HeldPiece]:
    if not by:
        return pieces
    return [HeldPiece(p.base + by, p.digits, p.tensor, p.padding) for p in pieces]
