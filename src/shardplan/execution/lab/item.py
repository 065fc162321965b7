"""What travels between the session, the host and the ranks: an item to run, what a rank saw of a run, errors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shardplan.errors import BackendError, ParseError, ShardplanError, TimedOut, TopologyError
from shardplan.execution.record import StepSpan
from shardplan.simulation.script import Script

Engine = Literal["ring", "gloo"]


class WrongResult(BackendError):
    """A result differs from the numpy reference."""


class Failure(Exception):
    """An error of a rank or the host on its way to the session; after a `fatal` one the ranks are of no more use."""

    def __init__(self, kind: str, text: str, fatal: bool) -> None:
        """Carry the name of the error's class, and its text."""
        super().__init__(kind, text, fatal)
        self.kind, self.text, self.fatal = kind, text, fatal

    def error(self) -> ShardplanError:
        """Return the error itself."""
        return ERRORS.get(self.kind, BackendError)(self.text)


ERRORS: dict[str, type[ShardplanError]] = {
    e.__name__: e for e in (TimedOut, BackendError, WrongResult, TopologyError, ParseError)
}


@dataclass(frozen=True, slots=True)
class Item:
    """A program (as text) or a script to run.

    `ranks` says which rank stands in for a device id; `names` are the steps, for messages.
    """

    title: str
    engine: Engine
    ranks: dict[int, int]
    names: tuple[str, ...]
    program: str = ""
    script: Script | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run on one rank: seconds on CLOCK_MONOTONIC."""

    device: int | None  # None where the rank had nothing to do
    lateness: float  # seconds from the agreed instant to the real start
    end: float
    busy: float  # seconds of CPU time, all threads
    spans: tuple[StepSpan, ...] = ()
    payload: dict[int, int] = field(default_factory=dict[int, int])  # bytes sent, by the receiver's device id


@dataclass(frozen=True, slots=True)
class Run:
    """One run on all ranks."""

    instant: float
    outcomes: tuple[Outcome, ...]
    edge_bytes: tuple[int, ...]  # that the interfaces sent meanwhile, by edge
    drops: int
    softirq: float  # seconds of the whole machine meanwhile
    elapsed: float  # seconds in which these were counted
