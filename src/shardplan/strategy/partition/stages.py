"""What every pipeline stage runs: its lines forward and backward, and the values that come from other stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from shardplan.core.ops.composed import differs
from shardplan.errors import LayoutError
from shardplan.strategy.partition.flow import Line, Loop
from shardplan.strategy.partition.microbatch import Microbatch

Lines = list["Line | Loop"]
Pass = Literal["F", "B"]


class Boundary(NamedTuple):
    """A value that one stage makes, by its name there, and another reads, by its name there, in a pass."""

    kind: Pass
    source: tuple[int, str]
    target: tuple[int, str]

    def seen(self, stage: int) -> tuple[str, str, str] | None:
        """Return what a stage sees of it, None for a stage that is at neither end."""
        ways = [way for way, (s, _) in (("to", self.source), ("from", self.target)) if s == stage]
        return (self.kind, ways[0], (self.source if ways[0] == "to" else self.target)[1]) if ways else None


@dataclass(slots=True)
class PipelineStage:
    """The lines of a stage; the values of F that its B reads: those that it makes, and those that other stages do."""

    number: int
    forward: Lines = field(default_factory=list["Line | Loop"])
    backward: Lines = field(default_factory=list["Line | Loop"])
    saved: tuple[str, ...] = ()
    received: tuple[str, ...] = ()

    def shape(self) -> tuple[object, ...]:
        """Return what its programs hang on: lines, and of a loop how many rows it has, and what enters and leaves."""
        lines = (*self.forward, *self.backward)
        loops = ((x.number, x.end - x.first, x.operands, x.results) for x in lines if isinstance(x, Loop))
        return (tuple(x.number for x in lines), *loops, self.saved, self.received)


def staged(micro: Microbatch, count: int) -> tuple[list[PipelineStage], list[Boundary]]:
    """Return the stages, and the values between them.

    Raises `LayoutError` for a value of the forward pass that another stage's backward pass would read.
    """
    stages = [PipelineStage(s) for s in range(count)]
    light: Lines = []
    made: dict[str, int] = {}
    chains = _Chains(micro, count)
    for line in micro.block.lines:
        forward = line.number < micro.count
        where = _where(micro, line, made)
        if where is None:
            light.append(line)
            continue
        for s in where:
            lines = stages[s].forward if forward else stages[s].backward
            piece = chains.piece(line, s) if isinstance(line, Loop) else line
            lines.append(piece)
            made |= {r: (max if forward else min)(s, made.get(r, s)) for r in piece.results}
    inputs = {name for name, _ in micro.block.inputs}
    boundaries: list[Boundary] = []
    for stage in stages:
        stage.forward = _with_light(stage.forward, light, inputs, micro.block.outputs)
        boundaries += _boundaries("F", stage, stage.forward, made, inputs, set())
        own = {r for line in stage.forward for r in line.results}
        stage.backward = _with_light(stage.backward, [x for x in light if x.number >= micro.count], inputs | own, [])
        read = {o for line in stage.backward for o in line.operands}
        stage.saved = tuple(v for line in stage.forward for v in line.results if v in read)
        there = {b.target[1] for b in boundaries if b.target[0] == stage.number}
        stage.received = tuple(sorted(there & read))
        boundaries += _boundaries("B", stage, stage.backward, made, inputs | there, own)
    forward = {r for stage in stages for line in stage.forward for r in line.results}
    for b in boundaries:
        if b.kind == "B" and b.source[1] in forward:
            raise LayoutError(
                f"stage {b.target[0]}'s backward pass reads %{b.source[1]}, which stage {b.source[0]} makes forward; "
                "legal is a model whose layers hand on what the next ones need"
            )
    return stages, boundaries


def _where(micro: Microbatch, line: Line | Loop, made: dict[str, int]) -> list[int] | None:
    """The stages of a line, in the order in which they run it; None where all that read it make it."""
    forward = line.number < micro.count
    origin = None if forward else micro.origins[line.number]
    number = line.number if forward else origin.forward if origin else None
    if isinstance(line, Loop):
        rows = micro.cuts.rows[line.number if number is None else number]
        found = [s for s, (a, b) in enumerate(rows) if a < b]
        return found if forward else found[::-1]
    if forward:
        stage = micro.cuts.stages[line.number]
        return None if stage is None else [stage]
    if not line.operands or not any(differs(t) for t in line.types):
        return None
    if number is not None and micro.cuts.stages[number] is not None:
        return [micro.cuts.stages[number] or 0]
    return [max((made[o] for o in line.operands if o in made), default=0)]


class _Chains:
    """The loops of a model over its stages, in which what is carried goes from stage to stage.

    Of layers that were split each stage runs those that are computed again and then the rest, and backward the other
    way: one chain of two loops.
    """

    def __init__(self, micro: Microbatch, count: int) -> None:
        self.micro, self.count = micro, count
        every = [line for line in micro.block.lines if isinstance(line, Loop)]
        self.loops = {(line.number < micro.count, self._number(line)): line for line in every}

    def _number(self, loop: Loop) -> int:
        """The number of a loop, or of the one of which it makes the gradients."""
        origin = self.micro.origins[loop.number] if loop.number >= self.micro.count else None
        return loop.number if origin is None or origin.forward is None else origin.forward

    def piece(self, loop: Loop, stage: int) -> Loop:
        """Return the rows of a loop that are a stage's; what comes from another stage has a name of its own.

        What the loop began with may be read beside it: by the loop itself, as an invariant, and behind it.
        """
        cuts, forward, number = self.micro.cuts, loop.number < self.micro.count, self._number(loop)
        front = next((a for a, b in cuts.behind.items() if b == number), number)
        both = [n for n in (front, cuts.behind.get(front)) if n is not None and (forward, n) in self.loops]
        order = 1 if forward else -1
        stops = [(s, n) for s in range(self.count) for n in both if cuts.rows[n][s][0] < cuts.rows[n][s][1]][::order]
        head, tail = (self.loops[forward, n] for n in (both[::order][0], both[::order][-1]))
        # All but sums of a loop's own: of two loops the second begins with what the first has carried.
        pairs = enumerate(zip(tail.operands[: loop.op.carried_count], head.results, strict=False))
        handed = range(loop.op.carried_count) if head is tail else [k for k, (a, b) in pairs if a == b]
        operands, results = list(loop.operands), list(loop.results)
        sources: list[tuple[int, str] | None] = []
        for k in range(loop.op.carried_count):
            mine = stops if k in handed else [stop for stop in stops if stop[1] == number]
            at = mine.index((stage, number))
            before = mine[at - 1] if at else None
            sources.append(None)
            if before is None:
                operands[k] = head.operands[k] if k in handed else loop.operands[k]
            elif before[0] == stage:
                operands[k] = self.loops[forward, before[1]].results[k]
            else:
                operands[k] = f"carried.{loop.results[k]}"
                sources[k] = before[0], self.loops[forward, before[1]].results[k]
            if k in handed and at == len(mine) - 1:
                results[k] = tail.results[k]
        first, end = cuts.rows[number][stage]
        return replace(
            loop, first=first, end=end, operands=tuple(operands), results=tuple(results), sources=tuple(sources)
        )


def _with_light(lines: Lines, light: Sequence[Line | Loop], inputs: set[str], outputs: Iterable[str]) -> Lines:
    """Lines with those that every stage makes for itself where it reads them, in order."""
    needed = {o for line in lines for o in line.operands} | set(outputs)
    chosen: Lines = []
    for line in reversed(light):
        if needed & set(line.results) and not set(line.results) <= inputs:
            chosen.append(line)
            needed |= set(line.operands)
    return sorted([*chosen, *lines], key=lambda line: line.number)


def _boundaries(
    kind: Pass, stage: PipelineStage, lines: Lines, made: dict[str, int], inputs: set[str], own: set[str]
) -> list[Boundary]:
    """What a pass of a stage reads of other stages."""
    have = inputs | own
    found: dict[str, Boundary] = {}
    for line in lines:
        for k, o in enumerate(line.operands):
            source = line.sources[k] if isinstance(line, Loop) and k < line.op.carried_count else None
            if source is not None:
                found.setdefault(o, Boundary(kind, source, (stage.number, o)))
            elif o not in have and o not in found:
                found[o] = Boundary(kind, (made[o], o), (stage.number, o))
        have = have | set(line.results)
    return list(found.values())
