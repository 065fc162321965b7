"""What `lab` prints, as text and as object: a program measured beside its prediction, a sweep, a validation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from shardplan.execution.lab import Cluster, Measurement
from shardplan.execution.lab.cluster import rates_text
from shardplan.execution.lab.measurement import MOST_BUSY
from shardplan.execution.lab.results import Done, Sweep
from shardplan.execution.lab.scores import MODELS, Summary
from shardplan.execution.lab.session import MOST_VARIATION
from shardplan.execution.lab.validate import ScoreVerdict, placement_ratios
from shardplan.hardware.units import format_seconds
from shardplan.report.text import table
from shardplan.report.timeline import comparison_text
from shardplan.simulation.timeline import Timeline

MOST_MISSES = 20  # printed


@dataclass(frozen=True, slots=True)
class LabAnswer:
    """What a command prints and exits with: text, JSON object, exit status."""

    text: str
    object: dict[str, Any]
    status: int = 0


def run_answer(cluster: Cluster, predicted: Sequence[Timeline], measured: Sequence[Measurement]) -> LabAnswer:
    """Return text and object of measurements beside their predictions."""
    rates = rates_text(cluster.rates, "/")
    name = f"{'x'.join(map(str, cluster.topology.level_sizes))} at {rates} Mbit/s, leaf={cluster.leaf}"
    lines = [f"cluster  {name}, {measured[0].engine} engine, {len(measured[0].repetitions)} repetitions", ""]
    rows = [["program", "predicted", "median", "min", "error", "CV", "late", "CPU", "drops"]]
    for p, m in zip(predicted, measured, strict=True):
        rows.append([
            m.title, format_seconds(p.seconds), format_seconds(m.seconds), format_seconds(m.min_seconds),
            _percent(p.seconds, m.seconds), f"{m.cv:.1%}", format_seconds(m.lateness), f"{m.cpu_share:.0%}",
            str(m.drops),
        ])  # fmt: skip
    lines += table(rows)
    for p, m in zip(predicted, measured, strict=True):
        title = [] if len(measured) == 1 else [m.title]
        lines += ["", *title, comparison_text(p, m.timeline), "", *_links(m)]
    if len(measured) > 1 and measured[0].seconds > 0:
        gain = measured[1].seconds / measured[0].seconds
        told = predicted[1].seconds / predicted[0].seconds
        lines += ["", f"{measured[1].title} over {measured[0].title}: {gain:.2f}x, predicted {told:.2f}x"]
    warnings = [w for m in measured for w in _warnings(m)]
    lines += ["", *(f"warning: {w}" for w in warnings)] if warnings else []
    found = [measurement_object(p, m) for p, m in zip(predicted, measured, strict=True)]
    return LabAnswer("\n".join(lines), {"cluster": name, "programs": found, "warnings": warnings})


def measurement_object(predicted: Timeline, m: Measurement) -> dict[str, Any]:
    """Return a measurement as an object, every repetition included."""
    names = ("title", "engine", "seconds", "min_seconds", "cv", "lateness", "cpu_share", "drops", "repeated", "voided",
             "verified", "load")  # fmt: skip
    return {name: getattr(m, name) for name in names} | {
        "predicted_seconds": predicted.seconds,
        "repetitions": [r.seconds for r in m.repetitions],
        "links": [
            {"link": name, "predicted_bytes": said, "payload_bytes": counted, "kernel_bytes": kernel}
            for name, said, counted, kernel in zip(
                m.edges,
                m.predicted_edge_bytes,
                m.payload_edge_bytes,
                m.kernel_edge_bytes,
                strict=True,
            )
        ],
    }


def _warnings(m: Measurement) -> Iterator[str]:
    """Yield what makes a measurement doubtful, a sentence each: busy processors, then noise."""
    if m.cpu_share > MOST_BUSY:
        yield (
            f"{m.title}: {m.cpu_share:.0%} of the processors were busy, above {MOST_BUSY:.0%}: they, not the links, "
            "may have set the pace; use lower rates or a smaller cluster"
        )
    if m.repeated and m.cv > MOST_VARIATION:
        yield f"{m.title}: repetitions vary by {m.cv:.1%} even the second time; the machine is not quiet"


def _links(m: Measurement) -> list[str]:
    """The busiest link of every level and direction: bytes predicted, counted by the engine, and by the kernel."""
    said = m.predicted_edge_bytes
    busiest: dict[tuple[str, str], int] = {}
    for k, name in enumerate(m.edges):
        key = name.split("[")[0], name.split(" ")[-1]
        if key not in busiest or m.kernel_edge_bytes[k] > m.kernel_edge_bytes[busiest[key]]:
            busiest[key] = k
    rows = [["busiest link", "predicted", "engine", "kernel"]]
    for k in busiest.values():
        counted = "-" if m.calls else str(m.payload_edge_bytes[k])  # gloo's own messages are not
        rows.append([m.edges[k], str(said[k]), counted, str(m.kernel_edge_bytes[k])])
    return table(rows)


def sweep_text(found: Sweep, name: str) -> str:
    """Return a sweep as text: per experiment the pairs, the best and the worst, and how far apart placements are."""
    rows = [["experiment", "pairs", "best", "worst", "predicted best", "exact bytes", "CPU", "twice"]]
    for d in found.experiments:
        if d.error:
            rows.append([d.experiment.name, "-", "failed", "-", "-", "-", "-", "-"])
            continue
        best, worst = min(d.rows, key=lambda r: r.median), max(d.rows, key=lambda r: r.median)
        exact = [r.exact for r in d.rows if r.exact is not None]
        rows.append([
            d.experiment.name, str(len(d.rows)), format_seconds(best.median), format_seconds(worst.median),
            format_seconds(min(r.events for r in d.rows)), f"{sum(exact)} of {len(exact)}" if exact else "-",
            f"{max(max(r.cpu_share) for r in d.rows):.0%}", str(sum(r.repeated for r in d.rows)),
        ])  # fmt: skip
    floor = "not measured" if found.floor is None else f"{found.floor:.2%}, of {len(found.again)} pairs measured again"
    errors = [f"failed   {d.experiment.name}: {d.error}" for d in found.experiments if d.error]
    return "\n".join([*table(rows), "", f"noise    {floor}", *errors, f"written  {name}"])


def done_object(d: Done) -> dict[str, Any]:
    """Return an experiment as an object."""
    rows = [
        {"placement": r.placement, "program": r.program, "events": r.events, "barrier": r.barrier,
         "seconds": r.median, "repetitions": list(r.seconds), "exact": r.exact}
        for r in d.rows
    ]  # fmt: skip
    return {"experiment": d.experiment.name, "error": d.error, "pairs": rows}


def validate_text(v: ScoreVerdict) -> str:
    """Return scores, targets and misses as text."""
    tops = v.summary("events").top
    rows = [["model", "fields", *(f"top {t.k}" for t in tops), "regret", "max", "Kendall", "error", "p90", "max"]]
    rows += [_summary_row(v.summary(model, pooled)) for pooled in (False, True) for model in MODELS]
    lines = [
        f"{len(v.experiments)} experiments, {sum(len(d.rows) for d in v.experiments)} pairs, noise floor {v.floor:.2%}",
        f"{v.busy} pairs do not count, since more than {MOST_BUSY:.0%} of the processors were busy",
        "top k: measured best among the first k predicted, in % of fields with more than k programs: "
        "strict, within noise (by chance)",
        "",
        *table(rows),
        "",
    ]
    words = {True: "yes", False: "NO", None: "-"}
    held = [[t.claim, t.bar, t.found, words[t.holds]] for t in v.targets]
    lines += table([["target", "bar", "found", "holds"], *held], left=range(4))
    if v.misses:
        lines += ["", f"misses ({len(v.misses)}):"]
        lines += [f"  {m.target}: {m.experiment}, {m.placement}: {m.text}" for m in v.misses[:MOST_MISSES]]
        if len(v.misses) > MOST_MISSES:
            lines.append(f"  ... {len(v.misses) - MOST_MISSES} more (--json has all)")
    return "\n".join(lines)


def _summary_row(s: Summary) -> list[str]:
    tops = [f"{100 * t.share:.0f}, {100 * t.tied_share:.0f} ({100 * t.chance:.0f})" if t.fields else "-" for t in s.top]
    return [
        f"{s.model}, {'pooled' if s.pooled else 'per placement'}", str(s.fields), *tops, f"{s.median_regret:.1%}",
        f"{s.max_regret:.1%}", "-" if s.kendall is None else f"{s.kendall:.2f}", f"{s.mean_error:.1%}",
        f"{s.p90_error:.1%}", f"{s.max_error:.1%}",
    ]  # fmt: skip


def validate_object(v: ScoreVerdict) -> dict[str, Any]:
    """Return a validation as an object: summaries, targets, misses, and the score of every field."""
    return {
        "experiments": len(v.experiments),
        "pairs": sum(len(d.rows) for d in v.experiments),
        "busy_pairs": v.busy,
        "noise_floor": v.floor,
        "summaries": [_finite(asdict(v.summary(m, p))) for p in (False, True) for m in MODELS],
        "targets": [asdict(t) for t in v.targets],
        "misses": [asdict(m) for m in v.misses],
        "placement_ratios": [asdict(r) for r in placement_ratios(v)],
        "scores": [
            {k: x for k, x in asdict(s).items() if k != "errors"} | {"mean_error": s.mean_error} for s in v.scores
        ],
    }


def _finite(value: Any) -> Any:
    """The value with None for what JSON has not: NaN and infinities."""
    match value:
        case dict():
            return {k: _finite(x) for k, x in value.items()}
        case list() | tuple():
            return [_finite(x) for x in value]
        case float():
            return value if np.isfinite(value) else None
        case _:
            return value


def _percent(predicted: float, measured: float) -> str:
    return f"{predicted / measured - 1:+.1%}" if measured > 0 else "-"
