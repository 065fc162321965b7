"""The models against result files: scores of every field, the targets they are held to, and the cells that miss."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shardplan.errors import ParseError
from shardplan.execution.lab.measurement import MOST_BUSY
from shardplan.execution.lab.results import Done, Row, Sweep
from shardplan.execution.lab.scores import MODELS, Score, Summary, score, summarize
from shardplan.execution.lab.standard import MANY_PROGRAMS
from shardplan.hardware.topology import Topology

DEFAULT_FLOOR = 0.03  # where a result has none
CROSSOVERS = (
    "2x4 lo 200/1000",
    "2x2x2 ns 400/200/800",
)  # clusters on which a flat ring wins: easy cases flatter a model


@dataclass(frozen=True, slots=True)
class Target:
    """A claim, its bar, what was found, and whether it holds; None where the results do not say."""

    claim: str
    bar: str
    found: str
    holds: bool | None


@dataclass(frozen=True, slots=True)
class Miss:
    """A cell that a target misses."""

    target: str
    experiment: str
    placement: str
    text: str


@dataclass(frozen=True)
class ScoreVerdict:
    """What results say about the models."""

    experiments: tuple[Done, ...]  # those that were measured
    floor: float  # the noise floor used
    scores: tuple[Score, ...]  # of every field and model
    busy: int  # pairs that do not count, since the processors were busy

    def summary(self, model: str, pooled: bool = False) -> Summary:
        """Return the scores of one model, over placements or over whole experiments."""
        return summarize([s for s in self.scores if s.model == model and bool(s.placement) != pooled], model, pooled)

    @cached_property
    def targets(self) -> tuple[Target, ...]:
        """The bars of the specification."""
        return tuple(_targets(self))

    @cached_property
    def misses(self) -> tuple[Miss, ...]:
        """The cells behind what is missed: orders (events, per placement), bytes, and large errors."""
        return tuple(_misses(self))


def validate(results: Sequence[Sweep]) -> ScoreVerdict:
    """Score both models on results of sweeps, and judge them.

    An experiment in several results counts once in each; pairs with busy processors count in none. The noise floor is
    that of all results together, `DEFAULT_FLOOR` where none has one. Raises `ParseError` where no result has a measured
    experiment, or only busy ones.
    """
    measured = [d for r in results for d in r.experiments]
    done = tuple(replace(d, rows=rows) for d in measured if (rows := tuple(row for row in d.rows if row.counts)))
    if not done and any(d.rows for d in measured):
        raise ParseError(
            f"every pair was measured with more than {MOST_BUSY:.0%} of the processors busy; run 'shardplan lab sweep' "
            "again when less runs beside it"
        )
    if not done:
        raise ParseError("no result has a measured experiment; run 'shardplan lab sweep' first")
    twice = [abs(math.log(a.second / a.first)) for r in results for a in r.again]
    floor = statistics.median(twice) if twice else DEFAULT_FLOOR
    scores = [s for d in done for model in MODELS for s in _fields(d, model, floor)]
    busy = sum(len(d.rows) for d in measured) - sum(len(d.rows) for d in done)
    return ScoreVerdict(done, floor, tuple(scores), busy)


def _fields(done: Done, model: str, floor: float) -> Iterator[Score]:
    """Yield the scores of an experiment: of each placement, then pooled."""
    by_placement: dict[str, list[Row]] = {}
    for row in done.rows:
        by_placement.setdefault(row.placement, []).append(row)
    for placement, rows in by_placement.items():
        yield score(rows, model, floor, done.experiment.name, placement)
    yield score(done.rows, model, floor, done.experiment.name)


# The targets of section 7 of the specification.

KERNEL = (1.0, 1.05)  # least and most that an interface may send over its edge's payload
PLACEMENT_RATIO = 10.0  # of an all_reduce on the worst placement over that on the best, at least
PLACEMENT_ERROR = 0.1  # of that ratio as predicted, at most
RATIO_CLUSTERS = ("2x4 ns 200/1000", "2x4 ns 50/250")
OVER_FLAT = 1.3  # how much faster the best program is than a flat all_reduce, at least
FLAT_RATES = 0.1  # outer over inner rate, at most
MANY = 60  # placements with more than `MANY_PROGRAMS` programs, at least
SHAPES = 4  # clusters, at least
SEVERAL = 3  # sizes of clusters with several uplinks, at least
SHARES = {10: 0.9, 3: 0.9}  # by k: of fields whose measured best is among the predicted first k, at least
MOST_REGRET = 0.02  # the median; a cell above it is a miss
MOST_ERROR = 0.05  # the mean; a cell above it is a miss


def _targets(v: ScoreVerdict) -> Iterator[Target]:
    """Yield the targets in the order of the specification, those that the results say something of."""
    events = v.summary("events")
    rows = [r for d in v.experiments for r in d.rows]
    counted = [r for r in rows if r.exact is not None]
    wrong = sum(not r.exact for r in counted)
    yield Target(
        "payload on every link, every program",
        "equal to prediction",
        f"{len(counted) - wrong} of {len(counted)} equal",
        wrong == 0 if counted else None,
    )
    kernel = [r.kernel for r in rows if r.kernel]
    if kernel:
        low, high = min(k[0] for k in kernel), max(k[1] for k in kernel)
        holds = KERNEL[0] <= low and high <= KERNEL[1]
        yield Target("kernel's count over payload, busy links", "1.00 to 1.05", f"{low:.3f} to {high:.3f}", holds)
    clusters = {d.experiment.cluster_name for d in v.experiments}
    crossed = [c for c in CROSSOVERS if c in clusters]
    fields = sum(s.programs > MANY_PROGRAMS for s in v.scores if s.model == "events" and s.placement)
    several = {d.experiment.cluster for d in v.experiments if any(isinstance(r, str) for r in d.experiment.rates)}
    yield Target(
        f"placements with more than {MANY_PROGRAMS} programs",
        f"at least {MANY} on {SHAPES} clusters, {SEVERAL} sizes with several uplinks, both crossovers",
        f"{fields} on {len(clusters)}, {len(several)} sizes with several uplinks, {len(crossed)} crossovers",
        fields >= MANY and len(clusters) >= SHAPES and len(several) >= SEVERAL and len(crossed) == len(CROSSOVERS),
    )
    for k, bar in SHARES.items():
        top = next(t for t in events.top if t.k == k)
        if top.fields:
            yield Target(
                f"measured best in predicted top {k}, per placement",
                f"at least {bar:.0%}",
                f"{top.share:.1%} of {top.fields}; within noise {top.tied_share:.1%}; by chance {top.chance:.1%}",
                top.share >= bar,
            )
    regret, error = events.median_regret, events.mean_error
    yield Target("median top-1 regret", "at most 2 %", f"{regret:.2%}", regret <= MOST_REGRET)
    yield Target("mean absolute error", "at most 5 %", f"{error:.2%}", error <= MOST_ERROR)
    yield from _flat(v)
    yield from _ratio(v)


def _flat(v: ScoreVerdict) -> Iterator[Target]:
    """The best program over a flat all_reduce of the whole mesh, on 2x4 with a slow outer link."""
    gains: list[tuple[float, str]] = []
    for d in v.experiments:
        e = d.experiment
        slow = e.leaf == "ns" and e.cluster == "2x4" and _slow(e.build().topology)
        flat = [r for r in d.rows if len(r.ops) == 1]
        if slow and e.is_full_reduction and flat:
            best = min(d.rows, key=lambda r: r.median)
            gains.append((min(r.median for r in flat) / best.median, e.name))
    if gains:
        least, name = min(gains)
        yield Target("best program against a flat all_reduce, 2x4", "at least 1.3x", f"{least:.2f}x ({name})",
                     least >= OVER_FLAT)  # fmt: skip


def _slow(topology: Topology) -> bool:
    """Whether the outer links of all uplinks are at most `FLAT_RATES` of an inner one."""
    outer, inner = topology.levels
    return outer.bandwidth * outer.uplinks <= FLAT_RATES * inner.bandwidth


@dataclass(frozen=True, slots=True)
class Ratio:
    """What placing matters: an all_reduce on the worst placement over that on the best."""

    experiment: str
    measured: float
    predicted: float


def placement_ratios(v: ScoreVerdict) -> list[Ratio]:
    """Return, for every experiment with several placements, the ratio of a flat all_reduce on the worst and best."""
    out: list[Ratio] = []
    for d in v.experiments:
        flat = [r for r in d.rows if len(r.ops) == 1]
        if len({r.placement for r in flat}) > 1:
            worst, best = max(flat, key=lambda r: r.median), min(flat, key=lambda r: r.median)
            out.append(Ratio(d.experiment.name, worst.median / best.median, worst.events / best.events))
    return out


def _ratio(v: ScoreVerdict) -> Iterator[Target]:
    """Judge the ratio at the rates of the specification, and at a quarter of them, where two cores keep up."""
    named = {d.experiment.name: d.experiment for d in v.experiments}
    for cluster in RATIO_CLUSTERS:
        here = [r for r in placement_ratios(v) if named[r.experiment].cluster_name == cluster]
        if not here:
            continue
        largest = max(named[r.experiment].nbytes for r in here)
        most = max((r for r in here if named[r.experiment].nbytes == largest), key=lambda r: r.predicted)
        off = most.predicted / most.measured - 1
        yield Target(
            f"placement ratio, measured, {cluster}",
            "at least 10x, within 10 % of predicted",
            f"{most.measured:.1f}x, predicted {most.predicted:.1f}x ({off:+.1%}; {most.experiment})",
            most.measured >= PLACEMENT_RATIO and abs(off) <= PLACEMENT_ERROR,
        )


def _misses(v: ScoreVerdict) -> Iterator[Miss]:
    for d in v.experiments:
        for r in d.rows:
            if r.exact is False:
                yield Miss("payload", d.experiment.name, r.placement, r.program)
            if r.kernel and not KERNEL[0] <= r.kernel[0] <= r.kernel[1] <= KERNEL[1]:
                text = f"{r.program}: kernel {r.kernel[0]:.3f} to {r.kernel[1]:.3f} of payload"
                yield Miss("kernel", d.experiment.name, r.placement, text)
    for s in v.scores:
        if s.model == "events" and s.placement:
            for k in sorted(SHARES):
                if s.programs > k and s.rank > k:
                    text = (
                        f"rank {s.rank} of {s.programs} (within noise {s.tied_rank}), regret {s.regret:.1%}; "
                        f"best {s.best}; predicted best {s.chosen}"
                    )
                    yield Miss(f"top {k}", s.experiment, s.placement, text)
            if s.regret > MOST_REGRET and s.programs > 1:
                yield Miss("regret", s.experiment, s.placement, f"{s.regret:.1%}; best {s.best}; chosen {s.chosen}")
            if s.mean_error > MOST_ERROR:
                yield Miss("error", s.experiment, s.placement, f"mean {s.mean_error:.1%} over {s.programs} programs")
