"""What travels between the session, the host and the ranks: orders, items to run, what was seen of a run, errors.

Over one pipe between session and host, and one between the host and each rank. Who orders waits for the answer before
the next order, and every order is answered by one message: what it returns, or a `Failure`.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from shardplan.errors import BackendError, ParseError, ShardplanError, TimedOut, TopologyError
from shardplan.execution.record import NativeCall, StepSpan
from shardplan.hardware.topology import Topology
from shardplan.simulation.script import Script
from shardplan.simulation.scripts import Engine
from shardplan.strategy.partition.job import Job


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


class Order(NamedTuple):
    """A call of a method of the host, or of a rank's `Worker`."""

    name: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Item:
    """A program, a script, or a step of a job, to run."""

    title: str
    engine: Engine
    ranks: dict[int, int]  # by device id, the rank that stands in for it
    names: tuple[str, ...]  # of the steps, for messages
    program: str = ""  # its text; empty for what is none
    script: Script | None = None
    job: bytes = b""  # packed; its compute is slept as the devices of `topology` need
    topology: Topology | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run on one rank; instants are seconds on CLOCK_MONOTONIC, which all processes of a machine share."""

    device: int | None  # its id; None where the rank had nothing to do
    lateness: float  # seconds from the agreed instant to the real start
    end: float
    spans: tuple[StepSpan, ...] = ()
    payload: dict[int, int] = field(default_factory=dict[int, int])  # bytes sent, by the receiver's device id
    calls: tuple[NativeCall, ...] = ()  # of gloo's own collectives
    slept: float = 0.0  # seconds of compute that the rank slept


@dataclass(frozen=True, slots=True)
class Run:
    """One run on all ranks."""

    instant: float  # of the start, agreed on
    outcomes: tuple[Outcome, ...]  # of the ranks that had something to do
    edge_bytes: tuple[int, ...]  # that the interfaces sent meanwhile, by edge
    drops: int
    busy: float  # seconds that all processors of the machine worked meanwhile, in sum
    elapsed: float  # seconds in which these were counted


class _JobPickler(pickle.Pickler):
    """Takes read-only mappings, too, which `pickle` does not."""

    def reducer_override(self, obj: Any) -> Any:
        """Say how a read-only mapping is made again."""
        return (_make_proxy, (dict(obj),)) if isinstance(obj, MappingProxyType) else NotImplemented


def _make_proxy(known: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    return MappingProxyType(known)


def pack_job(job: Job) -> bytes:
    """Return a job as bytes, without what running it does not look at: its movements, and how it was settled."""
    nothing: Any = None
    out = io.BytesIO()
    _JobPickler(out).dump(replace(job, movements={}, settled=nothing))
    return out.getvalue()


def unpack_job(data: bytes) -> Job:
    """Return the job of such bytes."""
    return pickle.loads(data)
