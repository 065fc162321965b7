"""What `place`, `reduce` and `topologies` print, and their JSON objects."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from shardplan.hardware.placement import Placement
from shardplan.hardware.prices.library import library
from shardplan.hardware.topology import Topology
from shardplan.hardware.units import format_bytes, format_seconds
from shardplan.movement.placing.degradation import Degraded
from shardplan.movement.placing.place import Ranking
from shardplan.movement.placing.placement_price import PricedPlacement
from shardplan.movement.reductions.enumeration import Reduction
from shardplan.plans.plan import Plan
from shardplan.report.text import library_object, plan_object, table

SHOWN = 10  # placements printed unless more are asked for
MOST_RENAMED = 8  # devices of a renaming printed


def traffic_lines(notes: Sequence[str]) -> list[str]:
    """Return what traffic was taken for under one heading, in lines of at most 80 characters."""
    found: list[str] = []
    for note in notes:
        found += textwrap.wrap(note, 71, subsequent_indent="  ", break_long_words=False)
    return [f"{'traffic' if k == 0 else '':<9}{line}" for k, line in enumerate(found)]


def ranking_text(found: Ranking, top: int = SHOWN, notes: Sequence[str] = ()) -> str:
    """Return a ranking as text: a line for each of the first `top` placements, then what placing well is worth.

    `notes` say what the traffic was taken for.
    """
    best = found[0]
    rows = [["", "seconds", "x best", "bound", "stock", "placement"]]
    for number, row in enumerate(found[:top]):
        over = row.seconds / best.seconds if best.seconds > 0 else 1.0
        cells = (row.seconds, row.lower_bound_seconds, row.stock_seconds)
        seconds, bound, stock = map(format_seconds, cells)
        rows.append([str(number + 1), seconds, f"{over:.2f}", bound, stock, row.placement.describe()])
    lines = [*traffic_lines(notes), ""] if notes else []
    lines += table(rows, left=(5,))
    if len(found) > top:
        lines.append(f"... and {len(found) - top} more, the last {found[-1].seconds / best.seconds:.3g} x the best")
    lines += ["", f"best       {best.placement.describe()} on {best.placement.topology.describe()}"]
    for share in best.shares:
        part = f"{share.seconds / best.seconds:.0%}" if best.seconds > 0 else "-"
        cost = f"{format_seconds(share.seconds)} ({part}), as one op {format_seconds(share.stock_seconds)}"
        lines.append(f"  {share.demand}: {cost}")
    if best.other_seconds > 0:
        lines.append(f"  other communication: {format_seconds(best.other_seconds)}")
    worst = found.mitigation(max(found, key=lambda r: r.seconds))
    lines.append(f"gain       the worst placement takes {worst:.3g} x the best with the best programs,")
    lines.append(f"{'':<11}{found.placement_gain:.3g} x with every collective as one op")
    if found.degraded is not None:
        lines += _degraded(found.degraded)
    lines += _caveat(best.placement)
    return "\n".join(lines)


def _caveat(placement: Placement) -> list[str]:
    """A line where nobody measured the library whose seconds are told."""
    caveat = library(placement.topology.library).caveat
    return [f"library    {caveat}"] if caveat else []


def _degraded(found: Degraded) -> list[str]:
    """What slow units cost, and the renaming that helps, as lines."""
    units = ", ".join(found.units)
    lines = [f"degraded   {units}: the choice of the healthy cluster would take {found.regret:.3g} x the best"]
    if found.renaming is not None:
        moved = [(k, d) for k, d in enumerate(found.renaming) if k != d]
        shown = ", ".join(f"{a}->{b}" for a, b in moved[:MOST_RENAMED])
        shown += ", ..." if len(moved) > MOST_RENAMED else ""
        lines.append(f"renaming   devices {shown} make the best {found.gain:.3g} x faster")
    return lines


def ranking_object(found: Ranking, top: int | None = None) -> dict[str, Any]:
    """Return a ranking as an object; `placements` holds the rows, best first, the first with its programs."""
    degraded = found.degraded
    return {
        "placements": [
            placed_object(row) | ({"plans": _plans(row)} if number == 0 else {})
            for number, row in enumerate(found[:top])
        ],
        "count": len(found),
        "placement_gain": found.placement_gain,
        "library": library_object(found[0].placement.topology),
        "degraded": None
        if degraded is None
        else {
            "units": list(degraded.units),
            "healthy": [list(row) for row in degraded.healthy.matrix],
            "regret": degraded.regret,
            "renaming": None if degraded.renaming is None else list(degraded.renaming),
            "gain": degraded.gain,
        },
    }


def _plans(row: PricedPlacement) -> dict[str, list[str]]:
    """The programs of the best placement, by axes, as text."""
    return {
        ",".join(axes): [str(p.program) for p in (plans if isinstance(plans, tuple) else (plans,))]
        for axes, plans in row.plans.items()
    }


def placed_object(row: PricedPlacement) -> dict[str, Any]:
    """Return one placement as an object."""
    return {
        "placement": row.placement.describe(),
        "matrix": [list(r) for r in row.placement.matrix],
        "order": [list(axes) for axes in row.placement.order],
        "seconds": row.seconds,
        "stock_seconds": row.stock_seconds,
        "lower_bound_seconds": row.lower_bound_seconds,
        "other_seconds": row.other_seconds,
        "shares": [
            {
                "axes": list(share.demand.axes),
                "op": share.demand.op,
                "bytes": share.demand.nbytes,
                "count": share.demand.count,
                "seconds": share.seconds,
                "stock_seconds": share.stock_seconds,
            }
            for share in row.shares
        ],
    }


def reduction_text(plan: Plan, paper: str, stock: float, placement: Placement, origin: str) -> str:
    """Return the plan of a reduction as text, with its instructions and what the one collective would take.

    First stands the placement that is answered for, and where it comes from, `origin`. `paper` is the program in the
    paper's language, `stock` are the seconds of the one collective.
    """
    lines = [line for line in str(plan).split("\n") if not line.startswith("placement ")]
    lines.insert(0, f"placement  {placement.describe()} on {placement.topology.describe()}: {origin}")
    if paper:
        lines.append(f"paper      {paper}")
    if plan.seconds > 0:
        lines.append(f"stock      one collective takes {format_seconds(stock)}, {stock / plan.seconds:.3g} x this")
    return "\n".join(lines)


def reductions_text(found: Sequence[Reduction], top: int) -> str:
    """Return a list of programs as text, cheapest first: seconds, how they type, instructions."""
    if not found:
        return "no program"
    placement, view = found[0].placement, found[0].payload
    lines = [
        f"{len(found)} programs, {format_bytes(view.nbytes)} a device over "
        f"{' x '.join(f'{f.name}={f.size}' for f in view.factors)} of {placement.describe()}"
    ]
    for number, one in enumerate(found[:top]):
        mark = "" if one.path is not None else "  (instructions only)"
        lines.append(f"{number + 1:>4}  {format_seconds(one.seconds):>8}  {one}{mark}")
    if len(found) > top:
        lines.append(
            f"... and {len(found) - top} more, the dearest {found[-1].seconds / found[0].seconds:.3g} x the best"
        )
    return "\n".join([*lines, *_caveat(placement)])


def reduction_object(plan: Plan, paper: str, stock: float, placement: Placement) -> dict[str, Any]:
    """Return the plan of a reduction as an object."""
    return plan_object(plan) | {
        "placement": placement.describe(),
        "matrix": [list(r) for r in placement.matrix],
        "order": [list(axes) for axes in placement.order],
        "instructions": paper,
        "stock_seconds": stock,
    }


def reductions_object(found: Sequence[Reduction], top: int | None) -> dict[str, Any]:
    """Return a list of programs as an object."""
    return {
        "count": len(found),
        "reductions": [
            {
                "instructions": str(one),
                "seconds": one.seconds,
                "program": None if one.program is None else str(one.program),
            }
            for one in found[:top]
        ],
        "library": library_object(found[0].placement.topology) if found else None,
    }


def topologies_text(found: Sequence[Topology]) -> str:
    """Return a line for each topology: name, levels, library, and on what the library's prices were fitted."""
    rows = [["topology", "levels", "library", "prices fitted on"]]
    rows += [[t.name, t.describe(), t.library, library(t.library).measured or "nothing measured"] for t in found]
    return "\n".join(table(rows, left=range(4)))


def topologies_object(found: Sequence[Topology]) -> dict[str, Any]:
    """Return topologies as an object; `text` is what a topology file says."""
    return {
        "topologies": [
            {
                "name": t.name,
                "levels": t.describe(),
                "size": t.size,
                "library": t.library,
                "measured": library(t.library).measured,
                "text": str(t),
            }
            for t in found
        ]
    }
