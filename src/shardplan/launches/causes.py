"""Why a demand of a launch is slow: the sentence, by where other groups would take load away."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardplan.hardware.level import Level
from shardplan.hardware.placement import Placement
from shardplan.hardware.prices.aggregate import units_spanned
from shardplan.hardware.prices.cost import price
from shardplan.hardware.prices.fabric import Fabric
from shardplan.hardware.units import format_bytes, format_rate, format_seconds
from shardplan.launches.launch import Launch, article, count_units, detour_text, quote_axes, ring_of, sharing
from shardplan.launches.verdict import Findings
from shardplan.movement.placing.demand import demand_pattern
from shardplan.movement.placing.placement_price import SAME
from shardplan.movement.placing.traffic import Demand

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CostShare:
    """What one demand costs."""

    demand: Demand
    seconds: float  # that a step waits for it, as launched
    hidden_seconds: float  # of a step that run behind compute, as launched
    best_seconds: float  # that a step waits for it on the best matrix
    algorithm: str  # the library's that is priced, as launched
    uplink_bytes: tuple[float, ...]  # for each level the bytes that leave its busiest unit in a step
    port_bytes: tuple[float, ...]  # for each level the bytes that leave by its busiest port or link in a step


def uplink_word(level: Level, count: int = 1) -> str:
    """Return what uplinks of a level are called: those of a node are NICs."""
    several = "s" if count > 1 else ""
    if level.link != "switch":
        return f"link{several} of {article(level.name)}"
    return f"NIC{several}" if level.name in ("node", "host") else f"uplink{several} of {article(level.name)}"


def cause_of(launch: Launch, findings: Findings, worst: CostShare, best: Placement, algorithm: str) -> str:
    """Return one sentence that says why a demand is slow, where it loses the most."""
    axes, levels = worst.demand.axes, launch.topology.levels
    names = quote_axes(axes)
    groups, target = launch.groups(axes), np.sort(Launch.of(best).groups(axes), axis=1)
    here, there = ([int(c.max()) for c in units_spanned(g, launch.topology)] for g in (groups, target))
    stray = {s.level for s in findings.strays if set(s.axes) <= set(axes)}
    rings = ring_of(launch, axes)
    verb = "spans" if len(axes) == 1 else "together span"
    for j in _relieved_levels(groups, target, worst.demand, Fabric(launch.topology), algorithm):
        level = levels[j]
        if level.name in stray:
            return findings.reason
        if here[j] > there[j]:
            spans = f"{names} {verb} {count_units(here[j], level.name)}"
            n = sharing(groups, launch.topology)[j]
            if n > 1 and level.uplinks == 1:
                return f"{spans}: {n} groups share each {uplink_word(level)}"
            ports = f"{uplink_word(level, level.uplinks)} of {format_rate(level.bandwidth)}"
            if n > 1:
                return f"{spans}: {n} groups share {level.uplinks} {ports}; it could span {there[j]}"
            return f"{spans}, each over {ports}; it could span {there[j]}"
        if rings.detours[j]:
            return detour_text(rings, launch.topology, j)
        busy, idle = (sharing(g, launch.topology)[j] for g in (groups, target))
        if busy > idle > 0:
            spans = count_units(here[j], level.name)
            return f"{names} {verb} {spans}: {busy} groups leave each {level.name}, where {idle} could"
    if findings.felt:
        return findings.reason
    return (
        f"{worst.demand.op} over {names} of {format_bytes(worst.demand.nbytes)} takes "
        f"{format_seconds(worst.seconds)}, {format_seconds(worst.best_seconds)} on the best matrix"
    )


def _relieved_levels(groups: Ints, target: Ints, demand: Demand, fabric: Fabric, algorithm: str) -> list[int]:
    """Levels by the seconds of load that other groups take off their busiest wire, the outermost of equals first.

    A level of more load there is no cause, and left out, unless none has less: then latency is all that is lost.
    """
    now, then = (
        [
            0.0 if seconds is None else float(seconds.max(initial=0.0))
            for seconds in price(demand_pattern(demand.op, members, demand.nbytes), fabric, algorithm).load
            or [None] * len(fabric.wires)
        ]
        for members in (groups, target)
    )
    least = SAME * max([*now, *then])
    saved = {j: a - b for j, (a, b) in enumerate(zip(now, then, strict=True))}
    better = [j for j in saved if saved[j] > least]
    return sorted(better or saved, key=lambda j: (-float(f"{max(saved[j], 0.0):.3g}"), j))
