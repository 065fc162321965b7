"""Candidates that reduce: partial axes cut at the levels of the hardware, and the cheapest path over their states.

What a reduced axis has on one level is a *factor*: partial, root, scattered or whole. So a program is a path in
`reductions.type_graph`, whatever the shape, and `reductions.typed_path` says where factors are scattered. What is cut
unevenly takes whole axes: a `Send` to a mesh of the same devices, which moves nothing, gives every factor an axis.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from shardplan.core.layout import Layout
from shardplan.core.mesh import Mesh
from shardplan.core.op import Op, results_of
from shardplan.core.ops import ReduceScatter, Send, Slice
from shardplan.core.tensor import TensorType, same
from shardplan.errors import LayoutError, TypingError
from shardplan.hardware.placement import Placement
from shardplan.hardware.prices.fabric import Fabric
from shardplan.movement.redistribution.candidates import Candidate
from shardplan.movement.redistribution.emit import dims_and_axes
from shardplan.movement.reductions.type_graph import MOST_FACTORS, cheapest_path
from shardplan.movement.reductions.typed_path import TypedPath, view_reshape


def reducing(s: TensorType, t: TensorType, fabric: Fabric, placement: Placement | None) -> Iterator[Candidate]:
    """Yield the cheapest program that reduces, scatters and spreads, where `s` to `t` takes no more than that.

    Dims keep their axes; what is partial or root in `s` is whole, root or, minor to those axes, scattered in `t`.
    """
    if s.mesh != t.mesh or not (s.layout.partial or s.layout.root):
        return
    mesh = _split_by_level(s, fabric, placement)
    levelled = None if mesh is None else (_on_mesh(s, mesh), _on_mesh(t, mesh))
    # Where the steps over all factors do not type on this shape, those over what axes have on a level together may.
    for apart in (True, False):
        found = reduction(s, t, fabric, apart)
        ops = None if found is None else found.even_ops(fabric.library.member_order)
        if found is not None and ops is not None:
            yield Candidate(tuple(ops), exact=found.whole and is_settled(s))
            return
        found = None if levelled is None else reduction(*levelled, fabric, apart)
        if found is None:
            continue
        even = found.even_ops()
        ops = found.flat() if even is None else even
        if ops is not None:
            there, back = Send(found.source.layout, found.source.mesh), Send(t.layout, t.mesh)
            yield Candidate((there, *ops, back), exact=even is not None and found.whole and is_settled(s))
            return


def is_settled(s: TensorType) -> bool:
    """Say whether no other plan is to be tried: every device has addends of its own, and none waits for a root's.

    Devices with equal addends may each reduce a part of them, and what lies at a root may be spread at any time.
    """
    return len(set(s.mesh.expand(s.layout.used_axes))) == len(s.mesh.atoms) and not s.layout.root


def with_levels(
    found: Iterable[Candidate], s: TensorType, fabric: Fabric, placement: Placement | None
) -> Iterator[Candidate]:
    """Yield candidates from `s`, and behind each that reduces the same with every such step cut at the levels."""
    for candidate in found:
        yield candidate
        ops, t = list[Op](), s
        for op in candidate.ops if s.layout.partial or s.layout.root else ():
            try:
                (u,) = results_of(op, (t,))
            except (TypingError, LayoutError):
                break
            same_marks = (t.layout.partial, t.layout.root) == (u.layout.partial, u.layout.root)
            steps = None if same_marks else next(reducing(t, u, fabric, placement), None)
            ops += (op,) if steps is None else steps.ops
            t = u
        else:
            if tuple(ops) != candidate.ops and ops:
                yield Candidate(tuple(ops))


def slice_then_scatter(s: TensorType, t: TensorType) -> Iterator[tuple[Op, ...]]:
    """Yield ops that slice over axes in which `s` is whole before they scatter its sums, although those are inner.

    On a view of the shard every run of such axes behind reduced ones has a dim of its own, `[16] -> [2, 8]`, which a
    slice may cut while the addends are there: a device receives no sum of what it does not keep. They end in what `t`
    has on dims that it cuts further, as far as those axes go; then also with the axes that it does not use as minor
    ones, to be gathered. Nothing where no dim needs a view, or one is cut unevenly.
    """
    mesh = s.mesh
    if mesh != t.mesh or not s.layout.partial:
        return
    summed = set(mesh.expand(s.layout.partial)) - set(mesh.expand((*t.layout.partial, *t.layout.root)))
    whole = set(range(len(mesh.atoms))) - set(mesh.expand(s.layout.used_axes))
    free = summed | whole
    cuts = [
        tuple(itertools.takewhile(free.__contains__, new[len(old) :])) if new[: len(old)] == old else ()
        for old, new in zip(s.atoms, t.atoms, strict=True)
    ]
    rooms = [
        n / math.prod(mesh.atoms[a].size for a in (*old, *cut))
        for n, old, cut in zip(s.shape, s.atoms, cuts, strict=True)
    ]
    if not all(room.is_integer() for room in rooms):
        return
    unused = tuple(sorted(whole - set(mesh.expand(t.layout.used_axes))))
    spread = math.prod(mesh.atoms[a].size for a in unused)
    ends = [d for d, room in enumerate(rooms) if summed.issuperset(cuts[d][-1:]) and cuts[d] and room % spread == 0]
    yield from _on_view(s, cuts, summed)
    if unused and ends:
        d = max(ends, key=lambda d: rooms[d])
        yield from _on_view(s, [*cuts[:d], (*cuts[d], *unused), *cuts[d + 1 :]], summed)


def _on_view(s: TensorType, cuts: Sequence[tuple[int, ...]], summed: set[int]) -> Iterator[tuple[Op, ...]]:
    """Yield the ops that cut dims further over these atoms, evenly, on a view: slices first. None needed, nothing."""
    mesh, sizes, joined = s.mesh, list[int](), list[list[int]]()
    sliced, scattered = dict[int, tuple[int, ...]](), dict[int, tuple[int, ...]]()
    for n, old, cut in zip(s.shape, s.atoms, cuts, strict=True):
        starts = [0, *(k for k in range(1, len(cut)) if cut[k - 1] in summed and cut[k] not in summed), len(cut)]
        runs = [cut[start:stop] for start, stop in itertools.pairwise(starts)]
        parts = [math.prod(mesh.atoms[a].size for a in run) for run in runs[:-1]]
        if parts:
            parts[0] *= math.prod(mesh.atoms[a].size for a in old)
        joined.append(list(range(len(sizes), len(sizes) + len(runs))))
        for d, run in zip(joined[-1], runs, strict=True):
            for found, atoms in ((sliced, set(run) - summed), (scattered, set(run) & summed)):
                found |= {d: tuple(a for a in run if a in atoms)} if atoms else {}
        sizes += [*parts, n // math.prod(parts)]
    if len(sizes) > s.ndim:
        apart = [[k] for k in range(len(sizes))]
        yield (
            view_reshape(sizes, joined, apart),
            *(Slice(d, mesh.fold(atoms)) for d, atoms in sliced.items()),
            ReduceScatter(*dims_and_axes(mesh, scattered), s.layout.reduction or "sum"),
            view_reshape(sizes, apart, joined),
        )


def atom_digits(s: TensorType, fabric: Fabric) -> dict[int, tuple[int, int, int]] | None:
    """Return, by atom, the digits of the topology that the partial and root axes of a type are: level, size, stride.

    None where an atom is no digit. That takes a mesh of all devices.
    """
    mesh, topology = s.mesh, fabric.topology
    ids = fabric.topology_ids(mesh.ids)
    found: dict[int, tuple[int, int, int]] = {}
    for a in mesh.expand((*s.layout.partial, *s.layout.root)) if len(ids) == topology.size else ():
        atom = mesh.atoms[a]
        stride = int(ids[atom.stride] - ids[0])
        level = next((j for j, unit in enumerate(topology.strides) if unit <= stride), len(topology.strides) - 1)
        fits = stride > 0 and topology.strides[level] * topology.levels[level].size % (atom.size * stride) == 0
        if not fits or not np.array_equal(ids // stride % atom.size, mesh.coordinate(atom.name)):
            return None
        found[a] = level, atom.size, stride
    return found or None


def _split_by_level(s: TensorType, fabric: Fabric, placement: Placement | None) -> Mesh | None:
    """The mesh of the same devices on which what a reduced axis has on a level is an axis."""
    mesh, digits = s.mesh, atom_digits(s, fabric)
    cut = set(mesh.expand((*s.layout.partial, *s.layout.root)))
    axes: dict[str, int] = {}
    for k, axis in enumerate(mesh.axes):
        span = mesh.span(axis)
        parts: list[tuple[int, int]] = [(-1, span.size)]  # level and size
        if cut & set(span.atoms):
            if digits is not None and set(span.atoms) <= set(digits):
                parts = [digits[a][:2] for a in span.atoms]
            elif placement is not None and (mesh.shape, mesh.devices) == (placement.mesh.shape, placement.mesh.devices):
                parts = list(enumerate(placement.matrix[k]))
            else:
                return None
        for level, same_level in itertools.groupby(parts, key=lambda part: part[0]):
            size = math.prod(n for _, n in same_level)
            name = axis if level < 0 else f"{axis}_{fabric.topology.levels[level].name}"
            while name in axes or (name in mesh.axes and name != axis):
                name += "_"
            axes |= {name: size} if size > 1 else {}
    return Mesh(axes, devices=mesh.devices)


def _on_mesh(t: TensorType, mesh: Mesh) -> TensorType | None:
    """The same type on another mesh in the same order, or None where its axes do not say it."""
    starts = {mesh.span(a).stride * mesh.span(a).size: mesh.span(a) for a in mesh.axes}

    def named(names: Sequence[str]) -> tuple[str, ...]:
        out: list[str] = []
        for span in map(t.mesh.span, names):
            at = span.stride * span.size
            while at > span.stride and at in starts:
                out.append(starts[at].name)
                at = starts[at].stride
        return tuple(out)

    dims = tuple(named(names) for names in t.layout.dims)
    partial = named(t.layout.partial)
    layout = Layout(dims, partial, t.layout.reduction if partial else None, named(t.layout.root))
    u = t.with_layout(layout, mesh)
    return u if same(t, u) else None


def reduction(s: TensorType | None, t: TensorType | None, fabric: Fabric, apart: bool = True) -> TypedPath | None:
    """Read two types as a reduction, with its cheapest path; None where they are none, or of too many factors.

    A factor is what an axis has on a level, or, where those are too many or not taken `apart`, what all have together.
    """
    if s is None or t is None:
        return None
    held, left = ([set(x.mesh.expand(names)) for names in (x.layout.partial, x.layout.root)] for x in (s, t))
    reduced = (held[0] | held[1]) - left[0]
    scattered = {a for old, new in zip(s.atoms, t.atoms, strict=True) for a in new[len(old) :]}
    kept = left[0] <= held[0] and (not left[0] or s.layout.reduction == t.layout.reduction)
    nested = all(new[: len(old)] == old for old, new in zip(s.atoms, t.atoms, strict=True))
    if not (kept and nested and scattered | left[1] <= reduced and (t.all_even or not scattered)):
        return None
    digits = atom_digits(s, fabric)
    if digits is None:
        return None
    axis_of = {a: axis for axis in s.mesh.axes for a in s.mesh.span(axis).atoms}
    factors: dict[tuple[int, str, str], list[list[int]]] = {}
    for a in sorted(reduced, key=lambda a: -digits[a][2]):
        after = "S" if a in scattered else "R" if a in left[1] else "U"
        units = factors.setdefault((digits[a][0], "P" if a in held[0] else "R", after), [])
        if units and axis_of[units[-1][-1]] == axis_of[a] and digits[units[-1][-1]][2] == digits[a][1] * digits[a][2]:
            units[-1].append(a)
        else:
            units.append([a])
    if not 0 < len(factors) <= MOST_FACTORS:
        return None
    before, after = "".join(key[1] for key in factors), "".join(key[2] for key in factors)
    atoms = [tuple(map(tuple, units)) for units in factors.values()]
    asked = tuple(tuple(tuple(digits[a][1:] for a in unit) for unit in units) for units in atoms)
    found = cheapest_path(asked, s.local_bytes(), fabric.topology, before, after, apart=apart)
    return TypedPath.of(s, t, atoms, found) if math.isfinite(found.seconds) else None
