"""A lowering as rounds of padded permutes: what a backend runs that has no other messages.

A permute takes at most one piece from every device to at most one, so it is one partial permutation. The messages of a
lowering's round are edges between senders and receivers; König's theorem colours them with as many colours as the
busiest device has messages to send or to receive. All pieces of a permute travel in the shape of the largest, per dim:
what a device receives beyond its piece is padding, and counted. What is computed between messages stands beside those
of its round.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from shardplan.core.dtypes import itemsize
from shardplan.core.lowering import Copy, Kernel, Region, match_messages
from shardplan.core.op import Op
from shardplan.core.tensor import Box, TensorType
from shardplan.execution.lower import box_elements, chunk_of, flat_boxes

MOST_MOVES = 256  # ops whose rounds are remembered: one is lowered, counted and checked with the same

Shape = tuple[int, ...]
Message = tuple[int, int, Region | None, Region]  # sender, receiver (rows), what is sent (None: a fill), and where to
Edge = tuple[int, int, Box, Box]  # sender, receiver (rows), what is sent, and where it lies at the receiver


@dataclass(frozen=True, slots=True, eq=False)
class PermuteRound:
    """One partial permutation of pieces; arrays have a row for each of `PermuteRounds.devices`, pairs index these.

    A buffer is seen flat where it has another number of dims than the piece.
    """

    source: str | None  # buffer; None where the target is filled with what leaves the fold unchanged
    target: str
    fold: str | None  # the reduction by which pieces enter the target, or which a fill is for
    pairs: tuple[tuple[int, int], ...]  # (sender, receiver); equal where a device copies
    shape: Shape  # of what is cut out at the sender: the largest piece of the round, per dim
    into: Shape  # of the same at the receiver: another one only where no piece is padded
    start: np.ndarray  # int32 [devices, ndim]: where the piece begins in the sender's buffer
    at: np.ndarray  # int32 [devices, ndim]: where it goes in the receiver's buffer
    extent: np.ndarray  # int32 [devices, ndim]: of the piece that a receiver gets, 0 where it gets none

    @property
    def is_unpadded(self) -> bool:
        """Whether no piece is padded."""
        return bool(np.all(self.extent[[r for _, r in self.pairs]] == self.into))

    @property
    def travels(self) -> bool:
        """Whether any piece leaves its device."""
        return any(s != r for s, r in self.pairs)


@dataclass(frozen=True, slots=True, eq=False)
class PermuteRounds:
    """An op on even types, over the devices of all of them: batches of rounds, each of them to run after the other."""

    devices: tuple[int, ...]  # ids; of one mesh in mesh order, of two ascending
    shapes: dict[str, Shape]  # of the buffers: operands "xk", results "yk", staging
    dtypes: dict[str, str]
    batches: tuple[tuple[PermuteRound | Kernel, ...], ...]

    def padded_received_bytes(self) -> dict[int, int]:
        """Return the bytes that each device receives, padding included, by id."""
        out = dict.fromkeys(self.devices, 0)
        for one in (p for p in itertools.chain(*self.batches) if isinstance(p, PermuteRound)):
            for sender, receiver in one.pairs:
                if sender != receiver:
                    out[self.devices[receiver]] += math.prod(one.shape) * itemsize(self.dtypes[one.target])
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
def permute_rounds(op: Op, operands: tuple[TensorType, ...]) -> PermuteRounds:
    """Return the rounds of an op that has a lowering and whose types are even.

    One in chunks sends the pieces of a permute in as many parts.

    Messages of one shape go in permutes of their own where that costs no permute more, so that nothing is padded.
    """
    results = op.infer(*operands)
    meshes = {t.mesh for t in (*operands, *results)}
    devices = operands[0].mesh.devices if len(meshes) == 1 else tuple(sorted({d for m in meshes for d in m.devices}))
    lowering = op.in_chunks(1).lowering(operands, np.array(devices))
    assert lowering is not None  # asked of no other
    shapes: dict[str, Shape] = {name: (int(b.elements.max()),) for name, b in lowering.buffers.items()}
    dtypes = {name: b.dtype for name, b in lowering.buffers.items()}
    for letter, side in (("x", operands), ("y", results)):
        shapes |= {f"{letter}{k}": t.local_shape() for k, t in enumerate(side)}
        dtypes |= {f"{letter}{k}": t.dtype for k, t in enumerate(side)}

    def permutes(found: Iterable[Message], fold: str | None = None) -> Iterator[PermuteRound]:
        edges: dict[tuple[str | None, str], list[Edge]] = defaultdict(list)
        for s, r, source, target in found:
            into = _boxes(target, r, shapes[target.buffer])
            pieces = list(into) if source is None else _boxes(source, s, shapes[source.buffer])
            edges[source.buffer if source else None, target.buffer] += (
                (s, r, *ends) for ends in _pair_boxes(pieces, into)
            )
        for (source, target), mine in edges.items():
            for group in _group_messages(mine):
                yield _permute(source, target, fold, group, len(devices))

    def copied(copies: Iterable[Copy]) -> Iterator[PermuteRound]:
        for c in copies:
            yield from permutes(_to_itself(c), c.fold)

    batches: list[tuple[PermuteRound | Kernel, ...]] = []
    for one in lowering.rounds():
        messages = match_messages(one, devices, op.name)
        kept, sent = list(copied(one.meanwhile)), list(permutes(messages))
        if all(c.source and not c.fold for c in one.meanwhile):
            joint = list(permutes(itertools.chain(messages, *map(_to_itself, one.meanwhile))))
            if len(joint) == len(sent) and all(p.is_unpadded for p in joint):
                kept, sent = [], joint  # a device that copies sends to itself: nothing has to be put together
        sent = [part for p in sent for part in _parts(p, op.chunks)]
        first = 1 if op.chunks > 1 else len(sent)
        batches.append((*kept, *sent[:first]))
        batches += [(p,) for p in sent[first:]]
        batches[-1] += (*(k for k in one.kernels if k.live.any()), *copied(one.then))
    return PermuteRounds(devices, shapes, dtypes, tuple(batches))


def _rows(region: Region) -> list[int]:
    return np.flatnonzero(region.elements()).tolist()


def _to_itself(copy: Copy) -> Iterator[Message]:
    return ((row, row, copy.source, copy.target) for row in _rows(copy.target))


def _boxes(region: Region, row: int, shape: Shape) -> list[Box]:
    """The boxes that hold the elements of a row's region, one after another, in a buffer of this shape or, flat, in it.

    A run of all elements is the whole buffer.
    """
    box: Box = tuple((int(a), int(b)) for a, b in region.box[row])
    if len(box) != len(shape) and box == ((0, math.prod(shape)),):
        box = tuple((0, n) for n in shape)
    return flat_boxes(box, *chunk_of(box_elements(box), *region.chunk))


def _pair_boxes(here: list[Box], there: list[Box]) -> Iterator[tuple[Box, Box]]:
    """Yield the boxes of two lists that hold equally many elements, cut where one has more than the other."""
    while here:
        n, m = box_elements(here[0]), box_elements(there[0])
        if n == m:
            yield here.pop(0), there.pop(0)
        elif n > m:
            here[:1] = [*flat_boxes(here[0], 0, m), *flat_boxes(here[0], m, n)]
        else:
            there[:1] = [*flat_boxes(there[0], 0, n), *flat_boxes(there[0], n, m)]


def _extents(box: Box) -> Shape:
    return tuple(hi - lo for lo, hi in box)


def _largest(boxes: Sequence[Box]) -> Shape:
    return tuple(map(max, zip(*map(_extents, boxes), strict=True)))


def _permute(source: str | None, target: str, fold: str | None, group: Sequence[Edge], devices: int) -> PermuteRound:
    _, _, first, into = group[0]
    start = np.zeros((devices, len(first)), dtype=np.int32)
    at, extent = (np.zeros((devices, len(into)), dtype=np.int32) for _ in range(2))
    for s, r, here, there in group:
        start[s], at[r], extent[r] = ([lo for lo, _ in here], [lo for lo, _ in there], _extents(there))
    pairs = tuple((s, r) for s, r, _, _ in group)
    shape, end = _largest([e[2] for e in group]), _largest([e[3] for e in group])
    return PermuteRound(source, target, fold, pairs, shape, end, start, at, extent)


def _group_messages(edges: list[Edge]) -> list[list[Edge]]:
    """Messages by permute; large ones are coloured first, so that they meet in the first ones.

    Those whose ends differ in shape go with their like only: nothing can be padded at both ends.
    """
    shapes: dict[tuple[Shape, Shape], list[Edge]] = {}
    for e in edges:
        shapes.setdefault((_extents(e[2]), _extents(e[3])), []).append(e)
    large_first = sorted(shapes, key=lambda ends: (-math.prod(ends[0]), ends))
    apart = [group for ends in large_first for group in _by_colour(shapes[ends])]
    if len({len(here) for here, _ in shapes}) > 1 or any(here != there for here, there in shapes):
        return apart
    together = _by_colour([e for ends in large_first for e in shapes[ends]])
    return apart if len(apart) <= len(together) else together


def _by_colour(edges: list[Edge]) -> list[list[Edge]]:
    groups: dict[int, list[Edge]] = {}
    for e, c in zip(edges, colour([(s, r) for s, r, _, _ in edges]), strict=True):
        groups.setdefault(c, []).append(e)
    return [groups[c] for c in sorted(groups)]


def _parts(whole: PermuteRound, chunks: int) -> list[PermuteRound]:
    """A permute in at least `chunks` parts, cut along the dims of its pieces; a pair with nothing left is dropped."""
    if chunks == 1 or whole.shape != whole.into:
        return [whole]
    out: list[PermuteRound] = []
    for box in chunk_boxes(whole.shape, chunks):
        low = np.array([a for a, _ in box], dtype=np.int32)
        shape = _extents(box)
        extent = np.clip(whole.extent - low, 0, shape).astype(np.int32)
        pairs = tuple((s, r) for s, r in whole.pairs if extent[r].all())
        start, at = whole.start + low, whole.at + low
        out.append(replace(whole, pairs=pairs, shape=shape, into=shape, start=start, at=at, extent=extent))
    return out


def chunk_boxes(shape: Shape, chunks: int) -> list[Box]:
    """Return the boxes of at least `chunks` parts of a local array, or fewer of fewer elements; longest dims first.

    >>> chunk_boxes((2, 5), 3)
    [((0, 2), (0, 2)), ((0, 2), (2, 4)), ((0, 2), (4, 5))]
    """
    cuts: dict[int, list[tuple[int, int]]] = {}
    for d in sorted(range(len(shape)), key=lambda d: (-shape[d], d)):
        count = max(1, min(shape[d], chunks))
        chunks = -(-chunks // count)
        step = -(-shape[d] // count)
        cuts[d] = [(a, min(a + step, shape[d])) for a in range(0, shape[d], step)]
    return list(itertools.product(*(cuts[d] for d in range(len(shape)))))
