"""Runs a `Job`: its programs in the order of its schedule, on any backend; global arrays by name, in and out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardplan.core.dtypes import numpy_dtype
from shardplan.core.program import Program
from shardplan.core.reference import collect, distribute, run_program
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError
from shardplan.strategy.partition.job import Job, Transfer
from shardplan.strategy.partition.programs import NEXT, TOTAL

Shards = list[Any]
Runs = Callable[[Program, list[Shards]], list[Shards]]


@dataclass(frozen=True, slots=True)
class Hand:
    """What a backend brings: how it runs a program, and how arrays come to its shards and back."""

    run: Runs = run_program
    put: Callable[[np.ndarray, TensorType], Shards] = distribute
    get: Callable[[Shards, TensorType], np.ndarray] = collect


def order(job: Job) -> Iterator[tuple[int, str, int]]:
    """Yield stage, kind and microbatch of every computation, in an order in which one process may run them."""
    rows = [list(row) for row in job.schedule.compute_only().ranks]
    done = set[tuple[int, str, int]]()
    while any(rows):
        before = len(done)
        for row in rows:
            while row and (a := row[0]) is not None and a.microbatch is not None:
                near = a.stage - 1 if a.kind == "F" else a.stage + 1
                if 0 <= near < job.stages and (near, a.kind, a.microbatch) not in done:
                    break
                done.add((a.stage, a.kind, a.microbatch))
                yield a.stage, a.kind, a.microbatch
                row.pop(0)
        if len(done) == before:
            raise LayoutError(f"run of a job: its schedule waits for itself at {[str(row[0]) for row in rows if row]}")


@dataclass(slots=True)
class JobRun:
    """A step of a job under way: shards by stage and name, those of a microbatch by its number too."""

    job: Job
    hand: Hand
    arrays: Mapping[str, np.ndarray]
    values: dict[tuple[int, str], Shards] = field(default_factory=dict[tuple[int, str], Shards])
    own: dict[tuple[int, int, str], Shards] = field(default_factory=dict[tuple[int, int, str], Shards])
    results: dict[tuple[str, int], list[np.ndarray]] = field(default_factory=dict[tuple[str, int], list[np.ndarray]])

    def step(self) -> dict[str, np.ndarray]:
        """Run every program, and return results, gradients and what takes the place of inputs."""
        job = self.job
        for key, t in job.state.items():
            stage, name, rows = job.parts[key]
            if name.startswith(TOTAL):
                self.values[stage, name] = self.hand.put(np.zeros(t.shape, numpy_dtype(t.dtype)), t)
            elif name not in job.batch:
                array = self.arrays[name.partition(".copy")[0]]
                self.values[stage, name] = self.hand.put(array if rows is None else array[slice(*rows)], t)
        for stage, kind, microbatch in order(job):
            self.action(stage, kind, microbatch)
        for transfer in job.transfers:
            if transfer.kind == "total":
                self.values[transfer.target] = self.moved(transfer, self.values[transfer.source])
        for stage in range(job.stages):
            if (stage, "OPT") in job.programs:
                self.action(stage, "OPT", 0)
        return self.collected()

    def collected(self) -> dict[str, np.ndarray]:
        """Return results over all microbatches, and state; stacks over stages."""
        job = self.job
        out: dict[str, np.ndarray] = {}
        for name, dim in job.results.items():
            parts = [np.concatenate(found) if len(found) > 1 else found[0]
                     for k in range(job.strategy.microbatches) if (found := self.results[name, k])]  # fmt: skip
            joined = np.concatenate(parts, dim) if dim is not None else sum(parts[1:], parts[0])
            out[name] = joined if dim is None else np.take(joined, range(job.strategy.sequences), dim)
        pieces: dict[str, list[np.ndarray]] = {}
        for key, t in job.state.items():
            stage, name, rows = job.parts[key]
            plain = name.removeprefix(TOTAL)
            if ".copy" not in plain and (plain != name or name in job.model.replaced):
                found = pieces.setdefault(name, [])
                if rows is not None or not found:
                    found.append(self.hand.get(self.values[stage, name], t))
        return out | {name: np.concatenate(found) if len(found) > 1 else found[0] for name, found in pieces.items()}

    def action(self, stage: int, kind: str, microbatch: int) -> None:
        """Run the program of one action, and send on what others need of it."""
        job, program = self.job, self.job.programs[stage, kind]
        given = [self.input(stage, name, t, microbatch) for name, t in program.inputs]
        found = self.hand.run(program, given)
        for name, shards in zip(program.outputs, found, strict=True):
            if name.startswith(NEXT):
                self.values[stage, name.removeprefix(NEXT)] = shards
            else:
                self.own[microbatch, stage, name] = shards
            if name in job.results:
                self.results.setdefault((name, microbatch), []).append(self.hand.get(shards, program.types[name]))
        for transfer in job.transfers:
            if transfer.kind == kind and transfer.source[0] == stage:
                if kind == "OPT":
                    self.values[transfer.target] = self.moved(transfer, self.values[transfer.source])
                else:
                    self.own[microbatch, *transfer.target] = self.moved(
                        transfer, self.own[microbatch, *transfer.source]
                    )

    def moved(self, transfer: Transfer, shards: Shards) -> Shards:
        """Run the movement of a transfer."""
        return self.hand.run(transfer.plan.program, [shards])[0]

    def input(self, stage: int, name: str, t: TensorType, microbatch: int) -> Shards:
        """Return the shards of an input: rows of a batch, what was saved or sent of a microbatch, or state."""
        if name in self.job.batch:
            dim = batch_dim(self.job, name)
            rows = (slice(None),) * dim + (slice(microbatch * t.shape[dim], (microbatch + 1) * t.shape[dim]),)
            return self.hand.put(self.arrays[name][rows], t)
        found = self.own.get((microbatch, stage, name))
        return self.values[stage, name] if found is None else found


def batch_dim(job: Job, name: str) -> int:
    """Return which dim of an input is the batch."""
    return job.model.dims[name].index("batch") if name in job.model.dims else 0


def checked(job: Job, arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the arrays of a step; raises `LayoutError` for one that is missing, too many, or of another shape."""
    types = job.model.program.types
    wanted = {name: list(types[name].shape) for name, _ in job.model.program.inputs}
    whole, rows = job.strategy.sequences, job.strategy.microbatches * job.strategy.data * job.strategy.microbatch
    for name in job.batch:
        if name in wanted:
            wanted[name][batch_dim(job, name)] = whole
    found: dict[str, np.ndarray] = {}
    for name, shape in wanted.items():
        if name not in arrays:
            raise LayoutError(f"run of a job: no array {name}, {types[name]}; legal are arrays of {', '.join(wanted)}")
        found[name] = np.asarray(arrays[name])
        if found[name].shape != tuple(shape):
            raise LayoutError(f"run of a job: {name} has the shape {found[name].shape}; legal is {tuple(shape)}")
    for name in job.batch if rows > whole else ():  # sequences that weigh nothing fill the last microbatch
        more = (
            [
                (0, rows - whole if name not in found or d == batch_dim(job, name) else 0)
                for d in range(found[name].ndim)
            ]
            if name in found
            else []
        )
        found[name] = np.pad(found[name], more) if more else np.pad(np.full(whole, 1 / whole), (0, rows - whole))
    if strange := sorted(arrays.keys() - wanted.keys()):
        raise LayoutError(f"run of a job: no input is called {strange[0]}; legal are {', '.join(wanted)}")
    return found
