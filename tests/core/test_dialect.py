"""One notation in two dialects: what each takes, that text is read back, and that a message points at the character."""

import ast

import pytest

from shardplan.core.dialect import Dialect
from shardplan.core.expression import ELEMENTWISE
from shardplan.core.expression_tree import LOOSEST, text_of
from shardplan.errors import ParseError
from shardplan.movement.weights.arithmetic import SIZES, evaluate_arithmetic

TEXTS = [
    "a or b / c",
    "x if not y and (z or 3) else (d if e else -f // 2) + 1",
    "(a < b) == (not c)",
    "not a == b",
    "(not a) == b",
    "-(a + b) * c - (d - e)",
    "(a if b else c) if d else e",
    "min(a, b and c) - ceil(a / 3)",
    "(a and b) * (c or d)",
    "(a if b else c) or d",
]
VALUES = {"a": 5, "b": 0, "c": 7, "d": 3, "e": 2, "f": 9, "x": 0, "y": 1, "z": 0}


@pytest.mark.parametrize("text", TEXTS)
def test_a_size_is_read_back_from_its_text_and_is_what_python_says(text: str) -> None:
    shown = text_of(SIZES.parse(text), LOOSEST)
    assert ast.dump(ast.parse(shown)) == ast.dump(ast.parse(text))
    names = {**VALUES, "min": min, "ceil": lambda x: -(-x // 1)}
    values = {name: value or None for name, value in VALUES.items()}  # the config lacks what Python has as 0
    if "b /" not in text:
        values = dict(VALUES)
    assert evaluate_arithmetic(text, values.get) == eval(text, {}, names)  # the texts above


@pytest.mark.parametrize(
    ("dialect", "text", "message", "column"),
    [
        (SIZES, "num (", "a size is malformed: '(' was never closed", 4),
        (SIZES, "a + 1.5", "the constant 1.5 is not a whole number", 4),
        (SIZES, "2 * exp(a)", "unknown function 'exp'; legal are ceil, floor, min, max", 4),
        (SIZES, " a ** 2", "'a ** 2' is not a size; legal are numbers, names", 1),
        (SIZES, "1 + ceil(a, b)", "ceil takes 1 arguments, not 2", 4),
        (SIZES, "a < b < c", "'a < b < c' is not a size", 0),
        (SIZES, "'x'", "the constant 'x' is not a whole number", 0),
        (ELEMENTWISE, "a // b", "'a // b' is not an expression", 0),
        (ELEMENTWISE, "a + (b or c)", "'b or c' is not an expression", 5),
        (ELEMENTWISE, "a * True", "the constant True is not a finite number", 4),
        (ELEMENTWISE, "where(a if b else c, a, b)", "'a if b else c' is not an expression", 6),
    ],
)
def test_what_a_dialect_lacks_is_pointed_at(dialect: Dialect, text: str, message: str, column: int) -> None:
    with pytest.raises(ParseError) as caught:
        dialect.parse(text)
    assert message in str(caught.value)
    assert caught.value.position == column
