"""Placements: how the axes of a mesh lie on the levels of a topology, as the matrix of arXiv 2110.10548.

`matrix[i][j]` is the number of units of level j over which axis i is split. Row products are axis sizes and column
products level sizes (arXiv 2110.10548); `order` says how the axes share a level (see `digit_order`). Enumeration rests
on the constraints being independent for each prime: the remaining columns can take what a row still needs exactly when
its remainder divides their product.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardplan.core import validation
from shardplan.core.mesh import Mesh, primes
from shardplan.core.notation import MOST_DIGITS
from shardplan.core.tensor import mesh_of
from shardplan.errors import ParseError, TopologyError, excerpt
from shardplan.hardware.digit_order import Digit, level_digits, level_orders, normal_order
from shardplan.hardware.topology import Topology, topology_of
from shardplan.notebook import notebook_html

Matrix = tuple[tuple[int, ...], ...]
Order = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """A mesh on a topology.

    Invariants: one row an axis, one column a level; entries are at least 1; row products are axis sizes, column
    products level sizes. Of every level `order` has the axes that are split there, major first, in mesh order where it
    is left out; on a torus or mesh an axis may stand in it several times, see `digit_order`. The ids that the mesh
    gives its devices play no part, but for `position`. Raises `TopologyError`.

    >>> p = Placement(Mesh(data=4, tensor=2), Topology.load("nominal", devices=8), ((4,), (2,)))
    >>> p.device_mesh().shape
    (4, 2)
    """

    mesh: Mesh
    topology: Topology
    matrix: Matrix
    order: Order = ()

    _repr_html_ = notebook_html

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh", mesh_of("mesh", self.mesh))
        object.__setattr__(self, "topology", topology_of("topology", self.topology))
        _check_sizes(self.mesh, self.topology)
        rows, levels = len(self.mesh.axes), self.topology.levels
        matrix = tuple(
            tuple(validation.integer("an entry of the matrix", x, TopologyError) for x in row)
            for row in (
                validation.items("a row of the matrix", given, "whole numbers", TopologyError)
                for given in validation.items("the matrix", self.matrix, "rows", TopologyError)
            )
        )
        object.__setattr__(self, "matrix", matrix)
        if len(matrix) != rows or any(len(row) != len(levels) for row in matrix):
            raise TopologyError(
                f"matrix {_show(matrix)} has the wrong shape: mesh {self.mesh} on {self.topology.describe()} needs "
                f"{rows} rows of {len(levels)}"
            )
        if any(x < 1 for row in matrix for x in row):
            raise TopologyError(f"matrix {_show(matrix)} has an entry below 1; an axis is split over 1 or more units")
        for axis, size, row in zip(self.mesh.axes, self.mesh.sizes, matrix, strict=True):
            if math.prod(row) != size:
                raise TopologyError(
                    f"matrix {_show(matrix)}: row {list(row)} of axis {axis!r} has product {math.prod(row)}, "
                    f"the axis has size {size}"
                )
        for j, level in enumerate(levels):
            column = [row[j] for row in matrix]
            if math.prod(column) != level.size:
                raise TopologyError(
                    f"matrix {_show(matrix)}: column {column} of level {level.name!r} has product "
                    f"{math.prod(column)}, the level has size {level.size}"
                )
        object.__setattr__(self, "order", self._normal_order())

    def _normal_order(self) -> Order:
        plain = self._plain_order()
        if not self.order:
            return plain
        given = validation.items("the order", self.order, "orders of axes, one a level", TopologyError)
        orders = [validation.names("the order of a level", one, TopologyError) for one in given]
        if len(orders) != len(plain):
            raise TopologyError(
                f"order {list(orders)} is of {len(orders)} levels; {self.topology.describe()} has {len(plain)}"
            )
        levels = enumerate(zip(self.topology.levels, orders, strict=True))
        return tuple(normal_order(level, self.column(j), one) for j, (level, one) in levels)

    def _plain_order(self) -> Order:
        """The axes that are split on each level, in mesh order."""
        columns = range(len(self.topology.levels))
        return tuple(
            tuple(a for a, row in zip(self.mesh.axes, self.matrix, strict=True) if row[j] > 1) for j in columns
        )

    def column(self, j: int) -> dict[str, int]:
        """Return the units of level j over which each axis is split: column j of the matrix, by axis."""
        return {axis: row[j] for axis, row in zip(self.mesh.axes, self.matrix, strict=True)}

    def digits(self) -> tuple[tuple[Digit, ...], ...]:
        """Return the digits of every level, outermost level first, major digit first.

        >>> topology = Topology.load("dgx-a100", nodes=2)
        >>> [[d.name for d in level] for level in Placement(Mesh(a=8, b=2), topology, ((2, 4), (1, 2))).digits()]
        [['a.node'], ['a.gpu', 'b']]
        """
        found = [level_digits(level, self.column(j), self.order[j]) for j, level in enumerate(self.topology.levels)]
        parts = Counter(axis for one in found for axis, _ in one)
        levels: list[tuple[Digit, ...]] = []
        for j, (level, one) in enumerate(zip(self.topology.levels, found, strict=True)):
            here = Counter(axis for axis, _ in one)
            stride = self.topology.strides[j] * level.size
            digits: list[Digit] = []
            for axis, size in one:
                stride //= size
                number = sum(d.axis == axis for d in digits)
                part = f"{level.name}{number}" if here[axis] > 1 else level.name
                digits.append(Digit(f"{axis}.{part}" if parts[axis] > 1 else axis, axis, j, size, stride))
            levels.append(tuple(digits))
        return tuple(levels)

    def device_mesh(self) -> NDArray[np.int64]:
        """Return the topology ids in the shape of the mesh, as `jax.sharding.Mesh` and torch's `DeviceMesh` take them.

        Level digit j splits by column j in the order of the level.

        >>> topology = Topology.load("dgx-a100", nodes=2)
        >>> Placement(Mesh(data=8, tensor=2), topology, ((1, 8), (2, 1))).device_mesh()[:2].tolist()
        [[0, 8], [1, 9]]
        """
        # Ids are level-major, the mesh is axis-major: the same digits, transposed.
        digits = [d for level in self.digits() for d in level]
        order = [k for axis in self.mesh.axes for k, d in enumerate(digits) if d.axis == axis]
        ids = np.arange(self.topology.size).reshape([d.size for d in digits])
        return ids.transpose(order).reshape(self.mesh.sizes)

    def position(self) -> NDArray[np.int64]:
        """Return, by device id, its topology id, -1 where the mesh has no such id: int64 [largest id + 1]."""
        ids = np.asarray(self.mesh.devices, dtype=np.int64)
        table = np.full(int(ids.max()) + 1, -1, dtype=np.int64)
        table[ids] = self.device_mesh().reshape(-1)
        return table

    def mesh_split(self) -> Mesh:
        """Return the mesh, every axis that spans several levels split: `data.node`, `data.gpu`, outermost major.

        Of an axis on dims of a torus that are no neighbours the parts are `data.chip0` and `data.chip1`. The mesh keeps
        its device ids; `device_mesh()` says on which device of the topology each of them lies.
        """
        digits = [d for level in self.digits() for d in level]
        splits = {axis: {d.name: d.size for d in digits if d.axis == axis} for axis in self.mesh.axes}
        return self.mesh.with_parts({axis: parts for axis, parts in splits.items() if len(parts) > 1})

    def describe(self) -> str:
        """Return the matrix in one line, such as `data=[2, 4], tensor=[1, 2]`, and orders that are not the mesh's.

        >>> topology = Topology.load("tpu-v5p")
        >>> Placement(Mesh(data=16, tensor=4), topology, ((16,), (4,)), (("data", "tensor", "data"),)).describe()
        'data=[16], tensor=[4]; order chip=(data, tensor, data)'
        """
        matrix = ", ".join(f"{axis}={list(row)}" for axis, row in zip(self.mesh.axes, self.matrix, strict=True))
        orders = zip(self.topology.levels, self.order, self._plain_order(), strict=True)
        said = ", ".join(f"{level.name}=({', '.join(own)})" for level, own, plain in orders if own != plain)
        return f"{matrix}; order {said}" if said else matrix

    def __str__(self) -> str:
        return f"mesh {self.mesh}\nplacement {self.describe()}\n{self.topology}"

    @staticmethod
    def parse(text: str) -> Placement:
        """Read what `str` prints: the mesh, the matrix with its orders, and the topology file's text.

        Raises `ParseError` where the text is malformed, `TopologyError` where the matrix does not fit.
        """
        lines = validation.text("the text of a placement", text, ParseError).split("\n", 2)
        if len(lines) != 3 or not lines[0].startswith("mesh "):
            raise ParseError("expected 'mesh ', a line 'placement ', and the topology", text, 0)
        start = len(lines[0]) + 1
        if not lines[1].startswith("placement "):
            raise ParseError("expected 'placement ' and the matrix", text, start)
        mesh = Mesh.parse(lines[0].removeprefix("mesh "))
        rows: list[tuple[int, ...]] = []
        start += len("placement ")
        at, body = 0, lines[1].removeprefix("placement ")
        number = rf"\d{{1,{MOST_DIGITS}}}"
        for i, axis in enumerate(mesh.axes):
            pattern = (r",\s*" if i else "") + rf"{re.escape(axis)}=(\[{number}(?:, ?{number})*\])"
            found = re.compile(pattern).match(body, at)
            if found is None:
                raise ParseError(f"expected {axis}=[...], the row of axis {axis!r}", text, start + at)
            rows.append(tuple(int(n) for n in re.findall(r"\d+", found[1])))
            at = found.end()
        placed = Placement(mesh, Topology.parse(lines[2]), tuple(rows))
        orders = list(placed.order)
        names = [level.name for level in placed.topology.levels]
        for prefix in (r";\s*order\s+", *[r",\s*"] * (len(names) - 1)):
            found = re.compile(rf"{prefix}(\w+)=\(([\w.]+(?:, ?[\w.]+)*)\)").match(body, at)
            if found is None or found[1] not in names:
                break
            orders[names.index(found[1])] = tuple(re.split(", ?", found[2]))
            at = found.end()
        if body[at:].strip():
            raise ParseError("expected the end of the matrix, or '; order ', a level and its axes", text, start + at)
        return replace(placed, order=tuple(orders))


def _show(matrix: Matrix) -> str:
    return str([list(row) for row in matrix])


def _check_sizes(mesh: Mesh, topology: Topology) -> None:
    if mesh.size != topology.size:
        raise TopologyError(
            f"mesh {', '.join(f'{a}={s}' for a, s in zip(mesh.axes, mesh.sizes, strict=True))} has {mesh.size} "
            f"devices, topology {topology.name!r} has {topology.size} ({topology.describe()}); a placement "
            "needs equal counts"
        )


def placements(
    mesh: Mesh | str,
    topology: Topology | str,
    bounds: Mapping[tuple[str, str], tuple[int, int]] | None = None,
    inside: Mapping[str, str] | None = None,
) -> Iterator[Placement]:
    """Return every placement of a mesh on a topology, in lexicographic order of the matrix, without duplicates.

    Args:
        mesh: The axes to place; a mesh or its text.
        topology: As many devices as the mesh; a topology or its text, such as the name of a preset.
        bounds: For (axis, level) the least and the greatest entry.
        inside: For an axis the level inside whose parent it must stay: its entries on levels further out are 1.

    Returns:
        An iterator; without options it has `count(mesh, topology)` placements.

    Raises:
        TopologyError: Sizes differ, or an option names an unknown axis or level, or is of another kind.

    Source: arXiv 2110.10548.
    """
    mesh, topology = mesh_of("mesh", mesh), topology_of("topology", topology)
    _check_sizes(mesh, topology)
    depth = len(topology.levels)
    least = [[1] * depth for _ in mesh.axes]
    most = [[mesh.size] * depth for _ in mesh.axes]
    for key, ends in _option("bounds", bounds, "(axis, level) to (least, greatest) entry"):
        (axis, level), (low, high) = _pair("a key of bounds", key), _pair(f"bounds of {excerpt(key)}", ends)
        i, j = _row(mesh, axis), topology.index(level)
        low, high = (validation.whole_number(f"bounds of {excerpt(key)}", n, kind=TopologyError) for n in (low, high))
        least[i][j], most[i][j] = max(least[i][j], low), min(most[i][j], high)
    for axis, level in _option("inside", inside, "an axis to a level"):
        i = _row(mesh, axis)
        for j in range(topology.index(level)):
            most[i][j] = 1
    return _enumerate(mesh, topology, least, most)


def _option(what: str, value: object, of: str) -> list[tuple[Any, Any]]:
    return [] if value is None else list(validation.table(what, value, of, TopologyError).items())


def _pair(what: str, value: object) -> tuple[Any, Any]:
    if isinstance(value, (tuple, list)) and len(value) == 2:
        return value[0], value[1]
    raise TopologyError(f"{what} is {excerpt(value)}; legal is a pair")


def _enumerate(mesh: Mesh, topology: Topology, least: list[list[int]], most: list[list[int]]) -> Iterator[Placement]:
    """Yield the placements row by row, cell by cell, entries ascending: lexicographic order.

    A cell takes only what leaves the rest of its row something that the columns behind it can multiply to, so no
    branch of the search is in vain (but for `least` and `most`).
    """
    depth = len(topology.levels)

    def rows(i: int, columns: tuple[int, ...]) -> Iterator[Matrix]:
        """Yield the rows from axis i on, of what is left of every column."""
        if i == len(mesh.axes):
            yield ()  # one way to fill no rows
            return
        for row in cells(i, 0, mesh.sizes[i], columns):
            rest = tuple(column // x for column, x in zip(columns, row, strict=True))
            for others in rows(i + 1, rest):
                yield (row, *others)

    def cells(i: int, j: int, need: int, columns: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yield the entries of row i from level j on whose product is `need`."""
        if j == depth:
            yield ()  # need is 1 here, as no column is left to divide
            return
        after = math.prod(columns[j + 1 :])
        for x in divisors(math.gcd(need, columns[j])):
            if after % (need // x) == 0 and least[i][j] <= x <= most[i][j]:
                for others in cells(i, j + 1, need // x, columns):
                    yield (x, *others)

    for matrix in rows(0, topology.level_sizes):
        yield Placement(mesh, topology, matrix)


def _row(mesh: Mesh, axis: str) -> int:
    if axis not in mesh.axes:
        raise TopologyError(f"unknown axis {excerpt(axis)}: {mesh.legal(axis)}")
    return mesh.axes.index(axis)


@lru_cache(maxsize=4096)  # cells of one enumeration ask for the divisors of the same few numbers
def divisors(n: int) -> tuple[int, ...]:
    """Return the divisors of n >= 1, ascending."""
    found = [1]
    for p in set(primes(n)):
        power = primes(n).count(p)
        found = [d * p**e for d in found for e in range(power + 1)]
    return tuple(sorted(found))


def count(mesh: Mesh, topology: Topology) -> int:
    """Return the number of placements of a mesh on a topology, without enumerating them.

    It is the product, over primes, of the numbers of tables of exponents. Raises `TopologyError` where sizes differ.

    >>> count(Mesh(a=4, b=4), Topology.load("dgx-a100", nodes=2))
    2
    """
    _check_sizes(mesh, topology)
    total = 1
    for p in set(primes(mesh.size)):
        rows = tuple(sorted(primes(a).count(p) for a in mesh.sizes))
        columns = tuple(sorted(primes(h).count(p) for h in topology.level_sizes))
        total *= _tables(rows, columns)
    return total


# Sub-tables recur within one count and between those of several primes: entries are sorted, so that they do.
@lru_cache(maxsize=65536)
def _tables(rows: tuple[int, ...], columns: tuple[int, ...]) -> int:
    """The number of non-negative integer tables with these row and column sums."""
    if not rows:
        return int(not any(columns))

    def take(j: int, need: int) -> Iterator[tuple[int, ...]]:
        """Yield what the columns from j on have left when the first row takes `need` from them."""
        if j == len(columns):
            if need == 0:
                yield ()  # the row is filled; where some of it is left over, these entries are no way
            return
        for x in range(min(need, columns[j]) + 1):
            for others in take(j + 1, need - x):
                yield (columns[j] - x, *others)

    return sum(_tables(rows[1:], tuple(sorted(rest))) for rest in take(0, rows[0]))


def reorder_level(placement: Placement, j: int) -> Iterator[Placement]:
    """Yield a placement with every order of level j that can make a difference, that of the mesh first.

    On a switch, and where all children are linked, the order makes none.
    """
    level = placement.topology.levels[j]
    if level.link in ("switch", "full"):
        yield placement
        return
    for one in level_orders(level, placement.column(j)):
        yield replace(placement, order=(*placement.order[:j], one, *placement.order[j + 1 :]))


def orders(placement: Placement) -> Iterator[Placement]:
    """Yield a placement's matrix in every order that can make a difference, that of the mesh first.

    >>> p = Placement(Mesh(data=16, tensor=4), Topology.load("tpu-v5p"), ((16,), (4,)))
    >>> [one.order for one in orders(p)]
    [(('data', 'tensor'),), (('data', 'tensor', 'data'),), (('tensor', 'data'),)]
    """
    found = [replace(placement, order=())]
    for j in range(len(placement.topology.levels)):
        found = [other for one in found for other in reorder_level(one, j)]
    yield from found
