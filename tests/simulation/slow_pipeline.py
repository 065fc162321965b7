"""Schedules run in time, one action after another in plain Python: the oracle of sweeps, written apart from them."""

from dataclasses import dataclass
from functools import cache

import numpy as np
from hypothesis import strategies as st

from shardplan.errors import ScheduleError
from shardplan.simulation.sweep import StageSeconds
from shardplan.strategy.schedules import GENERATORS, Schedule, Times, schedule

Key = tuple[str, int, int]  # F, I, W or B, stage, microbatch


@dataclass(frozen=True)
class Ran:
    """When each action begins and ends, and on which rank."""

    begin: dict[Key, float]
    end: dict[Key, float]
    rank: dict[Key, int]
    makespan: float

    def of(self, rank: int) -> list[Key]:
        """The actions of a rank."""
        return [key for key, where in self.rank.items() if where == rank]


def run(found: Schedule, stages: StageSeconds, k: int) -> Ran:
    """Run the lists for configuration k: of all ranks whose next action has what it takes, the first does it."""
    chain = found.stages // found.copies
    lists = [[(a.kind, a.stage, a.microbatch) for cell in row if cell for a in cell.leaves] for row in found.ranks]
    home = {key: r for r, row in enumerate(lists) for key in row}
    begin, end, at, clock = {}, {}, [0] * len(lists), [0.0] * len(lists)
    while any(at[r] < len(row) for r, row in enumerate(lists)):
        moved = False
        for r, row in enumerate(lists):
            if at[r] == len(row):
                continue
            kind, stage, m = row[at[r]]
            c, ready = stage % chain, clock[r]
            wanted = []
            if kind == "F" and c > 0:
                wanted = [("F", stage - 1, m)]
                cost = stages.send[k, c - 1]
            if kind in "BI" and c < chain - 1:
                wanted = [key for key in (("B", stage + 1, m), ("I", stage + 1, m)) if key in home]
                cost = stages.send_back[k, c]
            if any(key not in end for key in wanted):
                continue
            for key in wanted:
                late = cost if home[key] != r else 0
                ready = max(ready, end[key]) + late if stages.rendezvous else max(ready, end[key] + late)
            i, w = stages.backward_input[k, c], stages.backward_weight[k, c]
            begin[kind, stage, m] = ready
            end[kind, stage, m] = clock[r] = ready + {"F": stages.forward[k, c], "I": i, "W": w, "B": i + w}[kind]
            at[r] += 1
            moved = True
        assert moved, "the ranks wait for each other"
    return Ran(begin, end, home, max(end.values()))


def placed_spans(found: Schedule, cost: Times, message: float, mode: str) -> dict[tuple[int, int], tuple[float, float]]:
    """When each slot of lists in which messages are placed begins and ends: asked from the end, slot by slot."""
    where = {a: (r, i) for r, row in enumerate(found.ranks) for i, a in enumerate(row)}
    talks = {a: a.kind.startswith(("SEND", "RECV")) for a in where}

    def posted(r: int, i: int) -> float:
        row = found.ranks[r]
        while mode == "batched" and i and talks[row[i]] and talks[row[i - 1]]:
            i -= 1
        return done(r, i - 1)

    @cache
    def end(r: int, i: int) -> float:
        action, begun = found.ranks[r][i], posted(r, i)
        if not talks[action]:
            return begun + cost(action)
        if mode == "buffered" and action.kind.startswith("SEND"):
            return begun
        other = posted(*where[action.matching]) + message
        return max(begun, other) if mode == "buffered" else max(begun + message, other)

    @cache
    def done(r: int, i: int) -> float:
        return max(done(r, i - 1), end(r, i)) if i >= 0 else 0.0

    return {(r, i): (posted(r, i), end(r, i)) for r, i in where.values()}


def drawn_stages(seed: int, n: int, chunks: int, messages: float = 0.5) -> StageSeconds:
    """Times by chance, some of them 0; each configuration another."""
    random = np.random.default_rng(seed)

    def some(width: int) -> np.ndarray:
        return random.uniform(0.1, 2, (n, width)) * (random.random((n, width)) > 0.1)

    wide = [some(chunks) for _ in range(3)]
    return StageSeconds(*wide, messages * some(chunks - 1), messages * some(chunks - 1))


@st.composite
def named(draw: st.DrawFn, most: int = 5, microbatches: int = 8) -> tuple[str, int, int, int]:
    """Name, ranks, microbatches and chunks a rank of a schedule that is defined."""
    name = draw(st.sampled_from(sorted(GENERATORS)))
    made = GENERATORS[name]
    p, m = draw(st.integers(1, most)), draw(st.integers(1, microbatches))
    v = draw(st.integers(1, 3)) if made.free else made.chunks
    try:
        schedule(name, p, m, v)
    except ScheduleError:  # the nearest sizes for which it is
        rounds = name in ("interleaved", "combined-1f1b")
        p, m = (2, 4) if name == "dualpipe" else (p, max(1, m // p) * p) if rounds else (2, 5)
    return name, p, m, v
