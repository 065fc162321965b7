"""How many configurations of a pipeline are simulated a second: by stage-level events, by the closed form, by a replay.

`python -m benchmarks.sweep_speed [--count 1000]`: processor seconds on one core, median of REPEATS runs. Every
configuration has other times of its chunks and messages, by a seeded chance. `cold`: nothing of the schedule is
remembered, compiling counts. Beside them `replay`, which runs the lists of one configuration in plain Python, and whose
makespans must be the same. `closed / events` says how near the closed form is on these unequal stages, in the mean; it
is never above. `without ways` is `near=False`. The large cases are one configuration, cold, with periods extrapolated
where a regime is reached.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from time import process_time
from typing import Any

import numpy as np
from benchmarks.common import arguments, record, table, write

from shardplan.simulation.sweep import StageSeconds, closed_step, compile_schedule, sweep
from shardplan.strategy.schedules import Times, replay, schedule

EVENTS, CLOSED = 1_000.0, 1_000_000.0  # configurations a second that were asked of events and of the closed form
RANKS, MICROBATCHES, REPEATS, PEERS, MANY = 8, 64, 5, 3, 200
CASES = (("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2), ("v-half", 2), ("dualpipe", 2), ("gpipe", 1))
LARGE = (("1f1b", 64, 512, 1), ("interleaved", 64, 512, 2), ("zb-h1", 64, 512, 1), ("1f1b", 16, 4096, 1))


def stages(seed: int, n: int, chunks: int) -> StageSeconds:
    """Times of n configurations, all different."""
    random = np.random.default_rng(seed)
    forward, backward, weight = (random.uniform(0.8, 1.2, (n, chunks)) for _ in range(3))
    send, back = (random.uniform(0, 0.1, (n, chunks - 1)) for _ in range(2))
    return StageSeconds(forward, backward, weight, send, back)


def forget() -> None:
    """Empty what the modules of the sweep remember."""
    for name, module in list(sys.modules.items()):
        if name.startswith("shardplan.simulation.sweep."):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def seconds(work: Callable[[int], Any], before: Callable[[], None] = lambda: None) -> float:
    """The median of what a run takes, each with another seed."""
    taken: list[float] = []
    for seed in range(REPEATS):
        before()
        started = process_time()
        work(seed)
        taken.append(process_time() - started)
    return statistics.median(taken)


def row(name: str, v: int, count: int) -> dict[str, Any]:
    """One schedule at p = RANKS, m = MICROBATCHES."""

    def ready() -> Any:
        return compile_schedule(name, RANKS, MICROBATCHES, v)

    chunks, many = ready().chunks, MANY * count
    some = [stages(seed, count, chunks) for seed in range(REPEATS)]
    more = [stages(seed, many, chunks) for seed in range(REPEATS)]
    one = stages(99, 1, chunks)
    cold = seconds(lambda k: sweep(ready(), some[k]), forget)
    warm = seconds(lambda k: sweep(ready(), some[k]))
    alone = seconds(lambda k: sweep(ready(), one), forget)
    closed_cold = seconds(lambda k: closed_step(ready(), more[k]), forget)
    closed = seconds(lambda k: closed_step(ready(), more[k]))
    far = seconds(lambda k: closed_step(ready(), more[k], near=False))
    swept = sweep(ready(), some[0])
    found = schedule(name, RANKS, MICROBATCHES, v)
    peers: list[float] = []
    for k in range(PEERS):
        each = some[0][k : k + 1]
        copies = found.copies
        times = Times(*(x[0].tolist() * copies for x in (each.forward, each.backward_input, each.backward_weight)))
        bare = StageSeconds(each.forward, each.backward_input, each.backward_weight, np.zeros_like(each.send))
        started = process_time()
        makespan = replay(found, times).makespan
        peers.append(process_time() - started)
        assert abs(sweep(ready(), bare).makespan[0] / makespan - 1) < 1e-12, "the replay says something else"
    return {
        "schedule": name,
        "interleave": v,
        "events a second, cold": count / cold,
        "events a second": count / warm,
        "one, cold, ms": 1e3 * alone,
        "closed a second, cold": many / closed_cold,
        "closed a second": many / closed,
        "without ways a second": many / far,
        "replay a second": 1 / statistics.median(peers),
        "events / replay": statistics.median(peers) * count / cold,
        "closed / events": float((closed_step(ready(), some[0]) / swept.makespan).mean()),
        "without ways": float((closed_step(ready(), some[0], near=False) / swept.makespan).mean()),
    }


def large(name: str, p: int, m: int, v: int) -> dict[str, Any]:
    """One configuration of many microbatches."""
    skipped: list[int] = []

    def work(seed: int) -> None:
        ready = compile_schedule(name, p, m, v)
        swept = sweep(ready, stages(seed, 1, ready.chunks))
        skipped.append(int(swept.skipped[0]) * (ready.repeats.period if ready.repeats else 0))

    taken = seconds(work, forget)
    return {
        "schedule": name,
        "ranks": p,
        "microbatches": m,
        "interleave": v,
        "seconds, cold": taken,
        "skipped": skipped,
    }


def main() -> None:
    options = arguments(
        "sweep_speed", "Configurations of a pipeline simulated a second.", 1000, of="configurations at once"
    ).parse_args()
    rows = [row(name, v, options.count) for name, v in CASES]
    big = [large(*case) for case in LARGE]
    met = {
        "events": min(each["events a second, cold"] for each in rows[:2]) >= EVENTS,
        "closed": min(each["closed a second"] for each in rows) >= CLOSED,
    }
    columns = [key for key in rows[0] if key != "interleave"]
    print(table(columns, [[each[key] for key in columns] for each in rows], f"p={RANKS}, m={MICROBATCHES}"))
    print(table(list(big[0]), [[str(x) if isinstance(x, list) else x for x in each.values()] for each in big]))
    print(f"asked for: {EVENTS:g} and {CLOSED:g} a second; met: {met}")
    parameters = {
        "count": options.count,
        "closed count": MANY * options.count,
        "ranks": RANKS,
        "microbatches": MICROBATCHES,
        "repeats": REPEATS,
    }
    write(
        options.out,
        record(parameters, {"asked": {"events": EVENTS, "closed": CLOSED}, "met": met, "rows": rows, "large": big}),
    )


if __name__ == "__main__":
    main()
