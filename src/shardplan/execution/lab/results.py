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

from shardplan.errors import ParseError, line
from shardplan.execution.lab.cluster import CONSTANTS
from shardplan.execution.lab.experiments import Experiment
from shardplan.execution.lab.item import Engine
from shardplan.execution.lab.session import REPETITIONS
from shardplan.plans.plan_file import write_atomic

BUSY = 0.5  # an edge counts as busy from this share of the busiest edge's payload


@dataclass(frozen=True, slots=True)
class Row:
    """A program on a placement: predicted, and measured.

    Args:
        placement: As `Placement.describe` says it.
        program: The instructions.
        ops: Names of the steps.
        events: Seconds predicted event-wise.
        barrier: Seconds predicted with a barrier after every step.
        seconds: Of every repetition of the set that is kept.
        repeated: Whether another set was thrown away.
        voided: Runs that did not count because a rank started late.
        lateness: Of every repetition: seconds by which the last rank was late.
        cpu_share: Of every repetition: of all processors, 0 to 1.
        drops: Of every repetition: packets.
        load: Load average over a minute, at the start.
        exact: Whether the engine's payload on every edge equals the one worked out from the types; None where the
            engine does not count.
        payload: Bytes on the busiest edge.
        kernel: Least and most that an interface sent over the payload of its edge, on edges with at least `BUSY` of
            that; None where nothing is known.
    """

    placement: str
    program: str
    ops: tuple[str, ...]
    events: float
    barrier: float
    seconds: tuple[float, ...]
    repeated: bool
    voided: int
    lateness: tuple[float, ...]
    cpu_share: tuple[float, ...]
    drops: tuple[int, ...]
    load: float
    exact: bool | None
    payload: int
    kernel: tuple[float, float] | None

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds)


@dataclass(frozen=True, slots=True)
class Done:
    """An experiment measured; where `error` says why, there are no rows."""

    experiment: Experiment
    date: str
    wall_seconds: float
    load: float
    rows: tuple[Row, ...]
    error: str = ""


@dataclass(frozen=True, slots=True)
class Again:
    """A pair measured a second time, at the end of the sweep."""

    experiment: str
    placement: str
    program: str
    first: float
    second: float
    seconds: tuple[float, ...]


def this_machine() -> dict[str, str | int]:
    """Return the processor, its cores, and the kernel; no names."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    model = next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), platform.processor())
    kernel = f"{platform.system()} {platform.release()}"
    return {"cpu": model or "unknown", "cores": os.cpu_count() or 1, "kernel": kernel, "arch": platform.machine()}


def installed() -> dict[str, str]:
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
    """What a sweep found; the file is this as JSON.

    Args:
        engine: `"ring"` or `"gloo"`.
        repetitions: Of every pair.
        constants: What `events` was given.
        machine: Processor, cores, kernel.
        versions: Of Python and packages.
        experiments: In the order measured.
        again: The pairs of the noise floor.
    """

    engine: Engine = "ring"
    repetitions: int = REPETITIONS
    constants: dict[str, float | None] = field(default_factory=lambda: asdict(CONSTANTS))
    machine: dict[str, str | int] = field(default_factory=this_machine)
    versions: dict[str, str] = field(default_factory=installed)
    experiments: tuple[Done, ...] = ()
    again: tuple[Again, ...] = ()

    @cached_property
    def floor(self) -> float | None:
        """The noise floor: median absolute log ratio of the second to the first measurement; None without any."""
        return statistics.median(abs(math.log(a.second / a.first)) for a in self.again) if self.again else None

    def plain(self) -> dict[str, Any]:
        """Return it as dicts, lists and numbers, the floor beside."""
        return msgspec.to_builtins(self) | {"floor": self.floor}

    def to_json(self) -> str:
        """Return the file's text, a pair a line."""
        return _lines(self.plain(), 0) + "\n"

    def save(self, path: Path) -> None:
        """Write the file; an interrupted write leaves the old one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, self.to_json().encode())

    @staticmethod
    def from_json(text: str | bytes, name: str = "result") -> Sweep:
        """Read a file's text.

        Raises:
            ParseError: It is no result of a sweep; `name` says which.
        """
        try:
            raw: Any = msgspec.json.decode(text)
            raw = raw.get("sweep", raw)
            if "experiments" not in raw:
                raise ParseError(f"{name} is no result of a sweep: it has no experiments")
            return msgspec.convert(raw, Sweep)
        except (msgspec.DecodeError, AttributeError, TypeError) as error:
            raise ParseError(f"{name} is no result of a sweep: {error}") from None

    @staticmethod
    def load(path: Path) -> Sweep:
        """Read a file.

        Raises:
            ParseError: It cannot be read, or is no result of a sweep.
        """
        try:
            text = path.read_bytes()
        except OSError as error:
            raise ParseError(f"{line(path)}: {error.strerror}") from None
        return Sweep.from_json(text, str(path))


def _lines(value: Any, depth: int) -> str:
    """JSON with a line for every entry of the outer levels, floats to six digits."""
    flat = msgspec.json.encode(_short(value)).decode()
    if depth > 3 or len(flat) < 100 or not isinstance(value, (dict, list, tuple)):
        return flat
    pad = " " * (depth + 1)
    if isinstance(value, dict):
        entries = [f"{pad}{msgspec.json.encode(k).decode()}: {_lines(v, depth + 1)}" for k, v in value.items()]
        return "{\n" + ",\n".join(entries) + "\n" + " " * depth + "}"
    return "[\n" + ",\n".join(pad + _lines(v, depth + 1) for v in value) + "\n" + " " * depth + "]"


def _short(value: Any) -> Any:
    match value:
        case dict():
            return {k: _short(v) for k, v in value.items()}
        case list() | tuple():
            return [_short(v) for v in value]
        case float():
            return float(f"{value:.6g}")
        case _:
            return value
