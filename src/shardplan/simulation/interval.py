"""`Interval` and `MemoryCurve`: the rows of a timeline, one thing that one device does or holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# Of the makespan: times closer than this are equal. Clocks are sums of some thousand floats, each rounded to 1e-16;
# what is meant to differ, as by a latency in a run of an hour, differs by more.
TOLERANCE = 1e-12


@dataclass(frozen=True, slots=True)
class Interval:
    """One thing that one device does on one of its streams; times are seconds since the start of the run."""

    device: int  # id
    stream: str  # what does it: `comm`, `compute`, ...; the intervals of a stream follow one another
    start: float
    end: float
    name: str  # for people, the op with its operands: `all_gather(%0; dim=0, axes=(x))`
    kind: str  # the op's name: `all_gather`
    step: int | None = None  # its number in the program, from 0; None where there is none
    received_bytes: int = 0  # that the device receives in it
    causes: tuple[int, ...] = ()  # indices, in the timeline, of what had to end before this could start

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.end - self.start


def seconds_by_kind(links: Iterable[Interval]) -> dict[str, float]:
    """Return the seconds of intervals by kind, the largest first."""
    found: dict[str, float] = {}
    for link in links:
        found[link.kind] = found.get(link.kind, 0.0) + link.seconds
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """The bytes of one device, by id, as (seconds, bytes) samples, ascending in time; each holds until the next.

    Two samples at one time are a peak of no duration: it counts, and the later sample holds.
    """

    device: int
    samples: tuple[tuple[float, int], ...]
