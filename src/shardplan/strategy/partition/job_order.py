"""The order in which one process may run all actions of a job."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from shardplan.errors import LayoutError
from shardplan.strategy.partition.job import Job
from shardplan.strategy.schedules.action import COMPUTE, MESSAGES, RECEIVES

Action = tuple[int, str, int]  # stage, kind and microbatch
BACK = ("B", "I")  # what waits for the stage behind


def order(job: Job) -> Iterator[Action]:
    """Yield every computation and placed message, in an order in which one process may run them.

    Ranks do one each in turn, those that overlap one after another.
    """
    found = job.schedule
    leaves = [[leaf for a in row if a is not None for leaf in a.leaves] for row in found.ranks]
    rows = [deque(a for a in row if a.kind in (*COMPUTE, *MESSAGES)) for row in leaves]
    done = set[tuple[int, str, int | None]]()
    while any(rows):
        before = len(done)
        for row in rows:
            if row:
                a = row[0]
                near = found.stage_before(a.stage) if a.kind == "F" else None
                near = found.stage_after(a.stage) if a.kind in BACK else near
                if near is not None and (near, way(a.kind), a.microbatch) not in done:
                    continue
                if a.kind in RECEIVES and (a.peer, a.matching.kind, a.microbatch) not in done:
                    continue
                row.popleft()
                done.add((a.stage, way(a.kind), a.microbatch))
                yield a.stage, a.kind, a.microbatch or 0
        if len(done) == before:
            raise LayoutError(f"run of a job: its schedule waits for itself at {[str(row[0]) for row in rows if row]}")


def way(kind: str) -> str:
    """Return the pass that a computation does first in: B for I, which sends what B does."""
    return "B" if kind == "I" else kind
