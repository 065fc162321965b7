"""`Record`: what a process saw of a run, step by step, on its own monotonic clock."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StepSpan:
    """One step on one device."""

    device: int  # its id
    step: int  # its number in the program
    start: float  # seconds of the clock
    end: float
    received: int  # bytes


@dataclass(slots=True)
class Record:
    """The spans of the devices of this process, appended by a backend while it runs."""

    spans: list[StepSpan] = field(default_factory=list)
