"""`close_composites`: composites that are written out become one step again: the inverse of a decomposition.

Found are softmax, layer and RMS norm, GELU, SiLU and attention. What is compared are formulas, up to the order of sums
and products, casts to wider floats and dims of size 1; a mean is a sum by the number of its elements. A mask is the
causal one where its value says so, whatever made it: it must hang on no input.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from shardplan.core.dtypes import numpy_dtype, stands_for
from shardplan.core.expression_tree import CUBIC, GELU_EXACT, Binary, Call, Name, Negate, Node, Number
from shardplan.core.op import Op
from shardplan.core.ops.arithmetic import Elementwise, ReduceDims
from shardplan.core.ops.compute import computing
from shardplan.core.ops.indexing import Constant
from shardplan.core.ops.layers import LayerNorm, RmsNorm, Softmax
from shardplan.core.ops.placing import Cast, Reshape
from shardplan.core.ops.products import Einsum
from shardplan.core.program import Program
from shardplan.core.program_builder import ProgramBuilder
from shardplan.core.reference import run_reference
from shardplan.core.step import Step, live_steps
from shardplan.core.tensor import TensorType

MOST_MASK = 1 << 24  # elements of a mask that is worked out


@dataclass(frozen=True, slots=True)
class Term:
    """A function of other terms; `value` is the name of what it is where a step makes it, else empty."""

    kind: str
    parts: tuple[Term, ...] = ()
    value: str = ""
    number: float = 0.0


class Formulas:
    """What the values of a program are, as terms; looked through only as far as asked."""

    def __init__(self, program: Program) -> None:
        self.program, self.types = program, program.types
        self.made = {r: step for step in program.steps for r in step.results}
        self.masks: dict[object, np.ndarray | None] = {}
        self.keys: dict[str, object] = {}

    def source(self, name: str) -> str:
        """The value that one is, but for dims of size 1 and casts between floats."""
        while (step := self.made.get(name)) is not None:
            t, u = self.types[step.operands[0]] if step.operands else None, self.types[name]
            thin = isinstance(step.op, Reshape) and t is not None and _sizes_above_one(t) == _sizes_above_one(u)
            cast = isinstance(step.op, Cast) and t is not None and _wider(t, u) and self._exact(step.operands[0])
            if not thin and not cast:
                break
            name = step.operands[0]
        return name

    def _exact(self, name: str) -> bool:
        """Whether a value is not a number that its dtype has rounded."""
        op = self.made[name].op if name in self.made else None
        return not isinstance(op, Constant) or float(numpy_dtype(op.dtype).type(op.value)) == op.value

    def term(self, name: str) -> Term:
        """What a value is."""
        name = self.source(name)
        step = self.made.get(name)
        if step is None:
            return Term("value", value=name)
        if isinstance(step.op, Elementwise):
            names = dict(zip(step.op.expression.names, step.operands, strict=True))
            return self._node(step.op.expression.root, names, name)
        if isinstance(step.op, Constant):
            return Term("number", value=name, number=float(step.op.value))
        if isinstance(step.op, ReduceDims):
            t = self.types[step.operands[0]]
            if step.op.dims == (t.ndim - 1,):
                inner = Term("value", value=self.source(step.operands[0]))
                return Term(step.op.reduction, (inner,), name, number=t.shape[-1])
        return Term("value", value=name)

    def _node(self, node: Node, names: Mapping[str, str], value: str = "") -> Term:
        match node:
            case Name(letter):
                return Term("value", value=self.source(names[letter]))
            case Number(number):
                return Term("number", number=float(number))
            case Negate(inner):
                return Term("*", (Term("number", number=-1.0), self._node(inner, names)), value)
            case Binary("**", left, Number(power)) if power in (2, 3):
                return Term("*", (self._node(left, names),) * int(power), value)
            case Binary(symbol, left, right):
                return Term(symbol, (self._node(left, names), self._node(right, names)), value)
            case Call(function, arguments):
                return Term(function, tuple(self._node(x, names) for x in arguments), value)

    def expand_term(self, term: Term) -> Term:
        """A term with what its value is."""
        return self.term(term.value) if term.kind == "value" else term

    def all_of(self, symbol: str, term: Term) -> list[Term]:
        """The terms of a sum or the factors of a product; a quotient by a root or by a number is a product."""
        found = self.expand_term(term)
        if symbol == "*" and found.kind == "/":
            by = self.expand_term(found.parts[1])
            if by.kind == "sqrt":
                return [*self.all_of("*", found.parts[0]), Term("rsqrt", by.parts)]
            if by.kind == "number" and by.number:
                return [*self.all_of("*", found.parts[0]), Term("number", number=1 / by.number)]
        if found.kind != symbol:
            return [term]
        return [x for part in found.parts for x in self.all_of(symbol, part)]

    def split(self, symbol: str, term: Term) -> tuple[float, list[Term]]:
        """The numbers of a sum or of a product, together, and the others."""
        parts = self.all_of(symbol, term)
        numbers = [x.number for x in map(self.expand_term, parts) if x.kind == "number"]
        rest = [x for x in parts if self.expand_term(x).kind != "number"]
        return (math.prod(numbers) if symbol == "*" else math.fsum(numbers)), rest

    # What the composites are made of; each gives the name of the value that it is made from, or none.

    def square(self, term: Term) -> Term | None:
        """Of what it is the square."""
        number, parts = self.split("*", term)
        return parts[0] if number == 1 and len(parts) == 2 and self.is_same(*parts) else None

    def mean(self, term: Term) -> Term | None:
        """Of what it is the mean over the last dim."""
        number, parts = self.split("*", term)
        if len(parts) != 1:
            return None
        found = self.expand_term(parts[0])
        whole = found.kind == "mean" and number == 1
        counted = found.kind == "sum" and stands_for(number * found.number, 1.0, self.types[found.value].dtype)
        return found.parts[0] if whole or counted else None

    def strip_stops(self, term: Term) -> Term:
        """A term, of a value through which no gradient goes that value."""
        step = self.made.get(term.value) if term.kind == "value" else None
        whole = step is not None and step.stopped == (0,) and step.op == Elementwise("a")
        return Term("value", value=self.source(step.operands[0])) if step is not None and whole else term

    def difference_sides(self, term: Term) -> tuple[Term, Term] | None:
        """The two sides of a difference."""
        found = self.expand_term(term)
        return (found.parts[0], found.parts[1]) if found.kind == "-" else None

    def is_same(self, x: Term, y: Term) -> bool:
        """Whether two terms are one value, or one formula of one."""
        if x == y or (x.value and x.value == y.value):
            return True
        a, b = self.expand_term(x), self.expand_term(y)
        return (
            a.kind == b.kind != "value"
            and (a.kind != "number" or a.number == b.number)
            and len(a.parts) == len(b.parts)
            and (bool(a.parts) or a.kind == "number")
            and all(self.is_same(p, q) for p, q in zip(a.parts, b.parts, strict=True))
        )

    def centred_source(self, term: Term) -> Term | None:
        """Of what it is the difference from its mean."""
        sides = self.difference_sides(term)
        of = self.mean(sides[1]) if sides else None
        return sides[0] if sides and of is not None and self.is_same(sides[0], of) else None

    def norm_source(self, term: Term) -> tuple[Term, float] | None:
        """Of an inverse root of a mean square with something added: the value, and what is added."""
        found = self.expand_term(term)
        if found.kind != "rsqrt":
            return None
        eps, parts = self.split("+", found.parts[0])
        inner = self.mean(parts[0]) if len(parts) == 1 else None
        of = self.square(inner) if inner is not None else None
        return (of, eps) if of is not None else None

    def key(self, name: str) -> object | None:
        """What a value without inputs is made of, the same for all that are made alike; None of another."""
        if name not in self.keys:
            step = self.made.get(name)
            inner = [self.key(o) for o in step.operands] if step else []
            known = step is not None and computing(step.op) is not None and None not in inner
            self.keys[name] = (step.op, step.results.index(name), *inner) if known and step else None
        return self.keys[name]

    def constant(self, name: str) -> np.ndarray | None:
        """The elements of a value that hangs on no input."""
        key = self.key(name)
        if key is None or math.prod(self.types[name].shape) > MOST_MASK:
            return None
        if key not in self.masks:
            steps = [self.program.steps[k] for k in live_steps(self.program.steps, (name,))]
            self.masks[key] = run_reference(Program((), steps, (name,)), ())[0][0]
        return self.masks[key]


Found = tuple[Op, list[str]]  # an op and its operands
Rule = Callable[[Formulas, ProgramBuilder, Step, Mapping[str, str]], str | None]


def _softmax(f: Formulas, name: str, t: TensorType) -> Found | None:
    found = f.term(name)
    if found.kind != "/":
        return None
    above, below = (f.expand_term(p) for p in found.parts)
    if below.kind != "sum" or above.kind != "exp" or not f.is_same(below.parts[0], found.parts[0]):
        return None
    sides = f.difference_sides(above.parts[0])
    top = f.expand_term(f.strip_stops(sides[1])) if sides else None  # the gradient is the same with it or without
    if not sides or top is None or top.kind != "max" or not f.is_same(top.parts[0], sides[0]):
        return None
    return Softmax(t.ndim - 1), [sides[0].value]


def _layer_norm(f: Formulas, name: str, t: TensorType) -> Found | None:
    found = f.term(name)
    if found.kind != "+":
        return None
    for product, bias in (found.parts, found.parts[::-1]):
        if bias.kind != "value" or f.types[bias.value].shape != t.shape[-1:]:
            continue
        number, parts = f.split("*", product)
        for x, root, gain in itertools.permutations(parts) if number == 1 and len(parts) == 3 else ():
            of, normed = f.centred_source(x), f.norm_source(root)
            if of is not None and normed and f.is_same(normed[0], x) and f.types[gain.value].shape == t.shape[-1:]:
                return LayerNorm(normed[1]), [of.value, gain.value, bias.value]
    return None


def _rms_norm(f: Formulas, name: str, t: TensorType) -> Found | None:
    number, parts = f.split("*", f.term(name))
    for x, root, gain in itertools.permutations(parts) if number == 1 and len(parts) == 3 else ():
        normed = f.norm_source(root) if gain.value and x.value else None
        if normed and f.is_same(normed[0], x) and f.types[gain.value].shape == t.shape[-1:]:
            return RmsNorm(normed[1]), [x.value, gain.value]
    return None


def _gelu(f: Formulas, name: str, t: TensorType) -> Found | None:
    number, parts = f.split("*", f.term(name))
    for x, other in itertools.permutations(parts) if number == 0.5 and len(parts) == 2 else ():
        one, inner = f.split("+", other)
        bent = f.expand_term(inner[0]) if one == 1 and len(inner) == 1 else None
        if bent is None or bent.kind != "tanh":
            continue
        root, product = f.split("*", bent.parts[0])
        added = f.expand_term(product[0]) if len(product) == 1 else bent
        for y, cube in itertools.permutations(added.parts) if added.kind == "+" else ():
            c, three = f.split("*", cube)
            close = stands_for(c, CUBIC, t.dtype) and stands_for(root, math.sqrt(2 / math.pi), t.dtype)
            if close and f.is_same(x, y) and len(three) == 3 and all(f.is_same(x, z) for z in three):
                return Elementwise("gelu(a)"), [x.value]
    return None


def _exact_gelu(f: Formulas, name: str, t: TensorType) -> Found | None:
    number, parts = f.split("*", f.term(name))
    for x, other in itertools.permutations(parts) if number == 0.5 and len(parts) == 2 else ():
        sides = f.difference_sides(other)  # 1 - erf(-x), which is the complement of erf, is 1 + erf(x)
        one, inner = f.split("+", other if sides is None else sides[0])
        rest = inner if sides is None else [*inner, sides[1]]
        bent = f.expand_term(rest[0]) if one == 1 and len(rest) == 1 else None
        if bent is None or bent.kind != "erf" or not x.value:
            continue
        scale, of = f.split("*", bent.parts[0])
        close = stands_for(scale, math.sqrt(0.5) * (1 if sides is None else -1), t.dtype)
        if close and len(of) == 1 and f.is_same(of[0], x):
            return Elementwise(GELU_EXACT), [x.value]
    return None


def _silu(f: Formulas, name: str, t: TensorType) -> Found | None:
    number, parts = f.split("*", f.term(name))
    for x, other in itertools.permutations(parts) if number == 1 and len(parts) == 2 else ():
        gate = f.expand_term(other)
        if gate.kind == "sigmoid" and x.value and f.is_same(gate.parts[0], x):
            return Elementwise("silu(a)"), [x.value]
    return None


_RULES = (_softmax, _layer_norm, _rms_norm, _gelu, _exact_gelu, _silu)


def composite(f: Formulas, name: str) -> Found | None:
    """What a value is as one op of other values, of its dtype and shape; None where it is not written out."""
    t = f.types[name]
    for rule in _RULES:
        found = rule(f, name, t)
        if found is not None and all(o and f.types[o].dtype == t.dtype for o in found[1]):
            return found if f.types[found[1][0]].shape == t.shape else None
    return None


def close_composites(program: Program, rule: Rule) -> Program:
    """Return the program with composites as one step each; `rule` may write a step in another way, too."""
    f = Formulas(program)
    builder, names = ProgramBuilder(dict(program.inputs)), {n: n for n, _ in program.inputs}
    turned: dict[str, tuple[str, str]] = {}  # transposed values: of which one, and its spec
    seen = 0
    for step in program.steps:
        for new in builder.steps[seen:]:
            if isinstance(new.op, Einsum) and len(new.operands) == 1 and _turns(new.op):
                turned[new.results[0]] = (new.operands[0], new.op.spec)
        seen = len(builder.steps)
        found = composite(f, step.results[0]) if isinstance(step.op, Elementwise) else None
        if found is not None:
            op, operands = found
            names[step.results[0]] = builder(op, *(names[o] for o in operands))
            continue
        own = rule(f, builder, step, names)
        if own is not None:
            names[step.results[0]] = own
            continue
        op, operands = _through(step.op, [names[o] for o in step.operands], turned)
        names |= zip(step.results, builder.write_step(op, *operands, stopped=step.stopped), strict=True)
    outputs = [names[o] for o in program.outputs]
    return Program(program.inputs, [builder.steps[k] for k in builder.live(outputs)], outputs)


def _turns(op: Einsum) -> bool:
    """Whether it transposes, and no more."""
    (before,), after = op.sides
    return sorted(before) == sorted(after) and len({*before}) == len(before)


def _through(op: Op, operands: list[str], turned: Mapping[str, tuple[str, str]]) -> tuple[Op, list[str]]:
    """A product of transposed values as one of what they are transposed from."""
    if not isinstance(op, Einsum) or not any(o in turned for o in operands):
        return op, operands
    sides, out = op.sides
    new, names = list[str](), list[str]()
    for side, operand in zip(sides, operands, strict=True):
        if operand in turned:
            operand, spec = turned[operand]
            before, after = spec.split("->")
            side = "".join(dict(zip(after, side, strict=True))[c] for c in before)
        new.append(side)
        names.append(operand)
    return Einsum(f"{','.join(new)}->{out}"), names


def _wider(t: TensorType, u: TensorType) -> bool:
    """Whether a cast between floats keeps every number."""
    return t.itemsize <= u.itemsize and all(numpy_dtype(x.dtype).kind in "fV" for x in (t, u))


def _sizes_above_one(t: TensorType) -> tuple[int, ...]:
    return tuple(n for n in t.shape if n > 1)
