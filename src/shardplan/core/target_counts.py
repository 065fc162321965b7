"""What a loss is a mean over: `counting`, the input of its targets; `take_count_as_input`, the count as an input.

A step has several microbatches, and replicas, and each has as many targets that count as it happens to have. So a job
does not count: how many count in the whole step is an input of its programs, `count`, which whoever has the arrays of
the step makes of them (`target_count`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from shardplan.core.dtypes import numpy_dtype
from shardplan.core.ops.layers import IGNORED, TargetCount
from shardplan.core.program import Program
from shardplan.core.tensor import TensorType
from shardplan.errors import TypingError

COUNT = "count"  # the input that says how many targets of the step count


class CountingStep(NamedTuple):
    """A step that counts: its number, its result, and what it reads."""

    step: int
    value: str
    targets: str


def _counting(program: Program) -> Iterator[CountingStep]:
    for number, step in enumerate(program.steps):
        if isinstance(step.op, TargetCount):
            yield CountingStep(number, step.results[0], step.operands[0])


@lru_cache(maxsize=64)
def counting(program: Program) -> CountingStep | None:
    """Return the step that counts targets, None where none does.

    Raises `TypingError` where several do, or one counts what the program computes: nobody can tell it.
    """
    found = list(_counting(program))
    inputs = {name for name, _ in program.inputs}
    if strange := found[1:] or [one for one in found if one.targets not in inputs]:
        raise TypingError(
            f"target_count of %{strange[0].targets}; legal in a job is one, of an input: all microbatches and replicas "
            "are told how many targets count"
        )
    return found[0] if found else None


def take_count_as_input(program: Program) -> Program:
    """Return a program that is told what it would count, as its last input; one that counts nothing as it is.

    Raises as `counting`.
    """
    found = counting(program)
    if found is None:
        return program
    steps = [
        replace(step, operands=tuple(COUNT if o == found.value else o for o in step.operands))
        for number, step in enumerate(program.steps)
        if number != found.step
    ]
    return Program([*program.inputs, (COUNT, program.types[found.value])], steps, program.outputs)


def target_count(t: TensorType, targets: np.ndarray) -> np.ndarray:
    """Return how many of the targets of a step count, as the input of type `t` has it."""
    return np.asarray((targets != IGNORED).sum(), numpy_dtype(t.dtype))
