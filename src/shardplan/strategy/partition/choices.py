"""What a line may do with the axes: which of its factors each serves, or which operands are partial sums over it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

from shardplan.core.dim_names import Names
from shardplan.core.factor_rule import Dims
from shardplan.core.layout import Layout
from shardplan.core.mesh import Mesh
from shardplan.core.op import results_of
from shardplan.core.ops.composed import differs
from shardplan.core.ops.compute import Compute
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError, ShardplanError
from shardplan.strategy.partition.flow import Line
from shardplan.strategy.partition.tables import LAYER

Axes = tuple[str, ...]
Served = Sequence[Sequence[str]] | None  # groups of dims, in order of preference; None: all, and none
MOST_PARTIAL = 4  # operands of which all sets are tried as partial; of more each alone, and all


@dataclass(frozen=True, slots=True)
class Choice:
    """By factor the axes that it carries, major to minor, and by axis the operands that are partial over it."""

    factors: tuple[tuple[str, Axes], ...] = ()
    partial: tuple[tuple[str, frozenset[int]], ...] = ()

    def without(self, axis: str) -> Choice:
        """Return it with nothing for an axis."""
        cut = ((f, tuple(a for a in axes if a != axis)) for f, axes in self.factors)
        return Choice(tuple((f, axes) for f, axes in cut if axes), tuple(p for p in self.partial if p[0] != axis))

    def serving(self, axis: str, factor: str) -> Iterator[Choice]:
        """Yield it with an axis on a factor, at every place among the axes there."""
        held = dict(self.factors)
        there = held.get(factor, ())
        for k in reversed(range(len(there) + 1)):  # minor to the others first
            yield Choice(tuple(sorted({**held, factor: (*there[:k], axis, *there[k:])}.items())), self.partial)

    def passing(self, axis: str, operands: frozenset[int]) -> Choice:
        """Return it with operands partial over an axis."""
        return Choice(self.factors, tuple(sorted((*self.partial, (axis, operands)))))


class TypedLine(NamedTuple):
    """A line on the mesh: its op, and the types of operands and results."""

    op: Compute
    operands: tuple[TensorType, ...]
    results: tuple[TensorType, ...]


@dataclass(frozen=True, slots=True)
class Layer:
    """Lays lines on a mesh."""

    mesh: Mesh

    def laid(self, line: Line, choice: Choice) -> TypedLine | None:
        """Return a line as a choice lays it, None where that does not type."""
        return _laid(line.op, line.types, line.links.operands, line.made, choice, self.mesh)

    def typed(self, line: Line, choice: Choice) -> TypedLine:
        """Return a line as a choice lays it; raises what the op says against it."""
        return _typed(line.op, line.types, line.links.operands, line.made, choice, self.mesh)


@lru_cache(maxsize=1 << 15)  # layers have the same lines, and a strategy is settled again with other cuts
def _laid(
    op: Compute,
    types: tuple[TensorType, ...],
    dims: tuple[Dims, ...],
    made: tuple[str, ...],
    choice: Choice,
    mesh: Mesh,
) -> TypedLine | None:
    try:
        return _typed(op, types, dims, made, choice, mesh)
    except ShardplanError:
        return None


def _typed(
    op: Compute,
    types: tuple[TensorType, ...],
    dims: tuple[Dims, ...],
    made: tuple[str, ...],
    choice: Choice,
    mesh: Mesh,
) -> TypedLine:
    carried = dict(choice.factors)
    operands: list[TensorType] = []
    for k, (t, factors) in enumerate(zip(types, dims, strict=True)):
        partial = tuple(axis for axis, chosen in choice.partial if k in chosen)
        layout = Layout(_axes(factors, carried), partial, "sum" if partial else None)
        operands.append(t.with_layout(layout, mesh))
    op = op.on_mesh(mesh, [carried.get(f, ()) for f in made])
    return TypedLine(op, tuple(operands), results_of(op, tuple(operands)))


def _axes(dims: Dims, carried: Mapping[str, Axes]) -> tuple[Axes, ...]:
    return tuple(tuple(a for f in factors for a in carried.get(f, ())) for factors in dims)


@cache
def sets_of(count: int) -> tuple[frozenset[int], ...]:
    """Return the sets of operands that are tried as partial, small ones first."""
    sizes = range(1, count + 1) if count <= MOST_PARTIAL else (1, count)
    return tuple(frozenset(s) for n in sizes for s in itertools.combinations(range(count), n))


def served(line: Line, groups: Served) -> list[list[str]]:
    """Return by group of dims, in order, the factors of a line that are of one of them; a group has one at least."""
    many = {f: names for f, names in line.names.items() if line.links.sizes[f] > 1}
    if groups is None:
        return [[f for f, names in many.items() if LAYER not in names]]
    found = [[f for f, names in many.items() if _is(names, group)] for group in groups]
    return [factors for factors in found if factors]


def _is(names: Names, group: Sequence[str]) -> bool:
    return any(name in group for name in names)


def parts_of_served(names: Names, served: Collection[str]) -> bool:
    """Say whether names are of the major factor of a dim that is served: `ffn.0`, where groups of `ffn` are norms."""
    return any(whole in served and part == "0" for whole, _, part in (name.rpartition(".") for name in names))


def _widens(line: Line) -> bool:
    """Say whether a line makes more bytes than it reads, and sums none: an expansion, a cast, an outer product.

    It may cost less to move what it reads, and to make the result on every device, than to move the result.
    """
    one = line.op.kernel_class == "streamed" and len(line.types) == 1
    summed = {f for dims in line.links.operands for fs in dims for f in fs}.difference(
        f for dims in line.links.results for fs in dims for f in fs
    )
    if not one and (line.op.kernel_class != "product" or summed):
        return False
    return sum(t.local_bytes() for t in results_of(line.op, line.types)) > sum(t.local_bytes() for t in line.types)


class HeldDims(NamedTuple):
    """How a parameter lies where it is an operand, or its gradient as a result; by dim its axes."""

    dims: tuple[Axes, ...]

    def allows(self, t: TensorType, axis: str) -> bool:
        """Say whether a type has an axis on the dims where it is held, and on no other."""
        return all((axis in mine) == (axis in theirs) for mine, theirs in zip(self.dims, t.layout.dims, strict=True))


class Bounds(NamedTuple):
    """What of a line's operands and results is held, by their numbers."""

    operands: Mapping[int, HeldDims]
    results: Mapping[int, HeldDims]
    pinned: bool = False  # as the model says, whatever axes serve

    def allow(self, laid: TypedLine, axis: str) -> bool:
        """Say whether operands lie as they are held; a gradient may also be a partial sum."""
        if any(not held.allows(laid.operands[k], axis) for k, held in self.operands.items()):
            return False
        return all(
            held.allows(laid.results[k], axis)
            or (axis in laid.results[k].layout.partial and not any(axis in d for d in laid.results[k].layout.dims))
            for k, held in self.results.items()
        )


def options(
    layer: Layer, line: Line, axis: str, groups: Served, bounds: Bounds, now: Choice
) -> list[tuple[Choice, TypedLine]]:
    """Return what a line may do with an axis, the others being as they are.

    It serves a factor of the first group of which any does; or it is passed as a partial sum. Where nothing is served,
    or only what results alone have, every device may do the same; so it may wherever an axis may serve anything.
    Raises `LayoutError` where nothing is left.
    """
    rest = now.without(axis)
    found: dict[Choice, TypedLine] = {}

    def offer(choice: Choice) -> bool:
        laid = layer.laid(line, choice)
        if laid is None or not bounds.allow(laid, axis):
            return False
        found[choice] = laid
        return True

    free = True
    if bounds.pinned:
        for choice in (c for factor in line.links.sizes for c in rest.serving(axis, factor)):
            offer(choice)
    for factors in served(line, groups) if not bounds.pinned else ():
        offered = {f: [offer(choice) for choice in rest.serving(axis, f)] for f in factors}
        taken = [f for f, places in offered.items() if any(places)]
        if taken:
            # Ids and masks, what has only these dims in its results, and what is larger made, every device may make.
            free = all(f in line.made for f in taken) or not any(map(differs, line.types)) or _widens(line)
            break
    every = {name for group in groups or () for name in group}
    for factor in line.links.sizes if not bounds.pinned else ():  # which no axis need serve
        held = math.prod(layer.mesh.span(a).size for a in (axis, *dict(rest.factors).get(factor, ())))
        if parts_of_served(line.names[factor], every) and line.links.sizes[factor] % held == 0:
            for choice in rest.serving(axis, factor):
                offer(choice)
    for operands in sets_of(len(line.types)):
        offer(rest.passing(axis, operands))
    if free or groups is None:
        offer(rest)
    if not found and bounds.pinned:
        raise LayoutError(
            f"{line} on {line.types[0]}: it cannot lie over {axis} as the model pins it, {line.op.pinned_layout}"
        )
    if not found:
        types = ", ".join(map(str, line.types))
        said = "any" if groups is None else " > ".join(map(" ".join, groups)) or "none"
        raise LayoutError(
            f"{line} on {types}: no dim that the axis {axis} serves ({said}) "
            "lets its parameters lie as they are held; legal is another line of serve or held"
        )
    return list(found.items())
