"""A calibration of the fused price on CPUs: constants of a kind of pair, from times of a few shapes.

The computation alone is a line: seconds for nothing, for a FLOP, for a byte read and for a byte of the result, each 0
or more, by least squares of relative errors. Then the transport's numbers follow from what the variants took beyond
that: the copy and the wire from unfused runs, tax and signal from fused ones, as logarithms, held near usual values.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from benchmarks.fused_pairs import BagsPair, GemmPair, Sizes

from shardplan.hardware.prices.fused import (
    LEAST_GAIN,
    FusedConstants,
    FusedVariant,
    FusedWork,
    variant_seconds,
)

USUAL = {"latency": 2e-5, "copy": 8e9, "wire": 4e10, "signal": 1e-5, "tax": 1e-2}
HELD = 0.02
Shaped = Sequence[tuple[Sizes, dict[str, list[float]]]]


@dataclass(frozen=True, slots=True)
class KindConstants:
    """Of a kind of pair: seconds of nothing, a FLOP, a byte read, a byte of the result; and of the transport."""

    line: tuple[float, ...]
    latency: float
    copy: float
    wire: float
    signal: float
    tax: float

    def seconds(self, sizes: Sizes) -> float:
        """Of the computation."""
        return float(np.dot(self.line, _features(sizes)))

    def price(self) -> FusedConstants:
        """As the price takes them."""
        taxes = ((1, 1.0), (2, 1.0 + self.tax))
        return FusedConstants("shm", self.latency, self.wire, self.copy, self.signal, taxes, source="calibrated")


def _features(sizes: Sizes) -> np.ndarray:
    return np.array([1.0, sizes.flops, sizes.read_bytes, sizes.nbytes])


def variant_of(name: str) -> FusedVariant:
    """The variant that a measured one is: `fused 2`, `one_shot`, `two_shot 4`, `unfused`."""
    kind, _, n = name.partition(" ")
    return FusedVariant(kind, int(n or (kind == "one_shot")))


def predicted(sizes: Sizes, name: str, seconds: float, constants: FusedConstants, ranks: int) -> float:
    """Seconds of a variant whose computation takes so long."""
    reduces = sizes.kind == "gemv"
    # Unfused, every rank sends all its addends to all others, as in one shot: there is no second shot to price.
    gathers = reduces and name.startswith("two_shot")
    work = FusedWork(seconds, sizes.nbytes, ranks, gathers, sizes.nbytes if gathers else 0.0)
    return float(variant_seconds(work, variant_of(name), constants))


def calibrated(shaped: Shaped, ranks: int) -> KindConstants:
    """Constants that say what these shapes took, by the 20th percentile of each variant."""
    taken = [(s, {n: sorted(t)[len(t) // 5] for n, t in times.items()}) for s, times in shaped]
    line = _line([_features(s) for s, _ in taken], [m["compute_only"] for _, m in taken])
    names = list(USUAL)
    origin = np.log(list(USUAL.values()))

    def made(x: np.ndarray) -> KindConstants:
        found = dict(zip(names, np.exp(x).tolist(), strict=True))
        return KindConstants(line, **found)

    def errors(x: np.ndarray) -> np.ndarray:
        price = made(x).price()
        said = [
            math.log(predicted(s, name, m["compute_only"], price, ranks) / seconds)
            for s, m in taken for name, seconds in m.items() if name not in ("compute_only", "gloo", "gloo_chunked")
        ]  # fmt: skip
        return np.concatenate([said, HELD * (x - origin)])

    return made(least_squares(errors, origin))


def _line(features: Sequence[np.ndarray], seconds: Sequence[float]) -> tuple[float, ...]:
    """Numbers from 0 on whose sum with the features is closest to the seconds, in relative terms."""
    rows = np.stack(features) / np.asarray(seconds)[:, None]
    scale = np.abs(rows).max(axis=0)
    best, least = np.zeros(4), math.inf
    for used in range(1, 16):
        at = [k for k in range(4) if used >> k & 1]
        found = np.linalg.lstsq(rows[:, at] / scale[at], np.ones(len(rows)), rcond=None)[0] / scale[at]
        off = float(((rows[:, at] @ found - 1) ** 2).sum())
        if (found >= 0).all() and off < least:
            best, least = np.zeros(4), off
            best[at] = found
    return tuple(best.tolist())


def tile_taxes() -> dict[str, list[tuple[int, float]]]:
    """How many times longer a computation takes in so many tiles, e(n): of a product's rows, and of bags."""
    torch.set_num_threads(1)
    found: dict[str, list[tuple[int, float]]] = {}
    pairs = (GemmPair(Sizes("gemm", (2048, 512, 256)), 0, 1), BagsPair(Sizes("embedding", (2, 65536, 4, 32)), 0, 1))
    for kind, pair, most in zip(("gemm", "embedding"), pairs, (64, 1024), strict=True):
        rows = pair.rows()
        counts = [1 << k for k in range(most.bit_length())]
        times: dict[int, list[float]] = {n: [] for n in counts}
        for _ in range(5):
            for n in counts:
                cuts = [(k * rows // n, (k + 1) * rows // n) for k in range(n)]
                started = time.perf_counter()
                pair.tiles(cuts)
                times[n].append(time.perf_counter() - started)
        whole = min(times[1])
        found[kind] = [(n, 1.0 if n == 1 else min(times[n]) / whole) for n in counts]
    return found


def least_squares(errors: Callable[[np.ndarray], np.ndarray], start: np.ndarray) -> np.ndarray:
    """Where a sum of squares is least, by damped steps from a start."""
    best, damping = start.copy(), 1.0
    now = errors(best)
    for _ in range(300):
        slopes = np.stack([(errors(best + step) - now) / 1e-4 for step in 1e-4 * np.eye(len(best))], axis=1)
        step = np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(best)), -slopes.T @ now)
        then = errors(best + np.clip(step, -2, 2))
        if then @ then < now @ now:
            best, now, damping = best + np.clip(step, -2, 2), then, max(damping / 3, 1e-6)
        else:
            damping = min(damping * 4, 1e6)
    return best


def chosen(sizes: Sizes, names: Sequence[str], constants: KindConstants, ranks: int) -> tuple[str, dict[str, float]]:
    """The variant to run, unfused unless another saves enough, and what each is said to take."""
    seconds, price = constants.seconds(sizes), constants.price()
    said = {name: predicted(sizes, name, seconds, price, ranks) for name in names}
    best = min((n for n in names if n != "unfused"), key=lambda n: said[n])
    return (best if said[best] <= (1 - LEAST_GAIN) * said["unfused"] else "unfused"), said
