"""Cutting steps into chunks: what a program needs by how many, and the fewest that keep a limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardplan.core.accounting import Account
from shardplan.core.op import Op
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType


@dataclass(frozen=True, slots=True)
class Staging:
    """What a step needs beside its staging, its staging by the number of chunks, and how many chunks it can have."""

    base: int  # bytes
    staged: Callable[[int], int]  # chunks to bytes
    top: int  # a chunk has at least one element

    @staticmethod
    def of(op: Op, operands: Sequence[TensorType], base: int) -> Staging:
        """Return the stage of an op; one that does not come in chunks has one."""
        ends = (*operands, *op.infer(*operands))
        top = max(t.local_bytes() // t.itemsize for t in ends) if op.cuttable else 1
        return Staging(base, op.staging_by_chunks(*operands), top)

    def chunks(self, limit: float, most: float) -> int:
        """Return the fewest chunks, at most `most`, that keep the limit, or that come closest to it if none do."""
        whole = self.staged(1)
        if whole <= limit - self.base:
            return 1
        top = int(min(most, self.top))
        room = max(limit - self.base, min(whole, self.staged(top)))
        if whole <= room:
            return 1
        low, high = 2, top
        while low < high:  # from 2 chunks on staging never rises
            middle = (low + high) // 2
            if self.staged(middle) <= room:
                high = middle
            else:
                low = middle + 1
        return low


@dataclass(frozen=True, slots=True)
class Cuts:
    """A program that can be cut into chunks, step by step."""

    program: Program
    start: int  # bytes of the inputs
    stages: tuple[Staging, ...]

    @staticmethod
    def of(program: Program, books: Account) -> Cuts:
        """Return the cuts of a program with this account."""
        stages: list[Staging] = []
        for step, used in zip(program.steps, books.step_workspaces, strict=True):
            operands = program.step_types(step)[0]
            stages.append(Staging.of(step.op, operands, used - step.op.staging(*operands)))
        return Cuts(program, books.input_bytes, tuple(stages))

    def chunks(self, limit: float, most: float) -> tuple[int, ...]:
        """Return the fewest chunks of every step, at most `most`, with which the limit is kept, or nearly."""
        return tuple(stage.chunks(limit, most) for stage in self.stages)

    def workspace(self, chunks: Sequence[int]) -> int:
        """Return the workspace with these numbers of chunks."""
        return max([self.start, *(x.base + x.staged(k) for x, k in zip(self.stages, chunks, strict=True))])

    def cut(self, chunks: Sequence[int]) -> Program:
        """Return the program with these numbers of chunks."""
        if all(s.op.chunks == k for s, k in zip(self.program.steps, chunks, strict=True)):
            return self.program
        pairs = zip(self.program.steps, chunks, strict=True)
        steps = [Step(s.op.in_chunks(k), s.operands, s.results) for s, k in pairs]
        return Program(self.program.inputs, steps, self.program.outputs)
