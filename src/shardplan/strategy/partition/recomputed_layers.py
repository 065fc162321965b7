"""Layers of which some are computed again and the rest is kept: of every stage the first ones, in a loop of their own.

A `repeat` keeps the same of all its rows. So one whose layers are not all computed again becomes two, which follow each
other in every stage: the first has of each stage the rows that are computed again, the second, whose values are called
`x..behind`, the others. Of a stack of parameters each has an input of its own, with the rows that it reads; they are
state like any other, and are the model's by their name (`model_name`) and rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardplan.core.nested import as_nested, row_type, stacked_type
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.errors import LayoutError, excerpt
from shardplan.strategy.training import rename_values

Rows = tuple[int, int]  # of the layers of a loop, those of a stage
# Of a parameter that stages share, and of rows that are kept: marks that no model's name has (`check_names`).
COPY, BEHIND = "..copy", "..behind"


def model_name(name: str) -> str:
    """Return what the model calls a value of a stage: what it is a copy of, or has rows of.

    >>> model_name("head..copy1"), model_name("gradient.layers.q..behind"), model_name("layers.q..behind.m")
    ('head', 'gradient.layers.q', 'layers.q.m')
    """
    return name.partition(COPY)[0].replace(BEHIND, "")


def check_names(names: Iterable[str]) -> None:
    """Refuse a model's name that has a mark of a stage's; raises `LayoutError`."""
    for name in names:
        if model_name(name) != name:
            raise LayoutError(f"partition: a value called {excerpt(name)}; legal are names without {COPY} and {BEHIND}")


def behind_name(name: str, parameter: str) -> str:
    """Return what the rows behind those that are computed again are called, of a parameter or of what is kept of it.

    >>> behind_name("layers.q.m", "layers.q")
    'layers.q..behind.m'
    """
    return f"{parameter}{BEHIND}{name.removeprefix(parameter)}"


def has_rows_behind(operands: Iterable[str]) -> bool:
    """Whether a loop that reads these has the layers behind those that are computed again, and keeps what it makes."""
    return any(BEHIND in name for name in operands)


@dataclass(frozen=True, slots=True)
class SplitLayers:
    """A program with loops in two.

    By the number of a loop `loops` has the rows of each stage, `rows` what these are in the stacks of the model, and
    `behind` the number of the loop that follows it in every stage. `numbers` are those of the steps that it was made
    of, `kept` the loops that keep what they would without recomputation; `inputs` has by the name of an input that is
    new the stack whose rows it has.
    """

    program: Program
    loops: Mapping[int, tuple[Rows, ...]]
    rows: Mapping[int, tuple[Rows, ...]]
    behind: Mapping[int, int]
    numbers: tuple[int, ...]
    kept: frozenset[int]
    inputs: Mapping[str, str]


def split_layers(program: Program, loops: Mapping[int, Sequence[Rows]], first: int) -> SplitLayers:
    """Return a program in which the `first` layers of every stage are in loops of their own.

    Args:
        program: With loops.
        loops: The rows of every stage by the number of a loop; layers are those that hand on a value.
        first: How many layers of a stage, each a row of a loop.

    Raises `LayoutError` where no stage has more layers, and for a stack that is read or made outside of its loop.
    """
    inputs, outputs = dict(program.inputs), list(program.outputs)
    left = [first] * len(next(iter(loops.values()), ()))
    steps: list[tuple[int, Step, tuple[Rows, ...], bool]] = []
    stacks: dict[str, str] = {}
    behind: dict[int, int] = {}
    where: dict[int, tuple[Rows, ...]] = {}
    for number, step in enumerate(program.steps):
        op, mine = as_nested(step.op), tuple(loops.get(number, ()))
        if op is None or not op.carried_count:
            where[len(steps)] = mine
            steps.append((number, step, mine, False))
            continue
        again = [min(n, b - a) for n, (a, b) in zip(left, mine, strict=True)]
        left = [n - m for n, m in zip(left, again, strict=True)]
        rest = [b - a - m for m, (a, b) in zip(again, mine, strict=True)]
        whole = len(step.operands) - op.cut
        sliced, handed = step.operands[whole:], step.results[: op.carried_count]
        if sum(rest):
            _check_alone(program, number, sliced)
            stacks |= {name + BEHIND: name for name in sliced}
            inputs |= {name + BEHIND: stacked_type(row_type(inputs[name]), sum(rest)) for name in sliced}
            inputs = {name: t for name, t in inputs.items() if name not in sliced or sum(again)}
            outputs += [r + BEHIND for r in step.results[op.carried_count :] if r in outputs]
        if sum(rest) and sum(again):
            handed = tuple(f"{name}.again" for name in handed)
            behind[len(steps)] = len(steps) + 1
        if sum(again):
            inputs |= {name: stacked_type(row_type(inputs[name]), sum(again)) for name in sliced}
            one = replace(step, op=_with_rows(op, sum(again)), results=(*handed, *step.results[op.carried_count :]))
            where[len(steps)] = tuple((a, a + m) for m, (a, _) in zip(again, mine, strict=True))
            steps.append((number, one, _rows_of(again), False))
        if sum(rest):
            carried = handed if sum(again) else step.operands[: op.carried_count]
            operands = (*carried, *step.operands[op.carried_count : whole], *(name + BEHIND for name in sliced))
            results = (*step.results[: op.carried_count], *(r + BEHIND for r in step.results[op.carried_count :]))
            one = replace(step, op=_with_rows(_rename_inside(op), sum(rest)), operands=operands, results=results)
            where[len(steps)] = tuple((a + m, b) for m, (a, b) in zip(again, mine, strict=True))
            steps.append((number, one, _rows_of(rest), True))
    if not stacks:
        legal = "legal are fewer, or None for all"
        raise LayoutError(f"strategy: recompute_layers={first}: no stage has more layers; {legal}")
    made = {r for _, step, _, _ in steps for r in step.results}
    return SplitLayers(
        Program(list(inputs.items()), [step for _, step, _, _ in steps], [o for o in outputs if o in made | {*inputs}]),
        {k: mine for k, (_, _, mine, _) in enumerate(steps) if mine},
        where,
        behind,
        tuple(number for number, _, _, _ in steps),
        frozenset(k for k, (_, _, _, keeps) in enumerate(steps) if keeps),
        stacks,
    )


def _check_alone(program: Program, number: int, stacks: Sequence[str]) -> None:
    """Refuse a stack of rows that is no input, or that other steps read, and one of results that others read."""
    step = program.steps[number]
    others = {o for k, other in enumerate(program.steps) if k != number for o in other.operands}
    inputs = dict(program.inputs)
    op = as_nested(step.op)
    stacked = () if op is None else step.results[op.carried_count :]
    for name in (*stacks, *stacked):
        if name in others or (name in stacks and name not in inputs):
            raise LayoutError(f"strategy: recompute_layers of layers whose %{name} others read or make; legal is None")


def _rows_of(counts: Sequence[int]) -> tuple[Rows, ...]:
    ends = [sum(counts[: k + 1]) for k in range(len(counts))]
    return tuple((end - n, end) for n, end in zip(counts, ends, strict=True))


def _with_rows(op: Any, count: int) -> Any:
    return replace(op, n=count)


def _rename_inside(op: Any) -> Any:
    """A loop with other names inside: its steps are others than those of layers that are computed again."""
    inside = {r: r + BEHIND for step in op.body.steps for r in step.results}
    return replace(op, body=rename_values(op.body, inside))
