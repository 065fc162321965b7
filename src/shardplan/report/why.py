"""What `why` prints, and its JSON objects: movements with who asks for them; and a measured step beside a predicted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardplan.hardware.units import format_bytes, format_seconds
from shardplan.report.plan import wrap_text
from shardplan.report.text import table
from shardplan.simulation.step_gap import StepGap
from shardplan.simulation.why import MovementWhy, WhyMovements
from shardplan.strategy.partition.remedies import AnnotationRemedy

SHOWN = 8  # movements told in full
FELT = 1e-3  # of a step: what takes less is told in a line together


def why_text(found: WhyMovements, top: int = SHOWN) -> str:
    """Return movements as text: those that are exposed most in full, then what the others come to."""
    whole = found.timeline.seconds
    moved = sum(m.seconds for m in found.movements)
    bare = sum(m.exposed_seconds for m in found.movements)
    lines = [
        *wrap_text(found.timeline.explained(), "step      "),
        f"movements {len(found.movements)}: {format_seconds(moved)} a step, {format_seconds(bare)} of them exposed",
    ]
    for number, one in enumerate(found.movements[:top], 1):
        lines += ["", *movement_lines(one, whole, number)]
    rest = found.movements[top:]
    if rest:
        seconds, nbytes = sum(m.exposed_seconds for m in rest), sum(m.received_bytes for m in rest)
        lines += ["", f"{len(rest)} more, {format_seconds(seconds)} exposed, {format_bytes(nbytes)}: --top shows them"]
    return "\n".join(lines)


def movement_lines(m: MovementWhy, whole: float, number: int) -> Iterator[str]:
    """Yield the lines of a movement: what and where, who asks, both proposals, its price, what removes it."""
    share = f", {100 * m.exposed_seconds / whole:.1f} % of the step" if m.exposed_seconds > FELT * whole else ""
    hidden = (
        "hidden" if m.exposed_seconds <= 1e-3 * m.seconds else f"{format_seconds(m.exposed_seconds)} exposed{share}"
    )
    yield from wrap_text(f"{', '.join(m.ops)} of %{m.value}, {m.location}", f"{number:>2}  ")
    yield from wrap_text(f"{m.asks} wants {', '.join(m.dims) or 'it there'}", "    asked    ")
    yield from wrap_text(str(m.made), "    made     ")
    yield from wrap_text(str(m.wanted), "    wanted   ")
    cost = f"{m.runs:,} times a step: {format_bytes(m.received_bytes)}, {format_seconds(m.seconds)}, {hidden}"
    yield from wrap_text(cost, "    costs    ")
    yield from wrap_text(remedy_text(m), "    removes  ")


def remedy_text(m: MovementWhy) -> str:
    """Return what removes a movement, and what that costs; or that nothing within the tables does."""
    if m.remedy is None:
        if m.wanted.mesh != m.made.mesh:
            return "fewer stages"
        return "nothing within the tables: both ends are as they say"
    if isinstance(m.remedy, AnnotationRemedy):
        said = ", ".join(f"%{name} as {t}" for name, t in m.remedy.types.items())
        return f"annotating {said}: {_change_text(m.remedy.more)} a step"
    role = "who asks" if m.remedy.role == "asks" else "who makes it"
    cost = f"{_change_text(m.remedy.more)} a microbatch"
    return f"{role}, {m.remedy.by}, {m.remedy.option} over {m.remedy.axis}: {cost}"


def _change_text(more: float) -> str:
    return f"{format_seconds(abs(more))} {'more' if more > 0 else 'less'}"


def why_object(found: WhyMovements) -> dict[str, Any]:
    """Return movements as an object, with the seconds of the step and what they consist of."""
    line = found.timeline
    return {"seconds": line.seconds, "explained": line.explained(), "exposed": line.exposed,
            "movements": [m.to_dict() for m in found.movements]}  # fmt: skip


def gap_text(found: StepGap) -> str:
    """Return why a measured step is not as predicted: by kind, what is exposed and idle, and who is late."""
    more = found.measured_seconds - found.predicted_seconds
    ratio = found.measured_seconds / found.predicted_seconds
    rows = [["of a device", "predicted", "measured", "more"]]
    parts = [(one.kind, one.predicted_seconds, one.measured_seconds) for one in found.kinds]
    parts += [("exposed communication", *found.exposed), ("idle", *found.idle)]
    rows += [[kind, format_seconds(a), format_seconds(b), _more_text(b - a)] for kind, a, b in parts]
    lines = [
        f"step      measured {format_seconds(found.measured_seconds)}, predicted "
        f"{format_seconds(found.predicted_seconds)}: {_more_text(more)}, {ratio:.2f} times",
        f"measured  {len(found.devices)} ranks: {', '.join(map(str, found.devices[:8]))}"
        + (", ..." if len(found.devices) > 8 else ""),
        "",
        *table(rows),
        "",
    ]
    if not found.stragglers:
        return "\n".join([*lines, "no rank computes much longer than the others"])
    late = [f"rank {s.device} computes {format_seconds(s.behind_seconds)} longer than the median"
            for s in found.stragglers]  # fmt: skip
    return "\n".join([*lines, *(x for one in late for x in wrap_text(one, "late      "))])


def _more_text(seconds: float) -> str:
    return f"{'+' if seconds >= 0 else '-'}{format_seconds(abs(seconds))}"
