"""What the lab measured: repetitions of one item, the bytes over every edge, and how calm the machine was."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from shardplan.simulation.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Repetition:
    """One run.

    Args:
        seconds: From the agreed instant to the last finish.
        lateness: Seconds from the agreed instant to the last start.
        cpu_share: Of all processors of the machine: the ranks' CPU time and all soft interrupts, 0 to 1.
        drops: Packets that the shapers dropped.
        edge_bytes: What the interface of every edge sent meanwhile, headers included.
    """

    seconds: float
    lateness: float
    cpu_share: float
    drops: int
    edge_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Measurement:
    """An item measured.

    Args:
        title: For people.
        engine: `"ring"`, `"gloo"`, or `"replay"` of a script.
        edges: Names of the edges of the cluster's tree.
        repetitions: Of the set that is kept; fewer than asked for where a rank was late again and again.
        repeated: Whether the first set was so uneven that another was taken; the calmer one is kept.
        voided: Runs thrown away because a rank started late.
        verified: Whether the warm-up's results were compared with the reference on every rank.
        payload: Bytes that each device sent to each other, as the engine counted them; of gloo's own collectives
            nothing is counted.
        payload_edge_bytes: The same over every edge.
        predicted_payload: Bytes that each device sends to each other, worked out from the types alone; None for gloo.
        predicted_edge_bytes: The same over every edge; None for gloo.
        load: The machine's load average over a minute, at the start.
        timeline: Of the repetition with the median time.
    """

    title: str
    engine: str
    edges: tuple[str, ...]
    repetitions: tuple[Repetition, ...]
    repeated: bool
    voided: int
    verified: bool
    payload: dict[tuple[int, int], int]
    payload_edge_bytes: tuple[int, ...]
    predicted_payload: dict[tuple[int, int], int] | None
    predicted_edge_bytes: tuple[int, ...] | None
    load: float
    timeline: Timeline

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
    def lateness(self) -> float:
        """The largest, in seconds."""
        return max(r.lateness for r in self.repetitions)

    @property
    def cpu_share(self) -> float:
        """The mean."""
        return statistics.fmean(r.cpu_share for r in self.repetitions)

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
