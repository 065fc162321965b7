"""What a step takes: the closed form and events of stages beside ops, on drawn strategies of realistic sizes.

`python -m benchmarks.time_agreement [--count 200] [--seed N]`: models of hidden 2,048 to 16,384, and strategies of all
schedules, drawn as `tests/simulation/drawn_strategies.py` draws them, on DGX H100 with the parameters that ship, stages
cut alike. The default seed was set before any was looked at; what was mended since was seen on its draws, so that
another seed says what is new. A strategy takes two seconds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from benchmarks.common import Progress, arguments, record, table, write
from tests.simulation.drawn_strategies import DrawnTime, drawn_times

from shardplan.strategy.strategy_text import strategy_text

COUNT = 200
SEED = 20261127
ALIKE = 0.05  # of the seconds: beyond it a strategy is listed


def agreement(name: str, ratios: np.ndarray) -> dict[str, Any]:
    """Return how far the seconds of a fidelity are from those of ops."""
    return {
        "fidelity": name, "strategies": len(ratios), "within 5 %": float(np.mean(abs(ratios - 1) <= 0.05)),
        "within 12 %": float(np.mean(abs(ratios - 1) <= 0.12)), "least": float(ratios.min()),
        "median": float(np.median(ratios)), "most": float(ratios.max()),
    }  # fmt: skip


def main() -> None:
    """Draw, compare, print and write the result."""
    options = arguments("time_agreement", "The seconds of steps: closed form and events beside ops.", COUNT)
    options.add_argument("--seed", type=int, default=SEED, help="of what is drawn")
    given = options.parse_args()
    progress, found = Progress("strategies", given.count), list[DrawnTime]()
    for one in drawn_times(given.seed, given.count):
        found.append(one)
        progress.add(1)
    ratios = {name: np.array([getattr(one, name) / one.ops for one in found]) for name in ("closed", "events")}
    told = [agreement(name, values) for name, values in ratios.items()]
    print(table(list(told[0]), [list(row.values()) for row in told], "Seconds over those of ops"))
    far = [
        {"closed": one.closed / one.ops, "events": one.events / one.ops, "ops seconds": one.ops, "model": one.kind,
         "fields": one.fields, "microbatches": one.strategy.microbatches, "strategy": strategy_text(one.strategy)}
        for one in found if max(abs(one.closed / one.ops - 1), abs(one.events / one.ops - 1)) > ALIKE
    ]  # fmt: skip
    write(given.out, record({"count": given.count, "seed": given.seed}, {"agreement": told, "beyond 5 %": far}))


if __name__ == "__main__":
    main()
