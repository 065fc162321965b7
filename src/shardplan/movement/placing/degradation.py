"""Degraded links: what the choice of the healthy cluster would cost, and whether renaming devices helps.

A slow unit may be swapped with a sibling, so that the programs' roots and chains meet it elsewhere. Every group of an
axis across units meets each of them, so this seldom helps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardplan.hardware.placement import Placement
from shardplan.hardware.prices.fabric import Fabric
from shardplan.hardware.topology import Topology
from shardplan.movement.placing.demand import demand_plan
from shardplan.movement.placing.placement_price import PricedPlacement, rank_placements
from shardplan.plans.pricing import price_program

# Devices up to which renamings around a degraded unit are tried: each prices all programs again, without the price's
# shortcuts for regular placements, and there are as many as siblings.
MOST_RENAMED = 1024
_WORTH = 1e-9  # of the seconds: a smaller gain is the rounding of a sum


@dataclass(frozen=True)
class Degraded:
    """What a slow unit costs."""

    units: tuple[str, ...]  # names of the degraded units, such as `node[2]`, and ports, such as `node[2].5`
    healthy: Placement  # the best one without the degradation
    regret: float  # its seconds over those of the best, with the degradation
    renaming: tuple[int, ...] | None  # per device the topology id to use in its place; None where no swap helps
    gain: float  # seconds of the best placement over those after the renaming


def degradation(rows: Sequence[PricedPlacement]) -> Degraded | None:
    """Return what degraded units cost, and a renaming of devices where one helps; None where there are none.

    The rows are placements of one mesh, priced with the degradation, best first.
    """
    best = rows[0]
    topology = best.placement.topology
    names = tuple(name for level in topology.levels for name, _, _ in level.slow())
    if not names:
        return None
    sound = replace(topology, levels=tuple(level.sound() for level in topology.levels))
    demands = [share.demand for share in best.shares]
    without = [replace(row.placement, topology=sound) for row in rows]
    first = rank_placements(without, demands, best.programs, best.algorithm)[0].placement.matrix
    healthy = next(row for row in rows if row.placement.matrix == first)
    renaming, saved = None, 0.0
    if topology.size <= MOST_RENAMED:
        plans = [(demand_plan(best.placement, d, best.programs, best.algorithm), d) for d in demands]

        def total(ids: NDArray[np.int64]) -> float:
            """Seconds of the programs after a renaming; what has no program is left out."""
            fabric = Fabric(topology, ids[best.placement.position()])
            return sum(
                d.exposed_seconds(d.count * price_program(plan.program, fabric, best.algorithm).seconds)
                for plan, d in plans
                if plan is not None
            )

        now = total(np.arange(topology.size))
        for ids in _swaps(topology):
            gained = now - total(ids)
            if gained > max(saved, _WORTH * now):
                renaming, saved = tuple(ids.tolist()), gained
    regret = healthy.seconds / best.seconds if best.seconds > 0 else 1.0
    gain = best.seconds / (best.seconds - saved) if best.seconds > saved else 1.0
    return Degraded(names, healthy.placement, regret, renaming, gain)


def _swaps(topology: Topology) -> Iterator[NDArray[np.int64]]:
    """Yield renamings of devices that swap a degraded unit with one of its siblings, the outermost level first.

    Int64 [devices]. A swap with what is no sibling would tear a unit of an outer level apart.
    """
    ids = np.arange(topology.size)
    for level, stride in zip(topology.levels, topology.strides, strict=True):
        for unit in sorted({unit for _, unit, _ in level.slow()}):
            parent = unit // level.size * level.size
            for sibling in range(parent, parent + level.size):
                if sibling == unit:
                    continue
                swapped = ids.copy()
                one, two = (slice(u * stride, (u + 1) * stride) for u in (unit, sibling))
                swapped[one], swapped[two] = ids[two], ids[one]
                yield swapped
