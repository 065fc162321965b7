"""What the exports to Python share: a framework's template, filled in by a recipe.

A template is the module that is exported, with `$` before what is filled in, and the framework's words for the moves.
What a framework binds is that module, run, so the program that is called and the one that is pasted are one code.
"""

from __future__ import annotations

import ast
import math
import string
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardplan.core.program import Program
from shardplan.hardware.placement import Placement
from shardplan.interop.exports.recipe import Recipe, RecipeStep, Shape, heading, recipe

INDENT = "    "


@dataclass(frozen=True, slots=True)
class Template:
    """How a framework says a recipe: the module, and the calls on a device's array `x`.

    A reduce-scatter is an expression of `parts` [members, n], an all-gather one that gives them.
    """

    module: str  # `$heading`, `$cells`, `$chunks`, `$moves`, `$cut`, and the names of `declared`
    declared: Callable[[Recipe], dict[str, str]]
    size: str  # of the payload
    turn: str  # what a transpose is called
    zeros: str = ""  # `x` of a device that takes no part, of `{shape}`; none where all devices do
    group: Callable[[RecipeStep], str] = lambda move: f'groups["{move.label}"]'
    reduce_scatter: str = "reduce_scatter(parts, {group})"
    all_gather: str = "all_gather(x, {group})"
    all_reduce: str = "x = all_reduce(x, {group})"
    reduce: str = "x = reduce(x, {group})"
    broadcast: str = "x = broadcast(x, {group})"

    def text(self, program: Program, placement: Placement | None) -> str:
        """Return the module that runs a program; raises `BackendError` for one that cannot be exported."""
        r = recipe(program, placement)
        return string.Template(self.module).substitute(
            heading="\n".join(heading(program, placement)),
            cells=math.prod(r.chunks),
            chunks=shape_text(r.chunks),
            moves="".join(f"{INDENT}{line}\n" for line in self._moves(r)),
            cut=f"[: {self.size}]" if r.result == r.chunks else "",
            **self.declared(r),
        )

    def load(self, program: Program) -> dict[str, Any]:
        """Return the names that the module defines: what is bound is what would be pasted."""
        names: dict[str, Any] = {}
        exec(compile(self.text(program, None), "<exported by shardplan>", "exec"), names)
        return names

    def _moves(self, r: Recipe) -> list[str]:
        lines: list[str] = []
        before = r.chunks
        for move in r.moves:
            lines.append(f"# {move.kind} over {', '.join(move.axes)}: {move.note}")
            if move.masters and self.zeros:
                lines += [f'if "{move.label}" in groups:', *(INDENT + line for line in self._statements(move))]
                if move.result != before:
                    zeros = self.zeros.format(shape=shape_text(move.result, "x.shape[-1]"))
                    lines += ["else:", f"{INDENT}x = {zeros}"]
            else:
                lines += self._statements(move)
            before = move.result
        return lines

    def _statements(self, move: RecipeStep) -> list[str]:
        call: str = getattr(self, move.kind).format(group=self.group(move))
        end = f"reshape({shape_text(move.result)})"
        if not move.turn:
            return call.splitlines()
        split, turn = (move.split, move.turn) if move.reduces else (move.members_first_shape, move.inverse_turn)
        turned = "" if move.straight else f".reshape({shape_text(split)}).{self.turn}({turn_text(turn)})"
        if move.reduces:
            return [f"parts = x{turned}.reshape({move.size}, -1)", f"x = {call}.{end}"]
        return [f"parts = {call}", f"x = parts{turned}.{end}"]


def source_after_docstring(name: str) -> str:
    """Return the source of a file beside this one after its docstring."""
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return "\n".join(text.splitlines()[ast.parse(text).body[1].lineno - 1 :])


def shape_text(shape: Shape, last: str = "-1") -> str:
    """Return the arguments of a reshape: the last dim takes what is left."""
    return ", ".join([*map(str, shape), last])


def turn_text(turn: Shape) -> str:
    """Return the arguments of a transpose that leaves the last dim where it is."""
    return ", ".join(map(str, (*turn, len(turn))))


def ids_text(ids: tuple[int, ...]) -> str:
    """Return ids as Python: a range where they follow each other."""
    start, stop = ids[0], ids[0] + len(ids)
    return f"range({start}, {stop})" if ids == tuple(range(start, stop)) else str(list(ids))
