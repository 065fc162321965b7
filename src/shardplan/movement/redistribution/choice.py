"""Choosing among candidates: what they must satisfy, and the one function that prices all of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from shardplan.core.accounting import MANY_CHUNKS, Account, books_of
from shardplan.core.op import Op
from shardplan.core.ops.collective import PADDED
from shardplan.core.pattern import Groups, communicates
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType, same
from shardplan.core.text import op_text
from shardplan.errors import Infeasible, LayoutError, TypingError
from shardplan.hardware.placement import Placement
from shardplan.hardware.prices.cost import Fabric, as_messages, seconds
from shardplan.movement.redistribution.candidates import ROUND_CHARGE, Candidate, is_portable
from shardplan.movement.redistribution.emit import retyping
from shardplan.plans.nominal import longest_path, patterns
from shardplan.plans.pricing import NOISE, price_program

TIE = 1e-9  # relative: prices closer than this are equal, whatever the order in which they were summed
PADDING_TIE = ROUND_CHARGE / 2  # relative: where parts are padded, by how much does not decide between programs
LEAST_PADDED = 2**16  # bytes that a device receives in a step, below which nothing is padded without a topology
LITTLE_PADDING = 8  # of what a device receives it may be one part in so many
FEW_BYTES = 0.05  # relative: bytes that nobody would trade anything for
# What a collective by name may take by its price, over that of messages that do the same. Published all-gathers of 8
# and 16 MB on eight GPUs take 0.77 to 0.85 of what they are priced, and all-to-alls 1.08 to 1.2 times as long.
MISPRICED = 1.6


@dataclass(frozen=True)
class Rules:
    """What a plan must satisfy and how it is priced."""

    bound: int  # bytes of live shards between steps, on every device
    portable: bool = False
    even: bool = False  # no type on the way is uneven
    fabric: Fabric | None = None
    placement: Placement | None = None  # what the fabric was made of, where it was one
    narrow: bool = False  # candidates that keep memory limits are asked for, too
    keep: bool = False  # under a limit the inputs are the caller's: live to the end

    @cached_property
    def slow_levels(self) -> list[int]:
        """The levels, those first over which a device has the least rate; of equal ones the inner, which carry more."""
        assert self.fabric is not None
        rates = [float(self.fabric.capacity(j).max()) / w.stride for j, w in enumerate(self.fabric.wires)]
        return sorted(range(len(rates)), key=lambda j: (float(f"{rates[j]:.6g}"), -j))


class Simplicity(NamedTuple):
    """What decides between programs of one price: the smaller tuple wins, so the first field weighs most."""

    moving: int  # steps with communication
    steps: int
    rounds: int
    peers: int  # an exchange has several peers on both sides, a permute one, and a slice none
    text: tuple[str, ...]  # says nothing of the programs, but makes plans deterministic


class TieBreak(NamedTuple):
    """What decides between programs that predictions do not tell apart, of as few bytes on the slowest level."""

    devices: int  # that are together in a step
    messages: int  # steps that are no collective of the library
    moving: int  # steps with communication
    steps: int
    memory: int  # bytes of workspace
    price: float


@dataclass(frozen=True)
class Chosen:
    """A program that satisfies the rules, and its price."""

    program: Program
    books: Account
    exact: bool
    price: float
    crossing: tuple[float, ...] = ()  # bytes that leave units of every level, outermost first
    least: float | None = None  # the price of the cheapest found, where this was taken for fewer bytes or less trouble

    @staticmethod
    def of(program: Program, books: Account, exact: bool, rules: Rules) -> Chosen:
        """Return a program with its price."""
        if rules.fabric is None:
            return Chosen(program, books, exact, price(program, books, rules))
        found = price_program(program, rules.fabric)
        return Chosen(program, books, exact, found.seconds, tuple(itertools.accumulate(found.level_bytes)))

    @cached_property
    def is_padded(self) -> bool:
        """Whether any of its steps pads its parts."""
        return any(step.op.algorithm == PADDED for step in self.program.steps)

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

    def convenience(self, rules: Rules) -> TieBreak:
        """How convenient the program is: only asked of several that predictions do not tell apart."""
        assert rules.fabric is not None
        steps, found = self.program.steps, patterns(self.program)
        library = rules.fabric.library
        grouped = [isinstance(as_messages(x.pattern, library), Groups) for x in found]
        moving = [communicates(x.pattern) for x in found]
        return TieBreak(
            max((self._group_size(k, len(x.devices)) for k, x in enumerate(found) if moving[k]), default=0),
            sum(moves and not alike for moves, alike in zip(moving, grouped, strict=True)),
            sum(moving),
            len(steps),
            self.books.workspace_bytes,
            self.price,
        )

    def _group_size(self, k: int, taking_part: int) -> int:
        """The devices of a step that hear from each other."""
        op, (t, *_) = self.program.steps[k].op, self.program.step_types(self.program.steps[k])[0]
        axes = op.members(t)
        group = math.prod(t.mesh.span(a).size for a in axes) if axes else taking_part
        return 2 if op.peers == 1 else min(taking_part, group)


class Contest:
    """The programs of one move that may be chosen, of all that were entered.

    Without a topology that is the cheapest, and of equal prices the simplest. With one it is, of those within `NOISE`
    of the least seconds, what puts fewest bytes on the slowest level, then what is most convenient; a program that is
    proved to be cheapest stands.
    """

    def __init__(self, rules: Rules, below: float = math.inf) -> None:
        """Begin; what cannot cost less than `below` is not counted."""
        self.rules, self.below = rules, below
        self.entered: list[Chosen] = []

    @property
    def margin(self) -> float:
        """By how much above the least a price may be of what is chosen among: relative."""
        return self.tie if self.rules.fabric is None else NOISE

    @property
    def tie(self) -> float:
        """Up to what difference prices are equal."""
        padded = self.rules.fabric is None and any(x.is_padded for x in self.entered)
        return PADDING_TIE if padded else TIE

    @property
    def cheapest(self) -> Chosen | None:
        """The cheapest so far; of equal prices the simplest, then the first."""
        return _cheapest(self.entered, self.tie)

    def enter(self, found: Iterable[tuple[Program, bool]]) -> None:
        """Price programs, which come with whether they are exact; live shards between steps keep the bound."""
        for program, exact in found:
            most = min([self.below, *(x.price * (1 + self.margin) for x in self.entered)])
            if most < math.inf and least_price(program, self.rules) > most * (1 + TIE):
                continue
            books = books_of(program)
            if books.peak_bytes <= self.rules.bound:
                self.add(Chosen.of(program, books, exact, self.rules))

    def add(self, new: Chosen) -> None:
        """Let in one whose price is known."""
        self.entered.append(new)
        most = min(x.price for x in self.entered) * (1 + self.margin)
        self.entered = [x for x in self.entered if x.price <= most]

    @property
    def winner(self) -> Chosen | None:
        """The one that is taken."""
        least = self.cheapest
        if least is None or self.rules.fabric is None or least.exact:
            return least
        # The slowest level that any of them crosses.
        slow = next((j for j in self.rules.slow_levels if any(x.crossing[j] > 0 for x in self.entered)), 0)
        most = min(x.crossing[slow] for x in self.entered) * (1 + FEW_BYTES)
        few = [x for x in self.entered if x.crossing[slow] <= most]
        best = min(few, key=lambda x: (x.convenience(self.rules), x.simplicity)) if len(few) > 1 else few[0]
        return best if best.price <= least.price * (1 + TIE) else replace(best, exact=False, least=least.price)


def with_names(chosen: Chosen, rules: Rules) -> Chosen:
    """Return the program with collectives by name in place of messages that do the same, where it has any.

    Two prices of one movement are further apart than a prediction is off, so `MISPRICED` is asked and not `NOISE`.
    """
    if rules.fabric is None:
        return chosen
    program = chosen.program
    pairs = [(step.op, program.step_types(step)[0]) for step in program.steps]
    named = [(op.named_collective(*types), types) for op, types in pairs]
    ops = tuple(
        op if one is None or one.compositions(*types) else one
        for (op, _), (one, types) in zip(pairs, named, strict=True)
    )
    if all(a is b for a, (b, _) in zip(ops, pairs, strict=True)):
        return chosen
    found = chain(ops, program.input_types[0])
    new = Chosen.of(found, books_of(found), False, rules)
    if found.output_types != program.output_types or new.price > chosen.price * MISPRICED:
        return chosen
    least = chosen.price if chosen.least is None else chosen.least
    return replace(new, least=min(least, new.price)) if new.price > least * (1 + TIE) else new


def _cheapest(found: Sequence[Chosen], tie: float) -> Chosen | None:
    """The cheapest; of equal prices the simplest, then the first."""
    if len(found) < 2:
        return found[0] if found else None
    most = min(x.price for x in found) * (1 + tie)
    return min((x for x in found if x.price <= most), key=lambda x: x.simplicity)


def chain(ops: Sequence[Op], source: TensorType) -> Program:
    """Return the program that applies the ops one after another."""
    steps = [Step(op, (str(k),), (str(k + 1),)) for k, op in enumerate(ops)]
    return Program({"0": source}, steps, (str(len(ops)),))


def keeping(program: Program, names: Iterable[str]) -> Program:
    """Return the program that keeps these inputs: they are outputs too, behind the others."""
    return Program(program.inputs, program.steps, (*program.outputs, *names))


def price(program: Program, books: Account, rules: Rules) -> float:
    """Return the charged bytes of a program (section 4, objective), or its seconds where there is a topology.

    A chunk is a round.
    """
    if rules.fabric is not None:
        return price_program(program, rules.fabric).seconds
    turn = ROUND_CHARGE * rules.bound
    pairs = zip(books.step_moved, books.latencies, strict=True)
    return longest_path(program, [moved + turn * rounds for moved, rounds in pairs])


def least_price(program: Program, rules: Rules) -> float:
    """Return what a program costs at the least: what every step's worst device receives, and its rounds.

    A reduction may be received reduced, in the network or on its way: under a topology only its start counts.
    """
    total, least = 0.0, 0.0 if rules.fabric is None else rules.fabric.first_hop()
    rate = 1.0 if rules.fabric is None else 1 / float(rules.fabric.capacity(len(rules.fabric.wires) - 1).max())
    for step in program.steps:
        (t,), (u,) = program.step_types(step)
        received = int(step.op.received_bytes(t).max(initial=0))
        if rules.fabric is None:
            total += received + ROUND_CHARGE * rules.bound * step.op.rounds(t) * step.op.chunks
        elif received:
            total += least + (received * rate if t.layout.partial == u.layout.partial else 0.0)
    return total


def programs(
    found: Iterable[Candidate], source: TensorType, target: TensorType, rules: Rules, seen: set[tuple[Op, ...]]
) -> Iterator[tuple[Program, bool]]:
    """Yield the programs of `found` that type, end in `target`, and respect the rules; and if exact.

    Those of ops that are `seen` are passed over, and the others are seen from then on.
    """
    blocks = () if rules.fabric is None else rules.fabric.blocks(np.union1d(source.mesh.ids, target.mesh.ids))
    for candidate in found:
        if candidate.ops in seen:
            continue
        seen.add(candidate.ops)
        program = _type_program(candidate.ops, source, target, rules.portable, rules.even)
        if program is None:
            continue
        yield from ((one, candidate.exact) for one in _compose_collectives(program, rules))
        # Near holders may have more to send than all together.
        near = tuple(s.op.nearest(blocks) if has_copies(*program.step_types(s)[0]) else s.op for s in program.steps)
        if near not in seen and any(one != step.op for one, step in zip(near, program.steps, strict=True)):
            seen.add(near)
            yield from ((one, candidate.exact) for one in _compose_collectives(chain(near, source), rules))


def has_copies(t: TensorType) -> bool:
    """Say whether several devices may hold one thing, so that it matters who sends it."""
    return t.layout.boxes is not None or len(set(t.mesh.expand(t.layout.used_axes))) < len(t.mesh.atoms)


def _compose_collectives(program: Program, rules: Rules) -> Iterator[Program]:
    """Yield a program with an algorithm for every step that the library has no collective for: it runs as messages.

    First the cheapest ones, then, where candidates that keep memory limits are asked for, those that stage least.
    """
    fabric = rules.fabric
    steps = [(step.op, program.step_types(step)[0]) for step in program.steps]
    if not any(op.compositions(*types) for op, types in steps) or (fabric and not fabric.library.even_only):
        yield program
        return
    if fabric is None:
        yield _pad_parts(program, rules.bound)
        return

    def by(key: Callable[[Op, Sequence[TensorType]], float]) -> tuple[Op, ...]:
        return tuple(min(op.compositions(*types), key=lambda o: key(o, types), default=op) for op, types in steps)

    cheap = by(lambda op, types: seconds(op.pattern(*types), fabric))
    lean = by(lambda op, types: op.staging(*types)) if rules.narrow else cheap
    for ops in dict.fromkeys((cheap, lean)):
        yield chain(ops, program.input_types[0])


def _moved_bytes(op: Op, t: TensorType) -> int:
    """What the busiest device sends, or receives if that is more."""
    return max(int(op.received_bytes(t).max(initial=0)), int(op.sent_bytes(t)[1].max(initial=0)))


def _pad_parts(program: Program, bound: int) -> Program:
    """Return a program without a topology with library collectives on parts of one size, where padding is little.

    Composed of messages a step hears from all peers, a collective takes log2 of their number in rounds: padding may
    weigh as much as the rounds that it saves, and as much as one in any case. A device may receive an eighth more, and
    not of less than 64 KiB.
    """
    ops: list[Op] = []
    for step in program.steps:
        (t, *_), op = program.step_types(step)[0], step.op
        padded = next((one for one in op.compositions(t) if one.algorithm == PADDED), op)
        more, got = _moved_bytes(padded, t) - _moved_bytes(op, t), int(op.received_bytes(t).max(initial=0))
        most = got * (1 + 1 / LITTLE_PADDING) if got >= LEAST_PADDED else 0
        few = int(padded.received_bytes(t).max(initial=0)) <= most
        peers = math.prod(t.mesh.span(a).size for a in op.members(t)) - 1
        saved = max(1, peers - padded.rounds(t))
        slow = peers > 1 and padded.rounds(t) >= peers  # an all-to-all is messages in a library, too
        ops.append(padded if few and not slow and more <= saved * ROUND_CHARGE * bound else op)
    if all(op is step.op for op, step in zip(ops, program.steps, strict=True)):
        return program
    return chain(ops, program.input_types[0])


@lru_cache(maxsize=64)  # asked for again on every placement
def _type_program(
    ops: tuple[Op, ...], source: TensorType, target: TensorType, portable: bool, even: bool
) -> Program | None:
    """Return the program of ops, None where it does not type, end in what `target` holds or respect the rules.

    It ends in the very type `target`.

    Candidates are proposed without regard to whether they type, so that the typing rules stand in the ops alone.
    """
    try:
        program = chain(ops, source)
    except (TypingError, LayoutError):
        return None
    found = program.output_types[0]
    if not same(found, target):
        return None
    if behind := retyping(found, target):
        program = chain((*ops, *behind), source)
    if even and not all(t.all_even for t in program.types.values()):
        return None
    if portable and not all(is_portable(s.op, program.types[s.operands[0]]) for s in program.steps):
        return None
    return program


def too_little(asked: str, limit: int, least: int, absolute: int) -> Infeasible:
    """Return the refusal of a limit: the least that works in few chunks, and the least at all."""
    beyond = f", or {absolute} bytes with more than {MANY_CHUNKS} chunks a step" if absolute < least else ""
    return Infeasible(
        f"{asked} within {limit} bytes a device: no plan; the least that works is {least} bytes{beyond}",
        least,
        absolute,
    )
