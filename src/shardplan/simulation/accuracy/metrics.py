"""Errors of predictions, and how well they rank."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np

Floats = np.ndarray
LEAST = 3  # rows of a group whose order says something


def errors(predicted: Floats, measured: Floats) -> dict[str, float]:
    """Return count, and mean, median, p90, largest and signed mean of the errors in percent of what was measured."""
    signed = (np.asarray(predicted) / np.asarray(measured) - 1) * 100
    found = np.abs(signed)
    return {
        "count": len(found),
        "mean_error_percent": float(found.mean()),
        "median_error_percent": float(np.median(found)),
        "p90_error_percent": float(np.quantile(found, 0.9)),
        "max_error_percent": float(found.max()),
        "signed_mean_error_percent": float(signed.mean()),
    }


def kendall_tau(predicted: Floats, measured: Floats) -> float:
    """Return Kendall's tau-b, in which ties count for neither: 1 for the same order, -1 for the opposite.

    Source: Kendall, Biometrika 33 (1945). NaN where all are tied.

    >>> round(kendall_tau(np.array([1.0, 2.0, 3.0]), np.array([1.0, 3.0, 2.0])), 3)
    0.333
    """
    a, b = (np.sign(np.subtract.outer(x, x))[np.triu_indices(len(x), 1)] for x in (predicted, measured))
    scale = np.sqrt((a != 0).sum() * (b != 0).sum())
    return float((a * b).sum() / scale) if scale else float("nan")


def regret(predicted: Floats, measured: Floats) -> float:
    """Return what the one predicted best takes more than the best, in percent of that."""
    return float(measured[int(np.argmin(predicted))] / measured.min() - 1) * 100


def ranks(predicted: Floats, measured: Floats, groups: Sequence[Hashable]) -> Mapping[str, float | None]:
    """Return the means over groups of 3 rows and more of tau, regret, and whether the best is among the two first."""
    places: dict[Hashable, list[int]] = {}
    for k, group in enumerate(groups):
        places.setdefault(group, []).append(k)
    taus: list[float] = []
    regrets: list[float] = []
    seconds: list[bool] = []
    for at in places.values():
        if len(at) < LEAST:
            continue
        p, m = predicted[at], measured[at]
        taus.append(kendall_tau(p, m))
        regrets.append(regret(p, m))
        seconds.append(int(np.argmin(m)) in np.argsort(p, kind="stable")[:2])
    told = [t for t in taus if not np.isnan(t)]
    return {
        "kendall_tau": float(np.mean(told)) if told else None,
        "top1_regret_percent": float(np.mean(regrets)) if regrets else None,
        "top2_percent": float(np.mean(seconds)) * 100 if seconds else None,
    }


def coverage(low: Floats, high: Floats, measured: Floats) -> dict[str, float]:
    """Return the share of measurements inside their intervals, and the median half width, in percent."""
    inside = (low <= measured) & (measured <= high)
    half = (high - low) / (high + low)
    return {
        "interval_coverage_percent": float(inside.mean()) * 100,
        "interval_half_width_percent": float(np.median(half)) * 100,
    }
