"""One notation of expressions, Python's, in named dialects: a `Dialect` says what of it is legal, and reads a tree.

A dialect is no language of its own: precedences, associativity, names, signs and the tree are the same in all. What a
tree means is its user's: the elementwise dialect on arrays (`expression`), sizes of weights exactly (`arithmetic`).
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from shardplan.core.expression_tree import IF, NOT, SYMBOLS, Binary, Call, Name, Negate, Node, Number
from shardplan.errors import ParseError


@dataclass(frozen=True, slots=True)
class Dialect:
    """What of the notation is legal in one kind of expression, and what its messages call it."""

    subject: str  # "an expression"
    legal: str  # what closes a message
    symbols: frozenset[str]  # of `SYMBOLS`
    functions: Mapping[str, int | None]  # the number of arguments, None: one or more
    operand: re.Pattern[str]  # a legal name
    operands: str  # what legal names are called
    floats: bool  # whether a number may be no integer
    numbers: str  # what legal constants are called
    logic: bool  # `not`, `x if c else y`, True and False; and comparisons also outside the condition of a `where`

    def parse(self, text: str) -> Node:
        """Return the tree of a text; raises `ParseError` pointing at the character."""
        body = text.strip()
        start = len(text) - len(text.lstrip())
        try:
            tree = ast.parse(body, mode="eval").body
        except SyntaxError as error:
            before = "".join(body.splitlines(keepends=True)[: (error.lineno or 1) - 1])
            at = min(len(before) + error.offset - 1, len(body)) if error.offset else len(body)
            raise ParseError(f"{self.subject} is malformed: {error.msg}", text, start + at) from None
        except (ValueError, RecursionError, MemoryError) as error:
            raise ParseError(f"{self.subject} is malformed: {error}", text, start) from None
        try:
            return _TreeReader(self, text, body, start).convert(tree, self.logic)
        except RecursionError:
            raise ParseError(f"{self.subject} is nested too deeply; cut it into several", text, start) from None


@dataclass(frozen=True, slots=True)
class _TreeReader:
    """What converts one text's syntax tree, and knows where in the text a node of it stands."""

    dialect: Dialect
    text: str
    body: str  # without blanks around it
    start: int  # of the body in the text

    def error(self, node: ast.expr, message: str) -> ParseError:
        """The error that points at a node: lines count from 1, columns in bytes of UTF-8."""
        *above, line = self.body.splitlines(keepends=True)[: max(node.lineno, 1)] or [""]
        column = len(line.encode()[: node.col_offset].decode(errors="ignore"))
        return ParseError(message, self.text, self.start + sum(map(len, above)) + column)

    def convert(self, node: ast.expr, comparable: bool) -> Node:
        """Return the tree of a node; `comparable` says whether it may be a comparison."""
        dialect, logic = self.dialect, self.dialect.logic  # where it has logic, a comparison stands anywhere
        match node:
            case ast.Name(id=name):
                if not dialect.operand.fullmatch(name):
                    raise self.error(node, f"unknown operand {name!r}; operands are {dialect.operands}")
                return Name(name)
            case ast.Constant(value=value):
                if (
                    not isinstance(value, int | float)
                    or not abs(value) <= sys.float_info.max
                    or (isinstance(value, float) and not dialect.floats)
                    or (isinstance(value, bool) and not logic)
                ):
                    raise self.error(node, f"the constant {ast.unparse(node)} is not {dialect.numbers}")
                return Number(value)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                inner = self.convert(operand, logic)
                return Number(-inner.value) if isinstance(inner, Number) else Negate(inner)
            case ast.UnaryOp(op=ast.Not(), operand=operand) if logic:
                return Call(NOT, (self.convert(operand, logic),))
            case ast.BinOp(left=left, op=op, right=right) if (symbol := self._symbol(op)) is not None:
                result = Binary(symbol, self.convert(left, logic), self.convert(right, logic))
                if symbol == "**" and not isinstance(result.right, Number):
                    raise self.error(right, "the exponent of ** is a number")
                return result
            case ast.BoolOp(op=op, values=[left, *more]) if (symbol := self._symbol(op)) is not None:
                result = self.convert(left, logic)
                for right in more:
                    result = Binary(symbol, result, self.convert(right, logic))
                return result
            case ast.Compare(left=left, ops=[op], comparators=[right]) if (symbol := self._symbol(op)) is not None:
                if not comparable:
                    raise self.error(node, "a comparison is legal only as the condition of where(condition, yes, no)")
                return Binary(symbol, self.convert(left, logic), self.convert(right, logic))
            case ast.IfExp(test=test, body=yes, orelse=no) if logic:
                return Call(IF, (self.convert(test, logic), self.convert(yes, logic), self.convert(no, logic)))
            case ast.Call(func=ast.Name(id=function), args=[*_, _] as args, keywords=[]):
                if function not in dialect.functions:
                    shown = ", ".join(dialect.functions)
                    raise self.error(node, f"unknown function {function!r}; legal are {shown}")
                arity = dialect.functions[function]
                if arity not in (None, len(args)):
                    raise self.error(node, f"{function} takes {arity} arguments, not {len(args)}")
                free = [logic or (function == "where" and k == 0) for k in range(len(args))]
                return Call(function, tuple(map(self.convert, args, free)))
            case _:
                shown = ast.unparse(node)
                raise self.error(node, f"{shown!r} is not {dialect.subject}; legal are {dialect.legal}")

    def _symbol(self, op: ast.AST) -> str | None:
        found = SYMBOLS.get(type(op))
        return found if found in self.dialect.symbols else None
