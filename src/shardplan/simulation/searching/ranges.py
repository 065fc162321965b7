"""A range of frames searched, alone: what an executor runs; and the journal of ranges that are done."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardplan.errors import ParseError, line
from shardplan.hardware.topology import Topology
from shardplan.plans.plan_file import write_atomic
from shardplan.simulation.closed.form import ClosedForm
from shardplan.simulation.closed.parameters import Parameters
from shardplan.simulation.searching.bounds import FlooredForm, FramedSpace, frame_floors
from shardplan.simulation.searching.front import Points
from shardplan.strategy.model import Model

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

    def form(self, model: Model | None = None) -> FlooredForm:
        """Return what prices."""
        return ClosedForm(model or self.model(), self.topology, self.parameters)

    def model(self) -> Model:
        """Load the model."""
        name, fields = self.load
        return Model.load(name, **dict(fields))

    def words(self) -> str:
        """Return what is searched, but for the space."""
        return repr((self.load, str(self.topology), self.parameters, self.most, self.prune))


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """Of a range: the best, the front, and how many strategies were priced, pruned and too large."""

    best: Points
    front: Points
    priced: int = 0
    slow: int = 0  # of frames whose floor is above what was found
    large: int = 0  # of frames whose least bytes are above the memory
    unfit: int = 0  # priced, and too large
    least: float = float("inf")  # bytes, of what is too large

    def and_(self, other: Found, most: int) -> Found:
        """Return both together."""
        return Found(
            self.best.and_(other.best).best(most),
            self.front.and_(other.front).front(),
            self.priced + other.priced,
            self.slow + other.slow,
            self.large + other.large,
            self.unfit + other.unfit,
            min(self.least, other.least),
        )


def searched(task: SearchTask, start: int, stop: int, form: FlooredForm | None = None) -> Found:
    """Search the frames from `start` to `stop`: exact for them, whatever else there is."""
    form = form or task.form()
    memory, frames = task.topology.device.memory, np.arange(start, stop)
    found = Found(Points.none(), Points.none())
    if not task.prune:
        for at in range(0, len(frames), BLOCK):
            found = found.and_(_priced(task, form, frames[at : at + BLOCK], memory), task.most)
        return found
    floors = [frame_floors(form, task.space, frames[at : at + 8 * BLOCK]) for at in range(0, len(frames), 8 * BLOCK)]
    seconds, nbytes = (np.concatenate([f[k] for f in floors]) for k in (0, 1))
    large = nbytes > memory
    least = float(nbytes[large].min()) if large.any() else float("inf")
    found = Found(found.best, found.front, large=int(large.sum()) * task.space.inside, least=least)
    order = np.flatnonzero(~large)[np.argsort(seconds[~large], kind="stable")]
    at, width = 0, FIRST
    while at < len(order):
        some = order[at : at + width]
        at, width = at + width, min(2 * width, BLOCK)
        full = len(found.best) == task.most
        late = full & (seconds[some] > (found.best.seconds[-1] if full else np.inf))
        slow = late & found.front.better(seconds[some], nbytes[some])
        keep = some[~slow]
        found = found.and_(Found(Points.none(), Points.none(), slow=int(slow.sum()) * task.space.inside), task.most)
        if len(keep):
            found = found.and_(_priced(task, form, frames[keep], memory), task.most)
    return found


def _priced(task: SearchTask, form: FlooredForm, frames: np.ndarray, memory: float) -> Found:
    """Every strategy of some frames."""
    inside = task.space.inside
    out = form(task.space.columns(frames, range(inside)))
    index = (frames[:, None] * inside + np.arange(inside)).reshape(-1)
    fits = out.peak_bytes <= memory
    points = Points(index, out.seconds, out.peak_bytes)
    good = points.at(np.flatnonzero(fits))
    least = float(out.peak_bytes[~fits].min()) if not fits.all() else float("inf")
    return Found(good.best(task.most), good.front(), len(index), unfit=int((~fits).sum()), least=least)


@dataclass(frozen=True, slots=True)
class Journal:
    """Ranges that are done, in a file that is replaced as a whole; it belongs to one search."""

    path: Path
    key: str

    @staticmethod
    def of(path: Path, task: SearchTask, ranges: list[tuple[int, int]]) -> Journal:
        """Return the journal of a search."""
        data = f"{task.words()} {ranges}".encode() + task.space.frames.tobytes()
        return Journal(path, hashlib.sha256(data).hexdigest())

    def read(self) -> dict[str, Found]:
        """Return what is done, by range; raises `ParseError` where the file is of another search, or none of ours."""
        if not self.path.exists():
            return {}
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            if data["search"] != self.key:
                raise ParseError(f"{line(self.path)} is the journal of another search; legal is its own, or a new path")
            return {name: _found(one) for name, one in data["ranges"].items()}
        except (ValueError, KeyError, TypeError) as error:
            raise ParseError(f"{line(self.path)} is no journal of a search: {error}") from None

    def write(self, done: dict[str, Found]) -> None:
        """Replace the file."""
        data = {"search": self.key, "ranges": {name: _object(one) for name, one in done.items()}}
        write_atomic(self.path, json.dumps(data).encode())


def _object(one: Found) -> dict[str, Any]:
    points = {k: {f: getattr(p, f).tolist() for f in ("index", "seconds", "nbytes")}
              for k, p in (("best", one.best), ("front", one.front))}  # fmt: skip
    least = one.least if np.isfinite(one.least) else None
    return points | {k: getattr(one, k) for k in ("priced", "slow", "large", "unfit")} | {"least": least}


def _found(data: dict[str, Any]) -> Found:
    points = [
        Points(np.array(data[k]["index"], dtype=np.int64), np.array(data[k]["seconds"]), np.array(data[k]["nbytes"]))
        for k in ("best", "front")
    ]
    least = float("inf") if data["least"] is None else float(data["least"])
    priced, slow, large, unfit = (int(data[k]) for k in ("priced", "slow", "large", "unfit"))
    return Found(points[0], points[1], priced, slow, large, unfit, least)
