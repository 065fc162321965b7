"""Parameters of a machine fitted to steps that were measured on it: robust, bounded, drawn to what is usual."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardplan.errors import ShardplanError
from shardplan.simulation.accuracy.step_rows import RowCluster, RowModel, StepRow
from shardplan.simulation.accuracy.subject import form_of, strategies_of
from shardplan.simulation.closed.chips import FREE
from shardplan.simulation.closed.configurations import Configurations
from shardplan.simulation.closed.form import ClosedForm
from shardplan.simulation.closed.machines import MachineFit
from shardplan.simulation.closed.parameters import Parameters

Floats = np.ndarray
LIMITS: Mapping[str, tuple[float, float]] = {
    "product": (0.2, 0.95),
    "stream": (0.2, 1.0),
    "launch": (1e-7, 3e-4),
    "eager": (1e-7, 3e-4),
    "network": (0.05, 1.0),
    "attention": (0.05, 0.95),
}
WIDTH = 0.05  # of a residual in logarithms, beyond which it counts less
PRIOR = 3.0  # how many times e a parameter may be away from what is usual, at one width of a residual
FAR = 2.5  # times the width that a parameter may be from what is usual
MOST = 40  # rows of a table that count whole; those of a larger one share their weight
ROUNDS = 40
ENOUGH = 1e-5  # part of a sum of squares, less than which a round may win at the end


@dataclass(frozen=True, slots=True, eq=False)
class StepFit:
    """Fitted parameters; `undetermined` are those that the rows leave within a factor e and more."""

    machine: MachineFit
    rows: int
    residual: float  # standard deviation of the logarithms of prediction over measurement
    undetermined: tuple[str, ...]


class Bench:
    """Rows of one machine, priced together."""

    def __init__(self, rows: Sequence[StepRow]) -> None:
        """Group them by model and cluster."""
        self.rows = rows
        self.measured = np.array([row.measured.seconds_per_step or np.nan for row in rows])
        groups: dict[tuple[RowModel, RowCluster], list[int]] = {}
        for k, row in enumerate(rows):
            groups.setdefault((row.model, row.cluster), []).append(k)
        self.parts: list[tuple[list[int], ClosedForm, Configurations]] = []
        for (model, cluster), places in groups.items():
            columns = Configurations.of([strategies_of(rows[k])[0] for k in places])
            self.parts.append((places, form_of(model, cluster), columns))

    def seconds(self, p: Parameters) -> Floats:
        """Predict them."""
        out = np.zeros(len(self.rows))
        for places, form, columns in self.parts:
            out[places] = form.on(form.topology, p).seconds(columns)
        return out


def held_out(row: StepRow, seed: int, share: int = 5) -> bool:
    """Say whether a row is held out, with all of its group: one group of so many, by a hash of what its rows share."""
    text = f"{seed} {row.group}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") % share == 0


def usable(row: StepRow) -> bool:
    """Say whether a row may be fitted to: read in its source, with seconds in a unit it says, its strategy known."""
    told = row.status in ("verified", "derived") and "measured" not in row.assumed
    return told and bool(row.measured.seconds_per_step) and not row.unknown


def fit_steps(
    rows: Sequence[StepRow],
    free: Sequence[str] = FREE,
    start: Parameters | None = None,
    widths: Mapping[str, float] = dict.fromkeys(LIMITS, PRIOR),
    limits: Mapping[str, tuple[float, float]] = LIMITS,
) -> StepFit:
    """Fit parameters to the logarithms of measured seconds.

    Args:
        rows: Those of one machine; each table of more than 40 rows counts as 40.
        free: What is fitted, at most six; the others stay as `start` has them.
        start: What is usual, to which all are drawn where the rows say nothing.
        widths: By parameter the deviation of its logarithm from that.
        limits: By parameter the least and the most that it may be.

    Raises `ShardplanError` without rows, and for a parameter that is none.
    """
    if not rows:
        raise ShardplanError("no row to fit to; legal are rows that are verified or derived, with seconds, all known")
    if strange := [name for name in free if name not in LIMITS] or list(free[6:]):
        raise ShardplanError(f"free={strange[0]}; legal are at most six of {', '.join(LIMITS)}")
    base, bench = start or Parameters(), Bench(rows)
    usual = np.log([getattr(base, name) for name in free])
    low, high = (np.log([limits[name][k] for name in free]) for k in (0, 1))
    tables = Counter(row.table for row in rows)
    weights = np.array([min(1.0, MOST / tables[row.table]) for row in rows])

    def made(x: Floats) -> Parameters:
        return replace(base, **{name: float(v) for name, v in zip(free, np.exp(x), strict=True)})

    def residuals(x: Floats) -> Floats:
        return np.log(bench.seconds(made(x)) / bench.measured)

    width = np.array([widths[name] for name in free])
    # What is known of a parameter bounds it, too: it is no place for what else a source differs in.
    low, high = np.maximum(low, usual - FAR * width), np.minimum(high, usual + FAR * width)
    x, normal = minimized(residuals, weights, np.clip(usual, low, high), usual, low, high, width)
    r = residuals(x)
    residual = math.sqrt(float((weights * r**2).sum() / weights.sum()))
    covariance = np.linalg.inv(normal)
    wide = tuple(name for name, v in zip(free, np.diag(covariance), strict=True) if math.sqrt(v) > 1.0)
    return StepFit(MachineFit(made(x), tuple(free), covariance), len(rows), residual, wide)


def minimized(
    residuals: Callable[[Floats], Floats],
    weights: Floats,
    x: Floats,
    usual: Floats,
    low: Floats,
    high: Floats,
    width: Floats,
) -> tuple[Floats, Floats]:
    """Return the least robust sum of squares within bounds, and the normal matrix there (Levenberg and Marquardt).

    Residuals beyond `WIDTH` count as their absolute value does (soft L1; Holland and Welsch, 1977); the distance from
    `usual`, in so many of `width`, counts as a residual of its own.
    """
    damping = 1e-3

    def cost(r: Floats, x: Floats) -> float:
        z = (r / WIDTH) ** 2
        return float((weights * 2 * (np.sqrt(1 + z) - 1)).sum() + (((x - usual) / width) ** 2).sum())

    r = residuals(x)
    now = cost(r, x)
    normal = np.eye(len(x))
    for _ in range(ROUNDS):
        jacobian = np.stack([_slope(residuals, x, r, k, high) for k in range(len(x))], axis=1)
        w = weights / np.sqrt(1 + (r / WIDTH) ** 2) / WIDTH**2
        normal = jacobian.T @ (w[:, None] * jacobian) + np.diag(1 / width**2)
        slope = jacobian.T @ (w * r) + (x - usual) / width**2
        # What is at a bound and would go further stays there; the others go where they would without it.
        inside = ~((x <= low) & (slope > 0) | (x >= high) & (slope < 0))
        damped = (normal + damping * np.diag(np.diag(normal)))[np.ix_(inside, inside)]
        before = now
        while damping < 1e6 and inside.any():
            step = np.zeros(len(x))
            step[inside] = np.linalg.solve(damped, -slope[inside])
            tried = np.clip(x + step, low, high)
            found = residuals(tried)
            if (total := cost(found, tried)) < now:
                x, r, now, damping = tried, found, total, damping / 5
                break
            damping *= 4
            damped += np.diag(np.diag(normal))[np.ix_(inside, inside)] * damping
        if before - now <= ENOUGH * abs(before):
            break
    return x, normal


def _slope(residuals: Callable[[Floats], Floats], x: Floats, r: Floats, k: int, high: Floats) -> Floats:
    step = 1e-4 if x[k] + 1e-4 <= high[k] else -1e-4
    moved = x.copy()
    moved[k] += step
    return (residuals(moved) - r) / step
