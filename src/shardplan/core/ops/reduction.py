"""The ops that make, reduce or spread partial and root values: ReduceScatter, AllReduce, Reduce, Broadcast, ToPartial.

Typing rules and bytes: the table of `docs/concepts.md`; the five collectives of 2110.10548 are among them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from shardplan.core.dtypes import IDEMPOTENT, identity, numpy_dtype
from shardplan.core.group_rounds import Of, addends, binomial, double_tree, gather, passed_on, scatter_sums, tree_room
from shardplan.core.layout import REDUCTIONS
from shardplan.core.lowering import Boxes, Buffer, Copy, Group, Ints, Region, Round, places_of, run_of
from shardplan.core.messages import Packed, at_root
from shardplan.core.notation import axes_text
from shardplan.core.op import Array, Shards, poison
from shardplan.core.ops.collective import PADDED, InPlace, cut_box, major, reduce_in_order
from shardplan.core.ops.grouped import Grouped
from shardplan.core.ops.movement import (
    Dims,
    by_dim,
    check_chunks,
    check_dim,
    check_nested,
    slots,
    unused_atoms,
    with_dims,
    without_suffix,
)
from shardplan.core.padded_rounds import slot_buffers, summed_slots
from shardplan.core.pattern import Local, Pattern
from shardplan.core.tensor import TensorType
from shardplan.errors import TypingError


def _leave(op: str, t: TensorType, axes: tuple[str, ...], reduction: str) -> tuple[str, ...]:
    """Return the partial axes that remain when `axes` are reduced, or raise `TypingError`."""
    atoms = t.mesh.expand(axes)
    held = t.mesh.expand(t.layout.partial)
    if not set(atoms) <= set(held) or len(set(atoms)) != len(atoms) or (atoms and t.layout.reduction != reduction):
        legal = f"partial over {axes_text(t.layout.partial)} with {t.layout.reduction}" if held else "not partial"
        raise TypingError(f"{op}({reduction}) over {axes_text(axes)}: {t} is {legal}")
    return t.mesh.fold(tuple(a for a in held if a not in set(atoms)))


def _chunk_bytes(t: TensorType, q: int, index: np.ndarray) -> np.ndarray:
    """Bytes of the part of its shard that each member owns when q members cut the flat shard by the tiling rule."""
    elements = t.elements()
    chunk = -(-elements // q)
    return np.clip(elements - index * chunk, 0, chunk) * t.itemsize


@dataclass(frozen=True, slots=True)
class ReduceScatter(Grouped):
    """Reduce over `axes` and keep a part: they leave partial and are appended minor to `dim` (or one dim per axis)."""

    name: ClassVar[str] = "reduce_scatter"
    kind: ClassVar[str] = "reduce_scatter"
    algorithms: ClassVar[tuple[str, ...]] = ("direct", "ring", "doubling", PADDED)
    dim: Dims
    axes: tuple[str, ...]
    reduction: str = "sum"
    chunks: int = 1
    algorithm: str = ""

    def result(self, t: TensorType) -> TensorType:
        """Leave partial, append to the dims."""
        check_chunks(self.name, self.chunks)
        left = _leave(self.name, t, self.axes, self.reduction)
        changed: dict[int, tuple[int, ...]] = {}
        for d, names in by_dim(self.name, self.dim, self.axes).items():
            check_dim(self.name, t, d)
            changed[d] = t.atoms[d] + t.mesh.expand(names)
        layout = with_dims(t.layout, t.mesh, changed)
        u = t.with_layout(replace(layout, partial=left, reduction=self.reduction if left else None))
        return check_nested(self.name, t, u)

    def received_one(self, t: TensorType, u: TensorType) -> np.ndarray:
        """q - 1 addends of the part that a device keeps."""
        q = math.prod(t.mesh.span(a).size for a in self.axes)
        return np.where(at_root(t), u.elements() * (q - 1) * u.itemsize, 0)

    def sent_one(self, t: TensorType, u: TensorType) -> np.ndarray:
        """All but the part that a device keeps."""
        return np.where(at_root(t), t.elements() - u.elements(), 0) * t.itemsize

    def move(self, shards: Shards, t: TensorType, u: TensorType) -> list[Array]:
        """Sum in member order, then cut."""
        out = list(shards)
        for group in t.mesh.group_places(self.axes):
            total = reduce_in_order(shards, group, self.reduction)
            for m in group:
                out[m] = cut_box(total, t.boxes()[m], u.boxes()[m]).copy()
        return out

    def packing(self, t: TensorType, u: TensorType) -> Packed:
        """Parts are sent from the shard when they are contiguous in it, and received into a buffer to be added."""
        dims = list(by_dim(self.name, self.dim, self.axes))
        shape, q = t.local_shape(), math.prod(t.mesh.span(a).size for a in self.axes)
        contiguous = len(dims) == 1 and major(shape, dims[0])
        return Packed(math.prod(shape), (q - 1) * math.prod(u.local_shape()), contiguous, False)

    def _parts(self, t: TensorType, u: TensorType, devices: Ints) -> tuple[Group, Of, Region]:
        """The groups, what a device adds to a member's part, and the part that is its own."""
        group, (before, after) = Group(t, self.axes, devices), Boxes.ends(t, u, devices)
        return group, lambda k: before.part("x", Boxes(u, group.place(k))), after.whole_region("y")

    def lower(self, t: TensorType, u: TensorType, devices: Ints, algorithm: str) -> Iterator[Round]:
        """Give every member its addends, and add up what comes."""
        group, addend, total = self._parts(t, u, devices)
        if algorithm == PADDED:
            yield from summed_slots(group, addend, total, self.reduction, slots(self, t, group), self.chunks)
        else:
            yield from scatter_sums(group, addend, total, self.reduction, self.chunks, algorithm)

    def buffers(self, t: TensorType, u: TensorType, devices: Ints, algorithm: str) -> dict[str, Buffer]:
        """Room for addends."""
        group, addend, total = self._parts(t, u, devices)
        if algorithm == PADDED:
            return slot_buffers(group, addend, None, slots(self, t, group), self.chunks, t.dtype)
        return addends(group, addend, total, t.dtype, self.chunks, algorithm)

    def part_elements(self, t: TensorType, u: TensorType) -> np.ndarray:
        """The part that a device keeps."""
        return u.elements()

    def padding_copies(self, t: TensorType, u: TensorType) -> int:
        """The addends, where even parts lie in them one behind the other."""
        return t.local_bytes() if self.chunks == 1 and self.packing(t, u).sent_contiguous else 0


@dataclass(frozen=True, slots=True)
class AllReduce(Grouped):
    """Reduce over `axes`; every member gets the result."""

    name: ClassVar[str] = "all_reduce"
    kind: ClassVar[str] = "all_reduce"
    algorithms: ClassVar[tuple[str, ...]] = ("direct", "ring", "doubling", "tree")
    axes: tuple[str, ...]
    reduction: str = "sum"
    chunks: int = 1
    algorithm: str = ""

    def result(self, t: TensorType) -> TensorType:
        """Leave partial."""
        check_chunks(self.name, self.chunks)
        left = _leave(self.name, t, self.axes, self.reduction)
        return t.with_layout(replace(t.layout, partial=left, reduction=self.reduction if left else None))

    def received_one(self, t: TensorType, u: TensorType) -> np.ndarray:
        """2 L (1 - 1/q): q - 1 addends of a device's part, then everyone else's part."""
        q = math.prod(t.mesh.span(a).size for a in self.axes)
        part = _chunk_bytes(t, q, t.mesh.index(self.axes))
        return np.where(at_root(t), (q - 1) * part + t.elements() * t.itemsize - part, 0)

    def sent_one(self, t: TensorType, u: TensorType) -> np.ndarray:
        """As much: the others' parts, then the sum of its own to everyone else."""
        return self.received_one(t, u)

    def move(self, shards: Shards, t: TensorType, u: TensorType) -> list[Array]:
        """Sum in member order."""
        out = list(shards)
        for group in t.mesh.group_places(self.axes):
            total = reduce_in_order(shards, group, self.reduction)
            for m in group:
                out[m] = total.copy()
        return out

    def packing(self, t: TensorType, u: TensorType) -> Packed:
        """q - 1 addends of the own part arrive in a buffer; what is sent is contiguous."""
        size, q = math.prod(t.local_shape()), math.prod(t.mesh.span(a).size for a in self.axes)
        return Packed(size, (q - 1) * -(-size // q), True, False)

    def _parts(self, t: TensorType, devices: Ints) -> tuple[Group, Of, Of]:
        """The groups, and a member's part of the flat shard, cut by the tiling rule, before and after."""
        group = Group(t, self.axes, devices)
        n = Boxes(t, group.places).whole_region("x").elements()
        room = -(-n // group.size)

        def part(buffer: str, k: Ints | int) -> Region:
            start = np.asarray(k) % group.size * room
            return run_of(buffer, start, np.minimum(room, n - start))

        return group, lambda k: part("x", k), lambda k: part("y", k)

    def lower(self, t: TensorType, u: TensorType, devices: Ints, algorithm: str) -> Iterator[Round]:
        """Every member adds up its part of the flat shard, which goes to all; or two trees do, half the shard each."""
        group, given, made = self._parts(t, devices)
        if algorithm == "tree":
            held = Boxes(t, group.places)
            rounds = double_tree(
                group, held.whole_region("x"), held.whole_region("y"), t.itemsize, self.chunks, self.reduction
            )
            yield from rounds
            return
        own = made(group.me)
        yield from scatter_sums(group, given, own, self.reduction, self.chunks, algorithm)
        yield from gather(group, own, made, self.chunks, algorithm)

    def buffers(self, t: TensorType, u: TensorType, devices: Ints, algorithm: str) -> dict[str, Buffer]:
        """Room for addends."""
        group, given, made = self._parts(t, devices)
        if algorithm == "tree":
            held = Boxes(t, group.places).whole_region("x").elements()
            return {"t": Buffer(tree_room(held, t.itemsize, self.chunks), t.dtype)}
        return addends(group, given, made(group.me), t.dtype, self.chunks, algorithm)


@dataclass(frozen=True, slots=True)
class Reduce(Grouped):
    """Reduce over `axes` to their coordinate 0: the result is `{root:axes}`."""

    name: ClassVar[str] = "reduce"
    kind: ClassVar[str] = "reduce"
    algorithms: ClassVar[tuple[str, ...]] = ("chain", "tree")
    axes: tuple[str, ...]
    reduction: str = "sum"
    chunks: int = 1
    algorithm: str = ""

    def result(self, t: TensorType) -> TensorType:
        """Move the axes from partial to root."""
        check_chunks(self.name, self.chunks)
        left = _leave(self.name, t, self.axes, self.reduction)
        root = (*t.layout.root, *self.axes)
        return t.with_layout(replace(t.layout, partial=left, reduction=self.reduction if left else None, root=root))

    def received_one(self, t: TensorType, u: TensorType) -> np.ndarray:
        """A chain towards coordinate 0: every member but the last receives a shard."""
        q = math.prod(t.mesh.span(a).size for a in self.axes)
        last = t.mesh.index(self.axes) == q - 1
        return np.where(at_root(t) & ~last, t.elements() * t.itemsize, 0)

    def sent_one(self, t: TensorType, u: TensorType) -> np.ndarray:
        """Every member but the first passes one on."""
        return np.where(at_root(t) & (t.mesh.index(self.axes) > 0), t.elements() * t.itemsize, 0)

    def move(self, shards: Shards, t: TensorType, u: TensorType) -> list[Array]:
        """Sum at the first member; the others' values are lost."""
        out = [poison(x.shape, x.dtype) for x in shards]
        for group in t.mesh.group_places(self.axes):
            out[group[0]] = reduce_in_order(shards, group, self.reduction)
        return out

    def packing(self, t: TensorType, u: TensorType) -> Packed:
        """Addends arrive in a buffer of one shard."""
        size = math.prod(t.local_shape())
        return Packed(size, size, True, False)

    def lower(self, t: TensorType, u: TensorType, devices: Ints, algorithm: str) -> Iterator[Round]:
        """A chain, or a binomial tree, towards the first member."""
        group = Group(t, self.axes, devices)
        held = Boxes(t, group.places)  # a member away from the root takes sums in what will not be read
        x, y = held.whole_region("x"), held.whole_region("y")
        if algorithm == "tree":
            yield from binomial(group, -1, x, y, self.reduction)
        else:
            yield from passed_on(group, -1, x, y, t.itemsize, self.chunks, self.reduction)

    def buffers(self, t: TensorType, u: TensorType, devices: Ints, algorithm: str) -> dict[str, Buffer]:
        """Room for one addend, in a tree."""
        held = Boxes(t, places_of(t.mesh, devices)).whole_region("x").elements()
        return {"t": Buffer(held, t.dtype)} if algorithm == "tree" else {}


@dataclass(frozen=True, slots=True)
class Broadcast(Grouped):
    """Spread the value of coordinate 0 over `axes`, each of them root or unused, at least one root."""

    name: ClassVar[str] = "broadcast"
    kind: ClassVar[str] = "broadcast"
    algorithms: ClassVar[tuple[str, ...]] = ("chain", "tree")
    axes: tuple[str, ...]
    chunks: int = 1
    algorithm: str = ""

    def result(self, t: TensorType) -> TensorType:
        """Leave root."""
        check_chunks(self.name, self.chunks)
        atoms = set(t.mesh.expand(self.axes))
        root = t.mesh.expand(t.layout.root)
        busy = set(t.mesh.expand((*(a for d in t.layout.dims for a in d), *t.layout.partial)))
        if atoms & busy or not atoms & set(root):
            raise TypingError(f"broadcast over {axes_text(self.axes)}: each must be root or unused, one root, in {t}")
        return t.with_layout(replace(t.layout, root=t.mesh.fold(tuple(a for a in root if a not in atoms))))

    def received_one(self, t: TensorType, u: TensorType) -> np.ndarray:
        """A shard on every member but the first."""
        first = t.mesh.index(self.axes) == 0
        return np.where(at_root(u) & ~first, t.elements() * t.itemsize, 0)

    def sent_one(self, t: TensorType, u: TensorType) -> np.ndarray:
        """Every member but the last passes it on."""
        q = math.prod(t.mesh.span(a).size for a in self.axes)
        return np.where(at_root(u) & (t.mesh.index(self.axes) < q - 1), t.elements() * t.itemsize, 0)

    def move(self, shards: Shards, t: TensorType, u: TensorType) -> list[Array]:
        """Copy the first member's value."""
        out = list(shards)
        for group in t.mesh.group_places(self.axes):
            for m in group:
                out[m] = shards[group[0]].copy()
        return out

    def packing(self, t: TensorType, u: TensorType) -> Packed:
        """Sent and received whole."""
        size = math.prod(t.local_shape())
        return Packed(size, size, True, True)

    def lower(self, t: TensorType, u: TensorType, devices: Ints, algorithm: str) -> Iterator[Round]:
        """A chain, or a binomial tree, from the first member on."""
        group = Group(u, self.axes, devices)
        held = Boxes(u, group.places)
        x, y = held.whole_region("x"), held.whole_region("y")
        if algorithm == "tree":
            yield from binomial(group, 1, x, y, None)
        else:
            yield from passed_on(group, 1, x, y, t.itemsize, self.chunks, None)


@dataclass(frozen=True, slots=True)
class ToPartial(InPlace):
    """Make a value partial (`sum`, `max`, ...) or rooted (`root`) over `axes`, unused or a suffix of one dim. Local.

    Over unused axes coordinate 0 keeps the value and the others take the identity (all keep it for max, min, band
    and bor, for root the others drop it); over a suffix every device keeps its part and fills the rest of the dim.
    """

    name: ClassVar[str] = "to_partial"
    axes: tuple[str, ...]
    reduction: str = "sum"

    def _dim(self, t: TensorType) -> int | None:
        atoms = t.mesh.expand(self.axes)
        for d, held in enumerate(t.atoms):
            if atoms and set(atoms) & set(held):
                return d
        return None

    def result(self, t: TensorType) -> TensorType:
        """Add the axes to the partial or root part."""
        if self.reduction not in (*REDUCTIONS, "root"):
            legal = ", ".join((*REDUCTIONS, "root"))
            raise TypingError(f"to_partial: unknown reduction {self.reduction!r}; legal are {legal}")
        d = self._dim(t)
        layout = t.layout
        if d is None:
            unused_atoms(self.name, t, self.axes)
        else:
            layout = with_dims(layout, t.mesh, {d: without_suffix(self.name, t, d, self.axes)})
            check_nested(self.name, t, t.with_layout(layout))
        if self.reduction == "root":
            if d is not None:
                raise TypingError(f"to_partial(root) over {axes_text(self.axes)}: they must be unused in {t}")
            return t.with_layout(replace(layout, root=(*layout.root, *self.axes)))
        if layout.reduction not in (None, self.reduction):
            raise TypingError(f"to_partial({self.reduction}): {t} is already partial with {layout.reduction}")
        return t.with_layout(replace(layout, partial=(*layout.partial, *self.axes), reduction=self.reduction))

    def move(self, shards: Shards, t: TensorType, u: TensorType) -> list[Array]:
        """Keep, fill or drop."""
        dtype = numpy_dtype(t.dtype)
        if self._dim(t) is not None:
            out: list[Array] = []
            for k, x in enumerate(shards):
                full = np.full(u.local_shape(k), identity(self.reduction, dtype), dtype=dtype)
                box = u.boxes()[k]
                inside = tuple(slice(b[0] - a[0], b[1] - a[0]) for a, b in zip(box, t.boxes()[k], strict=True))
                full[inside] = x
                out.append(full)
            return out
        first = t.mesh.index(self.axes) == 0
        if self.reduction == "root":
            return [x if first[k] else poison(x.shape, x.dtype) for k, x in enumerate(shards)]
        keep_all = self.reduction in IDEMPOTENT
        blank = identity(self.reduction, dtype)
        return [x.copy() if first[k] or keep_all else np.full_like(x, blank) for k, x in enumerate(shards)]

    def pattern(self, *operands: TensorType) -> Pattern:
        """A local fill (dropping is free)."""
        return Local(0.0 if self.reduction == "root" else float(sum(self.result(t).local_bytes() for t in operands)))

    def lower(self, t: TensorType, u: TensorType, devices: Ints, algorithm: str) -> Iterator[Round]:
        """Keep, fill or drop."""
        before, after = Boxes.ends(t, u, devices)
        whole = after.whole_region("y")
        if self._dim(t) is not None:
            fill, keep = before.live, before.live
        else:
            first = t.mesh.index(self.axes)[before.places] == 0
            keep = before.live & (first | (self.reduction in IDEMPOTENT))
            fill = before.live & ~keep & (self.reduction != "root")
        blank = Copy(None, whole.restrict(fill), None if self.reduction == "root" else self.reduction)
        yield Round.of((blank, Copy(before.whole_region("x").restrict(keep), after.part("y", before).restrict(keep))))
