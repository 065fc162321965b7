"""Coverage: every element of every target parameter has a source, from the expressions alone.

Each mesh axis is in at most one dim of a stored parameter (`family` refuses others), so the union over devices of
products is the product of unions: per logical dim the union of what the source's devices hold must have all that the
target's hold. That every local element is one logical element, or padding, is checked where a dim is lowered.
"""

from __future__ import annotations

from shardplan.errors import LayoutError
from shardplan.movement.weights.contents import DimCells, DimContents, find_uncovered_index
from shardplan.movement.weights.family import StoredFamily
from shardplan.movement.weights.owners import family_cells
from shardplan.movement.weights.weights import Weights


def check_owners(source: Weights, target: Weights) -> None:
    """Raise `LayoutError` where a tensor has owners whose values may differ.

    Two tensors that are one in the target (tied) and two in the source are such; so are two stored parameters of the
    source that hold one tensor in other dtypes, or with another constant added.
    """
    stored = {t for f in source.families for t in f.tensors}
    for tensor, other, _ in target.table.same:
        if {tensor, other} <= stored and target.sizing.resolve_alias(tensor) != tensor:
            a, b = (next(f for f in source.families if t in f.tensors) for t in (tensor, other))
            c = next((f for f in target.families if other in f.tensors), None)
            raise LayoutError(
                f"{c.entry.name if c else other} = {c}: {tensor} and {other} are one here, and in {_name(source)} two "
                f"that may differ, {a.entry.name} = {a} and {b.entry.name} = {b}; legal are "
                "configs that tie both or none"
            )
    first: dict[str, StoredFamily] = {}
    for family in source.families:
        for tensor in family.tensors:
            old = first.setdefault(tensor, family)
            if (old.dtype, old.entry.plus) != (family.dtype, family.entry.plus):
                raise LayoutError(
                    f"{tensor} has owners that may differ in {_name(source)}: element {_zero(source, tensor)} is in "
                    f"{old.entry.name} = {old} as {_kind(old)} and in {family.entry.name} = {family} as {_kind(family)}"
                    "; legal is one dtype and one constant"
                )


def _name(side: Weights) -> str:
    return side.table.name or "the source"


def _kind(family: StoredFamily) -> str:
    return family.dtype + (f" less {family.entry.plus}" if family.entry.plus else "")


def _zero(side: Weights, tensor: str) -> list[int]:
    return [indices.start for indices in side.tensors[tensor].ranges]


def covering(
    source: Weights, target: Weights, family: StoredFamily, tensor: str, contents: tuple[DimContents, ...]
) -> tuple[int, tuple[DimCells, ...]]:
    """Return which family of the source holds all that a family of the target needs of a tensor, and its cells.

    Raises `LayoutError` naming the parameter, the first element without an owner, and both expressions.
    """
    owners = [k for k, f in enumerate(source.families) if tensor in f.tensors]
    where = _name(source)
    if not owners:
        raise LayoutError(f"{family.entry.name} = {family}: {where} stores no {tensor}; legal is a source that does")
    a, b = source.tensors[tensor], target.tensors[tensor]
    if a.sizes != b.sizes:
        raise LayoutError(
            f"{family.entry.name} = {family}: {tensor} is {list(b.sizes)} ({b.text}) here "
            f"and {list(a.sizes)} ({a.text}) in {where}; legal are equal sizes: one config"
        )
    refusals: list[str] = []
    for k in owners:
        cells = family_cells(source.families[k], tensor)
        element = [find_uncovered_index(c, s) for c, s in zip(contents, cells, strict=True)]
        if all(e is None for e in element):
            return k, cells
        first: list[int] = []
        for e, c in zip(element, contents, strict=True):
            first.append(e if e is not None else int(c.start.min(initial=0)))
        said = source.families[k]
        refusals.append(
            f"{family.entry.name} = {family}: element {first} of {tensor} ({b.text}) has no owner in {where}, "
            f"where it is {said.entry.name} = {said}; legal is a source that holds it"
        )
    raise LayoutError(refusals[0])
