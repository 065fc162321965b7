"""The best plan for Llama 405B on 16,384 H100: every degree, microbatch, schedule, recomputation, ZeRO and placement.

`python -m benchmarks.search_405b [--count 100] [--all]`: processor seconds on one core, each of REPEATS runs in a
process of its own: the model, its readings and the enumeration included, imports not. `count` strategies drawn by a
seed are priced again one by one, and those that the pruned search ranks. With `--all` the whole space is also priced
without pruning, which must find the same plans and the same front; without it the last such run stays in the result
file. The space is counted by plain loops as well. `--events` searches at the stage-level events, too.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
import subprocess
import sys
from time import process_time
from typing import Any

import numpy as np
from benchmarks.common import RESULTS, arguments, record, table, write

import shardplan as sp
from shardplan.simulation.closed.configurations import Configurations
from shardplan.simulation.closed.form import ClosedForm
from shardplan.simulation.closed.machines import of_machine
from shardplan.simulation.searching.search import SearchResult
from shardplan.simulation.searching.space import StrategySpace

ASKED = 10.0  # seconds
MODEL, PRESET, NODES, DEVICES, BATCH = "llama3-405b", "grand-teton-h100", 2048, 16384, 2048
LAYERS, HEADS, SEQUENCE = 126, 128, 8192
REPEATS, SEED, SAME = 3, 11, 1e-12


def loaded() -> tuple[sp.Model, sp.Topology]:
    """The model and where it is trained."""
    return sp.Model.load(MODEL, precision="bf16"), sp.Topology.load(PRESET, nodes=NODES)


def found(prune: bool = True, fidelity: str = "closed") -> SearchResult:
    """Search."""
    model, topology = loaded()
    return sp.search(model, topology, BATCH, placements=True, prune=prune, fidelity=fidelity)


def timed(prune: bool, fidelity: str) -> tuple[float, dict[str, Any]]:
    """Processor seconds of a search, and what it says."""
    started = process_time()
    result = found(prune, fidelity)
    return process_time() - started, result.to_dict()


def cold(prune: bool = True, fidelity: str = "closed") -> tuple[float, dict[str, Any]]:
    """The same in a process of its own."""
    code = f"import json; from benchmarks.search_405b import timed; print(json.dumps(timed({prune}, {fidelity!r})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, said = json.loads(done.stdout)
    return float(seconds), said


def by_loops() -> int:
    """How many strategies there are, written apart: every combination of powers of two and divisors that is legal."""
    total = 0
    powers = [2**k for k in range(15)]
    for t, p, c in itertools.product(powers, powers, powers):
        if t * p * c > DEVICES or t > HEADS or p > LAYERS or SEQUENCE % c:
            continue
        d = DEVICES // (t * p * c)
        if BATCH % d:
            continue
        alive = sum(n > 1 for n in (p, d, c, t))
        inside = 3 * 6 * (2 if t > 1 else 1) * (2 if c > 1 else 1) * math.factorial(alive)
        for microbatch in (m for m in powers if (BATCH // d) % m == 0):
            many, orders = BATCH // d // microbatch, 1 if p == 1 else 2
            if p > 1 and many % p == 0 and LAYERS % p == 0:
                orders += sum(LAYERS % (p * v) == 0 for v in range(2, LAYERS + 1))
            total += orders * inside
    return total


def again(count: int) -> float:
    """How far strategies priced one by one are from the same priced together."""
    model, topology = loaded()
    space = StrategySpace.of(model, DEVICES, BATCH, precision="bf16", placements=True)
    drawn = random.Random(SEED).sample(range(space.count), count)
    some = [space.one(k) for k in drawn]
    together = Configurations({name: np.concatenate([c.columns[name] for c in some]) for name in some[0].columns})
    form = ClosedForm(model, topology, of_machine(topology))
    priced = form(together)
    far = 0.0
    for k, one in enumerate(some):
        alone = ClosedForm(model, topology, of_machine(topology)) if k < 5 else form
        out = alone(one)
        far = max(far, abs(out.seconds[0] / priced.seconds[k] - 1), abs(out.peak_bytes[0] / priced.peak_bytes[k] - 1))
    return float(far)


def rate(count: int) -> dict[str, float]:
    """Strategies a second, drawn over the whole space: the closed form alone, cold, set-up included and without it."""
    model, topology = loaded()
    space = StrategySpace.of(model, DEVICES, BATCH, precision="bf16", placements=True)
    frames = np.random.default_rng(SEED).permutation(len(space.frames))[: count // 18]
    which, orders, _ = space.pairs(frames)
    keep = np.random.default_rng(SEED).permutation(len(which))[: count // 18]
    where = np.repeat(frames[which[keep]], 18), np.repeat(orders[keep], 18), np.tile(np.arange(18), len(keep))
    form = ClosedForm(model, topology, of_machine(topology))
    c = space.columns(*where)
    started = process_time()
    for at in range(0, len(c), 73728):
        form(c[at : at + 73728])
    first = process_time() - started
    started = process_time()
    for at in range(0, len(c), 73728):
        form(c[at : at + 73728])
    return {"distinct": len(c), "a second, cold": len(c) / first, "a second": len(c) / (process_time() - started)}


def main() -> None:
    parser = arguments("search_405b", "The best plan for Llama 405B on 16,384 H100.", 100, of="priced one by one")
    parser.add_argument("--all", action="store_true", help="also price the whole space without pruning")
    parser.add_argument("--events", action="store_true", help="also search at stage-level events")
    options = parser.parse_args()
    last = json.loads(path.read_text(encoding="utf-8")) if (path := RESULTS / "search_405b.json").exists() else {}
    runs = [cold() for _ in range(REPEATS)]
    seconds, said = statistics.median(s for s, _ in runs), runs[0][1]
    result: dict[str, Any] = {
        "counted": said["counted"],
        "counted by loops": by_loops(),
        "priced": said["priced"],
        "pruned": said["pruned"],
        "front": len(said["pareto"]),
        "seconds": seconds,
        "runs": [s for s, _ in runs],
        "asked": ASKED,
        "met": seconds <= ASKED,
        "a second through search": said["counted"] / seconds,
        "closed form": rate(200_000),
        "farthest apart one by one": again(options.count),
        "ranked": said["ranked"],
        "pareto": said["pareto"],
        "without pruning": last.get("without pruning", {}),
        "events": last.get("events", {}),
    }
    if options.all:
        taken, whole = cold(prune=False)
        same = all(whole[name] == said[name] for name in ("ranked", "pareto"))
        result["without pruning"] = {"seconds": taken, "priced": whole["priced"], "the same": same}
    if options.events:
        taken, told = cold(fidelity="events")
        result["events"] = {"seconds": taken, "priced": told["priced"], "best": told["best"], "pruned": told["pruned"]}
    rows = [[k, v] for k, v in result.items() if isinstance(v, (int, float, bool))]
    print(table(["what", "figure"], rows, f"{MODEL} on {DEVICES} x {PRESET}, {BATCH} sequences a step"))
    print(result["closed form"], result["without pruning"], result["events"], sep="\n")
    write(options.out, record({"count": options.count, "repeats": REPEATS, "seed": SEED}, result))


if __name__ == "__main__":
    main()
