"""Reports of a redistribution, of a refit and of an audited launch, of the parts that a plan's report has."""

from __future__ import annotations

from collections.abc import Sequence

from shardplan.hardware.units import format_bytes, format_seconds
from shardplan.movement.weights.refit import RefitPlan
from shardplan.plans.certificate import Certificate
from shardplan.plans.plan import Plan
from shardplan.report.page.figures import SERIES, bar_figure
from shardplan.report.page.page import PagePart, render_page
from shardplan.report.svg import svg_picture
from shardplan.report.weights import moves_rows, refit_text

MOST_MOVES = 500  # of a refit, in its table


def movement_page(plan: Plan, title: str) -> str:
    """Return the report of a redistribution: what it costs, what devices receive beside the bound, what they hold."""
    c = plan.certificate
    devices = [f"device {d}" for d in plan.program.devices]
    rows = [("received", list(c.received_bytes)), ("lower bound", list(c.lower_bound_bytes))]
    parts = [
        PagePart("Plan", cards=certificate_cards(c), text=str(plan)),
        PagePart(
            "Bytes by device", "Received, beside what no plan can go below.", figure=bytes_by_device(devices, rows)
        ),
        PagePart(
            "What each device holds", "Before the first step, and after each.", markup=svg_picture(plan.program, title)
        ),
    ]
    return render_page(title, parts)


def certificate_cards(c: Certificate) -> list[tuple[str, str]]:
    """Return what is proved of a plan, in numbers."""
    return [
        (format_seconds(c.seconds), f"predicted; lower bound {format_seconds(c.lower_bound_seconds)}"),
        (format_bytes(max(c.received_bytes, default=0)), "received at the worst device"),
        (format_bytes(max(c.lower_bound_bytes, default=0)), "is the lower bound there"),
        (format_bytes(c.peak_bytes), f"held at most; bound {format_bytes(c.bound_bytes)}"),
        (c.status, "of the certificate"),
    ]


def refit_page(plan: RefitPlan, title: str) -> str:
    """Return the report of a refit: what it costs, what ranks send and receive, and where each parameter comes from."""
    table = moves_table(plan)
    left = len(table) - 1 - MOST_MOVES
    note = f"The first {MOST_MOVES}; {left} more are in --json." if left > 0 else ""
    ranks = [f"rank {rank}" for rank in plan.ranks]
    rows = [("sent", list(plan.sent_bytes)), ("received", list(plan.received_bytes))]
    parts = [
        PagePart("Plan", cards=refit_cards(plan), text=refit_text(plan)),
        PagePart("Bytes by rank", "Sent to other ranks, and received from them.", figure=bytes_by_device(ranks, rows)),
        PagePart("Parameters", note, rows=table[: MOST_MOVES + 1]),
    ]
    return render_page(title, parts)


def refit_cards(plan: RefitPlan) -> list[tuple[str, str]]:
    """Return what a refit costs, in numbers."""
    _, _, sizes = plan.traffic
    return [
        (format_seconds(plan.seconds), f"predicted; lower bound {format_seconds(plan.bound_seconds)}"),
        (format_bytes(int(sizes.sum())), f"travels, in {len(sizes)} pairs of ranks"),
        (format_bytes(max(plan.sent_bytes, default=0)), "sent at most by a rank"),
        (format_bytes(max(plan.received_bytes, default=0)), "received at most by one"),
    ]


def moves_table(plan: RefitPlan) -> list[list[str]]:
    """Return where each parameter of a refit comes from, headings first."""
    rows = [["to", "type", "from", "type", "bytes"]]
    return rows + [
        [m["target"], m["target_type"], m["source"], m["source_type"], format_bytes(m["bytes"])]
        for m in moves_rows(plan)
    ]


def bytes_by_device(devices: Sequence[str], rows: Sequence[tuple[str, Sequence[float]]]) -> dict[str, object]:
    """Return bytes of every device, a bar for each of some numbers."""
    return dict(bar_figure(devices, [(name, SERIES[k], values) for k, (name, values) in enumerate(rows)]))


def audit_page(title: str, text: str, picture: str) -> str:
    """Return the report of an audited launch: the verdict with its fix, and where ranks lie."""
    parts = [
        PagePart("Verdict", text=text),
        PagePart("Where ranks lie", "Strips of one colour are a group.", markup=picture),
    ]
    return render_page(title, parts)
