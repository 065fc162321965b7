"""Which part of a dim every rank has: cuts are put at the places of an expression until all ranks have what they have.

Of the cuts that fit, the first is taken: the fewest atoms, and the rules in the order even, shared, `.ceil`, `.first`,
`.last`, `.robin`. Trials at other sizes and degrees tell more of them apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardplan.errors import LayoutError
from shardplan.movement.weights.derive.wholes import DimLine
from shardplan.movement.weights.form import RULES, FormAlternative, FormCut, FormFactor
from shardplan.movement.weights.pieces import FormContext, local_pieces

Factors = tuple[FormFactor, ...]
_ORDER = ("even", "shared", *(r for r in RULES if r not in ("even", "shared")))


@dataclass(frozen=True, slots=True, eq=False)
class RankDim:
    """What a rank has of a dim: its size, the line along it (None: no element), and what an expression is read with.

    `weights` says for each tensor how far the logical index goes with each atom; `named` the number of a tensor.
    """

    size: int
    line: DimLine | None
    scenery: FormContext
    weights: Mapping[int, Mapping[str, int]]
    named: Mapping[str, int]


def cuts_over(axes: Sequence[str]) -> list[tuple[FormCut, ...]]:
    """Return the cuts that use each of some axes once: one over all, in every order, and nested ones of two."""
    found: list[tuple[FormCut, ...]] = []
    for order in itertools.permutations(axes):
        found += [(FormCut(order, rule),) for rule in _ORDER]
    if len(axes) == 2:
        for order in itertools.permutations(axes):
            found += [(FormCut((order[0],), a), FormCut((order[1],), b)) for a, b in itertools.product(_ORDER, _ORDER)]
    return found


def placements(factors: Factors, cuts: tuple[FormCut, ...]) -> Iterator[Factors]:
    """Yield a product with cuts behind one factor or behind neighbours as a group, the first and shortest first."""
    for start in range(len(factors)):
        for stop in range(start + 1, len(factors) + 1):
            group = factors[start:stop]
            one = group[0] if len(group) == 1 else FormFactor((FormAlternative(None, group),))
            if not one.cuts:
                yield (*factors[:start], FormFactor(one.item, cuts), *factors[stop:])


def said_of(factors: Factors, rank: RankDim, only: str | None) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the tensor (-1: padding) and logical index at every local position; None where a cut does not fit.

    `only` is the tensor that a product without names has.
    """
    try:
        size, pieces = local_pieces(factors, rank.scenery)
    except LayoutError:
        return None
    tensor, index = np.full(size, -1, dtype=np.int64), np.zeros(size, dtype=np.int64)
    for piece in pieces:
        place, value = np.array([piece.base]), np.zeros(1, dtype=np.int64)
        name = piece.tensor or only
        own = -1 if piece.padding or name is None else rank.named[name]
        weights = rank.weights.get(own, {})
        for box in piece.digits:
            step = np.arange(box.count)
            place = (place[:, None] + step * box.weight).reshape(-1)
            value = (value[:, None] + (box.first + step) * weights.get(box.atom, 0)).reshape(-1)
        tensor[place], index[place] = own, value
    return tensor, index


def fits(factors: Factors, ranks: Sequence[RankDim], tensor: str | None, among: bool) -> bool:
    """Whether every rank has of a dim what an expression says.

    With `among` only the positions of `tensor` are compared: an addend of a sum that has others.
    """
    known: dict[tuple[int, tuple[tuple[str, int], ...]], tuple[np.ndarray, np.ndarray] | None] = {}
    for rank in ranks:
        if rank.line is None and among:
            continue
        key = (id(rank.weights), tuple(sorted(rank.scenery.at.items())))
        if key not in known:
            known[key] = said_of(factors, rank, tensor)
        said = known[key]
        if said is None:
            return False
        if rank.line is None:
            if len(said[0]) != rank.size:
                return False
            continue
        mine = rank.line.tensor == rank.named[tensor] if among and tensor else slice(None)
        found, index = rank.line.tensor[mine], rank.line.index[mine]
        if len(found) != len(said[0]) or not np.array_equal(index, said[1]):
            return False
        if tensor is None and not np.array_equal(found, said[0]):
            return False
    return True


def cut_of(factors: Factors, ranks: Sequence[RankDim], axes: Sequence[str], tensor: str | None) -> Factors | None:
    """Return a dim with the cuts over `axes` that fit every rank, None where none does.

    `tensor` is that of a product without names, None for a sum. A sum is cut as a whole, or each addend by itself.
    """
    if not axes:
        return factors if fits(factors, ranks, tensor, among=False) else None
    for cuts in cuts_over(axes):
        for made in placements(factors, cuts):
            if fits(made, ranks, tensor, among=False):
                return made
    if tensor is not None:
        return None
    outer, last = factors[:-1], factors[-1]
    if isinstance(last.item, str):
        return None
    inside = [_cut_addend(a, outer, ranks, axes) for a in last.item]
    if any(a is None for a in inside):
        return None
    made = (*outer, FormFactor(tuple(a for a in inside if a is not None)))
    return made if fits(made, ranks, None, among=False) else None


def _cut_addend(
    addend: FormAlternative, outer: Factors, ranks: Sequence[RankDim], axes: Sequence[str]
) -> FormAlternative | None:
    """An addend with cuts of its own, or without."""
    if addend.padding is not None:
        return addend
    tried: Iterator[Factors] = itertools.chain(
        (made for cuts in cuts_over(axes) for made in placements(addend.factors, cuts)), (addend.factors,)
    )
    found = next((made for made in tried if fits((*outer, *made), ranks, addend.tensor, among=True)), None)
    return None if found is None else FormAlternative(addend.tensor, found)
