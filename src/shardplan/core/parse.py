"""Reads programs as `core.text` prints them; every error points at the character."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shardplan.core import validation
from shardplan.core.box_table import NAME, BoxTable, scan_row
from shardplan.core.layout import Layout, scan_layout
from shardplan.core.mesh import Mesh, scan_mesh
from shardplan.core.notation import MOST_DIGITS, Scanner
from shardplan.core.op import Op
from shardplan.core.registry import every_op, op_named
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType, scan_table_name, scan_type
from shardplan.core.text import BODY, WORDS
from shardplan.errors import LayoutError, ParseError, ShardplanError, excerpt

_VALUE = re.compile(r"%[A-Za-z0-9_.]+")
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][-+]?\d+)?")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_MESH_NAME = re.compile(r"m\d+")
_COMMENT = re.compile(r"(?<!\bboxes)#[^\n]*")
_STOP = re.compile(r"stop(?=\s*%)")
_NEXT_ROW = re.compile(r"\s*\n\s*\d")
_ON_MESH = re.compile(r"[^;\n]*?\son\s+(m\d+)")
# What a parser has read once it knows again: all of a type but its mesh, and an op's attributes with the bracket at the
# end. Either is a guess, right where reading ends at the same character; what is guessed wrong is read every time.
_TYPE = re.compile(r"\w+\[[^]\n]*\](?:[ \t]*\{[^}\n]*\})*")
_ATTRIBUTES = re.compile(r"[^\n]*?\)(?=[ \t]*(?::|\n|$))")
MOST_NESTED = 16  # bodies inside each other


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _tuple_of(item: Callable[[object], bool]) -> Callable[[object, object], bool]:
    return lambda value, _: isinstance(value, tuple) and all(map(item, value))


def _is_anything(value: object, _: object) -> bool:
    return True


# By the annotation of an op's field, what a text may say there; of a field with another annotation, anything.
_KINDS: dict[str, Callable[[Any, dict[str, Mesh]], bool]] = {
    "int": lambda value, _: _is_whole(value),
    "bool": lambda value, _: isinstance(value, bool),
    "float": lambda value, _: isinstance(value, float) or _is_whole(value),
    "str": lambda value, _: isinstance(value, str),
    "Dims": lambda value, _: _is_whole(value) or _tuple_of(_is_whole)(value, _),
    "tuple[int, ...]": _tuple_of(_is_whole),
    "tuple[str, ...]": _tuple_of(lambda x: isinstance(x, str)),
    "Layout": lambda value, _: isinstance(value, Layout),
    "Layout | None": lambda value, _: isinstance(value, Layout),
    "BoxTable | None": lambda value, _: isinstance(value, BoxTable),
    "Op": lambda value, _: isinstance(value, Op),
    "Mesh": lambda value, meshes: isinstance(value, str) and value in meshes,
}


class Claim(NamedTuple):
    """What a text says of a value: its type, and where in the text that stands."""

    value: str
    type: TensorType
    position: int


@dataclass(frozen=True, slots=True)
class ParsedProgram:
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


@dataclass(slots=True)
class _Scope:
    """What has been read of a program, or of a body in it."""

    inputs: list[tuple[str, TensorType]] = field(default_factory=list[tuple[str, TensorType]])
    steps: list[Step] = field(default_factory=list[Step])
    claims: list[Claim] = field(default_factory=list[Claim])
    outputs: tuple[str, ...] = ()

    def finish(self, text: str) -> ParsedProgram:
        return ParsedProgram(tuple(self.inputs), tuple(self.steps), self.outputs, tuple(self.claims), text)


class _Parser:
    def __init__(self, text: str, verified: Callable[[ParsedProgram], Any]) -> None:
        validation.text("the text of a program", text, ParseError)
        self.text = _COMMENT.sub(lambda m: " " * len(m.group()), text)  # no op has '#' in a quoted attribute
        self.scanner = Scanner(self.text)
        self.meshes: dict[str, Mesh] = {}
        self.tables: dict[str, BoxTable] = {}
        self.scope = _Scope()
        self.depth = 0  # of the body that is read
        self.verified = verified
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
            return tuple([self.attribute() for _ in s.items(")", "a list")])
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
        if s.peek("("):
            return self.read_op(name, *self.op_class(name))
        return WORDS.get(name, name)

    def op_class(self, name: str) -> tuple[type[Op], int]:
        """Return the op of a name, which was read last, and where it stands."""
        s = self.scanner
        start = s.position - len(name)
        cls = op_named(name)
        if cls is None:
            s.position = start
            raise s.error(f"unknown op {name!r}; legal are {', '.join(every_op())}")
        s.expect("(", f"the op {name}")
        return cls, start

    def read_op(self, name: str, cls: type[Op], start: int) -> Op:
        """Read what stands behind the operands of an op, and make it."""
        s = self.scanner
        attributes = self.attributes(name, cls)
        attributes |= {f.name: self.body(name) for f in dataclasses.fields(cls) if f.type == BODY}
        try:
            return cls(**attributes)
        except (TypeError, ShardplanError) as error:
            s.position = start
            reason = str(error).partition("\n")[0].replace(f"{cls.__name__}.__init__()", name)
            raise s.error(f"{name}: {reason}") from None

    def op(self) -> tuple[Op, tuple[str, ...], tuple[int, ...]]:
        s = self.scanner
        name = s.name("an op")
        cls, start = self.op_class(name)
        operands: list[str] = []
        stopped: list[int] = []
        while (stop := s.match(_STOP) is not None) or s.peek("%"):
            stopped += [len(operands)] if stop else []
            operands.append(self.value())
            if not s.take(","):
                break
        guess = _ATTRIBUTES.match(s.text, s.position)
        key = (name, guess.group() if guess else "")
        op = self.known_ops.get(key)
        if guess and op is not None:
            s.position = guess.end()
            return op, tuple(operands), tuple(stopped)
        op = self.read_op(name, cls, start)
        if guess and guess.end() == s.position:
            self.known_ops[key] = op
        return op, tuple(operands), tuple(stopped)

    def attributes(self, name: str, cls: type[Op]) -> dict[str, Any]:
        """Read the attributes of an op, and the bracket behind them."""
        s = self.scanner
        fields = {f.name: f for f in dataclasses.fields(cls) if f.type != BODY}
        # What has no default and is left out is None, where that is legal.
        bare = (f for f in fields.values() if f.default is dataclasses.MISSING and str(f.type).endswith("| None"))
        attributes: dict[str, Any] = {f.name: None for f in bare}
        if s.take(";"):
            while True:
                s.skip()
                at = s.position
                key = s.name("an attribute")
                if key not in fields:
                    s.position = at
                    raise s.error(f"{name} has no attribute {key!r}; legal are {', '.join(fields) or 'none'}")
                s.expect("=", "an attribute")
                s.skip()
                value, end = self.attribute(), s.position
                if not _KINDS.get(str(fields[key].type), _is_anything)(value, self.meshes):
                    s.position = at
                    raise s.error(f"{name}: {key}={excerpt(value)} is no {fields[key].type}")
                s.position = end
                attributes[key] = self.meshes.get(value, value) if fields[key].type == "Mesh" else value
                if not s.take(","):
                    break
        s.expect(")", f"the op {name}")
        return attributes

    def body(self, name: str) -> Any:
        """Read the body of an op, braces and all."""
        s, outer = self.scanner, self.scope
        s.expect("{", f"the op {name}, before its body")
        if self.depth == MOST_NESTED:
            raise s.error(f"bodies inside each other, more than {MOST_NESTED} deep")
        self.newline()
        self.scope, self.depth = _Scope(), self.depth + 1
        while not s.take("}"):
            if s.end():
                raise s.error(f"expected '}}' behind the body of {name}")
            self.line()
            self.newline()
        written, self.scope, self.depth = self.scope.finish(self.text), outer, self.depth - 1
        try:
            return self.verified(written)
        except ParseError:
            raise
        except ShardplanError as error:
            raise type(error)(f"the body of {name}: {error}") from None

    def line(self) -> None:
        s = self.scanner
        if not self.depth and s.take("mesh "):
            name = s.match(re.compile(r"m\d+(?=\s*:)")) or f"m{len(self.meshes)}"
            s.take(":")
            self.meshes[name] = scan_mesh(s)
            self.known_types.clear()  # what was read so far stands for this name's other mesh
            self.known_ops.clear()
        elif not self.depth and s.peek("boxes#"):
            self.table()
        elif s.take("input "):
            name = self.value()
            s.expect(":", "an input")
            self.scope.inputs.append((name, self.type()))
        elif s.take("output "):
            self.scope.outputs = self.values()
        elif s.peek("%"):
            results = self.values()
            s.expect("=", "a step")
            op, operands, stopped = self.op()
            if s.take(":"):
                for k, result in enumerate(results):
                    if k:
                        s.expect(";", "the types of a step")
                    at = s.position
                    self.scope.claims.append(Claim(result, self.type(), at))
            self.scope.steps.append(Step(op, operands, results, stopped))
        else:
            mesh = "" if self.depth else "'mesh', "  # meshes and tables are named once, above all bodies
            raise s.error(f"expected {mesh}'input', 'output' or a step (%name = op(...))")

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


def parse_text(text: str, verified: Callable[[ParsedProgram], Any]) -> Any:
    """Read the text of a program; `verified` makes one of what is written, and of what a body says.

    Raises `ParseError` at the character, and what `verified` raises.
    """
    parser = _Parser(text, verified)
    scanner = parser.scanner
    while scanner.position < len(scanner.text) and scanner.text[scanner.position] in " \t\r\n":
        scanner.position += 1
    scanner.expect("program", "a program's first line")
    parser.newline()
    while not scanner.end():
        parser.line()
        parser.newline()
    return verified(parser.scope.finish(parser.text))
