"""`PlanAnswer`: of what a search found the answer, few others that differ, why each lost, and what would change it.

Two predictions closer than `TIE` tell no strategies apart (`benchmarks/plan_ties.py`: of measured pairs that were
predicted so close, three in ten came in the other order). Of such a tie the first keeps the room that a prediction of
bytes may be off by, then says the least, then is quickest where nine steps in ten end (the upper end of its interval).
Strategies of the same degrees stand as one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from shardplan.core.ops.compute import computing
from shardplan.core.walk import program_leaves
from shardplan.errors import Infeasible, ParseError, line
from shardplan.hardware.topology import Topology
from shardplan.hardware.units import format_bytes, format_seconds
from shardplan.notebook import notebook_html
from shardplan.simulation.accuracy.forecast import MEMORY_RESIDUAL, NORMAL_90, deviation
from shardplan.simulation.closed.causes import step_causes
from shardplan.simulation.closed.configurations import CODES, Configurations
from shardplan.simulation.closed.form import ClosedForm
from shardplan.simulation.closed.machines import MachineFit
from shardplan.simulation.searching.certifier import CertifiedPeak, Certifier
from shardplan.simulation.searching.fit import Fit
from shardplan.simulation.searching.plans import RankedPlan, plan_text, ranked_object
from shardplan.simulation.searching.search import SearchResult
from shardplan.simulation.searching.sensitivity import scalable_parts
from shardplan.strategy.limits import ModelLimits
from shardplan.strategy.model import Model
from shardplan.strategy.runtimes import runtime_of
from shardplan.strategy.strategy import Strategy

TIE = 0.05  # relative: two predicted steps that are closer are a tie
DEGREES = ("data", "tensor", "pipeline", "context", "expert")
COUNTED = ("product", "scores")  # kernels whose operations are a model's
FELT = 0.005  # of a step: a cause that takes less is none


class JudgedPlan(NamedTuple):
    """A strategy as it is told: seconds with the interval of nine steps in ten, what they go to, and what is held."""

    plan: RankedPlan
    interval: tuple[float, float]
    causes: tuple[tuple[str, float], ...]  # seconds of a step, largest first; they add up to its seconds
    held: CertifiedPeak
    tokens_per_second: float
    mfu: float
    alike: int = 0  # how many others of the same degrees it stands for
    lost: str = ""  # why it is not the answer

    def to_dict(self) -> dict[str, Any]:
        """Return it as one object of JSON."""
        found = ranked_object(self.plan) | {"text": plan_text(self.plan), "seconds_interval": list(self.interval)}
        held = [{"what": what, "bytes": nbytes} for what, nbytes in self.held.parts]
        told = ("tokens_per_second", "mfu", "alike", "lost")
        causes = {"causes": dict(self.causes), "held": held, "rank": self.held.rank,
                  "runtime": runtime_of(self.plan.strategy).name}  # fmt: skip
        return found | causes | {name: getattr(self, name) for name in told}

    @staticmethod
    def from_dict(strategy: Strategy, told: Mapping[str, Any]) -> JudgedPlan:
        """Return it of a strategy and the rest of what `to_dict` gave; raises `ParseError` where something lacks."""
        try:
            parts = tuple((str(one["what"]), float(one["bytes"])) for one in told["held"])
            peak, (low, high) = float(told["peak_bytes"]), map(float, told["seconds_interval"])
            return JudgedPlan(
                RankedPlan(strategy, float(told["seconds"]), peak, tuple(told["order"])),
                (low, high),
                tuple((str(k), float(v)) for k, v in told["causes"].items()),
                CertifiedPeak(sum(n for _, n in parts), int(told["rank"]), parts),
                float(told["tokens_per_second"]),
                float(told["mfu"]),
            )
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ParseError(
                f"what is predicted of a plan lacks {line(error)}; legal is what plan --out wrote"
            ) from None


@dataclass(frozen=True, slots=True, eq=False)
class Judge:
    """What tells of strategies of one model on one topology: see `JudgedPlan`.

    Args:
        model: What is trained.
        topology: On what.
        machine: Its parameters, and how well they are known; of a machine that nobody measured as far as machines
            differ.
        certifier: Of what jobs hold.
    """

    model: Model
    topology: Topology
    machine: MachineFit
    certifier: Certifier
    form: ClosedForm = field(init=False)
    flops: float = field(init=False)  # of a sequence, forward and backward, nothing twice
    tokens: int = field(init=False)  # of a sequence

    def __post_init__(self) -> None:
        """Read the model."""
        form = ClosedForm(self.model, self.topology, self.machine.parameters)
        object.__setattr__(self, "form", form)
        object.__setattr__(self, "flops", training_flops(self.model))
        said = self.model.fields.get("seq")  # of a program of one's own what its dims say
        object.__setattr__(self, "tokens", int(said or ModelLimits.of(self.model).sequence))

    @property
    def has_measurements(self) -> bool:
        """Whether the parameters of the machine were fitted to measured steps."""
        return self.machine.is_measured

    def judge(self, plan: RankedPlan, held: CertifiedPeak | None = None) -> JudgedPlan:
        """Return all of it of one strategy; `held` where it is known."""
        c = _column(plan)
        half = NORMAL_90 * float(deviation(self.form, c, self.machine)[0])
        causes = sorted(((k, float(v[0])) for k, v in step_causes(self.form, c).items()), key=lambda x: -x[1])
        strategy = plan.strategy
        sequences, batched = strategy.sequences, any("batch" in dims for dims in self.model.dims.values())
        # A model without a batch is run as it is for every microbatch, whatever that is said to hold.
        worked = sequences if batched else strategy.microbatches * strategy.data
        peak = self.topology.device.peak(str(self.model.fields["dtype"])) * self.topology.size
        return JudgedPlan(
            plan,
            (plan.seconds * math.exp(-half), plan.seconds * math.exp(half)),
            tuple(causes),
            held or self.certifier.peak(plan.strategy),
            sequences * float(self.tokens) / plan.seconds,
            worked * self.flops / (plan.seconds * peak),
        )

    def upper_ends(self, plans: Sequence[RankedPlan]) -> list[float]:
        """Return the upper ends of the intervals of strategies, in seconds."""
        columns = [_column(plan).columns for plan in plans]
        c = Configurations({name: np.concatenate([one[name] for one in columns]) for name in columns[0]})
        seconds = np.array([plan.seconds for plan in plans])
        return (seconds * np.exp(NORMAL_90 * deviation(self.form, c, self.machine))).tolist()

    def price(self, plan: RankedPlan) -> float:
        """Return the seconds of a step of a strategy."""
        return float(self.form.seconds(_column(plan))[0])

    def prices_on(self, topology: Topology, plans: Sequence[RankedPlan]) -> list[float]:
        """Return the seconds of a step of strategies on another topology."""
        form = self.form.on(topology, self.machine.parameters)
        return [float(form.seconds(_column(plan))[0]) for plan in plans]

    def judge_fit(self, told: Fit) -> JudgedPlan:
        """Return all of it of a strategy of which `fit` said whether it fits."""
        held = CertifiedPeak(told.peak_bytes, told.rank, told.held)
        return self.judge(RankedPlan(told.strategy, told.seconds, told.peak_bytes), held)


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """What `shardplan plan` says: the answer first, then those that differ; `changes` are what would make it another.

    The `tied` are so many of the first; `title` is what the model is called, `notes` what was not said otherwise.
    """

    title: str
    judge: Judge
    plans: tuple[JudgedPlan, ...]
    tied: int
    goal: str
    found: SearchResult
    changes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    _repr_html_ = notebook_html

    def to_dict(self) -> dict[str, Any]:
        """Return it as one object of JSON, with what became of the space; certifies no more than the text."""
        told = {"tied": self.tied, "goal": self.goal, "changes": list(self.changes), "notes": list(self.notes)}
        plans = {"best": ranked_object(self.found.best), "answer": [one.to_dict() for one in self.plans]}
        return plans | self.found.space_object() | told


def answer_plan(found: SearchResult, judge: Judge, top: int = 5, goal: str = "step", title: str = "") -> PlanAnswer:
    """Return the answer of a search, and at most `top` that differ in their degrees, the answer among them.

    `goal` is `step`, or `memory`: least bytes on the front of seconds and bytes. All of them are certified to fit.

    Raises `Infeasible` where none is.
    """
    certifier = judge.certifier
    least = goal == "memory"
    plans = found.front[::-1] if least else found.candidates
    quickest = next((p.seconds for p in plans if certifier.fits(p.strategy)), None)
    if quickest is None:
        return PlanAnswer(title, judge, (judge.judge(found.best),), 1, goal, found)
    classes: dict[tuple[int, ...], list[RankedPlan]] = {}
    for plan in plans:
        classes.setdefault(tuple(getattr(plan.strategy, name) for name in DEGREES), []).append(plan)
    told: list[JudgedPlan] = []
    upper = dict(zip(map(id, plans), [] if least else judge.upper_ends(plans), strict=not least))
    for members in classes.values():
        first = members[0].seconds
        bound = (quickest if first <= quickest * (1 + TIE) else first) * (1 + TIE)
        order = members if least else [
            *sorted((p for p in members if p.seconds <= bound), key=lambda p: _ease(p, certifier.memory, upper[id(p)])),
            *(p for p in members if p.seconds > bound),
        ]  # fmt: skip
        if (chosen := next((p for p in order if certifier.fits(p.strategy)), None)) is not None:
            held = certifier.peak(chosen.strategy)
            one = judge.judge(chosen._replace(peak_bytes=held.nbytes), held)
            told.append(one._replace(alike=len(members) - 1))
        if len(told) == top:
            break
    if least:
        told.sort(key=lambda one: one.plan.peak_bytes)
        tied = 1
    else:
        near = [one for one in told if one.plan.seconds <= quickest * (1 + TIE)]
        near.sort(key=lambda one: _ease(one.plan, certifier.memory, one.interval[1]))
        tied = len(near)
        told = [*near, *sorted((one for one in told if one not in near), key=lambda one: one.plan.seconds)]
    best = told[0]
    named = tuple(one._replace(lost=_reason_lost(one, best, k < tied, least)) for k, one in enumerate(told))
    return PlanAnswer(title, judge, (best, *named[1:]), tied, goal, found)


def _ease(plan: RankedPlan, memory: float, upper: float) -> tuple[bool, int, float]:
    """Of a tie who comes first: whether bytes are near the memory, how much is said, where its interval ends."""
    return plan.peak_bytes > memory * (1 - MEMORY_RESIDUAL), _words_of(plan), upper


def _reason_lost(one: JudgedPlan, best: JudgedPlan, tied: bool, least: bool) -> str:
    """Why it is not the answer, in a few words."""
    if least:
        return f"{format_bytes(one.plan.peak_bytes - best.plan.peak_bytes)} more"
    if tied:
        mine, its = _words_of(one.plan), _words_of(best.plan)
        tight = one.held.nbytes > best.held.nbytes and one.plan.seconds <= best.plan.seconds
        slower = one.plan.seconds > best.plan.seconds
        last = "a tie; slower" if slower else "a tie; less certain"
        return "a tie; less room" if tight else "a tie; says more" if mine > its else last
    more = {k: s - dict(best.causes).get(k, 0.0) for k, s in one.causes}
    worst = sorted(((s, k) for k, s in more.items() if s > FELT * best.plan.seconds), reverse=True)
    return ", ".join(f"+{format_seconds(s)} {k}" for s, k in worst[:2]) or "slower in all"


def _words_of(plan: RankedPlan) -> int:
    return len(plan_text(plan).split())


def find_changes(answer: PlanAnswer, tell: Callable[[int, int], None] | None = None) -> tuple[str, ...]:
    """Return what would make the answer another: half and double of each link and of the memory, searched again each.

    Where the answer still fits, and is then a tie with the best, nothing is said. With less of anything nothing is
    quicker than the quickest is now: where the answer is a tie with that, no search is needed. `tell` is called with
    searches done, and all.
    """
    judge, first = answer.judge, answer.plans[0]
    quickest = min((one.seconds for one in answer.found.candidates), default=0.0)
    asked = list(_changed_topologies(judge.topology))
    found: list[str] = []
    for k, (times, text, other) in enumerate(asked):
        if tell is not None:
            tell(k, len(asked))
        (still,) = judge.prices_on(other, [first.plan])
        fits = first.held.nbytes <= other.device.memory
        if times < 1 and fits and still <= quickest * (1 + TIE):
            continue
        try:
            best = answer.found.again(other)
        except Infeasible:
            found.append(f"{text}: nothing fits")
            continue
        if not fits or still > best.seconds * (1 + TIE):
            beside = f", not {format_seconds(still)}" if fits else ""
            found.append(f"{text}: {plan_text(best)}, {format_seconds(best.seconds)}{beside}")
    return tuple(found)


def _column(plan: RankedPlan) -> Configurations:
    c = Configurations.of([plan.strategy])
    return Configurations({**c.columns, "order": np.array([CODES["order"].index(plan.order)])})


def _changed_topologies(topology: Topology) -> Iterable[tuple[float, str, Topology]]:
    """The topology with half and double of each link, and of the memory: how much, in words, and the topology."""
    parts = scalable_parts(topology)
    called = {one.name: f"the bandwidth between {one.name}s" for one in topology.levels if one.size > 1}
    called["memory"] = "the memory"
    for times, word in ((0.5, "half"), (2.0, "double")):
        for name, text in called.items():
            if name in parts:
                yield times, f"{word} {text}", parts[name](times)


def training_flops(model: Model) -> float:
    """Return the operations of a sequence in a training step: the forward pass, and twice as many backward.

    What a mask leaves out is none, nothing is counted twice, and the update of the optimizer does not count.
    """
    forward = model.forward or model.program
    batch = next((n for v, dims in model.dims.items() if v in forward.types and "batch" in dims
                  for d, n in zip(dims, forward.types[v].shape, strict=True) if d == "batch"), 1)  # fmt: skip
    every = ((times, computing(leaf), types) for times, leaf, types in program_leaves(forward))
    counted = (times * op.flops(*types) for times, op, types in every if op is not None and op.kernel_class in COUNTED)
    return 3.0 * sum(counted) / batch


def causes_text(causes: Sequence[tuple[str, float]]) -> str:
    """Return what seconds go to as shares, in their order."""
    total = sum(s for _, s in causes)
    return ", ".join(f"{what} {100 * s / total:.0f} %" for what, s in causes if s > FELT * total)
