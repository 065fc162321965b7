"""`calibrated`: the parameters of a machine from rows of steps, judged on groups that were held out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardplan.simulation.accuracy.metrics import errors
from shardplan.simulation.accuracy.step_fitting import Bench, StepFit, fit_steps, held_out, usable
from shardplan.simulation.accuracy.step_rows import StepRow
from shardplan.simulation.closed.machines import fit_text, of_machine
from shardplan.simulation.closed.parameters import Parameters


@dataclass(frozen=True, slots=True, eq=False)
class Calibrated:
    """A fit to all rows of a machine; `judged` are the errors, on groups held out, of a fit without them."""

    machine: str
    fit: StepFit
    held_out: int
    judged: dict[str, float] | None
    text: str  # the file

    def to_dict(self) -> dict[str, Any]:
        """Return it as one object of JSON."""
        p = self.fit.machine.parameters
        return {
            "machine": self.machine,
            "parameters": {name: getattr(p, name) for name in Parameters.names()},
            "fitted": list(self.fit.machine.names),
            "undetermined": list(self.fit.undetermined),
            "rows": self.fit.rows,
            "held_out": self.held_out,
            "held_out_errors": self.judged,
        }


def calibrated(rows: Sequence[StepRow], machine: str, seed: int) -> Calibrated:
    """Fit a machine's rows; what is of memory alone stays as it ships.

    Raises `ShardplanError` where no row may be fitted to.
    """
    mine = [row for row in rows if row.cluster.preset == machine and usable(row)]
    apart = [row for row in mine if held_out(row, seed)]
    rest = [row for row in mine if not held_out(row, seed)]
    shipped = of_machine(machine)
    start = Parameters(context=shipped.context, fragmentation=shipped.fragmentation)
    judged: dict[str, float] | None = None
    if apart and rest:
        bench = Bench(apart)
        judged = errors(bench.seconds(fit_steps(rest, start=start).machine.parameters), bench.measured)
    found = fit_steps(mine, start=start)
    notes: dict[str, object] = {"rows": len(mine), "held_out": len(apart), "seed": seed}
    notes["residual"] = round(found.residual, 4)
    if judged is not None:
        notes["held_out_mean_error_percent"] = round(judged["mean_error_percent"], 2)
        notes["held_out_median_error_percent"] = round(judged["median_error_percent"], 2)
    source = "steps of " + ", ".join(sorted({row.table for row in mine}))
    return Calibrated(machine, found, len(apart), judged, fit_text(machine, source, found.machine, notes))
