"""Choosing among candidates: price, bound, memory limit. One function prices all of them.

Under a limit a candidate is tried with at most 64 chunks a step, and with any number of them: a plan of more chunks is
taken only where no candidate fits with fewer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from shardplan.core.accounting import MANY_CHUNKS, Account, account
from shardplan.core.op import Op
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType, same
from shardplan.core.text import op_text
from shardplan.errors import Infeasible, LayoutError, TypingError
from shardplan.hardware.placement import Placement
from shardplan.hardware.prices.cost import Fabric
from shardplan.movement.redistribution.candidates import ROUND_CHARGE, Candidate, is_portable
from shardplan.plans.nominal import longest_path
from shardplan.plans.pricing import priced

TIE = 1e-9  # relative: prices closer than this are equal, whatever the order in which they were summed


@dataclass(frozen=True, slots=True)
class Rules:
    """What a plan must satisfy and how it is priced."""

    bound: int  # bytes of live shards between steps, on every device
    limit: int | None = None  # bytes of workspace on every device
    portable: bool = False
    fabric: Fabric | None = None
    placement: Placement | None = None  # what the fabric was made of, where it was one
    keep: bool = False  # the inputs are the caller's: live to the end


class Simplicity(NamedTuple):
    """What decides between programs of one price: the smaller tuple wins, so the first field weighs most."""

    moving: int  # steps with communication
    steps: int
    rounds: int
    peers: int  # an exchange has several peers on both sides, a permute one, and a slice none
    text: tuple[str, ...]  # says nothing of the programs, but makes plans deterministic


@dataclass(frozen=True)
class Chosen:
    """A program that satisfies the rules, and its price."""

    program: Program
    books: Account
    exact: bool
    price: float

    @cached_property
    def simplicity(self) -> Simplicity:
        """How simple the program is: only asked where prices tie."""
        steps, rounds = self.program.steps, self.books.rounds
        return Simplicity(
            sum(r > 0 for r in rounds),
            len(steps),
            sum(rounds),
            sum(s.op.peers for s in steps),
            tuple(op_text(s.op, s.operands) for s in steps),
        )


@dataclass(slots=True)
class Pick:
    """Of programs whose steps run in at most `most` chunks: the cheapest that keeps the limit, and the tightest."""

    most: float
    best: Chosen | None = None
    least_bytes: float = math.inf
    least: Program | None = None


@dataclass(slots=True)
class Choice:
    """The picks so far; `many` holds a best only of programs that do not keep the limit in few chunks.

    A chunk pays the latency of its step, so the price alone would not keep a plan from cutting a step a thousand times.
    """

    few: Pick = field(default_factory=lambda: Pick(MANY_CHUNKS))
    many: Pick = field(default_factory=lambda: Pick(math.inf))


def chain(ops: Sequence[Op], source: TensorType) -> Program:
    """Return the program that applies the ops one after another."""
    steps = [Step(op, (str(k),), (str(k + 1),)) for k, op in enumerate(ops)]
    return Program({"0": source}, steps, (str(len(ops)),))


def keeping(program: Program, names: Iterable[str]) -> Program:
    """Return the program that keeps these inputs: they are outputs too, behind the others."""
    return Program(program.inputs, program.steps, (*program.outputs, *names))


def price(program: Program, books: Account, rules: Rules) -> float:
    """Return the charged bytes of a program (section 4, objective), or its seconds where there is a topology."""
    if rules.fabric is not None:
        return priced(program, rules.fabric).seconds
    turn = ROUND_CHARGE * rules.bound
    pairs = zip(books.step_moved, books.latencies, strict=True)
    return longest_path(program, [moved + turn * rounds for moved, rounds in pairs])


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
        return Staging(base, op.staged(*operands), top)

    def chunks(self, limit: float, most: float) -> int:
        """Return the fewest chunks, at most `most`, that keep the limit, or that come closest to it if none do."""
        top = int(min(most, self.top))
        room = max(limit - self.base, min(self.staged(1), self.staged(top)))
        if self.staged(1) <= room:
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


def consider(choice: Choice, found: Iterable[Candidate], source: TensorType, target: TensorType, rules: Rules) -> None:
    """Keep the cheapest of `found` that types, ends in `target`, and respects the rules.

    Candidates are proposed without regard to whether they type, so that the typing rules stand in the ops alone.
    """
    blocks = () if rules.fabric is None else rules.fabric.blocks(np.union1d(source.mesh.ids, target.mesh.ids))
    seen: set[tuple[Op, ...]] = set()
    for candidate in found:
        near = tuple(op.nearest(blocks) for op in candidate.ops)
        for ops in dict.fromkeys((candidate.ops, near)):  # near holders may have more to send than all together
            if ops in seen:
                continue
            seen.add(ops)
            try:
                program = chain(ops, source)
            except (TypingError, LayoutError):
                continue
            if same(program.output_types[0], target):
                offer(choice, program, candidate.exact, rules)


def offer(choice: Choice, program: Program, exact: bool, rules: Rules) -> None:
    """Keep `program` if it respects the rules and beats the choice."""
    if rules.portable and not all(is_portable(s.op, program.types[s.operands[0]]) for s in program.steps):
        return
    books = account(program)
    if books.peak_bytes > rules.bound:  # between steps, whatever the limit is
        return
    if rules.limit is None:
        _compete(choice.few, program, books, exact, rules)
        return
    if rules.keep:
        program = keeping(program, (name for name, _ in program.inputs))
        books = account(program)
    cuts = Cuts.of(program, books)
    for pick in (choice.few, choice.many):
        tightest = cuts.chunks(0, pick.most)
        if (least := cuts.workspace(tightest)) < pick.least_bytes:
            pick.least_bytes, pick.least = least, cuts.cut(tightest)
    # In few chunks if that keeps the limit, in many only if not: a program competes in one pick.
    for pick in (choice.few, choice.many):
        chunks = cuts.chunks(rules.limit, pick.most)
        if cuts.workspace(chunks) <= rules.limit:
            program = cuts.cut(chunks)
            _compete(pick, program, account(program), exact, rules)
            return


def _compete(pick: Pick, program: Program, books: Account, exact: bool, rules: Rules) -> None:
    """Make `program` the best of the pick if it is cheaper, or as cheap and simpler."""
    new, best = Chosen(program, books, exact, price(program, books, rules)), pick.best
    if best is not None:
        if new.price > best.price * (1 + TIE):
            return
        if new.price >= best.price * (1 - TIE) and new.simplicity >= best.simplicity:
            return
    pick.best = new


def too_little(asked: str, limit: int, least: int, absolute: int) -> Infeasible:
    """Return the refusal of a limit: the least that works in few chunks, and the least at all."""
    beyond = f", or {absolute} bytes with more than {MANY_CHUNKS} chunks a step" if absolute < least else ""
    return Infeasible(
        f"{asked} within {limit} bytes a device: no plan; the least that works is {least} bytes{beyond}",
        least,
        absolute,
    )
