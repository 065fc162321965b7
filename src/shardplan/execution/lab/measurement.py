"""What the lab measured: repetitions of one item, the bytes over every edge, and how calm the machine was."""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass

from shardplan.execution.lab.item import Run
from shardplan.execution.record import NativeCall
from shardplan.simulation.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Repetition:
    """One run."""

    seconds: float  # from the agreed instant to the last finish
    lateness: float  # seconds from the agreed instant to the last start
    cpu_share: float  # of all processors of the machine that was busy, by whatever process, 0 to 1
    drops: int  # packets that the shapers dropped
    edge_bytes: tuple[int, ...]  # what the interface of every edge sent meanwhile, headers included


MOST_BUSY = 0.35  # share of the processors above which they, and not the links, may set the pace


class RepetitionStatistics:
    """What repetitions come to, of whatever was run."""

    __slots__ = ()
    repetitions: tuple[Repetition, ...]

    @property
    def seconds(self) -> float:
        """The median."""
        return statistics.median(r.seconds for r in self.repetitions)

    @property
    def min_seconds(self) -> float:
        """The least."""
        return min(r.seconds for r in self.repetitions)

    @property
    def cv(self) -> float:
        """Standard deviation over mean of the seconds; 0 of a single repetition."""
        return variation([r.seconds for r in self.repetitions])

    @property
    def cpu_share(self) -> float:
        """The mean."""
        return statistics.fmean(r.cpu_share for r in self.repetitions)


@dataclass(frozen=True, slots=True)
class Measurement(RepetitionStatistics):
    """An item measured."""

    title: str
    engine: str  # of `ENGINES`, or `replay` of a script
    edges: tuple[str, ...]  # names of the edges of the cluster's tree
    repetitions: tuple[Repetition, ...]  # of the set that is kept; fewer than asked for where a rank was late all along
    repeated: bool  # whether the first set was so uneven that another was taken; the calmer one is kept
    voided: int  # runs thrown away because a rank started late
    verified: bool  # whether the warm-up's results were compared with the reference on every rank
    payload: dict[tuple[int, int], int]  # bytes by sender and receiver, device ids, as counted; none of gloo's own
    payload_edge_bytes: tuple[int, ...]  # the same over every edge
    predicted_payload: dict[tuple[int, int], int]  # the same, worked out from the types alone; gloo's own, too
    predicted_edge_bytes: tuple[int, ...]
    calls: dict[int, tuple[NativeCall, ...]]  # of gloo's own collectives, by device id, in order
    load: float  # the machine's load average over a minute, at the start
    timeline: Timeline  # of the repetition with the median time

    @property
    def exact(self) -> bool | None:
        """Whether the bytes counted are those predicted; None where gloo sends some, which nobody counts."""
        return None if self.calls else self.payload == self.predicted_payload

    @property
    def lateness(self) -> float:
        """The largest, in seconds."""
        return max(r.lateness for r in self.repetitions)

    @property
    def drops(self) -> int:
        """Packets dropped by the shapers, in all repetitions."""
        return sum(r.drops for r in self.repetitions)

    @property
    def kernel_edge_bytes(self) -> tuple[int, ...]:
        """The median over repetitions of what the interface of every edge sent."""
        return tuple(round(statistics.median(n)) for n in zip(*(r.edge_bytes for r in self.repetitions), strict=True))


def variation(seconds: list[float]) -> float:
    """Return the coefficient of variation: sample standard deviation over mean."""
    return statistics.stdev(seconds) / statistics.fmean(seconds) if len(seconds) > 1 else 0.0


def run_seconds(run: Run) -> float:
    """Return the seconds of a run: from the agreed instant to the last finish."""
    return max((o.end for o in run.outcomes), default=run.instant) - run.instant


def repetition_of(run: Run) -> Repetition:
    """Return what is kept of a run."""
    late = max((o.lateness for o in run.outcomes), default=0.0)
    share = run.busy / (run.elapsed * (os.cpu_count() or 1))
    return Repetition(run_seconds(run), late, share, run.drops, run.edge_bytes)
