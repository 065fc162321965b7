"""`Record`: what a process saw of a run, step by step, on its own monotonic clock; and what it called of a library."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from shardplan.core.program import Program


@dataclass(frozen=True, slots=True)
class StepSpan:
    """One step on one device."""

    device: int  # its id
    step: int  # its number in the program
    start: float  # seconds of the clock
    end: float
    received: int  # bytes


class NativeCall(NamedTuple):
    """A collective of a library, as one member of a group calls it."""

    kind: str
    ranks: tuple[int, ...]  # device ids, in member order
    nbytes: int  # that this member puts in


@dataclass(slots=True)
class Record:
    """The spans of the devices of this process, appended by a backend while it runs; of a job those of each `run`."""

    spans: list[StepSpan] = field(default_factory=list)
    runs: list[tuple[Program, Record]] = field(default_factory=list["tuple[Program, Record]"])
