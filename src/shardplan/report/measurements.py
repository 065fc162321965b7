"""What `validate`, `calibrate` and `measure` print."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from shardplan.hardware.measured.fitting import Fitted
from shardplan.hardware.prices.library import library_text
from shardplan.hardware.units import format_seconds
from shardplan.report.text import table
from shardplan.simulation.accuracy.machine_timings import MachineTimings, TimedMachine
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


def calibration_text(fitted: Fitted, skipped: Sequence[tuple[str, str]]) -> str:
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
    fitted: Fitted, skipped: Sequence[tuple[str, str]], unknown_systems: Sequence[str]
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
