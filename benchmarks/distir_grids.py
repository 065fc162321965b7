"""The grids of DistIR's two searches, every configuration by stage-level events, and what its mistakes do to a ranking.

`python -m benchmarks.distir_grids [--count 100] [--parity]`: the GPT grid (1,755 forward passes) and the MLP grid
(1,263 training steps), for which DistIR needs about 5 CPU-hours and 20 minutes. Processor seconds on one core, in a
fresh process for each grid and each of REPEATS runs: models, readings and schedules included, imports not. `count`
configurations of each, drawn by a seed, are worked out again one by one from the times of their chunks, action by
action, without folding or extrapolation. The machine is DistIR's own, nothing derated: 14 TFLOP/s, 900 GB/s, 10 us a
launch, 25 Gb/s between two devices; collectives are rings that start at once.

With `--parity` every configuration is also priced as DistIR does (`simulation.parity`; a quarter of an hour), and its
best of each group (equal model, world and batch) is compared with ours: how often it is another, and by how much its
choice is slower by our count. Without it the last such comparison stays in the result file.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
from time import process_time
from typing import Any

import numpy as np
from benchmarks.common import RESULTS, arguments, record, table, write
from benchmarks.distir_points import gpt_grid, mlp_grid

import shardplan as sp
from shardplan.hardware.level import DeviceSpec, Level
from shardplan.simulation.closed.configurations import Configurations
from shardplan.simulation.closed.form import ClosedForm
from shardplan.simulation.closed.parameters import Parameters
from shardplan.simulation.parity import DistirPoint, distir
from shardplan.simulation.step_events import StepEvents
from shardplan.simulation.sweep import StageSeconds
from shardplan.strategy.schedules import Times, replay, schedule

ASKED = {"gpt": 4.0, "mlp": 2.0}  # seconds
REPEATS, SEED, SAME = 3, 7, 1e-12
DEVICE = DeviceSpec(flops=(("*", 1.4e13),), memory_bandwidth=9e11, memory=float("inf"))
MACHINE = Parameters(product=1.0, stream=1.0, launch=1e-5, network=1.0, half=0.0)


def box(world: int) -> sp.Topology:
    """DistIR's machine, of so many devices."""
    return sp.Topology("distir", (Level("gpu", world, "switch", 25e9 / 8, 0.0),), DEVICE, library="ring")


def points(grid: str) -> tuple[DistirPoint, ...]:
    """The configurations of a grid."""
    return gpt_grid() if grid == "gpt" else mlp_grid()


class Grid:
    """A grid, priced; models are read once."""

    def __init__(self, grid: str) -> None:
        self.forward, self.points, self.forms = grid == "gpt", points(grid), dict[str, ClosedForm]()

    def events(self, point: DistirPoint) -> StepEvents:
        """What prices configurations of a model on a world."""
        name, world = str(point.model), point.data * point.tensor * point.pipeline
        if name not in self.forms:
            more = {"seq": 8} if self.forward else {}  # DistIR's sequences have 8 tokens
            self.forms[name] = ClosedForm(sp.Model.load(name, **more), box(world), MACHINE)
        return StepEvents(self.forms[name].on(box(world), MACHINE), self.forward)

    def seconds(self) -> list[float]:
        """Seconds of every configuration."""
        groups: dict[tuple[str, int], list[int]] = {}
        for k, p in enumerate(self.points):
            groups.setdefault((str(p.model), p.data * p.tensor * p.pipeline), []).append(k)
        found = [0.0] * len(self.points)
        for places in groups.values():
            c = Configurations.of([self.points[k].strategy for k in places])
            out = self.events(self.points[places[0]])(c)
            for k, seconds in zip(places, out.seconds.tolist(), strict=True):
                found[k] = seconds
        return found

    def alone(self, k: int) -> float:
        """Seconds of one configuration, action by action."""
        point = self.points[k]
        made = self.events(point).stages(Configurations.of([point.strategy]))
        if self.forward:
            return forward_end(made, point.strategy.microbatches)
        times = Times(*(x[0].tolist() for x in (made.forward, made.backward_input, made.backward_weight)))
        send = float(made.send[0].max(initial=0.0))
        found = schedule("1f1b", point.pipeline, point.strategy.microbatches)
        # What comes once a step a rank begins when its own passes are done.
        return replay(found, times, message=send).makespan + float(made.after[0])


def forward_end(made: StageSeconds, many: int) -> float:
    """When the last chunk has made the last microbatch."""
    ends = np.zeros(made.chunks)
    for _ in range(many):
        there = 0.0
        for k in range(made.chunks):
            ends[k] = max(ends[k], there) + made.forward[0, k]
            there = ends[k] + (made.send[0, k] if k + 1 < made.chunks else 0.0)
    return float(ends[-1])


def timed(grid: str) -> tuple[float, list[float]]:
    """Processor seconds of a grid in this process, and what it found."""
    started = process_time()
    found = Grid(grid).seconds()
    return process_time() - started, found


def cold(grid: str) -> float:
    """The same in a process of its own."""
    code = f"from benchmarks.distir_grids import timed; print(timed({grid!r})[0])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


def measured(grid: str, count: int) -> dict[str, Any]:
    """Speed, and configurations worked out one by one."""
    taken = [cold(grid) for _ in range(REPEATS)]
    priced = Grid(grid)
    found = priced.seconds()
    drawn = random.Random(SEED).sample(range(len(found)), min(count, len(found)))
    apart = max(abs(priced.alone(k) / found[k] - 1) for k in drawn)
    return {
        "configurations": len(found),
        "seconds": statistics.median(taken),
        "runs": taken,
        "asked": ASKED[grid],
        "met": statistics.median(taken) <= ASKED[grid],
        "again one by one": len(drawn),
        "farthest apart": apart,
        "the same": apart <= SAME,
    }


def rankings(grid: str) -> dict[str, Any]:
    """DistIR's best of each group beside ours."""
    ours, taken = Grid(grid).seconds(), process_time()
    theirs: list[float] = []
    for p in points(grid):
        found = distir(p)
        theirs.append(float("inf") if found.failure is not None else found.seconds)
    taken = process_time() - taken
    groups: dict[tuple[str, int, int], list[int]] = {}
    for k, p in enumerate(points(grid)):
        groups.setdefault((str(p.model), p.data * p.tensor * p.pipeline, p.global_batch), []).append(k)
    regrets = [ours[min(places, key=theirs.__getitem__)] / min(ours[k] for k in places) - 1
               for places in groups.values() if len(places) > 1]  # fmt: skip
    return {
        "groups": len(regrets),
        "another best": sum(r > 1e-9 for r in regrets),
        "mean slower": statistics.fmean(regrets),
        "most slower": max(regrets),
        "parity seconds": taken,
    }


def main() -> None:
    parser = arguments("distir_grids", "DistIR's grids by events.", 100, of="configurations worked out one by one")
    parser.add_argument("--parity", action="store_true", help="also price every configuration as DistIR does")
    options = parser.parse_args()
    rows = {grid: measured(grid, options.count) for grid in ASKED}
    columns = [name for name in rows["gpt"] if name != "runs"]
    print(table(["grid", *columns], [[g, *(row[c] for c in columns)] for g, row in rows.items()], "DistIR's grids"))
    last = RESULTS / "distir_grids.json"
    said: dict[str, Any] = {}
    if options.parity:
        said = {grid: rankings(grid) for grid in ASKED}
    elif last.exists():
        said = json.loads(last.read_text(encoding="utf-8")).get("rankings", {})
    for grid, row in said.items():
        print(f"{grid}: {row}")
    write(options.out, record({"count": options.count, "repeats": REPEATS, "seed": SEED}, {**rows, "rankings": said}))


if __name__ == "__main__":
    main()
