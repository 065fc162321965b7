"""Steps that others measured, beside predictions of parameters that were fitted without them.

Rows are held out by a hash of their ids; groups of plans that are ranked are held out whole, in folds. Nothing here
enters the shipped machine files, which `shardplan calibrate` makes of all rows.
"""

from __future__ import annotations

import argparse
import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common import RESULTS, record, table, write
from benchmarks.step_numbers import number_table, unlisted

from shardplan.hardware.topology import Topology
from shardplan.simulation.accuracy.calibration import fit_machines
from shardplan.simulation.accuracy.forecast import Forecast, forecast
from shardplan.simulation.accuracy.metrics import errors, kendall_tau, regret
from shardplan.simulation.accuracy.step_rows import StepRow, read_steps
from shardplan.simulation.accuracy.step_validation import BYTES, SECONDS, TOLD
from shardplan.simulation.closed.machines import MachineFit, like_fit

SHARE = 5  # one row of so many is held out
FOLDS = 4  # of groups
LEAST = 3  # rows of a group
RANKED = ("bloom_jz", "vtrain_single", "vtrain_multi")
# What was tried with these rows in view, what is shipped included.
VARIANTS = {"of the physics": 38, "of the form of intervals": 9, "of the widths of one form": 18}
# By table and quantity, in percent: what is asked for, and what others reach.
ASKED: Mapping[tuple[str, str], Mapping[str, float]] = {
    ("bloom_jz", SECONDS): {"mean": 3.0, "median": 1.8, "p90": 8.0},
    ("bloom_jz", "peak_bytes"): {"mean": 3.0, "median": 2.5},
    ("llm_foundry", SECONDS): {"mean": 4.5, "median": 3.0, "p90": 10.0},
    ("simumax_b200", SECONDS): {"mean": 3.3, "median": 2.5, "p90": 8.0},
    ("simumax_b200", "peak_bytes"): {"mean": 2.0, "max": 5.0},
    ("simumax_moe_b200", SECONDS): {"mean": 6.0},
    ("simumax_moe_b200", "peak_bytes"): {"mean": 3.0},
    ("bridge_dense", SECONDS): {"mean": 6.0, "median": 4.5},
    ("vtrain_single", SECONDS): {"mean": 6.0, "median": 4.0},
    ("vtrain_multi", SECONDS): {"mean": 8.0},
    ("sc21_table1", SECONDS): {"mean": 4.0, "max": 8.0},
    ("korthikanti_tab5", SECONDS): {"mean": 3.0},
    ("korthikanti_fig1", "activation_bytes"): {"mean": 1.0},
    ("torchtitan_202412", "peak_bytes"): {"mean": 6.0},
}
PEERS: Mapping[tuple[str, str], Mapping[str, float]] = {
    ("vtrain_single", SECONDS): {"cells of degree, microbatch and width, 32 free": 4.0, "vTrain's own": 8.4},
    ("vtrain_multi", SECONDS): {"cells of degree, microbatch and width": 14.0, "vTrain's own": 14.7},
    ("korthikanti_tab5", SECONDS): {"Calculon": 3.65},
    ("simumax_b200", SECONDS): {"SimuMax": 4.9},
    ("simumax_b200", "peak_bytes"): {"SimuMax": 0.3},
    ("bridge_dense", SECONDS): {"the best constant of each configuration, over containers": 2.0},
}
ASKED_RANKS: Mapping[str, Mapping[str, float]] = {
    "bloom_jz": {"regret": 1.0, "tau": 0.85},
    "vtrain_single": {"regret": 3.0, "tau": 0.85},
    "vtrain_multi": {"regret": 5.0},
}
ASKED_COVERAGE = {"bridge_dense": 75.0, "llm_foundry": 80.0, "bloom_jz": 80.0}


def hashed(seed: int, text: str) -> int:
    """A number of a text that is the same everywhere."""
    return int.from_bytes(hashlib.sha256(f"{seed} {text}".encode()).digest()[:8], "big")


def comparable(row: StepRow) -> bool:
    """Whether a row enters gates: read in its source, of a strategy that is known."""
    return row.status in TOLD and not row.unknown


def predicted(rows: Sequence[StepRow], fits: Mapping[str, MachineFit]) -> list[tuple[StepRow, Forecast]]:
    """Rows with their predictions; those that have none are left out."""
    found, _ = forecast(rows, lambda preset: fits.get(preset) or like_fit(Topology.load(preset), fits, preset))
    by_id = {f.id: f for f in found}
    return [(row, by_id[row.id]) for row in rows if row.id in by_id]


def by_source(pairs: Sequence[tuple[StepRow, Forecast]]) -> list[dict[str, Any]]:
    """Errors by source and quantity, beside what is asked for and what others reach."""
    out: list[dict[str, Any]] = []
    for source in sorted({row.table for row, _ in pairs}):
        for quantity in (SECONDS, *BYTES):
            mine = [
                (getattr(f, quantity), getattr(row.measured, quantity))
                for row, f in pairs
                if row.table == source and getattr(row.measured, quantity)
            ]
            if not mine:
                continue
            told = errors(*np.array(mine).T)
            key = source, quantity
            out.append(
                {"source": source, "quantity": quantity, "count": told["count"]}
                | {name: told[f"{name}_error_percent"] for name in ("mean", "median", "p90", "max")}
                | {"asked": dict(ASKED.get(key, {})), "others reach": dict(PEERS.get(key, {}))}
            )
    return out


def groups(rows: Iterable[StepRow], source: str) -> dict[Any, list[StepRow]]:
    """Plans of a source that are ranked against each other."""
    found: dict[Any, list[StepRow]] = {}
    for row in rows:
        if row.table == source and comparable(row) and row.measured.seconds_per_step:
            found.setdefault(row.group, []).append(row)
    return {group: mine for group, mine in found.items() if len(mine) >= LEAST}


def left_out(rows: Sequence[StepRow], seed: int) -> list[dict[str, Any]]:
    """Every group predicted by parameters that were fitted without any of its rows."""
    fold: dict[Any, int] = {}
    for source in RANKED:
        mine = sorted(groups(rows, source), key=lambda group: hashed(seed, repr(group)))
        # Few groups have a fold each.
        fold |= {group: k % max(FOLDS, 3) for k, group in enumerate(mine)}
    out: list[dict[str, Any]] = []
    for number in sorted({*fold.values()}):
        apart = {group for group, k in fold.items() if k == number}
        rest = [row for row in rows if row.group not in apart]
        tested = [row for row in rows if row.group in apart and comparable(row) and row.measured.seconds_per_step]
        machines = {row.cluster.preset for row in tested}
        pairs = predicted(tested, fit_machines(rest, sorted(machines)))
        for group in apart:
            mine = [(f.seconds_per_step, row) for row, f in pairs if row.group == group]
            a, b = np.array([x for x, _ in mine]), np.array([row.measured.seconds_per_step for _, row in mine])
            first = mine[0][1]
            out.append(
                {
                    "source": first.table,
                    "model": first.model.name,
                    "devices": first.cluster.devices,
                    "batch": first.strategy.global_batch,
                    "rows": len(mine),
                    "tau": kendall_tau(a, b),
                    "regret": regret(a, b),
                    "mean": float(np.abs(a / b - 1).mean()) * 100,
                }
            )
    return out


def ranked(each: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Means of groups, by source."""
    out: list[dict[str, Any]] = []
    for source in RANKED:
        mine = [g for g in each if g["source"] == source]
        if mine:
            taus = [g["tau"] for g in mine if not np.isnan(g["tau"])]
            out.append(
                {
                    "source": source,
                    "groups": len(mine),
                    "rows": sum(g["rows"] for g in mine),
                    "tau": float(np.mean(taus)) if taus else None,
                    "regret": float(np.mean([g["regret"] for g in mine])),
                    "asked": dict(ASKED_RANKS[source]),
                }
            )
    return out


def intervals(pairs: Sequence[tuple[StepRow, Forecast]]) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Coverage and width of intervals of seconds by source, and how widths and errors go together."""
    timed = [(row, f) for row, f in pairs if row.measured.seconds_per_step]
    measured = np.array([row.measured.seconds_per_step for row, _ in timed], dtype=float)
    now = np.array([f.seconds_per_step for _, f in timed])
    low, high = np.array([f.seconds_interval for _, f in timed]).T
    off, half = np.abs(np.log(measured / now)), np.log(high / low) / 2
    inside, wide = off <= half, (high - low) / (high + low)
    out: list[dict[str, Any]] = []
    sources = np.array([row.table for row, _ in timed])
    for source in sorted({*sources.tolist()}):
        at = sources == source
        out.append(
            {
                "source": source,
                "count": int(at.sum()),
                "covered": float(inside[at].mean()) * 100,
                "median half width": float(np.median(wide[at])) * 100,
                "constant half width of equal coverage": _constant(off[at], inside[at]),
                "asked": ASKED_COVERAGE.get(source),
            }
        )  # fmt: skip
    return out, {
        "count": len(timed),
        "covered": float(inside.mean()) * 100,
        "median half width": float(np.median(wide)) * 100,
        "constant half width of equal coverage": _constant(off, inside),
        "spearman of width and error": spearman(half, off),
    }


def _constant(off: np.ndarray, inside: np.ndarray) -> float:
    """The half width in percent that, the same for all, covers as many."""
    count = int(inside.sum())
    return float(np.tanh(np.sort(off)[count - 1])) * 100 if count else 0.0


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """The correlation of ranks; ties have their mean rank."""

    def places(x: np.ndarray) -> np.ndarray:
        _, back, counts = np.unique(x, return_inverse=True, return_counts=True)
        ends = np.cumsum(counts)
        return (ends - (counts - 1) / 2)[back]

    return float(np.corrcoef(places(a), places(b))[0, 1])


def memory_said(pairs: Sequence[tuple[StepRow, Forecast]]) -> dict[str, Any]:
    """Rows that ran out of memory and were said to, and measured rows that were said not to fit."""
    out_of = [(row, f) for row, f in pairs if row.measured.oom]
    ran = [(row, f) for row, f in pairs if not row.measured.oom and row.measured.seconds_per_step]
    wrong = [row for row, f in ran if not f.fits]
    return {
        "out of memory": len(out_of),
        "said not to fit": [row.id for row, f in out_of if not f.fits],
        "said to fit": [row.id for row, f in out_of if f.fits],
        "measured": len(ran),
        "falsely said not to fit": [row.id for row in wrong],
        "falsely, percent": 100 * len(wrong) / max(len(ran), 1),
        "by source": dict(Counter(row.table for row in wrong)),
        "asked": {"out of memory said": "5 of 6", "falsely, percent": 1.0},
    }


def show(errors_of: Sequence[Mapping[str, Any]], result: Mapping[str, Any]) -> None:
    """Print what was found."""
    columns = ("source", "quantity", "count", "mean", "median", "p90", "max")
    lines = [[r[c] for c in columns] + [" ".join(f"{k} {v:g}" for k, v in r["asked"].items())] for r in errors_of]
    print(table([*columns, "asked"], lines, "held-out rows, percent"))
    keys = ("source", "groups", "rows", "tau", "regret")
    print(table(keys, [[r[k] for k in keys] for r in result["ranks"]], "groups left out"))
    print(table(list(result["intervals"][0]), [list(r.values()) for r in result["intervals"]], "90 % intervals"))
    print(result["all intervals"])
    print(result["memory"])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_accuracy", description=__doc__)
    parser.add_argument("rows", type=Path, nargs="+", metavar="ROWS", help="files of measured steps, JSON lines")
    parser.add_argument("--seed", type=int, default=1, help="of what is held out (default %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS / "step_accuracy.json", help="the result file")
    options = parser.parse_args()
    rows = [row for path in options.rows for row in read_steps(path)]
    apart = [row for row in rows if hashed(options.seed, row.id) % SHARE == 0]
    names = {row.id for row in apart}
    fits = fit_machines([row for row in rows if row.id not in names])
    told = predicted([row for row in apart if comparable(row)], fits)
    searched = predicted([row for row in apart if not comparable(row)], fits)
    found = by_source(told)
    widths, together = intervals(told)
    each = left_out(rows, options.seed)
    result = {
        "held out": {"rows": len(apart), "of": len(rows), "compared": len(told)},
        "parameters of machines": {
            name: {k: getattr(fit.parameters, k) for k in fit.names} for name, fit in sorted(fits.items())
        },
        "errors": found,
        "errors, fields unpublished, no gate": by_source(searched),
        "ranks": ranked(each),
        "groups": each,
        "intervals": widths,
        "all intervals": together,
        "memory": memory_said(predicted(rows, fits)),
        "memory, held-out rows": memory_said(told + searched),
        "numbers": number_table(),
        "numbers that the table lacks": unlisted(),
        "variants tried": VARIANTS,
        "predictions": [
            {"id": row.id, "measured": row.measured.seconds_per_step, "predicted": f.seconds_per_step,
             "interval": list(f.seconds_interval)}
            for row, f in told
            if row.measured.seconds_per_step
        ],
    }  # fmt: skip
    show(found, result)
    parameters = {"seed": options.seed, "share": SHARE, "folds": FOLDS, "files": [path.name for path in options.rows]}
    write(options.out, record(parameters, result))


if __name__ == "__main__":
    main()
