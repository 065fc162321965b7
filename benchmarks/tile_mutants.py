"""The checker of tile schedules beside a judge that tries every interleaving, and beside rules, right and wrong ones.

- **Mutants**: protocols of small random schedules (two or three ranks, at most six tiles a rank, one to four slots,
  a third with ranks of other sizes or with none), altered in ten ways, in equal shares of the wrong ones. What is wrong
  is the judge's word (`tests/fused/judge.py`), in one of the three modes of running; an alteration that does no harm
  counts among the right ones, beside unaltered ones. And protocols that chance made.
- **Rings** of 1 to 8 slots, without credits and with credits 0 to 10 epochs late, in four shapes of two and three ranks
  (`tests/fused/rings.py`): what is wrong is the word of a rule by hand, beside which shortest paths and the judge are
  counted where they differ. And random graphs of ranks whose rows differ, or which have none: by shortest paths.
- **Cost**: processor time of `check` for schedules and rings of eight ranks.

The judge tries as many epochs as slots, credits and slow waits ask for; where these are more than 200,000 states (of
graphs, 20,000) the rules have the word alone: `judged` counts the others. About five minutes.
"""

from __future__ import annotations

import time
from collections import Counter
from statistics import median

from benchmarks.common import arguments, record, table, write
from tests.fused.rings import named
from tests.fused.tried import tally, tally_chance, tally_rings, tally_unequal

from shardplan.fused.tiles.checker import check
from shardplan.fused.tiles.events import TileProtocol
from shardplan.fused.tiles.schedule import TileSchedule
from shardplan.fused.tiles.shapes import BlockShape, RowShape

MUTANTS = ("wrong", "missed", "right", "rejected", "ranks", "virtual", "resident")
RINGS = ("wrong", "missed", "right", "rejected", "paths differ", "judge differs", "judged")


def costs() -> dict[str, TileProtocol]:
    """What is checked on eight ranks."""
    rows = BlockShape.rows([[64 + i + j for j in range(8)] for i in range(8)], 16)
    texts = {
        "tiles=1": rows,
        "tiles=4": rows,
        "tiles=8 slice=2 acks=1": rows,
        "tiles=4 programs=4": rows,
        "tiles=4 programs=16 waits=second_launch": rows,
        "tiles=8 programs=8 waits=second_launch acks=1": rows,
        "tiles=1 shots=2": RowShape(4096),
        "tiles=4 programs=4 waits=owner shots=2": RowShape(4096),
    }
    found = {text: TileSchedule.parse(text).protocol(8, shape) for text, shape in texts.items()}
    for slots in (1, 2, 4, 8, 32):
        found[f"line of {slots} slots with credits"] = named("line", 8, slots, slots, False, 1, False).protocol()
    return found


def milliseconds(protocol: TileProtocol) -> float:
    """The median of five."""
    taken = []
    for _ in range(5):
        started = time.process_time()
        check(protocol)
        taken.append(1e3 * (time.process_time() - started))
    return median(taken)


def summed(keys: tuple[str, ...], found: dict[str, Counter[str]]) -> list[dict[str, str | int]]:
    """A row for each, and one for all."""
    rows = [{"kind": kind} | {key: count[key] for key in keys} for kind, count in found.items()]
    total = {"kind": "all"} | {key: sum(count[key] for count in found.values()) for key in keys}
    print(table(("kind", *keys), [list(row.values()) for row in (*rows, total)]))
    return [*rows, total]


def main() -> None:
    parser = arguments("tile_mutants", __doc__ or "", 10_000, of="wrong protocols, and right ones")
    parser.add_argument("--seed", type=int, default=20261201)
    options = parser.parse_args()
    started = time.monotonic()
    mutants = summed(MUTANTS, tally(options.seed, options.count, options.count))
    chance = summed(MUTANTS, {"by chance": tally_chance(options.seed, 5 * options.count)})[:1]
    found = tally_rings() | {"unequal ranks": tally_unequal(options.seed, options.count // 2)}
    rings = summed(RINGS, found)
    cost = [{"checked": text, "milliseconds": round(milliseconds(made), 2)} for text, made in costs().items()]
    print(table(("checked", "milliseconds"), [list(row.values()) for row in cost]))
    result = {
        "seconds": time.monotonic() - started,
        "mutants": mutants,
        "chance": chance,
        "rings": rings,
        "cost": cost,
    }
    write(options.out, record({"count": options.count, "seed": options.seed}, result))


if __name__ == "__main__":
    main()
