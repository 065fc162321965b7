"""`step_gap`: why a measured step takes longer than the predicted one: by kind, what nothing hides, and who is late.

Devices of a measured timeline are ranks, which are the plan's device ids; each is held against the pipeline rank that
it belongs to. Kinds are as `read_kineto` tells them; what it cannot tell apart is one here too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from shardplan.core.pattern import Messages
from shardplan.errors import ShardplanError
from shardplan.notebook import notebook_html
from shardplan.simulation.jobs.job_timeline import JobTimeline
from shardplan.simulation.jobs.kineto import KINDS
from shardplan.simulation.jobs.messages import MESSAGES
from shardplan.simulation.jobs.spans import joined, length
from shardplan.simulation.jobs.timing import COMPUTE, OpCost
from shardplan.simulation.timeline import Timeline
from shardplan.simulation.trace import HOST

TOLD_APART = frozenset(kind for _, kind in KINDS)  # what names of kernels and operators tell
MESSAGE = "message"  # what goes from one device to another, whatever op it is of
OTHER = "other compute"
LATE = 0.02  # of the step: a device that is later than the median by more is a straggler


class KindGap(NamedTuple):
    """A kind of interval: seconds of a device in the step on either side, a mean over the devices measured."""

    kind: str
    predicted_seconds: float
    measured_seconds: float

    @property
    def gap(self) -> float:
        """What measured seconds are more."""
        return self.measured_seconds - self.predicted_seconds


class Straggler(NamedTuple):
    """A device whose own computing takes longer than the median's, by so many seconds of the step."""

    device: int
    seconds: float
    behind_seconds: float


@dataclass(frozen=True, slots=True)
class StepGap:
    """Both steps, the gap by kind, what of communication is exposed, idle time, and who is late."""

    predicted_seconds: float
    measured_seconds: float
    devices: tuple[int, ...]
    kinds: tuple[KindGap, ...]
    exposed: tuple[float, float]  # predicted, measured; seconds of a device
    idle: tuple[float, float]
    stragglers: tuple[Straggler, ...]

    _repr_html_ = notebook_html

    def to_dict(self) -> dict[str, Any]:
        """Return it as an object of JSON."""
        kinds = [one._asdict() | {"gap": one.gap} for one in self.kinds]
        names = ("predicted_seconds", "measured_seconds")
        pairs = {name: dict(zip(("predicted", "measured"), getattr(self, name), strict=True))
                 for name in ("exposed", "idle")}  # fmt: skip
        late = [one._asdict() for one in self.stragglers]
        return {n: getattr(self, n) for n in names} | pairs | {
            "devices": list(self.devices), "kinds": kinds, "stragglers": late}  # fmt: skip


def step_gap(predicted: JobTimeline, measured: Timeline) -> StepGap:
    """Return the gap between a predicted step and a measured one.

    Raises `ShardplanError` where nothing was measured, and for a measured device that the job has not.
    """
    stage_of = {d: k for k, mesh in enumerate(predicted.job.programs.meshes) for d in mesh.devices}
    devices = tuple(sorted({i.device for i in measured.intervals}))
    if not devices:
        raise ShardplanError("why: nothing was measured; legal are traces with kernels or operators")
    if strange := [d for d in devices if d not in stage_of]:
        raise ShardplanError(
            f"why: rank {strange[0]} was measured, and the plan has devices {min(stage_of)} to {max(stage_of)}"
        )
    kinds: tuple[dict[str, float], dict[str, float]] = ({}, {})
    bare, idle = [0.0, 0.0], [0.0, 0.0]
    own: dict[int, float] = {}
    known: dict[int, tuple[dict[str, float], float, float]] = {}
    for device in devices:
        rank = predicted.job.schedule.owners[stage_of[device]]
        if rank not in known:
            known[rank] = _of_rank(predicted, rank)
        mine = [i for i in measured.intervals if i.device == device and i.stream != HOST]
        spans = [(i.kind, i.start, i.end, i.stream.startswith("comm")) for i in mine]
        told = _totals((kind, b - a, talks) for kind, a, b, talks in spans)
        computed = joined((a, b) for _, a, b, talks in spans if not talks)
        busy = length(joined((a, b) for _, a, b, _ in spans))
        own[device] = length(computed)
        sides = (known[rank], (told, busy - own[device], measured.seconds - busy))
        for k, (totals, exposed, rest) in enumerate(sides):
            for kind, seconds in totals.items():
                kinds[k][kind] = kinds[k].get(kind, 0.0) + seconds / len(devices)
            bare[k] += exposed / len(devices)
            idle[k] += rest / len(devices)
    rows = [KindGap(kind, kinds[0].get(kind, 0.0), kinds[1].get(kind, 0.0)) for kind in {**kinds[0], **kinds[1]}]
    rows.sort(key=lambda row: -abs(row.gap))
    middle = median(own.values())
    late = [Straggler(d, s, s - middle) for d, s in own.items() if s - middle > LATE * measured.seconds]
    late.sort(key=lambda one: -one.behind_seconds)
    return StepGap(predicted.seconds, measured.seconds, devices, tuple(rows), (bare[0], bare[1]), (idle[0], idle[1]),
                   tuple(late))  # fmt: skip


def _of_rank(line: JobTimeline, rank: int) -> tuple[dict[str, float], float, float]:
    """What is predicted of a pipeline rank: seconds by kind, exposed ones, and idle ones."""
    spans = [(_kind_of(op.op.cost), op.start, op.end, op.op.cost.stream != COMPUTE)
             for i in range(len(line.swept.ranks[rank].actions)) for op in line.opened.ops(rank, i)]  # fmt: skip
    totals = _totals((kind, b - a, talks) for kind, a, b, talks in spans)
    exposed = line.exposed_of(rank)
    waited = exposed.get(MESSAGES, 0.0)
    if waited:
        totals[MESSAGE] = totals.get(MESSAGE, 0.0) + waited
    busy = length(joined((a, b) for _, a, b, _ in spans))
    return totals, sum(exposed.values()), line.seconds - busy


def _kind_of(cost: OpCost) -> str:
    """What a profiler would call an op: of messages, which are of no group, one kind."""
    return MESSAGE if isinstance(cost.pattern, Messages) else cost.kind


def _totals(spans: Iterable[tuple[str, float, bool]]) -> dict[str, float]:
    """Seconds by kind, as both sides call them."""
    found: dict[str, float] = {}
    for kind, seconds, talks in spans:
        name = kind if talks or kind in TOLD_APART else OTHER
        found[name] = found.get(name, 0.0) + seconds
    return found
