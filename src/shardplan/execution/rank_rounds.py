"""The rounds of a lowering as one rank goes through them: which parts of its buffers go to whom and come from whom."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardplan.core.box_table import runs
from shardplan.core.lowering import BufferBlock, Copy, Kernel, LocalKernel, Put, Region, Take
from shardplan.core.namespace import Namespace
from shardplan.core.op import Op
from shardplan.core.tensor import Box, TensorType
from shardplan.execution.lower import View, box_elements, chunk_of, flat_boxes, shape_of, view_of


class Piece(NamedTuple):
    """A part of a buffer: boxes that hold its elements one after another."""

    buffer: str
    shape: tuple[int, ...]  # of the buffer, or of the buffer made flat
    boxes: tuple[Box, ...]

    @property
    def elements(self) -> int:
        """The number of elements."""
        return sum(map(box_elements, self.boxes))

    @property
    def views(self) -> list[View]:
        """The boxes as views of the buffer."""
        return [view_of(self.shape, box) for box in self.boxes]


class PeerPiece(NamedTuple):
    """A piece that goes to a device, or comes from it."""

    peer: int  # device id
    piece: Piece


class PieceCopy(NamedTuple):
    """A piece that is written, or folded, into another; without a source it is filled with the fold's identity."""

    source: Piece | None
    target: Piece
    fold: str | None


class RankBlock(NamedTuple):
    """Elements of a buffer in a row, from one on and up to another, as an array."""

    buffer: str
    start: int
    stop: int
    shape: tuple[int, ...]

    def flat(self, held: Mapping[str, Any]) -> Any:
        """Return the elements as a view of their buffer."""
        return held[self.buffer].reshape(-1)[self.start : self.stop]


class RankKernel(NamedTuple):
    """What a rank computes; see `core.lowering.Kernel`."""

    run: LocalKernel
    sources: tuple[RankBlock, ...]
    targets: tuple[RankBlock, ...]
    numbers: tuple[int, ...]

    def target_elements(self, xp: Namespace, arrays: Sequence[Any]) -> list[Any]:
        """Return the elements of the targets, given those of the sources."""
        shaped = [x.reshape(b.shape) for b, x in zip(self.sources, arrays, strict=True)]
        return [y.reshape(-1) for y in self.run(xp, shaped, self.numbers)]


class RankRound(NamedTuple):
    """What one rank does in a round; see `core.lowering.Round`."""

    puts: tuple[PeerPiece, ...]
    meanwhile: tuple[PieceCopy, ...]
    takes: tuple[PeerPiece, ...]
    then: tuple[PieceCopy, ...]
    closes: bool
    kernels: tuple[RankKernel, ...] = ()

    @property
    def peers(self) -> tuple[int, ...]:
        """The devices that it waits for."""
        return tuple(sorted({one.peer for one in (*self.puts, *self.takes)}))


class RankRounds(NamedTuple):
    """A lowering on one rank: the shapes and dtypes (short names) of its buffers, and its rounds, made when asked."""

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    rounds: Callable[[], Iterator[RankRound]]


def rank_rounds(
    op: Op, operands: Sequence[TensorType], results: Sequence[TensorType], device: int, algorithm: str = ""
) -> RankRounds | None:
    """Return what the device of that id does in an op, None in one that has no lowering.

    Rounds in which it has nothing to do are left out.
    """
    lowering = op.lowering(operands, np.array([device]), algorithm)
    if lowering is None:
        return None
    shapes = {name: (int(b.elements[0]),) for name, b in lowering.buffers.items()}
    dtypes = {name: b.dtype for name, b in lowering.buffers.items()}
    for letter, side in (("x", operands), ("y", results)):
        shapes |= {f"{letter}{k}": shape_of(t, device) for k, t in enumerate(side)}
        dtypes |= {f"{letter}{k}": t.dtype for k, t in enumerate(side)}

    def piece(region: Region) -> Piece:
        box: Box = tuple((lo, hi) for lo, hi in region.box[0].tolist())
        shape = shapes[region.buffer]
        if region.strides is not None:
            found = _strided_runs(box, region.strides[0].tolist(), region.chunk)
            return Piece(region.buffer, (math.prod(shape),), found)
        if len(box) != len(shape):
            shape = (math.prod(shape),)
        run = chunk_of(box_elements(box), *region.chunk)
        return Piece(region.buffer, shape, tuple(flat_boxes(box, *run)))

    def pairs(moves: Sequence[Put] | Sequence[Take]) -> tuple[PeerPiece, ...]:
        found = ((int(m.peer[0]), piece(m.source if isinstance(m, Put) else m.target)) for m in moves)
        return tuple(PeerPiece(peer, one) for peer, one in found if one.boxes)

    def copied(c: Copy) -> PieceCopy:
        if c.source is None:
            return PieceCopy(None, piece(c.target), c.fold)
        ends = piece(c.source), piece(c.target)
        strided = c.source.strides is not None or c.target.strides is not None
        return PieceCopy(*(_align_pieces(*ends) if strided else ends), c.fold)

    def copies(found: Sequence[Copy]) -> tuple[PieceCopy, ...]:
        return tuple(copied(c) for c in found if c.target)

    def rounds() -> Iterator[RankRound]:
        for one in lowering.rounds():
            kernels = tuple(_kernel(k) for k in one.kernels if k.live[0])
            moves = pairs(one.puts), copies(one.meanwhile), pairs(one.takes), copies(one.then)
            mine = RankRound(*moves, one.closes, kernels)
            if one.closes or kernels or any(moves):
                yield mine

    return RankRounds(shapes, dtypes, rounds)


def _kernel(k: Kernel) -> RankKernel:
    def block(b: BufferBlock) -> RankBlock:
        start, n = int(b.start[0]), int(b.elements[0])
        return RankBlock(b.buffer, start, start + n, tuple(b.shape[0].tolist()))

    sources, targets = (tuple(map(block, blocks)) for blocks in (k.sources, k.targets))
    return RankKernel(k.run, sources, targets, tuple(k.numbers[0].tolist()))


def _strided_runs(box: Box, strides: list[int], chunk: tuple[int, int]) -> tuple[Box, ...]:
    """The runs of storage that hold a chunk of a box with strides, in row-major order of the box."""
    at = sum(lo * stride for (lo, _), stride in zip(box, strides, strict=True))
    starts, length = runs(at, [hi - lo for lo, hi in box], strides)
    first, last = (end - np.arange(len(starts)) * length for end in chunk_of(length * len(starts), *chunk))
    begin, end = starts + np.maximum(first, 0), starts + np.minimum(last, length)
    return tuple(((lo, hi),) for lo, hi in zip(begin.tolist(), end.tolist(), strict=True) if lo < hi)


def _align_pieces(one: Piece, other: Piece) -> tuple[Piece, Piece]:
    """Two pieces of equal size as runs of equal lengths, so that one is copied into the other without staging."""
    starts: list[np.ndarray] = []
    ends: list[np.ndarray] = []
    for piece in (one, other):
        found = [runs(view.offset, list(view.size), list(view.stride)) for view in piece.views]
        starts.append(np.concatenate([at for at, _ in found]))
        ends.append(np.cumsum(np.concatenate([np.full(len(at), length) for at, length in found])))
    stop = np.unique(np.concatenate(ends))
    begin = np.concatenate([[0], stop[:-1]])
    boxes: list[tuple[Box, ...]] = []
    for start, end in zip(starts, ends, strict=True):
        run = np.searchsorted(end, begin, side="right")
        low = start[run] + begin - np.concatenate([[0], end])[run]
        boxes.append(tuple(((lo, hi),) for lo, hi in zip(low.tolist(), (low + stop - begin).tolist(), strict=True)))
    flat = [Piece(p.buffer, (math.prod(p.shape),), found) for p, found in zip((one, other), boxes, strict=True)]
    return flat[0], flat[1]
