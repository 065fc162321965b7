"""`validate_steps`: predictions of measured steps beside what was measured, by source and quantity."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from shardplan.simulation.accuracy.forecast import Forecast, forecast
from shardplan.simulation.accuracy.metrics import coverage, errors, ranks
from shardplan.simulation.accuracy.step_rows import StepRow
from shardplan.simulation.closed.machines import MachineFit, machine_fit

SECONDS = "seconds_per_step"
BYTES = ("peak_bytes", "activation_bytes", "parameter_and_optimizer_bytes")
TOLD = ("verified", "derived")


@dataclass(frozen=True, slots=True)
class SourceErrors:
    """The errors of one quantity of one source; of those that no gate counts apart."""

    source: str
    quantity: str
    gate: bool
    numbers: Mapping[str, float | None]

    def to_dict(self) -> dict[str, Any]:
        """Return it as the report has it."""
        return {"source": self.source, "quantity": self.quantity, "gate": self.gate, **self.numbers}


@dataclass(frozen=True, slots=True)
class StepsVerdict:
    """Everything that `validate` says of rows of steps."""

    rows: int
    sources: tuple[SourceErrors, ...]
    skipped: tuple[tuple[str, str], ...]
    predicted_not_to_fit: tuple[str, ...]
    forecasts: tuple[Forecast, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it as one object of JSON: that of the design page."""
        return {
            "rows": self.rows,
            "sources": [one.to_dict() for one in self.sources],
            "skipped": [{"id": name, "reason": why} for name, why in self.skipped],
            "predicted_not_to_fit": list(self.predicted_not_to_fit),
            "assumed": [{"id": f.id, "fields": dict(f.assumed)} for f in self.forecasts if f.assumed],
            "predictions": [
                asdict(f)
                | {"seconds_interval": list(f.seconds_interval), "assumed": dict(f.assumed), "dropped": dict(f.dropped)}
                for f in self.forecasts
            ],
        }


def validate_steps(
    rows: Sequence[StepRow],
    fit_of: Callable[[str], MachineFit] = machine_fit,
    done: Callable[[StepRow], None] = lambda row: None,
) -> StepsVerdict:
    """Predict rows, and compare each quantity that was measured by itself.

    Args:
        rows: What was measured.
        fit_of: By the preset of a topology the parameters of its machine; nothing is fitted here.
        done: Called with every row that was predicted.
    """
    found, skipped = forecast(rows, fit_of, done)
    by_id = {f.id: f for f in found}
    pairs = [(row, by_id[row.id]) for row in rows if row.id in by_id]
    parts: dict[tuple[str, bool], list[tuple[StepRow, Forecast]]] = {}
    for row, one in pairs:
        told = row.status in TOLD and not one.assumed
        parts.setdefault((row.table, told), []).append((row, one))
    sources = [one for (source, gate), mine in parts.items() for one in _source(source, gate, mine)]
    not_to_fit = tuple(f.id for row, f in pairs if not f.fits and not row.measured.oom)
    return StepsVerdict(len(rows), tuple(sources), tuple(skipped), not_to_fit, tuple(found))


def _source(source: str, gate: bool, pairs: Sequence[tuple[StepRow, Forecast]]) -> Iterator[SourceErrors]:
    known = [(row, f) for row, f in pairs if row.measured.oom is not None]
    right = sum(f.fits != row.measured.oom for row, f in known)
    fit = {"fit_right": right, "fit_wrong": len(known) - right}
    timed = [(row, f) for row, f in pairs if row.measured.seconds_per_step]
    if timed:
        measured = np.array([row.measured.seconds_per_step for row, _ in timed], dtype=float)
        predicted = np.array([f.seconds_per_step for _, f in timed])
        low, high = np.array([f.seconds_interval for _, f in timed]).T
        numbers: dict[str, float | None] = {**errors(predicted, measured)}
        numbers |= ranks(predicted, measured, [row.group for row, _ in timed])
        numbers |= coverage(low, high, measured)
        yield SourceErrors(source, SECONDS, gate, numbers | fit)
    for name in BYTES:
        these = [(row, f) for row, f in pairs if getattr(row.measured, name)]
        if these:
            measured = np.array([getattr(row.measured, name) for row, _ in these], dtype=float)
            predicted = np.array([getattr(f, name) for _, f in these])
            nothing = dict.fromkeys(
                ("kendall_tau", "top1_regret_percent", "top2_percent", "interval_coverage_percent",
                 "interval_half_width_percent"),
            )  # fmt: skip
            yield SourceErrors(source, name, gate, {**errors(predicted, measured), **nothing, **fit})
    if not timed and known and not any(row.measured.peak_bytes for row, _ in pairs):
        yield SourceErrors(source, "oom", gate, {"count": len(known), **fit})
