"""A path over states of factors as typed ops on a tensor of any shape.

A scattered factor needs a place in a dim: at the minor end of one, or, where the path gathers in another order, a dim
of its own that a reshape of the shard makes, `[64@t] -> [2@t, 4, 8]`. Where factors do not divide a shard, dims side by
side become a flat one that is cut unevenly; that takes whole axes. None of these steps copies a byte, and none pads.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardplan.core.op import Op, results_of
from shardplan.core.ops import AllGather, AllReduce, Broadcast, Reduce, ReduceScatter, Reshape, ToPartial
from shardplan.core.tensor import TensorType, same
from shardplan.errors import LayoutError, TypingError
from shardplan.movement.reductions.type_graph import CheapestPath, TypeEdge

Atoms = tuple[int, ...]  # of a mesh


@dataclass(frozen=True, slots=True)
class TypedPath:
    """A move that reduces, or gathers: the atoms of its factors, outermost first, and a path over the states."""

    source: TensorType
    target: TensorType
    atoms: tuple[Atoms, ...]  # of every factor, major first
    path: tuple[TypeEdge, ...]
    whole: bool = True  # see `CheapestPath.whole`

    @staticmethod
    def of(source: TensorType, target: TensorType, atoms: Sequence[Sequence[Atoms]], found: CheapestPath) -> TypedPath:
        """Return a path that was found; `atoms` are those of the units of every factor that was asked for."""
        every = (tuple(a for unit in atoms[k][start:stop] for a in unit) for k, start, stop in found.parts)
        return TypedPath(source, target, tuple(every), found.edges, found.whole)

    def even_ops(self, level_major: bool = True) -> list[Op] | None:
        """Return the ops of the path: on the dims as they are if their order allows it, else on views of the shard.

        A view has a dim for every scattered run of atoms. None where the factors do not divide the dims. Unless members
        are to be ordered `level_major`, a scatter in the target's order needs no view.
        """
        slots = self._slots()
        if slots is None:
            return None
        homes = {a: d for d, runs in enumerate(slots) for run in runs for a in run}
        for level in (True, *(() if level_major else (False,))):
            if (ops := self.ops(homes, level_major=level)) is not None:
                return ops
        return self.viewed_ops([(atoms, *runs) for atoms, runs in zip(self.source.atoms, slots, strict=True)])

    def viewed_ops(self, slots: Sequence[Sequence[Atoms]]) -> list[Op] | None:
        """Return the ops of the path on a view of the shard that has a dim for every run of atoms of every dim."""
        mesh, sizes, homes = self.source.mesh, list[int](), dict[int, int]()
        groups: list[list[int]] = []
        for runs, n in zip(slots, self.source.shape, strict=True):
            parts = [(math.prod(mesh.atoms[a].size for a in run), run) for run in runs]
            parts.append((n // math.prod(size for size, _ in parts), ()))
            start = len(sizes)
            for size, run in parts:
                if size > 1:
                    homes |= dict.fromkeys(run, len(sizes))
                    sizes.append(size)
            sizes += [1] if len(sizes) == start else []
            groups.append(list(range(start, len(sizes))))
        apart = [[k] for k in range(len(sizes))]
        return self.ops(homes, (view_reshape(sizes, groups, apart), view_reshape(sizes, apart, groups)))

    def flat(self) -> list[Op] | None:
        """Return the ops of the path with all factors on one dim, unevenly cut: the largest, or several made one."""
        s, shape = self.source, self.source.local_shape()
        runs: list[range] = []
        for d in range(s.ndim):
            stop = d + 1
            while stop < s.ndim and s.even[d] and not s.atoms[stop]:  # what is sharded stays major
                stop += 1
            runs.append(range(d, stop))
        run = max(runs, key=lambda run: math.prod(shape[d] for d in run), default=range(0))
        if not run:
            return None
        homes = {a: run[0] for atoms in self.atoms for a in atoms}
        if len(run) == 1:
            return self.ops(homes, level_major=False)
        apart = [[d] for d in range(s.ndim)]
        joined = [*apart[: run.start], list(run), *apart[run.stop :]]
        views = view_reshape(s.shape, apart, joined), view_reshape(s.shape, joined, apart)
        return self.ops(homes, views, level_major=False)

    def _slots(self) -> list[list[Atoms]] | None:
        """Of every dim the runs of atoms scattered on it, the target's first; None where the rest does not divide."""
        atoms, after = self.source.mesh.atoms, {pair for run in self.atoms for pair in itertools.pairwise(run)}
        slots: list[list[Atoms]] = []
        rooms: list[int] = []
        for n, old, new in zip(self.source.shape, self.source.atoms, self.target.atoms, strict=True):
            runs: list[Atoms] = []
            for a in new[len(old) :]:
                joined = bool(runs) and (runs[-1][-1], a) in after
                runs[-1:] = [(*runs[-1], a)] if joined else [*runs[-1:], (a,)]
            slots.append(runs)
            rooms.append(n // size if n % (size := math.prod(atoms[a].size for a in new)) == 0 else 1)
        placed = {a for runs in slots for run in runs for a in run}
        used = [k for k in range(len(self.atoms)) if any(edge.target[k] == "S" for edge in self.path)]
        stack = [self.atoms[k] for k in used if not set(self.atoms[k]) <= placed]
        while stack:
            run = stack.pop(0)
            size = math.prod(atoms[a].size for a in run)
            fits = [d for d, room in enumerate(rooms) if room % size == 0]
            if fits:  # best a dim that is just that large, as payloads have for every factor; else the first
                d = min(fits, key=lambda d: (rooms[d] != size, d))
                rooms[d] //= size
                slots[d].append(run)
            elif len(run) > 1:
                stack = [*((a,) for a in run), *stack]
            else:
                return None
        return slots

    def ops(self, homes: Mapping[int, int], views: tuple[Op, ...] = (), level_major: bool = True) -> list[Op] | None:
        """Return the ops of the path with every atom on its dim, between two views; None where they do not type.

        Members of a group are ordered level by level, as they are priced; without `level_major` as the dims have them.
        """
        mesh = self.source.mesh
        scattered: list[int] = []  # atoms, in order
        ops: list[Op] = [*views[:1]]
        for edge in self.path:
            rooted = [a for run, x, y in zip(self.atoms, edge.source, edge.entered, strict=True) if x != y for a in run]
            ops += [ToPartial(mesh.fold(tuple(rooted)), "root")] if rooted else []
            varied = [a for f in edge.instruction.grouping.varies for a in self.atoms[f]]
            if not level_major:
                order = scattered if set(varied) <= set(scattered) else list(itertools.chain(*self.target.atoms))
                if set(varied) <= set(order):
                    varied.sort(key=order.index)
            ops.append(self._op(edge.instruction.collective, varied, homes))
            for atoms, before, after in zip(self.atoms, edge.source, edge.target, strict=True):
                scattered += atoms if before < after == "S" else ()
        ops += views[1:]
        t = self.source
        try:
            for op in ops:
                (t,) = results_of(op, (t,))
        except (TypingError, LayoutError):
            return None
        return ops if same(t, self.target) else None

    def _op(self, collective: str, varied: Sequence[int], homes: Mapping[int, int]) -> Op:
        """The typed op of a collective over groups of some atoms, in member order."""
        mesh, reduction = self.source.mesh, self.source.layout.reduction or "sum"
        runs = [(d, tuple(run)) for d, run in itertools.groupby(varied, key=lambda a: homes.get(a, 0))]
        each = [(d, name) for d, run in runs for name in mesh.fold(run)]
        dims = each[0][0] if len(runs) == 1 else tuple(d for d, _ in each)
        axes, names = mesh.fold(tuple(varied)), tuple(name for _, name in each)
        match collective:
            case "all_reduce":
                return AllReduce(axes, reduction)
            case "reduce_scatter":
                return ReduceScatter(dims, names, reduction)
            case "all_gather":
                return AllGather(dims, names)
            case "reduce":
                return Reduce(axes, reduction)
            case _:
                return Broadcast(axes)


def view_reshape(sizes: Sequence[int], before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]) -> Reshape:
    """Return `(f0=2 f1=8) f2 -> f0 f1 f2`: what the dims are made of before and after, as numbers of factors."""

    def side(groups: Sequence[Sequence[int]], sized: bool) -> str:
        found: list[str] = []
        for group in groups:
            several = sized and len(group) > 1
            text = " ".join(f"f{k}={sizes[k]}" if several else f"f{k}" for k in group)
            found.append(f"({text})" if len(group) > 1 else text)
        return " ".join(found)

    return Reshape(f"{side(before, True)} -> {side(after, False)}")
