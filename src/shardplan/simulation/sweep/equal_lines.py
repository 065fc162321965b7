"""`equal_lines`: the makespan of a schedule whose chunks are all alike and whose messages take no time, in closed form.

It is the largest of a few lines `a F + b I + c W` with whole a, b, c: ways through the graph of actions. Of most named
schedules they are formulas (`FORMULAS`; DESIGN, schedules as data, says bubbles, the loss without a barrier; a line is
that with one). Of the others they are found, once for each size: at some (F, I, W) a sweep says the makespan, and its
slopes the line that is the highest there. The largest of the lines found so far is linear between its corners. The
makespan is convex, as a maximum of lines: where it is no more than them at every corner, it is so everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import combinations

import numpy as np

from shardplan.errors import ShardplanError
from shardplan.simulation.sweep.compiled_schedule import CompiledSchedule
from shardplan.simulation.sweep.stage_seconds import StageSeconds
from shardplan.simulation.sweep.sweeping import sweep

Lines = list[tuple[int, int, int]]  # how many F, I and W stand one behind the other
ROUNDS = 100  # of looking for lines, each of which finds one at least
EXACT = 1e-12  # of the makespan
_STEP, _SLOPE = 2.0**-14, 2.0**-24  # from a corner into a field, and from there for the slopes; F + I + W is 1


def _alternating(p: int, m: int, v: int) -> Lines:
    """Whole backwards: the last rank begins p - 1 forwards late, and rounds of fewer than p wait for the next."""
    n = (v - 1) * max(m, p) + m + p - 1
    return [(n, n, n)]


def _zb_h1(p: int, m: int, v: int) -> Lines:
    q = p - 1
    return [(max(m, p), m + q, m), (m + q, max(m, p), m), (m + q, m + q, max(1, m - q))]


def _zb_h2(p: int, m: int, v: int) -> Lines:
    q = p - 1
    return [(max(p, m - q), m + q, m), (m + q, m, m), (m + q, m + q, max(1, m - 2 * q))]


def _zb_v(p: int, m: int, v: int) -> Lines:
    q, n = p - 1, 2 * m
    return [
        (n, n + 1, n + q - 1), (n, n + q, n), (n, n + 2 * q, n - 2 * q), (n + 1, n, n + q - 1),
        (n + 2 * q - 1, n - q + 1, n), (n + 2 * q - 1, n + 1, n - 2 * q), (n + 2 * q, n - q, n - 1),
        (n + 2 * q, n, n - 2 * q - 1),
    ]  # fmt: skip


def _dualpipev(p: int, m: int, v: int) -> Lines:
    q, n = p - 1, 2 * m
    return [
        (n - 1, n + q, n), (n - 1, n + 2 * q, n - q), (n + q, n, n), (n + q, n + q, n - q), (n + 2 * q, n - q, n - q),
        (n + 2 * q, n, n - 2 * q), (n, n, n),
    ]  # fmt: skip


# By name, from how many microbatches on, of p ranks: the lines of (ranks, microbatches, chunks a rank).
FORMULAS: dict[str, tuple[Callable[[int], int], Callable[[int, int, int], Lines]]] = {
    "gpipe": (lambda p: 1, _alternating),
    "1f1b": (lambda p: 1, _alternating),
    "interleaved": (lambda p: 1, _alternating),
    "combined-1f1b": (lambda p: 1, _alternating),
    "looped-bfs": (lambda p: 1, _alternating),
    "zb-h1": (lambda p: 1, _zb_h1),
    "zb-h2": (lambda p: 2 * p - 1, _zb_h2),
    "zb-v": (lambda p: max(3, 2 * p - 1), _zb_v),
    "dualpipe": (lambda p: 1, lambda p, m, v: _dualpipev(p // 2, m // 2, v)),
    "dualpipev": (lambda p: 1, _dualpipev),
}


@lru_cache(maxsize=1024)
def equal_lines(compiled: CompiledSchedule) -> np.ndarray:
    """Return float [lines, 3]: the makespan of equal chunks is the largest of `lines @ (F, I, W)`, whatever they take.

    Of a schedule with messages, these take no time.

    >>> from shardplan.simulation.sweep import compile_schedule
    >>> equal_lines(compile_schedule("zb-h1", 4, 8)).astype(int).tolist()
    [[8, 11, 8], [11, 8, 8], [11, 11, 5]]
    """
    p, m = compiled.ranks, compiled.microbatches
    if compiled.schedule is None and compiled.name in FORMULAS:
        least, formula = FORMULAS[compiled.name]
        if m >= least(p) and p > 1:
            return np.array(formula(p, m, compiled.interleave), dtype=np.float64)
    return found_lines(compiled)


def found_lines(compiled: CompiledSchedule) -> np.ndarray:
    """Return the lines of any schedule, found and proved by sweeps, as `equal_lines` has them."""
    random = np.random.default_rng(0)
    lines, corners = np.zeros((0, 3)), np.eye(3)
    for _ in range(ROUNDS):
        seconds = _makespan(compiled, corners)
        known = (corners @ lines.T).max(axis=1, initial=0)
        open_ = corners[seconds > known * (1 + EXACT)]
        if not len(open_):
            return lines
        inside = (1 - _STEP) * open_ + _STEP * random.dirichlet(np.ones(3), len(open_))
        lines = _highest(np.concatenate([lines, _slopes(compiled, inside)]))
        corners = _corners(lines)
    raise ShardplanError(f"{compiled.name or 'a schedule'}: no closed form was found in {ROUNDS} rounds")


def _makespan(compiled: CompiledSchedule, points: np.ndarray) -> np.ndarray:
    return sweep(compiled, StageSeconds.equal(compiled.chunks, *points.T)).makespan


def _slopes(compiled: CompiledSchedule, points: np.ndarray) -> np.ndarray:
    """The lines that are the highest at points, [n, 3]; those left out that are not in the same field a step away."""
    around = points[:, None, :] + _SLOPE * np.concatenate([np.zeros((1, 3)), np.eye(3)])
    seconds = _makespan(compiled, around.reshape(-1, 3)).reshape(-1, 4)
    lines = np.rint((seconds[:, 1:] - seconds[:, :1]) / _SLOPE)
    return lines[np.abs((lines * points).sum(axis=1) - seconds[:, 0]) <= EXACT * seconds[:, 0]]


def _highest(lines: np.ndarray) -> np.ndarray:
    """Each line once, without those that another one is nowhere below."""
    lines = np.unique(lines, axis=0)
    below = (lines[None, :, :] >= lines[:, None, :]).all(axis=2).sum(axis=1) > 1
    return lines[~below]


def _corners(lines: np.ndarray) -> np.ndarray:
    """Where the largest of the lines is no line, on the triangle F + I + W = 1: the ends of its edges, [n, 3]."""
    planes = np.concatenate([np.c_[lines, -np.ones(len(lines))], np.c_[np.eye(3), np.zeros(3)]])
    chosen = np.array([c for c in combinations(range(len(planes)), 3) if c[0] < len(lines)])
    whole = np.concatenate([planes[chosen], np.tile(np.array([[[1.0, 1, 1, 0]]]), (len(chosen), 1, 1))], axis=1)
    whole = whole[np.abs(np.linalg.det(whole)) > 1e-9]
    found = np.linalg.solve(whole, np.tile([[0.0], [0], [0], [1]], (len(whole), 1, 1)))[:, :, 0]
    points, height = found[:, :3], found[:, 3]
    top = (points @ lines.T).max(axis=1, initial=0)
    return np.concatenate([np.eye(3), np.maximum(points[(points > -1e-9).all(axis=1) & (height > top - 1e-6)], 0)])
