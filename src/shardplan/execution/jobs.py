"""Runs a `Job`: its programs in the order of its schedule, on any backend; global arrays by name, in and out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardplan.core.dtypes import numpy_dtype
from shardplan.core.program import Program
from shardplan.core.reference import collect, distribute
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError
from shardplan.strategy.partition.job import Job

Shards = list[Any]
Runs = Callable[[Program, list[Shards]], list[Shards]]


@dataclass(slots=True)
class Hand:
    """What a backend brings: how it runs a program, and how arrays come to its shards and back."""

    run: Runs
    put: Callable[[np.ndarray, TensorType], Shards] = distribute
    get: Callable[[Shards, TensorType], np.ndarray] = collect


@dataclass(slots=True)
class JobRun:
    """A step of a job under way; `values` are shards by name, `own` those of a microbatch."""

    job: Job
    hand: Hand
    arrays: Mapping[str, np.ndarray]
    values: dict[str, Shards] = field(default_factory=dict[str, Shards])
    own: dict[tuple[int, str], Shards] = field(default_factory=dict[tuple[int, str], Shards])
    results: dict[tuple[int, str], np.ndarray] = field(default_factory=dict[tuple[int, str], np.ndarray])

    def step(self) -> dict[str, np.ndarray]:
        """Run every program, and return results, gradients and what takes the place of inputs."""
        job, state = self.job, self.job.state
        for name, t in state.items():
            if name in self.arrays and name not in job.batch:
                self.values[name] = self.hand.put(np.asarray(self.arrays[name]), t)
            elif name in job.totals:
                self.values[name] = self.hand.put(np.zeros(t.shape, numpy_dtype(t.dtype)), t)
        for stage, kind, microbatch in job.actions():
            self.action(stage, kind, microbatch)
        out: dict[str, np.ndarray] = {}
        for name, dim in job.results.items():
            parts = [self.results[k, name] for k in range(job.strategy.microbatches)]
            out[name] = sum(parts[1:], parts[0]) if dim is None else np.concatenate(parts, dim)
        for name in (*job.totals, *job.replaced):
            out[name] = self.hand.get(self.values[name], state[name])
        return out

    def action(self, stage: int, kind: str, microbatch: int) -> None:
        """Run the program of one action."""
        job, program = self.job, self.job.programs[stage, kind]
        given = [self.input(name, t, microbatch) for name, t in program.inputs]
        found = self.hand.run(program, given)
        for name, shards in zip(program.outputs, found, strict=True):
            if name.startswith("next."):
                self.values[name.removeprefix("next.")] = shards
            if name in job.saved:
                self.own[microbatch, name] = shards
            if name in job.results:
                self.results[microbatch, name] = self.hand.get(shards, program.types[name])

    def input(self, name: str, t: TensorType, microbatch: int) -> Shards:
        """Return the shards of an input: rows of a batch, what was saved of a microbatch, or state."""
        if name in self.job.batch:
            array = np.asarray(self.arrays[name])
            dim = self.job.model.dims[name].index("batch")
            rows = t.shape[dim]
            return self.hand.put(array[(slice(None),) * dim + (slice(microbatch * rows, (microbatch + 1) * rows),)], t)
        if name in self.job.saved:
            return self.own[microbatch, name]
        return self.values[name]


def checked(job: Job, arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the arrays of a step; raises `LayoutError` for one that is missing, too many, or of another shape."""
    found: dict[str, np.ndarray] = {}
    wanted = {n: t for n, t in job.state.items() if n not in job.totals and n not in job.saved}
    for name, t in wanted.items():
        if name not in arrays:
            raise LayoutError(f"run of a job: no array {name}, {t}; legal are arrays of {', '.join(wanted)}")
        found[name] = array = np.asarray(arrays[name])
        shape = list(t.shape)
        if name in job.batch:
            shape[job.model.dims[name].index("batch")] *= job.strategy.microbatches
        if array.shape != tuple(shape):
            raise LayoutError(f"run of a job: {name} has the shape {array.shape}; legal is {tuple(shape)}")
    if strange := sorted(arrays.keys() - wanted.keys()):
        raise LayoutError(f"run of a job: no input is called {strange[0]}; legal are {', '.join(wanted)}")
    return found
