"""The expression of a family: what one rank has of every dim, and the cuts and the padding that fit all trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardplan.errors import LayoutError
from shardplan.movement.weights.derive.cuts import RankDim, cut_of
from shardplan.movement.weights.derive.sides import SeenTrials
from shardplan.movement.weights.derive.wholes import Atoms, atoms_of, line_of, whole_of
from shardplan.movement.weights.form import FormFactor, StoredForm, axes_of, parse_product, product_text

_MULTIPLES = tuple(2**k for k in range(1, 13))  # to which padding may round up
Factors = tuple[FormFactor, ...]


@dataclass(frozen=True, slots=True)
class DimWhole:
    """What one rank has of a dim, which logical dim of each tensor it is, and the tensors along it (-1: padding)."""

    factors: Factors
    along: Mapping[str, int]
    tensors: tuple[int, ...]


def family_form(runs: SeenTrials, k: int, meshes: Sequence[str]) -> tuple[str, StoredForm]:
    """Return which of some meshes a family is on, and its expression; raises `LayoutError` where none fits."""
    if not meshes:
        raise LayoutError("its names are cut over axes that no mesh has together; legal are axes of one mesh")
    wholes = [_read_whole_dim(runs, k, d) for d in range(runs.of[k][0].of.array.tensor.ndim)]
    bad = -1
    for mesh in meshes:
        found = [_dim(runs, k, d, mesh, w) for d, w in enumerate(wholes)]
        if None not in found:
            several = any(-1 in w.tensors or len(w.tensors) > 1 for w in wholes)
            (one, *_) = sorted(runs.families[k].tensors)
            return mesh, StoredForm(None if several else one, tuple(f for f in found if f is not None))
        bad = found.index(None) if bad < 0 else bad
    raise LayoutError(
        f"dim {bad}, {product_text(wholes[bad].factors)}, is cut or padded by no rule; legal are even, ~, .ceil, "
        ".first, .last and .robin over axes of one mesh, and padding to a multiple of a power of 2, times an axis"
    )


def _read_whole_dim(runs: SeenTrials, k: int, dim: int) -> DimWhole:
    s, array = runs.every[0], runs.of[k][0].of.array
    line = line_of(s, array, dim)
    assert line is not None, "families have elements"
    orders: dict[int, Atoms] = {}
    for tensor, along in line.along.items():
        orders[tensor] = []
        mine = line.index[line.tensor == tensor]
        if along < 0:
            if len(mine) > 1:
                raise LayoutError(f"dim {dim} repeats an element; legal is each once on a rank")
            continue
        said = runs.source.tensors[s.tensors[tensor]].dims[along]
        order = atoms_of(mine, [(a, runs.source.sizing.size(a)) for a in said.atoms], runs.names)
        if order is None:
            raise LayoutError(
                f"dim {dim} has {said} of {s.tensors[tensor]} in an order that no product of its digits gives; legal "
                "is each digit once, in any order"
            )
        orders[tensor] = order
    factors = tuple(whole_of(line, orders, s.tensors, "pad"))
    along = {s.tensors[t]: d for t, d in line.along.items()}
    for other in set(array.tensor[array.tensor >= 0].tolist()) - set(line.along):  # of a sum in another dim
        found = line_of(s, array, dim, through=other)
        along[s.tensors[other]] = found.along[other] if found is not None else -1
    return DimWhole(factors, along, tuple(dict.fromkeys(line.tensor.tolist())))


def _dim(runs: SeenTrials, k: int, dim: int, mesh: str, whole: DimWhole) -> Factors | None:
    """A dim with its cuts and padding, None where none fit."""
    if -1 not in whole.tensors:
        return _cut(runs, k, dim, mesh, whole, {})
    (tensor, *more) = [runs.every[0].tensors[t] for t in whole.tensors if t >= 0]
    if more:
        raise LayoutError(f"dim {dim} pads {len(more) + 1} tensors at once; legal is padding one")
    n = " * ".join(runs.source.tensors[tensor].dims[whole.along[tensor]].atoms)
    n = f"({n})" if " " in n else n
    for by in ("", *runs.axes(mesh)):
        for multiple in _MULTIPLES:
            unit = f"({multiple} * {by})" if by else str(multiple)
            text = f"ceil({n} / {unit}) * {unit} - {n}"
            found = _cut(runs, k, dim, mesh, whole, {"pad": text})
            if found is not None and (not by or by in axes_of(found)):
                return _name_padding_atom(runs, found, text)
    return None


def _name_padding_atom(runs: SeenTrials, factors: Factors, text: str) -> Factors:
    """A dim whose padding has an atom of its own, one for all of that size."""
    known = next((a for a, t in runs.names.sizes.items() if t == text), None)
    taken = {**dict(runs.source.table.atoms), **runs.names.sizes}
    name = known or next(p for p in ("pad", *(f"pad{i}" for i in range(2, 99))) if p not in taken)
    runs.names.sizes[name] = text
    return parse_product(product_text(factors).replace("0: pad", f"0: {name}"))


def _cut(runs: SeenTrials, k: int, dim: int, mesh: str, whole: DimWhole, sizes: Mapping[str, str]) -> Factors | None:
    """A dim with its cuts, None where none fit; `sizes` are of padding."""
    summed = len(whole.tensors) > 1
    only = None if summed else runs.every[0].tensors[whole.tensors[0]]
    ranks: list[RankDim] = []
    keys: list[tuple[int, int, tuple[Any, ...]]] = []
    for (t, r), member in {(m.trial, m.rank): m for m in reversed(runs.of[k])}.items():
        s = runs.every[t]
        if mesh not in ("", *s.trial.meshes) and s.trial.ranks > 1:
            return None
        line = line_of(s, member.of.array, dim, whole.along)
        if line is not None and not line.along and not summed:
            line = None  # nothing but padding, which is along another dim
        size = member.of.array.tensor.shape[dim]
        keys.append((t, r, (0, size)))
        if line is not None:
            keys.append((t, r, (1, *line.index.tolist(), *(line.tensor.tolist() if summed else ()))))
        found = RankDim(size, line, runs.scenery(t, r, mesh, sizes), *runs.weights(t, whole.along))
        ranks.append(found if only is None else _assign_one_tensor(found, only))
    return cut_of(whole.factors, ranks, runs.differing(keys, mesh), only)


def _assign_one_tensor(rank: RankDim, tensor: str) -> RankDim:
    """A rank's dim with all elements under one tensor: what stands along it is alike for all of a sum elsewhere."""
    if rank.line is None:
        return rank
    held = next(iter(rank.line.along), rank.named.get(tensor, -1))
    number = rank.named.get(tensor, held)
    weights = {**rank.weights, number: rank.weights.get(number, rank.weights.get(held, {}))}
    return RankDim(rank.size, rank.line, rank.scenery, weights, {**rank.named, tensor: number})
