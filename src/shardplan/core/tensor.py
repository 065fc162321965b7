"""`TensorType`: dtype, global shape, layout, mesh; the local part of every device is derived, never stored.

Tiling rule: a dim of size n over axes (a, b, ...) is cut into |a| chunks of ceil(n/|a|), each chunk then over b in the
same way (trailing chunks may be short or empty). A dim is *even* when the product of its axes divides n; on an uneven
dim a sub-axis is refused, because nested ceilings differ from the flat one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from shardplan.core import dtypes, validation
from shardplan.core.box_table import NAME, Box, BoxTable, check_covers
from shardplan.core.digits import tile_bounds
from shardplan.core.layout import Layout, Spec, make_layout, scan_suffix
from shardplan.core.mesh import Mesh
from shardplan.core.notation import AXIS, Scanner, axes_text
from shardplan.errors import LayoutError, excerpt
from shardplan.notebook import notebook_html


@dataclass(frozen=True, slots=True, init=False, repr=False, eq=False)
class TensorType:
    """The type of a distributed tensor.

    `TensorType("f32", (64, 48), ("data", "tensor"), mesh, partial={"seq": "sum"}, root=("a",))`: the spec is what a
    JAX `PartitionSpec` takes (None or () for a whole dim; missing trailing dims are whole), a `Layout`, or a
    `BoxTable`, of which every device holds a flat array; the mesh is a `Mesh` or its text. Raises `LayoutError`.

    >>> mesh = Mesh(data=4, tensor=2)
    >>> t = TensorType("f32", (64, 48), ("data", "tensor"), mesh)
    >>> print(t, t.local_shape(0), t.box(3))
    f32[64@data, 48@tensor] (16, 24) ((16, 32), (24, 48))
    """

    dtype: str
    shape: tuple[int, ...]
    layout: Layout
    mesh: Mesh
    atoms: tuple[tuple[int, ...], ...] = field(compare=False)
    even: tuple[bool, ...] = field(compare=False)
    _hash: int = field(compare=False)

    _repr_html_ = notebook_html

    def __init__(
        self,
        dtype: object,
        shape: Sequence[int],
        spec: Layout | Spec | BoxTable,
        mesh: Mesh | str,
        partial: Mapping[str, str] | None = None,
        root: Iterable[str] = (),
    ) -> None:
        """Check and fold; see the class."""
        mesh = mesh_of("mesh", mesh)
        name = dtypes.short_name(dtype)
        sizes = tuple(shape) if isinstance(shape, (tuple, list)) else tuple(validation.items("shape", shape, "sizes"))
        for k, n in enumerate(sizes):
            if type(n) is not int or n > validation.MOST:
                sizes = tuple(validation.integer(f"the size of dim {k}", n) for k, n in enumerate(sizes))
            if n < 1:
                raise LayoutError(f"dim {k} of the shape {sizes} has size {n}; every dim has at least 1 element")
        layout = make_layout(len(sizes), spec, mesh, partial, root)
        if layout.reduction is not None and not dtypes.reduces(layout.reduction, name):
            raise LayoutError(f"{layout.reduction} of {name} is not defined; legal are integers and bool")
        if layout.boxes is not None:
            check_covers(layout.boxes, sizes)
            if strange := set(layout.boxes.ids.tolist()) - set(mesh.devices):
                raise LayoutError(f"{layout.boxes} has rows of device {min(strange)}, which is not on the mesh {mesh}")
        atoms = tuple(mesh.expand(d) for d in layout.dims)
        even: list[bool] = []
        for k, (n, names, run) in enumerate(zip(sizes, layout.dims, atoms, strict=True)):
            product = math.prod(mesh.atoms[a].size for a in run)
            even.append(n % product == 0)
            if n % product:
                for axis in names:
                    if not mesh.span(axis).whole and mesh.span(axis).size > 1:
                        raise LayoutError(
                            f"dim {k} of size {n} is uneven over {axes_text(names)} (product {product}), so the "
                            f"sub-axis {axis!r} is refused there; legal are whole axes, or a product that divides {n}"
                        )
        for field_name, value in {
            "dtype": name,
            "shape": sizes,
            "layout": layout,
            "mesh": mesh,
            "atoms": atoms,
            "even": tuple(even),
            "_hash": hash((name, sizes, layout, mesh)),
        }.items():
            object.__setattr__(self, field_name, value)

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return dtypes.itemsize(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the global array."""
        return math.prod(self.shape) * self.itemsize

    @property
    def all_even(self) -> bool:
        """Whether every dim is even, so that all devices hold boxes of one size."""
        return self.layout.boxes is None and all(self.even)

    def box(self, device: int | tuple[int, ...]) -> Box:
        """Return the part of the global array that a device holds: (start, stop) per dim; empty when start == stop.

        `device` is a place in mesh order, or coordinates over the axes.
        """
        self._one_box()
        place = self.mesh.place(device)
        box: list[tuple[int, int]] = []
        for n, names in zip(self.shape, self.layout.dims, strict=True):
            lo, hi = 0, n
            for name in names:
                span = self.mesh.span(name)
                chunk = -(-(hi - lo) // span.size)
                lo, hi = (
                    min(lo + place // span.stride % span.size * chunk, hi),
                    min(lo + (place // span.stride % span.size + 1) * chunk, hi),
                )
            box.append((lo, hi))
        return tuple(box)

    def local_shape(self, device: int | tuple[int, ...] = 0) -> tuple[int, ...]:
        """Return the shape of the shard of a device (a place in mesh order, or coordinates)."""
        if self.layout.boxes is not None:
            return (int(self.elements()[self.mesh.place(device)]),)
        return tuple(hi - lo for lo, hi in self.box(device))

    def boxes(self) -> np.ndarray:
        """Return the boxes of all devices, int64 [devices, ndim, 2], in mesh order; read-only."""
        self._one_box()
        return _boxes(self)

    def _one_box(self) -> None:
        if self.layout.boxes is not None:
            raise LayoutError(f"{self} lies in rows of boxes, not in one box a device")

    def elements(self) -> np.ndarray:
        """Return the elements that each device holds, int64 [devices], in mesh order; read-only."""
        return _elements(self)

    def local_bytes(self) -> int:
        """Return the bytes of the largest shard."""
        if self.layout.boxes is not None:
            return int(self.elements().max()) * self.itemsize
        count = 1
        for n, names in zip(self.shape, self.layout.dims, strict=True):
            for name in names:  # place 0 of every axis has the largest chunk
                n = -(-n // self.mesh.span(name).size)
            count *= n
        return count * self.itemsize

    @property
    def whole_type(self) -> TensorType:
        """This type; of a part of a value (`core.part`) the type of the whole."""
        return self

    def with_layout(self, layout: Layout | BoxTable, mesh: Mesh | None = None) -> TensorType:
        """Return this type with another layout or table of boxes, on this mesh or another."""
        return laid_type(self.dtype, self.shape, layout, mesh or self.mesh)

    def __eq__(self, other: object) -> bool:
        """Types are equal when dtype, shape, folded layout and mesh are."""
        if self is other:
            return True
        return (
            isinstance(other, TensorType)
            and self._hash == other._hash
            and (self.dtype, self.shape, self.layout) == (other.dtype, other.shape, other.layout)
            and self.mesh == other.mesh
        )

    def __hash__(self) -> int:
        """Hash the defining fields, once."""
        return self._hash

    def __reduce__(self) -> tuple[type[TensorType], tuple[object, ...]]:
        """Pickle the defining fields: hashes of names differ from process to process."""
        return TensorType, (self.dtype, self.shape, self.layout, self.mesh)

    def __str__(self) -> str:
        """Return `f32[64@data, 48@(tensor,pipe)]{+seq}`."""
        dims = (f"{n}@{axes_text(d)}" if d else str(n) for n, d in zip(self.shape, self.layout.dims, strict=True))
        return f"{self.dtype}[{', '.join(dims)}]{self.layout.suffix()}"

    def __repr__(self) -> str:
        """Show the text form and the mesh."""
        return f"TensorType({self} on {self.mesh})"

    @staticmethod
    def parse(text: str, mesh: Mesh | str, tables: Iterable[BoxTable] = ()) -> TensorType:
        """Read the notation on `mesh`, or on the mesh that its text says; `tables` are those that it may name.

        Raises `ParseError` pointing at the character, or `LayoutError`.

        >>> TensorType.parse("bf16[8@(tensor,data), 3]{root:pipe}", Mesh(data=2, tensor=2, pipe=2)).local_shape(1)
        (2, 3)
        """
        scanner = Scanner(text)
        found = scan_type(scanner, mesh_of("mesh", mesh), {t.name: t for t in tables})
        scanner.finish("the type")
        return found


def laid_type(dtype: str, shape: tuple[int, ...], layout: Layout | BoxTable, mesh: Mesh) -> TensorType:
    """Return the type of these, remembered: a program asks for a few of them again and again."""
    return (
        _cached_type(dtype, shape, layout, mesh) if type(layout) is Layout else TensorType(dtype, shape, layout, mesh)
    )


@lru_cache(maxsize=1 << 14)
def _cached_type(dtype: str, shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> TensorType:
    return TensorType(dtype, shape, layout, mesh)


def scan_type(scanner: Scanner, mesh: Mesh, tables: Mapping[str, BoxTable]) -> TensorType:
    """Read a type at the scanner's position; `tables` by name are those that it may name."""
    scanner.skip()
    start = scanner.position
    name = scanner.match(AXIS)
    if name is None:
        raise scanner.error("expected a dtype, as in f32[64@data, 48]")
    try:
        dtypes.short_name(name)
    except LayoutError as error:
        scanner.position = start
        raise scanner.error(str(error)) from None
    scanner.expect("[", "a type")
    shape: list[int] = []
    dims: list[tuple[str, ...]] = []
    while not scanner.take("]"):
        shape.append(scanner.integer("the size of a dim"))
        if scanner.take("@"):
            before = scanner.position
            dims.append(scanner.names("an axis after '@'"))
            for axis in dims[-1]:
                if axis not in mesh._spans:  # pyright: ignore[reportPrivateUsage]
                    found = re.search(rf"(?<![\w.]){re.escape(axis)}(?![\w.])", scanner.text[before:])
                    scanner.position = before + (found.start() if found else 0)
                    raise scanner.error(f"unknown axis {axis!r}: {mesh.legal(axis)}")
        else:
            dims.append(())
        if not scanner.take(",") and not scanner.peek("]"):
            raise scanner.error("expected '@', ',' or ']' in a type")
    at = scanner.position
    if scanner.peek("{boxes#"):
        scanner.take("{")
        table = scan_table_name(scanner, tables)
        scanner.expect("}", "a table of boxes")
        try:
            return TensorType(name, shape, Layout(tuple(dims), boxes=table), mesh)
        except LayoutError as error:
            scanner.position = at
            raise scanner.error(str(error)) from None
    partial, reduction, root = scan_suffix(scanner)
    return TensorType(name, shape, Layout(tuple(dims), partial, reduction, root), mesh)


def scan_table_name(scanner: Scanner, tables: Mapping[str, BoxTable]) -> BoxTable:
    """Read `boxes#1a2b3c4d` at the scanner's position, one of `tables` by name."""
    scanner.skip()
    at = scanner.position
    name = scanner.match(NAME)
    if name is None:
        raise scanner.error("expected boxes# and 8 hexadecimal digits")
    if name not in tables:
        scanner.position = at
        raise scanner.error(f"unknown table {name}; legal are {', '.join(tables) or 'those that a program lists'}")
    return tables[name]


def mesh_of(what: str, value: object) -> Mesh:
    """Return a mesh, given as one or as its text; raises `LayoutError` for another value, `ParseError` in a text."""
    if isinstance(value, Mesh):
        return value
    if isinstance(value, str):
        return Mesh.parse(value)
    raise LayoutError(f"{what} is {excerpt(value)}; legal is a Mesh, or its text such as 'data=4,tensor=2'")


def type_of(what: str, value: object, mesh: Mesh | str | None = None) -> TensorType:
    """Return a type, given as one or, with a mesh, as its text.

    Raises `LayoutError` for any other value, a text without a mesh, and a mesh that is not the type's; `ParseError`
    points into the text.
    """
    there = None if mesh is None else mesh_of("mesh", mesh)
    if isinstance(value, str) and there is not None:
        return TensorType.parse(value, there)
    if isinstance(value, str):
        raise LayoutError(f"{what} is the text {excerpt(value)}, which needs mesh=: a Mesh or its text")
    if not isinstance(value, TensorType):
        raise LayoutError(f"{what} is {excerpt(value)}; legal is a TensorType, or with mesh= its text")
    if there is not None and value.mesh != there:
        raise LayoutError(f"{what} {value} is on the mesh {value.mesh}, but mesh= is {there}; give mesh= with texts")
    return value


# Every facet of an op asks for the boxes of the same few types; an entry takes 16 bytes a dim and device, and thousands
# of devices are worth fewer.
_MANY_DEVICES = 4096


def _boxes(t: TensorType) -> np.ndarray:
    return (_few_boxes if t.mesh.size <= _MANY_DEVICES else _many_boxes)(t)


def _make_boxes(t: TensorType) -> np.ndarray:
    # Starts and stops of one dim stand side by side: they are computed with dim by dim.
    rows = np.empty((t.ndim, 2, t.mesh.size), dtype=np.int64)
    for row, n, names in zip(rows, t.shape, t.layout.dims, strict=True):
        row[:] = tile_bounds(n, [t.mesh.span(name).size for name in names]).T[:, t.mesh.index(names)]
    out = rows.transpose(2, 0, 1)
    out.setflags(write=False)
    return out


_few_boxes, _many_boxes = lru_cache(maxsize=256)(_make_boxes), lru_cache(maxsize=12)(_make_boxes)


@lru_cache(maxsize=256)
def _elements(t: TensorType) -> np.ndarray:
    if t.layout.boxes is not None:
        out = t.layout.boxes.elements(t.mesh.ids).astype(counter(t))
    elif t.all_even:
        out = np.broadcast_to(np.array(t.local_bytes() // t.itemsize, dtype=counter(t)), t.mesh.size)
    else:
        boxes = t.boxes()
        out = np.prod(boxes[:, :, 1] - boxes[:, :, 0], axis=1, dtype=counter(t))
    out.setflags(write=False)
    return out


def counter(t: TensorType) -> type:
    """Return the numpy scalar that counts bytes of a tensor: int64, or Python's own integers beyond it."""
    # A device sends and receives at most twice the array in a step; the other half is for sums of two such counts.
    return np.int64 if 4 * t.nbytes < 2**63 else object


def same(t: TensorType, u: TensorType) -> bool:
    """Say whether two types hold the same data on every device: dtype, shape, partial and root parts, boxes by id."""
    for x in (t, u):
        if not isinstance(x, TensorType):  # pyright: ignore[reportUnnecessaryIsInstance]
            type_of("an operand of same", x)
    if (t.dtype, t.shape) != (u.dtype, u.shape):
        return False
    if t.layout.boxes is not None or u.layout.boxes is not None:
        return t.layout.boxes == u.layout.boxes and set(t.mesh.devices) == set(u.mesh.devices)
    if t.mesh == u.mesh:
        if t.layout == u.layout:
            return True
        m = t.mesh
        parts = lambda x: (set(m.expand(x.layout.partial)), x.layout.reduction, set(m.expand(x.layout.root)))  # noqa: E731
        if not _same_reduction(t, u) or parts(t)[0] != parts(u)[0] or parts(t)[2] != parts(u)[2]:
            return False
        if t.all_even and u.all_even:
            return t.atoms == u.atoms
        return bool(np.array_equal(t.boxes(), u.boxes()))
    if set(t.mesh.devices) != set(u.mesh.devices) or not _same_reduction(t, u):
        return False
    order_t, order_u = np.argsort(t.mesh.ids), np.argsort(u.mesh.ids)
    if not np.array_equal(t.boxes()[order_t], u.boxes()[order_u]):
        return False
    return all(
        np.array_equal(t.mesh.index(a)[order_t], u.mesh.index(b)[order_u])
        for a, b in ((t.layout.partial, u.layout.partial), (t.layout.root, u.layout.root))
    )


def live_reduction(t: TensorType) -> str | None:
    """Return the reduction of the partial axes, None where there are none but of size 1."""
    return t.layout.reduction if t.mesh.expand(t.layout.partial) else None


def _same_reduction(t: TensorType, u: TensorType) -> bool:
    return live_reduction(t) == live_reduction(u)
