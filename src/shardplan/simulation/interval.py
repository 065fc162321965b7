"""`Interval` and `MemoryCurve`: the rows of a timeline, one thing that one device does or holds."""

from __future__ import annotations

from dataclasses import dataclass

TOLERANCE = 1e-12  # of the makespan: times closer than this are equal


@dataclass(frozen=True, slots=True)
class Interval:
    """One thing that one device does on one of its streams.

    Args:
        device: Device id.
        stream: What does it: `"comm"`, `"compute"`, ...; the intervals of a stream follow one another.
        start: Seconds since the start of the run.
        end: Seconds since the start of the run.
        name: For people, the op with its operands: `all_gather(%0; dim=0, axes=(x))`.
        kind: The op's name: `all_gather`.
        step: Number of the step in its program, from 0; None where there is none.
        received_bytes: Bytes that the device receives in it.
        causes: Indices, in the timeline, of the intervals that had to end before this one could start.
    """

    device: int
    stream: str
    start: float
    end: float
    name: str
    kind: str
    step: int | None = None
    received_bytes: int = 0
    causes: tuple[int, ...] = ()

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """The bytes of one device as (seconds, bytes) samples, ascending in time; each holds until the next.

    Two samples at one time are a peak of no duration: it counts, and the later sample holds.
    """

    device: int
    samples: tuple[tuple[float, int], ...]
