"""The general move as rounds of padded permutes: what a backend without an all-to-all-v runs for Exchange and Send.

In a round every device sends at most one piece and receives at most one, so a round is one partial permutation. The
messages are edges between senders and receivers; König's theorem colours them with as many colours as the busiest
device has messages to send or to receive. All pieces of a round are sent in the shape of the largest, per dim: what a
device receives beyond its piece is padding, and counted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shardplan.core.dtypes import itemsize
from shardplan.core.messages import at_root, messages, own_places
from shardplan.core.ops import AllGather, AllReduce, AllToAll, Broadcast, Exchange, Op, Reduce, ReduceScatter, Send
from shardplan.core.ops.collective import Collective, typed
from shardplan.core.tensor import TensorType

MOST_MOVES = 256  # moves whose rounds are remembered: an exchange is lowered, counted and checked with the same


@dataclass(frozen=True, slots=True, eq=False)
class PermuteRound:
    """One partial permutation of pieces; arrays have a row for each of `PermuteRounds.devices`, pairs index these."""

    pairs: tuple[tuple[int, int], ...]  # (sender, receiver); equal in the round that keeps what a device holds
    shape: tuple[int, ...]  # of what travels: the largest piece of the round, per dim
    start: np.ndarray  # int32 [devices, ndim]: where the piece begins in the sender's shard
    at: np.ndarray  # int32 [devices, ndim]: where it goes in the receiver's shard
    extent: np.ndarray  # int32 [devices, ndim]: of the piece that a receiver gets, 0 where it gets none

    @property
    def whole(self) -> bool:
        """Whether no piece is padded."""
        return bool(np.all((self.extent == self.shape).all(axis=1) | (self.extent == 0).all(axis=1)))


@dataclass(frozen=True, slots=True, eq=False)
class PermuteRounds:
    """A general move from one even type to another: what is kept, then the rounds, over the union of the devices."""

    devices: tuple[int, ...]  # ids; of one mesh in mesh order, of two ascending
    kept: PermuteRound | None
    rounds: tuple[PermuteRound, ...]
    itemsize: int

    def received(self) -> dict[int, int]:
        """Return the bytes that each device receives, padding included, by id."""
        out = dict.fromkeys(self.devices, 0)
        for one in self.rounds:
            for _, receiver in one.pairs:
                out[self.devices[receiver]] += math.prod(one.shape) * self.itemsize
        return out


def colour(edges: Sequence[tuple[int, int]]) -> list[int]:
    """Return a colour for each (sender, receiver), different at each end, as few as the largest degree.

    Source: the constructive proof of König's line colouring theorem (alternating paths).

    >>> colour([(0, 1), (0, 2), (1, 2), (1, 0)])
    [0, 1, 0, 1]
    """
    if not edges:
        return []
    vertices = max(max(e) for e in edges) + 1
    most = max(np.bincount([e[k] for e in edges], minlength=vertices).max() for k in (0, 1))
    at = [[[-1] * int(most) for _ in range(vertices)] for _ in range(2)]  # side, vertex, colour -> edge
    colours = [-1] * len(edges)
    for k, (sender, receiver) in enumerate(edges):
        a, b = at[0][sender].index(-1), at[1][receiver].index(-1)
        both = (c for c in range(int(most)) if at[0][sender][c] < 0 and at[1][receiver][c] < 0)
        a = next(both, a)
        if at[1][receiver][a] >= 0:  # a is free at the sender only: swap a and b along the path from the receiver
            path: list[int] = []
            side, vertex, wanted = 1, receiver, a
            while (edge := at[side][vertex][wanted]) >= 0:
                path.append(edge)
                side = 1 - side
                vertex = edges[edge][side]
                wanted = a + b - wanted
            for edge in path:
                for end in (0, 1):
                    at[end][edges[edge][end]][colours[edge]] = -1
            for edge in path:
                colours[edge] = a + b - colours[edge]
                for end in (0, 1):
                    at[end][edges[edge][end]][colours[edge]] = edge
        colours[k] = a
        at[0][sender][a] = at[1][receiver][a] = k
    return colours


@lru_cache(maxsize=MOST_MOVES)
def rounds_of(t: TensorType, u: TensorType, chunks: int = 1) -> PermuteRounds:
    """Return the rounds that move an even type to another, on one mesh or between two, each in `chunks` parts.

    Messages of one shape go in rounds of their own where that costs no round more, so that nothing is padded.
    """
    devices = t.mesh.devices if t.mesh == u.mesh else tuple(sorted({*t.mesh.devices, *u.mesh.devices}))
    index = {d: k for k, d in enumerate(devices)}
    of_t, of_u = ([index[d] for d in m.devices] for m in (t.mesh, u.mesh))  # by place in each mesh
    senders, receivers, _ = messages(t, u)
    own, held, needed = own_places(t, u), at_root(t), at_root(u)
    homes = [(int(s), r) for r, s in enumerate(own) if s >= 0 and held[s] and needed[r]]
    before, after = t.boxes(), u.boxes()

    def piece(s: int, r: int) -> np.ndarray:
        """Start in the sender's shard, start in the receiver's, extent: int [3, ndim]; given by places."""
        lo = np.maximum(before[s, :, 0], after[r, :, 0])
        hi = np.minimum(before[s, :, 1], after[r, :, 1])
        return np.stack([lo - before[s, :, 0], lo - after[r, :, 0], np.maximum(hi - lo, 0)])

    def make(group: Sequence[tuple[int, int]]) -> PermuteRound:
        tables = np.zeros((3, len(devices), t.ndim), dtype=np.int32)
        for s, r in group:
            found = piece(s, r)
            tables[0, of_t[s]] = found[0]
            tables[1:, of_u[r]] = found[1:]
        shape = tuple(int(n) for n in tables[2].max(axis=0))
        return PermuteRound(tuple((of_t[s], of_u[r]) for s, r in group), shape, tables[0], tables[1], tables[2])

    edges = [(int(s), int(r)) for s, r in zip(senders, receivers, strict=True)]
    kept = [(s, r) for s, r in homes if piece(s, r)[2].all()]
    rounds = [part for group in _grouped(edges, piece) for part in _parts(make(group), chunks)]
    return PermuteRounds(devices, make(kept) if kept else None, tuple(rounds), t.itemsize)


def _grouped(edges: list[tuple[int, int]], piece: Callable[[int, int], np.ndarray]) -> list[list[tuple[int, int]]]:
    """Messages by round; large ones are coloured first, so that they meet in the first rounds."""
    shapes: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for e in edges:
        shapes.setdefault(tuple(int(n) for n in piece(*e)[2]), []).append(e)
    large_first = sorted(shapes, key=lambda shape: (-math.prod(shape), shape))
    together = _by_colour([e for shape in large_first for e in shapes[shape]])
    apart = [group for same in shapes.values() for group in _by_colour(same)]
    return apart if len(apart) <= len(together) else together


def _by_colour(edges: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    groups: dict[int, list[tuple[int, int]]] = {}
    for e, c in zip(edges, colour(edges), strict=True):
        groups.setdefault(c, []).append(e)
    return [groups[c] for c in sorted(groups)]


def _parts(whole: PermuteRound, chunks: int) -> list[PermuteRound]:
    """A round in at least `chunks` parts, cut along the dims of its pieces; a pair with nothing left is dropped."""
    if chunks == 1:
        return [whole]
    out: list[PermuteRound] = []
    for box in chunk_boxes(whole.shape, chunks):
        low = np.array([a for a, _ in box], dtype=np.int32)
        shape = tuple(b - a for a, b in box)
        extent = np.clip(whole.extent - low, 0, shape).astype(np.int32)
        extent[~extent.all(axis=1)] = 0
        pairs = tuple((s, r) for s, r in whole.pairs if extent[r].all())
        out.append(PermuteRound(pairs, shape, whole.start + low, whole.at + low, extent))
    return out


def chunk_boxes(shape: tuple[int, ...], chunks: int) -> list[tuple[tuple[int, int], ...]]:
    """Return the boxes of at least `chunks` parts of a local array (fewer when it has fewer elements).

    >>> chunk_boxes((2, 5), 3)
    [((0, 2), (0, 2)), ((0, 2), (2, 4)), ((0, 2), (4, 5))]
    """
    cuts: list[list[tuple[int, int]]] = []
    for n, count in zip(shape, chunk_counts(shape, chunks), strict=True):
        step = -(-n // count)
        cuts.append([(a, min(a + step, n)) for a in range(0, n, step)])
    return list(itertools.product(*cuts))


def loop_of(elements: int, chunks: int) -> tuple[int, int]:
    """Return how many parts, of how many elements each, a chunked all-reduce has; the last may overlap the one before.

    >>> loop_of(10, 4), loop_of(2, 5), loop_of(8, 1)
    ((4, 3), (2, 1), (1, 8))
    """
    step = -(-elements // min(chunks, elements))
    return -(-elements // step), step


def moved_bytes(op: Op, *operands: TensorType) -> dict[int, int]:
    """Return the bytes that each device receives when JAX runs an op on even types, by id.

    It differs from `op.received` where XLA has no such collective: Reduce and Broadcast are all-reduces, Exchange and
    Send are padded permutes; where the last part of a chunked all-reduce overlaps the one before; and away from the
    root, where groups move their bytes as all others do.

    >>> from shardplan.core.mesh import Mesh
    >>> moved_bytes(Broadcast(("x",)), TensorType("f32", (6,), (None,), Mesh(x=3), root=("x",)))
    {0: 32, 1: 32, 2: 32}
    """
    results = op.infer(*operands)
    out = {d: 0 for t in (*operands, *results) for d in t.mesh.devices}
    if not isinstance(op, Collective):
        return out
    if isinstance(op, AllReduce | Reduce | Broadcast):
        sizes: dict[str, int] = {}
        for t in operands:
            sizes[t.dtype] = sizes.get(t.dtype, 0) + t.local_bytes()
        q = math.prod(operands[0].mesh.span(a).size for a in op.axes)
        for dtype, n in sizes.items():
            count, step = loop_of(n // itemsize(dtype), op.chunks)
            if getattr(op, "reduction", "sum") not in ("sum", "max", "min"):  # padded to tiles of one size
                step += -step % q
            for d in out:
                out[d] += 2 * count * step * itemsize(dtype) * (q - 1) // q
        return out
    for t in operands:
        u = typed(op, t)
        q = math.prod(t.mesh.span(a).size for a in op.members(t))
        here, there = t.local_bytes(), u.local_bytes()
        match op:
            case AllGather():
                found = dict.fromkeys(u.mesh.devices, there - here)
            case AllToAll():
                found = dict.fromkeys(u.mesh.devices, here - here // q)
            case ReduceScatter():
                found = dict.fromkeys(u.mesh.devices, here - there)
            case Exchange() | Send():
                found = rounds_of(t, u, op.chunks).received()
            case _:
                found = dict(zip(u.mesh.devices, (int(n) for n in op.received(t)), strict=True))
        for d, n in found.items():
            out[d] += n
    return out


def chunk_counts(shape: tuple[int, ...], chunks: int) -> tuple[int, ...]:
    """Return how many parts each local dim is cut into for at least `chunks` parts: longest dims first."""
    counts = [1] * len(shape)
    left = chunks
    for d in sorted(range(len(shape)), key=lambda d: (-shape[d], d)):
        counts[d] = max(1, min(shape[d], left))
        left = -(-left // counts[d])
    return tuple(counts)
