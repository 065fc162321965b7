"""The result of a sweep, its file, and the machine it was measured on: no names, no paths.

A file is `Sweep` as JSON, a pair a line; one whose object `sweep` is a sweep is read too, as benchmarks write.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import statistics
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from shardplan.core.decoding import decode_json, read_bytes
from shardplan.errors import ParseError, line
from shardplan.execution.lab.cluster import CONSTANTS
from shardplan.execution.lab.experiments import Experiment
from shardplan.execution.lab.measurement import MOST_BUSY
from shardplan.execution.lab.session import REPETITIONS
from shardplan.plans.plan_file import write_atomic
from shardplan.simulation.scripts import Engine

BUSY = 0.5  # an edge counts as busy from this share of the busiest edge's payload
DEEPEST = 3  # levels of a file's JSON that have a line for every entry: down to the pairs of an experiment
WIDEST = 100  # characters of an entry from which on it is spread over lines


@dataclass(frozen=True, slots=True)
class Row:
    """A program on a placement: predicted, and measured.

    `exact` says whether the engine's payload on every edge equals the one worked out from the types; None where the
    engine does not count.
    """

    placement: str  # as `Placement.describe` says it
    program: str  # its instructions
    ops: tuple[str, ...]  # names of its steps
    events: float  # seconds predicted event-wise
    barrier: float  # seconds predicted with a barrier after every step
    seconds: tuple[float, ...]  # of every repetition of the set that is kept
    repeated: bool  # whether another set was thrown away
    voided: int  # runs that did not count because a rank started late
    lateness: tuple[float, ...]  # of every repetition: seconds by which the last rank was late
    cpu_share: tuple[float, ...]  # of every repetition: of all processors, 0 to 1
    drops: tuple[int, ...]  # of every repetition: packets
    load: float  # load average over a minute, at the start
    exact: bool | None
    payload: int  # bytes on the busiest edge
    kernel: tuple[float, float] | None  # least and most sent over payload, of edges with at least `BUSY` of that

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds)

    @property
    def counts(self) -> bool:
        """Whether the links set the pace: at most `MOST_BUSY` of the processors were busy, in the mean."""
        return statistics.fmean(self.cpu_share) <= MOST_BUSY


@dataclass(frozen=True, slots=True)
class Done:
    """An experiment measured; where `error` says why, there are no rows."""

    experiment: Experiment
    date: str  # and time of the start, UTC
    wall_seconds: float
    load: float  # load average over a minute, at the start
    rows: tuple[Row, ...]
    error: str = ""


@dataclass(frozen=True, slots=True)
class Again:
    """A pair measured a second time, at the end of the sweep."""

    experiment: str  # its name
    placement: str
    program: str
    first: float  # median seconds of the first time
    second: float
    seconds: tuple[float, ...]  # of every repetition of the second time


def this_machine() -> dict[str, str | int]:
    """Return the processor, its cores, and the kernel; no names."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    model = next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), platform.processor())
    kernel = f"{platform.system()} {platform.release()}"
    return {"cpu": model or "unknown", "cores": os.cpu_count() or 1, "kernel": kernel, "arch": platform.machine()}


def package_versions() -> dict[str, str]:
    """Return the versions of Python, shardplan, numpy and torch, those that are installed."""
    out = {"python": platform.python_version()}
    for name in ("shardplan", "numpy", "torch"):
        try:
            out[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return out


@dataclass(frozen=True)
class Sweep:
    """What a sweep found; the file is this as JSON."""

    engine: Engine = "ring"
    repetitions: int = REPETITIONS  # of every pair
    constants: dict[str, float | None] = field(default_factory=lambda: asdict(CONSTANTS))  # of the prediction `events`
    machine: dict[str, str | int] = field(default_factory=this_machine)
    versions: dict[str, str] = field(default_factory=package_versions)
    experiments: tuple[Done, ...] = ()  # in the order measured
    again: tuple[Again, ...] = ()  # the pairs of the noise floor

    @cached_property
    def floor(self) -> float | None:
        """The noise floor: median absolute log ratio of the second to the first measurement; None without any."""
        return statistics.median(abs(math.log(a.second / a.first)) for a in self.again) if self.again else None

    def to_plain_data(self) -> dict[str, Any]:
        """Return it as dicts, lists and numbers, the floor beside."""
        return msgspec.to_builtins(self) | {"floor": self.floor}

    def to_json(self) -> str:
        """Return the file's text, a pair a line."""
        return _lines(self.to_plain_data(), 0) + "\n"

    def save(self, path: Path) -> None:
        """Write the file; an interrupted write leaves the old one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, self.to_json().encode())

    @staticmethod
    def from_json(text: str | bytes, name: str = "result") -> Sweep:
        """Read a file's text; raises `ParseError`, which calls the file `name`, where it is no result of a sweep."""
        try:
            raw: Any = decode_json(text)
            raw = raw.get("sweep", raw)
            if "experiments" not in raw:
                raise ParseError("it has no experiments")
            return msgspec.convert(raw, Sweep)
        except (ParseError, msgspec.ValidationError, AttributeError, TypeError) as error:
            raise ParseError(f"{name} is no result of a sweep: {line(error)}") from None

    @staticmethod
    def load(path: Path) -> Sweep:
        """Read a file; raises `ParseError` where it cannot be read, or is no result of a sweep."""
        return Sweep.from_json(read_bytes(path), str(line(path)))


def _lines(value: Any, depth: int) -> str:
    """JSON with a line for every entry of the outer levels, floats to six digits."""
    flat = msgspec.json.encode(_round_floats(value)).decode()
    if depth > DEEPEST or len(flat) < WIDEST or not isinstance(value, (dict, list, tuple)):
        return flat
    pad = " " * (depth + 1)
    if isinstance(value, dict):
        entries = [f"{pad}{msgspec.json.encode(k).decode()}: {_lines(v, depth + 1)}" for k, v in value.items()]
        return "{\n" + ",\n".join(entries) + "\n" + " " * depth + "}"
    return "[\n" + ",\n".join(pad + _lines(v, depth + 1) for v in value) + "\n" + " " * depth + "]"


def _round_floats(value: Any) -> Any:
    match value:
        case dict():
            return {k: _round_floats(v) for k, v in value.items()}
        case list() | tuple():
            return [_round_floats(v) for v in value]
        case float():
            return float(f"{value:.6g}")
        case _:
            return value
