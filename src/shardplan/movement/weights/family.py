"""`StoredFamily`: one stored parameter of a table, lowered, with everything that does not depend on a name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shardplan.errors import LayoutError
from shardplan.movement.weights.cuts import OwnerTable
from shardplan.movement.weights.form import (
    FormAlternative,
    FormFactor,
    alternatives,
    axes_of,
    parse_product,
    product_text,
    walk_factors,
)
from shardplan.movement.weights.logical import MOST_ELEMENTS, LogicalTensor
from shardplan.movement.weights.lowering import (
    DimDigits,
    DimRuns,
    DimSizes,
    HoleNames,
    HolePlace,
    Rows,
    coordinates,
    digit_weights,
    expand_digits,
    run_rows,
    table_of,
)
from shardplan.movement.weights.pieces import FormContext, HeldPiece, local_pieces
from shardplan.movement.weights.table import TableParameter


@dataclass(frozen=True, slots=True, eq=False)
class StoredFamily:
    """A stored parameter, lowered: the runs of every tensor in it, per logical dim, its names, and its local sizes.

    `present` says at which devices it is, in mesh order; `axes` is the mesh that it is cut on, with sizes, major first.
    """

    entry: TableParameter
    dtype: str
    axes: Mapping[str, int]
    tensors: Mapping[str, tuple[DimRuns, ...]]
    names: tuple[HoleNames, ...]
    sizes: tuple[DimSizes, ...]
    on: Mapping[str, int]
    literals: Mapping[str, int]

    def coordinate(self, axes: Sequence[str]) -> np.ndarray:
        """Return the row-major number of every device's coordinate on some axes: int64 [devices], in mesh order."""
        return _numbers(tuple(self.axes.items()), tuple(axes))

    @property
    def present(self) -> np.ndarray:
        """At which devices it is: bool [devices], in mesh order."""
        found = np.ones(int(np.prod(list(self.axes.values()), dtype=np.int64)), dtype=bool)
        for axis, value in self.on.items():
            found &= self.coordinate((axis,)) == value
        return found & (self.counts > 0)

    @property
    def counts(self) -> np.ndarray:
        """How many names of it a device has, where it is: int64 [devices], in mesh order."""
        found = np.ones(int(np.prod(list(self.axes.values()), dtype=np.int64)), dtype=np.int64)
        for dim in self.names:
            found *= dim.counts[self.coordinate(dim.axes)]
        return found

    def local_shape(self, place: int) -> tuple[int, ...]:
        """Return the shape at a device's place in mesh order."""
        return tuple(int(s.sizes[self.coordinate(s.axes)[place]]) for s in self.sizes)

    def device_names(self, place: int) -> list[str]:
        """Return the names at a device's place in mesh order: the dims of the name row-major."""
        chosen: list[dict[str, int]] = [dict(self.literals)]
        for dim in self.names:
            values = dim.values[int(self.coordinate(dim.axes)[place])]
            chosen = [old | dict(zip(dim.fields, new, strict=True)) for old in chosen for new in values]
        return [self.entry.fill_name(values) for values in chosen]

    def __str__(self) -> str:
        """Return the expression, as messages show it."""
        return f'"{self.entry.form}"'


@dataclass(frozen=True, slots=True)
class Terms:
    """What a table's expressions are read with: sizes, splits, holes, owners, and axes in memory and in names."""

    sizes: Mapping[str, int]
    split: Mapping[str, str]
    holes: Mapping[str, str]
    tables: Mapping[str, OwnerTable]
    numbers: Mapping[str, int]

    def digits(self, atom: str, used: set[str]) -> list[str]:
        """Return the digits of an atom, major first, as those that are used say: itself, or what it splits into."""
        if atom in used or atom not in self.split:
            return [atom]
        inner = [f.item for f in parse_product(self.split[atom]) if isinstance(f.item, str)]
        found = [d for a in inner for d in (self.digits(a, used) if a != atom else [a])]
        return found if used & set(found) else [atom]


class _Family:
    """One parameter while it is lowered."""

    def __init__(self, entry: TableParameter, axes: Mapping[str, int], terms: Terms) -> None:
        self.entry, self.axes, self.terms = entry, axes, terms
        self.ndim = len(entry.form.dims)
        self.scenes: dict[tuple[int, tuple[tuple[str, int], ...]], tuple[int, tuple[HeldPiece, ...]]] = {}

    def fail(self, message: str) -> LayoutError:
        return LayoutError(f'{self.entry.name} = "{self.entry.form}": {message}')

    def scenery(self, at: Mapping[str, int]) -> FormContext:
        every = {**self.axes, **self.terms.numbers}
        return FormContext(self.terms.sizes, every, self.terms.tables, at)

    def held_pieces(self, dim: int, at: Mapping[str, int]) -> tuple[int, tuple[HeldPiece, ...]]:
        """What is held of a storage dim, remembered."""
        factors = self.entry.form.dims[dim]
        own = {a: at[a] for a in axes_of(factors)}
        key = (dim, tuple(own.items()))
        if key not in self.scenes:
            try:
                self.scenes[key] = local_pieces(factors, self.scenery(own))
            except LayoutError as error:
                raise self.fail(str(error)) from None
            size, pieces = self.scenes[key]
            if sum(math.prod(b.count for b in p.digits) for p in pieces) != size:
                raise self.fail(f"dim {dim} holds {size} elements, and its pieces do not; this is a defect")
        return self.scenes[key]

    def atoms(self, factors: tuple[FormFactor, ...], tensor: str) -> list[str]:
        """The atoms that a storage dim has of a tensor, in order."""
        found: list[str] = []
        for factor in factors:
            if isinstance(factor.item, str):
                found.append(factor.item)
            else:
                mine = [a for a in factor.item if a.padding is None and a.tensor in (None, tensor)]
                named = [a for a in mine if a.tensor == tensor or _names(a, tensor)] or mine
                found += self.atoms(named[0].factors, tensor) if named else []
        return found


@lru_cache(maxsize=4096)  # every family of a side asks for the same few
def _numbers(sizes: tuple[tuple[str, int], ...], axes: tuple[str, ...]) -> np.ndarray:
    shape = tuple(size for _, size in sizes)
    grid = dict(zip((axis for axis, _ in sizes), np.indices(shape, dtype=np.int64, sparse=True), strict=True))
    number = np.zeros(shape, dtype=np.int64)
    for axis in axes:
        number = number * dict(sizes)[axis] + grid[axis]
    number = number.reshape(-1)
    number.setflags(write=False)
    return number


def _names(alternative: FormAlternative, tensor: str) -> bool:
    return any(a.tensor == tensor for f in walk_factors(alternative.factors) for a in alternatives((f,)))


def lower(
    entry: TableParameter, tensors: Sequence[LogicalTensor], axes: Mapping[str, int], terms: Terms, dtype: str
) -> StoredFamily:
    """Return a parameter lowered; raises `LayoutError` naming the parameter and its expression."""
    family = _Family(entry, axes, terms)
    for axis in entry.form.axes:
        if axis not in axes:
            raise family.fail(f"the axis {axis} is not one of the mesh; legal are {', '.join(axes)}")
    on, literals = _places(family)
    names: dict[tuple[str, ...], HoleNames] = {}
    runs: dict[str, tuple[DimRuns, ...]] = {}
    for tensor in tensors:
        runs[tensor.name] = _tensor_runs(family, tensor, names, literals)
    sizes: list[DimSizes] = []
    for d, factors in enumerate(entry.form.dims):
        own = axes_of(factors)
        found = [family.held_pieces(d, at)[0] for at in coordinates(own, axes)]
        if max(found) > MOST_ELEMENTS:
            raise family.fail(f"dim {d} has {max(found)} elements on a device; legal are {MOST_ELEMENTS} at most")
        sizes.append(DimSizes(own, np.array(found, dtype=np.int64)))
    filled = {field for dim in names.values() for field in dim.fields} | set(literals)
    for place in entry.places:
        if place not in filled:
            raise family.fail(
                f"{{{place}}} in the name is filled by no hole; legal are {', '.join(sorted(filled)) or 'none'}"
            )
    return StoredFamily(entry, dtype, axes, runs, tuple(names.values()), tuple(sizes), on, literals)


def _places(family: _Family) -> tuple[dict[str, int], dict[str, int]]:
    """Where `on` says that a parameter is: coordinates on axes, and what stands in the name."""
    on: dict[str, int] = {}
    literals: dict[str, int] = {}
    for key, value in family.entry.on:
        size = family.axes.get(key, family.terms.numbers.get(key, family.terms.sizes.get(key)))
        if size is None:
            raise family.fail(f"on has {key}; legal are {', '.join([*family.axes, *family.terms.numbers])}")
        number = {"first": 0, "last": size - 1}[value] if isinstance(value, str) else value
        if not 0 <= number < size:
            raise family.fail(f"on {key} = {value} of {size}; legal are 0 to {size - 1}, first and last")
        (on if key in family.axes else literals)[key] = number
    return on, literals


def _tensor_runs(
    family: _Family, tensor: LogicalTensor, names: dict[tuple[str, ...], HoleNames], literals: Mapping[str, int]
) -> tuple[DimRuns, ...]:
    dims = family.entry.form.dims
    has = [family.atoms(factors, tensor.name) for factors in dims]
    used = [a for atoms in has for a in atoms]
    every = [[d for a in dim.atoms for d in family.terms.digits(a, set(used))] for dim in tensor.dims]
    legal = {d for digits in every for d in digits}
    spare = {a for a in used if a not in legal and a in family.terms.sizes and family.terms.sizes[a] == 1}
    wrong = next((a for a in used if a not in legal | spare or (used.count(a) > 1 and a in legal)), None)
    if wrong is not None:
        why = "stands twice" if wrong in legal else "is no digit of it"
        raise family.fail(f"{wrong} {why} for {tensor.name} = {tensor.text}; legal is each digit of it once")
    out: list[DimRuns] = []
    claimed: set[int] = set()
    taken: dict[str, int] = {}
    for k, (dim, digits) in enumerate(zip(tensor.dims, every, strict=True)):
        missing = [d for d in digits if d not in used and d not in dim.atoms]
        if missing:
            raise family.fail(
                f"{missing[0]} of {tensor.name} = {tensor.text} is not in it; legal is each digit of it once"
            )
        holes = [a for a in dim.atoms if not set(family.terms.digits(a, set(used))) & set(used)]
        holes = [a for a in holes if family.terms.sizes[a] != 1 or a in family.terms.holes]
        storage = [d for d in range(len(dims)) if set(has[d]) & set(digits)]
        if k == 0:  # a dim of no atoms, such as that which stacks gate and up, moves with the first
            storage += [d for d in range(len(dims)) if not has[d] and dims[d]]
        claimed |= set(storage)
        found = _dim_runs(family, tensor, k, digits, holes, sorted(storage), names, literals)
        for axis in found.axes:
            if taken.setdefault(axis, k) != k:
                raise family.fail(
                    f"the axis {axis} cuts two dims of {tensor.name}, "
                    f"{tensor.dims[taken[axis]]} and {dim}; legal is one"
                )
        out.append(found)
    for d, atoms in enumerate(has):
        owners = {
            k
            for k, dim in enumerate(tensor.dims)
            for a in dim.atoms
            if set(family.terms.digits(a, set(used))) & set(atoms)
        }
        if len(owners) > 1:
            raise family.fail(
                f"dim {d}, {product_text(dims[d])}, joins several dims of {tensor.name} = {tensor.text}; "
                "legal is one: join them in the family, and split them where they stand apart"
            )
    return tuple(out)


def _dim_runs(
    family: _Family,
    tensor: LogicalTensor,
    dim: int,
    digits: Sequence[str],
    holes: Sequence[str],
    storage: Sequence[int],
    names: dict[tuple[str, ...], HoleNames],
    literals: Mapping[str, int],
) -> DimRuns:
    said, dims = tensor.dims[dim], family.entry.form.dims
    hole = _hole(family, tensor, dim, holes)
    if hole:
        inside = [
            d
            for a in holes
            for d in family.terms.digits(a, {x.item for x in walk_factors(hole) if isinstance(x.item, str)})
        ]
        at = digits.index(holes[0])
        digits = [*digits[:at], *inside, *digits[at + 1 :]]
    weights = digit_weights(tensor, dim, [(d, family.terms.sizes.get(d, 0)) for d in digits])
    total = math.prod(family.terms.sizes.get(d, 0) for d in digits)
    if total != tensor.sizes[dim]:
        said_digits = " ".join(f"{d}={family.terms.sizes.get(d, 'unknown')}" for d in digits)
        raise family.fail(
            f"{said} of {tensor.name} is {tensor.sizes[dim]}, and its digits {said_digits} make {total}; "
            "legal are digits that make it"
        )
    numbers = tuple(a for a in axes_of(hole) if a not in family.axes)
    cut = [axes_of(hole), *(axes_of(dims[d]) for d in storage)]
    axes = tuple(dict.fromkeys(a for some in cut for a in some if a in family.axes))
    ranged = tensor.ranges[dim] != range(tensor.sizes[dim])
    if ranged and (not hole or any(family.atoms(dims[d], tensor.name) for d in storage)):
        raise family.fail(
            f"{said} of {tensor.name} has a range and stands in memory; legal is a dim that stands in the name"
        )
    rows: list[Rows] = []
    values: list[tuple[tuple[int, ...], ...]] = []
    fields = _fields(family, hole, numbers, literals)
    for at in coordinates(axes, family.axes):
        places = _hole_places(family, hole, numbers, fields, weights, at, literals) if hole else None
        values.append(tuple(p.fields for p in places or ()))
        mine = [(d, _mine(family.held_pieces(d, at)[1], tensor.name)) for d in storage]
        boxes = (box for _, pieces in mine for piece in pieces for box in piece.digits)
        strange = next((box.atom for box in boxes if box.count > 1 and box.atom not in weights.weights), None)
        if strange is not None:
            legal = ", ".join(weights.weights) or "none"
            raise family.fail(
                f"{strange} is no digit of {said} of {tensor.name}, which stands there; legal are {legal}"
            )
        rows.append(run_rows(weights, family.ndim, places, mine))
    if hole:
        found = HoleNames(axes, fields, tuple(values))
        old = names.setdefault(tuple(holes), found)
        if old.values != found.values:
            raise family.fail(f"its tensors stand under different names along {said}; legal are tensors of one range")
    return table_of(axes, family.ndim, rows, list(names).index(tuple(holes)) if hole else -1)


def _mine(pieces: Sequence[HeldPiece], tensor: str) -> list[HeldPiece]:
    return [p for p in pieces if not p.padding and (p.tensor == tensor or p.tensor is None)]


def _hole(family: _Family, tensor: LogicalTensor, dim: int, holes: Sequence[str]) -> tuple[FormFactor, ...]:
    if not holes:
        return ()
    missing = [a for a in holes if a not in family.terms.holes]
    if missing or len(holes) > 1:
        raise family.fail(
            f"{missing[0] if missing else ' and '.join(holes)} of {tensor.name} = {tensor.text} is not in it; "
            f"legal is each digit once, or one hole a dim; holes are {', '.join(family.terms.holes) or 'none'}"
        )
    return parse_product(family.terms.holes[holes[0]])


def _fields(
    family: _Family, hole: tuple[FormFactor, ...], numbers: tuple[str, ...], literals: Mapping[str, int]
) -> tuple[str, ...]:
    atoms = [f.item for f in walk_factors(hole) if isinstance(f.item, str)]
    legal = [*numbers, *atoms, *(f"{a}.local" for a in atoms)]
    return tuple(p for p in family.entry.places if p in legal)


def _hole_places(
    family: _Family,
    hole: tuple[FormFactor, ...],
    numbers: tuple[str, ...],
    fields: tuple[str, ...],
    weights: DimDigits,
    at: Mapping[str, int],
    literals: Mapping[str, int],
) -> list[HolePlace]:
    """The names along a dim at one coordinate, in order."""
    out: list[HolePlace] = []
    for number in coordinates(numbers, family.terms.numbers):
        if any(literals.get(k, v) != v for k, v in number.items()):
            continue
        try:
            _, pieces = local_pieces(hole, family.scenery({**at, **number}))
        except LayoutError as error:
            raise family.fail(str(error)) from None
        for local, digits in enumerate(expand_digits(pieces)):
            value = sum(v * weights.weights[atom] for atom, v in digits.items())
            if value not in weights.legal or any(literals.get(k, v) != v for k, v in digits.items()):
                continue
            known = number | digits | {f"{atom}.local": local for atom in digits}
            out.append(HolePlace(value, tuple(known[f] for f in fields)))
    return out
