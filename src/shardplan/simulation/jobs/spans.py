"""How long ranks are busy, and what of their communication nothing hides."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator

import numpy as np

from shardplan.simulation.jobs.compiled_job import CompiledJob
from shardplan.simulation.jobs.messages import MESSAGES
from shardplan.simulation.jobs.op_intervals import OpenedOps
from shardplan.simulation.jobs.sweep import RankRun
from shardplan.simulation.jobs.timing import COMPUTE

Stretches = list[tuple[float, float]]  # apart and in order


def joined(found: Iterable[tuple[float, float]]) -> Stretches:
    """Return stretches of time, those that touch as one.

    >>> joined([(2.0, 3.0), (0.0, 1.0), (1.0, 1.5)])
    [(0.0, 1.5), (2.0, 3.0)]
    """
    out: Stretches = []
    for start, end in sorted(found):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], end)
        elif end > start:
            out.append((start, end))
    return out


def uncovered_stretches(spans: Stretches, others: Stretches) -> Stretches:
    """Return what of some stretches others do not cover.

    >>> uncovered_stretches([(0.0, 4.0)], [(1.0, 2.0), (3.0, 5.0)])
    [(0.0, 1.0), (2.0, 3.0)]
    """
    out: Stretches = []
    k = 0
    for start, end in spans:
        while k < len(others) and others[k][1] <= start:
            k += 1
        at, j = start, k
        while j < len(others) and others[j][0] < end:
            if others[j][0] > at:
                out.append((at, others[j][0]))
            at = max(at, others[j][1])
            j += 1
        if at < end:
            out.append((at, end))
    return out


def length(found: Stretches) -> float:
    """Return how long stretches are together."""
    return math.fsum(end - start for start, end in found)


def busy(opened: OpenedOps) -> tuple[tuple[float, float, float], ...]:
    """Return for every rank when its first op starts, its last one ends, and how long any of its streams is busy.

    Actions that begin alike are opened once.
    """
    known: dict[Hashable, Stretches] = {}
    sweep = opened.sweep
    found: list[tuple[float, float, float]] = []
    for r, run in enumerate(sweep.ranks):
        if not len(run.done):
            continue
        first, reached, total = math.inf, -math.inf, 0.0
        alone = [
            (0.0, joined((op.start, op.end) for op in opened.spans[r, i])) for i in range(len(run.done)) if opened.apart
        ]
        for at, stretches in alone or _busy(opened.compiled, r, run, known):
            for start, end in stretches:
                first = min(first, at + start)
                total += max(0.0, at + end - max(reached, at + start))
                reached = max(reached, at + end)
        found.append((first, reached, total) if total else (0.0, 0.0, 0.0))
    return tuple(found)


def _busy(
    compiled: CompiledJob, r: int, run: RankRun, known: dict[Hashable, Stretches]
) -> Iterator[tuple[float, Stretches]]:
    """Yield of every action when it begins, and when it is busy from then on."""
    n = len(compiled.streams) + 1
    for i, (stage, kind, _) in enumerate(run.actions):
        one = compiled.map_at(r, i, (stage, kind))
        begin = float(run.begin[i])
        entry = run.entry[i, : n + len(one.taken)] - begin
        # What was there so long before that no way through the action reaches its begin says nothing.
        far = float(one.matrix.max(initial=0.0))
        entry = np.maximum(entry, -far)
        key = id(one), np.round(entry / (far or 1.0), 10).tobytes()
        if key not in known:
            known[key] = joined((op.start, op.end) for op in one.opened(entry.tolist()))
        yield begin, known[key]


def exposed(opened: OpenedOps, rank: int) -> dict[str, float]:
    """Return by stream the seconds of communication of a rank beside which it computes nothing.

    `messages` are seconds in which no stream is busy and a message is under way to the rank.
    """
    run = opened.sweep.ranks[rank]
    streams: dict[str, list[tuple[float, float]]] = {}
    for i in range(len(run.actions)):
        for op in opened.ops(rank, i):
            streams.setdefault(op.op.cost.stream, []).append((op.start, op.end))
    computed = joined(streams.pop(COMPUTE, []))
    out = {name: length(uncovered_stretches(joined(spans), computed)) for name, spans in streams.items()}
    working = joined([*computed, *(span for spans in streams.values() for span in spans)])
    owners = opened.compiled.job.schedule.owners
    coming = [
        (start, end)
        for place, (start, end, _, _) in opened.messages.items()
        if owners[opened.compiled.messages[place.number].transfer.target[0]] == rank
    ]
    if coming:
        out[MESSAGES] = length(uncovered_stretches(joined(coming), working))
    return dict(sorted(out.items(), key=lambda each: (-each[1], each[0])))
