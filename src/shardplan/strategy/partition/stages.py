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
        """Return what its programs hang on: lines, and how many rows of a loop."""
        lines = (*self.forward, *self.backward)
        return (*((x.number, x.end - x.first if isinstance(x, Loop) else 0) for x in lines), self.saved, self.received)


def staged(micro: Microbatch, count: int) -> tuple[list[PipelineStage], list[Boundary]]:
    """Return the stages, and the values between them.

    Raises `LayoutError` for a value of the forward pass that another stage's backward pass would read.
    """
    stages = [PipelineStage(s) for s in range(count)]
    light: Lines = []
    made: dict[str, int] = {}
    for line in micro.block.lines:
        forward = line.number < micro.count
        where = _where(micro, line, made)
        if where is None:
            light.append(line)
            continue
        for s in where:
            lines = stages[s].forward if forward else stages[s].backward
            lines.append(_piece(micro, line, s) if isinstance(line, Loop) else line)
        made.update(dict.fromkeys(line.results, max(where) if forward else min(where)))
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


def _piece(micro: Microbatch, loop: Loop, stage: int) -> Loop:
    """The rows of a loop that are a stage's; what it carries on from another stage has a name of its own.

    What the loop began with may be read beside it: by the loop itself, as an invariant, and behind it.
    """
    origin = micro.origins[loop.number] if loop.number >= micro.count else None
    rows = micro.cuts.rows[loop.number if origin is None or origin.forward is None else origin.forward]
    first, end = rows[stage]
    piece = replace(loop, first=first, end=end)
    if piece.enters:
        return piece
    carried = tuple(f"carried.{r}" for r in loop.results[: loop.op.carried_count])
    return replace(piece, operands=(*carried, *loop.operands[loop.op.carried_count :]))


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
            if isinstance(line, Loop) and k < line.op.carried_count and not line.enters:
                before = stage.number - 1 if kind == "F" else stage.number + 1
                found.setdefault(o, Boundary(kind, (before, line.results[k]), (stage.number, o)))
            elif o not in have and o not in found:
                found[o] = Boundary(kind, (made[o], o), (stage.number, o))
        have = have | set(line.results)
    return list(found.values())
