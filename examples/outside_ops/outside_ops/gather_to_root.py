"""MPI's gather: the first device of every group gets the tiles of all."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from shardplan import TensorType
from shardplan.core.lowering import Boxes, Copy, Group, Round
from shardplan.core.ops.collective import Collective
from shardplan.core.ops.movement import with_dims, without_suffix


@dataclass(frozen=True, slots=True)
class GatherToRoot(Collective):
    """The first device of every group over `axes` gets the tiles of `dim`."""

    name: ClassVar[str] = "gather_to_root"
    dim: int
    axes: tuple[str, ...]

    def result(self, t: TensorType) -> TensorType:
        """The axes, a suffix of the dim before, are root axes after."""
        layout = with_dims(t.layout, t.mesh, {self.dim: without_suffix(self.name, t, self.dim, self.axes)})
        return t.with_layout(replace(layout, root=(*layout.root, *self.axes)))

    def lower(self, t: TensorType, u: TensorType, devices: np.ndarray, algorithm: str) -> Iterator[Round]:
        """The first device copies its own tile, and takes one of each other member."""
        group, (before, after) = Group(t, self.axes, devices), Boxes.ends(t, u, devices)
        tile, first = before.whole_region("x"), group.me == 0
        takes = [group.take(k, after.part("y", Boxes(t, group.place(k)))) for k in range(1, group.size)]
        own, put = Copy(tile.restrict(first), after.part("y", before)), group.put(0, tile.restrict(~first))
        yield Round.of([own, put, *takes])

    @classmethod
    def moves(cls, source: TensorType, destination: TensorType) -> list["GatherToRoot"]:
        """Offered where axes of a dim of the source are root axes of the destination."""
        axes = tuple(a for a in destination.layout.root if a not in source.layout.root)
        return [cls(d, axes) for d, names in enumerate(source.layout.dims) if axes and names[-len(axes) :] == axes]
