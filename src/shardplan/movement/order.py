"""The order of moves that one after another share a memory: the least peak that is found.

A move holds something before, more during, and something else after. An order's peak is the largest sum over all moves
on the worst device. Moves that hold the same are interchangeable, so a state is how many of each kind are done. While
there are few states the least peak is exact (each is reached from those with one move less); above that beams keep the
most promising ones, under several tastes, forwards and, since an order run backwards has the same peak, backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

# Exact up to here, in 50 ms on 8 kinds of devices; twelve different moves have 4,096 states, fourteen these.
MOST_STATES = 1 << 14
MOST_CELLS = 1 << 22  # states times kinds of devices: int64 tables of 32 MiB
BEAM = 32  # states that survive at each depth; time grows with it: the six beams over 300 moves take a second


@dataclass(frozen=True, slots=True, eq=False)
class OrderedMove:
    """What one move holds on each device: int64 [devices]."""

    before: Ints
    during: Ints
    after: Ints


@dataclass(frozen=True, slots=True, eq=False)
class _Kinds:
    """Equal moves as one kind, equal devices as one: int64 [kinds, devices], and the moves of each kind."""

    members: tuple[tuple[int, ...], ...]
    before: Ints
    during: Ints
    after: Ints
    base: Ints  # what stays all the time: int64 [devices]

    @property
    def counts(self) -> Ints:
        return np.array([len(m) for m in self.members])

    @property
    def start(self) -> Ints:
        """What all moves hold together before the first of them."""
        return self.base + self.counts @ self.before

    @property
    def rise(self) -> Ints:
        """What a move adds while it runs."""
        return self.during - self.before

    @property
    def growth(self) -> Ints:
        """What a move adds for good."""
        return self.after - self.before


def least_order(moves: Sequence[OrderedMove], base: Ints) -> list[int]:
    """Return the order with the least peak found: the least there is while there are at most `MOST_STATES` states.

    `base` is what stays on each device all the time. Deterministic; the result holds the positions of the moves.
    """
    if len(moves) < 2:
        return list(range(len(moves)))
    kinds = _kinds(moves, base)
    states = float(np.prod(kinds.counts + 1.0))
    if states <= MOST_STATES and states * len(kinds.base) <= MOST_CELLS:
        picked = _exact(kinds)
    else:
        picked = _beams(kinds)
    left = [list(m) for m in kinds.members]
    return [left[k].pop(0) for k in picked]


def _kinds(moves: Sequence[OrderedMove], base: Ints) -> _Kinds:
    """Group what is equal: SPMD programs leave few kinds of devices, and layers of a model few kinds of moves."""
    table = np.stack([np.stack([m.before, m.during, m.after]) for m in moves])  # [moves, 3, devices]
    rows = np.unique(np.concatenate([base[None], table.reshape(-1, len(base))]), axis=1)
    table = rows[1:].reshape(len(moves), 3, -1)
    found: dict[bytes, list[int]] = {}
    for number, row in enumerate(table):
        found.setdefault(row.tobytes(), []).append(number)
    members = tuple(map(tuple, found.values()))
    first = table[[m[0] for m in members]]
    return _Kinds(members, first[:, 0], first[:, 1], first[:, 2], rows[0])


def _exact(kinds: _Kinds) -> list[int]:
    """The least peak over all orders: states in mixed radix, each reached from the states with one move less."""
    sizes = kinds.counts + 1
    strides = np.cumprod(np.concatenate([[1], sizes[:-1]]))
    states = np.arange(int(np.prod(sizes)))
    done = states[:, None] // strides % sizes  # [states, kinds]
    live = kinds.start + done @ kinds.growth
    cost = np.stack([(live + rise).max(axis=1) for rise in kinds.rise], axis=1)  # of one more of each kind
    peak = np.full(len(states), int(kinds.start.max()))
    last = np.zeros(len(states), dtype=np.int64)
    depth = done.sum(axis=1)
    for count in range(1, int(depth[-1]) + 1):
        here = np.flatnonzero(depth == count)
        ways = np.full((len(here), len(sizes)), np.iinfo(np.int64).max)
        for k, stride in enumerate(strides):
            some = done[here, k] > 0
            back = here[some] - stride
            ways[some, k] = np.maximum(peak[back], cost[back, k])
        last[here] = ways.argmin(axis=1)
        peak[here] = ways.min(axis=1)
    picked: list[int] = []
    state = len(states) - 1
    while state:
        picked.append(int(last[state]))
        state -= int(strides[picked[-1]])
    return picked[::-1]


def _beams(kinds: _Kinds) -> list[int]:
    """The best of several beams; as soon as one has the peak of the two ends, which every order has."""
    mirror = replace(kinds, before=kinds.after, after=kinds.before)
    floor = int(max(kinds.start.max(), mirror.start.max()))
    best: tuple[int, list[int]] | None = None
    for taste in _TASTES:
        for way in (kinds, mirror):
            picked, peak = _beam(way, taste)
            if best is None or peak < best[0]:
                best = peak, picked if way is kinds else picked[::-1]
            if best[0] == floor:
                return best[1]
    return best[1] if best is not None else []


def _beam(kinds: _Kinds, taste: Taste) -> tuple[list[int], int]:
    """A low peak: at every depth the states with the lowest peak so far survive, and of those the ones to the taste."""
    counts = kinds.counts
    size = np.abs(kinds.growth).sum(axis=1)
    mark = np.random.default_rng(0).integers(1 << 62, size=len(counts))  # names a state by a sum; a seed: deterministic
    done = np.zeros((1, len(counts)), dtype=np.int64)
    live, peak = kinds.start[None], np.array([int(kinds.start.max())])
    trail: list[tuple[Ints, Ints]] = []
    for _ in range(int(counts.sum())):
        frm, kind = np.nonzero(done < counts)
        tops = np.maximum(peak[frm], (live[frm] + kinds.rise[kind]).max(axis=1))
        after = live[frm] + kinds.growth[kind]
        order = np.lexsort((kind, *taste(after, size[kind]), tops))
        names = (done @ mark)[frm] + mark[kind]
        _, first = np.unique(names[order], return_index=True)
        chosen = order[np.sort(first)[:BEAM]]
        trail.append((frm[chosen], kind[chosen]))
        live, peak = after[chosen], tops[chosen]
        done = done[frm[chosen]]
        done[np.arange(len(chosen)), kind[chosen]] += 1
    state, picked = int(peak.argmin()), list[int]()
    for frm, kind in reversed(trail):
        picked.append(int(kind[state]))
        state = int(frm[state])
    return picked[::-1], int(peak.min())


Taste = Callable[[Ints, Ints], tuple[Ints, ...]]  # held after a move, its size -> sort keys, the weightiest last
# Least held in all, then on the fullest device; least in all, large moves first; evenly spread, large moves first.
_TASTES: tuple[Taste, ...] = (
    lambda after, size: (after.max(axis=1), after.sum(axis=1)),
    lambda after, size: (-size, after.sum(axis=1)),
    lambda after, size: (-size, after.max(axis=1)),
)
