"""`search`: the best strategies of a model on a topology, and what was left out for which reason."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Executor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardplan.core import border
from shardplan.errors import Infeasible, ShardplanError, shown
from shardplan.hardware.topology import Topology, topology_of
from shardplan.hardware.units import format_bytes, format_seconds
from shardplan.simulation.closed.configurations import ORDERS
from shardplan.simulation.closed.machines import of_machine
from shardplan.simulation.closed.parameters import Parameters
from shardplan.simulation.searching.front import Points
from shardplan.simulation.searching.ranges import Found, Journal, SearchTask, searched
from shardplan.simulation.searching.space import SCHEDULES, StrategySpace
from shardplan.strategy.model import Model
from shardplan.strategy.strategy import Strategy
from shardplan.strategy.strategy_text import strategy_text

Ints = np.ndarray
RANGE = 65536  # frames that a worker searches at a time


class RankedPlan(NamedTuple):
    """A strategy, its seconds a step, its peak bytes, and how its axes lie on the hardware, outermost first."""

    strategy: Strategy
    seconds: float
    peak_bytes: float
    order: tuple[str, ...] = ORDERS[0]

    def device_mesh(self) -> Ints:
        """Return ids of the topology, int64 [pipeline, data, context, tensor]: who has which place of the strategy.

        Ids count from the innermost level; those of a stage are in the order of the strategy's own devices.

        >>> one = RankedPlan(Strategy(data=2, tensor=2), 1.0, 1.0, ("tensor", "pipeline", "data", "context"))
        >>> one.device_mesh()[0, :, 0].tolist()
        [[0, 2], [1, 3]]
        """
        sizes = [getattr(self.strategy, block) for block in self.order]
        ids = np.arange(self.strategy.devices).reshape(sizes)
        return ids.transpose([self.order.index(block) for block in ORDERS[0]])


class PrunedClass(NamedTuple):
    """How many strategies were left out, and why."""

    rule: str
    strategies: int


@dataclass(frozen=True, slots=True, eq=False)
class SearchResult:
    """The best strategies, those that nothing is better than in seconds and bytes, and how all others were told."""

    ranked: tuple[RankedPlan, ...]
    pareto: tuple[RankedPlan, ...]
    pruned: tuple[PrunedClass, ...]
    counted: int  # of the space
    priced: int
    again: Callable[[Topology], RankedPlan]

    @property
    def best(self) -> RankedPlan:
        """The first of the ranked."""
        return self.ranked[0]

    def sensitivity(self, topology: Topology, share: float = 0.2) -> dict[str, tuple[RankedPlan, RankedPlan]]:
        """Return the best on the topology with a part of it slower, and faster, by a share: searched again each."""
        found: dict[str, tuple[RankedPlan, RankedPlan]] = {}
        for name, change in _parts(topology).items():
            found[name] = self.again(change(1 - share)), self.again(change(1 + share))
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return it as one object of JSON."""
        return {
            "best": _plan_object(self.best),
            "ranked": [_plan_object(one) for one in self.ranked],
            "pareto": [_plan_object(one) for one in self.pareto],
            "pruned": [one._asdict() for one in self.pruned],
            "counted": self.counted,
            "priced": self.priced,
        }

    def __str__(self) -> str:
        """Return the ranked, a line each, and what was left out."""
        lines = [
            f"{k:>3}  {format_seconds(p.seconds):>10}  {format_bytes(p.peak_bytes):>10}  {plan_text(p)}"
            for k, p in enumerate(self.ranked, 1)
        ]
        lines.append(f"{self.counted:,} strategies, {self.priced:,} priced; {len(self.pareto)} on the front")
        lines += [f"{one.strategies:,} left out: {one.rule}" for one in self.pruned if one.strategies]
        return "\n".join(lines)


def plan_text(one: RankedPlan) -> str:
    """Return a strategy and, where it is not that of its devices, the order of its axes on the hardware."""
    sizes = ((block, getattr(one.strategy, block)) for block in one.order)
    alive = [block for block, n in sizes if n > 1]
    usual = [block for block in ORDERS[0] if block in alive]
    return strategy_text(one.strategy) + (f" order={','.join(alive)}" if alive != usual else "")


def _plan_object(one: RankedPlan) -> dict[str, Any]:
    names = Strategy.__dataclass_fields__
    said = {name: getattr(one.strategy, name) for name in names if getattr(one.strategy, name) is not None}
    return {"strategy": said, "seconds": one.seconds, "peak_bytes": one.peak_bytes, "order": list(one.order)}


def search(
    model: Model,
    topology: Topology | str,
    global_batch: int,
    *,
    prune: bool = True,
    executor: Executor | None = None,
    resume: str | os.PathLike[str] | None = None,
    top: int = 10,
    schedules: tuple[str, ...] = SCHEDULES,
    attention: str | None = None,
    placements: bool = False,
    params: Parameters | None = None,
    done: Callable[[int, int], None] | None = None,
) -> SearchResult:
    """Find the best strategies at the closed form: exact over the space (see `StrategySpace.of`), whatever is pruned.

    Args:
        model: One that `Model.load` gives, in the precision in which it trains.
        topology: On what; all of its devices are used.
        global_batch: Sequences of a step.
        prune: Whether frames are left out whose floor in seconds is above the best few and whose floors are both above
            a strategy that was found; the result is the same without.
        executor: Any of `concurrent.futures`, for ranges of the space; the result is the same.
        resume: A file in which ranges that are done are kept; a search that was ended goes on with it.
        top: How many are ranked.
        schedules: Those that are tried.
        attention: The class of attention's kernel; by default `flash2`.
        placements: Whether axes also lie on the hardware in other orders than that of a strategy's devices.
        params: Of the machine; by default those that ship.
        done: Called with frames searched, and all of them.

    Raises:
        Infeasible: No strategy fits into the memory of a device; says how many bytes are needed at least.
        ShardplanError: Values of other kinds; no legal strategy.
        ParseError: `resume` is the journal of another search.

    >>> model = Model.load("gpt", layers=4, hidden=256, heads=4, seq=128, vocab=1000, precision="bf16")
    >>> found = search(model, Topology.load("dgx-a100-80g", nodes=1), 16)
    >>> found.best == found.pareto[0], found.priced < found.counted
    (True, True)
    """
    if not isinstance(model, Model):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ShardplanError(f"search: the model is {shown(model)}; legal is a Model")
    where = topology_of("the topology", topology)
    border.whole("search: top", top, 1, kind=ShardplanError)
    border.flag("search: prune", prune, ShardplanError)
    border.flag("search: placements", placements, ShardplanError)
    precision = model.fields.get("precision")
    space = StrategySpace.of(model, where.size, global_batch, schedules, precision, attention, placements)
    load = model.name, tuple(sorted(model.fields.items()))
    task = SearchTask(load, where, params or of_machine(where.name), space, top, prune)
    frames = len(space.frames)
    ranges = [(at, min(at + RANGE, frames)) for at in range(0, frames, RANGE)]
    journal = None if resume is None else Journal.of(Path(resume), task, ranges)
    known = {} if journal is None else journal.read()
    finished = 0

    def keep(span: tuple[int, int], found: Found) -> None:
        nonlocal finished
        known[f"{span[0]}-{span[1]}"] = found
        finished += span[1] - span[0]
        if journal is not None:
            journal.write(known)
        if done is not None:
            done(finished, frames)

    left = [span for span in ranges if f"{span[0]}-{span[1]}" not in known]
    finished = frames - sum(stop - start for start, stop in left)
    if executor is None:
        form = task.form(model)
        for span in left:
            keep(span, searched(task, *span, form))
    else:
        waiting = {executor.submit(searched, task, *span): span for span in left}
        for future in as_completed(waiting):
            keep(waiting[future], future.result())
    total = Found(Points.none(), Points.none())
    for start, stop in ranges:
        total = total.and_(known[f"{start}-{stop}"], top)
    if not len(total.best):
        needed = format_bytes(total.least)
        raise Infeasible(
            f"search: none of {space.count:,} strategies of {model.name} fits into {format_bytes(where.device.memory)} "
            f"a device; the smallest needs {needed}"
        )
    memory = format_bytes(where.device.memory)
    pruned = (
        PrunedClass(f"need more than {memory} at least", total.large),
        PrunedClass("cannot be among the best nor on the front", total.slow),
        PrunedClass(f"priced, and need more than {memory}", total.unfit),
    )

    def again(other: Topology) -> RankedPlan:
        changed = replace(task, topology=other, most=1)
        found = Found(Points.none(), Points.none())
        for span in ranges:
            found = found.and_(searched(changed, *span, changed.form(model)), 1)
        return _plans(changed.space, found.best)[0]

    return SearchResult(_plans(space, total.best), _plans(space, total.front), pruned, space.count, total.priced, again)


def _plans(space: StrategySpace, points: Points) -> tuple[RankedPlan, ...]:
    rows = zip(points.index.tolist(), points.seconds.tolist(), points.nbytes.tolist(), strict=True)
    found = ((space.one(k), seconds, nbytes) for k, seconds, nbytes in rows)
    return tuple(RankedPlan(c.strategy(0), seconds, nbytes, c.order(0)) for c, seconds, nbytes in found)


def _parts(topology: Topology) -> dict[str, Callable[[float], Topology]]:
    """What of a topology may be slower or faster."""
    device = topology.device

    def level(k: int) -> Callable[[float], Topology]:
        def change(times: float) -> Topology:
            levels = list(topology.levels)
            levels[k] = replace(levels[k], bandwidth=levels[k].bandwidth * times)
            return replace(topology, levels=tuple(levels))

        return change

    found = {one.name: level(k) for k, one in enumerate(topology.levels)}
    found["flops"] = lambda times: replace(
        topology, device=replace(device, flops=tuple((d, f * times) for d, f in device.flops))
    )
    found["memory_bandwidth"] = lambda times: replace(
        topology, device=replace(device, memory_bandwidth=device.memory_bandwidth * times)
    )
    if np.isfinite(device.memory):
        found["memory"] = lambda times: replace(topology, device=replace(device, memory=device.memory * times))
    return found
