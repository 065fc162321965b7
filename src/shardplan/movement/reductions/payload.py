"""The payload of a reduction as a type.

A device's payload, padded to a multiple of the K members, is viewed as `[h_0, .., h_(L-1), c]`: one dim a factor, so
that each can be scattered and gathered in any order, and the rest. `f32[2, 8, 100]{+data.node,+data.gpu}` is to become
`f32[2, 8, 100]`. The mesh is `Placement.mesh_split()`: sub-axes are the placement's. Every group reduces a payload of
its own, so the last dim is sharded over the axes that are not reduced: `f32[2, 8, 400@tensor]{+data.node,+data.gpu}`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardplan.core.op import Op
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError
from shardplan.hardware.digit_order import Digit
from shardplan.hardware.level_factors import Digits, LevelFactor, checked_axes, factors
from shardplan.hardware.placement import Placement
from shardplan.hardware.topology import Topology
from shardplan.movement.reductions.type_graph import CheapestPath, State, TypeEdge, cheapest_path
from shardplan.movement.reductions.typed_path import TypedPath

ELEMENT = 4  # bytes: payloads are padded to whole f32 elements for each member


@dataclass(frozen=True, slots=True)
class Payload:
    """What is reduced: the factors of the reduced axes, outermost first, and the type of the sums on every member."""

    factors: tuple[LevelFactor, ...]
    whole: TensorType

    @property
    def nbytes(self) -> int:
        """Bytes of a device's payload, with its padding."""
        return self.whole.local_bytes()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the factors."""
        return tuple(f.size for f in self.factors)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the factors."""
        return tuple(f.name for f in self.factors)

    @property
    def strides(self) -> tuple[Digits, ...]:
        """The digits of the factors, as prices take them."""
        return tuple(f.strides for f in self.factors)

    @property
    def levels(self) -> list[list[Digit]]:
        """The digits level by level, whatever has a dim of its own."""
        every = (d for f in self.factors for d in f.digits)
        return [list(digits) for _, digits in itertools.groupby(every, key=lambda d: d.level)]

    def cheapest(
        self, topology: Topology, before: State, after: State, algorithm: str = "auto", subsets: bool = False
    ) -> CheapestPath:
        """Return the cheapest way from one letter of all factors to another, over parts of `levels`.

        Arguments are as for `cheapest_path`.
        """
        units = tuple(tuple(((d.size, d.stride),) for d in digits) for digits in self.levels)
        ends = (state[:1] * len(units) for state in (before, after))
        return cheapest_path(units, self.nbytes, topology, *ends, algorithm, subsets)

    def part_sizes(self, found: CheapestPath) -> tuple[int, ...]:
        """Return the sizes of the factors of a path."""
        return tuple(math.prod(d.size for d in self.levels[k][i:j]) for k, i, j in found.parts)

    def part_names(self, found: CheapestPath) -> tuple[str, ...]:
        """Return the names of the factors of a path: those of whole factors, else of their sub-axes."""
        known = {f.digits: f.name for f in self.factors}
        cut = (tuple(self.levels[k][i:j]) for k, i, j in found.parts)
        return tuple(known.get(digits) or "+".join(d.name for d in digits) for digits in cut)

    def type(self, state: State) -> TensorType:
        """Return the type in which each factor is as its letter says."""
        t, axes = self.whole, [f.axes for f in self.factors]
        dims = (*(a if x == "S" else () for a, x in zip(axes, state, strict=True)), t.layout.dims[-1])
        partial, root = ([n for a, x in zip(axes, state, strict=True) if x == y for n in a] for y in "PR")
        return TensorType(t.dtype, t.shape, dims, t.mesh, partial=dict.fromkeys(partial, "sum"), root=tuple(root))

    def ops(self, path: Sequence[TypeEdge]) -> list[Op]:
        """Return the typed ops along a path over the factors."""
        atoms = [self._atoms(f.digits) for f in self.factors]
        return self._ops(path[0].source, path[-1].target, atoms, path) if path else []

    def path_ops(self, before: State, after: State, found: CheapestPath) -> list[Op]:
        """Return the typed ops along the cheapest way between two states, over parts of `levels`.

        Where they are scattered or gathered in an order that the dims do not have, every sub-axis has a dim of a view.
        """
        atoms = [self._atoms(self.levels[k][i:j]) for k, i, j in found.parts]
        return self._ops(before, after, atoms, found.edges) if found.edges else []

    def _atoms(self, digits: Sequence[Digit]) -> tuple[int, ...]:
        return self.whole.mesh.expand(tuple(d.name for d in digits))

    def _ops(
        self, before: State, after: State, atoms: Sequence[tuple[int, ...]], edges: Sequence[TypeEdge]
    ) -> list[Op]:
        path = TypedPath(self.type(before), self.type(after), tuple(atoms), tuple(edges))
        dims = [[self._atoms((d,)) for d in f.digits] for f in self.factors]
        ops = path.ops({a: k for k, units in enumerate(dims) for unit in units for a in unit})
        ops = path.viewed_ops([*dims, (self.whole.atoms[-1],)]) if ops is None else ops
        assert ops is not None  # every unit has a dim, which it divides
        return ops


def payload(placement: Placement, axes: str | Sequence[str], nbytes: float, uncollapsed: bool = False) -> Payload:
    """Return the payload of a reduction over some axes of a placement, as a type.

    `nbytes` is what a device holds, padded to a whole number of elements for each of the K parts; `uncollapsed` has one
    factor for each sub-axis, instead of one for each level.

    Raises:
        TopologyError: An axis is unknown or named twice.
        LayoutError: `nbytes` is not above 0.
    """
    if not (nbytes > 0 and math.isfinite(nbytes)):
        raise LayoutError(f"a reduction of {nbytes:g} bytes: the payload of a device is above 0 bytes")
    found, asked = factors(placement, axes, uncollapsed), checked_axes(placement, axes)
    mesh, sizes = placement.mesh_split(), [f.size for f in found]
    rest = max(1, math.ceil(nbytes / (ELEMENT * math.prod(sizes))))
    others = tuple(a for a, n in mesh.shape.items() if a not in asked and n > 1)
    groups = math.prod(mesh.shape[a] for a in others)
    return Payload(found, TensorType("f32", (*sizes, rest * groups), (*[()] * len(sizes), others), mesh))
