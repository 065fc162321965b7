"""The tree of an elementwise expression: its nodes, the functions it may call, its text and its meaning."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, assert_never

from shardplan.core.namespace import Dtype, Namespace, Tensor


@dataclass(frozen=True, slots=True)
class Name:
    """An operand."""

    name: str


@dataclass(frozen=True, slots=True)
class Number:
    """A constant; a sign directly before it belongs to it."""

    value: int | float


@dataclass(frozen=True, slots=True)
class Negate:
    """Unary minus."""

    operand: Node


@dataclass(frozen=True, slots=True)
class Binary:
    """Arithmetic, a comparison, or `and`, `or`: one of `SYMBOLS`."""

    symbol: str
    left: Node
    right: Node


@dataclass(frozen=True, slots=True)
class Call:
    """A function of the dialect applied to its arguments; `NOT` and `IF` stand for `not x` and `x if c else y`."""

    function: str
    arguments: tuple[Node, ...]


Node = Name | Number | Negate | Binary | Call


def _abs(xp: Namespace, x: Tensor) -> Tensor:
    return xp.where(x < 0, -x, x)


def _sigmoid(xp: Namespace, x: Tensor) -> Tensor:
    small = xp.exp(-_abs(xp, x))  # never overflows
    return xp.where(x >= 0, 1 / (1 + small), small / (1 + small))


CUBIC = 0.044715  # of the usual approximation of GELU by a tanh: Hendrycks and Gimpel, arXiv 1606.08415, section 2


def _gelu(xp: Namespace, x: Tensor) -> Tensor:
    return 0.5 * x * (1 + xp.tanh(math.sqrt(2 / math.pi) * (x + CUBIC * x * x * x)))


GELU_EXACT = f"0.5 * a * (1 + erf({math.sqrt(0.5)} * a))"  # the same paper, section 2
_ROOT = math.sqrt(2 / math.pi)
_GELU_TANH = f"tanh({_ROOT} * (a + {CUBIC} * a * a * a))"
_GELU_SLOPE = f"0.5 * (1 + {_GELU_TANH}) + 0.5 * a * (1 - {_GELU_TANH} ** 2) * ({_ROOT} + {3 * CUBIC * _ROOT} * a * a)"
# Of a maximum; equal arguments share it.
_HALVES = ("where(a > b, 1, where(a == b, 0.5, 0))", "where(b > a, 1, where(a == b, 0.5, 0))")


@dataclass(frozen=True, slots=True)
class Function:
    """A function: its arity, meaning, flops an element, whether it increases, which dtypes it is defined on, slopes."""

    arity: int
    meaning: Callable[..., Any]
    flops: int = 1  # the operations of its formula, an elementary function counting as one
    increasing: bool = False  # on the whole extended line: the fill of a max or min partial is an infinity
    integers: bool = False  # maps integers to integers
    complex: bool = True
    slopes: tuple[str, ...] = ()  # the derivatives in its arguments a and b, as expressions of these


FUNCTIONS: dict[str, Function] = {
    "exp": Function(1, lambda xp, x: xp.exp(x), increasing=True, slopes=("exp(a)",)),
    "log": Function(1, lambda xp, x: xp.log(x), slopes=("1 / a",)),
    "sqrt": Function(1, lambda xp, x: xp.sqrt(x), slopes=("0.5 / sqrt(a)",)),
    "rsqrt": Function(1, lambda xp, x: 1 / xp.sqrt(x), 2, slopes=("-0.5 * rsqrt(a) / a",)),
    "tanh": Function(1, lambda xp, x: xp.tanh(x), increasing=True, slopes=("1 - tanh(a) ** 2",)),
    "erf": Function(
        1, lambda xp, x: xp.erf(x), increasing=True, complex=False, slopes=(f"{2 / math.sqrt(math.pi)} * exp(-a * a)",)
    ),
    "relu": Function(
        1,
        lambda xp, x: xp.maximum(x, xp.full((), 0, xp.dtype(x))),
        increasing=True,
        integers=True,
        complex=False,
        slopes=("where(a > 0, 1, 0)",),
    ),
    "sigmoid": Function(1, _sigmoid, 4, increasing=True, complex=False, slopes=("sigmoid(a) * (1 - sigmoid(a))",)),
    "gelu": Function(1, _gelu, 9, complex=False, slopes=(_GELU_SLOPE,)),
    "silu": Function(
        1, lambda xp, x: x * _sigmoid(xp, x), 5, complex=False, slopes=("sigmoid(a) * (1 + a * (1 - sigmoid(a)))",)
    ),
    "sin": Function(1, lambda xp, x: xp.sin(x), slopes=("cos(a)",)),
    "cos": Function(1, lambda xp, x: xp.cos(x), slopes=("-sin(a)",)),
    "abs": Function(1, _abs, integers=True, complex=False, slopes=("where(a > 0, 1, where(a < 0, -1, 0))",)),
    "maximum": Function(2, lambda xp, x, y: xp.maximum(x, y), integers=True, complex=False, slopes=_HALVES),
    "minimum": Function(2, lambda xp, x, y: xp.minimum(x, y), integers=True, complex=False, slopes=_HALVES[::-1]),
    "where": Function(3, lambda xp, condition, x, y: xp.where(condition, x, y), integers=True),
}
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: x * y,
    "/": lambda x, y: x / y,
    "**": lambda x, y: x**y,
    "<": lambda x, y: x < y,
    "<=": lambda x, y: x <= y,
    ">": lambda x, y: x > y,
    ">=": lambda x, y: x >= y,
    "==": lambda x, y: x == y,
    "!=": lambda x, y: x != y,
}
ORDERED = ("<", "<=", ">", ">=")  # not defined for complex numbers
COMPARISONS = (*ORDERED, "==", "!=")
NOT, IF = "not", "if"  # keywords, and so no function's names; the arguments of an `IF` are condition, yes, no
# As in Python, so that text parses back to the same tree: a higher one binds more tightly.
LOOSEST, INVERSION, COMPARISON, NEGATION, POWER = 0, 3, 4, 7, 8
PRECEDENCE = {"or": 1, "and": 2, "+": 5, "-": 5, "*": 6, "/": 6, "//": 6, "**": POWER} | dict.fromkeys(
    COMPARISONS, COMPARISON
)
SYMBOLS: dict[type[ast.AST], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Pow: "**",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.And: "and",
    ast.Or: "or",
}
ZERO = -1  # the degree of the constant 0: homogeneous of every degree


def walk(node: Node) -> list[Node]:
    """Return the nodes that compute, a constant exponent being part of its power."""
    found: list[Node] = [node]
    match node:
        case Name() | Number():
            pass
        case Negate(operand):
            found += walk(operand)
        case Binary("**", left, _):  # the exponent is part of the operation
            found += walk(left)
        case Binary(_, left, right):
            found += walk(left) + walk(right)
        case Call(_, arguments):
            for x in arguments:
                found += walk(x)
        case _:
            assert_never(node)
    return found


def text_of(node: Node, outer: int) -> str:
    """Return the text of a node inside an operation of precedence `outer`."""
    match node:
        case Name(name):
            return name
        case Number(value):
            # Python reads -2 ** 2 as -(2 ** 2): a base with a sign is set in parentheses.
            return f"({value!r})" if outer >= POWER and math.copysign(1, value) < 0 else repr(value)
        case Negate(operand):
            return _paren(f"-{text_of(operand, NEGATION)}", outer > NEGATION)
        case Binary("**", left, right):
            # It associates to the right, and an exponent may have a sign.
            return _paren(f"{text_of(left, POWER + 1)} ** {text_of(right, NEGATION)}", outer > POWER)
        case Binary(symbol, left, right):
            own = PRECEDENCE[symbol]
            first = own + (own == COMPARISON)  # a < b < c would be a chain
            return _paren(f"{text_of(left, first)} {symbol} {text_of(right, own + 1)}", outer > own)
        case Call("not", (operand,)):
            return _paren(f"not {text_of(operand, INVERSION)}", outer > INVERSION)
        case Call("if", (condition, yes, no)):
            of = text_of(yes, LOOSEST + 1), text_of(condition, LOOSEST + 1), text_of(no, LOOSEST)
            return _paren("{} if {} else {}".format(*of), outer > LOOSEST)
        case Call(function, arguments):
            return f"{function}({', '.join(text_of(x, LOOSEST) for x in arguments)})"
        case _:
            assert_never(node)


def _paren(text: str, needed: bool) -> str:
    return f"({text})" if needed else text


def evaluate(node: Node, values: Mapping[str, Tensor], xp: Namespace, dtype: Dtype) -> Tensor:
    """Return the value of a node for operands of one dtype."""
    match node:
        case Name(name):
            return values[name]
        case Number(value):
            return xp.full((), value, dtype)
        case Negate(operand):
            return -evaluate(operand, values, xp, dtype)
        case Binary("**", left, Number(exponent)):
            return evaluate(left, values, xp, dtype) ** exponent
        case Binary(symbol, left, right):
            return BINARY[symbol](evaluate(left, values, xp, dtype), evaluate(right, values, xp, dtype))
        case Call(function, arguments):
            return FUNCTIONS[function].meaning(xp, *(evaluate(x, values, xp, dtype) for x in arguments))
        case _:
            assert_never(node)
