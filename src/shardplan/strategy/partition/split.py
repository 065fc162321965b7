"""`split`: a backward program B as two, I and W (arXiv 2401.10241, whose B is I here).

I makes what goes to the stage before, and all that the layers hand on to each other; W the rest, which are the totals
of gradients. On the first stage, which sends nothing, I is the way of the cotangent through its layers too: so it is
worth what that of another stage is.

Every step of B is in one of the two, but for those without operands and views, which W does again where it reads them:
they cost no operation. What else W reads of I is kept: a result of I, an input of W of the same name. A `repeat` is
two, over the same rows: in I the values that it carries from layer to layer, and stacks of what W reads; in W the
others, which are what it stacks, and sums that no layer reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from shardplan.core.nested import Nested, as_nested, stacked_type
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType

KEPT = "kept."


class SplitBackward(NamedTuple):
    """I and W; W's inputs that are no inputs of B are results of I."""

    first: Program
    rest: Program


def split(program: Program, sent: Collection[str]) -> SplitBackward:
    """Return I and W of a backward program whose results `sent` go to other stages.

    The other results are W's, but those that I makes on its way.
    """
    inputs = {name for name, _ in program.inputs}
    cut = _Split(program, {*sent, *_handed_on(program)} - inputs)
    early = [o for o in program.outputs if o in cut.made or o in sent]
    late = [o for o in program.outputs if o not in early]
    names = {v: v if v in early else f"{KEPT}{v}" for v in cut.kept}
    first = [_called(step, names) for step in cut.first]
    rest = [_called(step, names) for step in cut.rest]
    given = [(names.get(v, v), t) for v, t in cut.inputs(cut.rest, late)]
    leaving = (*early, *(name for v, name in names.items() if v not in early))
    return SplitBackward(Program(cut.inputs(cut.first, early), first, leaving), Program(given, rest, late))


def _called(step: Step, names: Mapping[str, str]) -> Step:
    operands, results = (tuple(names.get(v, v) for v in side) for side in (step.operands, step.results))
    return replace(step, operands=operands, results=results)


def _handed_on(program: Program) -> set[str]:
    """What repeats carry from run to run for more than itself: cotangents, and no sums."""
    found: set[str] = set()
    for step in program.steps:
        op = as_nested(step.op)
        if op is not None and not op.at_once:
            found |= {step.results[k] for k in hands_on(op)}
    return found


def hands_on(op: Nested) -> list[int]:
    """Return which of what a repeat carries another result is made of: cotangents, and no sums."""
    reads = [_needed(op.body, o) for o in op.body.outputs]
    names = [name for name, _ in op.body.inputs[: op.carried_count]]
    return [k for k, name in enumerate(names) if any(name in read for j, read in enumerate(reads) if j != k)]


def _needed(program: Program, output: str) -> set[str]:
    """All values that one of them needs, itself too."""
    needed = {output}
    for step in reversed(program.steps):
        if needed & set(step.results):
            needed |= set(step.operands)
    return needed


class _Pair(NamedTuple):
    """A step as the one of I and the one of W, and the types of what the second reads of the first."""

    first: Step
    rest: Step | None = None
    stacks: Mapping[str, TensorType] = MappingProxyType({})


class _Split:
    """The steps of a program in two: `first`, which make some values, and the `rest`; what the rest reads is `kept`."""

    def __init__(self, program: Program, wanted: Set[str]) -> None:
        self.whole = program
        self.types = dict(program.types)
        self.first: list[Step] = []
        rest: list[tuple[int, Step]] = []
        needed = set(wanted)
        for number, step in reversed([*enumerate(program.steps)]):
            mine = {k for k, r in enumerate(step.results) if r in needed}
            if not mine:
                rest.append((number, step))
                continue
            op = as_nested(step.op)
            cuts = op is not None and not op.at_once and hands_on(op)  # of others all rows would be kept
            pair = _Loop(op, mine).pair(step, self.types) if op is not None and cuts else _Pair(step)
            self.first.append(pair.first)
            self.types |= pair.stacks
            needed |= set(pair.first.operands)
            if pair.rest is not None:
                rest.append((number, pair.rest))
        self.first.reverse()
        self.made = {r for step in self.first for r in step.results}
        self.kept: list[str] = []
        self.rest = self._with_again(rest)

    def _with_again(self, rest: Sequence[tuple[int, Step]]) -> list[Step]:
        """The rest, in order, with what it does again; notes what is kept for it."""
        makers = {r: (k, step) for k, step in enumerate(self.whole.steps) for r in step.results}
        again: dict[int, Step] = {}
        wanted = [o for _, step in rest for o in step.operands]
        while wanted:
            value = wanted.pop()
            if value not in self.made:
                continue
            number, step = makers.get(value, (-1, None))
            if step is not None and self._is_free(step):
                again[number] = step
                wanted += step.operands
            elif value not in self.kept:
                self.kept.append(value)
        self.kept.sort()
        return [step for _, step in sorted([*again.items(), *rest], key=lambda each: each[0])]

    def _is_free(self, step: Step) -> bool:
        """Whether a step costs no operation, and reads no more bytes than it makes."""
        read, made = (sum(self.types[v].local_bytes() for v in side) for side in (step.operands, step.results))
        return not step.operands or (step.op.view and read <= made)

    def inputs(self, steps: Iterable[Step], outputs: Iterable[str]) -> list[tuple[str, TensorType]]:
        """What steps and outputs read that the steps do not make: inputs in their order, then what is kept."""
        read = _read(steps, outputs)
        return [(n, self.types[n]) for n in (*(n for n, _ in self.whole.inputs), *self.kept) if n in read]


def _read(steps: Iterable[Step], outputs: Iterable[str]) -> set[str]:
    """What steps read, and outputs, that the steps do not make."""
    read, made = {*outputs}, set[str]()
    for step in steps:
        read |= set(step.operands)
        made |= set(step.results)
    return read - made


class _Loop:
    """A repeat in two: the first makes the results `chosen`, and carries what they read."""

    def __init__(self, op: Nested, chosen: set[int]) -> None:
        body = op.body
        names = [name for name, _ in body.inputs]
        while True:
            leaves = [body.outputs[k] for k in chosen]
            cut = _Split(body, {*leaves} - {*names})
            read = _read(cut.first, leaves)
            more = {k for k in range(op.carried_count) if names[k] in read} - chosen
            if not more:
                break
            chosen = chosen | more
        self.op, self.cut = op, cut
        self.chosen, self.left = ([k for k in range(len(body.outputs)) if (k in chosen) == early] for early in (1, 0))
        # Rows that enter a run of the first, or that it makes, are gone when the rest runs.
        gone = {names[k] for k in self.chosen if k < op.carried_count} | cut.made
        self.rows = sorted(_read(cut.rest, (body.outputs[k] for k in self.left)) & gone)

    def pair(self, step: Step, taken: Mapping[str, TensorType]) -> _Pair:
        """Return the two steps; stacks of rows that the rest reads have names that are not `taken`."""
        if not self.left:
            return _Pair(step)
        stacks: dict[str, TensorType] = {}
        for name in self.rows:
            called = f"{step.results[0]}.{name}"
            while called in taken or called in stacks:
                called += "_"
            stacks[called] = stacked_type(self.cut.types[name], self.op.times)
        first = self._half(step, self.cut.first, self.chosen, self.rows, ())
        rest = self._half(step, self.cut.rest, self.left, (), self.rows)
        return _Pair(
            replace(first, results=(*first.results, *stacks)), replace(rest, operands=(*rest.operands, *stacks)), stacks
        )

    def _half(
        self, step: Step, steps: Sequence[Step], results: Sequence[int], kept: Sequence[str], given: Sequence[str]
    ) -> Step:
        """A repeat of some steps, with some of the results and rows that it also stacks, and that it is `given`."""
        op: Any = self.op
        names = [name for name, _ in op.body.inputs]
        whole = len(names) - op.cut
        outputs = [*(op.body.outputs[k] for k in results), *kept]
        read = _read(steps, outputs)
        mine = [k for k in results if k < op.carried_count]
        mine += [k for k, n in enumerate(names) if k >= op.carried_count and n in read]
        inside = Program([(n, self.cut.types[n]) for n in (*(names[k] for k in mine), *given)], steps, outputs)
        cut = sum(k >= whole for k in mine) + len(given)
        made = replace(op, body=inside, carried=sum(k < op.carried_count for k in mine), sliced=cut)
        return Step(made, tuple(step.operands[k] for k in mine), tuple(step.results[k] for k in results))
