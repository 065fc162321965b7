"""`Layouts`: what a strategy says of a model's names, in three tables.

- *serve*: by axis the dims that it serves, in order of preference; dims in brackets are alike. In an op the axis serves
  the first of them that the op has and its held operands allow; else the op passes it as a partial sum, or it does
  nothing there. `none` serves nothing. An axis without a line is free: any dim, a partial sum, or nothing, by price.
- *stored*: how inputs lie between programs: `batch@data`, `{+data}`. `free` stands for the first dim that the axes
  divide, minor to what is held; where they divide none, for the largest.
- *held*: how parameters lie where they are operands. What stored has more is gathered at the use, and their gradients
  are reduced into it.

Patterns are those of file names; of several lines the first that matches a name counts, and `check` refuses another
that says otherwise of it.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from shardplan.core.layout import Layout
from shardplan.core.mesh import Mesh
from shardplan.core.notation import axes_text
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError, ParseError, excerpt
from shardplan.strategy.partition.parallel_styles import ParallelStyles

FREE, NONE, LAYER = "free", "none", "layer"
Axes = tuple[str, ...]
Dims = Mapping[str, Sequence[str]]  # by name of a value those of its dims
_WORD = re.compile(r"\[[^\[\]]*\]|\w+")
_PLACE = re.compile(r"(\w+)@(?:\(([\w\s,]+)\)|(\w+))|\{\+([\w+,\s]+)\}")
_TITLES = ("serve", "stored", "held")


@dataclass(frozen=True, slots=True)
class TableLine:
    """How the values of some names lie: by dim its axes, major to minor, and what they are partial sums over."""

    patterns: tuple[str, ...]
    dims: tuple[tuple[str, Axes], ...] = ()
    partial: Axes = ()

    def matches(self, name: str) -> bool:
        """Say whether it counts for a name."""
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)

    @property
    def axes(self) -> frozenset[str]:
        """The axes that it cuts dims over."""
        return frozenset(axis for _, axes in self.dims for axis in axes)

    def __str__(self) -> str:
        """Return the line of a table."""
        words = [f"{dim}@{axes_text(axes)}" for dim, axes in self.dims]
        words += ["{" + ",".join(f"+{a}" for a in self.partial) + "}"] if self.partial else []
        return f"{', '.join(self.patterns)}: {', '.join(words) or 'whole'}"


@dataclass(frozen=True, slots=True)
class Layouts:
    """The three tables; text that parses back.

    >>> print(Layouts.parse('''
    ... serve
    ...   data: batch > free
    ...   tensor: [kv_heads, ffn] > sequence
    ... stored
    ...   tokens: batch@data
    ... held
    ...   layers.up, layers.down: ffn@tensor
    ... '''))
    serve
      data: batch > free
      tensor: [kv_heads, ffn] > sequence
    stored
      tokens: batch@data
    held
      layers.up, layers.down: ffn@tensor
    """

    serve: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...]
    stored: tuple[TableLine, ...] = ()
    held: tuple[TableLine, ...] = ()

    def __str__(self) -> str:
        """Return the tables."""
        serve = [f"{axis}: {served_text(groups)}" for axis, groups in self.serve]
        tables = zip(_TITLES, (serve, self.stored, self.held), strict=True)
        return "\n".join("\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in tables)

    @staticmethod
    def column(*patterns: str, axis: str = "tensor") -> ParallelStyles:
        """Say of parameters that an axis cuts their output features: `Layouts.column("*.gate", "*.up").row("*.down")`.

        `partition` takes it as `layouts`; what it does not name is as the strategy has it.
        """
        return ParallelStyles().column(*patterns, axis=axis)

    @staticmethod
    def row(*patterns: str, axis: str = "tensor") -> ParallelStyles:
        """Say of parameters that an axis cuts their input features."""
        return ParallelStyles().row(*patterns, axis=axis)

    @staticmethod
    def vocab(*patterns: str, axis: str = "tensor") -> ParallelStyles:
        """Say of tables that an axis cuts their rows, and of heads that it cuts their classes."""
        return ParallelStyles().vocab(*patterns, axis=axis)

    @staticmethod
    def of_torch(plan: Mapping[str, Any], axis: str = "tensor") -> ParallelStyles:
        """Read a plan of torch's `parallelize_module`, or torchtitan's: see `ParallelStyles.of_torch`."""
        return ParallelStyles.of_torch(plan, axis)

    @staticmethod
    def parse(text: str) -> Layouts:
        """Read the text of `str`; raises `ParseError` naming the line."""
        found: dict[str, list[tuple[str, str]]] = {title: [] for title in _TITLES}
        title = ""
        for number, raw in enumerate(text.splitlines(), 1):
            line = raw.partition("#")[0].strip()
            if line in found:
                title = line
            elif line:
                names, colon, said = line.partition(":")
                if not title or not colon or not said.strip():
                    legal = "serve, stored or held, and below it lines such as 'tokens: batch@data'"
                    raise ParseError(f"line {number} of layouts, {raw.strip()!r}; legal are {legal}")
                found[title].append((names.strip(), said.strip()))
        serve = tuple((axis, _groups(axis, said)) for axis, said in found["serve"])
        stored, held = (tuple(_line(names, said) for names, said in found[title]) for title in _TITLES[1:])
        return Layouts(serve, stored, held)

    def check(self, stored: Dims, held: Dims, served: Collection[str], axes: Collection[str]) -> None:
        """Refuse what says nothing of a model on a mesh.

        That is a pattern without a name among those `stored` or `held`, a dim that no value of its line has, in serve
        one that is not among `served`, and an axis that is not among `axes`; also an axis that has two lines in serve,
        and a name of which two lines say different layouts.

        Raises `LayoutError` naming the line.
        """
        several = [axis for axis, _ in self.serve]
        for k, (axis, groups) in enumerate(self.serve):
            line = f"serve, {axis}: {served_text(groups)}"
            if axis in several[:k]:
                raise LayoutError(f"{line}: a second line of {axis}; legal is one")
            _known(line, "axis", (axis,), axes)
            _known(line, "dim", (name for group in groups for name in group), {*served, FREE})
        for title, lines, names in ((_TITLES[1], self.stored, stored), (_TITLES[2], self.held, held)):
            for line in lines:
                said = f"{title}, {line}"
                for pattern in line.patterns:
                    if not any(fnmatchcase(name, pattern) for name in names):
                        raise LayoutError(f"{said}: nothing is called {excerpt(pattern)}; legal are {', '.join(names)}")
                of = dict.fromkeys(dim for name, dims in names.items() if line.matches(name) for dim in dims)
                _known(said, "dim", (dim for dim, _ in line.dims), [*of, *([FREE] if names is stored else [])])
                _known(said, "axis", (a for mine in (line.partial, *(cut for _, cut in line.dims)) for a in mine), axes)
            for name in names:
                mine = [line for line in lines if line.matches(name)]
                for first, other in itertools.product(mine[:1], mine[1:]):
                    if (other.dims, other.partial) != (first.dims, first.partial):
                        raise LayoutError(
                            f"{title}: of {name} two lines say different layouts, '{first}' and '{other}'; legal is one"
                        )

    def held_layout(self, name: str, dims: Sequence[str], mesh: Mesh) -> Layout:
        """Return how a value of these dims lies where it is an operand."""
        return _layout(_first(self.held, name), dims, None, mesh, Layout(((),) * len(dims)))

    def stored_type(
        self,
        name: str,
        dims: Sequence[str],
        t: TensorType,
        mesh: Mesh,
        held: Layout,
        of: Sequence[int] | None = None,
    ) -> TensorType:
        """Return how a value of these dims, of the dtype and shape of `t`, lies between programs.

        What is kept of a parameter of the shape `of` lies as that would, but for dims that it has summed up.
        """
        lies = _layout(_first(self.stored, name), dims, of or t.shape, mesh, held)
        return t.with_layout(drop_summed(lies, t, of or t.shape), mesh)


def drop_summed(layout: Layout, t: TensorType, of: Sequence[int]) -> Layout:
    """Return a layout of the shape `of` without what it says of dims that `t` has summed up to 1."""
    dims = tuple(axes if n == m else () for axes, n, m in zip(layout.dims, t.shape, of, strict=True))
    return Layout(dims, layout.partial, layout.reduction)


def update_layout(kept: Sequence[str], types: Mapping[str, TensorType]) -> Layout:
    """Return how the update of a parameter and its state lies: as that, of each dim as what has not summed it up."""
    lie = [types[n].layout.dims for n in kept[1:] or kept]
    return Layout(tuple(max(cuts, key=len) for cuts in zip(*lie, strict=True)))


def _known(line: str, what: str, said: Iterable[str], legal: Collection[str]) -> None:
    for word in said:
        if word not in legal:
            raise LayoutError(f"{line}: there is no {what} {excerpt(word)}; legal are {', '.join(legal) or 'none'}")


def _first(lines: Sequence[TableLine], name: str) -> TableLine:
    return next((line for line in lines if line.matches(name)), TableLine(()))


def _layout(line: TableLine, dims: Sequence[str], shape: Sequence[int] | None, mesh: Mesh, held: Layout) -> Layout:
    """The layout that a line says; a dim that the value does not have says nothing."""
    out = [list(axes) for axes in held.dims]
    for dim, axes in line.dims:
        if dim == FREE and shape is not None:
            chosen = _free(shape, dims, axes, mesh, out)
            if chosen is not None:
                out[chosen] += axes
        elif dim in dims:
            d = dims.index(dim)
            out[d] += [a for a in axes if a not in out[d]]
    found = tuple(map(tuple, out))
    used = {a for axes in found for a in axes}
    partial = tuple(a for a in line.partial if a not in used)
    return Layout(found, partial, "sum" if partial else None)


def _free(
    shape: Sequence[int], dims: Sequence[str], axes: Axes, mesh: Mesh, held: Sequence[Sequence[str]]
) -> int | None:
    """The first dim that the axes divide, minor to what is held; else the largest that is longer than 1."""
    places = [d for d, name in enumerate(dims) if name != LAYER and shape[d] > 1]
    cut = {d: math.prod(mesh.span(a).size for a in (*held[d], *axes)) for d in places}
    even = [d for d in places if shape[d] % cut[d] == 0]
    return even[0] if even else max(places, key=lambda d: shape[d], default=None)


def _group(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"[{', '.join(names)}]"


def served_text(groups: Iterable[tuple[str, ...]]) -> str:
    """Return what an axis serves, as a line of serve has it."""
    return " > ".join(map(_group, groups)) or NONE


def _groups(axis: str, said: str) -> tuple[tuple[str, ...], ...]:
    if said == NONE:
        return ()
    found: list[tuple[str, ...]] = []
    for word in said.split(">"):
        match = _WORD.fullmatch(word.strip())
        names = tuple(n.strip() for n in word.strip().strip("[]").split(","))
        if match is None or not all(n.isidentifier() for n in names):
            raise ParseError(f"serve of {axis}: {said!r}; legal are dims such as '[kv_heads, ffn] > sequence'")
        found.append(names)
    return tuple(found)


def _line(names: str, said: str) -> TableLine:
    patterns = tuple(n.strip() for n in names.split(","))
    if said == "whole":
        return TableLine(patterns)
    dims: list[tuple[str, Axes]] = []
    partial: list[str] = []
    rest = said
    while rest:
        match = _PLACE.match(rest)
        if match is None:
            raise ParseError(
                f"{names}: {said!r}; legal are 'whole', or dims such as 'batch@data, free@(a,b), {{+data}}'"
            )
        dim, several, one, sums = match.groups()
        words = [w.strip().removeprefix("+") for w in (several or one or sums).split(",")]
        if not all(w.isidentifier() for w in words):
            raise ParseError(f"{names}: {said!r}; legal are names of axes such as 'free@(a,b), {{+a,+b}}'")
        if dim:
            dims.append((dim, tuple(words)))
        else:
            partial += words
        rest = rest[match.end() :].lstrip().removeprefix(",").lstrip()
    return TableLine(patterns, tuple(dims), tuple(partial))


def join_lines(lines: Iterable[TableLine]) -> tuple[TableLine, ...]:
    """Return lines of which those that say the same are one."""
    found: dict[tuple[object, object], list[str]] = {}
    for line in lines:
        found.setdefault((line.dims, line.partial), []).extend(line.patterns)
    return tuple(TableLine(tuple(names), dims, partial) for (dims, partial), names in found.items())  # type: ignore[arg-type]
