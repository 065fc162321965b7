"""`lower_bound`: seconds below which no order of a schedule's work is done, whatever it is.

Each is the length of something that must happen one after the other, so a linear form of the times of chunks:

- a rank cannot begin before the shortest way of a microbatch to one of its chunks; then it does all its work; its last
  forward or backward is a backward, behind which that microbatch goes back to the first chunk. Where backwards are
  halved, all forwards and I stand before that way back, and a W behind it; or all W stand in between, and no way back;
- one microbatch goes through all chunks and back.

For equal chunks and messages of no time GPipe, 1F1B, interleaved of whole rounds and breadth first of as many
microbatches as ranks take no longer than that (arXiv 2104.04473, section 2.2; DESIGN, schedules as data).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shardplan.simulation.sweep.compiled_schedule import CompiledSchedule, checked
from shardplan.simulation.sweep.stage_seconds import StageSeconds
from shardplan.strategy.schedules.action_graph import code, message_code
from shardplan.strategy.schedules.action_lists import B, F, I, W

BLOCK = 4096  # configurations at once: what a cache holds


@dataclass(frozen=True, slots=True, eq=False)
class BoundForms:
    """Linear forms of a table of times, float [.., codes]: a bound is `work` and the least of ways there and back.

    `work` [2 ranks, codes], `there` and `back` [copies, 2 ranks, codes], infinite where a rank has no chunk of a copy
    (`reached` [copies, 2 ranks] says where it has); `chains` [copies, codes] are bounds by themselves.
    """

    work: np.ndarray
    there: np.ndarray
    back: np.ndarray
    reached: np.ndarray
    chains: np.ndarray

    def of(self, table: np.ndarray) -> np.ndarray:
        """The largest of the bounds, seconds [n], of a table of times [codes, n]."""
        if len(self.there) == 1:
            found = (self.work + self.there[0] + self.back[0]) @ table
        else:
            away = np.where(self.reached, 0, np.inf)[:, :, None]
            found = self.work @ table + (self.there @ table + away).min(axis=0)
            found += (self.back @ table + away).min(axis=0)
        return np.maximum(found.max(axis=0), (self.chains @ table).max(axis=0))


def lower_bound(compiled: CompiledSchedule, stages: StageSeconds) -> np.ndarray:
    """Return seconds [n] that no configuration is done in less, in whatever order its ranks do their work.

    Only which rank has which chunks is used, how often, and whether backwards are halved. Raises `ShardplanError` for
    another number of chunks, and where passes run `together`.

    >>> from shardplan.simulation.sweep import compile_schedule
    >>> lower_bound(compile_schedule("1f1b", 4, 8), StageSeconds.equal(4, 1.0, 1.0, 1.0))
    array([33.])
    """
    checked("lower_bound", compiled, stages)
    forms, found = bound_forms(compiled), np.empty(len(stages))
    for low in range(0, len(stages), BLOCK):
        part = slice(low, low + BLOCK)
        found[part] = forms.of(stages.table(part))
    return found + stages.before + stages.after


@lru_cache(maxsize=1024)
def bound_forms(compiled: CompiledSchedule) -> BoundForms:
    """The forms of a schedule."""
    chunks, copies, ranks = compiled.chunks, compiled.copies, compiled.ranks
    codes = 1 + 4 * chunks + 2 * (chunks - 1)
    owners = np.array(compiled.owners).reshape(copies, chunks)
    backs = compiled.backwards.any()
    value = (I if compiled.split else B) if backs else F  # what a microbatch does on its way back
    one = np.eye(codes)

    def way(copy: int, kind: int, back: int, chosen: list[int]) -> np.ndarray:
        """The form of passing some chunks and the messages between them and the next one."""
        form = np.zeros(codes)
        for c in chosen:
            form += one[code(kind, c, chunks)]
            if owners[copy, c] != owners[copy, c + 1]:
                form += one[message_code(back, c, chunks)]
        return form

    there, back = np.zeros((2, copies, ranks, codes))
    reached = np.zeros((copies, ranks), dtype=bool)
    chains = np.zeros((copies, codes))
    last = one[code(W, 0, chunks)] if compiled.split else np.zeros(codes)
    for k in range(copies):
        for r in range(ranks):
            own = np.flatnonzero(owners[k] == r).tolist()
            if own:
                reached[k, r] = True
                there[k, r] = way(k, F, 0, list(range(own[0])))
                if backs:
                    back[k, r] = way(k, value, 1, list(range(own[0]))) + last
        chains[k] = way(k, F, 0, list(range(chunks - 1))) + one[code(F, chunks - 1, chunks)]
        if backs:
            chains[k] += way(k, value, 1, list(range(chunks - 1))) + last
            chains[k] += one[code(value, chunks - 1, chunks)]
    work = np.zeros((2, ranks, codes))
    for r in range(ranks):
        for c in range(chunks):
            forward, backward = (counts[r, c] * one for counts in (compiled.forwards, compiled.backwards))
            work[:, r] += forward[code(F, c, chunks)]
            if backs:
                work[0, r] += backward[code(value, c, chunks)]
                work[1, r] += backward[code(B, c, chunks)]
    nothing = np.zeros_like(back)
    return BoundForms(
        work.reshape(2 * ranks, codes),
        np.concatenate([there, there], axis=1),
        np.concatenate([back, nothing], axis=1),
        np.concatenate([reached, reached], axis=1),
        chains,
    )
