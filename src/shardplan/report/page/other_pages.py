"""Reports of a redistribution and of an audited launch, of the parts that a plan's report has."""

from __future__ import annotations

from collections.abc import Sequence

from shardplan.hardware.units import format_bytes, format_seconds
from shardplan.plans.plan import Plan
from shardplan.report.page.figures import SERIES, bar_figure
from shardplan.report.page.page import PagePart, render_page
from shardplan.report.svg import svg_picture


def movement_page(plan: Plan, title: str) -> str:
    """Return the report of a redistribution: what it costs, what devices receive beside the bound, what they hold."""
    c = plan.certificate
    cards = [
        (format_seconds(plan.seconds), f"predicted; lower bound {format_seconds(c.lower_bound_seconds)}"),
        (format_bytes(max(c.received_bytes, default=0)), "received at the worst device"),
        (format_bytes(max(c.lower_bound_bytes, default=0)), "is the lower bound there"),
        (format_bytes(c.peak_bytes), f"held at most; bound {format_bytes(c.bound_bytes)}"),
        (c.status, "of the certificate"),
    ]
    devices = [f"device {d}" for d in plan.program.devices]
    rows = [("received", list(c.received_bytes)), ("lower bound", list(c.lower_bound_bytes))]
    parts = [
        PagePart("Plan", cards=cards, text=str(plan)),
        PagePart(
            "Bytes by device", "Received, beside what no plan can go below.", figure=bytes_by_device(devices, rows)
        ),
        PagePart(
            "What each device holds", "Before the first step, and after each.", markup=svg_picture(plan.program, title)
        ),
    ]
    return render_page(title, parts)


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
