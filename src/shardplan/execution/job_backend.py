"""What a backend brings to a job, `JobBackend`, and what it is asked for, `JobLaunch`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shardplan.core.program import Program
from shardplan.core.reference import check_shards, run_values
from shardplan.errors import LayoutError
from shardplan.execution.async_executor import Running
from shardplan.execution.rank_names import NAME_DIGITS
from shardplan.execution.record import Record

Shards = list[Any]
Start = Callable[[Program, Sequence[Shards], int, "Record | None"], Running]


class JobLaunch(NamedTuple):
    """A step of a job that processes are about to run together.

    `digest` is the identity of all that it runs; `programs` says what that is, with or without what gives every process
    all results; `streams` whether some of it travels while other programs run. `problem` is what is wrong here already.
    """

    devices: tuple[int, ...]
    digest: str
    programs: Callable[[bool], Iterable[Program]]
    streams: bool
    problem: LayoutError | None

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"job {self.digest[:NAME_DIGITS]}"


def on_reference(program: Program, inputs: Sequence[Shards], turn: int, record: Record | None) -> Running:
    """Run a program on all devices, in this process."""
    yield from ()
    values = {name: check_shards(name, t, shards) for (name, t), shards in zip(program.inputs, inputs, strict=True)}
    for shards in inputs:
        shards.clear()
    return run_values(program, values)


@dataclass(frozen=True, slots=True)
class JobBackend:
    """What a backend brings: how it starts a program, the devices of this process (None: all), shards as arrays.

    `put` makes a shard of an array, which it may keep; `join` makes one of several, along dim 0. What is started may
    empty the lists of the shards that it is given, so that each is let go with its last use. It yields while messages
    travel; its value are the shards of this process by output. Its turn, a number, is the same on all its processes,
    and two programs that some rank may run at the same time differ in it.
    """

    start: Start = on_reference
    devices: frozenset[int] | None = None
    array: Callable[[Any], np.ndarray] = np.asarray
    put: Callable[[np.ndarray], Any] = np.asarray
    join: Callable[[Sequence[Any]], Any] = np.concatenate
