"""How many microbatches of which stage a rank has in flight, where it has most: counted along a schedule's actions."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from shardplan.strategy.schedules.action import Action
from shardplan.strategy.schedules.table import GENERATORS

Ints = np.ndarray
ROUNDS = 4  # of microbatches through all ranks, behind which no schedule has more in flight; even, as dualpipe asks
# What an action does to the microbatches of its stage: whole ones, and those of which only W is left.
_CHANGES = {"F": (1, 0), "B": (-1, 0), "I": (-1, 1), "W": (0, -1)}


class FlightPeaks(NamedTuple):
    """Moments of every rank at which it may hold most; rows that a rank has not are repeated.

    `stages` are those of a rank, int64 [ranks, chunks]. `whole` and `late` say of a moment how many microbatches of
    each have run forward and not back, and of how many only the gradients of parameters are still to come:
    int64 [ranks, moments, chunks]; `at_work` which of its stages is being run, int64 [ranks, moments].
    """

    stages: Ints
    whole: Ints
    late: Ints
    at_work: Ints


@lru_cache(maxsize=4096)
def flight_peaks(name: str, ranks: int, microbatches: int, chunks: int) -> FlightPeaks:
    """Return the moments of a schedule that `schedule` makes of the same arguments.

    >>> flight_peaks("1f1b", 4, 8, 1).whole[:, :, 0].max(axis=1).tolist()
    [4, 3, 2, 1]
    """
    found = [_moments([leaf for a in row for leaf in a.leaves]) for row in
             GENERATORS[name].rows(ranks, microbatches, chunks)]  # fmt: skip
    most = max(len(one.at_work) for one in found)
    every = [np.resize(np.arange(len(one.at_work)), most) for one in found]
    picked = ((one.stages, one.whole[k], one.late[k], one.at_work[k]) for one, k in zip(found, every, strict=True))
    return FlightPeaks(*(np.stack(x) for x in zip(*picked, strict=True)))


def equivalent_microbatches(name: str, ranks: int, microbatches: int) -> int:
    """Return the least known number of microbatches with as many in flight, legal where `microbatches` are.

    Schedules but 1F1B go in rounds of as many microbatches as ranks, or in longer ones where these do not divide.
    """
    if name == "1f1b":
        return min(microbatches, ranks)
    return microbatches if microbatches % ranks else min(microbatches, ROUNDS * ranks)


def _moments(row: list[Action]) -> FlightPeaks:
    """The moments of one rank, before actions that go back: of each stage's the fullest, and the most of each stage."""
    row = [a for a in row if a.kind in _CHANGES]
    stages = sorted({a.stage for a in row})
    place = np.array([stages.index(a.stage) for a in row])
    changes = np.array([_CHANGES[str(a.kind)] for a in row])
    counts = np.zeros((2, len(row) + 1, len(stages)), dtype=np.int64)
    for k in range(2):
        counts[k, np.arange(1, len(row) + 1), place] = changes[:, k]
    states = counts.cumsum(axis=1)
    split = np.array([a.kind == "I" for a in row])
    # Before actions that go back; and behind I, which may leave more for W than it was made of.
    whole, late = np.concatenate([states[:, :-1], states[:, 1:][:, split]], axis=1)
    place = np.concatenate([place, place[split]])
    back = np.concatenate([np.array([a.kind != "F" for a in row]), np.ones(int(split.sum()), dtype=bool)])
    weights = [whole.sum(axis=1) + late.sum(axis=1) * part for part in (0.5, 1.5)]
    moments = [int(np.where(back & (place == k), w, -1).argmax()) for k in range(len(stages)) for w in weights]
    moments += [int(np.where(back, whole[:, k], -1).argmax()) for k in range(len(stages))]
    kept = sorted(dict.fromkeys(moments))
    return FlightPeaks(np.array(stages), whole[kept], late[kept], place[kept])
