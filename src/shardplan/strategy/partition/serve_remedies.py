"""Which line of the tables deals out what an axis does whole: each dim of its products is tried, by price.

A dim that is tried joins the first group of the axis in `serve`; parameters that have it, and that the axis does not
cut, are held by it. A dim that no parameter has comes behind the groups, as a sequence does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import NamedTuple

from shardplan.errors import ReplicationWarning, ShardplanError
from shardplan.hardware.units import format_seconds
from shardplan.strategy.model import Model
from shardplan.strategy.partition.settle import Settled
from shardplan.strategy.partition.shares import MOST_NAMED, SLACK, operation_shares, replicated_lines
from shardplan.strategy.partition.tables import LAYER, Layouts, TableLine, join_lines, served_text

MOST_TRIED = 6  # dims of an axis

Settle = Callable[[Layouts], Settled]


class ServeRemedy(NamedTuple):
    """Tables under which an axis deals out more: the lines that are new, its share then, and the seconds of a pass."""

    layouts: Layouts
    lines: tuple[str, ...]
    operations: float
    seconds: float


def serve_remedies(model: Model, layouts: Layouts, settled: Settled, axis: str, settle: Settle) -> list[ServeRemedy]:
    """Return what makes the worst device's share of the operations less, that of the least share and seconds first.

    Args:
        model: What is partitioned.
        layouts: Its tables.
        settled: What they came to.
        axis: Of the mesh.
        settle: From tables to what they come to; it raises `ShardplanError` for those that no line can lie by.
    """
    now = _share_of(settled, axis)
    found: list[ServeRemedy] = []
    for tables, lines in _candidates(model, layouts, settled, axis):
        try:
            other = settle(tables)
        except ShardplanError:
            continue
        share = _share_of(other, axis)
        if share < now:
            found.append(ServeRemedy(tables, lines, share, other.seconds))
    # Of those that deal out as much one that cuts parameters, too, and then the quickest.
    return sorted(found, key=lambda r: (round(r.operations, 3), -len(r.lines), r.seconds))


def warn_of_replication(model: Model, layouts: Layouts, settled: Settled, settle: Settle) -> None:
    """Warn of every axis whose worst device does more than its share, with the lines of the tables that mend it."""
    for axis, size, share in operation_shares(settled):
        if share <= SLACK / size:
            continue
        whole = [n for n in model.parameters if axis not in _held_line(layouts, n).axes]
        whole.sort(key=lambda n: -model.parameters[n].size)
        named = ", ".join(whole[:MOST_NAMED]) + (f" and {len(whole) - MOST_NAMED} more" * (len(whole) > MOST_NAMED))
        best = next(iter(serve_remedies(model, layouts, settled, axis, settle)), None)
        if best is None:
            mends = "no dim that was tried as a line of serve makes it less"
        else:
            mends = (
                f"{' and '.join(map(repr, best.lines))} makes it {best.operations:.3f}, and a microbatch "
                f"{format_seconds(best.seconds)} instead of {format_seconds(settled.seconds)}"
            )
        warnings.warn(
            f"{model.name}: of {size} devices of the axis {axis} the worst does {share:.3f} of the operations, and "
            f"even is {1 / size:.3f}; it leaves whole: {named or 'no parameter'}; {mends}",
            ReplicationWarning,
            stacklevel=3,
        )


def _share_of(settled: Settled, axis: str) -> float:
    return next(share for name, _, share in operation_shares(settled) if name == axis)


def _candidates(
    model: Model, layouts: Layouts, settled: Settled, axis: str
) -> Iterator[tuple[Layouts, tuple[str, ...]]]:
    """Yield tables with a dim more, and the lines of them that are new."""
    groups = dict(layouts.serve).get(axis)
    if groups is None:  # it is free, and serves whatever is cheapest
        return
    served = {name for group in groups for name in group}
    size = settled.problem.mesh.span(axis).size
    dims: dict[str, None] = {}
    for maker in replicated_lines(settled, axis):
        assert maker.line is not None  # of products
        for factor, names in maker.line.names.items():
            if maker.line.links.sizes[factor] >= size and LAYER not in names and not served & set(names):
                dims |= dict.fromkeys(sorted(names)[:1])
    for dim in list(dims)[:MOST_TRIED]:
        mine = {n: _held_line(layouts, n) for n in model.parameters if dim in model.dims[n]}
        mine = {n: line for n, line in mine.items() if axis not in line.axes}
        first, *rest = groups or ((),)
        joined = ((*first, dim), *rest) if mine else (*groups, (dim,))
        serve = tuple((a, joined if a == axis else before) for a, before in layouts.serve)
        more = [replace(line, patterns=(n,), dims=(*line.dims, (dim, (axis,)))) for n, line in mine.items()]
        rest_of = [_without(line, model, mine) for line in layouts.held]
        tables = Layouts(serve, layouts.stored, join_lines([*more, *(line for line in rest_of if line.patterns)]))
        said = (f"serve, {axis}: {served_text(joined)}", *([f"held, {', '.join(mine)}: {dim}@{axis}"] if mine else []))
        yield tables, said


def _held_line(layouts: Layouts, name: str) -> TableLine:
    return next((line for line in layouts.held if line.matches(name)), TableLine((name,)))


def _without(line: TableLine, model: Model, names: Collection[str]) -> TableLine:
    """A line that no longer matches some names."""
    if not any(map(line.matches, names)):
        return line
    return replace(line, patterns=tuple(n for n in model.parameters if line.matches(n) and n not in names))
