"""Rings of slots between ranks, with and without credits, right and wrong, and rules that say which they are.

Rank r puts rows into memory of rank d, a slot an epoch, signals, and waits for nothing but credits: a reader signals
one when it has read an epoch, and the writer goes on to epoch e when epoch e - lag was read. Every counter has one
writer, and every wait asks for whole epochs. So an event comes after another where a path of program order, signals
and waits leads from one to the other, and `by_paths` finds the shortest. For four shapes `by_hand` says the same in a
line. Neither runs anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from random import Random
from typing import Any

from shardplan.fused.tiles.events import TileBuffer, TileProtocol, TilePut, TileRead, TileSignal, TileWait

Edge = tuple[int, int]


@dataclass(frozen=True)
class Ring:
    """Who puts how many rows to whom, in how many tiles; over how many slots; when credits come.

    - `lags`: per pair how many epochs ago the one is whose credit is awaited; a pair without waits for none
    - `early`: credits are given before the read
    - `forwards`: ranks that read before they put
    - `hasty`: pairs whose reader waits for one tile less
    """

    ranks: int
    rows: dict[Edge, int]
    tiles: dict[Edge, int]
    slots: int
    lags: dict[Edge, int]
    early: bool = False
    forwards: frozenset[int] = frozenset()
    hasty: frozenset[Edge] = frozenset()

    def boxes(self, edge: Edge) -> list[Any]:
        sources = sorted(s for s, d in self.rows if d == edge[1])
        start = sum(self.rows[s, edge[1]] for s in sources if s < edge[0])
        size, count = self.rows[edge], self.tiles[edge]
        cuts = [start + size * k // count for k in range(count + 1)]
        return [((a, b),) for a, b in zip(cuts, cuts[1:], strict=False)]

    def events(self, rank: int) -> list[Any]:
        """What a rank does in an epoch. Counters: rank s at d counts tiles, ranks + d at s counts credits."""
        puts: list[Any] = []
        for edge in (e for e in self.rows if e[0] == rank):
            to = edge[1]
            if edge in self.lags:
                puts.append(TileWait(self.ranks + to, 1 - self.lags[edge], 1))
            for k, box in enumerate(self.boxes(edge)):
                puts += [TilePut(to, "ring", box, self.number(edge, k)), TileSignal(to, rank)]
        reads: list[Any] = []
        for edge in (e for e in self.rows if e[1] == rank):
            source, count, credit = edge[0], self.tiles[edge], TileSignal(edge[0], self.ranks + rank)
            boxes = self.boxes(edge)
            reads.append(TileWait(source, count - (edge in self.hasty), count))
            reads += [credit] if self.early and edge in self.lags else []
            reads.append(TileRead("ring", ((boxes[0][0][0], boxes[-1][0][1]),)))
            reads += [credit] if not self.early and edge in self.lags else []
        return reads + puts if rank in self.forwards else puts + reads

    def number(self, edge: Edge, k: int) -> int:
        return (edge[0] * self.ranks + edge[1]) * 8 + k

    def protocol(self) -> TileProtocol:
        table = tuple(
            tuple((box, self.number(e, k)) for e in self.rows if e[1] == d for k, box in enumerate(self.boxes(e)))
            for d in range(self.ranks)
        )
        extents = tuple((sum(n for e, n in self.rows.items() if e[1] == d),) for d in range(self.ranks))
        launch = tuple((tuple(self.events(rank)),) for rank in range(self.ranks))
        buffers = {"ring": TileBuffer(extents, table, self.slots)}
        return TileProtocol("ring", self.ranks, (launch,), buffers, 2 * self.ranks, 0)


def by_paths(ring: Ring) -> bool:
    """Whether a ring is right: shortest paths between events, in epochs (Floyd and Warshall)."""
    events = [(rank, event) for rank in range(ring.ranks) for event in ring.events(rank)]
    n = len(events)
    far = [[inf] * n for _ in range(n)]
    for i, (rank, event) in enumerate(events):
        if i + 1 < n and events[i + 1][0] == rank:
            far[i][i + 1] = 0
        far[i][next(k for k, (r, _) in enumerate(events) if r == rank)] = min(far[i][i], 1)  # its next epoch
        if isinstance(event, TileSignal):
            same = [k for k, (_, e) in enumerate(events) if e == event and events[k][0] == rank]
            for j, (other, wait) in enumerate(events):
                if isinstance(wait, TileWait) and (other, wait.counter) == (event.to, event.counter):
                    # In epoch e it asks for the signals up to this one of epoch e - back, of `step` an epoch.
                    back, last = divmod(wait.want - 1, wait.step)
                    if same.index(i) == last:
                        far[i][j] = min(far[i][j], -back)
    for k in range(n):
        for row in far:
            if row[k] < inf:
                through = far[k]
                for j in range(n):
                    row[j] = min(row[j], row[k] + through[j])
    if any(far[i][i] <= 0 for i in range(n)):
        return False  # an event comes after itself
    for i, (_, put) in enumerate(events):
        for j, (reader, read) in enumerate(events):
            meets = isinstance(put, TilePut) and isinstance(read, TileRead) and put.to == reader
            if meets and max(put.box[0][0], read.box[0][0]) < min(put.box[0][1], read.box[0][1]):
                if far[i][j] > 0 or far[j][i] > ring.slots:
                    return False
    return True


def named(shape: str, ranks: int, slots: int, lag: int | None, early: bool, tiles: int, hasty: bool) -> Ring:
    """One of four shapes.

    - `line`: each rank to the next; ranks but the first read before they put
    - `pairs`: each rank to every other
    - `ring`: each rank to the next, the last one to the first
    - `relay`: the same, and ranks but the first read before they put
    """
    if shape == "pairs":
        edges = [(s, d) for s in range(ranks) for d in range(ranks) if s != d]
    else:
        edges = [(r, (r + 1) % ranks) for r in range(ranks - (shape == "line"))]
    lags = {} if lag is None else dict.fromkeys(edges, lag)
    forwards = range(1, ranks) if shape in ("line", "relay") else ()
    return Ring(ranks, dict.fromkeys(edges, tiles), dict.fromkeys(edges, tiles), slots, lags, early,
                frozenset(forwards), frozenset(edges) if hasty else frozenset())  # fmt: skip


def by_hand(shape: str, ranks: int, slots: int, lag: int | None, early: bool, tiles: int, hasty: bool) -> bool:
    """Whether that is right.

    Credits hold a writer back if the one awaited was given after the read of `slots` epochs ago: given early, it says
    only that the read of the epoch before is over. A credit of the own epoch never comes, but where the reader does not
    wait for the put: nowhere here. Without credits, who puts has waited for the epoch before, of everybody (pairs) or
    of a neighbour, who was an epoch behind, and so on round the ring; in a relay the first rank's put comes after all
    reads of the epoch before, and everybody's put after the first rank's.
    """
    if hasty or lag == 0:
        return False
    if lag is not None and lag + early <= slots:
        return True
    return {"line": False, "pairs": slots >= 2, "ring": slots >= ranks, "relay": True}[shape]


LAGS = (None, *range(11))


def rings(most: int = 3) -> Iterator[tuple[str, int, int, int | None, bool, int, bool]]:
    """Every shape of two ranks and up to `most`, of 1 to 8 slots, without credits and with lags 0 to 10."""
    for shape in ("line", "pairs", "ring", "relay"):
        for ranks in range(2, most + 1):
            for slots in range(1, 9):
                for lag in LAGS:
                    for early in (False, True)[: 1 if lag is None else 2]:
                        for tiles, hasty in ((1, False), (2, False), (2, True)):
                            yield shape, ranks, slots, lag, early, tiles, hasty


def unequal(rng: Random) -> Ring:
    """A random graph of two to four ranks, whose rows differ from pair to pair; some pairs and ranks have none."""
    ranks = rng.choice((2, 3, 3, 4))
    pairs = [(s, d) for s in range(ranks) for d in range(ranks) if s != d]
    edges = sorted(rng.sample(pairs, rng.randint(1, min(len(pairs), ranks + 1))))
    idle = rng.choice((-1, *range(ranks)))
    rows = {e: 0 if idle in e or rng.random() < 0.2 else rng.randint(1, 3) for e in edges}
    tiles = {e: rng.randint(1, 3) for e in edges}
    slots = rng.randint(1, 8)
    near = (slots - 1, slots, slots, slots + 1, rng.randint(1, 10))
    lags = {e: max(1, min(10, rng.choice(near))) for e in edges if rng.random() < 0.8}
    hasty = frozenset(e for e in edges if tiles[e] > 1 and rng.random() < 0.05)
    forwards = frozenset(r for r in range(ranks) if rng.random() < 0.4)
    return Ring(ranks, rows, tiles, slots, lags, rng.random() < 0.2, forwards, hasty)
