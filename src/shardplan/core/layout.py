"""`Layout`: per tensor dim an ordered tuple of axes (major to minor), the partial axes, the root axes.

Invariants: each axis is used at most once over dims, partial and root; all partial axes carry one reduction; axes not
named replicate. Complete runs of sub-axes are folded into their parent, so equal layouts are equal values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shardplan.core import validation
from shardplan.core.box_table import BoxTable
from shardplan.core.dtypes import COMBINE
from shardplan.core.mesh import Mesh
from shardplan.core.notation import Scanner, axes_text
from shardplan.errors import LayoutError, excerpt

REDUCTIONS = tuple(COMBINE)
Spec = Sequence[str | Sequence[str] | None]


@dataclass(frozen=True, slots=True)
class Layout:
    """Which axes cut which dim: what a JAX `PartitionSpec` says, plus partial and root axes; or a table of boxes.

    A layout with a table names no axes.

    >>> str(Layout((("data",), ("tensor", "pipe"), ())))
    '[@data, @(tensor,pipe), _]'
    """

    dims: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...] = ()
    reduction: str | None = None
    root: tuple[str, ...] = ()
    boxes: BoxTable | None = field(default=None, repr=False)  # most layouts have none

    def __post_init__(self) -> None:
        """Refuse what is no tuple of names, and partial axes without a reduction."""
        lists = (*self.dims, self.partial, self.root) if isinstance(self.dims, tuple) else (self.dims,)  # pyright: ignore[reportUnnecessaryIsInstance]
        for found in lists:
            if not isinstance(found, tuple) or not all(isinstance(name, str) for name in found):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise LayoutError(f"a layout has {excerpt(found)} where a tuple of names of axes is legal")
        known = isinstance(self.reduction, str) and self.reduction in REDUCTIONS
        if not known and (self.partial or self.reduction is not None):
            raise LayoutError(
                f"the partial axes {excerpt(self.partial)} have the reduction {excerpt(self.reduction)}; "
                f"legal are {', '.join(REDUCTIONS)}"
            )
        if not self.partial:  # of nothing there is no reduction: equal layouts are equal values
            object.__setattr__(self, "reduction", None)
        if self.boxes is not None and self.used_axes:
            raise LayoutError(f"{self} lies in a table of boxes, so it names no axes")

    @property
    def spec(self) -> tuple[str | tuple[str, ...] | None, ...]:
        """The dims as a JAX `PartitionSpec` takes them: None, one name, or a tuple of names."""
        return tuple(None if not d else d[0] if len(d) == 1 else d for d in self.dims)

    @property
    def used_axes(self) -> tuple[str, ...]:
        """Every axis named, dims first."""
        return (*(a for d in self.dims for a in d), *self.partial, *self.root)

    def suffix(self) -> str:
        """Return the text of the partial and root axes, `{+a,+b}{root:c}` or empty, or that of a table of boxes."""
        return suffix_text(self.partial, self.reduction, self.root) + (f"{{{self.boxes}}}" if self.boxes else "")

    def __str__(self) -> str:
        """Return `[@data, _]{+seq}`."""
        return f"[{', '.join('@' + axes_text(d) if d else '_' for d in self.dims)}]{self.suffix()}"

    @staticmethod
    def parse(text: str) -> Layout:
        """Read `[@data, @(tensor,pipe), _]{+seq}`; names are checked when a type is made."""
        scanner = Scanner(text)
        layout = scan_layout(scanner)
        scanner.finish("the layout")
        return layout


def suffix_text(partial: tuple[str, ...], reduction: str | None, root: tuple[str, ...]) -> str:
    """Return `{+a,+b}`, `{max:a,b}`, `{root:c}` or a concatenation."""
    text = ""
    if partial:
        text = (
            "{" + ",".join(f"+{a}" for a in partial) + "}"
            if reduction == "sum"
            else f"{{{reduction}:{','.join(partial)}}}"
        )
    return text + (f"{{root:{','.join(root)}}}" if root else "")


def scan_layout(scanner: Scanner) -> Layout:
    """Read a layout at the scanner's position."""
    dims: list[tuple[str, ...]] = []
    scanner.expect("[", "a layout")
    for _ in scanner.items("]", "a layout"):
        if scanner.take("@"):
            dims.append(scanner.names("an axis after '@'"))
        elif scanner.take("_") or scanner.peek(",") or scanner.peek("]"):
            dims.append(())
        else:
            raise scanner.error("expected '@axis', '_' or ']' in a layout")
    partial, reduction, root = scan_suffix(scanner)
    return Layout(tuple(dims), partial, reduction, root)


def scan_suffix(scanner: Scanner) -> tuple[tuple[str, ...], str | None, tuple[str, ...]]:
    """Read `{+a,+b}`, `{max:a}`, `{U:a}`, `{root:b}` in any number, at the scanner's position."""
    partial: list[str] = []
    root: list[str] = []
    reduction: str | None = None
    while scanner.take("{"):
        if scanner.peek("+"):
            kind = "sum"
            while True:
                scanner.expect("+", "partial axes")
                partial.append(scanner.name("an axis after '+'"))
                if not scanner.take(","):
                    break
        else:
            start = scanner.position
            kind = scanner.name("a reduction, 'root' or '+axis'")
            if kind == "U":
                kind = "sum"
            if kind not in (*REDUCTIONS, "root"):
                scanner.position = start
                raise scanner.error(f"unknown reduction {kind!r}; legal are {', '.join(REDUCTIONS)}, root")
            scanner.expect(":", "partial or root axes")
            target = root if kind == "root" else partial
            while True:
                target.append(scanner.name("an axis"))
                if not scanner.take(","):
                    break
        if kind != "root":
            if reduction not in (None, kind):
                raise scanner.error(
                    f"one type has the reductions {reduction} and {kind}; all its partial axes carry one"
                )
            reduction = kind
        scanner.expect("}", "partial or root axes")
    return tuple(partial), reduction, tuple(root)


def make_layout(
    ndim: int,
    spec: Layout | Spec | BoxTable,
    mesh: Mesh,
    partial: Mapping[str, str] | None = None,
    root: Iterable[str] = (),
) -> Layout:
    """Return the canonical layout of `spec` on `mesh`: names checked, complete runs of sub-axes folded.

    Raises `LayoutError` for an unknown axis, an axis used twice, mixed reductions, or more entries than dims.
    """
    if isinstance(spec, BoxTable):
        spec = Layout(((),) * ndim, boxes=spec)
    if isinstance(spec, Layout):
        if partial or root:
            raise LayoutError(
                f"the layout {spec} says itself what is partial or root; give no partial= or root= with it"
            )
        dims, reduction = spec.dims, spec.reduction
        partials, roots = spec.partial, spec.root
    else:
        entries = validation.items("the layout", spec, "entries, one a dim: None, an axis, or a tuple of axes")
        dims = tuple(
            () if d is None else validation.names(f"entry {k} of the layout", d) for k, d in enumerate(entries)
        )
        partial = {} if partial is None else validation.table("partial", partial, "names of axes to a reduction")
        kinds = {validation.text("a reduction", kind) for kind in partial.values()}
        for kind in kinds:
            if kind not in REDUCTIONS:
                raise LayoutError(f"unknown reduction {kind!r}; legal are {', '.join(REDUCTIONS)}")
        if len(kinds) > 1:
            raise LayoutError(f"one type has the reductions {', '.join(sorted(kinds))}; all its partial axes carry one")
        reduction = next(iter(kinds), None)
        partials, roots = (
            validation.names("partial", tuple(partial)),
            tuple(validation.items("root", root, "names of axes")),
        )
    if len(dims) > ndim:
        raise LayoutError(f"the layout {_loose(dims)} names {len(dims)} dims, but the tensor has {ndim}")
    dims += ((),) * (ndim - len(dims))
    layout = Layout(
        tuple(_fold(mesh, d) for d in dims),
        _fold_set(mesh, partials),
        reduction if partials else None,
        _fold_set(mesh, roots),
        spec.boxes if isinstance(spec, Layout) else None,
    )
    _check_once(mesh, layout)
    return layout


def _loose(dims: tuple[tuple[str, ...], ...]) -> str:
    return "(" + ", ".join(axes_text(d) if d else "None" for d in dims) + ")"


def _fold(mesh: Mesh, names: tuple[str, ...]) -> tuple[str, ...]:
    """The names of a dim with complete runs of sub-axes folded; a name of size 1 has no atoms and stays where it is."""
    if all(mesh.span(n).whole for n in names):
        return names
    out: list[str] = []
    run: list[int] = []
    for name in names:
        span = mesh.span(name)
        if span.atoms:
            run.extend(span.atoms)
        else:
            out.extend(mesh.fold(tuple(run)))
            run = []
            out.append(name)
    return (*out, *mesh.fold(tuple(run)))


def _fold_set(mesh: Mesh, names: tuple[str, ...]) -> tuple[str, ...]:
    """The names of partial or root axes in one order, folded: they are a set, and equal sets are equal values."""
    ones = tuple(n for n in names if not mesh.span(n).atoms)
    atoms = mesh.expand(names)
    if len(set(atoms)) != len(atoms) or len(set(ones)) != len(ones):
        return names  # reported by _check_once
    return (*mesh.fold(tuple(sorted(atoms))), *sorted(ones))


def _check_once(mesh: Mesh, layout: Layout) -> None:
    seen: dict[int | str, str] = {}
    for name in layout.used_axes:
        for key in mesh.span(name).atoms or (name,):  # a name of size 1 has no atoms, and may not stand twice either
            if key in seen:
                other = seen[key]
                twice = f"axis {name!r} is used twice" if other == name else f"axes {other!r} and {name!r} overlap"
                raise LayoutError(f"{twice} in {layout}; each axis is used at most once in a type")
            seen[key] = name
