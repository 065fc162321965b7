"""The ops that move data and add nothing: Slice, AllGather, AllToAll, Permute, Exchange, Send.

Typing rules and bytes: the table of `docs/concepts.md`. Partial and root axes pass through unchanged; only
`Permute` may rename them. A suffix is a contiguous minor run of the axes of a dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from shardplan.core.dtypes import numpy_dtype
from shardplan.core.layout import Layout
from shardplan.core.mesh import Mesh
from shardplan.core.messages import (
    Packed,
    at_root,
    lacking,
    messages,
    most_receivers,
    most_senders,
    own_places,
    permutation,
    stays,
    traffic,
)
from shardplan.core.notation import axes_text
from shardplan.core.ops.base import (
    Array,
    Collective,
    Grouped,
    InPlace,
    Shards,
    assemble,
    cut,
    major,
    meet,
    point_to_point,
    poison,
    typed,
)
from shardplan.core.pattern import Local, Pattern
from shardplan.core.tensor import TensorType, counter, live_reduction
from shardplan.errors import TypingError

Dims = int | tuple[int, ...]


def check_dim(op: str, t: TensorType, dim: int) -> None:
    """Raise `TypingError` unless `dim` is a dim of `t`."""
    if not 0 <= dim < t.ndim:
        raise TypingError(f"{op}: {t} has no dim {dim}; legal are 0 to {t.ndim - 1}")


def check_chunks(op: str, chunks: int) -> None:
    """Raise `TypingError` unless the op is cut into at least one part."""
    if chunks < 1:
        raise TypingError(f"{op}: chunks={chunks}; an op runs in at least 1 part")


def by_dim(op: str, dims: Dims, axes: tuple[str, ...]) -> dict[int, tuple[str, ...]]:
    """Return the axes of each dim: all of them for one dim, or one dim per axis."""
    if isinstance(dims, int):
        return {dims: axes}
    if len(dims) != len(axes):
        raise TypingError(f"{op}: {len(dims)} dims for {len(axes)} axes; give one dim, or one dim per axis")
    out: dict[int, tuple[str, ...]] = {}
    for d, a in zip(dims, axes, strict=True):
        out[d] = (*out.get(d, ()), a)
    return out


def with_dims(layout: Layout, mesh: Mesh, changed: dict[int, tuple[int, ...]]) -> Layout:
    """Return the layout with the atoms of some dims replaced."""
    dims = tuple(mesh.fold(changed[d]) if d in changed else names for d, names in enumerate(layout.dims))
    return replace(layout, dims=dims)


def nested(op: str, t: TensorType, u: TensorType) -> TensorType:
    """Return `u`, or raise `TypingError` where an uneven dim gains or loses less than whole axes.

    Nested ceilings differ from the flat one: a sub-axis that completes a run does not refine the tiles it had before.
    """
    for d, (x, y) in enumerate(zip(t.layout.dims, u.layout.dims, strict=True)):
        if t.even[d] and u.even[d]:
            continue
        a, b = (tuple(n for n in names if t.mesh.span(n).size > 1) for names in (x, y))
        if a[: len(b)] != b and b[: len(a)] != a:
            raise TypingError(
                f"{op}: dim {d} is uneven in {t if u.even[d] else u}, where its tiles are no parts of those over other "
                f"sub-axes; legal there are whole axes"
            )
    return u


def without_suffix(op: str, t: TensorType, dim: int, axes: tuple[str, ...]) -> tuple[int, ...]:
    """Return the atoms of `dim` without the suffix `axes`, or raise `TypingError`."""
    check_dim(op, t, dim)
    run = t.mesh.expand(axes)
    held = t.atoms[dim]
    if run and held[len(held) - len(run) :] != run:
        raise TypingError(
            f"{op}: {axes_text(axes)} is not a suffix of dim {dim} of {t}; legal are minor runs of "
            f"{axes_text(t.layout.dims[dim]) if t.layout.dims[dim] else 'no axes'}"
        )
    return held[: len(held) - len(run)]


def unused(op: str, t: TensorType, axes: tuple[str, ...]) -> tuple[int, ...]:
    """Return the atoms of `axes`, or raise `TypingError` when the type uses one of them."""
    atoms = t.mesh.expand(axes)
    busy = set(t.mesh.expand(t.layout.used))
    if len(set(atoms)) != len(atoms) or busy & set(atoms):
        raise TypingError(f"{op}: the axes {axes_text(axes)} are not all unused in {t}")
    return atoms


def group_move(op: Collective, shards: Shards, t: TensorType, u: TensorType) -> list[Array]:
    """Return every device's new shard, put together from the shards of its group."""
    before, after = t.boxes(), u.boxes()
    out: list[Array] = [poison(x.shape, x.dtype) for x in shards]
    dtype = numpy_dtype(t.dtype)
    held = at_root(t)
    for group in t.mesh.group_places(op.members(t)):
        pieces = [(before[m], shards[m]) for m in group]
        for m in group:
            out[m] = assemble(after[m], pieces, dtype, op.name) if held[m] else poison(u.local_shape(int(m)), dtype)
    return out


@dataclass(frozen=True, slots=True)
class Slice(InPlace):
    """Keep a part: `axes`, unused before, are appended minor to `dim`. Local."""

    name: ClassVar[str] = "slice"
    dim: int
    axes: tuple[str, ...]

    def result(self, t: TensorType) -> TensorType:
        """Append the axes; sub-axes need an even dim (the type refuses them otherwise)."""
        check_dim(self.name, t, self.dim)
        atoms = unused(self.name, t, self.axes)
        u = t.with_layout(with_dims(t.layout, t.mesh, {self.dim: t.atoms[self.dim] + atoms}))
        return nested(self.name, t, u)

    def move(self, shards: Shards, t: TensorType, u: TensorType) -> list[Array]:
        """Cut every shard."""
        return [cut(x, t.boxes()[k], u.boxes()[k]).copy() for k, x in enumerate(shards)]

    def pattern(self, *operands: TensorType) -> Pattern:
        """A view: no bytes."""
        return Local(0.0)


@dataclass(frozen=True, slots=True)
class AllGather(Grouped):
    """Every device gets the tiles of its group: `axes`, a suffix of `dim` (or of one dim per axis), are removed."""

    name: ClassVar[str] = "all_gather"
    kind: ClassVar[str] = "all_gather"
    dim: Dims
    axes: tuple[str, ...]
    chunks: int = 1

    def members(self, t: TensorType) -> tuple[str, ...]:
        """Return its axes."""
        return self.axes

    def received_one(self, t: TensorType, u: TensorType) -> np.ndarray:
        """Return the new box minus what the device holds."""
        return lacking(t, u)

    def result(self, t: TensorType) -> TensorType:
        """Remove the suffixes."""
        check_chunks(self.name, self.chunks)
        changed = {d: without_suffix(self.name, t, d, a) for d, a in by_dim(self.name, self.dim, self.axes).items()}
        return nested(self.name, t, t.with_layout(with_dims(t.layout, t.mesh, changed)))

    def move(self, shards: Shards, t: TensorType, u: TensorType) -> list[Array]:
        """Assemble within groups."""
        return group_move(self, shards, t, u)

    def packed(self, t: TensorType, u: TensorType) -> Packed:
        """The shard is sent whole; the gathered parts are contiguous when one major dim is gathered."""
        dims = list(by_dim(self.name, self.dim, self.axes))
        shape = u.local_shape()
        return Packed(math.prod(t.local_shape()), math.prod(shape), True, len(dims) == 1 and major(shape, dims[0]))


@dataclass(frozen=True, slots=True)
class AllToAll(Grouped):
    """Move axes between dims: the suffix `axes` of `src_dim` is appended, in `order`, to `dst_dim`."""

    name: ClassVar[str] = "all_to_all"
    kind: ClassVar[str] = "all_to_all"
    src_dim: int
    dst_dim: int
    axes: tuple[str, ...]
    order: tuple[str, ...] = ()
    chunks: int = 1

    def members(self, t: TensorType) -> tuple[str, ...]:
        """Return its axes."""
        return self.axes

    def received_one(self, t: TensorType, u: TensorType) -> np.ndarray:
        """Return the new box minus what the device holds."""
        return lacking(t, u)

    def result(self, t: TensorType) -> TensorType:
        """Remove the suffix here, append it there."""
        check_chunks(self.name, self.chunks)
        check_dim(self.name, t, self.dst_dim)
        if self.src_dim == self.dst_dim:
            raise TypingError(f"{self.name}: source and destination are both dim {self.src_dim}; they must differ")
        left = without_suffix(self.name, t, self.src_dim, self.axes)
        moved = t.mesh.expand(self.order or self.axes)
        if sorted(moved) != sorted(t.mesh.expand(self.axes)):
            raise TypingError(f"{self.name}: order {axes_text(self.order)} does not permute {axes_text(self.axes)}")
        changed = {self.src_dim: left, self.dst_dim: t.atoms[self.dst_dim] + moved}
        return nested(self.name, t, t.with_layout(with_dims(t.layout, t.mesh, changed)))

    def move(self, shards: Shards, t: TensorType, u: TensorType) -> list[Array]:
        """Assemble within groups."""
        return group_move(self, shards, t, u)

    def rounds(self, *operands: TensorType) -> int:
        """One per peer: q - 1."""
        return math.prod(operands[0].mesh.span(a).size for a in self.axes) - 1

    def packed(self, t: TensorType, u: TensorType) -> Packed:
        """Sent pieces are contiguous when the cut dim is major, received ones when the joined dim is."""
        before, after = t.local_shape(), u.local_shape()
        natural = self.order in ((), self.axes)
        sent_contiguous = natural and major(before, self.dst_dim)
        return Packed(math.prod(before), math.prod(after), sent_contiguous, major(after, self.src_dim))


@dataclass(frozen=True, slots=True)
class Permute(Collective):
    """Every device sends one tile (or a part it cuts out of its tile) to one device: the type becomes `layout`.

    Legal when every tile of the result lies inside one tile of the operand, with senders and receivers one to one; a
    device that holds its own tile keeps it. The only op that may rename partial and root axes.
    """

    name: ClassVar[str] = "permute"
    layout: Layout
    chunks: int = 1

    def members(self, t: TensorType) -> tuple[str, ...]:
        """No groups."""
        return ()

    def result(self, t: TensorType) -> TensorType:
        """Check that the pairs exist."""
        check_chunks(self.name, self.chunks)
        u = t.with_layout(self.layout)
        if permutation(t, u) is None:
            raise TypingError(f"permute: the tiles of {u} are not one to one inside the tiles of {t}")
        return u

    def received_one(self, t: TensorType, u: TensorType) -> np.ndarray:
        """The whole new tile where sender and receiver differ."""
        out = np.zeros(t.mesh.size, dtype=counter(t))
        pairs = permutation(t, u)
        if pairs is not None:
            out[pairs[1]] = u.elements()[pairs[1]] * u.itemsize
        return out

    def move(self, shards: Shards, t: TensorType, u: TensorType) -> list[Array]:
        """Deliver each pair's tile; the rest keep theirs."""
        source = np.arange(t.mesh.size)
        pairs = permutation(t.whole, u.whole)
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
        return int(any(self.received_one(t, typed(self, t)).any() for t in operands))

    def packed(self, t: TensorType, u: TensorType) -> Packed:
        """The tile is sent and received whole; a cut tile is contiguous when only its major dim is cut."""
        before, after = t.local_shape(), u.local_shape()
        cuts = [d for d in range(t.ndim) if before[d] != after[d]]
        sent_contiguous = not cuts or (len(cuts) == 1 and major(before, cuts[0]))
        return Packed(math.prod(after), math.prod(after), sent_contiguous, True)

    def pieces(self, t: TensorType, u: TensorType) -> tuple[int, int]:
        """One tile each way."""
        return 1, 1

    def pattern(self, *operands: TensorType) -> Pattern:
        """One message a pair."""
        t = operands[0]
        pairs = permutation(t, typed(self, t))
        if pairs is None or not len(pairs[0]):
            return Local(0.0)
        sizes = sum(typed(self, x).elements()[pairs[1]] * x.itemsize for x in operands)
        return point_to_point(t, typed(self, t), *pairs, np.asarray(sizes), self.chunks)


@dataclass(frozen=True, slots=True)
class General(Collective):
    """A move on box intersections: every receiver hears from the holders of what it lacks (`core.messages`)."""

    def received_one(self, t: TensorType, u: TensorType) -> np.ndarray:
        """Return the new box minus what the device holds."""
        return lacking(t, u)

    def move(self, shards: Shards, t: TensorType, u: TensorType) -> list[Array]:
        """Deliver the messages; what a device holds already it keeps."""
        senders, receivers, _ = messages(t.whole, u.whole)
        before, after, dtype = t.boxes(), u.boxes(), numpy_dtype(t.dtype)
        own, held, needed = own_places(t, u), at_root(t), at_root(u)
        pieces: list[list[tuple[np.ndarray, Array]]] = [[] for _ in range(u.mesh.size)]
        for r, place in enumerate(own):
            if place >= 0 and held[place]:
                pieces[r].append((before[place], shards[place]))
        for s, r in zip(senders, receivers, strict=True):
            part = meet(before[s], after[r])
            if part is not None:
                pieces[r].append((part, cut(shards[s], before[s], part)))
        return [
            assemble(after[r], pieces[r], dtype, self.name) if needed[r] else poison(u.local_shape(r), dtype)
            for r in range(u.mesh.size)
        ]

    def rounds(self, *operands: TensorType) -> int:
        """The largest number of non-empty peers a device hears from."""
        return max(most_senders(t, typed(self, t)) for t in operands)

    def packed(self, t: TensorType, u: TensorType) -> Packed:
        """All that is sent, and all that is received."""
        return traffic(t, u)

    def pieces(self, t: TensorType, u: TensorType) -> tuple[int, int]:
        """One part a peer."""
        return most_receivers(t, u), max(1, most_senders(t, u))

    def pattern(self, *operands: TensorType) -> Pattern:
        """Explicit messages, those of all operands between two devices together."""
        t, u = operands[0], typed(self, operands[0])
        moves = [messages(x, typed(self, x)) for x in operands]
        width = u.mesh.size
        keys = np.concatenate([senders * width + receivers for senders, receivers, _ in moves])
        if not len(keys):
            return Local(0.0)
        sizes = [elements * x.itemsize for x, (_, _, elements) in zip(operands, moves, strict=True)]
        weights = np.concatenate(sizes).astype(np.float64)
        unique, index = np.unique(keys, return_inverse=True)
        chunks: int = getattr(self, "chunks", 1)
        return point_to_point(t, u, unique // width, unique % width, np.bincount(index, weights), chunks)


@dataclass(frozen=True, slots=True)
class Exchange(General):
    """The general move, one all-to-all-v on box intersections inside groups over `axes` (empty: the whole mesh)."""

    name: ClassVar[str] = "exchange"
    layout: Layout
    axes: tuple[str, ...] = ()
    chunks: int = 1

    def members(self, t: TensorType) -> tuple[str, ...]:
        """The axes of the groups."""
        return self.axes or t.mesh.axes

    def result(self, t: TensorType) -> TensorType:
        """Check that every group covers the new boxes of its members."""
        check_chunks(self.name, self.chunks)
        u = t.with_layout(self.layout)
        parts = [set(t.mesh.expand(x)) for x in (t.layout.partial, u.layout.partial, t.layout.root, u.layout.root)]
        if parts[0] != parts[1] or parts[2] != parts[3] or live_reduction(t) != live_reduction(u):
            raise TypingError(f"exchange: {t} and {u} differ in their partial or root axes; those must be equal")
        if self.axes and not stays(t, u, self.axes):
            raise TypingError(f"exchange: groups over {axes_text(self.axes)} do not hold all of {u} under {t}")
        return u


@dataclass(frozen=True, slots=True)
class Send(General):
    """Move to another mesh: every device of `mesh` fetches what it lacks of its box under `layout`."""

    name: ClassVar[str] = "send"
    layout: Layout
    mesh: Mesh
    chunks: int = 1

    def members(self, t: TensorType) -> tuple[str, ...]:
        """No groups."""
        return ()

    def result(self, t: TensorType) -> TensorType:
        """The same tensor on the other mesh; the operand may not be partial."""
        check_chunks(self.name, self.chunks)
        if t.layout.partial:
            raise TypingError(f"send: {t} is partial; reduce it first")
        u = t.with_layout(self.layout, self.mesh)
        if u.layout.partial or u.layout.root:
            raise TypingError(f"send: the result {u} may be neither partial nor rooted")
        return u
