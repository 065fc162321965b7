"""`search`: the best strategies of a model on a topology, and what was left out for which reason."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np

from shardplan.core import validation
from shardplan.errors import Infeasible, ShardplanError, excerpt
from shardplan.hardware.topology import Topology, topology_of
from shardplan.hardware.units import format_bytes, format_seconds
from shardplan.notebook import notebook_html
from shardplan.simulation.closed.machines import of_machine
from shardplan.simulation.closed.parameters import Parameters
from shardplan.simulation.inference.requests import OBJECTIVES, Requests
from shardplan.simulation.inference.serving_plans import ServedPlan, ServingResult, ServingTask, served_plans
from shardplan.simulation.inference.space import ServingSpace
from shardplan.simulation.searching.bounds import FlooredForm
from shardplan.simulation.searching.certifier import ROOM, Certifier, RefusedPlan, certified_first
from shardplan.simulation.searching.front import Points
from shardplan.simulation.searching.plans import PrunedClass, RankedPlan, plan_text, ranked_object
from shardplan.simulation.searching.ranges import Journal, RangeResult, SearchTask, searched
from shardplan.simulation.searching.sensitivity import sensitivity
from shardplan.simulation.searching.space import SCHEDULES, StrategySpace
from shardplan.strategy.model import Model
from shardplan.strategy.strategy_text import strategy_text

Ints = np.ndarray
SPARE = 20  # strategies more than are asked for, for those that certification refuses
RANGE = 65536  # frames that a worker searches at a time


@dataclass(frozen=True, slots=True, eq=False)
class SearchResult:
    """The best strategies, those that nothing is better than in seconds and bytes, and how all others were told.

    `candidates` and `front` are what the closed form lets through; of them `ranked` and `pareto` are certified to fit
    when they are asked for, and what is not is in `refused`.
    """

    candidates: tuple[RankedPlan, ...]
    front: tuple[RankedPlan, ...]
    top: int
    certifier: Certifier | None
    pruned: tuple[PrunedClass, ...]
    counted: int  # of the space
    priced: int
    again: Callable[[Topology], RankedPlan]
    frames_left: int = 0  # that were not searched, as it was interrupted

    _repr_html_ = notebook_html

    @property
    def best(self) -> RankedPlan:
        """The first of the ranked; raises `Infeasible` where none is certified to fit."""
        for one in self._certified(self.candidates, 1):
            return one
        why = f"the first: {self.refused[0].why}" if self.refused else "each needs more memory than a device has"
        raise Infeasible(f"search: none of the {len(self.candidates)} quickest strategies fits; {why}")

    @property
    def ranked(self) -> tuple[RankedPlan, ...]:
        """The quickest strategies that fit."""
        return self._certified(self.candidates, self.top)

    @property
    def pareto(self) -> tuple[RankedPlan, ...]:
        """Those that fit and that nothing is better than in seconds and bytes, the quickest first."""
        found = self._certified(self.front, len(self.front))
        least = np.minimum.accumulate([np.inf, *(one.peak_bytes for one in found)])[:-1]
        return tuple(one for one, n in zip(found, least, strict=True) if one.peak_bytes < n)

    @property
    def refused(self) -> tuple[RefusedPlan, ...]:
        """What the closed form says fits and certification has refused so far; each is a fault of the closed form."""
        return tuple(self.certifier.refused) if self.certifier is not None else ()

    def _certified(self, plans: tuple[RankedPlan, ...], most: int) -> tuple[RankedPlan, ...]:
        if self.certifier is None:
            return plans[:most]
        found = certified_first(self.certifier, (one.strategy for one in plans), most)
        return tuple(plans[k]._replace(peak_bytes=peak.nbytes) for k, peak in found)

    def sensitivity(self, topology: Topology, share: float = 0.2) -> dict[str, tuple[RankedPlan, RankedPlan]]:
        """Return the best on the topology with a part of it slower, and faster, by a share: searched again each."""
        return sensitivity(topology, self.again, share)

    def to_dict(self) -> dict[str, Any]:
        """Return it as one object of JSON."""
        return {
            "best": ranked_object(self.best),
            "ranked": [ranked_object(one) for one in self.ranked],
            "pareto": [ranked_object(one) for one in self.pareto],
        } | self.space_object()

    def space_object(self) -> dict[str, Any]:
        """Return what became of the space, as one object of JSON; certifies nothing."""
        return {
            "pruned": [one._asdict() for one in self.pruned],
            "refused": [{"strategy": strategy_text(one.strategy), "why": one.why} for one in self.refused],
            "counted": self.counted,
            "priced": self.priced,
            "frames_left": self.frames_left,
        }

    def __str__(self) -> str:
        """Return the ranked, a line each, and what was left out."""
        lines = [
            f"{k:>3}  {format_seconds(p.seconds):>10}  {format_bytes(p.peak_bytes):>10}  {plan_text(p)}"
            for k, p in enumerate(self.ranked, 1)
        ]
        lines.append(f"{self.counted:,} strategies, {self.priced:,} priced; {len(self.front)} on the front")
        lines += [f"{one.strategies:,} left out: {one.rule}" for one in self.pruned if one.strategies]
        lines += [f"refused by its certificate: {strategy_text(one.strategy)}: {one.why}" for one in self.refused]
        return "\n".join(lines)


@overload
def search(
    model: Model,
    topology: Topology | str,
    global_batch: int,
    *,
    objective: Literal["step"] = "step",
    prune: bool = True,
    executor: Executor | None = None,
    resume: str | os.PathLike[str] | None = None,
    top: int = 10,
    schedules: tuple[str, ...] = SCHEDULES,
    attention: str | None = None,
    placements: bool = False,
    fidelity: str = "closed",
    params: Parameters | None = None,
    done: Callable[[int, int], None] | None = None,
    certify: bool = True,
    precision: str | None = None,
    fixed: Mapping[str, Any] | None = None,
    partial: bool = False,
) -> SearchResult: ...
@overload
def search(
    model: Model,
    topology: Topology | str,
    *,
    objective: Literal["latency", "tokens"],
    prompt: int,
    output: int,
    concurrency: int,
    prune: bool = True,
    executor: Executor | None = None,
    resume: str | os.PathLike[str] | None = None,
    top: int = 10,
    attention: str | None = None,
    params: Parameters | None = None,
    done: Callable[[int, int], None] | None = None,
) -> ServingResult: ...


def search(
    model: Model,
    topology: Topology | str,
    global_batch: int | None = None,
    *,
    objective: str = "step",
    prompt: int | None = None,
    output: int | None = None,
    concurrency: int | None = None,
    prune: bool = True,
    executor: Executor | None = None,
    resume: str | os.PathLike[str] | None = None,
    top: int = 10,
    schedules: tuple[str, ...] = SCHEDULES,
    attention: str | None = None,
    placements: bool = False,
    fidelity: str = "closed",
    params: Parameters | None = None,
    done: Callable[[int, int], None] | None = None,
    certify: bool = True,
    precision: str | None = None,
    fixed: Mapping[str, Any] | None = None,
    partial: bool = False,
) -> SearchResult | ServingResult:
    """Find the best strategies: exact over the space, whatever is pruned.

    The space is that of `StrategySpace.of` for training steps, of `ServingSpace.of` for requests.

    Args:
        model: One that `Model.load` gives, in the precision in which it trains, or serves.
        topology: On what; all of its devices are used.
        global_batch: Sequences of a training step.
        objective: What is made least: the seconds of a training `step`; or of a model that serves the `latency` of a
            request, or the seconds for which all replicas make a token, that is most `tokens` a second.
        prompt: Of a request its tokens.
        output: Of its answer.
        concurrency: Requests in flight in each replica.
        prune: Whether frames are left out whose floor in seconds is above the best few and whose floors are both above
            a strategy that was found; the result is the same without.
        executor: Any of `concurrent.futures`, for ranges of the space; the result is the same.
        resume: A file in which ranges that are done are kept; a search that was ended goes on with it.
        top: How many are ranked.
        schedules: Those that are tried, of a training step.
        attention: The class of attention's kernel; by default `flash2`.
        placements: Whether axes also lie on the hardware in other orders than that of a strategy's devices.
        fidelity: Of a training step: `closed`, or `events` of its stages, which takes longer.
        params: Of the machine; by default those that ship.
        done: Called with frames searched, and all of them.
        certify: Of a training step: whether strategies that are returned are certified to fit, by the account of the
            job that each comes to; else the closed form alone says so.
        precision: Of a training step: by default the model's; `nvfp4` is predicted, and certified in fp8.
        fixed: Of a training step: fields of strategies by name, that all have as given; the rest is found.
        partial: Of a training step: whether an interrupt (Ctrl-C) ends it with the best of what was searched, where
            there is any; `frames_left` says so.

    Raises:
        Infeasible: No strategy fits into the memory of a device; says how many bytes are needed at least.
        ShardplanError: Values of other kinds; no legal strategy; a model that serves without a cache.
        ParseError: `resume` is the journal of another search.

    >>> model = Model.load("gpt", layers=4, hidden=256, heads=4, seq=128, vocab=1000, precision="bf16")
    >>> topology = Topology.load("dgx-a100-80g", nodes=1)
    >>> found = search(model, topology, 16)
    >>> found.best == found.pareto[0], found.priced < found.counted
    (True, True)
    >>> search(model, topology, objective="tokens", prompt=96, output=32, concurrency=8).best.strategy.data
    8
    """
    if not isinstance(model, Model):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ShardplanError(f"search: the model is {excerpt(model)}; legal is a Model")
    where = topology_of("the topology", topology)
    validation.whole_number("search: top", top, 1, kind=ShardplanError)
    validation.flag("search: prune", prune, ShardplanError)
    validation.flag("search: placements", placements, ShardplanError)
    validation.flag("search: certify", certify, ShardplanError)
    validation.choice("search: objective", objective, OBJECTIVES, ShardplanError)
    said = {"prompt": prompt, "output": output, "concurrency": concurrency}
    load = model.name, tuple(sorted(model.fields.items()))
    machine = params or of_machine(where)
    if objective != "step":
        if global_batch is not None:
            raise ShardplanError(f"search: global_batch with objective={objective!r}; legal are {', '.join(said)}")
        if placements or fidelity != "closed" or not certify or precision or fixed:
            raise ShardplanError(
                f"search: placements, fidelity, certify, precision, fixed with objective={objective!r}; legal is 'step'"
            )
        requests = Requests(**{name: 0 if n is None else n for name, n in said.items()})
        space = ServingSpace.of(model, where.size, requests, attention)
        task = ServingTask(load, where, machine, space, top, prune, "closed", requests, objective)
        serving = task.form(model)
        found = _run(task, serving, executor, resume, done)

        def served(other: Topology) -> ServedPlan:
            changed = serving.on(other, machine)
            return served_plans(task, changed, _best(task, other, changed))[0]

        plans = served_plans(task, serving, found.best), served_plans(task, serving, found.front)
        return ServingResult(requests, objective, *plans, _pruned(task, found), space.count, found.priced, served)
    if named := [name for name, n in said.items() if n is not None]:
        raise ShardplanError(f"search: {named[0]} with objective='step'; legal is global_batch")
    batch = validation.whole_number("search: global_batch", global_batch, 1, kind=ShardplanError)
    precision = precision or model.fields.get("precision")
    steps = StrategySpace.of(model, where.size, batch, schedules, precision, attention, placements, fixed)
    validation.choice("search: fidelity", fidelity, ("closed", "events"), ShardplanError)
    certifier = Certifier(model, machine, where.device.memory) if certify else None
    most, room = (top, 1.0) if certifier is None else (top + SPARE, ROOM)
    said = repr((precision, sorted((fixed or {}).items())))
    one = SearchTask(load, where, machine, steps, most, prune, fidelity, fixed=said, room=room)
    form = one.form(model)
    found = _run(one, form, executor, resume, done, partial)

    def again(other: Topology) -> RankedPlan:
        plans = _plans(steps, _best(one, other, form.on(other, machine), 1 + most - top))
        judge = None if certifier is None else certifier.on(other.device.memory)
        return SearchResult(plans, (), 1, judge, (), 0, 0, again).best

    plans, front = _plans(steps, found.best), _plans(steps, found.front)
    pruned = _pruned(one, found)
    result = SearchResult(plans, front, top, certifier, pruned, steps.count, found.priced, again, found.left)
    assert result.best  # raises where none is certified
    return result


def _ranges(task: SearchTask) -> list[tuple[int, int]]:
    frames = len(task.space.frames)
    return [(at, min(at + RANGE, frames)) for at in range(0, frames, RANGE)]


def _run(
    task: SearchTask,
    form: FlooredForm,
    executor: Executor | None,
    resume: str | os.PathLike[str] | None,
    done: Callable[[int, int], None] | None,
    partial: bool = False,
) -> RangeResult:
    """Search all ranges, here or on an executor; raises `Infeasible` where nothing fits."""
    frames, ranges = len(task.space.frames), _ranges(task)
    journal = None if resume is None else Journal.of(Path(resume), task, ranges)
    known = {} if journal is None else journal.read()
    finished = 0

    def keep(span: tuple[int, int], found: RangeResult) -> None:
        nonlocal finished
        known[f"{span[0]}-{span[1]}"] = found
        finished += span[1] - span[0]
        if journal is not None:
            journal.write(known)
        if done is not None:
            done(finished, frames)

    left = [span for span in ranges if f"{span[0]}-{span[1]}" not in known]
    finished = frames - sum(stop - start for start, stop in left)
    total = begun = RangeResult(Points.none(), Points.none())
    now = 0

    def tell(count: int, found: RangeResult) -> None:
        nonlocal now, begun
        now, begun = count, found
        if done is not None:
            done(finished + count, frames)

    try:
        if executor is None:
            for span in left:
                found = searched(task, *span, form, tell)
                now, begun = 0, total
                keep(span, found)
        else:
            waiting = {executor.submit(searched, task, *span): span for span in left}
            for future in as_completed(waiting):
                keep(waiting[future], future.result())
    except KeyboardInterrupt:
        if not partial or (not len(begun.best) and not any(len(one.best) for one in known.values())):
            raise
        total = replace(total.and_(begun, task.most), left=frames - finished - now)
    for one in known.values():
        total = total.and_(one, task.most)
    if not len(total.best):
        memory, needed = (format_bytes(n) for n in (task.topology.device.memory, total.least))
        raise Infeasible(
            f"search: none of {task.space.count:,} strategies of {task.load[0]} fits into {memory} a device; the "
            f"smallest needs {needed}"
        )
    return total


def _best(task: SearchTask, topology: Topology, form: FlooredForm, most: int = 1) -> Points:
    """The best few on another topology, for which the form is."""
    changed = replace(task, topology=topology, most=most)
    found = RangeResult(Points.none(), Points.none())
    for span in _ranges(task):
        found = found.and_(searched(changed, *span, form), most)
    return found.best


def _pruned(task: SearchTask, total: RangeResult) -> tuple[PrunedClass, ...]:
    memory = format_bytes(task.topology.device.memory)
    return (
        PrunedClass(f"need more than {memory} at least", total.large),
        PrunedClass("cannot be among the best nor on the front", total.slow),
        PrunedClass(f"priced, and need more than {memory}", total.unfit),
        PrunedClass("say what does nothing", task.space.idle),
    )


def _plans(space: StrategySpace, points: Points) -> tuple[RankedPlan, ...]:
    rows = zip(points.index.tolist(), points.seconds.tolist(), points.nbytes.tolist(), strict=True)
    found = ((space.one(k), seconds, nbytes) for k, seconds, nbytes in rows)
    return tuple(RankedPlan(c.strategy(0), seconds, nbytes, c.order(0)) for c, seconds, nbytes in found)
