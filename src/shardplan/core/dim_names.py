"""`dim_names`: what the dims of a program's values are called, from names of its inputs' dims.

The dims of an op that one factor of its rule maps to are one dim, and have one name, which so passes through a program
both ways; into bodies and out of them, too, where the dim of a stack is a `layer`. A cotangent has the dims of its
value. A dim that is cut into factors somewhere has their names, major to minor, where one of them has a name; else it
keeps its own, of which its factors are `name.0`, `name.1`. Factors of size 1 have no part in a dim of several.

A name says what a dim is, not which: two factors of an op may have one name, as queries and keys of self-attention
are both `sequence`, and both dims of a square weight are `hidden`. But two names of one dim are an error, unless its
size is 1: there dims that have nothing in common may meet, and stay apart. What a repeat carries may leave the body
under another name than it enters, as from `hidden` to `ffn`; where one of them has no name they are one. Names of a
dim and of its factors are no conflict (`heads`, which are `kv_heads` x `ratio`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import NamedTuple

from shardplan.core.factor_rule import Dims, factor_names
from shardplan.core.gradients import Origin
from shardplan.core.nested import Nested
from shardplan.core.op import Op, results_of
from shardplan.core.ops.collective import moving
from shardplan.core.ops.compute import FactorTyped, computing
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.errors import TypingError, excerpt

Names = tuple[str, ...]  # of a dim or a factor, of which there is one for each of its parts, major to minor


class Links(NamedTuple):
    """Which dims of an op are one: per dim its factors, as in a `FactorRule`, but of any op without a body.

    `fixed` are those that a rule lets no axis cut.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: Mapping[str, int]
    fixed: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class DimNames:
    """The names of a program's dims.

    `values` has them per value and dim, `factors` per step and factor of its op's `links`, none of an op with a body;
    `bodies` are the names inside such ops, by the numbers of their steps.
    """

    values: Mapping[str, tuple[Names, ...]]
    factors: tuple[Mapping[str, Names], ...]
    bodies: Mapping[int, DimNames]


def dim_names(
    program: Program, inputs: Mapping[str, tuple[str | None, ...]], origins: Sequence[Origin | None] = ()
) -> DimNames:
    """Return the names of all dims; those that nothing names are d0, d1, ... in the order in which values need them.

    `origins` are those of the first steps of a program with gradients. Raises `TypingError` for names that do not fit
    the inputs, and for two names that meet.

    >>> from shardplan.core.ops import Einsum
    >>> x, w = (TensorType.parse(t, "x=1") for t in ("f32[4, 6]", "f32[6, 5]"))
    >>> layer = Program({"x": x, "w": w}, [Step(Einsum("bi,io->bo"), ("x", "w"), ("y",))], ("y",))
    >>> dim_names(layer, {"x": ("batch", "hidden")}).values["w"], dim_names(layer, {"w": (None, "ffn")}).values["y"]
    ((('hidden',), ('d0',)), (('d0',), ('ffn',)))
    """
    top = _DimLevel(program.types)
    given = [part for name, names in inputs.items() for part in _name_input_dims(program, top, name, names)]
    top.program(program)
    top.gradients(program, origins, top)
    for x, y in (pair for level in top.all_levels() for pair in level.carried):
        if None in (x.root().name, y.root().name):
            _join(x, y, "dim_names")
    stacks = [part for level in top.all_levels() for part in level.stacks]
    return _Naming(given, stacks).dim_names(top, program)


def _name_input_dims(program: Program, top: _DimLevel, name: str, names: tuple[str | None, ...]) -> Iterator[_DimPart]:
    """Give the dims of an input their names."""
    t = dict(program.inputs).get(name)
    if t is None or len(names) != t.ndim:
        what = f"legal are {t.ndim} of %{name}, {t}" if t else f"there is no input %{name}"
        raise TypingError(f"dim_names: the names {excerpt(names)}; {what}")
    for d, (part, said) in enumerate(zip(top.values[name], names, strict=True)):
        if said is not None:
            if not said.isidentifier():
                raise TypingError(f"dim_names: the name {excerpt(said)} of %{name}; legal are letters, digits and '_'")
            part.name, part.origin = said, f"dim {d} of input %{name}"
            yield part


class _DimPart:
    """A dim or a factor. Those that are one hang on one root; its `parts` are its factors, all larger than 1."""

    __slots__ = ("name", "origin", "parts", "size", "up")

    def __init__(self, size: int) -> None:
        self.size = size
        self.up: _DimPart | None = None
        self.parts: list[_DimPart] = []
        self.name: str | None = None  # as given, and by whom
        self.origin = ""

    def root(self) -> _DimPart:
        """Return what stands for it."""
        part = self
        while part.up is not None:
            part = part.up
        if part is not self:
            self.up = part
        return part

    def atoms(self) -> list[_DimPart]:
        """Return the factors that are cut no further, or itself."""
        part = self.root()
        return [atom for p in part.parts for atom in p.atoms()] if part.parts else [part]


Run = tuple[_DimPart, ...]


def _join(x: _DimPart, y: _DimPart, where: str) -> None:
    """Make two parts of equal size one."""
    a, b = x.root(), y.root()
    if a is b:
        return
    if a.name is not None and b.name is not None and a.name != b.name:
        if a.size == 1:
            return
        raise TypingError(f"{where}: {a.name!r}, {a.origin}, meets {b.name!r}, {b.origin}; legal is one name for both")
    b.up = a
    if a.name is None:
        a.name, a.origin = b.name, b.origin
    if a.parts and b.parts:
        _match(a.parts, b.parts, where)
    a.parts = a.parts or b.parts


def _match(xs: Sequence[_DimPart], ys: Sequence[_DimPart], where: str) -> None:
    """Join two ways to cut one dim, part by part; from where they do not nest they stay apart."""
    if len(xs) == len(ys) == 1:
        _join(xs[0], ys[0], where)
        return
    left, right = ([p for p in reversed(side) if p.size > 1] for side in (xs, ys))
    while left and right:
        if left[-1].size == right[-1].size:
            _join(left.pop(), right.pop(), where)
            continue
        most, least = (left, right[-1].size) if left[-1].size > right[-1].size else (right, left[-1].size)
        whole = most.pop().root()
        if not whole.parts and whole.size % least:
            return
        whole.parts = whole.parts or [_DimPart(least), _DimPart(whole.size // least)]
        most += reversed(whole.parts)


class _DimLevel:
    """The dims of the values of one program, and of the bodies in it."""

    def __init__(self, types: Mapping[str, TensorType], where: str = "") -> None:
        self.types, self.where = types, where
        self.values = {name: [_DimPart(n) for n in t.shape] for name, t in types.items()}
        self.factors: dict[int, Mapping[str, _DimPart]] = {}
        self.bodies: dict[int, _DimLevel] = {}
        self.stacks: list[_DimPart] = []
        self.carried: list[tuple[_DimPart, _DimPart]] = []  # as they enter the body, and as others have them

    def all_levels(self) -> Iterator[_DimLevel]:
        """Yield it and those inside it."""
        yield self
        for level in self.bodies.values():
            yield from level.all_levels()

    def program(self, program: Program) -> None:
        """Join what its steps join."""
        for number in steps_by_value(program):
            self.step(number, program.steps[number])

    def step(self, number: int, step: Step) -> None:
        """Join the dims that one factor maps to, or those in a body with those outside it."""
        where = f"{self.where}step {number} ({step.op.name})"
        self.factors[number] = {}
        if isinstance(step.op, Nested):
            self._join_body(number, step.op, step, where)
            return
        found = links(step.op, tuple(self.types[o] for o in step.operands))
        factors = self.factors[number] = {n: _DimPart(size) for n, size in found.sizes.items()}
        pairs = zip((*step.operands, *step.results), (*found.operands, *found.results), strict=True)
        for name, dims in pairs:
            for part, names in zip(self.values[name], dims, strict=True):
                _match([factors[n] for n in names], [part], where)

    def _join_body(self, number: int, op: Nested, step: Step, where: str) -> None:
        inner = self.bodies[number] = _DimLevel(op.body.types, f"{where}, ")
        names = [name for name, _ in op.body.inputs]
        stack = _DimPart(op.times)
        whole, rows = len(names) - op.cut, len(op.body.outputs) if op.at_once else op.carried_count
        self.stacks += [] if op.at_once else [stack]
        for outside, inside, bare in ((step.operands, names, whole), (step.results, op.body.outputs, rows)):
            if inside is not names:
                inner.program(op.body)
            for k, (name, row) in enumerate(zip(outside, inside, strict=True)):
                if k < op.carried_count:
                    inner.carried += zip(inner.values[names[k]], self.values[name], strict=True)
                    continue
                lead = [] if k < bare else [stack]
                self.join(self.values[name], [*lead, *inner.values[row]], where)
        for name, row in zip(names, op.body.outputs[: op.carried_count], strict=False):
            inner.carried += zip(inner.values[name], inner.values[row], strict=True)

    def join(self, xs: Iterable[_DimPart], ys: Iterable[_DimPart], where: str) -> None:
        """Join the dims of two values."""
        for x, y in zip(xs, ys, strict=True):
            _join(x, y, where)

    def gradients(self, program: Program, origins: Sequence[Origin | None], forward: _DimLevel) -> None:
        """Join the dims of cotangents and copies with those of their values."""
        for number, (step, origin) in enumerate(zip(program.steps, origins, strict=False)):
            if origin is None:
                continue
            where = f"{self.where}step {number} ({step.op.name})"
            for name, value in zip(step.results, origin.alike, strict=True):
                if value is not None:
                    self.join(self.values[name], forward.values[value], where)
            if isinstance(step.op, Nested) and origin.forward in forward.bodies:
                self.bodies[number].gradients(step.op.body, origin.inner, forward.bodies[origin.forward])


def steps_by_value(program: Program) -> list[int]:
    """Return the numbers of the steps in an order that hangs on their values alone, not on that of the steps."""
    makers = {r: k for k, step in enumerate(program.steps) for r in step.results}
    done: dict[int, None] = {}
    left = [*program.outputs, *sorted(makers)][::-1]
    while left:
        number = makers.get(left[-1])
        before = [] if number is None or number in done else program.steps[number].operands
        if missing := [o for o in before if makers.get(o, number) != number and makers[o] not in done]:
            left += missing[::-1]
            continue
        left.pop()
        if number is not None:
            done.setdefault(number)
    return list(done)


@lru_cache(maxsize=4096)
def links(op: Op, operands: tuple[TensorType, ...]) -> Links:
    """Return which dims of an op's operands and results are one, by its rule, or by those of its steps."""
    compute = computing(op)
    if isinstance(op, FactorTyped):
        rule = op.rule(*operands)
        fixed = frozenset(f.name for f in rule.factors if f.kind == "replicate")
        return Links(rule.operands, rule.results, {f.name: f.size for f in rule.factors}, fixed)
    results = results_of(op, operands)
    body = compute.decomposition(*operands) if compute else None
    types = {str(k): t for k, t in enumerate(operands)}
    if body is None:  # of a move operands and results are alike, of others nothing is known
        types |= {f"r{k}": t for k, t in enumerate(results)}
        names = [f"r{k}" for k in range(len(results))]
        level = _DimLevel(types)
        for k, name in enumerate(names if moving(op) else ()):
            level.join(level.values[str(k)], level.values[name], op.name)
    else:
        for step in body.steps:
            found = results_of(step.op, tuple(types[o] for o in step.operands))
            types.update(zip(step.results, found, strict=True))
        names, level = [*body.results], _DimLevel(types)
        for number, step in enumerate(body.steps):
            level.step(number, step)
        for name, other in body.alike.items():
            if name in types and other in types:
                level.join(level.values[name], level.values[other], op.name)
    atoms = [[part.atoms() for part in level.values[n]] for n in (*map(str, range(len(operands))), *names)]
    every = list(dict.fromkeys(a for dims in atoms for dim in dims for a in dim))
    short = dict(zip(every, factor_names(len(every)), strict=True))
    sides = [tuple(tuple(short[a] for a in dim) for dim in dims) for dims in atoms]
    return Links(tuple(sides[: len(operands)]), tuple(sides[len(operands) :]), {n: a.size for a, n in short.items()})


class _Naming:
    """What is called how, when all that is one is joined."""

    def __init__(self, given: list[_DimPart], stacks: list[_DimPart]) -> None:
        found: dict[Run, _DimPart] = {}
        wholes = [tuple(part.root().atoms()) for part in given]
        # Rows that a dim with a name was cut into: it keeps that, and so does what each run has of it.
        cut = {(row, run) for p in stacks for row in p.atoms() for run in wholes if row in run and len(run) > 1}
        rest = [p for p in stacks if not any(row in p.atoms() for row, _ in cut)]
        for root in (part.root() for part in (*given, *rest)):
            if root.name is None:
                root.name, root.origin = "layer", "rows of a repeat"
            same = found.setdefault(tuple(root.atoms()), root)
            if same.name != root.name:
                two = f"{same.name!r}, {same.origin}, and {root.name!r}, {root.origin}"
                raise TypingError(f"dim_names: {two}, are of the same factors; legal is one name for both")
        # What has a name of its own, by the factors that are cut no further; and what those are called that have none.
        self.whole = {run: root.name or "" for run, root in found.items()}
        self.said: dict[_DimPart, str] = {row: "layer" for row, _ in cut}
        self.said |= {atom: self.whole[run] for _, run in cut for atom in run[:1] if len(run) == 2}
        for run in sorted(self.whole, key=len):  # so that a factor is called after what is nearest to it
            for k, atom in enumerate(run):
                self.said.setdefault(atom, f"{self.whole[run]}.{k}")
        taken = set(self.whole.values())
        self.free = (f"d{k}" for k in count() if f"d{k}" not in taken)

    def of(self, part: _DimPart) -> Names:
        """Return the names of a part."""
        return self.run(tuple(part.atoms()))

    def run(self, run: Run) -> Names:
        """Return the names of factors that are cut no further, each of them or several together."""
        out: list[str] = []
        while run:
            ends = (k for k in range(len(run), 0, -1) if run[:k] in self.whole and not self.cut(run[:k]))
            end = next(ends, 0)
            if end:
                out.append(self.whole[run[:end]])
            else:
                if run[0] not in self.said:
                    self.said[run[0]] = next(self.free)
                out.append(self.said[run[0]])
            run = run[end or 1 :]
        return tuple(out)

    def cut(self, run: Run) -> bool:
        """Say whether some factors of what has a name have a name, too."""
        inner = (run[i:j] for i in range(len(run)) for j in range(i + 1, len(run) + 1))
        return any(part in self.whole and part != run for part in inner)

    def dim_names(self, level: _DimLevel, program: Program) -> DimNames:
        """Return those of a program, and of the bodies in it."""
        order = steps_by_value(program)
        first = [name for name, _ in program.inputs]
        values = {n: tuple(map(self.of, level.values[n])) for n in first}
        bodies: dict[int, DimNames] = {}
        for number in order:
            step = program.steps[number]
            values |= {n: tuple(map(self.of, level.values[n])) for n in step.results}
            if isinstance(step.op, Nested):
                bodies[number] = self.dim_names(level.bodies[number], step.op.body)
        factors = [{n: self.of(part) for n, part in level.factors[k].items()} for k in range(len(program.steps))]
        return DimNames(values, tuple(factors), bodies)
