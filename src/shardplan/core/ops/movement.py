"""The ops that move whole tiles inside groups: Slice, AllGather, AllToAll.

Typing rules and bytes: the table of `docs/concepts.md`. Partial and root axes pass through unchanged. A suffix is a
contiguous minor run of the axes of a dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from shardplan.core.dtypes import numpy_dtype
from shardplan.core.group_rounds import Of, exchanges, gather, prepend_actions
from shardplan.core.layout import Layout
from shardplan.core.lowering import Boxes, Buffer, Copy, Group, Ints, Round
from shardplan.core.mesh import Mesh
from shardplan.core.messages import (
    Packed,
    at_root,
    lacking,
    overlap_elements,
)
from shardplan.core.notation import axes_text
from shardplan.core.op import Array, Shards, poison
from shardplan.core.ops.collective import (
    PADDED,
    Collective,
    InPlace,
    assemble,
    cut_box,
    major,
)
from shardplan.core.ops.grouped import Grouped, slot_elements
from shardplan.core.padded_rounds import dealt_slots, gathered_slots, slot_buffers
from shardplan.core.pattern import Local, Pattern
from shardplan.core.tensor import TensorType
from shardplan.errors import TypingError

Dims = int | tuple[int, ...]
FEW = 8  # padding of up to one in so many of a result's elements may lie behind it as long as it lives


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


def check_nested(op: str, t: TensorType, u: TensorType) -> TensorType:
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


def unused_atoms(op: str, t: TensorType, axes: tuple[str, ...]) -> tuple[int, ...]:
    """Return the atoms of `axes`, or raise `TypingError` when the type uses one of them."""
    atoms = t.mesh.expand(axes)
    busy = set(t.mesh.expand(t.layout.used_axes))
    if len(set(atoms)) != len(atoms) or busy & set(atoms):
        raise TypingError(f"{op}: the axes {axes_text(axes)} are not all unused in {t}")
    return atoms


def slots(op: Grouped, t: TensorType, group: Group) -> np.ndarray:
    """Return the elements of a slot of a padded op on the devices of some groups, int64 [devices]."""
    return np.where(group.live, slot_elements(op, t)[group.places], 0)


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
        atoms = unused_atoms(self.name, t, self.axes)
        u = t.with_layout(with_dims(t.layout, t.mesh, {self.dim: t.atoms[self.dim] + atoms}))
        return check_nested(self.name, t, u)

    def move(self, shards: Shards, t: TensorType, u: TensorType) -> list[Array]:
        """Cut every shard."""
        return [cut_box(x, t.boxes()[k], u.boxes()[k]).copy() for k, x in enumerate(shards)]

    def pattern(self, *operands: TensorType) -> Pattern:
        """A view: no bytes."""
        return Local(0.0)

    def lower(self, t: TensorType, u: TensorType, devices: Ints, algorithm: str) -> Iterator[Round]:
        """Copy the part."""
        before, after = Boxes.ends(t, u, devices)
        yield Round.of((Copy(before.part("x", after), after.whole_region("y")),))


@dataclass(frozen=True, slots=True)
class AllGather(Grouped):
    """Every device gets the tiles of its group: `axes`, a suffix of `dim` (or of one dim per axis), are removed."""

    name: ClassVar[str] = "all_gather"
    kind: ClassVar[str] = "all_gather"
    algorithms: ClassVar[tuple[str, ...]] = ("direct", "ring", "doubling", PADDED)
    dim: Dims
    axes: tuple[str, ...]
    chunks: int = 1
    algorithm: str = ""

    def received_one(self, t: TensorType, u: TensorType) -> np.ndarray:
        """Return the new box minus what the device holds."""
        return lacking(t, u)

    def sent_one(self, t: TensorType, u: TensorType) -> np.ndarray:
        """Its shard to all the others."""
        q = math.prod(t.mesh.span(a).size for a in self.axes)
        return np.where(at_root(t), t.elements() * (q - 1) * t.itemsize, 0)

    def result(self, t: TensorType) -> TensorType:
        """Remove the suffixes."""
        check_chunks(self.name, self.chunks)
        changed = {d: without_suffix(self.name, t, d, a) for d, a in by_dim(self.name, self.dim, self.axes).items()}
        return check_nested(self.name, t, t.with_layout(with_dims(t.layout, t.mesh, changed)))

    def move(self, shards: Shards, t: TensorType, u: TensorType) -> list[Array]:
        """Assemble within groups."""
        return group_move(self, shards, t, u)

    def packing(self, t: TensorType, u: TensorType) -> Packed:
        """The shard is sent whole; the gathered parts are contiguous when one major dim is gathered."""
        dims = list(by_dim(self.name, self.dim, self.axes))
        shape = u.local_shape()
        return Packed(math.prod(t.local_shape()), math.prod(shape), True, len(dims) == 1 and major(shape, dims[0]))

    def padding_copies(self, t: TensorType, u: TensorType) -> int:
        """The result, where it is one run of memory and padding lies inside, or much of it behind."""
        whole = self.chunks == 1 and AllGather.packing(self, t, u).received_contiguous
        return u.local_bytes() if whole and self.overhang(t, u) is None else 0

    def overhang(self, t: TensorType, u: TensorType) -> int | None:
        """Where slots lie in the result one behind the other, and little padding behind it."""
        dims = list(by_dim(self.name, self.dim, self.axes))
        if self.chunks > 1 or len(dims) > 1 or not major(u.local_shape(), dims[0]):
            return None
        (d,), ours, whole = dims, t.boxes(), u.boxes()
        extent, places = ours[:, d, 1] - ours[:, d, 0], t.mesh.group_places(self.axes)
        slot = np.zeros_like(extent)
        slot[places] = extent[places].max(axis=1, keepdims=True)
        begins = ours[:, d, 0] - whole[:, d, 0] == t.mesh.index(self.axes) * slot
        if not bool(begins[extent > 0].all()):
            return None
        behind = int((slot_elements(self, t) * places.shape[1] - u.elements()).max(initial=0))
        return behind if behind * FEW <= math.prod(u.local_shape()) else None

    def lower(self, t: TensorType, u: TensorType, devices: Ints, algorithm: str) -> Iterator[Round]:
        """Pass the shards on whole."""
        group, (before, after) = Group(t, self.axes, devices), Boxes.ends(t, u, devices)
        block: Of = lambda k: after.part("y", Boxes(t, group.place(k)))  # noqa: E731
        own = before.whole_region("x")
        if algorithm == PADDED:
            rounds = gathered_slots(group, own, block, slots(self, t, group), self.chunks)
        else:
            rounds = gather(group, own, block, self.chunks, algorithm)
        yield from prepend_actions([Copy(own, block(group.me))], rounds)

    def buffers(self, t: TensorType, u: TensorType, devices: Ints, algorithm: str) -> dict[str, Buffer]:
        """Room for slots."""
        if algorithm != PADDED:
            return {}
        group, (_, after) = Group(t, self.axes, devices), Boxes.ends(t, u, devices)
        block: Of = lambda k: after.part("y", Boxes(t, group.place(k)))  # noqa: E731
        return slot_buffers(group, None, block, slots(self, t, group), self.chunks, t.dtype)


@dataclass(frozen=True, slots=True)
class AllToAll(Grouped):
    """Move axes between dims: the suffix `axes` of `src_dim` is appended, in `order`, to `dst_dim`."""

    name: ClassVar[str] = "all_to_all"
    kind: ClassVar[str] = "all_to_all"
    algorithms: ClassVar[tuple[str, ...]] = ("direct", "ring", PADDED)
    src_dim: int
    dst_dim: int
    axes: tuple[str, ...]
    order: tuple[str, ...] = ()
    chunks: int = 1
    algorithm: str = ""

    def received_one(self, t: TensorType, u: TensorType) -> np.ndarray:
        """Return the new box minus what the device holds."""
        return lacking(t, u)

    def sent_one(self, t: TensorType, u: TensorType) -> np.ndarray:
        """Its shard without the part that stays."""
        return np.where(at_root(t), t.elements() - overlap_elements(t, u), 0) * t.itemsize

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
        return check_nested(self.name, t, t.with_layout(with_dims(t.layout, t.mesh, changed)))

    def move(self, shards: Shards, t: TensorType, u: TensorType) -> list[Array]:
        """Assemble within groups."""
        return group_move(self, shards, t, u)

    def rounds(self, *operands: TensorType) -> int:
        """One per peer: q - 1, by any algorithm."""
        return math.prod(operands[0].mesh.span(a).size for a in self.axes) - 1

    def packing(self, t: TensorType, u: TensorType) -> Packed:
        """Sent pieces are contiguous when the cut dim is major, received ones when the joined dim is."""
        before, after = t.local_shape(), u.local_shape()
        natural = self.order in ((), self.axes)
        sent_contiguous = natural and major(before, self.dst_dim)
        return Packed(math.prod(before), math.prod(after), sent_contiguous, major(after, self.src_dim))

    def padding_copies(self, t: TensorType, u: TensorType) -> int:
        """Either shard, where its parts are runs of it one behind the other."""
        if self.chunks > 1:
            return 0
        sides = self.packing(t, u)
        return t.local_bytes() * sides.sent_contiguous + u.local_bytes() * sides.received_contiguous

    def lower(self, t: TensorType, u: TensorType, devices: Ints, algorithm: str) -> Iterator[Round]:
        """Give every member its part; in a "ring" those one member further, then two, and so on."""
        group, given, taken = self._parts(t, u, devices)
        if algorithm == PADDED:
            rounds = dealt_slots(group, given, taken, slots(self, t, group), self.chunks)
        else:
            rounds = exchanges(group, given, taken, self.chunks, algorithm)
        yield from prepend_actions([Copy(given(group.me), taken(group.me))], rounds)

    def buffers(self, t: TensorType, u: TensorType, devices: Ints, algorithm: str) -> dict[str, Buffer]:
        """Room for slots."""
        if algorithm != PADDED:
            return {}
        group, given, taken = self._parts(t, u, devices)
        return slot_buffers(group, given, taken, slots(self, t, group), self.chunks, t.dtype)

    def _parts(self, t: TensorType, u: TensorType, devices: Ints) -> tuple[Group, Of, Of]:
        """The groups, what a device gives a member, and what it takes from one."""
        group, (before, after) = Group(t, self.axes, devices), Boxes.ends(t, u, devices)
        return (
            group,
            lambda k: before.part("x", Boxes(u, group.place(k))),
            lambda k: after.part("y", Boxes(t, group.place(k))),
        )

    def part_elements(self, t: TensorType, u: TensorType) -> np.ndarray:
        """The largest part that a device gives, to whomever."""
        group, given, _ = self._parts(t, u, t.mesh.ids)
        return np.max([given(k).elements() for k in range(group.size)], axis=0)
