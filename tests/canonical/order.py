"""The order and the names of the canonical form: steps, operands, letters and dims by structure; see `canonical`.

What a value is, is a digest of how it is made, and of an input of how it is read. Values with one digest are the same
up to an exchange that changes nothing; digests are worked out in rounds, each seeing one level of readers more.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import permutations, product
from typing import NamedTuple

from tests.canonical.normal_expression import key_of, normal
from tests.canonical.rules import floating, lettered, relettered, tree_of

from shardplan.core.expression_tree import Node
from shardplan.core.nested import as_nested
from shardplan.core.op import Op
from shardplan.core.ops.arithmetic import Elementwise
from shardplan.core.ops.bodies import Repeat
from shardplan.core.ops.products import Einsum
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType

_ROUNDS = 4
_MOST_ALIKE = 4  # operands of a product whose orders are tried
Dims = tuple[int, ...]


class Taken(NamedTuple):
    """An input of another program: its name there, and which dim of it each dim is."""

    name: str
    dims: Dims

    def then(self, dims: Dims) -> Taken:
        """The same input in another order of these dims."""
        return Taken(self.name, tuple(self.dims[d] for d in dims))


def ordered(program: Program) -> tuple[Program, list[Taken]]:
    """Return a program in order, and which of the given inputs its inputs are."""
    return _Ordering(program, {}, {name for name, _ in program.inputs}).written()


def _digest(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()


class _Ordering:
    """The steps of a program or of a body; `tags` tell its inputs apart, `free` are those whose dims have no order."""

    def __init__(self, program: Program, tags: Mapping[str, str], free: Iterable[str]) -> None:
        self.program, self.types = program, dict(program.types)
        self.tags = tags
        self.made = {r: (step, k) for step in program.steps for k, r in enumerate(step.results)}
        reads = Counter(o for step in program.steps for o in step.operands) + Counter(program.outputs)
        alone = {o: s for s in program.steps for o in s.operands if reads[o] == 1 and not s.stopped}
        self.loose = {n for n in free if n in alone}
        self.free = {n for n in self.loose if isinstance(op := alone[n].op, Einsum) and _once(op, alone[n], n)}
        self.bodies = {id(step): self.body(step) for step in program.steps if isinstance(as_nested(step.op), Repeat)}
        self.keys = self.digests()

    def body(self, step: Step) -> tuple[Program, list[Taken]]:
        """The body of a step, in order."""
        op = step.op
        assert isinstance(op, Repeat)
        fixed = len(op.body.inputs) - op.sliced
        kinds = [
            f"carried {k}" if k < op.carried else "same" if k < fixed else "a row" for k in range(len(step.operands))
        ]
        names = [name for name, _ in op.body.inputs]
        free = {n for n, o, kind in zip(names, step.operands, kinds, strict=True)
                if kind in ("same", "a row") and o in self.loose}  # fmt: skip
        return _Ordering(op.body, dict(zip(names, kinds, strict=True)), free).written()

    # What values are.

    def digests(self) -> dict[str, str]:
        """Of each value what it is."""
        base = {n: _digest(self.tags.get(n, ""), t.dtype, sorted(t.shape) if n in self.free else t.shape)
                for n, t in self.program.inputs}  # fmt: skip
        inputs = base
        for _ in range(_ROUNDS):
            keys = self.upwards(inputs)
            found: dict[str, list[str]] = {}
            for step in reversed(self.program.steps):
                above = sorted(x for r in step.results for x in found.get(r, ()))
                for o in dict.fromkeys(step.operands):
                    found.setdefault(o, []).append(_digest(self.said(step, keys | {o: "this"}), above))
            for k, o in enumerate(self.program.outputs):
                found.setdefault(o, []).append(f"output {k}")
            inputs = {n: _digest(key, sorted(found.get(n, ()))) for n, key in base.items()}
        return self.upwards(inputs)

    def upwards(self, inputs: Mapping[str, str]) -> dict[str, str]:
        """What values are made of."""
        keys = dict(inputs)
        for step in self.program.steps:
            said = self.said(step, keys)
            keys |= {r: _digest(said, k) for k, r in enumerate(step.results)}
        return keys

    def said(self, step: Step, keys: Mapping[str, str]) -> str:
        """What a step does, with what its operands are in the place of their names."""
        if step.stopped:
            return _digest(step.op, step.stopped, [keys[o] for o in step.operands])
        tree = tree_of(step)
        if tree is not None:
            return key_of(self.normal(tree, step, keys), keys)
        if isinstance(step.op, Einsum):
            op, operands, _ = self.product(step, keys)
            shapes = [sorted(self.types[o].shape) if o in self.free else self.types[o].shape for o in operands]
            return _digest(op.spec, [keys[o] for o in operands], shapes)
        if id(step) in self.bodies:
            body, order = self.bodies[id(step)]
            places = {name: o for (name, _), o in zip(_repeat(step).body.inputs, step.operands, strict=True)}
            op = _repeat(step)
            return _digest(str(body), op.n, op.carried, op.reverse, [keys[places[t.name]] for t in order])
        return _digest(step.op, [keys[o] for o in step.operands])

    def normal(self, tree: Node, step: Step, keys: Mapping[str, str]) -> Node:
        return normal(tree, keys, floating(self.types[step.results[0]]))

    def product(self, step: Step, keys: Mapping[str, str]) -> tuple[Einsum, list[str], dict[str, Dims]]:
        """A product, its operands in order, and the order of the dims of those that have none."""
        assert isinstance(step.op, Einsum)
        sides, out = step.op.sides
        alike: dict[tuple[object, ...], list[tuple[str, str]]] = {}
        for side, o in zip(sides, step.operands, strict=True):
            alike.setdefault((o in self.free, o not in self.made, keys[o]), []).append((side, o))
        groups = [permutations(alike[key]) if len(alike[key]) <= _MOST_ALIKE else [alike[key]] for key in sorted(alike)]
        found = [self._product([p for group in order for p in group], out) for order in product(*groups)]
        return min(found, key=lambda one: one[0].spec)

    def _product(self, pairs: Sequence[tuple[str, str]], out: str) -> tuple[Einsum, list[str], dict[str, Dims]]:
        """Of operands in some order."""
        fixed = "".join(s for s, o in pairs if o not in self.free)
        place = {c: k for k, c in enumerate(dict.fromkeys(fixed + out + "".join(s for s, _ in pairs)))}
        dims: dict[str, Dims] = {}
        new = list[str]()
        for side, o in pairs:
            if o in self.free:
                dims[o] = tuple(sorted(range(len(side)), key=lambda d, side=side: place[side[d]]))
                side = "".join(side[d] for d in dims[o])
            new.append(side)
        return relettered(new, out), [o for _, o in pairs], dims

    # In order.

    def written(self) -> tuple[Program, list[Taken]]:
        """The program in the order in which its results ask for steps."""
        names: dict[str, str] = {}
        inputs: list[tuple[str, Dims]] = []
        steps = list[Step]()
        if any(self.tags.values()):  # what is carried stays in its order
            inputs = [(n, self.plain(n)) for n, _ in self.program.inputs if self.tags[n].startswith("carried")]
        named = {n for n, _ in inputs}
        plans: dict[str, tuple[Op, Sequence[str], Mapping[str, Dims]]] = {}
        ready = set[str]()
        stack = list(self.program.outputs[::-1])
        while stack:
            name = stack[-1]
            found = self.made.get(name)
            if name in ready:
                stack.pop()
                continue
            if found is None:
                ready.add(stack.pop())
                if name not in named:
                    inputs.append((name, self.plain(name)))
                    named.add(name)
                continue
            step = found[0]
            first = step.results[0]
            if first not in plans:
                plans[first] = self.planned(step)
                stack += [o for o in reversed(plans[first][1]) if o not in ready]
                continue
            stack.pop()
            op, operands, dims = plans[first]
            ready |= {*step.results}
            for o, order in dims.items():
                at = next(k for k, (n, _) in enumerate(inputs) if n == o)
                inputs[at] = (o, order)
            steps.append(Step(op, tuple(operands), step.results, step.stopped))
        if any(self.tags.values()):  # rows behind what is the same
            rank = {"same": 1, "a row": 2}
            inputs.sort(key=lambda p: rank.get(self.tags[p[0]], 0))
        names = {name: f"in.{k}" for k, (name, _) in enumerate(inputs)}
        names |= {r: str(k) for k, r in enumerate(r for s in steps for r in s.results)}
        given = [(names[n], _permuted(self.types[n], dims)) for n, dims in inputs]
        new = [Step(s.op, tuple(names[o] for o in s.operands), tuple(names[r] for r in s.results), s.stopped)
               for s in steps]  # fmt: skip
        made = Program(given, new, [names[o] for o in self.program.outputs])
        return made, [Taken(n, dims) for n, dims in inputs]

    def plain(self, name: str) -> Dims:
        return tuple(range(self.types[name].ndim))

    def planned(self, step: Step) -> tuple[Op, Sequence[str], Mapping[str, Dims]]:
        """A step's op and operands in order, and in which order inputs have their dims there."""
        if step.stopped:
            return step.op, step.operands, {}
        tree = tree_of(step)
        if tree is not None:
            expression, values = lettered(self.normal(tree, step, self.keys))
            return Elementwise(str(expression)), values, {}
        if isinstance(step.op, Einsum):
            return self.product(step, self.keys)
        if id(step) not in self.bodies:
            return step.op, step.operands, {}
        body, order = self.bodies[id(step)]
        op = _repeat(step)
        places = {name: (k, o) for k, ((name, _), o) in enumerate(zip(op.body.inputs, step.operands, strict=True))}
        fixed = len(op.body.inputs) - op.sliced
        dims: dict[str, Dims] = {}
        sliced = 0
        for t in order:
            k, o = places[t.name]
            row = k >= fixed
            sliced += row
            if t.dims != tuple(range(len(t.dims))):
                dims[o] = (0, *(d + 1 for d in t.dims)) if row else t.dims
        new = Repeat(op.n, body, op.carried, sliced, op.reverse)
        return new, [places[t.name][1] for t in order], dims


def _once(op: Einsum, step: Step, name: str) -> bool:
    """Whether a product reads a value once, along distinct dims."""
    sides = [s for s, o in zip(op.sides[0], step.operands, strict=True) if o == name]
    return len(sides) == 1 and len(op.sides[0]) > 1 and len({*sides[0]}) == len(sides[0])


def _repeat(step: Step) -> Repeat:
    assert isinstance(step.op, Repeat)
    return step.op


def _permuted(t: TensorType, dims: Dims) -> TensorType:
    """A type on one device with its dims in another order."""
    return TensorType(t.dtype, tuple(t.shape[d] for d in dims), (), t.mesh)
