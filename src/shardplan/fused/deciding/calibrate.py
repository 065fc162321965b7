"""`calibrate`: the constants of fused operators on this machine, measured between two processes in some ten seconds.

Latency and bandwidth of the transport are of pings. Of each kind of pair some shapes are run in every way that a
decision may choose, and alone, by the fused kernels and by the library's. What computations take is a line through
their seconds; what the transport takes for a kind is what its ways took beside that, by least squares of logarithms,
held near what the pings say.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from shardplan.errors import optional
from shardplan.fused.deciding.trials import ALONE, RANKS, Shape, Times, measure_trials, shape_work
from shardplan.hardware.prices.fused import FusedConstants, FusedWork, variant_seconds, variants
from shardplan.hardware.prices.fused_kernels import KINDS, KernelConstants, KernelRates

LEARNT: tuple[Shape, ...] = (
    *(("product", s) for s in (
        (384, 768, 192), (1536, 1536, 48), (768, 384, 96), (192, 1536, 96), (1280, 768, 64), (96, 160, 480))),
    *(("bags", s) for s in (
        (6, 1536, 1, 128), (6, 768, 6, 64), (12, 768, 2, 96), (3, 1536, 12, 128), (2, 320, 40, 32))),
    *(("vector", s) for s in ((768, 768), (3072, 384), (12288, 128), (384, 1536), (24576, 96), (640, 96))),
)  # fmt: skip
HELD = 0.02  # weight of a constant's distance from its usual value, beside a row's error, in natural logarithms
SETTLED = 1e-9  # of a sum of squares, what a step must gain
USUAL_TAX, USUAL_COPY = 1e-2, 8e9
BUSY = 1.15  # seconds of the wall over those of the thread, from which neighbours count
Measured = Sequence[tuple[Shape, Mapping[str, float]]]  # of shapes the seconds of each variant


def calibrate(seconds: float = 10.0) -> FusedConstants:
    """Return the constants of fused operators on shared memory, with what this machine computes.

    Two processes run them, with a thread each, or as many as torch has and cores allow. Where neighbours take their
    cores, which `source` says with the load, times are of the threads' processor time.

    Args:
        seconds: About how long it measures, beside the start of the processes.

    Raises `BackendError` where one of the processes fails.
    """
    torch = optional("torch", "torch")
    load = os.getloadavg()[0]
    times, pings = measure_trials(LEARNT, max(2, round(1.5 * seconds)))
    clock, word = choose_clock(times)
    measured = [(shape, typical_seconds(each, clock)) for shape, each in zip(LEARNT, times, strict=True)]
    about = f"{platform.machine()}, torch {torch.__version__}, load {load:.1f}, {word}"
    return fit_constants(measured, pings, f"measured here between {RANKS} processes ({about}")


def choose_clock(times: Sequence[Times]) -> tuple[int, str]:
    """Return which of the two times of a run counts, and its name: the thread's where the wall's are stretched."""
    stretched = [wall / own for each in times for some in each.values() for wall, own in some if own > 0]
    return (1, "thread time") if np.median(stretched) > BUSY else (0, "wall time")


def typical_seconds(times: Times, clock: int) -> dict[str, float]:
    """Return the 20th percentile of each variant."""
    return {name: float(np.percentile([each[clock] for each in some], 20)) for name, some in times.items()}


def fit_constants(measured: Measured, pings: Sequence[tuple[int, float]], source: str) -> FusedConstants:
    """Return the constants that say what shapes and pings took; `source` is ended by the kernels' efficiency."""
    sizes, took = (np.array(each, dtype=np.float64) for each in zip(*pings, strict=True))
    latency = float(took[0])
    bandwidth = float((sizes[1:] - sizes[0]).sum() / max(1e-9, (took[1:] - took[0]).sum()))
    start = (latency, bandwidth, USUAL_COPY, USUAL_COPY, latency, USUAL_TAX)
    kernels: list[KernelConstants] = []
    words: list[str] = []
    for kind in KINDS:
        own = [(shape, each) for shape, each in measured if shape[0] == kind]
        kernels.append(_fit_kind(kind, own, start))
        ratios = [each.get("library", each["kernel"]) / each["kernel"] for _, each in own]
        words.append(f"{kind} {math.exp(float(np.log(ratios).mean())):.2f}")
    said = f"{source}; efficiency against the library: {', '.join(words)})"
    return FusedConstants("shm", latency, bandwidth, USUAL_COPY, latency, kernels=tuple(kernels), source=said)


def _fit_kind(kind: str, measured: Measured, start: Sequence[float]) -> KernelConstants:
    origin = np.log(start)
    shapes = [shape for shape, _ in measured]
    lines = [fit_rates(shapes, [m[name] for _, m in measured]) if name in measured[0][1] else None for name in ALONE]
    fused, library = lines[0] or KernelRates(), lines[1]

    def made(x: np.ndarray) -> KernelConstants:
        latency, wire, copy, result, signal, tax = np.exp(x).tolist()
        taxes = ((1, 1.0), (2, 1.0 + tax))
        return KernelConstants(kind, fused, library, latency, wire, copy, result, signal, taxes)

    works = [pair_work(shape, (m.get("library", m["kernel"]), m["kernel"])) for shape, m in measured]

    def errors(x: np.ndarray) -> list[float]:
        constants = FusedConstants("shm", 0.0, 1.0, 1.0, 0.0, kernels=(made(x),)).of_kind(kind)
        return [
            math.log(float(variant_seconds(work, way, constants)) / m[str(way)])
            for (_, m), work in zip(measured, works, strict=True) for way in variants(kind == "vector")
        ]  # fmt: skip

    return made(fit_logarithms(errors, origin))


def pair_work(shape: Shape, seconds: tuple[float, float], ranks: int = RANKS) -> FusedWork:
    """Return the work of a shape whose computation takes so long by the library, and by the fused kernels."""
    nbytes, reduces = shape_work(shape)[2], shape[0] == "vector"
    return FusedWork(seconds[0], nbytes, ranks, reduces, nbytes if reduces else 0.0, seconds[1])


def fit_rates(shapes: Sequence[Shape], seconds: Sequence[float]) -> KernelRates:
    """Return rates whose seconds are closest to those of shapes, in relative terms."""
    rows = np.array([(1.0, *shape_work(shape)) for shape in shapes]) / np.asarray(seconds)[:, None]
    scale = np.abs(rows).max(axis=0)
    best, least = np.zeros(4), math.inf
    for used in range(1, 16):
        at = [k for k in range(4) if used >> k & 1]
        found = np.linalg.lstsq(rows[:, at] / scale[at], np.ones(len(rows)), rcond=None)[0] / scale[at]
        off = float(((rows[:, at] @ found - 1) ** 2).sum())
        if (found >= 0).all() and off < least:
            best, least = np.zeros(4), off
            best[at] = found
    start, *each = best.tolist()
    return KernelRates(start, *(1 / x if x > 0 else math.inf for x in each))


def fit_logarithms(errors: Callable[[np.ndarray], Sequence[float]], usual: np.ndarray) -> np.ndarray:
    """Return the logarithms of constants where errors are least, in squares, held near usual ones, by damped steps."""

    def held(x: np.ndarray) -> np.ndarray:
        return np.concatenate([errors(x), HELD * (x - usual)])

    best, damping = usual.copy(), 1.0
    now = held(best)
    for _ in range(300):
        slopes = np.stack([(held(best + step) - now) / 1e-4 for step in 1e-4 * np.eye(len(best))], axis=1)
        step = np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(best)), -slopes.T @ now)
        then = held(best + np.clip(step, -2, 2))
        if then @ then < now @ now:
            settled = then @ then > (1 - SETTLED) * (now @ now)
            best, now, damping = best + np.clip(step, -2, 2), then, max(damping / 3, 1e-6)
        else:
            settled = damping >= 1e6
            damping *= 4
        if settled:
            break
    return best
