"""`calibrated`: the parameters of a machine from rows of steps, judged on groups that were held out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardplan.hardware.topology import Topology
from shardplan.simulation.accuracy.metrics import errors
from shardplan.simulation.accuracy.step_fitting import FREE, LIMITS, Bench, StepFit, fit_steps, held_out, usable
from shardplan.simulation.accuracy.step_rows import StepRow
from shardplan.simulation.closed.chips import chip_of
from shardplan.simulation.closed.machines import MachineFit, fit_text, like_fit, shipped, shipped_fit
from shardplan.simulation.closed.parameters import Parameters

DIFFERS = ("network",)  # what a machine with a base has of its own
ALIKE = ("product", "stream", "attention")  # what machines with one chip have of it
NEAR = 0.15  # by which those may differ, where nothing says why


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

    A machine with a base gets its network from its rows, all else from the base's file. Raises `ShardplanError` where
    no row may be fitted to.
    """
    mine = [row for row in rows if row.cluster.preset == machine and usable(row)]
    apart = [row for row in mine if held_out(row, seed)]
    rest = [row for row in mine if not held_out(row, seed)]
    name = base_name(machine)
    fits = {one: shipped_fit(one) for one in shipped()}
    base = fits[name] if name else like_fit(Topology.load(machine), fits, machine)
    judged: dict[str, float] | None = None
    if apart and rest:
        bench = Bench(apart)
        judged = errors(bench.seconds(_fit(rest, machine, base).machine.parameters), bench.measured)
    found = _fit(mine, machine, base)
    notes: dict[str, object] = {"rows": len(mine), "held_out": len(apart), "seed": seed}
    notes["residual"] = round(found.residual, 4)
    if judged is not None:
        notes["held_out_mean_error_percent"] = round(judged["mean_error_percent"], 2)
        notes["held_out_median_error_percent"] = round(judged["median_error_percent"], 2)
    source = "steps of " + ", ".join(sorted({row.table for row in mine}))
    return Calibrated(machine, found, len(apart), judged, fit_text(machine, source, found.machine, notes))


def fit_machines(
    rows: Sequence[StepRow], machines: Sequence[str] = (), apart: Mapping[tuple[str, str], str] | None = None
) -> Mapping[str, MachineFit]:
    """Fit every machine that rows are of, or some of them; a base before those that have it.

    Each is drawn to what the others with its chip have, which are fitted first, each by itself: of rows alone, whatever
    ships. A machine none of whose rows may be fitted to is left out. Where `apart` is said, by machine and parameter
    with a reason, all others of `ALIKE` are within `NEAR` of each other on one chip.
    """
    split = {m: [row for row in rows if row.cluster.preset == m and usable(row)] for m in machines or presets(rows)}
    own = {m: mine for m, mine in split.items() if mine and not base_name(m)}
    alone = {m: fit_machine(mine, m, {}) for m, mine in own.items()}
    found = {m: fit_machine(mine, m, alone) for m, mine in own.items()}
    if apart is not None:
        bounds = near_bounds(found, apart)
        found = {m: fit_machine(mine, m, alone, bounds.get(m, LIMITS)) for m, mine in own.items()}
    return found | {m: fit_machine(mine, m, found) for m, mine in split.items() if mine and base_name(m)}


def near_bounds(
    fits: Mapping[str, MachineFit], apart: Mapping[tuple[str, str], str]
) -> Mapping[str, Mapping[str, tuple[float, float]]]:
    """Return by machine limits within which its chip's parameters differ by `NEAR` at most, but for those `apart`.

    They lie about the mean of logarithms over the machines with the chip, each as much as its rows say.
    """
    out = {name: dict(LIMITS) for name in fits}
    chips = {name: chip_of(Topology.load(name)) for name in fits}
    for chip in {chip for chip in chips.values() if chip}:
        for parameter in ALIKE:
            mine = [name for name in fits if chips[name] is chip and (name, parameter) not in apart]
            weights = [
                1 / fits[m].covariance[fits[m].names.index(parameter)][fits[m].names.index(parameter)] for m in mine
            ]
            values = [math.log(getattr(fits[m].parameters, parameter)) for m in mine]
            if len(mine) > 1:
                middle, half = float(np.average(values, weights=weights)), math.log(1 + NEAR) / 2
                low, high = LIMITS[parameter]
                bounds = max(low, math.exp(middle - half)), min(high, math.exp(middle + half))
                for name in mine:
                    out[name][parameter] = bounds
    return out


def fit_machine(
    rows: Sequence[StepRow],
    machine: str,
    others: Mapping[str, MachineFit],
    limits: Mapping[str, tuple[float, float]] = LIMITS,
) -> MachineFit:
    """Fit the rows of a machine, drawn to those of `others` with its chip; or its network, where it has a base."""
    name = base_name(machine)
    start = (others.get(name) or shipped_fit(name)) if name else like_fit(Topology.load(machine), others, machine)
    return _fit(rows, machine, start, limits).machine


def presets(rows: Sequence[StepRow]) -> list[str]:
    """Return the presets that rows name."""
    return sorted({row.cluster.preset for row in rows})


def base_name(machine: str) -> str:
    """Return the machine that another is but for its network, as its file says; "" where there is none."""
    return shipped_fit(machine).base if machine in shipped() else ""


def _fit(
    rows: Sequence[StepRow], machine: str, base: MachineFit, limits: Mapping[str, tuple[float, float]] = LIMITS
) -> StepFit:
    """Fit the rows of a machine, from what others with its chip have, or from its base's parameters."""
    own = shipped_fit(machine) if machine in shipped() else MachineFit(Parameters())
    if not own.base:
        start = replace(base.parameters, context=own.parameters.context, fragmentation=own.parameters.fragmentation)
        widths = dict(zip(base.names, np.sqrt(np.diag(base.covariance)).tolist(), strict=True))
        return fit_steps(rows, FREE, start, widths, limits)
    found = fit_steps(rows, DIFFERS, base.parameters)
    covariance = np.array(base.covariance)
    for name, variance in zip(DIFFERS, np.diag(found.machine.covariance), strict=True):
        at = base.names.index(name)
        covariance[at], covariance[:, at] = 0, 0
        covariance[at, at] = variance
    return replace(found, machine=MachineFit(found.machine.parameters, base.names, covariance, own.base))
