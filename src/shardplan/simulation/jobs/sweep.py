"""The schedule of a job run over the maps of its actions: when each begins and is done, and when messages arrive.

An action takes what the rank's streams were left with, when what it reads of the same microbatch was done, and when
messages for it arrived; a message goes once it is made, and the one before it has arrived or its receiver waits for it
(`MapGraph`). Behind the last action come the totals that go to other stages, the optimizers, and what those send.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from shardplan.hardware.prices.fabric import Floats
from shardplan.simulation.jobs.compiled_job import CompiledJob
from shardplan.simulation.jobs.map_graph import MapGraph


@dataclass(frozen=True, slots=True, eq=False)
class RankRun:
    """What a rank did, action by action in its own list; times in seconds, minus infinity for none."""

    actions: tuple[tuple[int, str, int], ...]  # then its optimizers, as microbatch -1
    entry: Floats  # [actions, entries]: with what each began
    begin: Floats  # [actions]: when its first op starts
    done: Floats  # [actions]
    sent: Floats  # [actions, messages, 2]: when what it sends starts and arrives


@dataclass(frozen=True, slots=True, eq=False)
class JobSweep:
    """What all ranks did; `last` are messages behind the last action: number, start, end."""

    ranks: tuple[RankRun, ...]
    last: tuple[tuple[int, float, float], ...]
    seconds: float


class _Update(NamedTuple):
    """An optimizer, or what comes before it: the action, with what it began, when its first op starts, and its end."""

    action: tuple[int, str, int]
    entry: Floats
    begin: float
    done: float


def sweep(compiled: CompiledJob) -> JobSweep:
    """Return what the ranks of a job do; raises `ScheduleError` where they wait for each other in a circle."""
    graph = MapGraph.of(compiled)
    times = graph.run()
    updates, last = _updates(compiled, graph, times)
    runs = tuple(_rank_run(compiled, graph, times, rank, mine) for rank, mine in enumerate(updates))
    ends = [*(float(run.done.max(initial=0.0)) for run in runs), *(end for _, _, end in last)]
    return JobSweep(runs, tuple(last), max(ends, default=0.0))


def _updates(
    compiled: CompiledJob, graph: MapGraph, times: Floats
) -> tuple[list[list[_Update]], list[tuple[int, float, float]]]:
    """What every rank does behind its last action, and the messages there: number, start, end."""
    job, n, owners = compiled.job, graph.row.streams, compiled.job.schedule.owners
    done: list[float] = []
    free: list[Floats] = []
    for low, high in pairwise(graph.starts.tolist()):
        done.append(float(times[low:high, graph.row.end].max(initial=0.0)))
        free.append(times[high - 1 if high > low else -1, :n])
    mail: dict[int, float] = {}
    last: list[tuple[int, float, float]] = []
    updates: list[list[_Update]] = [[] for _ in done]

    def send(kind: str) -> None:
        for number, m in enumerate(compiled.messages):
            if m.transfer.kind == kind:
                start = done[owners[m.transfer.source[0]]]
                mail[number] = start + m.seconds
                last.append((number, start, mail[number]))

    for kind, passing in job.updates.items():
        send(passing)
        for stage in (s for s in range(job.stages) if (s, kind) in compiled.maps):
            r = owners[stage]
            entry = np.array([*free[r], done[r], *(mail[number] for number in compiled.taken[stage, kind])])
            after = (compiled.maps[stage, kind].matrix + entry).max(axis=1)
            free[r] = after[:n]
            done[r] = max(done[r], float(after[n + 1]))
            updates[r].append(_Update((stage, kind, -1), entry, float(after[n]), float(after[n + 1])))
    send("OPT")
    return updates, last


def _rank_run(compiled: CompiledJob, graph: MapGraph, times: Floats, rank: int, updates: list[_Update]) -> RankRun:
    """What one rank did: its actions, then its updates."""
    row, mine = graph.row, slice(*graph.starts[rank : rank + 2].tolist())
    own, width = times[mine], graph.entry.shape[1]
    entry = np.full((len(own) + len(updates), max([width, *(len(one.entry) for one in updates)])), -np.inf)
    entry[: len(own), :width] = times.reshape(-1)[graph.entry[mine]]
    for found, one in zip(entry[len(own) :], updates, strict=True):
        found[: len(one.entry)] = one.entry
    sent = np.full((len(entry), row.sends, 2), -np.inf)
    sent[: len(own), :, 0], sent[: len(own), :, 1] = own[:, row.starts : row.arrivals], own[:, row.arrivals :]
    return RankRun(
        (*compiled.rows[rank], *(one.action for one in updates)),
        entry,
        np.concatenate([own[:, row.begin], [one.begin for one in updates]]),
        np.concatenate([own[:, row.end], [one.done for one in updates]]),
        sent,
    )
