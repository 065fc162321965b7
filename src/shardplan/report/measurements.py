"""What `validate`, `calibrate` and `measure` print."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from shardplan.errors import LayoutError
from shardplan.hardware.measured.fitting import FittedLibrary
from shardplan.hardware.prices.library import library_text
from shardplan.hardware.units import format_bytes, format_seconds
from shardplan.report.text import table
from shardplan.simulation.accuracy.calibration import Calibrated
from shardplan.simulation.accuracy.forecast import forecast
from shardplan.simulation.accuracy.machine_timings import MachineTimings, TimedMachine
from shardplan.simulation.accuracy.step_rows import StepRow
from shardplan.simulation.accuracy.step_validation import StepsVerdict
from shardplan.simulation.accuracy.subject import model_of, strategies_of, topology_of_row
from shardplan.simulation.closed.configurations import Configurations
from shardplan.simulation.closed.form import ClosedForm
from shardplan.simulation.closed.machines import MachineFit
from shardplan.simulation.closed.parameters import Parameters
from shardplan.simulation.validation import CollectivesVerdict, Stratum

_HEADINGS = ("library", "op", "nodes", "bytes", "rows", "median", "p90", "15 %", "20 %", "1.5 x")


def validation_text(verdict: CollectivesVerdict) -> str:
    """Return the strata as a table, a line each, and below it what was skipped, a line for each reason."""
    rows = [list(_HEADINGS), *map(_cells, verdict.strata)] if verdict.strata else []
    lines = [*table(rows, left=range(4)), ""] if rows else []
    return "\n".join([*lines, f"{verdict.rows} rows, {len(verdict.skipped)} skipped", *skipped_lines(verdict.skipped)])


def _cells(one: Stratum) -> list[str]:
    shares = (one.within_15_percent, one.within_20_percent, one.within_factor_1_5_percent)
    return [
        one.library,
        one.op,
        one.nodes,
        _spread(one.bytes_from, one.bytes_to),
        str(one.count),
        f"{one.median_error_percent:.1f} %",
        f"{one.p90_error_percent:.1f} %",
        *(f"{share:.0f} %" for share in shares),
    ]


def _spread(first: int, last: int | None) -> str:
    """A range of bytes, whose bounds are powers of two."""
    low, high = (f"{n >> 20} MiB" if n >> 20 else f"{n >> 10} KiB" for n in (first, last or 0))
    return f"{low} and more" if last is None else f"{low} to {high}" if first else f"to {high}"


def calibration_text(fitted: FittedLibrary, skipped: Sequence[tuple[str, str]]) -> str:
    """Return what was fitted on how many rows, the held-out errors, and what the rows do not determine, as lines."""
    judged = f"median error {fitted.before:.1f} % before, {fitted.after:.1f} % after"
    if not fitted.held_out:
        judged = "nothing says how good the fit is"
    lines = [
        f"fitted   {fitted.constants} constants of library {fitted.table.name} on {fitted.rows} rows",
        f"held out {fitted.held_out} rows of other curves: {judged}",
    ]
    lines += [
        f"fabric   {name}: for level node of a topology latency = {format_seconds(fabric.latency)}, "
        f"efficiency = {fabric.efficiency:.3f}"
        for name, fabric in fitted.systems
    ]
    if fitted.undetermined:
        lines.append(f"kept     {', '.join(fitted.undetermined)}: the rows do not determine them")
    return "\n".join([*lines, *skipped_lines(skipped)])


def calibration_object(
    fitted: FittedLibrary, skipped: Sequence[tuple[str, str]], unknown_systems: Sequence[str]
) -> dict[str, Any]:
    """Return a fit as an object: the table as its text, rows, constants, errors in percent, what was skipped."""
    return {
        "library": fitted.table.name,
        "table": library_text(fitted.table),
        "rows": fitted.rows,
        "held_out": fitted.held_out,
        "constants": fitted.constants,
        "median_error_percent_before": fitted.before if fitted.held_out else None,
        "median_error_percent_after": fitted.after if fitted.held_out else None,
        "undetermined": list(fitted.undetermined),
        "systems": {name: fabric._asdict() for name, fabric in fitted.systems},
        "skipped": [{"id": name, "reason": reason} for name, reason in skipped],
        "unknown_systems": list(unknown_systems),
    }


def skipped_lines(skipped: Sequence[tuple[str, str]]) -> list[str]:
    """Return a line for each reason to skip rows, with the first of them."""
    ids: dict[str, list[str]] = defaultdict(list)
    for name, reason in skipped:
        ids[reason].append(name)
    return [f"skipped  {len(names)}, such as {names[0]}: {reason}" for reason, names in ids.items()]


def timed_machine_text(found: TimedMachine, timings: MachineTimings) -> str:
    """Return what was timed, the parameters by it, what collectives take beside their price, and what is kept."""
    p, products = found.fit.parameters, len(timings.of_kind("product"))
    copies, sizes = len(timings.of_kind("copy")), len(timings.collectives)
    kinds = ", ".join(found.beside)
    lines = [f"timed    {products} products of {timings.dtype}, {copies} copies"
             + (f", {len(found.beside)} collectives ({kinds}), {sizes} sizes in all" if kinds else "")]  # fmt: skip
    lines += [f"         {name} = {getattr(p, name):.4g}" for name in Parameters.names()
              if name not in found.kept and name not in ("eager", "order", "context", "fragmentation")]  # fmt: skip
    lines += [f"beside   {kind}: {ratio:.2f} times its price" for kind, ratio in found.beside.items()]
    if found.is_slow:
        lines.append("         network is the least that is legal: the levels deliver less than the topology states")
    if timings.lacking:
        lines.append(f"lacking  {', '.join(timings.lacking)}: the library has none")
    if found.kept:
        lines.append(f"kept     {', '.join(found.kept)}: what was timed does not determine them")
    return "\n".join(lines)


def timed_machine_object(found: TimedMachine, timings: MachineTimings) -> dict[str, Any]:
    """Return the same as an object, with all timings."""
    p = found.fit.parameters
    return {
        "parameters": {name: getattr(p, name) for name in Parameters.names()},
        "kept": list(found.kept),
        "measured_over_priced": dict(found.beside),
        "dtype": timings.dtype,
        "kernels": [one._asdict() for one in timings.kernels],
        "collectives": [one._asdict() for one in timings.collectives],
        "lacking": list(timings.lacking),
    }


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
