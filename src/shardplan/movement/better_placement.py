"""What a better placement of a plan's mesh would gain: one line, worked out when it is asked for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from shardplan.core.mesh import Mesh
from shardplan.core.program import Program
from shardplan.core.tensor import TensorType
from shardplan.errors import ShardplanError
from shardplan.hardware.placement import Placement, placements
from shardplan.hardware.prices.aggregate import units_spanned
from shardplan.hardware.topology import Topology
from shardplan.hardware.units import format_seconds
from shardplan.movement.placing.traffic import program_traffic
from shardplan.movement.redistribution.single_move import choose, rules_of
from shardplan.plans.plan import Plan
from shardplan.plans.pricing import Where, occupied_units

# A tensor is planned on each, which takes tens of milliseconds, and many axes on many levels have thousands.
MOST_PLACEMENTS = 64
GAIN = 1.1  # the seconds of a plan over those on another placement, from which on that is said

Ends = Sequence[tuple[TensorType, TensorType]]


def better_text(ends: Ends, where: Where | None, planned: Callable[[Where | None], Plan]) -> str:
    """Return the line that `better_plan` is worth, with the command that ranks placements; empty where there is none.

    The command names the units that the mesh fills, by a file where they are of no preset. What is no collective over
    whole axes it reads from a plan file.
    """
    found = better_plan(ends, where, planned)
    if found is None:
        return ""
    placement, mesh, topology = found.certificate.where, ends[0][0].mesh, where
    assert isinstance(placement, Placement) and isinstance(topology, Topology)
    part, start = occupied_units(topology, mesh.devices)
    # Of the axes that cross fewer units there, the one of the outermost level, and of those the one of the fewest.
    there = {axis: np.cumprod(row).tolist() for axis, row in zip(mesh.axes, placement.matrix, strict=True)}
    gained = [
        (j, new, axis)
        for axis in mesh.axes
        for j, (old, new) in enumerate(zip(_spanned_units(mesh, axis, part, start), there[axis], strict=True))
        if new < old
    ]
    how = ""
    if gained:
        j, units, axis = min(gained)
        names = [level.name for level, n in zip(part.levels, there[axis], strict=True) if n == 1]
        how = (
            f"{axis} inside one {names[-1]}: " if units == 1 else f"{axis} on {units} units of {part.levels[j].name}: "
        )
    asked = _traffic_text(ends, found.program)
    command = f"--mesh {','.join(f'{a}={n}' for a, n in mesh.shape.items())} --traffic {asked}" if asked else "PLAN"
    return (
        f"better     placing {how}{placement.describe()} would take {format_seconds(found.seconds)}: "
        f"`shardplan place {command} {_topology_options(part)}`"
    )


def better_plan(ends: Ends, where: Where | None, planned: Callable[[Where | None], Plan]) -> Plan | None:
    """Return the plan on the best placement, where it takes `GAIN` less than where the devices are.

    A batch goes where its largest tensor is best. None too on a placement, where devices leave a part of a unit empty,
    and between two sets of devices. At most `MOST_PLACEMENTS` are tried.
    """
    if not ends or not isinstance(where, Topology) or len({frozenset(t.mesh.devices) for e in ends for t in e}) > 1:
        return None
    mesh, now = ends[0][0].mesh, planned(where).seconds
    part, _ = occupied_units(where, mesh.devices)
    if part.size != mesh.size:
        return None
    s, t = max(ends, key=lambda pair: pair[0].nbytes)
    best, below = None, now / GAIN if len(ends) == 1 else math.inf
    for placement in itertools.islice(placements(mesh, part), MOST_PLACEMENTS):
        new = choose(s, t, rules_of(s, t, placement, False, False), below)
        if new is not None and new.price < below:
            best, below = placement, new.price
    plan = None if best is None else planned(best)
    return plan if plan is not None and plan.seconds * GAIN <= now else None


def _spanned_units(mesh: Mesh, axis: str, part: Topology, start: int) -> list[int]:
    """The most units of each level that a group over an axis spans."""
    return units_spanned(mesh.ids[mesh.group_places((axis,))] - start, part).max(axis=1).tolist()


def _traffic_text(ends: Ends, program: Program) -> str:
    """What a program communicates as `--traffic`; empty where some of it is no collective over whole axes.

    Of a program that reduces on a mesh of its own it is what the ends ask for.
    """
    if len(program.meshes) == 1:
        _, demands, others = program_traffic(program)
        terms = [f"{'+'.join(d.axes)}={d.op}:{d.nbytes:.0f}B*{d.count:g}" for d in demands]
        return "" if others else ",".join(terms)
    terms: list[str] = []
    for s, t in ends:
        if axes := [a for a in s.layout.partial if a not in t.layout.partial and a in s.mesh.axes]:
            op = "reduce_scatter" if set(axes) & set(t.mesh.axes) & set(t.layout.used_axes) else "all_reduce"
            terms.append(f"{'+'.join(axes)}={op}:{s.local_bytes()}B*1")
    return ",".join(terms) or "TRAFFIC"


def _topology_options(topology: Topology) -> str:
    """The options of the command line that name a topology."""
    sizes = {level.name: level.size for level in topology.levels if not level.shape}
    for kept in ({}, {k: n for k, n in sizes.items() if k == "node"}):
        try:
            if Topology.load(topology.name, **kept) == topology:
                return f"--topology {topology.name}" + "".join(f" --nodes {n}" for n in kept.values())
        except ShardplanError:  # no preset has this name
            break
    return "--topology FILE"
