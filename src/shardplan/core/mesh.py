"""`Mesh`: ordered, named axes with sizes, and which device ids sit where.

Invariants: axis names are unique identifiers; sizes are at least 1; device ids are distinct. Mesh order is row-major
over the axes: a device's *place* is its index there, its *id* is what `devices` has at that place (`core` says which
word means what). Every axis is internally a run of *atoms*, its finest sub-axes: the prime factors of the axis, or of
each part that `split` gave it, major first, and ascending but in `data=12(3,2,2)`. A name (axis, part or atom) denotes
a contiguous run of atoms, hence one (size, stride) pair in mesh order; an axis of size 1 has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from shardplan.core import validation
from shardplan.core.digits import digit_groups, digit_numbers
from shardplan.core.notation import NAME, Scanner
from shardplan.errors import LayoutError, excerpt, near_text

MOST_DEVICES = validation.MOST_ITEMS  # four million, beyond any cluster: a few numbers a device still fit in memory
Parts = tuple[tuple[str, int], ...]  # names and sizes of the parts of one axis, major first; () where it is not split


@lru_cache(maxsize=4096)  # planners ask for the same few sizes again and again
def primes(n: int) -> tuple[int, ...]:
    """Return the prime factors of n >= 1, ascending, with multiplicity."""
    found: list[int] = []
    p = 2
    while p * p <= n:
        while n % p == 0:
            found.append(p)
            n //= p
        p += 1
    if n > 1:
        found.append(n)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Atom:
    """A finest sub-axis: its name, size (a prime), and stride in mesh order."""

    name: str
    size: int
    stride: int


@dataclass(frozen=True, slots=True)
class AxisSpan:
    """What a name denotes: a contiguous run of atoms, of one size and stride in mesh order."""

    name: str
    size: int
    stride: int
    atoms: tuple[int, ...]
    whole: bool  # a complete axis of the mesh


def _index(
    axes: tuple[str, ...], sizes: tuple[int, ...], parts: tuple[Parts, ...]
) -> tuple[list[Atom], dict[str, AxisSpan]]:
    """The atoms, major first, and what every name denotes; where two names are alike the coarser one has it."""
    atoms: list[Atom] = []
    spans: dict[str, AxisSpan] = {}
    stride = math.prod(sizes)
    for axis, size, split in zip(axes, sizes, parts, strict=True):
        axis_start = len(atoms)
        outer = stride
        for part_name, part_size in split or ((axis, size),):
            part_start = len(atoms)
            factors = primes(part_size)
            for k, factor in enumerate(factors):
                stride //= factor
                name = part_name if len(factors) == 1 else f"{part_name}.{k}"
                atoms.append(Atom(name, factor, stride))
                spans[name] = AxisSpan(name, factor, stride, (len(atoms) - 1,), False)
            spans[part_name] = AxisSpan(part_name, part_size, stride, tuple(range(part_start, len(atoms))), False)
        spans[axis] = AxisSpan(axis, size, outer // size, tuple(range(axis_start, len(atoms))), True)
    return atoms, spans


@dataclass(frozen=True, slots=False, init=False, eq=False, repr=False)
class Mesh:
    """A grid of devices with named axes.

    `Mesh(data=4, tensor=2)` or `Mesh({"data": 4, "tensor": 2}, devices=range(8, 16))`; the devices are in mesh order
    (row-major over the axes) and default to 0, 1, .... Raises `LayoutError` for a bad name, size or device list.

    >>> Mesh(data=4, tensor=2).size
    8
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    devices: tuple[int, ...]
    parts: tuple[Parts, ...]
    atoms: tuple[Atom, ...] = field(compare=False)
    _spans: dict[str, AxisSpan] = field(compare=False)
    _key: tuple[Any, ...] = field(compare=False)
    _hash: int = field(compare=False)

    def __init__(
        self, axes: Mapping[str, int] | None = None, /, *, devices: Iterable[int] | None = None, **sizes: int
    ) -> None:
        """Take axis sizes by keyword or as one ordered mapping."""
        if axes is not None and sizes:
            raise LayoutError("a mesh takes its axes as one mapping or as keywords, not both")
        table = sizes if axes is None else validation.table("the mesh", axes, "names of axes to sizes, or keywords")
        _fill(self, table, devices, {})

    def split(self, axis: str, /, **parts: int) -> Mesh:
        """Return this mesh with `axis` refined into sub-axes `axis.part`, major first; their product is its size.

        >>> Mesh(data=8).split("data", node=4, gpu=2).span("data.gpu").size
        2
        """
        if not isinstance(axis, str) or axis not in self.axes:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise LayoutError(f"cannot split {excerpt(axis)}: {self.legal()}")
        size = self.sizes[self.axes.index(axis)]
        parts = {name: validation.whole_number(f"the part {axis}.{name}", n) for name, n in parts.items()}
        if math.prod(parts.values()) != size or any(p < 1 for p in parts.values()):
            raise LayoutError(f"cannot split {axis!r} of size {size} into {parts}: the parts must multiply to {size}")
        for name in parts:
            if not NAME.fullmatch(name):
                raise LayoutError(f"cannot split {axis!r}: the part name {name!r} is not an identifier")
        splits = {a: dict(p) for a, p in zip(self.axes, self.parts, strict=True) if p}
        return self.with_parts(splits | {axis: {f"{axis}.{name}": n for name, n in parts.items()}})

    def with_parts(self, splits: Mapping[str, Mapping[str, int]]) -> Mesh:
        """Return this mesh split like that: by axis the names and sizes of its parts, as `parts` has them."""
        mesh = Mesh.__new__(Mesh)
        _set(mesh, self.shape, self.devices, splits)
        return mesh

    def reorder_factors(self, axis: str, /, *factors: int) -> Mesh:
        """Return this mesh with the prime factors of `axis` in another order: `data=12(3,2,2)`."""
        legal = primes(self.span(axis).size)
        factors = tuple(validation.whole_number(f"a factor of {axis}", n, 2) for n in factors)
        if axis not in self.axes or legal != tuple(sorted(factors)):
            raise LayoutError(f"cannot order {axis!r} as {factors}: legal are the factors {legal} of an axis")
        splits = {a: dict(p) for a, p in zip(self.axes, self.parts, strict=True) if p}
        return self.with_parts(splits | {axis: _order(axis, factors)})

    @property
    def size(self) -> int:
        """The number of devices."""
        return len(self.devices)

    @property
    def shape(self) -> dict[str, int]:
        """Axis sizes by name, in order."""
        return dict(zip(self.axes, self.sizes, strict=True))

    def span(self, name: str) -> AxisSpan:
        """Return what `name` (axis, part or prime sub-axis) denotes; raises `LayoutError` listing the legal names."""
        found = self._spans.get(name) if isinstance(name, str) else None  # pyright: ignore[reportUnnecessaryIsInstance]
        if found is None:
            raise LayoutError(f"unknown axis {excerpt(name)}: {self.legal(name)}")
        return found

    def expand(self, names: Iterable[str]) -> tuple[int, ...]:
        """Return the atoms of `names`, in order."""
        return tuple(a for name in names for a in self.span(name).atoms)

    def fold(self, atoms: tuple[int, ...]) -> tuple[str, ...]:
        """Return the shortest list of names that denotes `atoms` in this order (complete runs become their parent)."""
        names: list[str] = []
        i = 0
        while i < len(atoms):
            best = self._spans[self.atoms[atoms[i]].name]
            for span in self._runs.get(atoms[i], ()):
                if span.atoms == atoms[i : i + len(span.atoms)]:
                    best = span
                    break
            names.append(best.name)
            i += len(best.atoms)
        return tuple(names)

    @cached_property
    def _runs(self) -> dict[int, tuple[AxisSpan, ...]]:
        runs: dict[int, list[AxisSpan]] = {}
        for span in self._spans.values():
            if span.atoms:
                runs.setdefault(span.atoms[0], []).append(span)
        # the longest run first; of equal runs the whole axis, then the part
        order = lambda s: (-len(s.atoms), not s.whole, s.name.count("."))  # noqa: E731
        return {a: tuple(sorted(spans, key=order)) for a, spans in runs.items()}

    def coordinates(self, place: int) -> tuple[int, ...]:
        """Return the coordinates over the axes of the device at `place` in mesh order."""
        return tuple(place // self._spans[a].stride % s for a, s in zip(self.axes, self.sizes, strict=True))

    def place(self, device: int | tuple[int, ...]) -> int:
        """Return the place of `device`, given as that or as coordinates over the axes; raises `LayoutError` outside."""
        if isinstance(device, tuple):
            device = tuple(validation.whole_number("a coordinate of a device", c) for c in device)
            legal = len(device) == len(self.sizes) and all(0 <= c < s for c, s in zip(device, self.sizes, strict=True))
            if not legal:
                raise LayoutError(f"device {device} is outside the mesh {self}")
            return sum(c * self._spans[a].stride for c, a in zip(device, self.axes, strict=True))
        device = validation.integer("a device's place", device)
        if not 0 <= device < self.size:
            raise LayoutError(f"device {device} is outside the mesh {self}: places are 0 to {self.size - 1}")
        return int(device)

    def coordinate(self, name: str) -> np.ndarray:
        """Return the coordinate along `name` of every device, int64 [size] in mesh order."""
        return self.index((name,))

    def index(self, names: Iterable[str]) -> np.ndarray:
        """Return the mixed-radix index of every device over `names`, major first: int64 [size] in mesh order."""
        return digit_numbers(self.size, tuple((span.size, span.stride) for span in map(self.span, names)))

    def group_places(self, names: Iterable[str]) -> np.ndarray:
        """Return the groups of a collective over `names`: int64 [groups, members] of places, members major to minor."""
        return digit_groups(self.size, tuple((self.atoms[a].size, self.atoms[a].stride) for a in self.expand(names)))

    @cached_property
    def ids(self) -> np.ndarray:
        """The device ids as an int64 array [size], in mesh order."""
        return np.asarray(self.devices, dtype=np.int64)

    @cached_property
    def _ascends(self) -> bool:
        return bool((np.diff(self.ids) > 0).all())

    @staticmethod
    def devices_of(meshes: Iterable[Mesh]) -> tuple[int, ...]:
        """Return all device ids of some meshes, ascending."""
        every = list({id(mesh): mesh for mesh in meshes}.values())
        if every and every[0]._ascends and all(mesh.devices == every[0].devices for mesh in every[1:]):
            return every[0].devices
        return tuple(sorted({d for mesh in every for d in mesh.devices}))

    def __eq__(self, other: object) -> bool:
        """Meshes are equal when axes, sizes, splits and devices are."""
        if self is other:
            return True
        return isinstance(other, Mesh) and self._hash == other._hash and self._key == other._key

    def __hash__(self) -> int:
        """Hash the defining fields, once."""
        return self._hash

    def __reduce__(self) -> tuple[Callable[[str], Mesh], tuple[str]]:
        """Pickle the text: hashes of names differ from process to process."""
        return Mesh.parse, (str(self),)

    def __str__(self) -> str:
        """Return the text that `Mesh.parse` reads: `data=4, tensor=2 devices=8:16`."""
        axes = ", ".join(_axis_text(*axis) for axis in zip(self.axes, self.sizes, self.parts, strict=True))
        devices = _devices_text(self.devices)
        return f"{axes} devices={devices}" if devices else axes

    def __repr__(self) -> str:
        """Show the text form."""
        return f"Mesh({self})"

    @staticmethod
    def parse(text: str) -> Mesh:
        """Read `data=4, tensor=2` or `data=(node=2,gpu=2) devices=8:12`; raises `ParseError` at the character."""
        scanner = Scanner(text)
        mesh = scan_mesh(scanner)
        scanner.finish("the mesh")
        return mesh

    def legal(self, name: object = None) -> str:
        """Return the axes as an error message names them, and of a name that is none the nearest."""
        axes = ", ".join(f"{a}={s}" for a, s in zip(self.axes, self.sizes, strict=True)) or "no axes"
        return f"the mesh has {axes}{near_text(name, self.axes)}"


def _fill(mesh: Mesh, table: dict[str, int], devices: Iterable[int] | None, splits: dict[str, dict[str, int]]) -> None:
    """Set the fields of a mesh: axes with sizes, device ids in mesh order, and by axis the sizes of its parts."""
    for name, size in table.items():
        if not isinstance(name, str) or not NAME.fullmatch(name):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise LayoutError(f"axis name {excerpt(name)} is not an identifier")
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise LayoutError(f"axis {name!r} has size {excerpt(size)}: sizes are integers of at least 1")
    count = math.prod(int(s) for s in table.values())
    if count > MOST_DEVICES:
        raise LayoutError(f"the mesh {excerpt(table)} has too many devices; a mesh has at most {MOST_DEVICES}")
    ids = tuple(range(count)) if devices is None else _device_ids(devices)
    if len(ids) != count:
        raise LayoutError(f"the mesh {table} has {count} places, but {len(ids)} devices are given")
    if devices is not None and len(set(ids)) != count:
        twice = next(d for k, d in enumerate(ids) if d in ids[:k])
        raise LayoutError(f"device {twice} is listed twice; the device ids of a mesh are distinct")
    if ids and min(ids) < 0:
        raise LayoutError(f"device {min(ids)} is negative; device ids are 0 or more")
    _set(mesh, {a: int(s) for a, s in table.items()}, ids, splits)


def _set(mesh: Mesh, shape: Mapping[str, int], ids: tuple[int, ...], splits: Mapping[str, Mapping[str, int]]) -> None:
    """Set the fields of a mesh from what was checked."""
    axes, sizes, count = tuple(shape), tuple(shape.values()), len(ids)
    parts = tuple(tuple(splits.get(a, {}).items()) for a in axes)
    atoms, spans = _index(axes, sizes, parts)
    # Ids in a row are compared, and hashed, as a range: in constant time.
    row = range(ids[0], ids[0] + count) if count else range(0)
    key = (axes, sizes, parts, row if ids == tuple(row) else ids)
    for name, value in {
        "axes": axes,
        "sizes": sizes,
        "devices": ids,
        "parts": parts,
        "atoms": tuple(atoms),
        "_spans": spans,
        "_key": key,
        "_hash": hash(key),
    }.items():
        object.__setattr__(mesh, name, value)


def _device_ids(devices: Iterable[int]) -> tuple[int, ...]:
    if isinstance(devices, range) and len(devices) <= MOST_DEVICES:
        ids = list(devices)
    elif isinstance(devices, np.ndarray) and devices.ndim == 1 and devices.dtype.kind in "iu":
        ids = devices.tolist()
    else:
        ids = validation.items("devices", devices, "device ids")
    if not all(type(d) is int for d in ids):
        ids = [validation.integer("a device id", d) for d in ids]
    if ids and max(ids) > validation.MOST:
        raise LayoutError(f"device {excerpt(max(ids))} is too large; device ids are 0 to {validation.MOST}")
    return tuple(ids)


def _make(table: dict[str, int], devices: Iterable[int] | None, splits: dict[str, dict[str, int]]) -> Mesh:
    mesh = Mesh.__new__(Mesh)
    _fill(mesh, table, devices, splits)
    return mesh


def _order(axis: str, factors: tuple[int, ...]) -> dict[str, int]:
    return {} if list(factors) == sorted(factors) else {f"{axis}.{k}": p for k, p in enumerate(factors)}


def _axis_text(axis: str, size: int, parts: Parts) -> str:
    if parts and parts[0][0] == f"{axis}.0":
        return f"{axis}={size}({','.join(str(k) for _, k in parts)})"
    return f"{axis}=({','.join(f'{n[len(axis) + 1 :]}={k}' for n, k in parts)})" if parts else f"{axis}={size}"


def _devices_text(devices: tuple[int, ...]) -> str:
    first, count = (devices[0], len(devices)) if devices else (0, 0)
    if devices == tuple(range(first, first + count)):
        return "" if first == 0 else f"{first}:{first + count}"
    return f"[{','.join(map(str, devices))}]"


def scan_mesh(scanner: Scanner) -> Mesh:
    """Read a mesh at the scanner's position."""
    table: dict[str, int] = {}
    splits: dict[str, dict[str, int]] = {}
    while not scanner.end() and not scanner.peek("devices=") and not scanner.peek("\n"):
        start = scanner.position
        name = scanner.name("an axis name")
        if name in table:
            scanner.position = start
            raise scanner.error(f"axis {name!r} is named twice")
        scanner.expect("=", "an axis")
        if scanner.take("("):
            parts: dict[str, int] = {}
            for _ in scanner.items(")", "the parts of an axis"):
                part = scanner.name("a part name")
                scanner.expect("=", "a part of an axis")
                parts[f"{name}.{part}"] = scanner.integer("the size of a part")
            splits[name] = parts
            table[name] = math.prod(parts.values())
        else:
            table[name] = scanner.integer("the size of an axis")
            if scanner.take("("):
                factors = scanner.integers(")", "a prime factor of an axis", "the factors of an axis")
                if not 0 < table[name] <= MOST_DEVICES or tuple(sorted(factors)) != primes(table[name]):
                    raise scanner.error(f"expected the prime factors of {table[name]}, in any order")
                splits[name] = _order(name, tuple(factors))
        if not scanner.take(","):
            break
    devices: Iterable[int] | None = None
    if scanner.take("devices="):
        if scanner.take("["):
            devices = scanner.integers("]", "a device id", "the devices")
        else:
            first = scanner.integer("the first device id")
            scanner.expect(":", "a range of devices")
            devices = range(first, scanner.integer("the end of the range of devices"))
    return _make(table, devices, splits)
