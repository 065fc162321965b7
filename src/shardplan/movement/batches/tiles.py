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

import numpy as np

from shardplan.core.mesh import Mesh
from shardplan.core.ops import AllGather, Op
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError, TypingError
from shardplan.hardware.prices.cost import Fabric, linear_cost
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

    The last is that of `t` itself, if its messages are not too many.
    """
    levels, rate = _levels(t.mesh, fabric), _rate(s, t, fabric)
    ranked: dict[Tile, tuple[float, int]] = {}
    known: dict[tuple[tuple[str, ...], int], float] = {}
    for pieces in _choices(t, levels):
        for first in range(t.ndim):
            for tile in _cut(t, pieces, first, levels):
                try:
                    ranked[tile] = _seconds(s, t, tile, fabric, rate, known), _tiles_met(s, tile.type)
                except (LayoutError, TypingError):  # on the way a dim is uneven over a part of an axis
                    continue
    found = [*sorted(ranked, key=lambda tile: ranked[tile])[:MOST_TILES], Tile(t, ())]
    listed = itertools.accumulate(_tiles_met(s, tile.type) * t.mesh.size for tile in found)
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


def _cut(t: TensorType, pieces: Sequence[Atoms], first: int, levels: Sequence[int]) -> Iterator[Tile]:
    """Yield the tile of `t` cut by these, each in a dim that it divides, `first` before others.

    Where it divides none, in the first one, if most parts have some of it, else in the longest.

    Once with a gather for every level, and once with one.
    """
    mesh, left = t.mesh, list(t.local_shape())
    dims = sorted(range(t.ndim), key=lambda d: d != first)
    grown, added = list(t.atoms), dict[tuple[int, int], Atoms]()  # by level and dim
    for piece in pieces:
        size = math.prod(mesh.atoms[a].size for a in piece)
        d = next(
            (d for d in dims if left[d] % size == 0),
            first if 2 * left[first] > size else max(dims, key=left.__getitem__),
        )
        left[d] = -(-left[d] // size)
        grown[d] += piece
        at = min(levels[a] for a in piece), d
        added[at] = added.get(at, ()) + piece
    try:
        u = t.with_layout(replace(t.layout, dims=tuple(map(mesh.fold, grown))))
    except LayoutError:  # a sub-axis that does not divide
        return
    steps = [{d: run for (j, d), run in added.items() if j == level} for level in sorted({j for j, _ in added})]
    if steps:
        yield Tile(u, tuple(_gather(mesh, step) for step in steps))
    if len(steps) > 1:
        yield Tile(
            u, (_gather(mesh, {d: g[len(own) :] for d, (g, own) in enumerate(zip(grown, t.atoms, strict=True))}),)
        )


def _gather(mesh: Mesh, runs: dict[int, Atoms]) -> Op:
    """The gather of these atoms of each dim."""
    return AllGather(*dims_and_axes(mesh, {d: runs[d] for d in sorted(runs) if runs[d]}))


def _seconds(
    s: TensorType,
    t: TensorType,
    tile: Tile,
    fabric: Fabric | None,
    rate: float,
    known: dict[tuple[tuple[str, ...], int], float],
) -> float:
    """About what the send and the gathers take, if all devices of the source send alike; bytes without a fabric.

    `known` keeps the seconds of a gather by its axes and what is held before.
    """
    here = tile.type
    held = here.local_bytes()
    total = max(held, held * t.mesh.size / s.mesh.size) / rate
    for op in tile.gathers:
        there = op.infer(here)[0]
        if fabric is None:
            total += there.local_bytes() - held + ROUND_CHARGE * t.local_bytes()
        else:
            axes = op.members(here)
            if (axes, held) not in known:
                start, slope = linear_cost("all_gather", t.mesh.ids[t.mesh.group_places(axes)], fabric, held)
                known[axes, held] = start + slope * held
            total += known[axes, held]
        here, held = there, there.local_bytes()
    return total


def _tiles_met(s: TensorType, u: TensorType) -> int:
    """How many tiles of `s` a tile of `u` meets, if they nest."""
    cuts = lambda x, d: math.prod(x.mesh.span(a).size for a in x.layout.dims[d])  # noqa: E731
    return math.prod(max(1, -(-cuts(s, d) // cuts(u, d))) for d in range(s.ndim))
