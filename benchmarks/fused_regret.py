"""The decision whether to fuse, as users get it: its regret on shapes that were drawn after the code was done.

`fused.calibrate` measures constants, `sp.fuse` decides by them on the program of each shape, and two processes run
every variant that it could have chosen: the pair unfused (the library's computation, copies through the same heap) and
fused in every number of tiles. Shapes are drawn by the id of the commit. Of the repetitions every other one says which
variant is best, the others what the choice takes beside it: regret is the median ratio of the two there, less 1, and
may be below 0. Where neighbours stretch the wall's time, the processor time of the threads counts. `--busy N` runs N
neighbours.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common import arguments, commit, geomean, record, table, write

import shardplan as sp
from shardplan.core.program import Program
from shardplan.fused.deciding.calibrate import LEARNT, calibrate, choose_clock
from shardplan.fused.deciding.trials import ALONE, RANKS, Shape, Times, measure_trials
from shardplan.hardware.prices.fused import FusedConstants

COUNT = 40
MEAN, WORST, BESIDE = 0.05, 0.20, 1.05  # asked of regret, and of the chosen over the unfused
BOX = (
    'version = 1\nname = "box"\n[device]\nflops = { f32 = "0.1 TFLOP/s" }\nmemory = "8 GB"\n'
    'memory_bandwidth = "10 GB/s"\n[[levels]]\nname = "core"\nsize = 2\nlink = "switch"\nbandwidth = "5 GB/s"\n'
    'latency = "5 us"\nsource = "nominal"\n'
)


def drawn_shapes(word: str, count: int = COUNT) -> list[Shape]:
    """So many shapes by a word, none of them learnt: log-uniform, of at most some 20 ms."""
    dice = random.Random(word)

    def size(low: int, high: int, step: int) -> int:
        return max(step, round(low * (high / low) ** dice.random() / step) * step)

    found: list[Shape] = []
    while len(found) < count:
        kind = ("product", "bags", "vector")[len(found) * 3 // count]
        if kind == "product":
            shape: Shape = kind, (size(64, 2048, 16), size(64, 2048, 8), size(24, 1024, 8))
            fits = shape[1][0] * shape[1][1] * shape[1][2] < 3e8
        elif kind == "bags":
            shape = kind, (size(1, 24, 1), size(256, 4096, 16), size(1, 64, 1), size(32, 256, 16))
            fits = shape[1][0] * shape[1][1] * shape[1][2] * shape[1][3] < 3e7 and shape[1][0] * shape[1][3] < 2048
        else:
            shape = kind, (size(256, 32768, 16), size(64, 4096, 8))
            fits = shape[1][0] * shape[1][1] < 1e7
        if fits and shape not in LEARNT and shape not in found:
            found.append(shape)
    return found


def program_of(shape: Shape) -> Program:
    """The pair as a program of two devices."""
    kind, numbers = shape
    head = f"program\n  mesh x={RANKS}\n"
    if kind == "product":
        m, n, k = numbers
        return Program.parse(
            f"{head}  input %a: f32[{RANKS}@x, {m}, {k}]\n  input %b: f32[{RANKS}@x, {k}, {n}]\n"
            f'  %z = einsum(%a, %b; spec="wmk,wkn->wmn"): f32[{RANKS}@x, {m}, {n}]\n'
            f"  %y = all_to_all(%z; src_dim=0, dst_dim=1, axes=(x)): f32[{RANKS}, {m}@x, {n}]\n  output %y"
        )
    if kind == "vector":
        m, k = numbers
        return Program.parse(
            f"{head}  input %a: f32[{m}, {RANKS * k}@x]\n  input %b: f32[{RANKS * k}@x]\n"
            f'  %z = einsum(%a, %b; spec="mk,k->m"): f32[{m}]{{+x}}\n'
            f"  %y = all_reduce(%z; axes=(x)): f32[{m}]\n  output %y"
        )
    tables, batch, length, dim = numbers
    if tables == 1:
        return Program.parse(
            f"{head}  input %t: f32[20000, {RANKS * dim}@x]\n  input %i: i32[{batch}, {length}]\n"
            f"  %b = embedding_bag(%t, %i): f32[{batch}, {RANKS * dim}@x]\n"
            f"  %y = all_to_all(%b; src_dim=1, dst_dim=0, axes=(x)): f32[{batch}@x, {RANKS * dim}]\n  output %y"
        )
    each = range(tables)
    lines = [f"  input %t{i}: f32[20000, {RANKS * dim}@x]\n  input %i{i}: i32[{batch}, {length}]" for i in each]
    for i in each:
        lines += [f"  %b{i} = embedding_bag(%t{i}, %i{i}): f32[{batch}, {RANKS * dim}@x]",
                  f'  %e{i} = expand(%b{i}; spec="b d -> b one=1 d"): f32[{batch}, 1, {RANKS * dim}@x]']  # fmt: skip
    names = ", ".join(f"%e{i}" for i in each)
    lines.append(f"  %c = concat({names}; dim=1): f32[{batch}, {tables}, {RANKS * dim}@x]")
    lines.append(f"  %y = all_to_all(%c; src_dim=2, dst_dim=0, axes=(x)): f32[{batch}@x, {tables}, {RANKS * dim}]")
    return Program.parse(head + "\n".join(lines) + "\n  output %y")


def decided(shape: Shape, constants: FusedConstants) -> tuple[str, Mapping[str, float]]:
    """What `sp.fuse` chooses, and the seconds that it predicts."""
    (row,) = sp.fuse(program_of(shape), sp.Topology.parse(BOX), constants).rows
    return row.choice, row.seconds


def regret_row(shape: Shape, times: Times, choice: str, said: Mapping[str, float], clock: int) -> dict[str, Any]:
    """A shape: the best variant by one half of the repetitions, the choice beside it by the other."""
    ways = {name: [each[clock] for each in some] for name, some in times.items() if name not in ALONE}
    first = {name: statistics.median(some[::2]) for name, some in ways.items()}
    best = min(first, key=lambda name: first[name])

    def ratio(a: str, b: str) -> float:
        return statistics.median(x / y for x, y in zip(ways[a][1::2], ways[b][1::2], strict=True))

    name = f"{shape[0]} {'x'.join(map(str, shape[1]))}"
    told: dict[str, Any] = {"shape": name, "chosen": choice, "best": best, "regret": ratio(choice, best) - 1}
    told |= {"chosen / unfused": ratio(choice, "unfused"), "predicted": dict(said)}
    alone = {each: statistics.median(x[clock] for x in times[each]) for each in ALONE if each in times}
    return told | {"seconds": alone | {way: statistics.median(some) for way, some in ways.items()}}


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What is asked, and what was found."""
    regrets = [row["regret"] for row in rows]
    return {
        f"mean regret (asked {MEAN})": statistics.fmean(regrets),
        f"worst regret (asked {WORST})": max(regrets),
        "median regret": statistics.median(regrets),
        f"chosen / unfused, geometric mean (asked {BESIDE})": geomean(row["chosen / unfused"] for row in rows),
        "worst chosen / unfused": max(row["chosen / unfused"] for row in rows),
        "shapes where fused was chosen": sum(row["chosen"] != "unfused" for row in rows),
        "mean regret by kind": {
            kind: statistics.fmean(row["regret"] for row in rows if row["shape"].startswith(kind))
            for kind in ("product", "bags", "vector")
        },
    }


def under(busy: int, count: int, seed: str) -> dict[str, Any]:
    """Calibration, choices and times beside so many neighbours."""
    loop = [sys.executable, "-c", "while True: pass"]
    neighbours = [subprocess.Popen(loop) for _ in range(busy)]
    try:
        load, constants, shapes = os.getloadavg()[0], calibrate(), drawn_shapes(seed)
        choices = [decided(shape, constants) for shape in shapes]
        times, _ = measure_trials(shapes, count)
    finally:
        for each in neighbours:
            each.kill()
            each.wait()
    clock, word = choose_clock(times)
    rows = [regret_row(shape, t, *choice, clock) for shape, t, choice in zip(shapes, times, choices, strict=True)]
    told = {"neighbours": busy, "load before": load, "load after": os.getloadavg()[0], "clock": word}
    return told | {"summary": summary(rows), "constants": str(constants), "rows": rows}


def main() -> None:
    parser = arguments(
        "fused_regret", __doc__ or "", 16, of="repetitions of each variant, half of them to choose the best"
    )
    parser.add_argument("--busy", type=int, nargs="*", default=[0, 2], help="neighbours, a table for each number")
    parser.add_argument(
        "--seed", default=commit(), help="the word by which shapes are drawn, by default the commit's id"
    )
    options = parser.parse_args()
    found = [under(busy, options.count, options.seed) for busy in options.busy]
    for each in found:
        lines = [[r["shape"], r["chosen"], r["best"], 100 * r["regret"], r["chosen / unfused"]] for r in each["rows"]]
        title = f"{each['neighbours']} neighbours of ours, load {each['load before']:.1f}, {each['clock']}"
        print(table(("shape", "chosen", "best", "regret %", "chosen / unfused"), lines, title))
        for name, value in each["summary"].items():
            print(f"{name}: {value}")
    write(options.out, record({"count": options.count, "seed": options.seed}, {"tables": found}))


if __name__ == "__main__":
    main()
