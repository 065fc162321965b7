"""The smaller tiles that a send may carry to another mesh, and the gathers that lead from each to the destination.

What a destination replicates crosses once where each replica receives a part and gathers the others. A part is cut by
some of the prime sub-axes that the destination leaves free, or, where no dim divides, unevenly by whole axes. Gathers
over far axes come first, while the parts are small.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from shardplan.core.mesh import Mesh
from shardplan.core.ops import AllGather, Op
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError, TypingError
from shardplan.hardware.prices.affine_costs import linear_cost
from shardplan.hardware.prices.cost import Fabric
from shardplan.movement.redistribution.candidates import ROUND_CHARGE
from shardplan.movement.redistribution.emit import dims_and_axes

# Smaller tiles that are typed and priced exactly. The estimate that ranks them knows neither what a device holds
# already nor how messages share ports; of 222 random pairs the cheapest tile was among the first six in all but one.
MOST_TILES = 6
# Messages of all sends that are priced, where there is more than one: to price a million takes some 2 s.
MOST_LISTED = 1 << 19
# Axes of a mesh on which factors are axes: their sets are tried one by one.
MOST_SPLIT = 7

Atoms = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tile:
    """A smaller tile on the destination's mesh, and the gathers behind it."""

    type: TensorType
    gathers: tuple[Op, ...]


def tiles(s: TensorType, t: TensorType, fabric: Fabric | None) -> list[Tile]:
    """Return the tiles worth a price for a send of `s` to `t`, which is neither partial nor at a root; best first.

    The last is that of `t` itself, if its messages are not too many. Only as many are typed as are taken.
    """
    levels, rate = _levels(t.mesh, fabric), _rate(s, t, fabric)
    parts = [math.prod(s.mesh.span(a).size for a in names) for names in s.layout.dims]
    known: dict[tuple[tuple[int, ...], int], float] = {}
    ranked: dict[TileCut, tuple[float, int]] = {}
    for pieces in _choices(t, levels):
        for first in range(t.ndim if pieces else 0):
            for cut in _cuts(t, pieces, first, levels):
                if cut not in ranked:
                    ranked[cut] = _seconds(s, t, cut, fabric, rate, known), _tiles_met(parts, t.mesh, cut.grown)
    found: list[Tile] = []
    for cut in sorted(ranked, key=ranked.__getitem__):
        if len(found) == MOST_TILES:
            break
        if (tile := _typed_tile(t, cut)) is not None:
            found.append(tile)
    found.append(Tile(t, ()))
    met = (_tiles_met(parts, t.mesh, tile.type.atoms) for tile in found)
    listed = itertools.accumulate(n * t.mesh.size for n in met)
    return [tile for k, (tile, n) in enumerate(zip(found, listed, strict=True)) if n <= MOST_LISTED or not k]


def with_split_axes(t: TensorType) -> TensorType | None:
    """Return a type on a mesh of the same devices where every prime factor of the axes that it leaves free is an axis.

    An uneven dim takes whole axes only: there each factor is one. None where nothing is to be split, or too much.
    """
    mesh, used = t.mesh, set(t.mesh.expand(t.layout.used_axes))
    axes: dict[str, int] = {}
    for axis in mesh.axes:
        atoms = mesh.span(axis).atoms
        if len(atoms) < 2 or used & set(atoms):
            axes[axis] = mesh.span(axis).size
            continue
        taken = {*mesh.axes, *axes}
        for k, atom in enumerate(atoms):
            name = next(n for n in (f"{axis}{'_' * m}{k}" for m in itertools.count()) if n not in taken)
            axes[name] = mesh.atoms[atom].size
    if len(axes) == len(mesh.axes) or len(axes) > MOST_SPLIT:
        return None
    try:
        return t.with_layout(t.layout, Mesh(axes, devices=mesh.devices))
    except LayoutError:  # it names parts of axes, of a mesh that says their factors in another order
        return None


def _levels(mesh: Mesh, fabric: Fabric | None) -> list[int]:
    """The outermost level at which devices differ along each atom; all 0 where there is no fabric."""
    if fabric is None:
        return [0] * len(mesh.atoms)
    ids = fabric.topology_ids(mesh.ids)
    groups = [ids[mesh.group_places((atom.name,))] for atom in mesh.atoms]
    return [int(fabric.outermost_level(np.broadcast_to(g[:, :1], g.shape), g).min()) for g in groups]


def _rate(s: TensorType, t: TensorType, fabric: Fabric | None) -> float:
    """The bytes a second of a device at the slowest level between the two meshes; 1 where there is no fabric."""
    if fabric is None:
        return 1.0
    ids = fabric.topology_ids(np.concatenate([s.mesh.ids, t.mesh.ids]))
    outer = min(int(fabric.outermost_level(np.broadcast_to(ids[:1], ids.shape), ids).min()), len(fabric.wires) - 1)
    return min(float(fabric.capacity(j).max()) / w.stride for j, w in enumerate(fabric.wires) if j >= outer)


def digits_by_id(mesh: Mesh) -> list[tuple[int, ...]]:
    """Return of every atom the digits of the devices, in the order of their ids, however the mesh is written."""
    places = np.argsort(mesh.ids)
    return [tuple((places // atom.stride % atom.size).tolist()) for atom in mesh.atoms]


def _choices(t: TensorType, levels: Sequence[int]) -> Iterator[tuple[Atoms, ...]]:
    """Yield what to cut by, near pieces first: free atoms, of which those of a level and size are alike, or whole axes.

    So there are as many as products of primes at every level, and, where a dim may be uneven, as sets of axes. Alike
    are taken in the order of ids, however the mesh is written.
    """
    mesh, busy = t.mesh, set(t.mesh.expand(t.layout.used_axes))
    digits = digits_by_id(mesh)
    alike: dict[tuple[int, int], list[Atoms]] = {}
    for a in sorted(range(len(mesh.atoms)), key=digits.__getitem__):
        atom = mesh.atoms[a]
        if a not in busy:
            alike.setdefault((-levels[a], atom.size), []).append((a,))
    kinds = [alike[key] for key in sorted(alike)]
    for counts in itertools.product(*(range(len(k) + 1) for k in kinds)):
        yield tuple(piece for k, n in zip(kinds, counts, strict=True) for piece in k[:n])
    axes = [run for x in mesh.axes if (run := mesh.span(x).atoms) and busy.isdisjoint(run)]
    axes.sort(key=lambda run: (-min(levels[a] for a in run), [digits[a] for a in run]))
    for count in range(1, len(axes) + 1):
        yield from itertools.combinations(axes, count)


class TileCut(NamedTuple):
    """A smaller tile and its gathers, not typed yet."""

    grown: tuple[Atoms, ...]  # the atoms of every dim
    gathers: tuple[tuple[tuple[int, Atoms], ...], ...]  # of each gather its dims with what leaves their ends


def _cuts(t: TensorType, pieces: Sequence[Atoms], first: int, levels: Sequence[int]) -> Iterator[TileCut]:
    """Yield the cut of `t` by these pieces, each in a dim that it divides, `first` before others.

    Where it divides none, in the first one, if most parts have some of it, else in the longest.

    Once with a gather for every level, and once with one.
    """
    mesh, left = t.mesh, list(t.local_shape())
    dims = sorted(range(t.ndim), key=lambda d: d != first)
    grown, added = list(t.atoms), dict[tuple[int, int], Atoms]()  # by level and dim
    for piece in pieces:
        size = _size(mesh, piece)
        d = next(
            (d for d in dims if left[d] % size == 0),
            first if 2 * left[first] > size else max(dims, key=left.__getitem__),
        )
        left[d] = -(-left[d] // size)
        grown[d] += piece
        at = min(levels[a] for a in piece), d
        added[at] = added.get(at, ()) + piece
    runs = sorted(added.items())
    steps = tuple(tuple((d, run) for (_, d), run in step) for _, step in itertools.groupby(runs, lambda x: x[0][0]))
    yield TileCut(tuple(grown), steps)
    if len(steps) > 1:
        whole = ((d, g[len(own) :]) for d, (g, own) in enumerate(zip(grown, t.atoms, strict=True)))
        yield TileCut(tuple(grown), (tuple((d, run) for d, run in whole if run),))


def _typed_tile(t: TensorType, cut: TileCut) -> Tile | None:
    """Return the tile of a cut; None where a sub-axis does not divide, or on the way stands on an uneven dim."""
    mesh = t.mesh
    try:
        here = u = t.with_layout(replace(t.layout, dims=tuple(map(mesh.fold, cut.grown))))
        gathers = tuple(AllGather(*dims_and_axes(mesh, dict(step))) for step in cut.gathers)
        for op in gathers:
            (here,) = op.infer(here)
    except (LayoutError, TypingError):
        return None
    return Tile(u, gathers)


def _size(mesh: Mesh, atoms: Atoms) -> int:
    """The parts that atoms cut a dim into."""
    return math.prod([mesh.atoms[a].size for a in atoms])


def _seconds(
    s: TensorType,
    t: TensorType,
    cut: TileCut,
    fabric: Fabric | None,
    rate: float,
    known: dict[tuple[tuple[int, ...], int], float],
) -> float:
    """About what the send and the gathers take, if all devices of the source send alike; bytes without a fabric.

    `known` keeps the seconds of a gather by its atoms and what is held before.
    """
    mesh, runs = t.mesh, list(cut.grown)
    elements = [_longest(n, mesh, run) for n, run in zip(t.shape, runs, strict=True)]
    held = math.prod(elements) * t.itemsize
    total = max(held, held * mesh.size / s.mesh.size) / rate
    for step in cut.gathers:
        for d, gone in step:
            runs[d] = runs[d][: -len(gone)]
            elements[d] = _longest(t.shape[d], mesh, runs[d])
        there = math.prod(elements) * t.itemsize
        if fabric is None:
            total += there - held + ROUND_CHARGE * t.local_bytes()
        else:
            atoms = tuple(sorted(itertools.chain(*(gone for _, gone in step))))
            if (atoms, held) not in known:
                groups = mesh.ids[mesh.group_places(mesh.fold(atoms))]
                start, slope = linear_cost("all_gather", groups, fabric, held)
                known[atoms, held] = start + slope * held
            total += known[atoms, held]
        held = there
    return total


def _longest(n: int, mesh: Mesh, atoms: Atoms) -> int:
    """The elements of the longest part of a dim of `n` that atoms cut."""
    for a in atoms:
        n = -(-n // mesh.atoms[a].size)
    return n


def _tiles_met(parts: Sequence[int], mesh: Mesh, grown: Sequence[Atoms]) -> int:
    """How many tiles of a source, of so many parts in every dim, a tile cut by these atoms meets, if they nest."""
    return math.prod([max(1, -(-n // _size(mesh, run))) for n, run in zip(parts, grown, strict=True)])
