"""The verb `place`: every placement of a mesh on a topology, ranked for the traffic of a job (arXiv 2110.10548)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

from shardplan.core import validation
from shardplan.core.mesh import Mesh
from shardplan.core.pattern import Pattern
from shardplan.core.program import Program
from shardplan.core.tensor import mesh_of
from shardplan.errors import LayoutError, TopologyError, excerpt
from shardplan.hardware.placement import Placement, orders, placements
from shardplan.hardware.prices.cost import checked_algorithm
from shardplan.hardware.prices.library import library
from shardplan.hardware.topology import Topology, topology_of
from shardplan.movement.placing.degradation import Degraded, degradation
from shardplan.movement.placing.demand import Programs
from shardplan.movement.placing.placement_price import PricedPlacement, in_best_order, rank_placements
from shardplan.movement.placing.traffic import Traffic, demands_of, program_traffic
from shardplan.notebook import notebook_html


@dataclass(frozen=True, eq=False)
class Ranking(Sequence[PricedPlacement]):
    """Placements, best first, and what placing well is worth."""

    rows: tuple[PricedPlacement, ...]

    _repr_html_ = notebook_html

    @overload
    def __getitem__(self, index: int) -> PricedPlacement: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[PricedPlacement]: ...
    def __getitem__(self, index: int | slice) -> PricedPlacement | Sequence[PricedPlacement]:
        """Return a row, or rows."""
        return self.rows[index]

    def __len__(self) -> int:
        """Return the number of placements."""
        return len(self.rows)

    @property
    def placement_gain(self) -> float:
        """Worst over best placement, every collective as it is."""
        stock = [row.stock_seconds for row in self.rows]
        return max(stock) / min(stock) if min(stock) > 0 else 1.0

    def mitigation(self, row: PricedPlacement) -> float:
        """Return what the best programs leave of a placement's loss: its seconds over the best placement's."""
        return row.seconds / self.rows[0].seconds if self.rows[0].seconds > 0 else 1.0

    @cached_property
    def degraded(self) -> Degraded | None:
        """What degraded units cost, or None where there are none."""
        return degradation(self.rows)


def outermost(inside: Mapping[str, str] | None, mesh: Mesh, topology: Topology) -> dict[str, int]:
    """Return by axis that is to stay inside a unit the outermost level that it may be split over; see `place`.

    Raises `TopologyError` for an unknown axis or level, `LayoutError` for an axis that no such unit holds.
    """
    found: dict[str, int] = {}
    pairs = {} if inside is None else validation.table("inside", inside, "an axis to a level", TopologyError)
    for axis, name in pairs.items():
        if axis not in mesh.axes:
            raise TopologyError(f"inside: unknown axis {excerpt(axis)}: {mesh.legal(axis)}")
        j = min(topology.index(name) + 1, len(topology.levels) - 1)
        room = topology.strides[j - 1] if j else topology.size
        if room % mesh.shape[axis]:
            unit = topology.levels[j - 1].name if j else "topology"
            raise LayoutError(
                f"axis {axis!r} of size {mesh.shape[axis]} cannot stay inside a {unit} of {room} devices "
                f"({topology.describe()}); legal is a size that divides {room}, or a level further out"
            )
        found[axis] = j
    return found


def candidates(
    mesh: Mesh,
    topology: Topology,
    inside: Mapping[str, str] | None = None,
    bounds: Mapping[tuple[str, str], tuple[int, int]] | None = None,
) -> list[Placement]:
    """Return every placement that satisfies the options of `place`; raises as it does where there is none."""
    levels = {axis: topology.levels[j].name for axis, j in outermost(inside, mesh, topology).items()}
    found = list(placements(mesh, topology, bounds, levels))
    if not found:
        kept = ", ".join(f"{axis}={level}" for axis, level in (inside or {}).items())
        told = f"; to stay inside: {kept}" if kept else ""
        raise LayoutError(f"no placement of {mesh} on {topology.describe()} satisfies the options{told}")
    return found


def place(
    mesh: Mesh | Program | str,
    topology: Topology | str,
    traffic: Traffic | str | None = None,
    *,
    programs: Programs = "best",
    algorithm: str = "auto",
    bounds: Mapping[tuple[str, str], tuple[int, int]] | None = None,
    inside: Mapping[str, str] | None = None,
) -> Ranking:
    """Return every placement of a mesh on a topology, ranked for the traffic of a job.

    On a ring, torus or mesh every matrix has its best order, so the result says which dims an axis lies on. The best
    comes first; of equal prices those with less inside the outer levels.

    Args:
        mesh: The mesh or its text, or a program, whose collectives are the traffic.
        topology: As many devices; a topology or its text, such as the name of a preset.
        traffic: For a tuple of axes the bytes of an all-reduce a step, or a list of (op, bytes, count); ops as in
            `traffic.OPS`, bytes those that a member holds before. Or the text that the command takes: `"data=2GB"`.
        programs: `best`: every reduction runs as its best program; `stock`: as one collective.
        algorithm: `auto`, the cheapest row of the library for each step, or an algorithm of it for all.
        bounds: By (axis, level) the least and the greatest entry of the matrix.
        inside: By axis the level within one unit of which it must stay, `{"tensor": "node"}`. A unit of the innermost
            level is a device: there the unit around it is meant, so on `node x gpu` gpu says what node does.

    Raises:
        TopologyError: Sizes differ, or an option names an unknown axis or level.
        LayoutError: The traffic is malformed, no placement satisfies the options, or an argument is of another kind.

    Source: arXiv 2110.10548.

    >>> best = place(Mesh(data=4, tensor=4), Topology.load("gcp-v100x8", nodes=2), {("data",): 2e9, ("tensor",): 5e8})
    >>> best[0].placement.describe(), round(best.placement_gain, 2)
    ('data=[1, 4], tensor=[2, 2]; order gpu=(tensor, data)', 3.8)
    """
    others: tuple[tuple[int, Pattern], ...] = ()
    topology = topology_of("topology", topology)
    checked_algorithm(algorithm, library(topology.library))
    if isinstance(mesh, Program):
        if traffic is not None:
            raise LayoutError("a program says its own traffic; give a mesh with traffic, or a program without")
        mesh, found, others = program_traffic(mesh)
    elif traffic is None:
        raise LayoutError('a mesh needs its traffic: such as {("data",): 2e9}, all-reduce bytes a step')
    else:
        mesh = mesh_of("mesh", mesh)
        found = tuple(d for d in demands_of(traffic, mesh) if d.nbytes > 0 and d.count > 0)
        if not found:
            raise LayoutError("there is no traffic to place: give bytes above 0 for at least one tuple of axes")
    if not isinstance(programs, str) or programs not in ("best", "stock"):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise LayoutError(f"programs={excerpt(programs)} is unknown; legal are 'best' and 'stock'")
    ordered = [one for placement in candidates(mesh, topology, inside, bounds) for one in orders(placement)]
    return Ranking(tuple(in_best_order(rank_placements(ordered, found, programs, algorithm, others))))
