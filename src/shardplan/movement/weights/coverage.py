"""Coverage: every element of every target parameter has a source, from the expressions alone.

Each mesh axis is in at most one dim of a stored parameter (`family` refuses others), so the union over devices of
products is the product of unions: per logical dim the union of what the source's devices hold must have all that the
target's hold. That every local element is one logical element, or padding, is checked where a dim is lowered.
"""

from __future__ import annotations

from shardplan.errors import LayoutError
from shardplan.movement.weights.contents import DimCells, DimContents, uncovered
from shardplan.movement.weights.family import StoredFamily
from shardplan.movement.weights.owners import family_cells
from shardplan.movement.weights.weights import Weights


def covering(
    source: Weights, target: Weights, family: StoredFamily, tensor: str, contents: tuple[DimContents, ...]
) -> tuple[int, tuple[DimCells, ...]]:
    """Return which family of the source holds all that a family of the target needs of a tensor, and its cells.

    Raises `LayoutError` naming the parameter, the first element without an owner, and both expressions.
    """
    owners = [k for k, f in enumerate(source.families) if tensor in f.tensors]
    where = source.table.name or "the source"
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
        element = [uncovered(c, s) for c, s in zip(contents, cells, strict=True)]
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
