"""Programs as text, and back: `Program.parse(str(p)) == p`.

    program
      mesh data=4, tensor=2
      input %0: f32[64@data, 48@tensor]
      %1 = all_gather(%0; dim=0, axes=(data)): f32[64, 48@tensor]
      output %1

With several meshes each is named (`mesh m1: ...`), and types say where they are (`... on m1`). Behind the meshes stand
the tables of boxes, a line a row, each under its hash (`boxes#1a2b3c4d`), by which types and ops name it. The type
after a step is a claim that `Program.parse` checks. Comments run from '#' to the end of the line.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardplan.core import border
from shardplan.core.box_table import NAME, BoxTable, scan_row
from shardplan.core.layout import Layout, scan_layout
from shardplan.core.mesh import Mesh, scan_mesh
from shardplan.core.notation import AXIS, MOST_DIGITS, Scanner
from shardplan.core.ops import OPS, Op
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType, scan_table_name, scan_type
from shardplan.errors import LayoutError, ParseError, ShardplanError, shown

_VALUE = re.compile(r"%[A-Za-z0-9_.]+")
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][-+]?\d+)?")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_WORDS = {"True": True, "False": False, "None": None}
_MESH_NAME = re.compile(r"m\d+")
_COMMENT = re.compile(r"(?<!\bboxes)#[^\n]*")
_NEXT_ROW = re.compile(r"\s*\n\s*\d")
_ON_MESH = re.compile(r"[^;\n]*?\son\s+(m\d+)")
# What a parser has read once it knows again: all of a type but its mesh, and an op's attributes with the bracket at the
# end. Either is a guess, right where reading ends at the same character; what is guessed wrong is read every time.
_TYPE = re.compile(r"\w+\[[^]\n]*\](?:[ \t]*\{[^}\n]*\})*")
_ATTRIBUTES = re.compile(r"[^\n]*?\)(?=[ \t]*(?::|\n|$))")
ALIGNED = 110  # characters: comments stand behind the longest step up to here; one longer step does not push them out


def op_text(op: Op, operands: tuple[str, ...], meshes: dict[Mesh, str] | None = None) -> str:
    """Return `all_gather(%0; dim=0, axes=(data))`; fields at their default, or None, are left out."""
    shown: list[str] = []
    for item in dataclasses.fields(op):
        value = getattr(op, item.name)
        if value is not None and (item.default is dataclasses.MISSING or value != item.default):
            shown.append(f"{item.name}={_value_text(value, meshes or {})}")
    attributes = f"; {', '.join(shown)}" if shown else ""
    return f"{op.name}({', '.join('%' + o for o in operands)}{attributes})"


def _value_text(value: Any, meshes: dict[Mesh, str]) -> str:
    if isinstance(value, Mesh):
        return meshes.get(value, f"<{value}>")
    if isinstance(value, (Layout, BoxTable)):
        return str(value)
    if isinstance(value, tuple):
        return f"({','.join(_value_text(v, meshes) for v in value)})"  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, str) and (value in _WORDS or not AXIS.fullmatch(value)):
        return json.dumps(value)
    return str(value)


def program_text(
    inputs: Sequence[tuple[str, TensorType]],
    steps: Sequence[Step],
    outputs: Sequence[str],
    types: Mapping[str, TensorType],
    note: Callable[[int, Step], str] | None = None,
) -> str:
    """Return a program's text; `types` has every value's, `note(number, step)` may add a comment to a step's line."""
    meshes = meshes_of(types.values())
    names = {m: f"m{k}" for k, m in enumerate(meshes)}
    several = len(meshes) > 1

    def typed(t: TensorType) -> str:
        return f"{t} on {names[t.mesh]}" if several else str(t)

    lines = ["program"]
    lines += [f"  mesh {names[m]}: {m}" if several else f"  mesh {m}" for m in meshes]
    for table in tables_of(types.values()):
        lines += [f"  {table}", *(f"    {row}" for row in table.rows)]
    lines += [f"  input %{name}: {typed(t)}" for name, t in inputs]
    body: list[tuple[str, str]] = []
    for number, step in enumerate(steps):
        results = ", ".join(f"%{r}" for r in step.results)
        claims = "; ".join(typed(types[r]) for r in step.results)
        text = f"  {results} = {op_text(step.op, step.operands, names)}: {claims}"
        body.append((text, note(number, step) if note else ""))
    width = max((len(t) for t, _ in body if len(t) <= ALIGNED), default=0)
    lines += [f"{t:<{width}}  # {n}" if n else t for t, n in body]
    if outputs:
        lines.append(f"  output {', '.join('%' + o for o in outputs)}")
    return "\n".join(lines)


def meshes_of(types: Iterable[TensorType]) -> tuple[Mesh, ...]:
    """Return the distinct meshes of types, in order of appearance."""
    return tuple(dict.fromkeys(t.mesh for t in types))


def tables_of(types: Iterable[TensorType]) -> tuple[BoxTable, ...]:
    """Return the distinct tables of boxes of types, in order of appearance."""
    return tuple(dict.fromkeys(t.layout.boxes for t in types if t.layout.boxes is not None))


def _whole(value: object, _: object = None) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _tuple_of(item: Callable[[object], bool]) -> Callable[[object, object], bool]:
    return lambda value, _: isinstance(value, tuple) and all(map(item, value))


def _any(value: object, _: object) -> bool:
    return True


# By the annotation of an op's field, what a text may say there; of a field with another annotation, anything.
_KINDS: dict[str, Callable[[Any, dict[str, Mesh]], bool]] = {
    "int": _whole,
    "str": lambda value, _: isinstance(value, str),
    "Dims": lambda value, _: _whole(value) or _tuple_of(_whole)(value, _),
    "tuple[int, ...]": _tuple_of(_whole),
    "tuple[str, ...]": _tuple_of(lambda x: isinstance(x, str)),
    "Layout": lambda value, _: isinstance(value, Layout),
    "Layout | None": lambda value, _: isinstance(value, Layout),
    "BoxTable | None": lambda value, _: isinstance(value, BoxTable),
    "Mesh": lambda value, meshes: isinstance(value, str) and value in meshes,
}


class Claim(NamedTuple):
    """What a text says of a value: its type, and where in the text that stands."""

    value: str
    type: TensorType
    position: int


@dataclass(frozen=True, slots=True)
class Written:
    """What the text of a program says, not yet verified."""

    inputs: tuple[tuple[str, TensorType], ...]
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]
    claims: tuple[Claim, ...]
    text: str

    def check(self, types: Mapping[str, TensorType]) -> None:
        """Hold the claims against the types that were derived; raises `ParseError` at the first wrong one."""
        for name, claimed, position in self.claims:
            if types[name] != claimed:
                raise ParseError(f"%{name} has the type {types[name]}, not {claimed}", self.text, position)


class _Parser:
    def __init__(self, text: str) -> None:
        border.text("the text of a program", text, ParseError)
        self.text = _COMMENT.sub(lambda m: " " * len(m.group()), text)  # no op has '#' in a quoted attribute
        self.scanner = Scanner(self.text)
        self.meshes: dict[str, Mesh] = {}
        self.tables: dict[str, BoxTable] = {}
        self.inputs: list[tuple[str, TensorType]] = []
        self.steps: list[Step] = []
        self.claims: list[Claim] = []
        self.outputs: tuple[str, ...] = ()
        self.known_types: dict[tuple[str, str], TensorType] = {}  # by the mesh's name and the text
        self.known_ops: dict[tuple[str, str], Op] = {}  # by the op's name and the text of its attributes

    def newline(self) -> None:
        s = self.scanner
        s.skip()
        if not s.end() and s.text[s.position] != "\n":
            raise s.error("unexpected text at the end of the line")
        while s.position < len(s.text) and s.text[s.position] in " \t\r\n":
            s.position += 1

    def value(self) -> str:
        found = self.scanner.match(_VALUE)
        if found is None:
            raise self.scanner.error("expected a value, as in %0")
        return found[1:]

    def type(self) -> TensorType:
        s = self.scanner
        if not self.meshes:
            raise s.error("a type needs a mesh line before it")
        ahead = _ON_MESH.match(s.text, s.position)
        name = ahead.group(1) if ahead else next(iter(self.meshes))
        if name not in self.meshes:
            raise s.error(f"unknown mesh {name!r}; legal are {', '.join(self.meshes)}")
        s.skip()
        guess = _TYPE.match(s.text, s.position)
        key = (name, guess.group() if guess else "")
        t = self.known_types.get(key)
        if guess and t is not None:
            s.position = guess.end()
        else:
            t = scan_type(s, self.meshes[name], self.tables)
            if guess and guess.end() == s.position:
                self.known_types[key] = t
        if s.take("on "):
            s.match(_MESH_NAME)
        return t

    def attribute(self) -> Any:
        s = self.scanner
        if s.peek("["):
            return scan_layout(s)
        if s.peek("boxes#"):
            return scan_table_name(s, self.tables)
        if s.take("("):
            items: list[Any] = []
            while not s.take(")"):
                items.append(self.attribute())
                if not s.take(",") and not s.peek(")"):
                    raise s.error("expected ',' or ')' in a list")
            return tuple(items)
        quoted = s.match(_STRING)
        if quoted is not None:
            try:
                return json.loads(quoted)
            except ValueError as error:
                raise s.error(f"a malformed string before this: {error}") from None
        number = s.match(_NUMBER)
        if number is not None:
            if len(number) > MOST_DIGITS:
                raise s.error(f"a number of {len(number)} characters ends here; legal are at most {MOST_DIGITS}")
            return float(number) if re.search(r"[.eE]", number) else int(number)
        name = s.name("an attribute's value")
        return _WORDS.get(name, name)

    def op(self) -> tuple[Op, tuple[str, ...]]:
        s = self.scanner
        s.skip()
        start = s.position
        name = s.name("an op")
        cls = OPS.get(name)
        if cls is None:
            s.position = start
            raise s.error(f"unknown op {name!r}; legal are {', '.join(OPS)}")
        s.expect("(", f"the op {name}")
        operands: list[str] = []
        while s.peek("%"):
            operands.append(self.value())
            if not s.take(","):
                break
        guess = _ATTRIBUTES.match(s.text, s.position)
        key = (name, guess.group() if guess else "")
        op = self.known_ops.get(key)
        if guess and op is not None:
            s.position = guess.end()
            return op, tuple(operands)
        attributes = self.attributes(name, cls)
        try:
            op = cls(**attributes)
        except (TypeError, ShardplanError) as error:
            s.position = start
            reason = str(error).partition("\n")[0].replace(f"{cls.__name__}.__init__()", name)
            raise s.error(f"{name}: {reason}") from None
        if guess and guess.end() == s.position:
            self.known_ops[key] = op
        return op, tuple(operands)

    def attributes(self, name: str, cls: type[Op]) -> dict[str, Any]:
        """Read the attributes of an op, and the bracket behind them."""
        s = self.scanner
        fields = {f.name: f for f in dataclasses.fields(cls)}
        attributes: dict[str, Any] = {f.name: None for f in fields.values() if str(f.type).endswith("| None")}
        if s.take(";"):
            while True:
                s.skip()
                at = s.position
                key = s.name("an attribute")
                if key not in fields:
                    s.position = at
                    raise s.error(f"{name} has no attribute {key!r}; legal are {', '.join(fields)}")
                s.expect("=", "an attribute")
                s.skip()
                value, end = self.attribute(), s.position
                if not _KINDS.get(str(fields[key].type), _any)(value, self.meshes):
                    s.position = at
                    raise s.error(f"{name}: {key}={shown(value)} is no {fields[key].type}")
                s.position = end
                attributes[key] = self.meshes.get(value, value) if fields[key].type == "Mesh" else value
                if not s.take(","):
                    break
        s.expect(")", f"the op {name}")
        return attributes

    def line(self) -> None:
        s = self.scanner
        if s.take("mesh "):
            name = s.match(re.compile(r"m\d+(?=\s*:)")) or f"m{len(self.meshes)}"
            s.take(":")
            self.meshes[name] = scan_mesh(s)
            self.known_types.clear()  # what was read so far stands for this name's other mesh
            self.known_ops.clear()
        elif s.peek("boxes#"):
            self.table()
        elif s.take("input "):
            name = self.value()
            s.expect(":", "an input")
            self.inputs.append((name, self.type()))
        elif s.take("output "):
            self.outputs = self.values()
        elif s.peek("%"):
            results = self.values()
            s.expect("=", "a step")
            op, operands = self.op()
            if s.take(":"):
                for k, result in enumerate(results):
                    if k:
                        s.expect(";", "the types of a step")
                    at = s.position
                    self.claims.append(Claim(result, self.type(), at))
            self.steps.append(Step(op, operands, results))
        else:
            raise s.error("expected 'mesh', 'input', 'output' or a step (%name = op(...))")

    def table(self) -> None:
        """Read the name of a table, and the lines of its rows."""
        s = self.scanner
        s.skip()
        at, name, rows = s.position, s.match(NAME), []
        while _NEXT_ROW.match(s.text, s.position):
            self.newline()
            rows.append(scan_row(s))
        end, s.position = s.position, at
        try:
            table = BoxTable(rows)
        except LayoutError as error:
            raise s.error(str(error)) from None
        if table.name != name or name in self.tables:
            raise s.error(f"these are the rows of {table}" if table.name != name else f"{name} is listed twice")
        self.tables[table.name], s.position = table, end

    def values(self) -> tuple[str, ...]:
        found = [self.value()]
        while self.scanner.take(","):
            found.append(self.value())
        return tuple(found)


def parse_text(text: str) -> Written:
    """Read the text of a program; raises `ParseError` at the character."""
    parser = _Parser(text)
    scanner = parser.scanner
    while scanner.position < len(scanner.text) and scanner.text[scanner.position] in " \t\r\n":
        scanner.position += 1
    scanner.expect("program", "a program's first line")
    parser.newline()
    while not scanner.end():
        parser.line()
        parser.newline()
    return Written(tuple(parser.inputs), tuple(parser.steps), parser.outputs, tuple(parser.claims), parser.text)
