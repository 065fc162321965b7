"""A predicted timeline beside a measured one, as tables."""

from __future__ import annotations

from shardplan.core import validation
from shardplan.hardware.units import format_seconds
from shardplan.report.text import table
from shardplan.simulation.interval import Interval
from shardplan.simulation.jobs.compare import TimelineComparison


def compared_text(found: TimelineComparison, most: int = 20) -> str:
    """Return the comparison as text: a line a kind, then the `most` steps that differ most, in their order.

    Raises `LayoutError` where `most` is below 0.
    """
    validation.whole_number("compared_text: most", most)
    rows = [["kind", "count", "predicted", "count", "measured", "ratio"]]
    for kind in found.kinds:
        ratio = "" if kind.ratio is None else f"{kind.ratio:.3g}"
        predicted, measured = format_seconds(kind.predicted_seconds), format_seconds(kind.measured_seconds)
        rows.append([kind.kind, str(kind.predicted_count), predicted, str(kind.measured_count), measured, ratio])
    whole = (
        f"step: predicted {format_seconds(found.predicted_seconds)}, measured {format_seconds(found.measured_seconds)}"
    )
    far = sorted(range(len(found.steps)), key=lambda k: -_apart(found.steps[k].predicted, found.steps[k].measured))
    steps = [["step", "predicted", "", "measured", ""]]
    for k in sorted(far[:most]):
        one = found.steps[k]
        steps.append([str(k), *_cells(one.predicted), *_cells(one.measured)])
    said = f"{found.matched} of {len(found.steps)} steps are on both sides; the {len(steps) - 1} that differ most:"
    return "\n".join([whole, "", *table(rows), "", said, *table(steps)])


def _cells(one: Interval | None) -> list[str]:
    return ["", "-"] if one is None else [one.name[:48], format_seconds(one.seconds)]


def _apart(a: Interval | None, b: Interval | None) -> float:
    return abs((a.seconds if a else 0.0) - (b.seconds if b else 0.0))
