"""Scores of a prediction against measured sweeps, and the targets they are held to.

A *field* is what competes: the programs of one placement, or, pooled, all pairs of an experiment. Of a field:

- *rank*: which the measured best is in predicted order, from 1; pairs predicted alike stay in the planner's order;
- *tied rank*: the same for the best-placed of all that were measured within the noise floor of the best, not counting
  the others of these: what no model can tell apart is no mistake;
- *regret*: seconds of the predicted best over those of the measured best, less 1; *tied regret* is 0 within the floor;
- *Kendall*: tau-b of predicted and measured seconds; tied: pairs measured within the floor left out;
- *error*: predicted over measured seconds, less 1, absolute.

Measured seconds are medians. A field counts for top-k only where it has more than k programs, and the chance level is
what a blind order would reach: k over the number of programs, in the mean. Pooled scores are easy, since placements
differ by a factor of ten: they are never alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardplan.execution.lab.results import Row

MODELS = ("events", "barrier")
TOP = (1, 3, 5, 10)
DIGITS = 9  # of predicted seconds that count: two predictions that differ by rounding only are alike


@dataclass(frozen=True, slots=True)
class Score:
    """How well a model orders and times one field; see the module for the scores."""

    model: str  # one of `MODELS`
    experiment: str  # its name
    placement: str  # empty for a pooled field
    programs: int  # in the field
    rank: int  # of the measured best
    tied_rank: int
    regret: float  # of the predicted best
    tied_regret: float
    min_regret: float  # by the least seconds of all repetitions, instead of the median
    kendall: float | None  # None where everything is tied
    tied_kendall: float | None
    errors: tuple[float, ...]  # predicted over measured less 1, signed, in the result's order
    best: str  # the measured best
    chosen: str  # the predicted best

    @property
    def mean_error(self) -> float:
        """Mean absolute error."""
        return statistics.fmean(map(abs, self.errors))


@dataclass(frozen=True, slots=True)
class Top:
    """How often the measured best is among the first k of a field, the strict and the tied way."""

    k: int
    fields: int  # that have more than k programs
    share: float  # of those fields
    tied_share: float
    chance: float  # the share that a blind order reaches


@dataclass(frozen=True, slots=True)
class Summary:
    """The scores of a model over many fields; regrets are over fields with more than one program, errors over pairs."""

    model: str  # one of `MODELS`
    pooled: bool  # whether the fields are whole experiments
    fields: int  # how many
    top: tuple[Top, ...]  # for every k of `TOP`
    median_regret: float
    mean_regret: float
    max_regret: float
    tied_median_regret: float
    kendall: float | None  # the median
    tied_kendall: float | None
    mean_error: float
    p90_error: float
    max_error: float
    bias: float  # the median signed error


def score(rows: Sequence[Row], model: str, floor: float, experiment: str = "", placement: str = "") -> Score:
    """Score a model on the rows of one field, in the planner's order.

    `floor` is the noise floor: the log ratio within which two measured times are tied. `placement` is empty for a
    pooled field.
    """
    measured = np.array([r.median for r in rows])
    least = np.array([min(r.seconds) for r in rows])
    predicted = np.array([float(f"{_predicted_seconds(r, model):.{DIGITS}g}") for r in rows])
    order = np.argsort(predicted, kind="stable")
    position = np.empty(len(rows), dtype=np.int64)  # in predicted order, by row
    position[order] = np.arange(len(rows))
    best, chosen = int(measured.argmin()), int(order[0])
    tied = measured <= measured[best] * math.exp(floor)
    ahead = int((position[~tied] < position[tied].min()).sum())
    regret = float(measured[chosen] / measured[best] - 1)
    return Score(
        model=model,
        experiment=experiment,
        placement=placement,
        programs=len(rows),
        rank=int(position[best]) + 1,
        tied_rank=ahead + 1,
        regret=regret,
        tied_regret=0.0 if tied[chosen] else regret,
        min_regret=float(least[chosen] / least.min() - 1),
        kendall=kendall(predicted, measured, 0.0),
        tied_kendall=kendall(predicted, measured, floor),
        errors=tuple((predicted / measured - 1).tolist()),
        best=f"{rows[best].placement}: {rows[best].program}",
        chosen=f"{rows[chosen].placement}: {rows[chosen].program}",
    )


def _predicted_seconds(row: Row, model: str) -> float:
    return row.events if model == "events" else row.barrier


def kendall(predicted: np.ndarray, measured: np.ndarray, floor: float) -> float | None:
    """Return Kendall's tau-b; pairs measured within `floor` are left out where it is above 0.

    >>> kendall(np.array([1.0, 2.0, 3.0]), np.array([1.0, 3.0, 2.0]), 0.0)
    0.3333333333333333
    """
    upper = np.triu_indices(len(predicted), 1)
    signs = np.sign(predicted[:, None] - predicted[None, :])[upper]
    logs = np.log(measured)
    gaps = (logs[:, None] - logs[None, :])[upper]
    kept = np.abs(gaps) > floor if floor > 0 else np.ones(len(gaps), dtype=bool)
    signs, others = signs[kept], np.sign(gaps[kept])
    both = math.sqrt(float(np.abs(signs).sum()) * float(np.abs(others).sum()))
    return float((signs * others).sum()) / both if both else None


def summarize(scores: Sequence[Score], model: str, pooled: bool) -> Summary:
    """Return what the scores of one model come to, of pooled fields or of single placements."""
    raced = [s for s in scores if s.programs > 1] or list(scores)
    errors = np.array([e for s in scores for e in s.errors]) if scores else np.zeros(1)
    sizes = np.abs(errors)
    top: list[Top] = []
    for k in TOP:
        large = [s for s in scores if s.programs > k]
        top.append(
            Top(
                k,
                len(large),
                _mean([s.rank <= k for s in large]),
                _mean([s.tied_rank <= k for s in large]),
                _mean([k / s.programs for s in large]),
            )
        )
    regrets = [s.regret for s in raced] or [math.nan]
    return Summary(
        model=model,
        pooled=pooled,
        fields=len(scores),
        top=tuple(top),
        median_regret=statistics.median(regrets),
        mean_regret=statistics.fmean(regrets),
        max_regret=max(regrets),
        tied_median_regret=statistics.median([s.tied_regret for s in raced] or [math.nan]),
        kendall=_median([s.kendall for s in scores]),
        tied_kendall=_median([s.tied_kendall for s in scores]),
        mean_error=float(sizes.mean()),
        p90_error=float(np.quantile(sizes, 0.9)),
        max_error=float(sizes.max()),
        bias=float(np.median(errors)),
    )


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def _median(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.median(known) if known else None
