"""A `FactorRule` as one line of text: `[v h] [b s] -> [b s h] | sum: v`.

A bracket is a tensor, a name in it a dim and the factor that the dim is, `(a b)` a dim of several factors, major to
minor; `a=4` says the size of a factor that no operand's shape tells. After `|` stand the factors that do not merely
pass: `sum:`, `max:` or `min:` those that are reduced, `fixed:` those that may not be sharded. Every other factor of an
operand is in a result, or of size 1 by the text, and then may not be sharded. A factor that is in results only has its
size in the text or by keyword, and carries what the op's `over` says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from shardplan.core.factor_rule import Dims, Factor, FactorRule
from shardplan.core.notation import NAME, Scanner
from shardplan.core.tensor import TensorType
from shardplan.errors import ParseError, TypingError

MARKS = ("sum", "max", "min", "fixed")


@dataclass(frozen=True, slots=True)
class RuleText:
    """A parsed rule: what holds for operands of any shapes."""

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    marks: tuple[tuple[str, str], ...]  # factor, mark
    sizes: tuple[tuple[str, int], ...]  # factor, size said in the text
    names: tuple[str, ...]  # every factor once: those of the results, then the others


def rule_of(what: str, text: str, operands: Sequence[TensorType], **sizes: int) -> FactorRule:
    """Return the rule that a text says of operands; `what` opens every message.

    `sizes` are those of factors which neither a shape nor the text tells. Raises `ParseError` at the character,
    `TypingError` where count, dims or sizes of the operands do not fit.

    >>> from shardplan.core.mesh import Mesh
    >>> t = TensorType("f32", (12, 5), (), Mesh(x=2))
    >>> print(rule_of("split", "[(a=3 b) c] -> [a b c]", [t]))
    ([ab,c])->([a,b,c]) {a=3,b=4,c=5}
    """
    rule = parse_rule(text)
    if len(operands) != len(rule.operands):
        raise TypingError(f"{what} takes {len(rule.operands)} operands, not {len(operands)}")
    known = sizes | dict(rule.sizes)
    groups: list[tuple[int, TensorType, tuple[str, ...], int]] = []
    for k, (dims, t) in enumerate(zip(rule.operands, operands, strict=True)):
        if len(dims) != len(t.shape):
            raise TypingError(f"{what}: operand {k}, {t}, has {t.ndim} dims; legal is {len(dims)}")
        for names, n in zip(dims, t.shape, strict=True):
            if len(names) != 1:
                groups.append((k, t, names, n))
            elif known.setdefault(names[0], n) != n:
                raise TypingError(f"{what}: operand {k}, {t}, has {names[0]}={n}; legal is {known[names[0]]}")
    for k, t, names, n in groups:
        _fill(f"{what}: operand {k}, {t}, has a dim ({' '.join(names)})={n}", names, n, known)
    marks = dict(rule.marks)
    factors: list[Factor] = []
    for name in rule.names:
        if name not in known:
            raise TypingError(f"{what}: the factor {name} of the result is in no operand; legal is to give its size")
        mark = marks.get(name)
        kind = "pass" if mark is None else "replicate" if mark == "fixed" else "reduce"
        factors.append(Factor(name, known[name], kind, mark if kind == "reduce" else None))
    return FactorRule(rule.operands, rule.results, tuple(factors))


def _fill(where: str, names: tuple[str, ...], n: int, known: dict[str, int]) -> None:
    """Find the size of the one unknown factor of a dim."""
    told = math.prod(known[name] for name in names if name in known)
    free = [name for name in names if name not in known]
    if len(free) > 1:
        raise TypingError(f"{where}, of which the sizes of {', '.join(free)} are unknown; legal is one")
    if n % told or (not free and n != told):
        shown = " x ".join(f"{name}={known[name]}" for name in names if name in known)
        raise TypingError(f"{where}, which {shown} does not {'divide' if free else 'make'}")
    known.update(dict.fromkeys(free, n // told))


@lru_cache(maxsize=4096)
def parse_rule(text: str) -> RuleText:
    """Read a rule; raises `ParseError` at the character."""
    scanner, sizes = Scanner(text), dict[str, int]()
    operands = _side(scanner, sizes)
    scanner.expect("->", "a rule, between operands and results")
    results = _side(scanner, sizes)
    if not results:
        raise scanner.error("a rule has at least one result, as in [i j] -> [j i]")
    for names in ([n for dim in tensor for n in dim] for tensor in results):
        if twice := [n for n in names if names.count(n) > 1]:
            raise scanner.error(f"the factor {twice[0]} is twice in a result")
    marks: dict[str, str] = {}
    left, right = ({n for tensor in side for dim in tensor for n in dim} for side in (operands, results))
    while scanner.take("|"):
        mark = scanner.name(f"a mark; legal are {', '.join(MARKS)}")
        if mark not in MARKS:
            raise scanner.error(f"unknown mark {mark!r}; legal are {', '.join(MARKS)}")
        scanner.expect(":", f"the mark {mark}")
        while (name := scanner.match(NAME)) is not None:
            if name in marks or name not in left:
                raise scanner.error(f"the factor {name} is {'marked twice' if name in marks else 'in no operand'}")
            if mark != "fixed" and name in right:
                raise scanner.error(f"the factor {name} is reduced, but in a result")
            marks[name] = mark
    scanner.finish("the rule")
    marks |= dict.fromkeys(sorted(n for n in left - right - set(marks) if sizes.get(n) == 1), "fixed")
    lost = sorted(left - right - set(marks))
    if lost:
        raise ParseError(f"the factor {lost[0]} is in no result; legal is to mark it", text, len(text))
    names = tuple(dict.fromkeys(n for tensor in (*results, *operands) for dim in tensor for n in dim))
    return RuleText(operands, results, tuple(marks.items()), tuple(sizes.items()), names)


def _side(scanner: Scanner, sizes: dict[str, int]) -> tuple[Dims, ...]:
    tensors: list[Dims] = []
    while scanner.take("["):
        dims: list[tuple[str, ...]] = []
        while not scanner.take("]"):
            if not scanner.take("("):
                dims.append((_factor(scanner, sizes),))
                continue
            names = [_factor(scanner, sizes)]
            while not scanner.take(")"):
                names.append(_factor(scanner, sizes))
            dims.append(tuple(names))
        tensors.append(tuple(dims))
    return tuple(tensors)


def _factor(scanner: Scanner, sizes: dict[str, int]) -> str:
    name = scanner.match(NAME)
    if name is None:
        raise scanner.error("expected a factor, as in [i (j k)]")
    if scanner.take("="):
        n = scanner.integer(f"the size of the factor {name}")
        if n < 1 or sizes.setdefault(name, n) != n:
            raise scanner.error(f"the factor {name} has the size {n if n < 1 else f'{sizes[name]} and {n}'}")
    return name
