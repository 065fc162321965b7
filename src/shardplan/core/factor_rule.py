"""`FactorRule`: how the dims of an op's operands and results hang together, and the typing rule that follows from it.

The kinds and the notation are those of Shardy's op sharding rules. Every dim is an ordered list of *factors*, major to
minor; a factor that is sharded is sharded alike wherever it occurs. Invariants: a dim's size is the product of its
factors' sizes; a factor of kind `reduce` occurs in operands only. `FactorRule.infer` is the only place where compute
ops derive layouts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardplan.core.layout import Layout, suffix_text
from shardplan.core.mesh import Mesh
from shardplan.core.notation import axes_text
from shardplan.core.tensor import TensorType, laid_type
from shardplan.errors import LayoutError, TypingError

Dims = tuple[tuple[str, ...], ...]  # per dim its factors, major to minor
Passes = Callable[[frozenset[int], str], bool]
LETTERS = "ijklmnopqrstuvwxyz"  # of factors, as Shardy prints them
# What an error offers as legal is tried out: sets of operands up to this many, of which so many are printed. Of more
# than `MANY` operands there are too many sets: each alone, and all.
MOST_OPERANDS, MOST_OFFERED, MANY = 4, 8, 8


@dataclass(frozen=True, slots=True)
class Factor:
    """A factor: its size, its kind (`pass`, `reduce`, `replicate`), and a reduced one's reduction (sum, max, min)."""

    name: str
    size: int
    kind: str = "pass"
    reduction: str | None = None


def factor_names(count: int, skip: int = 0) -> tuple[str, ...]:
    """Return `count` factor names as Shardy gives them: i, j, ..., z, z_1, z_2, ..., after the first `skip`."""
    last = len(LETTERS) - 1
    return tuple(LETTERS[k] if k <= last else f"{LETTERS[last]}_{k - last}" for k in range(skip, skip + count))


@dataclass(frozen=True, slots=True)
class FactorRule:
    """The factors of every dim of operands and results.

    >>> ik, kj, ij = (("i",), ("k",)), (("k",), ("j",)), (("i",), ("j",))
    >>> rule = FactorRule((ik, kj), (ij,), (Factor("i", 8), Factor("j", 16), Factor("k", 8, "reduce", "sum")))
    >>> print(rule)
    ([i,k],[k,j])->([i,j]) {i=8,j=16,k=8}
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    factors: tuple[Factor, ...]

    def __str__(self) -> str:
        """Return Shardy's text; what the factor lists do not say (a max, a replicated factor) is appended."""
        sizes = ",".join(f"{f.name}={f.size}" for f in self.factors)
        text = f"{_side(self.operands)}->{_side(self.results)} {{{sizes}}}"
        for kind in ("max", "min"):
            names = [f.name for f in self.factors if f.reduction == kind]
            text += f" {kind}={{{','.join(names)}}}" if names else ""
        fixed = [f.name for f in self.factors if f.kind == "replicate"]
        return text + (f" need_replication={{{','.join(fixed)}}}" if fixed else "")


def _side(tensors: tuple[Dims, ...]) -> str:
    return "(" + ",".join("[" + ",".join("".join(d) for d in dims) + "]" for dims in tensors) + ")"


class _Held(NamedTuple):
    """A dim of an operand in which a factor lies, with the axes that the factor carries there."""

    operand: int
    dim: int
    atoms: tuple[int, ...]
    names: tuple[str, ...]


def infer(
    rule: FactorRule,
    operands: Sequence[TensorType],
    linear: Passes,
    op: str,
    dtypes: Sequence[str],
    over: Sequence[tuple[str, ...]] = (),
) -> tuple[TensorType, ...]:
    """Return the result types.

    1. A factor is sharded alike wherever it occurs; a replicated one is not sharded.
    2. An axis serves at most one factor, and none where it is partial in an operand.
    3. Results are partial over what the operands are partial over, where the op passes that on, and over the axes of
       the factors that are reduced, all with one reduction.
    4. The axes of a dim are dealt out to its factors, major first, and put together in the results; both on even dims
       only, where there are several factors.
    5. Operands have equal root axes, which the results keep.
    6. The k-th factor that only results have carries the axes `over[k]`, as one more operand of that factor alone would
       have them; none where `over` ends before.

    `linear(partial, reduction)` says whether the op may take exactly the operands `partial` (indices) as partial with
    `reduction` over an axis, its result then being partial too: for `sum`, whether it is linear and homogeneous in
    them jointly. `op` opens every message. `dtypes` are those of the results.

    Raises `TypingError` for operands of another count, shape or mesh, `LayoutError` where layouts do not meet.
    """
    sizes = {f.name: f.size for f in rule.factors}
    _check_shapes(rule, sizes, operands, op)
    mesh = operands[0].mesh
    held: dict[str, list[_Held]] = {name: [] for name in sizes}
    for k, (dims, t) in enumerate(zip(rule.operands, operands, strict=True)):
        for d, factors in enumerate(dims):
            if len(factors) == 1:
                held[factors[0]].append(_Held(k, d, t.atoms[d], t.layout.dims[d]))
                continue
            for name, atoms in _parts(sizes, t, d, factors, f"{op}: dim {d} of operand {k}, {t},"):
                held[name].append(_Held(k, d, atoms, mesh.fold(atoms)))
    made = [name for name in _factors(rule.results) if not held[name]]
    if len(over) > len(made):
        raise TypingError(
            f"{op}: over={_groups_text(over)}, but {len(made)} factors are in results only; legal is one each"
        )
    said = dict(zip(made, over, strict=False))
    carried = {f.name: _meet(f, held[f.name], operands, op, said.get(f.name, ())) for f in rule.factors}
    _check_once(carried, mesh, op)
    partial, reduction = _partial(rule, carried, operands, linear, op)
    root = _root(operands, op)
    names = mesh.fold(tuple(sorted(partial)))
    out: list[TensorType] = []
    for dims, dtype in zip(rule.results, dtypes, strict=True):
        layout = Layout(_result_dims(sizes, dims, carried, mesh, op), names, reduction, root)
        out.append(laid_type(dtype, _shape(dims, sizes), layout, mesh))
    return tuple(out)


def _factors(tensors: tuple[Dims, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(n for dims in tensors for d in dims for n in d))


def _groups_text(over: Sequence[tuple[str, ...]]) -> str:
    return f"({', '.join(map(_group_text, over))})"


def _shape(dims: Dims, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple([sizes[d[0]] if len(d) == 1 else math.prod(sizes[n] for n in d) for d in dims])


def _check_shapes(rule: FactorRule, sizes: Mapping[str, int], operands: Sequence[TensorType], op: str) -> None:
    if len(operands) != len(rule.operands) or not operands:
        raise TypingError(f"{op}: {len(operands)} operands; the rule {rule} takes {len(rule.operands)}")
    for k, (dims, t) in enumerate(zip(rule.operands, operands, strict=True)):
        legal = _shape(dims, sizes)
        if t.shape != legal:
            raise TypingError(f"{op}: operand {k}, {t}, has the shape {t.shape}; the rule {rule} takes {legal}")
        if t.mesh != operands[0].mesh:
            meshes = f"operand 0 is on the mesh {operands[0].mesh}, operand {k} on {t.mesh}"
            raise TypingError(f"{op}: {meshes}; legal is one mesh")


def _parts(
    sizes: Mapping[str, int], t: TensorType, dim: int, factors: tuple[str, ...], where: str
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the factors of a dim that has several, major to minor, each with the atoms of its axes; rule 4."""
    if not t.even[dim]:
        raise LayoutError(
            f"{where} is unevenly tiled over {_group_text(t.layout.dims[dim])}; legal to split is an even dim"
        )
    left = list(t.atoms[dim])
    for name in factors:
        # A factor takes axes as long as they divide what is left of it: only when it is full comes the next one's turn.
        rest, taken = sizes[name], list[int]()
        while left and rest % t.mesh.atoms[left[0]].size == 0:
            rest //= t.mesh.atoms[left[0]].size
            taken.append(left.pop(0))
        if left and rest > 1:
            raise LayoutError(
                f"{where} is over {_group_text(t.layout.dims[dim])}, which does not fill its factor {name}="
                f"{sizes[name]} before the minor ones; legal are axes that multiply to it, then others"
            )
        yield name, tuple(taken)


def _meet(factor: Factor, held: list[_Held], operands: Sequence[TensorType], op: str, over: tuple[str, ...]) -> _Held:
    """Return the one way in which a factor is sharded in the operands, or what is said of it; rules 1 and 6."""
    if not held:
        return _Held(-1, -1, operands[0].mesh.expand(over), over)
    first = held[0]
    if factor.kind == "replicate":
        for p in held:
            if p.atoms:
                raise LayoutError(
                    f"{op}: dim {p.dim} of operand {p.operand}, {operands[p.operand]}, is over {_group_text(p.names)}, "
                    f"but its factor {factor.name}={factor.size} may not be sharded; legal is no axes"
                )
        return first
    for p in held[1:]:
        if p.atoms != first.atoms:
            legal = " or ".join(_group_text(c) for c in _candidates(held, operands))
            raise LayoutError(
                f"{op}: the factor {factor.name}={factor.size} does not meet: dim {first.dim} of operand "
                f"{first.operand}, {operands[first.operand]}, is over {_group_text(first.names)}, but dim {p.dim} of "
                f"operand {p.operand}, {operands[p.operand]}, is over {_group_text(p.names)}; legal on both: {legal}"
            )
    return (
        first if len(held) == 1 else max(held, key=lambda p: len(p.names))
    )  # axes of size 1 that only one operand names are kept


def _candidates(held: list[_Held], operands: Sequence[TensorType]) -> list[tuple[str, ...]]:
    """The ways to shard a factor, of those that the operands have, that every operand has room for; and no axes."""
    found: list[tuple[str, ...]] = []
    for p in held:
        room = all(
            not set(p.atoms)
            & (set(operands[q.operand].mesh.expand(operands[q.operand].layout.used_axes)) - set(q.atoms))
            and sum(r.operand == q.operand for r in held) == 1
            for q in held
        )
        if p.atoms and room and p.names not in found:
            found.append(p.names)
    return [*found, ()]


def _check_once(carried: dict[str, _Held], mesh: Mesh, op: str) -> None:
    """Rule 2: an axis serves at most one factor."""
    sharded = [(name, held) for name, held in carried.items() if held.atoms]
    for (x, p), (y, q) in itertools.combinations(sharded, 2):
        both = set(p.atoms) & set(q.atoms)
        if both:
            axes = axes_text(mesh.fold(tuple(sorted(both))))
            raise LayoutError(
                f"{op}: the axis {axes} serves the factors {x} ({_place(p)}) and {y} ({_place(q)}); an axis serves at "
                "most one factor"
            )


def _place(held: _Held) -> str:
    return "over" if held.operand < 0 else f"operand {held.operand}, dim {held.dim}"


def _partial(
    rule: FactorRule, carried: dict[str, _Held], operands: Sequence[TensorType], linear: Passes, op: str
) -> tuple[set[int], str | None]:
    """Return the atoms that the results are partial over, and the one reduction; rules 2 and 3."""
    mesh = operands[0].mesh
    held: dict[int, set[int]] = {}  # atom -> the operands that are partial over it
    kinds: dict[str, str] = {}  # reduction -> who has it
    for k, t in enumerate(operands):
        for a in mesh.expand(t.layout.partial):
            held.setdefault(a, set()).add(k)
            kinds.setdefault(t.layout.reduction or "sum", f"operand {k}, {t}")
    for name, p in carried.items() if held else ():
        both = set(p.atoms) & set(held)
        if both:
            k = min(held[min(both)])
            axes = axes_text(mesh.fold(tuple(sorted(both))))
            raise LayoutError(
                f"{op}: the axis {axes} serves the factor {name} ({_place(p)}) and is partial in operand {k}, "
                f"{operands[k]}; legal is one of the two"
            )
    for f in rule.factors:
        if f.kind == "reduce" and carried[f.name].atoms:
            kinds.setdefault(f.reduction or "sum", f"the sharded factor {f.name}")
    if len(kinds) > 1:
        shown = " and ".join(f"{kind} ({who})" for kind, who in kinds.items())
        raise LayoutError(f"{op}: the result would be partial with {shown}; legal is one reduction")
    reduction = next(iter(kinds), None)
    for a, chosen in sorted(held.items()):
        if not linear(frozenset(chosen), reduction or "sum"):
            _refuse_partial(a, chosen, reduction or "sum", held, operands, linear, op)
    atoms = set(held)
    for f in rule.factors:
        if f.kind == "reduce":
            atoms |= set(carried[f.name].atoms)
    return atoms, reduction


def _refuse_partial(
    atom: int,
    chosen: set[int],
    reduction: str,
    held: dict[int, set[int]],
    operands: Sequence[TensorType],
    linear: Passes,
    op: str,
) -> None:
    """Raise the error of rule 3; it names all atoms that the same operands are partial over, and what would pass."""
    mesh = operands[0].mesh
    alike = tuple(sorted(a for a, who in held.items() if who == chosen and a >= atom))
    shown = " and ".join(f"operand {k}, {operands[k]}," for k in sorted(chosen))
    count = len(operands)
    sizes = (1, count) if count > MANY else range(1, min(count, MOST_OPERANDS) + 1)
    legal = [
        "all operands" if len(s) == count > MANY else " and ".join(f"operand {k}" for k in s)
        for size in sizes
        for s in itertools.combinations(range(count), size)
        if linear(frozenset(s), reduction)
    ][:MOST_OFFERED]
    verb = "is" if len(chosen) == 1 else "are"
    raise LayoutError(
        f"{op}: exactly {shown} {verb} partial ({reduction}) over {axes_text(mesh.fold(alike))}, and the op does not "
        f"pass that on; legal as partial there: {' or '.join(['no operand', *legal])}"
    )


def _root(operands: Sequence[TensorType], op: str) -> tuple[str, ...]:
    """Return the root axes of the results, without those of size 1; rule 5."""
    first = operands[0]
    for k, t in enumerate(operands[1:], 1):
        if set(t.mesh.expand(t.layout.root)) != set(t.mesh.expand(first.layout.root)):
            shown = [suffix_text((), None, u.layout.root) or "no root axes" for u in (first, t)]
            raise LayoutError(
                f"{op}: operand 0, {first}, has {shown[0]}, operand {k}, {t}, {shown[1]}; legal are equal root axes"
            )
    return tuple(n for n in first.layout.root if first.mesh.span(n).atoms)


def _result_dims(
    sizes: Mapping[str, int], dims: Dims, carried: dict[str, _Held], mesh: Mesh, op: str
) -> tuple[tuple[str, ...], ...]:
    """Put the axes of each result dim's factors together; rule 4. A name of size 1 is kept where it first occurs."""
    out: list[tuple[str, ...]] = []
    seen: set[str] = set()
    for d, factors in enumerate(dims):
        names: list[str] = []
        full = True
        for n in factors:
            p, size = carried[n], sizes[n]
            # Merged dims are one dim in row-major order: tiles of a minor factor are runs of it only under whole
            # coordinates of the major ones.
            if len(factors) > 1:
                product = math.prod(mesh.atoms[a].size for a in p.atoms)
                if p.atoms and (size % product or not full):
                    why = "unevenly" if size % product else "under a major factor that is not fully sharded"
                    raise LayoutError(
                        f"{op}: dim {d} of the result merges the factors {', '.join(factors)}, of which {n}={size} is "
                        f"cut over {_group_text(p.names)} {why}; legal are even tilings, minor factors under full "
                        "major ones"
                    )
                full = full and product == size
            names += [x for x in p.names if mesh.span(x).atoms or x not in seen]
            seen.update(p.names)
        out.append(tuple(names))
    return tuple(out)


def _group_text(names: tuple[str, ...]) -> str:
    return axes_text(names) if names else "no axes"
