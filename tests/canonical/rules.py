"""The rules of the canonical form that look at one step and at what makes its operands; see `canonical`.

Steps are written one after another by `Rewriting`, each simplified where it is written; one that was written before is
not written again. Expressions are opened, a step for each operation, so that what two of them share is one step.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from string import ascii_letters

from tests.canonical.normal_expression import names_in

from shardplan.core.dtypes import numpy_dtype
from shardplan.core.expression import Expression
from shardplan.core.expression_tree import Binary, Call, Name, Negate, Node, Number
from shardplan.core.op import Op, results_of
from shardplan.core.ops.arithmetic import Elementwise, Expand
from shardplan.core.ops.indexing import Constant, Gather, Iota
from shardplan.core.ops.placing import Cast, Crop, Reshape
from shardplan.core.ops.products import Einsum
from shardplan.core.program import Program
from shardplan.core.program_builder import ProgramBuilder
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.errors import ShardplanError

MOST_OPERANDS = 26  # letters that an expression has
_WORD = re.compile(r"[A-Za-z_]\w*")


def lettered(tree: Node) -> tuple[Expression, list[str]]:
    """Return a tree whose operands are values as an expression, and the values in the order of its letters."""
    values = list(dict.fromkeys(names_in(tree)))
    short = {v: Name(ascii_letters[k]) for k, v in enumerate(values)}
    return Expression(named(tree, short)), values


def named(node: Node, nodes: Mapping[str, Node]) -> Node:
    """Return a node with others in the place of its operands."""
    match node:
        case Name(name):
            return nodes.get(name, node)
        case Negate(operand):
            return Negate(named(operand, nodes))
        case Binary(symbol, left, right):
            return Binary(symbol, named(left, nodes), named(right, nodes))
        case Call(function, arguments):
            return Call(function, tuple(named(x, nodes) for x in arguments))
        case Number():
            return node


def tree_of(step: Step) -> Node | None:
    """Return the expression of an elementwise step with values as its operands; None of another step."""
    if not isinstance(step.op, Elementwise):
        return None
    expression = step.op.expression
    values = dict(zip(expression.names, step.operands, strict=True))
    return named(expression.root, {n: Name(v) for n, v in values.items()})


def turning(op: Op) -> tuple[str, str] | None:
    """Return the two sides of a product that only transposes."""
    if not isinstance(op, Einsum) or len(op.sides[0]) != 1:
        return None
    before, after = op.sides[0][0], op.sides[1]
    return (before, after) if sorted(before) == sorted(after) and len({*before}) == len(before) else None


def relettered(sides: Sequence[str], out: str) -> Einsum:
    """Return a product whose letters are named by where they first stand: in its operands, then in its result."""
    letters = {c: ascii_letters[k] for k, c in enumerate(dict.fromkeys("".join((*sides, out))))}
    return Einsum(f"{','.join(''.join(letters[c] for c in s) for s in sides)}->{''.join(letters[c] for c in out)}")


class Rewriting:
    """A program while it is written again; `names` says what its values are called now."""

    def __init__(self, program: Program) -> None:
        self.builder, self.names = ProgramBuilder(dict(program.inputs)), {n: n for n, _ in program.inputs}
        self.made: dict[str, Step] = {}
        self.known: dict[object, tuple[str, ...]] = {}
        self.reads = Counter(o for step in program.steps for o in step.operands) + Counter(program.outputs)
        for step in program.steps:
            operands = tuple(self.names[o] for o in step.operands)
            self.names |= zip(step.results, self.written(step, operands), strict=True)

    @property
    def types(self) -> Mapping[str, TensorType]:
        """Of what was written."""
        return self.builder.types

    def step(self, op: Op, *operands: str, stopped: tuple[int, ...] = ()) -> tuple[str, ...]:
        """Write a step, or find it."""
        key = (op, operands, stopped)
        if key not in self.known:
            self.known[key] = self.builder.write_step(op, *operands, stopped=stopped)
            self.made |= dict.fromkeys(self.known[key], self.builder.steps[-1])
        return self.known[key]

    def written(self, step: Step, operands: tuple[str, ...]) -> tuple[str, ...]:
        """What a step makes, by the rules of its op."""
        if step.stopped:
            return self.step(step.op, *operands, stopped=step.stopped)
        t = self.types[operands[0]] if operands else None
        match step.op:
            case Elementwise():
                tree = tree_of(replace(step, operands=operands))
                found = self.opened(tree) if tree is not None else Number(0)
                return (found.name if isinstance(found, Name) else self.emitted(found).name,)
            case Reshape(spec) if t is not None:
                return (self.reshaped(operands[0], results_of(step.op, (t,))[0], spec),)
            case Einsum():
                return (self.product(step.op, operands),)
            case Expand(spec, over):
                words = {w: f"d{k}" for k, w in enumerate(dict.fromkeys(_WORD.findall(spec.partition("->")[2])))}
                return self.step(Expand(_WORD.sub(lambda m: words.get(m[0], m[0]), spec), over), *operands)
            case Gather():
                return (self.gathered(*operands),)
            case Cast(dtype) if t is not None and dtype == t.dtype:
                return operands
            case Crop(start, stop) if t is not None and (start, stop) == ((0,) * t.ndim, t.shape):
                return operands
            case Crop(start, stop) if (inner := self.made.get(operands[0])) and isinstance(inner.op, Crop):
                first = inner.op.start
                ends = (tuple(a + b for a, b in zip(first, side, strict=True)) for side in (start, stop))
                return self.step(Crop(*ends), *inner.operands)
            case _:
                return self.step(step.op, *operands)

    # Expressions.

    def opened(self, node: Node) -> Node:
        """A node as a value, its operations a step each; a number, and what cannot stand alone, as it is."""
        match node:
            case Name() | Number():
                return node
            case Negate(operand):
                return self.emitted(Negate(self.opened(operand)))
            case Binary("**", left, right):
                return self.emitted(Binary("**", self.opened(left), right))
            case Binary(symbol, left, right):
                return self.emitted(Binary(symbol, self.opened(left), self.opened(right)))
            case Call("where", (condition, yes, no)):
                return self.emitted(Call("where", (self.condition(condition), self.opened(yes), self.opened(no))))
            case Call(function, arguments):
                return self.emitted(Call(function, tuple(self.opened(x) for x in arguments)))

    def condition(self, node: Node) -> Node:
        """A condition; a comparison that was made a bool for it is itself again."""
        if isinstance(node, Binary):
            return Binary(node.symbol, self.opened(node.left), self.opened(node.right))
        cast = self.made.get(node.name) if isinstance(node, Name) else None
        inner = self.made.get(cast.operands[0]) if cast is not None and isinstance(cast.op, Cast) else None
        found = tree_of(inner) if inner is not None else None
        match found:
            case Call("where", (Binary() as said, Number(1), Number(0))):
                return said
            case _:
                return node

    def emitted(self, tree: Node) -> Name:
        """A step of a tree, with constants as numbers; without a value of its own it is one with its reader."""
        if isinstance(tree, Name):
            return tree
        full, values = lettered(tree)
        numbers = {v: Number(s.op.value) for v in values if (s := self.made.get(v)) and isinstance(s.op, Constant)}
        for nodes in (numbers, {}):
            less, left = lettered(named(tree, nodes))
            try:
                if left and self._typed(less, left) == self._typed(full, values):
                    return Name(*self.step(Elementwise(str(less)), *left))
            except ShardplanError:
                continue
        return tree  # pyright: ignore[reportReturnType]

    def _typed(self, expression: Expression, values: Sequence[str]) -> TensorType:
        return results_of(Elementwise(str(expression)), tuple(self.types[v] for v in values))[0]

    # Views, products and rows.

    def reshaped(self, name: str, t: TensorType, spec: str) -> str:
        """A reshape, said by its two shapes; of a reshape one of what that was made from."""
        while (inner := self.made.get(name)) is not None and isinstance(inner.op, Reshape):
            origin = self.types[inner.operands[0]].shape
            if origin != t.shape and _respelled(origin, t.shape) is None:
                break
            name, spec = inner.operands[0], ""
        shape = self.types[name].shape
        if shape == t.shape:
            return name
        return self.step(Reshape(_respelled(shape, t.shape) or spec), name)[0]

    def product(self, op: Einsum, operands: Sequence[str]) -> str:
        """A product of what its operands are transposed from."""
        sides, out = list(op.sides[0]), op.sides[1]
        values = list(operands)
        for k, name in enumerate(values):
            inner = self.made.get(name)
            turned = turning(inner.op) if inner is not None else None
            if inner is not None and turned is not None:
                theirs = dict(zip(turned[1], sides[k], strict=True))
                values[k], sides[k] = inner.operands[0], "".join(theirs[c] for c in turned[0])
        if len(sides) == 1 and sides[0] == out:
            return values[0]
        return self.step(relettered(sides, out), *values)[0]

    def gathered(self, table: str, ids: str) -> str:
        """Rows; ids count from the first one, and all of them in turn are a part of the table."""
        t = self.types[table]
        rows = t.shape[0]
        inner = self.made.get(ids)
        found = tree_of(inner) if inner is not None else None
        match found:
            case Call("where", (Binary("<", Name(i), Number(0)), Name(more), Name(same))) if i == same:
                wrap = self.made.get(more)
                sums = (Binary("+", Name(i), Number(rows)), Binary("+", Number(rows), Name(i)))
                ids = i if wrap is not None and tree_of(wrap) in sums else ids
            case _:
                pass
        inner = self.made.get(ids)
        if inner is not None and isinstance(inner.op, Iota) and len(inner.op.shape) == 1:
            many = inner.op.shape[0]
            if many == rows:
                return table
            if many < rows:
                return self.step(Crop((0,) * t.ndim, (many, *t.shape[1:])), table)[0]
        return self.step(Gather(), table, ids)[0]


def _respelled(before: Sequence[int], after: Sequence[int]) -> str | None:
    """The reshape between two shapes in a spec of our own; None where it is no split and no join of dims."""
    strides = sorted({math.prod(cut[k:]) for cut in (before, after) for k in range(len(cut) + 1)})
    if any(b % a for a, b in zip(strides, strides[1:], strict=False)) or math.prod(before) != math.prod(after):
        return None
    factors = [b // a for a, b in zip(strides, strides[1:], strict=False)][::-1]
    sides, ones = list[str](), 0
    for shape in (before, after):
        words, at = list[str](), 0
        for n in shape:
            group, size = list[str](), 1
            while size < n:
                group.append(f"d{at}={factors[at]}" if group else f"d{at}")
                size, at = size * factors[at], at + 1
            if not group:
                group, ones = [f"one{ones}=1"], ones + 1
            words.append(group[0] if len(group) == 1 else f"({' '.join(group)})")
        sides.append(" ".join(words))
    return " -> ".join(sides)


def fused(program: Program) -> Program:
    """Return a program in which an expression that one other alone reads, and once, is a part of it.

    A transposition of a product that nobody else reads is the order of its result.
    """
    reads = Counter(o for step in program.steps for o in step.operands) + Counter(program.outputs)
    trees: dict[str, Node] = {}
    products: dict[str, Step] = {}
    steps = list[Step]()
    gone = set[str]()
    for step in program.steps:
        tree = tree_of(step) if not step.stopped else None
        if tree is not None:
            step, tree, inside = _joined(program, step, tree, trees, reads)
            gone |= inside
            trees[step.results[0]] = tree
        turned = turning(step.op)
        inner = products.get(step.operands[0]) if turned is not None else None
        if turned is not None and inner is not None and isinstance(inner.op, Einsum) and reads[step.operands[0]] == 1:
            gone.add(step.operands[0])
            sides, out = inner.op.sides
            new = dict(zip(turned[0], out, strict=True))
            step = Step(relettered(sides, "".join(new[c] for c in turned[1])), inner.operands, step.results)
        if isinstance(step.op, Einsum) and not step.stopped:
            products[step.results[0]] = step
        steps.append(step)
    return Program(program.inputs, [s for s in steps if not gone & {*s.results}], program.outputs)


def _joined(
    program: Program, step: Step, tree: Node, trees: Mapping[str, Node], reads: Mapping[str, int]
) -> tuple[Step, Node, set[str]]:
    """A step with the trees of operands that it alone reads, and the names of these."""
    inside = set[str]()
    kind = program.types[step.results[0]].dtype
    for o, many in Counter(names_in(tree)).items():
        if many == 1 == reads[o] and o in trees and program.types[o].dtype == kind:
            found = named(tree, {o: trees[o]})
            if len({*names_in(found)}) <= MOST_OPERANDS:
                tree = found
                inside.add(o)
    expression, values = lettered(tree)
    return Step(Elementwise(str(expression)), tuple(values), step.results), tree, inside


def floating(t: TensorType) -> bool:
    """Return whether numbers of a type may be divided."""
    return numpy_dtype(t.dtype).kind in "fVc"
