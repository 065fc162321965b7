"""What a movement op lowers to: rounds of puts, takes, copies and folds on boxes of local buffers, as data.

An op says its lowering once, for one device or for many at a time: arrays have one row for each device asked for. Every
executor and the event simulation interpret this data, and none of them knows an op by name.

In a round the puts read what stood before it. The k-th put from a device to another meets that one's k-th take from
it. A device enters a round when its takes of the round before are done, and leaves a round that `closes` when its puts
so far are done too. Chunks and segments are further rounds. An op that communicates and computes has kernels in its
rounds, which run while messages travel.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from shardplan.core.mesh import Mesh
from shardplan.core.messages import at_root
from shardplan.core.namespace import Namespace, Tensor
from shardplan.core.tensor import TensorType
from shardplan.errors import TypingError

Ints = np.ndarray
SEGMENT = 2**17  # bytes that a chain passes on at once: little beside a shard, so that all its links are busy


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """A box of a local, contiguous buffer; a row a device, empty rows take no part.

    A box with another number of dims than its buffer has one dim, and counts the buffer's elements in row-major order;
    with strides it has any number of them, and the element i of the box is number sum(i * stride) of the buffer's.
    """

    buffer: str  # "x0" operand, "y0" result (of one operand "x" and "y"); any other name is staging
    box: Ints  # int64 [devices, ndim, 2]
    chunk: tuple[int, int] = (0, 1)  # (c, C): of the n elements in row-major order, those from n c // C to n (c+1) // C
    strides: Ints | None = None  # int64 [devices, ndim of the box]

    def elements(self) -> Ints:
        """Return the number of elements, int64 [devices]."""
        n = np.multiply.reduce(self.box[:, :, 1] - self.box[:, :, 0], axis=1)
        c, count = self.chunk
        return n * (c + 1) // count - n * c // count if count > 1 else n

    def restrict(self, rows: Ints) -> Region:
        """Return the region of the devices that `rows`, bool [devices], says."""
        return replace(self, box=np.where(rows[:, None, None], self.box, 0))

    def cut(self, chunk: int, chunks: int) -> Region:
        """Return one of `chunks` parts of the region."""
        return replace(self, chunk=(chunk, chunks))

    def __bool__(self) -> bool:
        """Whether any device has an element of it."""
        return bool(self.elements().any())


def run_of(buffer: str, start: Ints, size: Ints) -> Region:
    """Return the region of `size` elements from `start` on, both int64 [devices], in row-major order."""
    size = np.maximum(size, 0)
    start = np.where(size > 0, start, 0)
    return Region(buffer, np.stack([start, start + size], axis=1)[:, None])


@dataclass(frozen=True, slots=True, eq=False)
class Put:
    """Send a region to a device."""

    peer: Ints  # device ids, int64 [devices]; -1 for none, and the region is then empty
    source: Region


@dataclass(frozen=True, slots=True, eq=False)
class Take:
    """Receive a region from a device."""

    peer: Ints  # as of a put
    target: Region


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """Write a region of equal size into another, or fold it in: `target = fold(target, source)`, rounded to the dtype.

    Without a source the target is filled with what leaves the fold unchanged.
    """

    source: Region | None
    target: Region
    fold: str | None = None  # a reduction


Action = Put | Take | Copy
LocalKernel = Callable[[Namespace, Sequence[Tensor], Sequence[Any]], Sequence[Tensor]]


class BufferBlock(NamedTuple):
    """Elements of a buffer in a row, as an array."""

    buffer: str
    start: Ints  # int64 [devices]
    shape: Ints  # int64 [devices, ndim]

    @property
    def elements(self) -> Ints:
        """The number of elements, int64 [devices]."""
        return np.multiply.reduce(self.shape, axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """Compute blocks from blocks, in any array namespace, on the devices that are `live`.

    `run` takes the namespace, the sources, and the `numbers` of the device, which in JAX are traced; what it returns is
    rounded to the dtypes of the targets. It may read what it writes; of what it writes no message of its round is part.
    """

    run: LocalKernel
    sources: tuple[BufferBlock, ...]
    targets: tuple[BufferBlock, ...]
    numbers: Ints  # int64 [devices, n]
    live: Ints  # bool [devices]
    flops: Ints  # float64 [devices]


class Round(NamedTuple):
    """What devices do at once.

    From one round that closes to the next, nothing writes what a put has read, and nothing uses where a take lands
    before its `then`, but what is done before something comes that was made of it: receives can be posted that early.
    """

    puts: tuple[Put, ...] = ()
    meanwhile: tuple[Copy, ...] = ()  # in order, while messages travel
    takes: tuple[Take, ...] = ()
    then: tuple[Copy, ...] = ()  # in order, when all takes are done
    closes: bool = True
    kernels: tuple[Kernel, ...] = ()  # in order, behind `meanwhile` and while messages travel

    @staticmethod
    def of(actions: Iterable[Action], closes: bool = True) -> Round:
        """Return the round of those of the actions that some device takes part in; copies before any take go ahead."""
        puts: list[Put] = []
        takes: list[Take] = []
        copies: tuple[list[Copy], list[Copy]] = [], []
        for action in actions:
            if isinstance(action, Put):
                puts += [action] if action.source else []
            elif isinstance(action, Take):
                takes += [action] if action.target else []
            elif action.target:
                copies[bool(takes)].append(action)
        return Round(tuple(puts), tuple(copies[0]), tuple(takes), tuple(copies[1]), closes)

    @property
    def actions(self) -> tuple[Action, ...]:
        """All of them, in order."""
        return (*self.puts, *self.meanwhile, *self.takes, *self.then)


def match_messages(one: Round, ids: Sequence[int], what: str) -> list[tuple[int, int, Region, Region]]:
    """Return the messages of a round: the rows of sender and receiver, what is put, and where it is taken.

    `ids` are those of all devices that take part, by row. Raises `TypingError`, which `what` opens, where what is put
    is not what is taken.
    """
    rows = {device: row for row, device in enumerate(ids)}
    posted: dict[tuple[int, int], deque[tuple[Region, int]]] = defaultdict(deque)
    for put in one.puts:
        sizes = put.source.elements()
        for row in np.flatnonzero(sizes).tolist():
            posted[ids[row], int(put.peer[row])].append((put.source, int(sizes[row])))
    found: list[tuple[int, int, Region, Region]] = []
    for take in one.takes:
        sizes = take.target.elements()
        for row in np.flatnonzero(sizes).tolist():
            pair, n = (int(take.peer[row]), ids[row]), int(sizes[row])
            source, given = posted[pair].popleft() if posted[pair] else (None, 0)
            if source is None or given != n:
                sent = f"{given} elements" if given else "nothing"
                raise TypingError(
                    f"{what}: device {pair[1]} takes {n} elements from device {pair[0]}, which puts {sent}"
                )
            found.append((rows[pair[0]], row, source, take.target))
    for sender, receiver in (pair for pair, left in posted.items() if left):
        raise TypingError(f"{what}: device {sender} puts what device {receiver} does not take")
    return found


class Buffer(NamedTuple):
    """A flat staging buffer."""

    elements: Ints  # int64 [devices]
    dtype: str


@dataclass(frozen=True, slots=True, eq=False)
class Lowering:
    """The rounds of an op on some devices; `rounds` makes them anew at each call."""

    devices: Ints  # ids, int64 [devices]
    buffers: Mapping[str, Buffer]
    rounds: Callable[[], Iterator[Round]]


def side_by_side(devices: Ints, strands: Sequence[tuple[int, int, Lowering]]) -> Lowering:
    """Return lowerings of one operand each as one transfer: the n-th rounds of all are one.

    A strand is the number of its operand, that of its result, and its lowering: its "x" becomes "x" with the former,
    all its other buffers have the latter.
    """
    buffers = {f"{name}{made}": b for _, made, one in strands for name, b in one.buffers.items()}
    return Lowering(devices, buffers, lambda: _merge_rounds(strands))


def _merge_rounds(strands: Sequence[tuple[int, int, Lowering]]) -> Iterator[Round]:
    def named(region: Region, k: int) -> Region:
        given, made, _ = strands[k]
        return replace(region, buffer=f"{region.buffer}{given if region.buffer == 'x' else made}")

    def copied(copy: Copy, k: int) -> Copy:
        return Copy(None if copy.source is None else named(copy.source, k), named(copy.target, k), copy.fold)

    for parts in zip_longest(*(one.rounds() for _, _, one in strands)):
        there = [(k, part) for k, part in enumerate(parts) if part is not None]
        yield Round(
            tuple(Put(a.peer, named(a.source, k)) for k, part in there for a in part.puts),
            tuple(copied(a, k) for k, part in there for a in part.meanwhile),
            tuple(Take(a.peer, named(a.target, k)) for k, part in there for a in part.takes),
            tuple(copied(a, k) for k, part in there for a in part.then),
            any(part.closes for _, part in there),
        )


def places_of(mesh: Mesh, devices: Ints) -> Ints:
    """Return the places of device ids in a mesh, -1 for one that it does not have: int64 [devices]."""
    order = np.argsort(mesh.ids)
    found = order[np.minimum(np.searchsorted(mesh.ids, devices, sorter=order), mesh.size - 1)]
    return np.where(mesh.ids[found] == devices, found, -1)


class Boxes:
    """What some devices hold under a type; those that do not hold the value have empty boxes."""

    def __init__(self, t: TensorType, places: Ints) -> None:
        """Take the devices by place, int64 [devices]; -1 for one that is not on the mesh."""
        self.places = places
        self.live = (places >= 0) & at_root(t)[places]
        self.boxes = t.boxes()[places]  # of the whole array; a place of -1 reads some row, which no one uses

    @staticmethod
    def ends(t: TensorType, u: TensorType, devices: Ints) -> tuple[Boxes, Boxes]:
        """Return what the devices of those ids hold before and after an op from type `t` to `u`."""
        return Boxes(t, places_of(t.mesh, devices)), Boxes(u, places_of(u.mesh, devices))

    def whole_region(self, buffer: str) -> Region:
        """Return the shards."""
        n = np.prod(self.boxes[:, :, 1] - self.boxes[:, :, 0], axis=1, dtype=np.int64) * self.live
        return run_of(buffer, np.zeros_like(n), n)

    def part(self, buffer: str, other: Boxes) -> Region:
        """Return what each shard has in common with another device's, in the indices of the shard."""
        rows = self.live & other.live
        if not self.boxes.shape[1]:
            return run_of(buffer, np.zeros_like(self.places), rows.astype(np.int64))
        start = self.boxes[:, :, 0]
        low = np.maximum(start, other.boxes[:, :, 0]) - start
        high = np.minimum(self.boxes[:, :, 1], other.boxes[:, :, 1]) - start
        full = rows & (low < high).all(axis=1)
        return Region(buffer, np.where(full[:, None, None], np.stack([low, high], axis=2), 0))


class Group:
    """The groups of some devices in an op over `axes` on a value of type `t`; rows of devices that have none are idle.

    `me` is the index of each device in its group, `size` how many members a group has.
    """

    def __init__(self, t: TensorType, axes: tuple[str, ...], devices: Ints) -> None:
        """Find the groups."""
        self.type = t
        self.places = places_of(t.mesh, devices)
        self.live = (self.places >= 0) & at_root(t)[self.places]
        first = t.mesh.group_places(axes)[0]
        self.size = len(first)
        self.digits = tuple(t.mesh.atoms[a].size for a in t.mesh.expand(axes))  # of a member's index, major first
        self._offsets = first - first[0]
        self.me = np.where(self.live, t.mesh.index(axes)[self.places], -1)

    def place(self, member: Ints | int) -> Ints:
        """Return the places of the members of those indices (modulo the size), -1 in idle rows."""
        there = self.places - self._offsets[self.me] + self._offsets[np.asarray(member) % self.size]
        return np.where(self.live, there, -1)

    def ids(self, member: Ints | int, region: Region) -> Ints:
        """Return the device ids of the members of those indices, -1 where the region is empty."""
        return np.where(region.elements() > 0, self.type.mesh.ids[self.place(member)], -1)

    def put(self, member: Ints | int, source: Region) -> Put:
        """Send to a member."""
        return Put(self.ids(member, source), source)

    def take(self, member: Ints | int, target: Region) -> Take:
        """Receive from a member."""
        return Take(self.ids(member, target), target)
