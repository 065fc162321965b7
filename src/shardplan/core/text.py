"""Programs as text: `Program.parse(str(p)) == p`, which reads it by `core.parse`.

    program
      mesh data=4, tensor=2
      input %0: f32[64@data, 48@tensor]
      %1 = all_gather(%0; dim=0, axes=(data)): f32[64, 48@tensor]
      output %1

With several meshes each is named (`mesh m1: ...`), and types say where they are (`... on m1`). Behind the meshes stand
the tables of boxes, a line a row, each under its hash (`boxes#1a2b3c4d`), by which types and ops name it. The type
after a step is a claim that `Program.parse` checks. Comments run from '#' to the end of the line.

For the eye lists of more than eight values are folded (`%t0 ... %t15: 16 x f32[4]`), which `parse` does not read.

The body of an op stands in braces behind it, with names of its own, on the meshes of the first lines:

      %1, %2 = repeat(%0, %w; n=96, carried=1, sliced=1) {
        input %x: f32[4]
        input %v: f32[4]
        %y = elementwise(%x, %v; expr="a+b"): f32[4]
        output %y, %x
      }: f32[4]; f32[96, 4]
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from shardplan.core.box_table import BoxTable
from shardplan.core.layout import Layout
from shardplan.core.mesh import Mesh
from shardplan.core.notation import AXIS
from shardplan.core.op import Op
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType

WORDS = {"True": True, "False": False, "None": None}
BODY = "Program"  # the annotation of an op's field that holds a body
ALIGNED = 110  # characters: comments stand behind the longest step up to here; one longer step does not push them out
FOLDED = 8  # values, or steps at once: more are folded where a text is for the eye


class PrintedProgram(Protocol):
    """What is printed as a program."""

    @property
    def inputs(self) -> Sequence[tuple[str, TensorType]]:
        """Names and types, in order."""
        ...

    @property
    def steps(self) -> Sequence[Step]:
        """The steps, in order."""
        ...

    @property
    def outputs(self) -> Sequence[str]:
        """Names, in order."""
        ...

    @property
    def types(self) -> Mapping[str, TensorType]:
        """The type of every value."""
        ...

    @property
    def meshes(self) -> Sequence[Mesh]:
        """All meshes, those of bodies too."""
        ...

    @property
    def tables(self) -> Sequence[BoxTable]:
        """All tables of boxes, those of bodies too."""
        ...


def op_text(
    op: Op,
    operands: tuple[str, ...],
    meshes: dict[Mesh, str] | None = None,
    stopped: tuple[int, ...] = (),
    fold: bool = False,
) -> str:
    """Return `all_gather(%0; dim=0, axes=(data))`; fields at their default are left out, and a body.

    Before an operand whose use is stopped stands `stop`. `fold` writes the first and the last of many operands.
    """
    shown: list[str] = []
    for item in dataclasses.fields(op):
        value = getattr(op, item.name)
        usual = None if item.default is dataclasses.MISSING else item.default
        if item.type != BODY and value != usual:
            shown.append(f"{item.name}={_value_text(value, meshes or {})}")
    attributes = f"; {', '.join(shown)}" if shown else ""
    used = [f"stop %{o}" if k in stopped else f"%{o}" for k, o in enumerate(operands)]
    return f"{op.name}({_listed(used, fold)}{attributes})"


def _listed(values: Sequence[str], fold: bool) -> str:
    return f"{values[0]} ... {values[-1]}" if fold and len(values) > FOLDED else ", ".join(values)


def _counted(words: Sequence[str], fold: bool) -> str:
    """Return words; many of them as how often each is there."""
    if not fold or len(words) <= FOLDED:
        return "; ".join(words)
    counts = Counter(words).items()
    return (
        "; ".join(f"{n} x {word}" for word, n in counts)
        if len(counts) <= FOLDED
        else f"{len(words)} of {len(counts)} kinds"
    )


def _value_text(value: Any, meshes: dict[Mesh, str]) -> str:
    if isinstance(value, Mesh):
        return meshes.get(value, f"<{value}>")
    if isinstance(value, Op):
        return op_text(value, (), meshes)
    if isinstance(value, (Layout, BoxTable)):
        return str(value)
    if isinstance(value, tuple):
        return f"({','.join(_value_text(v, meshes) for v in value)})"  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, str) and (value in WORDS or not AXIS.fullmatch(value)):
        return json.dumps(value)
    return str(value)


def program_text(
    program: PrintedProgram, note: Callable[[int, Step], str] | None = None, total: Callable[[int], str] | None = None
) -> str:
    """Return a program's text; `note(number, step)` may add a comment to a step's line.

    With `total`, which writes bytes, it is one for the eye: what is many is folded, inputs with what a device holds.
    """
    names = {m: f"m{k}" for k, m in enumerate(program.meshes)}
    several = len(names) > 1
    lines = ["program"]
    lines += [f"  mesh {name}: {m}" if several else f"  mesh {m}" for m, name in names.items()]
    lines += [text for table in program.tables for text in (f"  {table}", *(f"    {row}" for row in table.rows))]
    found = list(_lines(program, names, several, "  ", note, total))
    width = max((len(text) for text, noted in found if noted is not None and len(text) <= ALIGNED), default=0)
    return "\n".join([*lines, *(f"{text:<{width}}  # {noted}" if noted else text for text, noted in found)])


def _lines(
    program: PrintedProgram,
    names: dict[Mesh, str],
    several: bool,
    indent: str,
    note: Callable[[int, Step], str] | None,
    total: Callable[[int], str] | None,
) -> Iterator[tuple[str, str | None]]:
    """Yield the lines of a program or a body, each with its comment; None where a line is no step of the program."""
    fold = total is not None

    def typed(t: TensorType) -> str:
        return f"{t} on {names[t.mesh]}" if several else str(t)

    if total is not None and len(program.inputs) > FOLDED:
        listed = _listed([f"%{name}" for name, _ in program.inputs], fold)
        held = total(sum(t.local_bytes() for _, t in program.inputs))
        yield (
            f"{indent}input {listed}: {_counted([typed(t) for _, t in program.inputs], fold)}  # {held} a device",
            None,
        )
    else:
        yield from ((f"{indent}input %{name}: {typed(t)}", None) for name, t in program.inputs)
    for number, step in enumerate(program.steps):
        results = _listed([f"%{r}" for r in step.results], fold)
        claims = _counted([typed(program.types[r]) for r in step.results], fold)
        text = f"{indent}{results} = {op_text(step.op, step.operands, names, step.stopped, fold)}"
        noted = note(number, step) if note else ""
        body = next((getattr(step.op, f.name) for f in dataclasses.fields(step.op) if f.type == BODY), None)
        if body is None:
            yield f"{text}: {claims}", noted
        elif fold and len(body.steps) > FOLDED:
            yield f"{text} {{ {_counted([s.op.name for s in body.steps], fold)} }}: {claims}", noted
        else:
            yield f"{text} {{", noted
            yield from ((line, None) for line, _ in _lines(body, names, several, indent + "  ", None, total))
            yield f"{indent}}}: {claims}", None
    if program.outputs:
        yield f"{indent}output {_listed([f'%{o}' for o in program.outputs], fold)}", None
