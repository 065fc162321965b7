"""From a path of states to a program: one op per edge, at most one slice per dim; typed again from scratch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from shardplan.core.mesh import Mesh
from shardplan.core.messages import moved_atoms, sharing_atoms
from shardplan.core.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Exchange,
    Op,
    Permute,
    Reduce,
    ReduceScatter,
    Send,
    Slice,
    ToPartial,
)
from shardplan.core.tensor import TensorType, same
from shardplan.movement.redistribution.problem import Problem, common_prefix
from shardplan.movement.redistribution.space import (
    ALL_TO_ALL,
    GATHER,
    LOCAL,
    REDUCE_ALL,
    RENAME,
    ROOT,
    SCATTER,
    SPREAD,
)
from shardplan.movement.redistribution.tile_graph import Graph


def _minus(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """The atoms that `a` has behind its prefix `b`."""
    return a[len(b) :]


def dims_and_axes(mesh: Mesh, runs: dict[int, tuple[int, ...]]) -> tuple[int | tuple[int, ...], tuple[str, ...]]:
    """One dim and its axes, or one dim per axis."""
    names = {d: mesh.fold(run) for d, run in runs.items()}
    if len(names) == 1:
        return next(iter(names.items()))
    return tuple(d for d, axes in names.items() for _ in axes), tuple(a for axes in names.values() for a in axes)


def edge(p: Problem, a: int, b: int, portable: bool = False, priced: Graph | None = None) -> list[Op]:
    """Return the ops of one edge of the state graph, from state `a` to state `b`, as `priced` or the graph has it."""
    graph, mesh = p.graph, p.source.mesh
    e = (priced or graph).edges(a, np.array([b]), out=True, portable=portable)
    kind = int(e.kind[0])
    before, after = p.atoms(a), p.atoms(b)
    reduction = p.source.layout.reduction or p.target.layout.reduction or "sum"
    reduced = mesh.fold(p.atoms_of(int(graph.partial[a]) & ~int(graph.partial[b])))
    changed = [d for d in range(len(before)) if before[d] != after[d]]
    if kind == LOCAL:
        return _local(p, a, b, changed, reduction)
    if kind == GATHER:
        return [AllGather(*dims_and_axes(mesh, {d: _minus(before[d], after[d]) for d in changed}))]
    if kind == ALL_TO_ALL:
        src, dst = sorted(changed, key=lambda d: len(before[d]) < len(after[d]))
        axes, order = mesh.fold(_minus(before[src], after[src])), mesh.fold(_minus(after[dst], before[dst]))
        return [AllToAll(src, dst, axes, () if axes == order else order)]
    if kind == SCATTER:
        return [ReduceScatter(*dims_and_axes(mesh, {d: _minus(after[d], before[d]) for d in changed}), reduction)]
    if kind == REDUCE_ALL:
        return [AllReduce(reduced, reduction)]
    if kind == ROOT:
        return [Reduce(reduced, reduction)]
    if kind == SPREAD:
        return [Broadcast(mesh.fold(p.atoms_of(int(graph.root[a]) & ~int(graph.root[b]))))]
    layout = p.type(b).layout
    if kind == RENAME:
        return [Permute(layout)]
    return [Exchange(layout, group_axes(mesh, p.atoms_of(int(e.group[0]))))]


def group_axes(mesh: Mesh, atoms: tuple[int, ...]) -> tuple[str, ...]:
    """Return the axes of a group, empty for the whole mesh."""
    return () if len(atoms) == len(mesh.atoms) else mesh.fold(atoms)


def _local(p: Problem, a: int, b: int, changed: list[int], reduction: str) -> list[Op]:
    """The ops of an edge without communication."""
    graph, mesh = p.graph, p.source.mesh
    before, after = p.atoms(a), p.atoms(b)
    new = p.atoms_of(int(graph.partial[b]) & ~int(graph.partial[a]))
    if new:
        return [ToPartial(mesh.fold(new), reduction)]
    rooted = p.atoms_of(int(graph.root[b]) & ~int(graph.root[a]))
    if rooted:
        return [ToPartial(mesh.fold(rooted), "root")]
    return [Slice(d, mesh.fold(_minus(after[d], before[d]))) for d in changed]


def retyping(found: TensorType, target: TensorType) -> list[Op]:
    """Return what gives a value that is `same` as the target the very type: no op, or a send that moves nothing.

    Types that are the same may differ in their meshes, so in the order of shards, and in the names of axes.
    """
    return [] if found == target else [Send(target.layout, target.mesh)]


def ops_of_path(p: Problem, nodes: Sequence[int], portable: bool = False, priced: Graph | None = None) -> list[Op]:
    """Return the ops along a path of states."""
    return [op for a, b in zip(nodes, nodes[1:], strict=False) for op in edge(p, a, b, portable, priced)]


def direct(source: TensorType, target: TensorType, portable: bool = False) -> list[Op]:
    """Return the direct exchange (equal partial and root parts, one mesh), over the smallest group whose holders share.

    If it is to be portable and that is more than half of the mesh, over the smallest covering group known.
    """
    if same(source, target):
        return retyping(source, target)
    if source.all_even and target.all_even:
        moved, wide = moved_atoms(source, target), sharing_atoms(source, target)
    else:  # nested tiles agree as far as the names do
        moved = {
            atom
            for ours, theirs in zip(source.layout.dims, target.layout.dims, strict=True)
            for atom in source.mesh.expand(ours[len(common_prefix(ours, theirs)) :])
        }
        wide = moved | set(target.mesh.expand(target.layout.used_axes)) - set(
            source.mesh.expand(source.layout.used_axes)
        )
    if portable and 2 * math.prod(source.mesh.atoms[a].size for a in wide) > source.mesh.size:
        wide = moved
    return [Exchange(target.layout, group_axes(source.mesh, tuple(sorted(wide))) if moved else ())]
