"""A range of frames searched, alone: what an executor runs; and the journal of ranges that are done."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from shardplan.core.decoding import decode_json, read_text
from shardplan.errors import ParseError, line
from shardplan.hardware.topology import Topology
from shardplan.plans.plan_file import write_atomic
from shardplan.simulation.closed.form import ClosedForm, distinct
from shardplan.simulation.closed.parameters import Parameters
from shardplan.simulation.searching.bounds import FlooredForm, FramedSpace, frame_floors
from shardplan.simulation.searching.front import Points
from shardplan.simulation.step_events import StepEvents
from shardplan.strategy.model import Model

Floats = np.ndarray
Ints = np.ndarray
BLOCK = 4096  # frames that are expanded together
FIRST = 128  # and of those with the least floors, to have something to compare with


@dataclass(frozen=True, slots=True, eq=False)
class SearchTask:
    """What is searched; everything that a worker needs, as a model's name and fields where it was loaded."""

    load: tuple[str, tuple[tuple[str, Any], ...]]
    topology: Topology
    parameters: Parameters
    space: FramedSpace
    most: int
    prune: bool
    fidelity: str
    fixed: str = field(default="", kw_only=True)  # what of strategies is given
    room: float = field(
        default=1.0, kw_only=True
    )  # times the memory of a device up to which strategies are let through

    @property
    def memory(self) -> float:
        """Bytes up to which strategies are let through."""
        return self.topology.device.memory * self.room

    def form(self, model: Model | None = None) -> FlooredForm:
        """Return what prices."""
        form = ClosedForm(model or self.model(), self.topology, self.parameters)
        return StepEvents(form) if self.fidelity == "events" else form

    def model(self) -> Model:
        """Load the model."""
        name, fields = self.load
        return Model.load(name, **dict(fields))

    def words(self) -> str:
        """Return what is searched, but for the space."""
        said = (
            self.load,
            str(self.topology),
            self.parameters,
            self.most,
            self.prune,
            self.fidelity,
            self.room,
            self.fixed,
        )
        return repr(said)


@dataclass(frozen=True, slots=True, eq=False)
class RangeResult:
    """Of a range: the best, the front, and how many strategies were priced, pruned and too large."""

    best: Points
    front: Points
    priced: int = 0
    slow: int = 0  # of frames whose floor is above what was found
    large: int = 0  # of frames whose least bytes are above the memory
    unfit: int = 0  # priced, and too large
    least: float = float("inf")  # bytes, of what is too large
    left: int = 0  # frames that were not searched

    def and_(self, other: RangeResult, most: int) -> RangeResult:
        """Return both together."""
        return RangeResult(
            self.best.and_(other.best).best(most),
            self.front.and_(other.front).front(),
            self.priced + other.priced,
            self.slow + other.slow,
            self.large + other.large,
            self.unfit + other.unfit,
            min(self.least, other.least),
            self.left + other.left,
        )


def searched(
    task: SearchTask,
    start: int,
    stop: int,
    form: FlooredForm | None = None,
    tell: Callable[[int, RangeResult], None] | None = None,
) -> RangeResult:
    """Search the frames from `start` to `stop`: exact for them, whatever else there is.

    `tell` is called, but at the end, with how many of them are done, and with what was found in these.
    """
    form, space = form or task.form(), task.space
    memory, frames = task.memory, np.arange(start, stop)
    found = RangeResult(Points.none(), Points.none())
    if not task.prune:
        for at in range(0, len(frames), BLOCK):
            found = found.and_(_priced(task, form, *_every(space, frames[at : at + BLOCK])), task.most)
            if tell is not None and at + BLOCK < len(frames):
                tell(at + BLOCK, found)
        return found
    floors = [frame_floors(form, space, frames[at : at + 8 * BLOCK]) for at in range(0, len(frames), 8 * BLOCK)]
    seconds, nbytes = (np.concatenate([f[k] for f in floors]) for k in (0, 1))
    strategies = (space.starts[frames + 1] - space.starts[frames]) * space.live(frames).sum(axis=1)
    found = found.and_(_large(nbytes > memory, nbytes, strategies), task.most)
    done = int((nbytes > memory).sum())
    for some in _in_order(seconds, nbytes <= memory, FIRST, BLOCK):
        keep, found = _kept(task, found, some, seconds, nbytes, strategies)
        if len(keep):
            found = _inside(task, form, frames[keep], found)
        done += len(some)
        if tell is not None and done < len(frames):
            tell(done, found)
    return found


def _inside(task: SearchTask, form: FlooredForm, frames: Ints, found: RangeResult) -> RangeResult:
    """Search what is inside of some frames: where they have several orders, first by what none is below."""
    space, (frame, inner) = task.space, _every(task.space, frames)
    if not space.floor_order:
        return found.and_(_priced(task, form, frame, inner), task.most)
    out = form(space.columns(frame, space.floor_order, inner))
    large, orders = out.peak_bytes > task.memory, space.starts[frame + 1] - space.starts[frame]
    found = found.and_(_large(large, out.peak_bytes, orders), task.most)
    for some in _in_order(out.seconds, ~large, 4 * FIRST, BLOCK):
        keep, found = _kept(task, found, some, out.seconds, out.peak_bytes, orders)
        if len(keep):
            found = found.and_(_priced(task, form, frame[keep], inner[keep]), task.most)
    return found


def _every(space: FramedSpace, frames: Ints) -> tuple[Ints, Ints]:
    """All that is inside of some frames, and not idle: the frame and the place inside of each."""
    at, inside = np.nonzero(space.live(frames))
    return frames[at], inside


def _large(large: np.ndarray, nbytes: Floats, strategies: Ints) -> RangeResult:
    """What is too large whatever its order: so many strategies each."""
    least = float(nbytes[large].min()) if large.any() else float("inf")
    return RangeResult(Points.none(), Points.none(), large=int(strategies[large].sum()), least=least)


def _in_order(seconds: Floats, alive: np.ndarray, width: int, most: int) -> Iterator[Ints]:
    """Yield the places of what is alive by its seconds, few first, to have something to compare with."""
    order, at = np.flatnonzero(alive)[np.argsort(seconds[alive], kind="stable")], 0
    while at < len(order):
        yield order[at : at + width]
        at, width = at + width, min(2 * width, most)


def _kept(
    task: SearchTask, found: RangeResult, some: Ints, seconds: Floats, nbytes: Floats, strategies: Ints
) -> tuple[Ints, RangeResult]:
    """Leave out of some places whose floors are above what was found, and count how many strategies those were."""
    full = len(found.best) == task.most
    late = full & (seconds[some] > (found.best.seconds[-1] if full else np.inf))
    slow = late & found.front.better(seconds[some], nbytes[some])
    left = RangeResult(Points.none(), Points.none(), slow=int(strategies[some[slow]].sum()))
    return some[~slow], found.and_(left, task.most)


def _priced(task: SearchTask, form: FlooredForm, frames: Ints, inner: Ints) -> RangeResult:
    """Price strategies, by frame and place inside, on every order of their frames."""
    which, orders, pairs = task.space.pairs(frames)
    inner = inner[which]
    every = task.space.columns(frames[which], orders, inner)
    places, back = distinct([which, *form.alike(every)])
    out = form(every[places])
    seconds, nbytes = out.seconds[back], out.peak_bytes[back]
    fits = nbytes <= task.memory
    points = Points(pairs * task.space.inside + inner, seconds, nbytes)
    good = points.at(np.flatnonzero(fits))
    least = float(nbytes[~fits].min()) if not fits.all() else float("inf")
    return RangeResult(good.best(task.most), good.front(), len(points), unfit=int((~fits).sum()), least=least)


Whole = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class _PointFields(msgspec.Struct):
    """`Points` in a file; a number is null where it is infinite, for which JSON has no word."""

    index: list[Whole]
    seconds: list[float | None]
    nbytes: list[float | None]

    def __post_init__(self) -> None:
        if not len(self.index) == len(self.seconds) == len(self.nbytes):
            raise ValueError(
                f"{len(self.index)} places, {len(self.seconds)} seconds and {len(self.nbytes)} nbytes; legal are alike"
            )

    def points(self) -> Points:
        """The points."""
        seconds, nbytes = (
            np.array([np.inf if x is None else x for x in each], dtype=np.float64)
            for each in (self.seconds, self.nbytes)
        )
        return Points(np.array(self.index, dtype=np.int64), seconds, nbytes)


class _FoundFields(msgspec.Struct):
    """`Found` in a file; `least` is null where nothing was too large."""

    best: _PointFields
    front: _PointFields
    priced: Whole
    slow: Whole
    large: Whole
    unfit: Whole
    least: float | None

    def found(self) -> RangeResult:
        """What was found."""
        least = float("inf") if self.least is None else self.least
        return RangeResult(
            self.best.points(), self.front.points(), self.priced, self.slow, self.large, self.unfit, least
        )


class _JournalFields(msgspec.Struct):
    """The file."""

    search: str
    ranges: dict[str, _FoundFields]


@dataclass(frozen=True, slots=True)
class Journal:
    """Ranges that are done, in a file that is replaced as a whole; it belongs to one search."""

    path: Path
    key: str

    @staticmethod
    def of(path: Path, task: SearchTask, ranges: list[tuple[int, int]]) -> Journal:
        """Return the journal of a search."""
        data = f"{task.words()} {ranges}".encode() + task.space.frames.tobytes() + task.space.starts.tobytes()
        return Journal(path, hashlib.sha256(data).hexdigest())

    def read(self) -> dict[str, RangeResult]:
        """Return what is done, by range; raises `ParseError` where the file is of another search, or none of ours."""
        if not self.path.exists():
            return {}
        try:
            data = decode_json(read_text(self.path), _JournalFields)
        except ParseError as error:
            raise ParseError(f"{line(self.path)} is no journal of a search: {line(error)}") from None
        if data.search != self.key:
            raise ParseError(f"{line(self.path)} is the journal of another search; legal is its own, or a new path")
        return {name: one.found() for name, one in data.ranges.items()}

    def write(self, done: dict[str, RangeResult]) -> None:
        """Replace the file."""
        data = {"search": self.key, "ranges": {name: _object(one) for name, one in done.items()}}
        write_atomic(self.path, json.dumps(data).encode())


def _object(one: RangeResult) -> dict[str, Any]:
    points = {k: {f: [None if x == np.inf else x for x in getattr(p, f).tolist()]
                  for f in ("index", "seconds", "nbytes")}
              for k, p in (("best", one.best), ("front", one.front))}  # fmt: skip
    least = one.least if np.isfinite(one.least) else None
    return points | {k: getattr(one, k) for k in ("priced", "slow", "large", "unfit")} | {"least": least}
