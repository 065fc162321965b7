"""Predictions against real links: the standard sweep of the lab, and how well each model orders and times it.

`python -m benchmarks.lab_experiments [--count 43] [--repetitions 5] [--number 1] [--fresh]`. Runs on Linux with the
privileges that `shardplan lab` needs, about 50 minutes on a quiet machine. The file is written after every experiment:
started again, it goes on where it stopped, and with `--fresh` from the beginning. The experiments are those of
`shardplan.execution.lab.standard`, drawn by a seed that was committed before the first run; `--number` says the how
manieth sweep of them this is. Those whose processors were more than 35 % busy do not count.

No constant was fitted on what is scored: those of the lab (see `shardplan.execution.lab.cluster`) were fixed before.
Reported: per placement and pooled, of the event-wise and the barrier model, how often the measured best is in the
predicted top 1, 3, 5, 10, with the chance level; regret, Kendall, errors; the targets, and the cells that miss them.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common import arguments, record, table, write
from benchmarks.lab_draws import SEED

from shardplan.execution.lab import missing
from shardplan.execution.lab.results import Done, Sweep
from shardplan.execution.lab.scores import MODELS, Summary
from shardplan.execution.lab.standard import STANDARD
from shardplan.execution.lab.sweep import MOST_LATE, estimate, measure_experiments
from shardplan.execution.lab.validate import ScoreVerdict, placement_ratios, validate


def summary(v: ScoreVerdict) -> dict[str, Any]:
    """What the sweep comes to."""
    scored = {f"{model}, {'pooled' if pooled else 'per placement'}": asdict(v.summary(model, pooled))
              for model in MODELS for pooled in (False, True)}  # fmt: skip
    rows = [r for d in v.experiments for r in d.rows]
    flat = [
        d for d in v.experiments if d.experiment.is_full_reduction and any(r.ops == ("all_reduce",) for r in d.rows)
    ]
    return {
        "experiments": len(v.experiments),
        "pairs": len(rows),
        "pairs that do not count, processors busy": v.busy,
        "noise floor": v.floor,
        "median cpu share": statistics.median(statistics.fmean(r.cpu_share) for r in rows),
        "pairs taken again for their variation": sum(r.repeated for r in rows),
        "voided runs": sum(r.voided for r in rows),
        "dropped packets": sum(sum(r.drops) for r in rows),
        "scores": scored,
        "targets": [asdict(t) for t in v.targets],
        "misses": [asdict(m) for m in v.misses],
        "placement ratios": [asdict(r) for r in placement_ratios(v)],
        "best over flat all_reduce": {d.experiment.name: gain(d) for d in flat},
    }


def gain(d: Done) -> dict[str, Any]:
    """The measured best of an experiment over the flat all_reduce."""
    best = min(d.rows, key=lambda r: r.median)
    flat = min((r for r in d.rows if r.ops == ("all_reduce",)), key=lambda r: r.median)
    return {
        "measured": flat.median / best.median,
        "predicted": flat.events / best.events,
        "placement": best.placement,
        "program": best.program,
    }


def told(v: ScoreVerdict) -> str:
    """The tables that are printed."""
    return "\n".join([
        table(("model", "fields", *(f"top {t.k}" for t in v.summary("events").top), "regret", "kendall", "error"),
              [_row(v.summary(m, p)) for m in MODELS for p in (False, True)],
              f"{len(v.experiments)} experiments, noise floor {v.floor:.2%}; top k: strict/within noise/chance"),
        table(("target", "bar", "found", "holds"),
              [[t.claim, t.bar, t.found, {True: "yes", False: "NO", None: "-"}[t.holds]] for t in v.targets]),
    ])  # fmt: skip


def _row(s: Summary) -> list[str]:
    """A model's scores as a row of the table."""
    top = ["/".join(f"{100 * x:.0f}" for x in (t.share, t.tied_share, t.chance)) if t.fields else "-" for t in s.top]
    return [
        f"{s.model}, {'pooled' if s.pooled else 'per placement'}",
        str(s.fields),
        *top,
        f"{s.median_regret:.1%}",
        "-" if s.kendall is None else f"{s.kendall:.2f}",
        f"{s.mean_error:.1%}",
    ]


def main() -> None:
    parser = arguments("lab_experiments", "Predictions against real links.", len(STANDARD), of="experiments")
    parser.add_argument("--repetitions", type=int, default=5, help="timed runs of each pair (default %(default)s)")
    parser.add_argument("--most-late", type=float, default=MOST_LATE, help="seconds a rank may start late")
    parser.add_argument("--number", type=int, default=1, help="which sweep of this seed it is (default %(default)s)")
    parser.add_argument("--fresh", action="store_true", help="do not go on from the result file")
    options = parser.parse_args()
    if lacking := missing():
        raise SystemExit(lacking)
    chosen = STANDARD[: options.count]
    parameters = {"count": len(chosen), "repetitions": options.repetitions, "most late": options.most_late}
    parameters |= {"seed": SEED, "sweeps of this seed, with this one": options.number}
    out: Path = options.out
    before = Sweep.load(out) if out.exists() and not options.fresh else None
    print(f"{len(chosen)} experiments, about {estimate(chosen, options.repetitions) / 60:.0f} minutes", flush=True)
    seen: set[str] = {d.experiment.name for d in before.experiments} if before else set()
    last = [time.monotonic()]

    def keep(found: Sweep) -> None:
        for d in found.experiments:
            if d.experiment.name not in seen:
                seen.add(d.experiment.name)
                error = f"  FAILED: {d.error}" if d.error else ""
                repeated = sum(r.repeated for r in d.rows)
                print(f"{d.wall_seconds:7.1f} s  load {d.load:.1f}  {len(d.rows):3} pairs, {repeated} twice  "
                      f"{d.experiment.name}{error}", flush=True)  # fmt: skip
        result = summary(validate([found])) if any(d.rows for d in found.experiments) else {}
        write(out, record(parameters, result | {"sweep": found.to_plain_data()}), quiet=True)

    def progress(done: float, total: float, what: str) -> None:
        if time.monotonic() - last[0] > 60:
            last[0] = time.monotonic()
            print(f"  {done / total:.0%}, about {(total - done) / 60:.0f} minutes left; {what}", file=sys.stderr)

    found = measure_experiments(
        chosen,
        repetitions=options.repetitions,
        before=before,
        keep=keep,
        progress=progress,
        most_late=options.most_late,
    )
    keep(found)
    print(told(validate([found])))
    print(f"written: {out.name}")


if __name__ == "__main__":
    main()
