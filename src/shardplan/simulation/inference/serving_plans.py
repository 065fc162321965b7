"""What a search for strategies that serve is given, and what it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardplan.hardware.topology import Topology
from shardplan.hardware.units import format_bytes, format_seconds
from shardplan.notebook import notebook_html
from shardplan.simulation.closed.configurations import Configurations
from shardplan.simulation.inference.form import RequestForm
from shardplan.simulation.inference.requests import Requests
from shardplan.simulation.searching.front import Points
from shardplan.simulation.searching.plans import PrunedClass, plan_object
from shardplan.simulation.searching.ranges import SearchTask
from shardplan.simulation.searching.sensitivity import sensitivity
from shardplan.strategy.model import Model
from shardplan.strategy.strategy import Strategy
from shardplan.strategy.strategy_text import strategy_text

# The means of benchmarks/results/request_accuracy.json, where each source counts once.
COMPARED = (
    "beside 166 published requests of 5 sources (16 bits, A100 to H200) seconds are 15 % off in the mean, "
    "the worst 55 %"
)


@dataclass(frozen=True, slots=True, eq=False)
class ServingTask(SearchTask):
    """A search for what serves these requests with the least of an objective."""

    requests: Requests
    objective: str

    def form(self, model: Model | None = None) -> RequestForm:
        """Return what prices."""
        return RequestForm.of(model or self.model(), self.topology, self.parameters, self.requests, self.objective)

    def words(self) -> str:
        """Return what is searched, but for the space."""
        return f"{SearchTask.words(self)} {self.requests} {self.objective}"


class ServedPlan(NamedTuple):
    """A strategy that serves: what was made least, in `seconds` (of a request, or for a token of all), and the rest."""

    strategy: Strategy
    seconds: float
    peak_bytes: float
    first_token: float
    token: float
    latency: float
    tokens_per_second: float
    cache_bytes: float


def served_plans(task: ServingTask, form: RequestForm, points: Points) -> tuple[ServedPlan, ...]:
    """Return the strategies at places of the space, with all that their requests take."""
    if not len(points):
        return ()
    strategies = [task.space.one(k).strategy(0) for k in points.index.tolist()]
    out = form.priced(Configurations.of(strategies))
    columns = (points.seconds, points.nbytes, out.first_token, out.token, out.latency, out.tokens_per_second)
    rows = zip(strategies, *(x.tolist() for x in (*columns, out.cache_bytes)), strict=True)
    return tuple(ServedPlan(*row) for row in rows)


@dataclass(frozen=True, slots=True, eq=False)
class ServingResult:
    """The best strategies that serve, those that nothing is better than in seconds and bytes, and how others were told.

    `seconds` of a plan are what the objective makes least: those of a request (`latency`), or the inverse of all
    replicas' tokens a second (`tokens`).
    """

    requests: Requests
    objective: str
    ranked: tuple[ServedPlan, ...]
    pareto: tuple[ServedPlan, ...]
    pruned: tuple[PrunedClass, ...]
    counted: int  # of the space
    priced: int
    again: Callable[[Topology], ServedPlan]

    _repr_html_ = notebook_html

    @property
    def best(self) -> ServedPlan:
        """The first of the ranked."""
        return self.ranked[0]

    def sensitivity(self, topology: Topology, share: float = 0.2) -> dict[str, tuple[ServedPlan, ServedPlan]]:
        """Return the best on the topology with a part of it slower, and faster, by a share: searched again each."""
        return sensitivity(topology, self.again, share)

    def to_dict(self) -> dict[str, Any]:
        """Return it as one object of JSON."""
        return {
            "objective": self.objective,
            "requests": {name: getattr(self.requests, name) for name in ("prompt", "output", "concurrency")},
            "best": _served_object(self.best),
            "ranked": [_served_object(one) for one in self.ranked],
            "pareto": [_served_object(one) for one in self.pareto],
            "pruned": [one._asdict() for one in self.pruned],
            "counted": self.counted,
            "priced": self.priced,
        }

    def __str__(self) -> str:
        """Return the ranked, a line each, and what was left out."""
        t = self.requests
        lines = [f"prompt {t.prompt}, output {t.output}, {t.concurrency} in flight a replica"]
        lines.append("     first token   each token      request  tokens/s       peak  strategy")
        lines += [
            f"{k:>3}  {format_seconds(p.first_token):>11}  {format_seconds(p.token):>11}  "
            f"{format_seconds(p.latency):>11}  {p.tokens_per_second:>8,.0f}  {format_bytes(p.peak_bytes):>9}  "
            f"{strategy_text(p.strategy)}"
            for k, p in enumerate(self.ranked, 1)
        ]
        lines.append(f"{self.counted:,} strategies, {self.priced:,} priced; {len(self.pareto)} on the front")
        lines += [f"{one.strategies:,} left out: {one.rule}" for one in self.pruned if one.strategies]
        lines.append(COMPARED)
        return "\n".join(lines)


def _served_object(one: ServedPlan) -> dict[str, Any]:
    rest = {name: getattr(one, name) for name in ServedPlan._fields[3:]}
    return plan_object(one.strategy, one.seconds, one.peak_bytes) | rest
