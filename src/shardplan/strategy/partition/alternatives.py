"""What else the choices at the ends of a movement could have been, and what that would cost.

A movement is there because what makes a value and what asks for it do not agree. Each of the two has options along
every axis that the movement moves. An option is priced as the settlement prices: that choice is forced to it, all other
choices are settled anew along the axis, exactly, and the other axes stay as they are. It is found when asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from shardplan.core.tensor import TensorType
from shardplan.strategy.partition.elimination import Table, least
from shardplan.strategy.partition.flow import Line
from shardplan.strategy.partition.problem import End, Maker, Option, Use, at_most
from shardplan.strategy.partition.settle import Settled, found_along, tables
from shardplan.strategy.partition.write import Movement

Role = Literal["asks", "makes"]


class Alternative(NamedTuple):
    """An option of the choice that asks for a movement, or that makes its value, along an axis.

    `seconds` are those of all ops and movements if it were taken, `more` over those that were settled; `removes` says
    whether nothing is moved here then.
    """

    role: Role
    by: str
    axis: str
    option: str
    seconds: float
    more: float
    removes: bool


def alternatives(settled: Settled, movement: Movement) -> tuple[Alternative, ...]:
    """Return the options of the choices at both ends of a movement, the cheapest first."""
    end = _end(settled, movement)
    if end is None:
        return ()
    makers: list[tuple[Role, Maker]] = [("asks", end.maker)] if isinstance(end, Use) else []
    if end.source.maker is not None:
        makers.append(("makes", end.source.maker))
    types = (*movement.plan.program.input_types, *movement.plan.program.output_types)
    rows: list[Alternative] = []
    for axis in settled.problem.mesh.axes:
        if len({_place(t, axis) for t in types}) == 1:
            continue
        found, every = along(settled, axis)
        for role, maker in makers:
            for option, seconds, best in forced(maker, found, every):
                meets = _meets(end, best, set(settled.problem.mesh.axes))
                said = _option(maker, option, axis)
                rows.append(
                    Alternative(role, _by(settled, maker), axis, said, seconds, seconds - settled.seconds, meets)
                )
    return tuple(sorted(rows, key=lambda row: row.seconds))


def along(settled: Settled, axis: str) -> tuple[dict[Maker, list[Option]], list[Table[object]]]:
    """Return what all choices may do with an axis where the others are as they were settled, and the tables of it."""
    problem, prices, axes = settled.problem, settled.prices, set(settled.problem.mesh.axes)
    found = found_along(axis, problem, settled.serve, settled.options, prices, axes)
    return found, list(tables(problem, found, prices, axes))


def forced(
    maker: Maker, found: Mapping[Maker, Sequence[Option]], every: Sequence[Table[object]]
) -> Iterator[tuple[Option, float, Mapping[Maker, Option]]]:
    """Yield every option of a choice that can be, with the least seconds where it is taken, and what others do then."""
    for k, option in enumerate(found[maker]):
        only = np.full(len(found[maker]), math.inf)
        only[k] = 0.0
        best = least([*every, ((maker,), only)])
        if math.isfinite(best.total):
            yield option, best.total, {m: found[m][j] for m, j in best.options.items() if isinstance(m, Maker)}


def _end(settled: Settled, movement: Movement) -> Use | End | None:
    """What the problem says of who wants a movement; None where no choice is at either end."""
    if movement.asks is not None:
        wants = (u for u in settled.problem.uses if u.maker is movement.asks and u.operand == movement.operand)
        return next((u for u in wants if u.path == movement.path), None)
    key = movement.path, movement.value
    if key not in settled.wanted:
        return None
    return next(end for end in settled.problem.ends if end.t is settled.wanted[key])


def _meets(end: Use | End, best: Mapping[Maker, Option], axes: set[str]) -> bool:
    """Say whether a value is made as it is wanted."""
    (made,) = end.source.types({m: [option] for m, option in best.items()}, axes)
    wanted = best[end.maker].wanted[end.operand] if isinstance(end, Use) else at_most(end.t, made)
    return made == wanted


def _place(t: TensorType, axis: str) -> object:
    """Where an axis is in a type."""
    return tuple(axes if axis in axes else () for axes in t.layout.dims), axis in t.layout.partial


def _by(settled: Settled, maker: Maker) -> str:
    """How a choice is named."""
    if maker.line is not None:
        return str(maker.line)
    carried = maker in settled.carries.values()
    return f"what step {maker.path[-1]} (repeat) carries" if carried else "what is saved"


def _option(maker: Maker, option: Option, axis: str) -> str:
    """What an option does with an axis."""
    if maker.line is None:
        return f"lies as {option.made[0]}"
    choice = option.choice
    for factor, axes in choice.factors:
        if axis in axes:
            place = f" as {axes.index(axis) + 1} of {', '.join(axes)}" if len(axes) > 1 else ""
            return f"serves {_factor(maker.line, factor)}{place}"
    sums = next((sorted(operands) for a, operands in choice.partial if a == axis), None)
    if sums is None:
        return "every device does the same"
    return f"passes sums of {', '.join(f'%{maker.line.operands[k]}' for k in sums)}"


def _factor(line: Line, factor: str) -> str:
    return " ".join(map(str, line.names.get(factor, ()))) or factor
