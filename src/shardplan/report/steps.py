"""What `validate` and `calibrate` print of measured steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardplan.errors import LayoutError
from shardplan.hardware.units import format_bytes, format_seconds
from shardplan.report.text import table
from shardplan.simulation.accuracy.calibration import Calibrated
from shardplan.simulation.accuracy.forecast import forecast
from shardplan.simulation.accuracy.step_rows import StepRow
from shardplan.simulation.accuracy.step_validation import StepsVerdict
from shardplan.simulation.accuracy.subject import model_of, strategies_of, topology_of_row
from shardplan.simulation.closed.configurations import Configurations
from shardplan.simulation.closed.form import ClosedForm
from shardplan.simulation.closed.machines import MachineFit

_COLUMNS = {
    "rows": ("count", ""),
    "mean": ("mean_error_percent", " %"),
    "median": ("median_error_percent", " %"),
    "p90": ("p90_error_percent", " %"),
    "max": ("max_error_percent", " %"),
    "tau": ("kendall_tau", ""),
    "regret": ("top1_regret_percent", " %"),
    "covered": ("interval_coverage_percent", " %"),
    "half": ("interval_half_width_percent", " %"),
    "fits": ("fit_right", ""),
    "not so": ("fit_wrong", ""),
}


def steps_text(verdict: StepsVerdict) -> str:
    """Return a table of sources and quantities, below it what was assumed, skipped and said not to fit."""
    rows = [["source", "quantity", *_COLUMNS]]
    for one in sorted(verdict.sources, key=lambda s: not s.gate):
        cells = [_cell(name, one.numbers.get(name), unit) for name, unit in _COLUMNS.values()]
        rows.append([one.source + ("" if one.gate else " (no gate)"), one.quantity, *cells])
    lines = [*table(rows, left=(0, 1)), ""] if len(rows) > 1 else []
    assumed = sum(bool(f.assumed) for f in verdict.forecasts)
    lines.append(
        f"{verdict.rows} rows, {len(verdict.skipped)} skipped, {assumed} with unpublished fields searched over"
    )
    if verdict.predicted_not_to_fit:
        ids = ", ".join(verdict.predicted_not_to_fit[:8])
        more = len(verdict.predicted_not_to_fit) - 8
        lines.append(f"said not to fit: {ids}" + (f" and {more} more" if more > 0 else ""))
    lines += [f"skipped {name}: {why}" for name, why in verdict.skipped]
    return "\n".join(lines)


def _cell(name: str, value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if name == "kendall_tau" else f"{value:.0f}" if not unit else f"{value:.1f}{unit}"


def explained(row: StepRow, fit_of: Callable[[str], MachineFit]) -> tuple[dict[str, Any], str]:
    """Return the parts of a row's prediction, as one object and as lines; raises `LayoutError` where it has none."""
    found, skipped = forecast([row], fit_of)
    if skipped:
        raise LayoutError(skipped[0][1])
    (one,) = found
    strategies = strategies_of(row)
    chosen = [s for s in strategies if all(getattr(s, name) == value for name, value in one.assumed.items())]
    form = ClosedForm(model_of(row.model), topology_of_row(row.cluster), fit_of(row.cluster.preset).parameters)
    out = form(Configurations.of(chosen[:1]))
    parts = {name: float(x[0]) for name, x in out.parts.items()}
    measured = row.measured.seconds_per_step
    said = {"id": row.id, "seconds_per_step": one.seconds_per_step, "measured": measured, "parts": parts}
    said |= {"peak_bytes": one.peak_bytes, "fits": one.fits, "assumed": dict(one.assumed)}
    low, high = (format_seconds(x) for x in one.seconds_interval)
    lines = [f"{row.id}: {format_seconds(one.seconds_per_step)}, 90 % between {low} and {high}"]
    if measured:
        lines.append(f"measured   {format_seconds(measured)}: {(one.seconds_per_step / measured - 1) * 100:+.1f} %")
    lines += [f"{name:<10} {format_seconds(x)}" for name, x in parts.items()]
    lines.append(f"memory     {format_bytes(one.peak_bytes)}{'' if one.fits else ', which does not fit'}")
    lines += [f"assumed    {name}={value}" for name, value in one.assumed.items()]
    return said, "\n".join(lines)


def step_fit_text(found: Calibrated) -> str:
    """Return what was fitted, on how many rows, and how well without those held out."""
    p = found.fit.machine.parameters
    lines = [f"fitted   {len(found.fit.machine.names)} parameters of {found.machine} on {found.fit.rows} rows"]
    lines += [f"         {name} = {getattr(p, name):.4g}" for name in found.fit.machine.names]
    if found.judged is None:
        lines.append("held out none: nothing says how good the fit is")
    else:
        mean, median = found.judged["mean_error_percent"], found.judged["median_error_percent"]
        lines.append(f"held out {found.held_out} rows, fitted without them: mean {mean:.1f} %, median {median:.1f} %")
    if found.fit.undetermined:
        lines.append(f"kept     {', '.join(found.fit.undetermined)}: the rows do not determine them")
    return "\n".join(lines)
