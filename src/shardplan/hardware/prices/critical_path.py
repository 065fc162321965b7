"""When the steps of a program run: its seconds are the longest path through them.

A step waits for those before it that made what it reads, and for those that share a device or a directed port with it;
it takes all of its own at once. So each device keeps program order, no port carries more than its rate, and the steps
of one tensor are a chain, whose seconds are a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np

from shardplan.core.pattern import StepPattern
from shardplan.hardware.prices.fabric import Ints, Load

# Of the busiest resource of a level: below it a load is the rounding error of what was added and taken away again.
_NOISE = 1e-12


@dataclass(frozen=True, slots=True)
class Window:
    """When a step runs, and the last step that it waited for."""

    start: float
    end: float
    cause: int | None


def windows(
    steps: Sequence[StepPattern], seconds: Sequence[float], loads: Sequence[Load] | None = None
) -> list[Window]:
    """Return when each of the steps runs, in order, if all start as early as those that they wait for let them.

    Args:
        steps: The steps, in program order.
        seconds: How long each of them takes.
        loads: What each puts on the resources of a fabric; None where devices are all there is.

    >>> from shardplan.core.pattern import Local
    >>> first, second = (StepPattern(Local(0.0), np.array([device])) for device in (0, 1))
    >>> [window.end for window in windows((first, second, first), (1.0, 5.0, 2.0))]
    [1.0, 5.0, 3.0]
    """
    width = 1 + max((int(step.devices.max(initial=0)) for step in steps), default=0)
    last: dict[int, Ints] = {-1: np.full(width, -1)}  # by level, -1 for devices: the last step on every one of them
    ends = np.zeros(len(steps) + 1)  # the one at -1 is the start of the run
    found: list[Window] = []
    for number, (step, length, load) in enumerate(zip(steps, seconds, loads or repeat(()), strict=False)):
        touched = {-1: step.devices}
        for j, busy in enumerate(load):
            if busy is not None and busy.size:
                last.setdefault(j, np.full(len(busy), -1))
                touched[j] = np.flatnonzero(busy > _NOISE * busy.max())
        waits = np.unique(np.concatenate([step.reads, *(last[j][mine] for j, mine in touched.items())]).astype(int))
        # Of those that end together the last in the program.
        cause = int(max(waits, key=lambda k: (ends[k], k), default=-1))
        start = float(ends[cause])
        ends[number] = start + length
        found.append(Window(start, start + length, None if cause < 0 else cause))
        for j, mine in touched.items():
            last[j][mine] = number
    return found


def longest(steps: Sequence[StepPattern], seconds: Sequence[float], loads: Sequence[Load] | None = None) -> float:
    """Return when the last of the steps ends; arguments as for `windows`."""
    if all(number - 1 in step.reads for number, step in enumerate(steps) if number):
        return sum(seconds, 0.0)  # each waits for the one before, whoever takes part
    return max((window.end for window in windows(steps, seconds, loads)), default=0.0)


def critical(found: Sequence[Window]) -> list[int]:
    """Return the steps of a longest path, last first."""
    path: list[int] = []
    step = max(range(len(found)), key=lambda k: found[k].end, default=None)
    while step is not None:
        path.append(step)
        step = found[step].cause
    return path
