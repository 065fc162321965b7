"""Chunks of layers of many strategies at once: those of one content are one kind, and few ranks can hold most.

A pipeline of sixty-four chunks has some four kinds of them: the first, the last, and those between with a layer more
or less. What a chunk takes is worked out for its kind; a rank is a number of chunks of each. Of the moments at which a
rank may hold most (`schedules.flight_peaks`) those stay that no other of any rank is above in every kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shardplan.simulation.closed.configurations import CODES, Configurations
from shardplan.strategy.schedules.flight_peaks import equivalent_microbatches, flight_peaks

Floats = np.ndarray
Ints = np.ndarray
AT_ONCE = ("gpipe", "looped-bfs")  # schedules that have all microbatches in flight


@lru_cache(maxsize=1024)
def layers_of(runs: tuple[int, ...], chunks: int) -> Floats:
    """Return how many layers of each run a chunk has, and who has what is before and behind them: [runs + 2, chunks].

    As many layers each, where they divide. What is before and behind them counts as a layer each where that makes them
    divide; else the last have fewer.
    """
    total = sum(runs)
    most = -(-total // chunks)
    ends = np.minimum(np.arange(1, chunks + 1) * most, total)
    if total % chunks and (total + 2) % chunks == 0:
        ends = np.minimum(np.arange(1, chunks + 1) * most - 1, total)
    starts = np.concatenate([[0], ends[:-1]])
    counts = np.zeros((len(runs) + 2, chunks))
    first = 0
    for run, n in enumerate(runs):
        counts[run] = np.clip(np.minimum(ends, first + n) - np.maximum(starts, first), 0, None)
        first += n
    counts[-2, 0] = counts[-1, -1] = 1
    counts.flags.writeable = False
    return counts


@dataclass(frozen=True, slots=True, eq=False)
class PipelineKinds:
    """The chunks of one pipeline by kind, and the moments at which a rank may hold most.

    Args:
        counts: Layers of each run, and what is before and behind them, of a kind: [runs + 2, kinds].
        of_chunk: The kind of each chunk, [chunks].
        ranks: How many chunks of each kind ranks have, every combination once: [combinations, kinds].
        owners: How many ranks have each chunk, and compute a part of its microbatches.
        held: How many chunks of each kind the rank of a moment has: [moments, kinds].
        whole: Microbatches in flight in them: [moments, kinds].
        late: Microbatches of which only gradients of parameters are still to come: [moments, kinds].
        alive: How many of these chunks have any of both: [moments, kinds].
        at_work: The kind of the chunk that is being run, [moments].
        rank: Whose moment it is, [moments].
    """

    counts: Floats
    of_chunk: Ints
    ranks: Floats
    owners: int
    held: Floats
    whole: Floats
    late: Floats
    alive: Floats
    at_work: Ints
    rank: Ints


@lru_cache(maxsize=8192)
def pipeline_kinds(
    runs: tuple[int, ...], name: str, ranks: int, microbatches: int, interleave: int, every: bool = False
) -> PipelineKinds:
    """Return the kinds of a pipeline of so many ranks with so many chunks each; with `every`, all its moments.

    >>> found = pipeline_kinds((8,), "1f1b", 4, 8, 1)
    >>> found.counts.tolist(), found.whole.sum(axis=1).tolist()
    ([[2.0, 2.0, 2.0], [0.0, 0.0, 1.0], [0.0, 1.0, 0.0]], [4.0, 1.0, 3.0])
    """
    chunks = ranks * interleave
    counts, of_chunk = np.unique(layers_of(runs, chunks), axis=1, return_inverse=True)
    kinds, of_chunk = counts.shape[1], of_chunk.reshape(-1)
    flight = flight_peaks(name, ranks, microbatches, interleave)
    mine = of_chunk[flight.stages % chunks]  # [ranks, chunks of a rank]
    has = mine[:, :, None] == np.arange(kinds)
    whole, late, alive = (
        np.einsum("rec,rck->rek", x, has * 1.0) for x in (flight.whole, flight.late, flight.whole + flight.late > 0)
    )
    held = np.broadcast_to(has.sum(axis=1)[:, None] * 1.0, whole.shape)
    at_work = np.take_along_axis(mine, flight.at_work, axis=1)
    moments = np.concatenate([held, whole, late, alive], axis=2).reshape(-1, 4 * kinds)
    at_work, rank = at_work.reshape(-1), np.repeat(np.arange(ranks), flight.at_work.shape[1])
    kept = np.arange(len(moments)) if every else _undominated(moments, at_work)
    held, whole, late, alive = np.split(moments[kept], 4, axis=1)
    combinations, owners = np.unique(has.sum(axis=1) * 1.0, axis=0), flight.stages.size // chunks
    return PipelineKinds(counts, of_chunk, combinations, owners, held, whole, late, alive, at_work[kept], rank[kept])


def _split_counts(counts: Floats, first: Ints) -> Floats:
    """The layers of each run among the first ones of a chunk, and those behind: [2 runs + 2, kinds, n].

    A layer of a run may stand for several that are alike by turns, as in the loops of jobs.
    """
    rows: list[Floats] = []
    left = np.broadcast_to(first * 1.0, counts.shape[1:])
    for run in counts[:-2]:
        some = np.minimum(run, left)
        rows += [some, run - some]
        left = left - some
    return np.stack([*rows, *counts[-2:]])


def _undominated(moments: Floats, at_work: Ints) -> Ints:
    """Return the places of moments, each once, to which no other with the same kind at work is above in all."""
    _, places = np.unique(np.column_stack([moments, at_work]), axis=0, return_index=True)
    rows, kind = moments[places], at_work[places]
    below = (rows[:, None] <= rows[None]).all(axis=2) & (kind[:, None] == kind)
    np.fill_diagonal(below, val=False)
    return places[~below.any(axis=1)]


@dataclass(frozen=True, slots=True, eq=False)
class ChunkKinds:
    """The kinds of the pipelines of many configurations, side by side; those that one has not are repeated, and none.

    Args:
        counts: As in `PipelineKinds`, and so the rest: [runs + 2, kinds, n].
        chunks: How many chunks are of each kind, [kinds, n].
        ranks: [combinations, kinds, n].
        owners: [n].
        held: [moments, kinds, n].
        whole: [moments, kinds, n].
        late: [moments, kinds, n].
        alive: [moments, kinds, n].
        at_work: [moments, n].
        pipelines: The distinct ones.
        which: Which of them each configuration has, [n].
        layers: Layers of the model.
    """

    counts: Floats
    chunks: Floats
    ranks: Floats
    owners: Ints
    held: Floats
    whole: Floats
    late: Floats
    alive: Floats
    at_work: Ints
    pipelines: tuple[PipelineKinds, ...]
    which: Ints
    layers: int

    @staticmethod
    def of(runs: tuple[int, ...], c: Configurations, every: bool = False) -> ChunkKinds:
        """Return those of configurations of a model with runs of so many layers."""
        col, m = c.columns, c.microbatches
        keys = np.stack([col["schedule"], col["pipeline"], col["interleave"], m])
        distinct, back = np.unique(keys, axis=1, return_inverse=True)
        found: dict[PipelineKinds, int] = {}
        which, times = np.zeros((2, distinct.shape[1]), dtype=np.int64)
        for k, (code, ranks, interleave, microbatches) in enumerate(distinct.T.tolist()):
            name = CODES["schedule"][code]
            at_once = name in AT_ONCE
            few = 1 if at_once else equivalent_microbatches(name, ranks, microbatches)
            pipeline = pipeline_kinds(runs, name, ranks, few, interleave, every)
            which[k] = found.setdefault(pipeline, len(found))
            times[k] = microbatches if at_once else 1
        tables, times = _stacked(tuple(found)), times[back.reshape(-1)]
        which = which[back.reshape(-1)]
        taken = {name: x[..., which] for name, x in tables.items()}
        taken["whole"] = taken["whole"] * times
        taken["late"] = taken["late"] * times
        if c.splits:
            taken["counts"] = _split_counts(taken["counts"], col["recompute_layers"])
        return ChunkKinds(**taken, pipelines=tuple(found), which=which, layers=sum(runs))

    def sums(self, rows: Floats) -> Floats:
        """Return of each kind the sum over its layers of what one of each run has: [kinds, n] of [runs + 2, n]."""
        return np.einsum("rkn,rn->kn", self.counts, rows)

    def waiting(self, whole: Floats, late: Floats, once: Floats) -> Floats:
        """Return what waits at each moment, [moments, n], of what a microbatch leaves in a kind, [kinds, n] each."""
        found = np.einsum("ekn,kn->en", self.whole, whole)
        if late.any():
            found += np.einsum("ekn,kn->en", self.late, late)
        if once.any():
            found += np.einsum("ekn,kn->en", self.alive, once)
        return found

    def on_ranks(self, values: Floats) -> Floats:
        """Return the sum of what chunks hold on the rank of each moment, [moments, n] of [kinds, n]."""
        return np.einsum("ekn,kn->en", self.held, values)


@lru_cache(maxsize=256)
def _stacked(pipelines: tuple[PipelineKinds, ...]) -> dict[str, np.ndarray]:
    """Return arrays of pipelines side by side, the last axis is theirs; kinds, ranks and moments are repeated."""
    kinds, ranks, moments = (
        max(x) for x in zip(*((p.counts.shape[1], len(p.ranks), len(p.rank)) for p in pipelines), strict=True)
    )
    made: dict[str, list[np.ndarray]] = {}
    for p in pipelines:
        mine = p.counts.shape[1]
        kind = np.minimum(np.arange(kinds), mine - 1)
        real = np.arange(kinds) < mine
        rank, moment = (np.arange(most) % n for most, n in ((ranks, len(p.ranks)), (moments, len(p.rank))))
        rows = {"counts": p.counts[:, kind], "chunks": np.bincount(p.of_chunk, minlength=kinds) * 1.0}
        rows |= {"ranks": p.ranks[rank][:, kind] * real, "at_work": p.at_work[moment], "owners": np.array(p.owners)}
        rows |= {name: getattr(p, name)[moment][:, kind] * real for name in ("held", "whole", "late", "alive")}
        for name, values in rows.items():
            made.setdefault(name, []).append(values)
    return {name: np.stack(values, axis=-1) for name, values in made.items()}
