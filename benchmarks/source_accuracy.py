"""Steps of sources that nobody fitted to: each source left out once, then each chip, then sources that were locked.

A source is a table of rows; those of one author with several releases count as one. Its rows are predicted by machines
fitted to all other rows, and where none is left by what machines with its chip have in common. Rows that are locked are
typed apart, their measurements in a file of its own that no fit reads: `--open` reads it, and the result says so.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from benchmarks.common import RESULTS, record, table, write
from benchmarks.step_accuracy import hashed, spearman

from shardplan.hardware.topology import Topology
from shardplan.simulation.accuracy.calibration import base_name, fit_machine, presets
from shardplan.simulation.accuracy.forecast import Forecast, forecast
from shardplan.simulation.accuracy.metrics import ranks
from shardplan.simulation.accuracy.step_fitting import usable
from shardplan.simulation.accuracy.step_rows import RowMeasured, StepRow, read_steps
from shardplan.simulation.closed.chips import chip_of
from shardplan.simulation.closed.machines import MachineFit, like_fit

ROWS = Path(__file__).parent / "rows"
MOST = 16  # rows of a table that are fitted to here: a larger one says no more, and takes minutes
TOLD = ("verified", "derived")
LEVEL = 0.9
Pairs = Sequence[tuple[StepRow, Forecast]]


def author(row: StepRow) -> str:
    """The source of a row: releases of one author's table are one."""
    for name in ("bridge", "torchtitan", "nemo_2", "mcore", "korthikanti", "simumax", "vtrain", "sc21"):
        if row.table.startswith(name) or (name == "bridge" and row.table.startswith("megatron_bridge")):
            return {"nemo_2": "nemo", "torchtitan": row.table}.get(name, name)
    return row.table


def chip_name(preset: str) -> str:
    """The chip of a preset's machine."""
    chip = chip_of(Topology.load(preset))
    return chip.name if chip else preset


def fewer(rows: Sequence[StepRow], most: int = MOST) -> list[StepRow]:
    """Rows of each table, at most so many, by a hash."""
    out: list[StepRow] = []
    for name in sorted({row.table for row in rows}):
        mine = sorted((row for row in rows if row.table == name), key=lambda row: hashed(1, row.id))
        out += mine[:most]
    return out


def predicted(rows: Sequence[StepRow], fits: Mapping[str, MachineFit]) -> list[tuple[StepRow, Forecast]]:
    """Rows with their predictions; a machine that was not fitted is as those with its chip."""
    found, _ = forecast(rows, lambda preset: fits.get(preset) or like_fit(Topology.load(preset), fits, preset))
    by_id = {f.id: f for f in found}
    return [(row, by_id[row.id]) for row in rows if row.id in by_id and row.measured.seconds_per_step]


def scores(pairs: Pairs) -> dict[str, Any]:
    """Errors, intervals and ranks of some rows, in percent."""
    measured = np.array([row.measured.seconds_per_step for row, _ in pairs], dtype=float)
    now = np.array([f.seconds_per_step for _, f in pairs])
    low, high = np.array([f.seconds_interval for _, f in pairs]).T
    off = np.abs(now / measured - 1) * 100
    half = (high - low) / (high + low) * 100
    told = ranks(now, measured, [row.group for row, _ in pairs])
    return {
        "count": len(pairs),
        "mean": float(off.mean()),
        "median": float(np.median(off)),
        "signed": float((now / measured - 1).mean() * 100),
        "max": float(off.max()),
        "covered": float(((low <= measured) & (measured <= high)).mean() * 100),
        "half width": float(np.median(half)),
        "tau": told["kendall_tau"],
        "regret": told["top1_regret_percent"],
    }


def interval_score(low: np.ndarray, high: np.ndarray, measured: np.ndarray) -> float:
    """The mean score of 90 % intervals of logarithms: width, and 20 times what lies outside (Gneiting and Raftery)."""
    a, b, x = np.log(low), np.log(high), np.log(measured)
    return float((b - a + 2 / (1 - LEVEL) * (np.maximum(a - x, 0) + np.maximum(x - b, 0))).mean())


def together(pairs: Pairs) -> dict[str, float]:
    """How intervals do over all rows, each source counting as one: the best constant beside them."""
    measured = np.array([row.measured.seconds_per_step for row, _ in pairs], dtype=float)
    now = np.array([f.seconds_per_step for _, f in pairs])
    low, high = np.array([f.seconds_interval for _, f in pairs]).T
    off, half = np.abs(np.log(measured / now)), np.log(high / low) / 2
    constants = np.linspace(0.02, 1.0, 99)
    best = min(interval_score(now * np.exp(-x), now * np.exp(x), measured) for x in constants)
    return {
        "rows": len(pairs),
        "covered": float((off <= half).mean() * 100),
        "median half width": float(np.median(np.tanh(half)) * 100),
        "interval score": interval_score(low, high, measured),
        "interval score of the best constant": float(best),
        "spearman of width and error": spearman(half, off),
    }


def is_mixture(row: StepRow) -> bool:
    """Whether a row's model has experts."""
    return row.model.family == "moe"


def parts(pairs: Pairs) -> dict[str, Any]:
    """Scores of dense rows and of mixtures."""
    split = {"dense": [p for p in pairs if not is_mixture(p[0])], "mixtures": [p for p in pairs if is_mixture(p[0])]}
    return {name: scores(mine) for name, mine in split.items() if mine}


def left_out(rows: Sequence[StepRow]) -> tuple[dict[str, Any], list[tuple[StepRow, Forecast]]]:
    """Every source predicted by machines fitted to all other sources."""
    out: dict[str, Any] = {}
    every: list[tuple[StepRow, Forecast]] = []
    sources = sorted({author(row) for row in rows})
    with ProcessPoolExecutor(2) as pool:
        for source, pairs in zip(sources, pool.map(_left_out, itertools.repeat(rows), sources), strict=True):
            if pairs:
                out[source] = scores(pairs) | {"parts": parts(pairs)}
                every += pairs
                print(source, {k: round(v, 1) for k, v in scores(pairs).items() if v is not None}, flush=True)
    return out, every


def _left_out(rows: Sequence[StepRow], source: str) -> list[tuple[StepRow, Forecast]]:
    tested = [row for row in rows if author(row) == source and row.measured.seconds_per_step and row.status in TOLD]
    if not tested:
        return []
    rest = fewer([row for row in rows if author(row) != source and usable(row)])
    return predicted(tested, _fits(rest, presets(tested)))


_ALONE: dict[tuple[str, tuple[str, ...]], MachineFit] = {}


def _fits(rows: Sequence[StepRow], machines: Sequence[str]) -> dict[str, MachineFit]:
    """What `fit_machines` gives these machines, and of others with their chips what they have alone: those are kept."""
    chips = {chip_name(p) for p in machines}
    split = {p: [row for row in rows if row.cluster.preset == p] for p in presets(rows) if chip_name(p) in chips}
    alone: dict[str, MachineFit] = {}
    for name, mine in split.items():
        if not base_name(name):
            key = name, tuple(row.id for row in mine)
            if key not in _ALONE:
                _ALONE[key] = fit_machine(mine, name, {})
            alone[name] = _ALONE[key]
    found = {name: fit_machine(split[name], name, alone) for name in machines if name in alone}
    based = {name: fit_machine(mine, name, alone) for name, mine in split.items() if base_name(name) in alone}
    return alone | found | based


def without_chips(rows: Sequence[StepRow]) -> dict[str, Any]:
    """Every chip predicted as if no steps had been measured on it."""
    out: dict[str, Any] = {}
    for chip in sorted({chip_name(p) for p in presets(rows)}):
        tested = [r for r in rows if chip_name(r.cluster.preset) == chip and r.status in TOLD]
        pairs = predicted(fewer(tested), {})
        if pairs:
            out[chip] = scores(pairs)
    return out


def opened(path: Path, measured: Path) -> list[StepRow]:
    """Locked rows with their measurements."""
    told = {}
    for text in measured.read_text().splitlines():
        one = json.loads(text)
        told[one["id"]] = msgspec.convert(one["measured"], RowMeasured)
    return [msgspec.structs.replace(row, measured=told[row.id]) for row in read_steps(path)]


def memory(rows: Sequence[StepRow], found: Sequence[Forecast]) -> dict[str, Any]:
    """Of rows with known ends: out of memory said, and false alarms, in percent."""
    fits = {f.id: f.fits for f in found}
    ends = [(row.measured.oom, fits[row.id]) for row in rows if row.measured.oom is not None and row.id in fits]
    out, ran = [fit for oom, fit in ends if oom], [fit for oom, fit in ends if not oom]
    return {
        "out of memory": len(out),
        "said, percent": 100 * float(np.mean([not fit for fit in out])) if out else None,
        "ran": len(ran),
        "false alarms, percent": 100 * float(np.mean([not fit for fit in ran])) if ran else None,
    }


def show(title: str, told: Mapping[str, Mapping[str, Any]]) -> None:
    """Print scores by source."""
    columns = ("count", "mean", "median", "signed", "max", "covered", "half width", "tau", "regret")
    print(table(["source", *columns], [[s, *(r[c] for c in columns)] for s, r in told.items()], title))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.source_accuracy", description=__doc__)
    parser.add_argument("rows", type=Path, nargs="*", metavar="ROWS", help="files of measured steps, JSON lines")
    parser.add_argument("--open", action="store_true", help="read the measurements of the locked rows, and say so")
    parser.add_argument("--out", type=Path, default=RESULTS / "source_accuracy.json", help="the result file")
    options = parser.parse_args()
    if options.open:
        write(options.out, _with_opened(json.loads(options.out.read_text())))
        return
    rows = [row for path in (*options.rows, ROWS / "open.jsonl") for row in read_steps(path)]
    sources, every = left_out(rows)
    chips = without_chips(rows)
    result: dict[str, Any] = {
        "sources left out": sources,
        "over sources": {
            "covered, mean": float(np.mean([s["covered"] for s in sources.values()])),
            "covered, least": float(min(s["covered"] for s in sources.values())),
            "half width, median": float(np.median([s["half width"] for s in sources.values()])),
        },
        "all of them": together(every),
        "parts": parts(every),
        "chips left out": chips,
    }
    show("sources left out, percent", sources)
    show("chips left out, percent", chips)
    print(result["over sources"], result["all of them"], result["parts"])
    parameters = {"files": [path.name for path in options.rows], "rows of a table fitted to": MOST}
    write(options.out, record(parameters, result))


def _with_opened(result: dict[str, Any]) -> dict[str, Any]:
    """A result with the locked rows, predicted by the parameters that ship; it counts how often that was done."""
    locked = opened(ROWS / "locked.jsonl", ROWS / "locked_measured.jsonl")
    found, _ = forecast(locked)
    by_id = {f.id: f for f in found}
    pairs = [(row, by_id[row.id]) for row in locked if row.id in by_id and row.measured.seconds_per_step]
    by = {s: [p for p in pairs if author(p[0]) == s] for s in sorted({author(row) for row, _ in pairs})}
    told = {s: scores(mine) | {"parts": parts(mine)} for s, mine in by.items()}
    rows = together(pairs) | {"parts": parts(pairs), "memory": memory(locked, found)}
    show("locked sources, percent", told)
    print(rows)
    count = result.get("openings", 0) + 1
    return result | {"locked sources": told, "locked rows": rows, "openings": count}


if __name__ == "__main__":
    main()
