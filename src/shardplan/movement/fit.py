"""Choosing among candidates: price, bound, memory limit. One function prices all of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardplan.core.accounting import Account, account
from shardplan.core.ops import Exchange, Op, Permute
from shardplan.core.program import Program, Step
from shardplan.core.tensor import TensorType, same
from shardplan.core.text import op_text
from shardplan.errors import LayoutError, TypingError
from shardplan.hardware.cost import Fabric
from shardplan.hardware.placement import Placement
from shardplan.hardware.where import priced
from shardplan.movement.candidates import ROUND_CHARGE, Candidate, is_portable

TIE = 1e-9  # relative: prices closer than this are equal


@dataclass(frozen=True, slots=True)
class Rules:
    """What a plan must satisfy and how it is priced."""

    bound: int
    limit: int | None = None  # bytes of workspace on every device
    portable: bool = False
    fabric: Fabric | None = None
    place: Placement | None = None  # what the fabric was made of, where it was a placement


@dataclass(frozen=True, slots=True)
class Chosen:
    """A program that satisfies the rules, and its price."""

    program: Program
    books: Account
    exact: bool
    price: float
    rank: tuple[Any, ...]


@dataclass(slots=True)
class Choice:
    """The cheapest candidate so far, and, under a limit, the one that can be cut down to the least workspace."""

    best: Chosen | None = None
    least_bytes: float = math.inf
    least: Program | None = None


def chain(ops: Sequence[Op], source: TensorType) -> Program:
    """Return the program that applies the ops one after another."""
    steps = [Step(op, (str(k),), (str(k + 1),)) for k, op in enumerate(ops)]
    return Program({"0": source}, steps, (str(len(ops)),))


def price(program: Program, books: Account, rules: Rules) -> float:
    """Return the charged bytes of a program (section 4, objective), or its seconds where there is a topology."""
    if rules.fabric is not None:
        return priced(program, rules.fabric)[0]
    return sum(books.step_received) + ROUND_CHARGE * rules.bound * sum(books.rounds)


def least_chunks(op: Op, operands: Sequence[TensorType], room: float) -> Op:
    """Return the op cut into the fewest chunks whose staging fits `room` bytes, or into the most if none does."""
    if not hasattr(op, "chunks") or op.staging(*operands) <= room:
        return op
    results = op.infer(*operands)
    most = max(math.prod(t.local_shape()) for t in (*operands, *results))
    low, high = 1, most

    def cut(k: int) -> Op:
        return replace(op, chunks=k)  # pyright: ignore[reportCallIssue]

    if cut(most).staging(*operands) > room:
        return min(op, cut(most), key=lambda way: way.staging(*operands))
    while low < high:  # staging falls with the number of chunks
        middle = (low + high) // 2
        if cut(middle).staging(*operands) <= room:
            high = middle
        else:
            low = middle + 1
    return cut(low)


def fitted(program: Program, books: Account, limit: int) -> Program:
    """Return the program with as many chunks per step as the limit on the workspace needs."""
    steps: list[Step] = []
    for step, used in zip(program.steps, books.step_workspaces, strict=True):
        op = step.op
        if used > limit:
            operands = program.step_types(step)[0]
            op = least_chunks(op, operands, limit - (used - op.staging(*operands)))
        steps.append(Step(op, step.operands, step.results))
    return Program(program.inputs, steps, program.outputs)


def consider(choice: Choice, found: Iterable[Candidate], source: TensorType, target: TensorType, rules: Rules) -> None:
    """Keep the cheapest of `found` that types, ends in `target`, and respects the rules."""
    seen: set[tuple[Op, ...]] = set()
    for candidate in found:
        if candidate.ops in seen:
            continue
        seen.add(candidate.ops)
        try:
            program = chain(candidate.ops, source)
        except (TypingError, LayoutError):
            continue
        if not same(program.output_types[0], target):
            continue
        offer(choice, program, candidate.exact, rules)


def offer(choice: Choice, program: Program, exact: bool, rules: Rules) -> None:
    """Keep `program` if it respects the rules and beats the choice."""
    if rules.portable and not all(is_portable(s.op, program.types[s.operands[0]].mesh) for s in program.steps):
        return
    books = account(program)
    if books.peak_bytes > rules.bound:
        return
    if rules.limit is not None:
        smallest = fitted(program, books, 0)
        least = account(smallest)
        if least.workspace_bytes < choice.least_bytes:
            choice.least_bytes, choice.least = least.workspace_bytes, smallest
        if least.workspace_bytes > rules.limit:
            return
        if books.workspace_bytes > rules.limit:
            program = fitted(program, books, rules.limit)
            books = account(program)
        if books.workspace_bytes > rules.limit:
            program, books = smallest, least
    cost = price(program, books, rules)
    best = choice.best
    if best is not None and cost > best.price * (1 + TIE):
        return
    moving = sum(r > 0 for r in books.rounds)
    # a permute has one peer on both sides, and a slice none
    many = sum(2 * isinstance(s.op, Exchange) + isinstance(s.op, Permute) for s in program.steps)
    text = tuple(op_text(s.op, s.operands) for s in program.steps)
    rank = (moving, len(program.steps), sum(books.rounds), many, text)
    if best is None or cost < best.price * (1 - TIE) or rank < best.rank:
        choice.best = Chosen(program, books, exact, cost, rank)
