"""From parallel styles to tables: which dim of a parameter is what, the ops that take it say.

A factor of a parameter that results have and no other operand is an output feature; one that another operand has and
no result is an input feature; one that nothing else has is a row of a table. Of a vector that is added or multiplied
its only dim counts as the output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import NamedTuple

from shardplan.core.dim_names import links
from shardplan.core.nested import as_nested
from shardplan.core.program import Program
from shardplan.errors import LayoutError, excerpt
from shardplan.strategy.held_cuts import HEADS, RATIO
from shardplan.strategy.model import Model
from shardplan.strategy.parameter import Parameter
from shardplan.strategy.partition.parallel_styles import COLUMN, ROW, WHOLE, ParallelStyle, ParallelStyles
from shardplan.strategy.partition.tables import LAYER, Axes, Layouts, TableLine, join_lines
from shardplan.strategy.strategy import Strategy

AskedLayouts = Layouts | ParallelStyles | str | None


class ParameterDims(NamedTuple):
    """Of a parameter the names of its dims that are output features, input features, and rows of a table."""

    outputs: tuple[str, ...]
    inputs: tuple[str, ...]
    rows: tuple[str, ...]
    along: tuple[str, ...]  # of what it is multiplied with or added to

    def cut(self, kind: str) -> tuple[str, ...]:
        """Return the dims that a style cuts, the first being the major one."""
        if kind == WHOLE:
            return ()
        if kind == COLUMN:
            return self.outputs or self.along
        return self.rows or (self.inputs if kind == ROW else self.outputs)


def read_layouts(asked: AskedLayouts, model: Model, strategy: Strategy) -> Layouts:
    """Return tables as they are asked for: themselves, their text, styles, or by default the strategy's own."""
    if isinstance(asked, ParallelStyles):
        return style_layouts(asked, model, strategy)
    return Layouts.parse(asked) if isinstance(asked, str) else asked or strategy.layouts(model)


def style_layouts(styles: ParallelStyles, model: Model, strategy: Strategy) -> Layouts:
    """Return the strategy's tables with what styles say of parameters in the place of its own lines.

    Raises `LayoutError` for a pattern that no parameter has, one that only some rows of a stack have, a parameter
    without a dim of that kind, and an axis that there is not.
    """
    tables, axes = strategy.layouts(model), strategy.axes(model)
    roles = parameter_dims(model.forward or model.program, model)
    said: dict[str, ParallelStyle] = {}
    for style in styles.styles:
        for pattern in style.patterns:
            found = [name for name, p in model.parameters.items() if _matches(name, p, pattern)]
            if not found:
                raise LayoutError(
                    f"{style}: no parameter is called {excerpt(pattern)}; legal are {', '.join(model.parameters)}"
                )
            said |= dict.fromkeys(found, style)
    held: list[TableLine] = []
    served: dict[str, dict[str, None]] = {}
    for name, style in said.items():
        mine = _axes_of(style, axes)
        others = next((line for line in tables.held if line.matches(name)), TableLine(()))
        kept = ((dim, tuple(a for a in cut if a not in mine)) for dim, cut in others.dims)
        cuts = tuple(_cuts(style, name, roles[name], mine))
        held.append(TableLine((name,), (*(one for one in kept if one[1]), *cuts), others.partial))
        for dim, cut in cuts:
            for axis in cut:
                served.setdefault(axis, {})[dim] = None
    left = (replace(line, patterns=tuple(n for n in model.parameters if line.matches(n) and n not in said))
            for line in tables.held)  # fmt: skip
    serve = tuple(
        (a, _serve_more(groups, served.get(a, {}), styles.sequence and a in HEADS)) for a, groups in tables.serve
    )
    return Layouts(serve, tables.stored, join_lines([*held, *(line for line in left if line.patterns)]))


def parameter_dims(program: Program, model: Model) -> dict[str, ParameterDims]:
    """Return of every parameter which of its dims are what, by the first op that tells."""
    found = {name: ParameterDims((), (), (), ()) for name in model.parameters}
    for name, one in _uses(program, {name: (name, model.dims[name]) for name in found}):
        now = found[name]
        found[name] = ParameterDims(*(a or b for a, b in zip(now, one, strict=True)))
    return found


def _uses(program: Program, names: Mapping[str, tuple[str, tuple[str, ...]]]) -> Iterator[tuple[str, ParameterDims]]:
    """Yield what ops say of the dims of parameters, by the names of their values in a program."""
    known = dict(names)
    for step in program.steps:
        nested = as_nested(step.op)
        if nested is not None:
            inner = dict[str, tuple[str, tuple[str, ...]]]()
            rows = len(step.operands) - nested.cut
            for k, (operand, (value, _)) in enumerate(zip(step.operands, nested.body.inputs, strict=True)):
                if operand in known:
                    name, dims = known[operand]
                    inner[value] = name, dims[1:] if k >= rows else dims
            yield from _uses(nested.body, inner)
            continue
        mine = [k for k, o in enumerate(step.operands) if o in known]
        linked = links(step.op, tuple(program.types[o] for o in step.operands)) if mine else None
        # What reads a parameter alone and keeps its dims, as a cast does, is that parameter in another form.
        if linked is not None and len(step.operands) == 1 and linked.results == linked.operands:
            known[step.results[0]] = known[step.operands[0]]
            continue
        for k in mine if linked is not None else ():
            assert linked is not None
            name, dims = known[step.operands[k]]
            results = {f for one in linked.results for dim in one for f in dim}
            others = {f for j, one in enumerate(linked.operands) if j != k for dim in one for f in dim}
            kinds: dict[tuple[bool, bool], list[str]] = {}
            for dim, factors in zip(dims, linked.operands[k], strict=True):
                if dim != LAYER and factors:
                    kinds.setdefault((factors[0] in results, factors[0] in others), []).append(dim)
            outputs, inputs, rows_, along = (
                tuple(kinds.get(key, ())) for key in ((True, False), (False, True), (False, False), (True, True))
            )
            yield name, ParameterDims(outputs if inputs or rows_ else (), inputs, rows_, along or outputs)


def _matches(name: str, p: Parameter, pattern: str) -> bool:
    """Say whether a parameter has a name of a pattern; raises `LayoutError` where only some of its layers do."""
    if _is_like(name, pattern):
        return True
    files = [file for _, file in p.names()]
    found = [_is_like(file, pattern) or _is_like(file.rpartition(".")[0], pattern) for file in files]
    if any(found) and not all(found):
        odd = files[found.index(False)]
        raise LayoutError(f"layouts: {pattern!r} is {files[found.index(True)]} of {name}, and not {odd}; legal are all")
    return all(found)


def _is_like(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _axes_of(style: ParallelStyle, axes: Mapping[str, int]) -> Axes:
    """The axes of a mesh that a style means."""
    found = tuple(a for a in axes if a in (*HEADS, *RATIO)) if style.axis == "tensor" else (style.axis,)
    for axis in found:
        if axis not in axes:
            raise LayoutError(f"{style}: there is no axis {excerpt(axis)}; legal are {', '.join(axes) or 'none'}")
    return found


def _cuts(style: ParallelStyle, name: str, dims: ParameterDims, axes: Axes) -> Iterator[tuple[str, Axes]]:
    """How a style cuts a parameter over axes."""
    over = dims.cut(style.kind)
    if style.kind == ROW and not (dims.inputs or dims.rows):
        return  # a bias, of what is summed over the axis
    if not over and style.kind != WHOLE:
        raise LayoutError(f"{style}: {name} has no such dim by any op that takes it; legal is a line of held")
    if "ratio" in over and over[0] == "kv_heads":
        parts = ((dim, tuple(a for a in axes if a in these)) for dim, these in (("kv_heads", HEADS), ("ratio", RATIO)))
        yield from ((dim, cut) for dim, cut in parts if cut)
    elif over and over[0] == "kv_heads":
        if cut := tuple(a for a in axes if a in HEADS):
            yield "kv_heads", cut
    elif over and axes:
        yield over[0], axes


def _serve_more(
    groups: tuple[tuple[str, ...], ...], dims: Mapping[str, None], sequence: bool
) -> tuple[tuple[str, ...], ...]:
    """What an axis serves with dims more."""
    every = {name for group in groups for name in group}
    more = tuple(dim for dim in dims if dim not in every)
    first, *rest = groups or ((),)
    out = ((*first, *more), *rest) if first or more else ()
    return (*out, ("sequence",)) if sequence and "sequence" not in every else out
