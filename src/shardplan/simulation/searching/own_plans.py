"""`OwnAnswer`: strategies with a schedule, or tables of layouts, of one's own, among those that were searched.

Neither has a closed form. So the strategies that are near are found by the closed form of the named ones, and then each
job is made, as it is said: `partition` checks it, its own account says what it holds, and its step is timed op by op.
What it is held against is timed so, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardplan.errors import Infeasible, ShardplanError, excerpt, near_text
from shardplan.notebook import notebook_html
from shardplan.simulation.jobs.job_timeline import simulate_job
from shardplan.simulation.searching.answer import DEGREES, Judge
from shardplan.simulation.searching.certifier import RefusedPlan, priced_job
from shardplan.simulation.searching.plans import RankedPlan, plan_text, ranked_object
from shardplan.simulation.searching.search import search
from shardplan.simulation.steps import derate
from shardplan.strategy.held_cuts import AXES
from shardplan.strategy.partition.order import RUN
from shardplan.strategy.partition.tables import Layouts
from shardplan.strategy.schedules import Schedule, check
from shardplan.strategy.strategy import Strategy

MOST_OWN = 4  # strategies with it that are made into jobs
PLAIN_STATE: Mapping[str, Any] = {"zero": 0, "fsdp": False}  # tables say how state is stored


@dataclass(frozen=True, slots=True)
class OwnParts:
    """What of a strategy is given: fields by name, a schedule, and tables; `called` is what they are called."""

    fields: Mapping[str, Any]
    schedule: Schedule | None = None
    layouts: Layouts | None = None
    called: str = ""

    @property
    def is_plain(self) -> bool:
        """Whether only fields are given, which a search takes."""
        return self.schedule is None and self.layouts is None


@dataclass(frozen=True, slots=True)
class OwnAnswer:
    """Strategies with what is one's own, the quickest first, and those of the answer; seconds are those op by op.

    `refused` has what is not legal with it, or does not fit, and why.
    """

    called: str
    plans: tuple[RankedPlan, ...]
    ours: tuple[RankedPlan, ...]
    refused: tuple[RefusedPlan, ...]

    _repr_html_ = notebook_html

    @property
    def place(self) -> int:
        """Which the quickest of one's own is among all, from 1."""
        return 1 + sum(one.seconds < self.plans[0].seconds for one in self.ours)

    def to_dict(self) -> dict[str, Any]:
        """Return it as an object of JSON."""
        refused = [{"strategy": plan_text(RankedPlan(r.strategy, 0.0, 0.0)), "why": r.why} for r in self.refused]
        lists = {"own": [_object(one) for one in self.plans], "ours": [_object(one) for one in self.ours]}
        return {"called": self.called, "place": self.place, "refused": refused} | lists


def _object(one: RankedPlan) -> dict[str, Any]:
    found = ranked_object(one)
    schedule = found["strategy"].get("schedule")
    return found | {"strategy": found["strategy"] | {"schedule": str(schedule)}, "text": plan_text(one)}


def judge_own(judge: Judge, own: OwnParts, batch: int, precision: str | None, ours: Sequence[RankedPlan]) -> OwnAnswer:
    """Make, check, certify and time strategies with a schedule or tables of one's own, and those of an answer.

    Args:
        judge: What certifies.
        own: What is given.
        batch: Sequences of a step.
        precision: Of the strategies.
        ours: Those of the answer.

    Raises `ShardplanError` where no strategy has so many ranks and microbatches, `Infeasible` where none is legal and
    fits.
    """
    certifier = judge.certifier.with_layouts(own.layouts)
    found: list[RankedPlan] = []
    for s in _near_strategies(judge, own, batch, precision):
        held = certifier.fits(s)
        if held is not None:
            found.append(RankedPlan(s, step_seconds(judge, s, own.layouts), held.nbytes))
    if not found:
        first = certifier.refused[0]
        why = f"{plan_text(RankedPlan(first.strategy, 0.0, 0.0))}: {first.why}"
        raise Infeasible(f"--fix: no strategy with {own.called} is legal and fits; the first, {why}")
    found.sort(key=lambda one: one.seconds)
    theirs = sorted((p._replace(seconds=step_seconds(judge, p.strategy)) for p in ours), key=lambda p: p.seconds)
    return OwnAnswer(own.called, tuple(found), tuple(theirs), tuple(certifier.refused))


def step_seconds(judge: Judge, strategy: Strategy, layouts: Layouts | None = None) -> float:
    """Return the seconds of the step of a strategy's job, op by op, on the machine as it delivers."""
    where = derate(judge.topology, judge.machine.parameters, strategy.software.attention)
    return simulate_job(priced_job(judge.model, strategy, where, layouts), where).seconds


def _near_strategies(judge: Judge, own: OwnParts, batch: int, precision: str | None) -> list[Strategy]:
    """The strategies that what is given leaves, of each degrees the quickest by the closed form, at most `MOST_OWN`."""
    fixed = dict(own.fields)
    if own.layouts is not None:
        fixed = {**PLAIN_STATE, **fixed}
    found: list[RankedPlan] = []
    for said in _searches(judge.topology.size, own.schedule, batch, fixed):
        try:
            result = search(judge.model, judge.topology, batch, certify=False, top=2 * MOST_OWN, fixed=said,
                            params=judge.machine.parameters, precision=precision)  # fmt: skip
        except ShardplanError:  # nothing is legal, or fits, with so many replicas
            continue
        found += result.candidates
    if not found:
        given = "".join(f", {name}={value}" for name, value in own.fields.items())
        sizes = (
            ""
            if own.schedule is None
            else f" of {len(own.schedule.ranks)} ranks and {own.schedule.microbatches} microbatches"
        )
        raise ShardplanError(
            f"--fix: no strategy of {judge.topology.size} devices and {batch} sequences{given} is legal with "
            f"{own.called}{sizes}: ranks divide the devices, and microbatches the sequences of a replica"
        )
    found.sort(key=lambda one: one.seconds)
    alike: dict[tuple[int, ...], Strategy] = {}
    for one in found:
        alike.setdefault(tuple(getattr(one.strategy, name) for name in DEGREES), one.strategy)
    chosen = list(alike.values())[:MOST_OWN]
    if own.schedule is None:
        return chosen
    return [replace(s, schedule=own.schedule, interleave=None) for s in chosen]


def _searches(devices: int, schedule: Schedule | None, batch: int, fixed: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What searches of named schedules are given: of a schedule of one's own its ranks, chunks and microbatches."""
    if schedule is None:
        yield fixed
        return
    ranks, chunks = len(schedule.ranks), max(schedule.owners.count(rank) for rank in range(len(schedule.ranks)))
    name = "interleaved" if chunks > 1 and schedule.microbatches % ranks == 0 else "1f1b"
    said = {**fixed, "pipeline": ranks, "schedule": name}
    said |= {"interleave": chunks} if name == "interleaved" else {}
    for data in range(1, devices // ranks + 1):
        if devices % (data * ranks) == 0 and batch % (data * schedule.microbatches) == 0:
            size = batch // (data * schedule.microbatches)
            if fixed.get("data", data) == data and fixed.get("microbatch", size) == size:
                yield {**said, "data": data, "microbatch": size}


def check_fixed(own: OwnParts) -> None:
    """Check a schedule, and the axes of tables, before anything is searched.

    Raises `ScheduleError` for a schedule that is not complete or whose ranks wait in a circle, `ShardplanError` where a
    field says otherwise than the schedule, and for an axis that no strategy has.
    """
    if own.layouts is not None:
        lines = (*own.layouts.stored, *own.layouts.held)
        axes = [axis for axis, _ in own.layouts.serve]
        axes += [a for one in lines for mine in (one.partial, *(cut for _, cut in one.dims)) for a in mine]
        for axis in axes:
            if axis not in AXES:
                near = near_text(axis, AXES)
                raise ShardplanError(
                    f"--fix: {own.called} has the axis {excerpt(axis)}{near}; legal are {', '.join(AXES)}"
                )
    if own.schedule is not None:
        check(own.schedule.filter_actions(lambda a: a.kind in RUN), messages="buffered")
        ranks = len(own.schedule.ranks)
        said = own.fields.get("pipeline", ranks)
        if said != ranks:
            raise ShardplanError(
                f"--fix: pipeline={said} with {own.called}, of {ranks} ranks; legal is pipeline={ranks}"
            )
