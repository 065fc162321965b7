"""`recover_repeats`: a program in which layers that are written out one after another are the body of a `repeat`.

Layers are found as maximal runs of consecutive steps that are alike (`periods`), and verified: op, types and wiring of
every step. A layer reads what it makes, what the one before it made, what is the same for all of them, and inputs of
the program of which each has its own; these are stacked, row by row. What stands between two runs and hands on what
both carry is a run of one. Names mean nothing, but that what is new is called after what it stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from typing import NamedTuple

from shardplan.core.nested import stacked_type
from shardplan.core.ops import Crop, Repeat, Reshape
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.strategy.periods import Flat, Guess

Slot = tuple[int, int]  # a step of a body and one of its operands, or of its results


class Recovered(NamedTuple):
    """A program, and which inputs of the one that it was made from are the rows of its stacks."""

    program: Program
    stacks: Mapping[str, tuple[str, ...]]


def recover_repeats(
    program: Program,
    called: Callable[[tuple[str, ...]], str] = lambda names: names[0],
    alone: Iterable[str] = (),
) -> Recovered:
    """Return the program with its runs as `repeat`; `called` names a stack after the inputs that are its rows.

    Inputs that are to be given `alone` are no rows of a stack.

    >>> from shardplan.core.ops import Einsum
    >>> x, w = (TensorType.parse(t, "x=1") for t in ("f32[2, 3]", "f32[3, 3]"))
    >>> steps = [Step(Einsum("bi,io->bo"), (str(k), f"w{k}"), (str(k + 1),)) for k in range(4)]
    >>> flat = Program({"0": x} | {f"w{k}": w for k in range(4)}, steps, ("4",))
    >>> found = recover_repeats(flat, lambda names: "w")
    >>> [step.op.times for step in found.program.steps], found.stacks
    ([4], {'w': ('w0', 'w1', 'w2', 'w3')})
    """
    made = {r: (k, j) for k, step in enumerate(program.steps) for j, r in enumerate(step.results)}
    last = {o: k for k, step in enumerate(program.steps) for o in step.operands}
    first = {o: k for k, step in reversed([*enumerate(program.steps)]) for o in step.operands}
    readers = {o: (first[o], k) for o, k in last.items()}
    finder = _Finder(program, made, readers, Flat.of(program), frozenset(alone))
    runs = finder.runs(0, len(program.steps))
    return _Writer(program, called).write_runs([*_with_ones(finder, runs)])


class _Layers(NamedTuple):
    """Bodies of `period` steps, and where their operands come from, by slot."""

    start: int
    period: int
    times: int
    carried: Mapping[Slot, tuple[str, Slot]]  # what the first body reads, and which result the others do
    sliced: Mapping[Slot, tuple[str, ...]]
    same: Mapping[Slot, str]

    @property
    def stop(self) -> int:
        return self.start + self.times * self.period

    @property
    def state(self) -> list[tuple[str, Slot]]:
        """What is carried."""
        return list(dict.fromkeys(self.carried.values()))


class _Finder(NamedTuple):
    program: Program
    made: Mapping[str, Slot]
    readers: Mapping[str, tuple[int, int]]  # the first step that reads a value, and the last
    flat: Flat
    alone: frozenset[str]  # inputs that are no rows

    def runs(self, lo: int, hi: int) -> list[_Layers]:
        """The runs among some steps, in order."""
        best: _Layers | None = None
        for guess in self.flat.guesses(lo, hi) if hi - lo > 1 else ():
            if best is not None and guess.saved_steps <= (best.times - 1) * best.period:
                break
            for run in self.verify_guess(guess):
                if best is None or (run.times - 1) * run.period > (best.times - 1) * best.period:
                    best = run
        if best is None:
            return []
        return [*self.runs(lo, best.start), best, *self.runs(best.stop, hi)]

    def verify_guess(self, guess: Guess) -> Iterator[_Layers]:
        """The maximal runs of bodies in a guess that are wired alike."""
        first = 0
        while first < guess.times - 1:
            start = guess.start + first * guess.period
            times, found = self._longest(start, guess.period, guess.times - first)
            if found is not None:
                yield found
            first += times

    def _longest(self, start: int, period: int, most: int) -> tuple[int, _Layers | None]:
        """How many bodies from here on are wired alike, and the run that they are, if any."""
        first = self.wiring(start, start, period)
        second = self.wiring(start, start + period, period) if most > 1 else None
        if first is None or second is None:
            return 1, None
        outside = {slot: name for slot, name in second.items() if isinstance(name, str)}
        inside = {slot: at for slot, at in second.items() if not isinstance(at, str)}
        fixed = {slot: name for slot, name in outside.items() if first[slot] == name}
        carried = {
            slot: (old, (j, k)) for slot, (ago, j, k) in inside.items() if ago and isinstance(old := first[slot], str)
        }
        stacks = {slot: [old] for slot in outside.keys() - fixed if isinstance(old := first[slot], str)}
        alike = all(slot in carried or first[slot] == at for slot, at in inside.items())
        alike = alike and outside.keys() == {*fixed, *stacks} and self._reads_own_inputs(first, stacks, start, period)
        here, times = second, 1
        while alike and here is not None and self._reads_own_inputs(here, stacks, start + times * period, period):
            for slot, taken in stacks.items():
                taken.append(str(here[slot]))
            times += 1
            here = self.wiring(start, start + times * period, period) if times < most else None
            alike = here is not None and {**here, **dict.fromkeys(stacks)} == {**second, **dict.fromkeys(stacks)}
        if times < 2 or not carried:
            return times, None
        # By their places, so that inputs of the new program have the order of the steps that read them.
        rows_of = {slot: tuple(stacks[slot]) for slot in sorted(stacks)}
        return times, _Layers(start, period, times, carried, rows_of, fixed)

    def _reads_own_inputs(self, wired: Mapping[Slot, object], slots: Iterable[Slot], start: int, period: int) -> bool:
        """Whether some slots of a body read inputs of the program that no other step reads."""
        names = [wired[slot] for slot in slots]
        own = [name for name in names if isinstance(name, str) and name not in self.made and name not in self.alone]
        readers = [self.readers.get(name) for name in own]
        return len(readers) == len(names) and all(r and start <= r[0] and r[1] < start + period for r in readers)

    def wiring(self, run: int, start: int, period: int) -> dict[Slot, str | tuple[int, int, int]] | None:
        """Where operands come from: a name outside the run, or how many bodies ago, and by which step and result.

        None where one comes from a body before the last.
        """
        found: dict[Slot, str | tuple[int, int, int]] = {}
        for j in range(period):
            for k, name in enumerate(self.program.steps[start + j].operands):
                maker = self.made.get(name)
                if maker is None or maker[0] < run:
                    found[j, k] = name
                    continue
                ago = 0 if maker[0] >= start else 1
                if maker[0] < start - period:
                    return None
                found[j, k] = (ago, maker[0] - start + ago * period, maker[1])
        return found


def _with_ones(finder: _Finder, runs: list[_Layers]) -> Iterator[_Layers]:
    """The runs, and those of one body between them."""
    steps, types = finder.program.steps, finder.program.types
    shared = {name for run in runs for name in run.same.values()}
    stacked = {name for run in runs for taken in run.sliced.values() for name in taken}
    uses = [(k, o) for k, step in enumerate(steps) for o in step.operands]
    for before, after in zip(runs, [*runs[1:], None], strict=False):
        yield before
        if after is None or before.stop == after.start or not len(before.state) == len(after.state) == 1:
            continue
        (_, (j, k)), (name, _) = before.state[0], after.state[0]
        enters, maker = steps[before.stop - before.period + j].results[k], finder.made.get(name)
        wired = finder.wiring(before.stop, before.stop, after.start - before.stop)
        if maker is None or maker[0] < before.stop or wired is None or types[enters] != types[name]:
            continue
        slots = {slot: at for slot, at in wired.items() if isinstance(at, str)}
        others = {o for k, o in uses if not before.stop <= k < after.start} | {*finder.program.outputs} | finder.alone
        own = {slot: (at,) for slot, at in slots.items() if not {at} & {*finder.made, *shared, *stacked, *others}}
        yield _Layers(before.stop, after.start - before.stop, 1,
                   {slot: (at, (maker[0] - before.stop, maker[1])) for slot, at in slots.items() if at == enters}, own,
                   {slot: at for slot, at in slots.items() if at != enters and slot not in own})  # fmt: skip


class _Writer:
    """The new program: steps, names of stacks by their rows, and where a row of them is wanted alone."""

    def __init__(self, program: Program, called: Callable[[tuple[str, ...]], str]) -> None:
        self.program, self.called = program, called
        self.types = dict(program.types)
        self.steps: list[Step] = []
        self.stacks: dict[str, tuple[str, ...]] = {}
        self.taken = set(self.types)

    def write_runs(self, runs: list[_Layers]) -> Recovered:
        """Write all steps."""
        old = self.program.steps
        inside = {k: run for run in runs for k in range(run.start, run.stop)}
        reads: dict[str, list[int]] = {}
        for k, step in enumerate(old):
            for o in step.operands:
                reads.setdefault(o, []).append(k)
        for o in self.program.outputs:
            reads.setdefault(o, []).append(len(old))
        heads: list[Step] = []
        for run in runs:
            for group in dict.fromkeys(run.sliced.values()):
                alone = [k for k, row in enumerate(group) if any(inside.get(at) is not run for at in reads[row])]
                name = self.fresh(self.called(group), () if alone else group)
                self.stacks[name] = group
                self.types[name] = stacked_type(self.program.types[group[0]], run.times)
                for k in alone:
                    heads += self.row(name, k, group[k])
        for k, step in enumerate(old):
            run = inside.get(k)
            if run is None:
                self.steps.append(step)
            elif k == run.start:
                self.run(run, lambda name, run=run: any(inside.get(at) is not run for at in reads.get(name, ())))
        replaced = {row: name for name, group in self.stacks.items() for row in group}
        inputs = dict.fromkeys(replaced.get(name, name) for name, _ in self.program.inputs)
        made = Program({n: self.types[n] for n in inputs}, [*heads, *self.steps], self.program.outputs)
        return Recovered(made, self.stacks)

    def run(self, run: _Layers, leaves: Callable[[str], bool]) -> None:
        """Write a run as one step, and those that take rows of what leaves its bodies."""
        steps = self.program.steps
        body, last = steps[run.start : run.start + run.period], steps[run.stop - run.period : run.stop]
        named = {group: name for name, group in self.stacks.items()}
        carried = {pair: self.fresh("carried") for pair in run.state}
        source = {slot: carried[pair] for slot, pair in run.carried.items()}
        source |= {**run.same} | {slot: named[group] for slot, group in run.sliced.items()}
        same, stacked = dict.fromkeys(run.same.values()), dict.fromkeys(named[g] for g in run.sliced.values())
        types = {carried[pair]: self.types[pair[0]] for pair in carried} | {n: self.types[n] for n in same}
        types |= {n: self.program.types[self.stacks[n][0]] for n in stacked}
        inner = [
            Step(s.op, tuple(source.get((j, k), o) for k, o in enumerate(s.operands)), s.results, s.stopped)
            for j, s in enumerate(body)
        ]
        ends = [body[j].results[k] for _, (j, k) in run.state]
        out = [last[j].results[k] for _, (j, k) in run.state]
        slots = [(j, k) for j, s in enumerate(body) for k in range(len(s.results))]
        single = set(out)
        alone = {slot: [(i, name) for i in range(run.times)
                        if (name := steps[run.start + i * run.period + slot[0]].results[slot[1]]) not in single
                        and leaves(name)] for slot in slots}  # fmt: skip
        kept = {slot: self.fresh(f"rows.{body[slot[0]].results[slot[1]]}") for slot in slots if alone[slot]}
        op = Repeat(run.times, Program(types, inner, (*ends, *(body[j].results[k] for j, k in kept))),
                    carried=len(ends), sliced=len(stacked))  # fmt: skip
        # Of what two carry out of one result, the second has a name of its own.
        names = [name if name not in out[:k] else self.fresh(name) for k, name in enumerate(out)]
        self.steps.append(Step(op, (*(v for v, _ in run.state), *same, *stacked), (*names, *kept.values())))
        for (j, k), name in kept.items():
            self.types[name] = stacked_type(self.types[body[j].results[k]], run.times)
            for i, row in alone[j, k]:
                self.steps += self.row(name, i, row)

    def row(self, stack: str, k: int, name: str) -> list[Step]:
        """The steps that take one row of a stack."""
        t: TensorType = self.types[stack]
        dims = " ".join(f"d{d}" for d in range(t.ndim - 1))
        cut, part = Crop((k, *(0,) * (t.ndim - 1)), (k + 1, *t.shape[1:])), self.fresh(f"{name}.row")
        return [Step(cut, (stack,), (part,)), Step(Reshape(f"one=1 {dims} -> {dims}"), (part,), (name,))]

    def fresh(self, name: str, instead: tuple[str, ...] = ()) -> str:
        """A name that no value has, but for inputs that it stands for."""
        found = next(n for k in count() if (n := f"{name}.{k}" if k else name) not in self.taken or (n in instead))
        self.taken.add(found)
        return found
