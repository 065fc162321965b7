"""The ops that move boxes between any two layouts: Permute, Exchange, Send.

Partial and root axes pass through unchanged; only `Permute` may rename them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Self

import numpy as np

from shardplan.core.box_table import BoxTable
from shardplan.core.dtypes import numpy_dtype
from shardplan.core.holders import checked_near
from shardplan.core.layout import Layout
from shardplan.core.lowering import Boxes, Copy, Ints, Put, Region, Round, Take
from shardplan.core.mesh import Mesh
from shardplan.core.message_totals import message_totals, own_copy_bytes
from shardplan.core.messages import (
    Packed,
    at_root,
    has_box_table,
    lacking,
    messages,
    most_senders,
    own_places,
    parcels,
    permutation,
    sent_in_general,
    stays,
    traffic,
)
from shardplan.core.notation import axes_text
from shardplan.core.op import Array, Shards, poison
from shardplan.core.ops.collective import (
    Collective,
    assemble,
    cut_box,
    major,
    meet,
    point_to_point,
    result_type,
)
from shardplan.core.ops.movement import AllGather, check_chunks
from shardplan.core.parcels import Parcels, Rows
from shardplan.core.pattern import Local, Messages, Pattern
from shardplan.core.tensor import TensorType, counter, live_reduction, same
from shardplan.errors import TypingError


def deliver(
    t: TensorType, u: TensorType, devices: Ints, senders: Ints, receivers: Ints, home: Ints, chunks: int
) -> Iterator[Round]:
    """Yield the rounds of messages given by places: what the sender's shard and the receiver's new one have in common.

    `home`, bool by place in `u`, says who keeps what it holds of its new shard.
    """
    before, after = Boxes.ends(t, u, devices)
    own = Boxes(t, np.where((after.places >= 0) & home[after.places], own_places(t, u)[after.places], -1))
    new = Boxes(u, np.where(own.places >= 0, after.places, -1))
    copy = Copy(own.part("x", new), new.part("y", own))
    puts = [(p, before.part("x", Boxes(u, p))) for p in _nth(before.places, senders, receivers)]
    takes = [(p, after.part("y", Boxes(t, p))) for p in _nth(after.places, receivers, senders)]
    for c in range(chunks):
        yield Round.of(
            (
                *([copy] if not c else []),
                *(Put(_ids(u, peer, part), part.cut(c, chunks)) for peer, part in puts),
                *(Take(_ids(t, peer, part), part.cut(c, chunks)) for peer, part in takes),
            )
        )


def deliver_parcels(found: Parcels, t: TensorType, u: TensorType, devices: Ints, chunks: int) -> Iterator[Round]:
    """Yield the rounds of a move with a table of boxes at either end: all its parcels, each a message of its own."""
    senders, receivers = found.source.ids[found.given], found.target.ids[found.taken]
    home, away = np.flatnonzero(found.stay_mask), np.flatnonzero(~found.stay_mask)
    give = lambda k: _part("x", t, found.source, found.given[k], found.boxes[k], k >= 0)  # noqa: E731
    take = lambda k: _part("y", u, found.target, found.taken[k], found.boxes[k], k >= 0)  # noqa: E731
    peer = lambda k, ends: np.where(k >= 0, ends[k], -1)  # noqa: E731
    copies = [Copy(give(k), take(k)) for k in _nth(devices, senders[home], home)]
    puts = [Put(peer(k, receivers), give(k)) for k in _nth(devices, senders[away], away)]
    takes = [Take(peer(k, senders), take(k)) for k in _nth(devices, receivers[away], away)]
    for c in range(chunks):
        yield Round.of(
            (
                *([] if c else copies),
                *(Put(x.peer, x.source.cut(c, chunks)) for x in puts),
                *(Take(x.peer, x.target.cut(c, chunks)) for x in takes),
            )
        )


def _part(buffer: str, t: TensorType, rows: Rows, row: Ints, box: Ints, live: Ints) -> Region:
    """The region of each device in which a box of the array lies, inside one of its rows."""
    start, size = box[..., 0] - rows.boxes[row][..., 0], box[..., 1] - box[..., 0]
    if t.layout.boxes is None and t.ndim:
        return Region(buffer, np.where(live[:, None, None], np.stack([start, start + size], axis=2), 0))
    strides = rows.strides[row]
    at = rows.offsets[row] + (start * strides).sum(axis=1)
    # Before the dims of the box stands one of size 1, whose index is where the box begins.
    low, high = (np.column_stack([first, rest]) for first, rest in ((at, np.zeros_like(size)), (at + 1, size)))
    inside = np.where(live[:, None, None], np.stack([low, high], axis=2), 0)
    return Region(buffer, inside, strides=np.column_stack([np.ones_like(at), strides]))


def _ids(t: TensorType, places: Ints, part: Region) -> Ints:
    return np.where(part.elements() > 0, t.mesh.ids[places], -1)


def _nth(places: Ints, ends: Ints, others: Ints) -> Iterator[Ints]:
    """Yield the first, second, ... of `others` that each place meets among `ends`; -1 where it has no more."""
    order = np.argsort(ends, kind="stable")
    first, last = (np.searchsorted(ends[order], places, side=side) for side in ("left", "right"))
    others = np.append(others[order], -1)
    for k in range(int((last - first).max(initial=0))):
        yield others[np.where((first + k < last) & (places >= 0), first + k, -1)]


def _permuted_bytes(t: TensorType, u: TensorType, end: int) -> np.ndarray:
    """Bytes of the pairs of a permute, for every device at end 0, that of senders, or 1: int64 [devices]."""
    out = np.zeros(t.mesh.size, dtype=counter(t))
    pairs = permutation(t, u)
    if pairs is not None:
        out[pairs[end]] = u.elements()[pairs[1]] * u.itemsize
    return out


@dataclass(frozen=True, slots=True)
class Permute(Collective):
    """Every device sends one tile (or a part it cuts out of its tile) to one device: the type becomes `layout`.

    Legal when every tile of the result lies inside one tile of the operand, with senders and receivers one to one; a
    device that holds its own tile keeps it. The only op that may rename partial and root axes.
    """

    name: ClassVar[str] = "permute"
    peers: ClassVar[int] = 1
    layout: Layout
    chunks: int = 1

    def result(self, t: TensorType) -> TensorType:
        """Check that the pairs exist."""
        check_chunks(self.name, self.chunks)
        u = t.with_layout(self.layout)
        if permutation(t, u) is None:
            raise TypingError(f"permute: the tiles of {u} are not one to one inside the tiles of {t}")
        return u

    def received_one(self, t: TensorType, u: TensorType) -> np.ndarray:
        """The whole new tile where sender and receiver differ."""
        return _permuted_bytes(t, u, 1)

    def sent_one(self, t: TensorType, u: TensorType) -> np.ndarray:
        """The receiver's tile."""
        return _permuted_bytes(t, u, 0)

    def move(self, shards: Shards, t: TensorType, u: TensorType) -> list[Array]:
        """Deliver each pair's tile; the rest keep theirs."""
        source = np.arange(t.mesh.size)
        pairs = permutation(t.whole_type, u.whole_type)
        if pairs is not None:
            source[pairs[1]] = pairs[0]
        held = at_root(u)
        before, after, dtype = t.boxes(), u.boxes(), numpy_dtype(t.dtype)
        return [
            assemble(after[k], [(before[source[k]], shards[source[k]])], dtype, self.name)
            if held[k]
            else poison(u.local_shape(k), dtype)
            for k in range(t.mesh.size)
        ]

    def rounds(self, *operands: TensorType) -> int:
        """One, if anything moves."""
        return int(any(self.received_one(t, result_type(self, t)).any() for t in operands))

    def packing(self, t: TensorType, u: TensorType) -> Packed:
        """The tile is sent and received whole; a cut tile is contiguous when only its major dim is cut."""
        before, after = t.local_shape(), u.local_shape()
        cuts = [d for d in range(t.ndim) if before[d] != after[d]]
        sent_contiguous = not cuts or (len(cuts) == 1 and major(before, cuts[0]))
        return Packed(math.prod(after), math.prod(after), sent_contiguous, True)

    def lower(self, t: TensorType, u: TensorType, devices: Ints, algorithm: str) -> Iterator[Round]:
        """One message a pair; a device that holds its own tile copies it."""
        pairs = permutation(t.whole_type, u.whole_type)
        assert pairs is not None  # typed so
        home = np.ones(u.mesh.size, dtype=bool)
        home[pairs[1]] = False
        yield from deliver(t, u, devices, *pairs, home, self.chunks)

    def pieces(self, t: TensorType, u: TensorType) -> tuple[int, int]:
        """One tile each way."""
        return 1, 1

    def pattern(self, *operands: TensorType) -> Pattern:
        """One message a pair."""
        t = operands[0]
        pairs = permutation(t, result_type(self, t))
        if pairs is None or not len(pairs[0]):
            return Local(0.0)
        sizes = sum(result_type(self, x).elements()[pairs[1]] * x.itemsize for x in operands)
        home = (t.boxes() != result_type(self, t).boxes()).any(axis=(1, 2))  # what cuts its new tile out of its own
        home[pairs[1]] = False
        own = sum(int(result_type(self, x).elements()[home].max(initial=0)) * x.itemsize for x in operands)
        return point_to_point(t, result_type(self, t), *pairs, np.asarray(sizes), self.chunks, float(own))


@dataclass(frozen=True, slots=True)
class General(Collective):
    """A move on box intersections: every receiver hears from holders of what it lacks (`core.messages`).

    `near` lists the sizes of nested blocks of device ids, such as nodes and racks: of several holders those in the
    smallest block around a receiver share in sending (`core.holders`).
    """

    boxed: ClassVar[bool] = True
    near = ()  # unannotated, so that it is no field of an op that does not choose

    @property
    def choice(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """What says who sends: `near`, and the axes of the groups."""
        return self.near, ()

    def nearest(self, blocks: tuple[int, ...]) -> Self:
        """Take the holders in the smallest of these blocks."""
        return replace(self, near=blocks) if any(field.name == "near" for field in fields(self)) else self

    def received_one(self, t: TensorType, u: TensorType) -> np.ndarray:
        """Return the new box minus what the device holds."""
        return lacking(t, u)

    def sent_one(self, t: TensorType, u: TensorType) -> np.ndarray:
        """Return what the device is chosen to send."""
        return sent_in_general(t, u, *self.choice).elements * t.itemsize

    def move(self, shards: Shards, t: TensorType, u: TensorType) -> list[Array]:
        """Deliver the messages; what a device holds already it keeps."""
        if has_box_table(t, u):
            return Collective.move(self, shards, t, u)
        senders, receivers, _ = messages(t.whole_type, u.whole_type, *self.choice)
        before, after, dtype = t.boxes(), u.boxes(), numpy_dtype(t.dtype)
        own, held, needed = own_places(t, u), at_root(t), at_root(u)
        pieces: list[list[tuple[np.ndarray, Array]]] = [[] for _ in range(u.mesh.size)]
        for r, place in enumerate(own):
            if place >= 0 and held[place]:
                pieces[r].append((before[place], shards[place]))
        for s, r in zip(senders, receivers, strict=True):
            part = meet(before[s], after[r])
            if part is not None:
                pieces[r].append((part, cut_box(shards[s], before[s], part)))
        return [
            assemble(after[r], pieces[r], dtype, self.name) if needed[r] else poison(u.local_shape(r), dtype)
            for r in range(u.mesh.size)
        ]

    def lower(self, t: TensorType, u: TensorType, devices: Ints, algorithm: str) -> Iterator[Round]:
        """The messages, all at once."""
        if has_box_table(t, u):
            yield from deliver_parcels(parcels(t, u, *self.choice), t, u, devices, self.chunks)
            return
        senders, receivers, _ = messages(t.whole_type, u.whole_type, *self.choice)
        yield from deliver(t, u, devices, senders, receivers, np.ones(u.mesh.size, dtype=bool), self.chunks)

    def rounds(self, *operands: TensorType) -> int:
        """The largest number of non-empty peers a device hears from."""
        return max(most_senders(t, result_type(self, t)) for t in operands)

    def packing(self, t: TensorType, u: TensorType) -> Packed:
        """All that is sent, and all that is received."""
        return traffic(t, u, *self.choice)

    def pieces(self, t: TensorType, u: TensorType) -> tuple[int, int]:
        """One part a peer; with a table of boxes, one a parcel."""
        if has_box_table(t, u):
            found = parcels(t, u, *self.choice)
            counts = [int(np.bincount(ends[~found.stay_mask]).max(initial=1)) for ends in found.ends]
            return counts[0], counts[1]
        return sent_in_general(t, u, *self.choice).receivers, max(1, most_senders(t, u))

    def pattern(self, *operands: TensorType) -> Pattern:
        """Explicit messages, those of all operands between two devices together; counted before they are listed."""
        t = operands[0]
        alike = all(x == t for x in operands)
        totals = message_totals(t, result_type(self, t), *self.choice, len(operands)) if alike else None
        own = float(sum(own_copy_bytes(x, result_type(self, x)) for x in operands))
        if totals is None:
            found = self._list_messages(operands)
            return Messages(*found, self.chunks, own) if len(found[0]) else Local(0.0)
        if not len(totals.devices):
            return Local(0.0)
        return Messages.from_totals(totals, lambda: self._list_messages(operands), self.chunks, own)

    def _list_messages(self, operands: Sequence[TensorType]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        t, u = operands[0], result_type(self, operands[0])
        moves = [messages(x, result_type(self, x), *self.choice) for x in operands]
        width = u.mesh.size
        keys = np.concatenate([senders * width + receivers for senders, receivers, _ in moves])
        sizes = [elements * x.itemsize for x, (_, _, elements) in zip(operands, moves, strict=True)]
        weights = np.concatenate(sizes).astype(np.float64)
        if len(moves) == 1 and not has_box_table(t, u):  # a device has one tile, so that no pair stands there twice
            order = np.argsort(keys, kind="stable")
            return t.mesh.ids[moves[0][0][order]], u.mesh.ids[moves[0][1][order]], weights[order]
        unique, index = np.unique(keys, return_inverse=True)
        return t.mesh.ids[unique // width], u.mesh.ids[unique % width], np.bincount(index, weights, len(unique))


def _set_end(op: Exchange | Send) -> None:
    """Check where an op moves to; a layout that has a table stands for the table."""
    object.__setattr__(op, "near", checked_near(op.name, op.near))
    if op.layout is not None and op.layout.boxes is not None and op.boxes is None:
        object.__setattr__(op, "boxes", op.layout.boxes)
        object.__setattr__(op, "layout", None)
    if (op.layout is None) == (op.boxes is None):
        raise TypingError(f"{op.name} takes either a layout or boxes=; got {'none' if op.layout is None else 'both'}")


def _end(op: Exchange | Send) -> Layout | BoxTable:
    found = op.layout or op.boxes
    assert found is not None  # checked when the op is made
    return found


@dataclass(frozen=True, slots=True)
class Exchange(General):
    """The general move, one all-to-all-v on box intersections inside groups over `axes` (empty: the whole mesh).

    It moves to a layout, or to a table of boxes.
    """

    name: ClassVar[str] = "exchange"
    peers: ClassVar[int] = 2
    layout: Layout | None = None
    axes: tuple[str, ...] = ()
    chunks: int = 1
    boxes: BoxTable | None = None
    near: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check the end and the blocks."""
        _set_end(self)

    def members(self, t: TensorType) -> tuple[str, ...]:
        """The axes of the groups."""
        return self.axes or t.mesh.axes

    @property
    def choice(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Holders are of the receiver's group."""
        return self.near, self.axes

    def result(self, t: TensorType) -> TensorType:
        """Check that every group covers the new boxes of its members."""
        check_chunks(self.name, self.chunks)
        u = t.with_layout(_end(self))
        parts = [set(t.mesh.expand(x)) for x in (t.layout.partial, u.layout.partial, t.layout.root, u.layout.root)]
        if parts[0] != parts[1] or parts[2] != parts[3] or live_reduction(t) != live_reduction(u):
            raise TypingError(f"exchange: {t} and {u} differ in their partial or root axes; those must be equal")
        if self.axes and not stays(t, u, self.axes):
            raise TypingError(f"exchange: groups over {axes_text(self.axes)} do not hold all of {u} under {t}")
        return u

    def named_collective(self, *operands: TensorType) -> AllGather | None:
        """An all-gather where one dim loses its innermost axes and all else stays."""
        (was, now) = (t.layout.dims for t in (operands[0], result_type(self, operands[0])))
        changed = [d for d, (a, b) in enumerate(zip(was, now, strict=True)) if a != b]
        if len(changed) != 1 or was[changed[0]][: len(now[changed[0]])] != now[changed[0]]:
            return None
        return AllGather(changed[0], was[changed[0]][len(now[changed[0]]) :])


@dataclass(frozen=True, slots=True)
class Send(General):
    """Move to another mesh: every device of `mesh` fetches what it lacks of its box under `layout`, or of its rows."""

    name: ClassVar[str] = "send"
    layout: Layout | None
    mesh: Mesh
    chunks: int = 1
    boxes: BoxTable | None = None
    near: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check the end and the blocks."""
        _set_end(self)

    def result(self, t: TensorType) -> TensorType:
        """The same tensor on the other mesh; the operand may not be partial, unless every shard stays as it is."""
        check_chunks(self.name, self.chunks)
        u = t.with_layout(_end(self), self.mesh)
        if same(t, u):
            return u
        if t.layout.partial:
            raise TypingError(f"send: {t} is partial; reduce it first")
        if u.layout.partial or u.layout.root:
            raise TypingError(f"send: the result {u} may be neither partial nor rooted")
        return u
