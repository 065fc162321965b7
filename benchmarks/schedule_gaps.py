"""How far generators and the list scheduler are from the shortest schedule, at equal memory.

`python -m benchmarks.schedule_gaps [--count 8]`: every shop of at most four ranks and `count` microbatches that a
generator makes (its stages on ranks, its forwards in flight as the bound), at three stage times. The shortest is what
`solve` proves (a bound met, or the tree exhausted, within NODES of them, some 20 seconds); beside it what CP-SAT of
OR-tools (`pip install ortools`, in no extra) finds and proves in WORK of its deterministic seconds, on the constraints
written again here.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator
from time import process_time
from typing import Any

from benchmarks.common import arguments, record, table, write

from shardplan.errors import ScheduleError
from shardplan.strategy.schedules import GENERATORS, Shop, Times, in_flight, list_schedule, replay, schedule, solve

TIMES = ((1, 1, 1), (2, 3, 1), (3, 2, 2))  # F, I and W of a stage
RANKS, NODES, WORK = 4, 250_000, 15
F, I, W = range(3)  # noqa: E741


def shops(most: int) -> dict[Shop, dict[str, int]]:
    """All shops, with the makespan of each generator that makes them; DualPipe has every stage twice and is none."""
    found: dict[Shop, dict[str, int]] = {}
    for p in range(2, RANKS + 1):
        for m in range(1, most + 1):
            for name in GENERATORS:
                try:
                    made = schedule(name, p, m)
                except ScheduleError:  # it is not defined for these sizes
                    continue
                for times in TIMES if made.copies == 1 else ():
                    shop = Shop(made.owners, m, (times,) * made.stages, in_flight(made))
                    found.setdefault(shop, {})[name] = int(replay(made, Times(*times)).makespan)
    return found


def by_constraints(shop: Shop, longest: int) -> tuple[int, bool]:
    """The shortest makespan that CP-SAT finds, and whether it proves it; none is longer than `longest`."""
    from ortools.sat.python import cp_model  # pyright: ignore

    model, m, stages = cp_model.CpModel(), shop.microbatches, range(len(shop.owners))
    begin = {(s, k, n): model.new_int_var(0, longest, "") for s in stages for k in (F, I, W) for n in range(m)}
    end = {(s, k, n): v + int(shop.times[s][k]) for (s, k, n), v in begin.items()}
    for (s, k, n), start in begin.items():
        sources = [(s, k, n - 1)] if n else []
        sources += [(s, k - 1, n)] if k else []
        sources += [(s - 1, F, n)] if k == F and s else []
        sources += [(s + 1, I, n)] if k == I and s + 1 < len(stages) else []
        for source in sources:
            model.add(start >= end[source])
    for rank, mine in enumerate(shop.stages):
        passes = [key for key in begin if key[0] in mine]
        model.add_no_overlap(
            [model.new_fixed_size_interval_var(begin[key], int(shop.times[key[0]][key[1]]), "") for key in passes]
        )
        held = []
        for s in mine:
            for n in range(m):
                length = model.new_int_var(0, longest, "")
                held.append(model.new_interval_var(begin[s, F, n], length, end[s, W, n], ""))
        model.add_cumulative(held, [1] * len(held), shop.bounds[rank])
    last = model.new_int_var(0, longest, "")
    model.add_max_equality(last, [end[s, W, m - 1] for s in stages])
    model.minimize(last)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = WORK
    status = solver.solve(model)
    return round(solver.objective_value), status == cp_model.OPTIMAL


def rows(most: int) -> Iterator[dict[str, Any]]:
    """One row a shop."""
    for shop, made in shops(most).items():
        started = process_time()
        by_list = list_schedule(shop)
        quick = int(max(shop.ends(shop.orders(by_list))))
        quick_seconds, started = process_time() - started, process_time()
        ours = solve(shop, NODES, by_list)
        seconds = process_time() - started
        peer, proved = by_constraints(shop, min(quick, *made.values()))
        yield {
            "owners": shop.owners,
            "microbatches": shop.microbatches,
            "times": shop.times[0],
            "bounds": shop.bounds,
            "generators": made,
            "listed": quick,
            "listed, seconds": round(quick_seconds, 2),
            "solved": ours.makespan,
            "bound": ours.least,
            "nodes": ours.nodes,
            "seconds": round(seconds, 2),
            "CP-SAT": peer,
            "CP-SAT proved": proved,
        }


def summed(found: list[dict[str, Any]]) -> dict[str, Any]:
    """What the rows say together."""
    proved = [row for row in found if row["solved"] == row["bound"]]
    both = [row for row in proved if row["CP-SAT proved"]]
    sure = [row for row in found if row in proved or row["CP-SAT proved"]]
    known = [row | {"least": min(row["solved"], row["CP-SAT"])} for row in sure]
    gaps: dict[str, list[float]] = {}
    for row in known:
        for name, length in (row["generators"] | {"listed": row["listed"]}).items():
            gaps.setdefault(name, []).append(100 * (length / row["least"] - 1))
    return {
        "shops": len(found),
        "not proved by solve": len(found) - len(proved),
        "not proved by CP-SAT": sum(not row["CP-SAT proved"] for row in found),
        "proved by neither": len(found) - len(known),
        "proved by both": len(both),
        "of which differ": sum(row["solved"] != row["CP-SAT"] for row in both),
        "gaps, percent": {
            name: {
                "shops": len(some),
                "at the optimum": sum(gap == 0 for gap in some),
                "mean": round(sum(some) / len(some), 2),
                "max": round(max(some), 2),
            }
            for name, some in sorted(gaps.items())
        },
    }


def main() -> None:
    options = arguments(
        "schedule_gaps", "Gaps of schedules to the optimum at equal memory.", 8, of="microbatches at most"
    ).parse_args()
    found: list[dict[str, Any]] = []
    for row in rows(options.count):
        found.append(row)
        print(f"\r{len(found)}", end="", file=sys.stderr, flush=True)
    summary = summed(found)
    lines = [[name, *each.values()] for name, each in summary["gaps, percent"].items()]
    print(table(["schedule", "shops", "at the optimum", "mean gap %", "max gap %"], lines))
    print({k: v for k, v in summary.items() if k != "gaps, percent"})
    parameters = {"microbatches": options.count, "ranks": RANKS, "times": TIMES, "nodes": NODES, "CP-SAT work": WORK}
    parameters |= {"ortools": importlib.metadata.version("ortools")}
    write(options.out, record(parameters, {"summary": summary, "rows": found}))


if __name__ == "__main__":
    main()
