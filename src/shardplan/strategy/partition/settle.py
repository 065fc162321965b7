"""The settlement: which option every line takes, so that ops and movements take the least seconds.

One axis at a time, the slowest first, the others fixed: exact, by elimination (`elimination`); repeated until nothing
changes. A value has the type that its producer makes; each other type that lines of a block want is one movement
there, as often as the block runs. What a `repeat` carries has one type, which no line but the carrying itself chooses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from shardplan.core.layout import Layout
from shardplan.core.mesh import Mesh
from shardplan.core.nested import row, rows
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError, ShardplanError
from shardplan.strategy.partition.choices import Bounds, Choice, Held, Laid, Layer, options
from shardplan.strategy.partition.elimination import Table, least
from shardplan.strategy.partition.flow import Block, Key, Line, Loop, Path
from shardplan.strategy.partition.prices import Prices

Groups = Mapping[str, tuple[tuple[str, ...], ...]]
Types = tuple[TensorType | None, ...]  # by option of a choice; None where there is no such type
WIDE = 20_000  # entries of a table of one movement: a wider one goes from consumer to consumer
SWEEPS = 8


class Source(NamedTuple):
    """Who makes a value: a choice and the number of its result, or None and the type of an input.

    `lead` says how the value stands to it: 1 a stack of `count` rows of it, -1 a row of the stack that it is.
    """

    maker: Maker | None
    result: int
    lead: int = 0
    count: int = 0
    fixed: TensorType | None = None
    name: str = ""  # of the input

    def seen(self, t: TensorType) -> TensorType:
        """Return the type of the value, given that of what was made."""
        return row(t) if self.lead < 0 else rows(t, self.count) if self.lead else t

    def asked(self, t: TensorType) -> TensorType | None:
        """Return the type to be made for the value to have a type, None where there is none."""
        try:
            return rows(t, self.count) if self.lead < 0 else row(t) if self.lead else t
        except ShardplanError:
            return None


@dataclass(frozen=True, slots=True, eq=False)
class Maker:
    """What chooses: a line, or a value that a loop carries; `axes` are the dims of the latter that may be served."""

    path: Path
    times: int
    line: Line | None
    bounds: Bounds
    carried: TensorType | None = None  # on one device
    dims: tuple[tuple[str, ...], ...] = ()

    def __str__(self) -> str:
        """Return how errors name it."""
        return str(self.line) if self.line else f"what step {self.path[-1]} (repeat) carries"


class Use(NamedTuple):
    """Who wants a value: operand `operand` of a choice, in a block that runs `times` times."""

    maker: Maker
    operand: int
    path: Path
    times: int
    source: Source


class End(NamedTuple):
    """A type that a value must come to in a block that runs `times` times; a sum where it is made as one."""

    source: Source
    times: int
    t: TensorType


def at_most(t: TensorType, made: TensorType) -> TensorType:
    """Return a type that is partial only over axes that `made` is partial over."""
    both = set(t.mesh.expand(t.layout.partial)) & set(t.mesh.expand(made.layout.partial))
    partial = t.mesh.fold(tuple(sorted(both)))
    return t.with_layout(Layout(t.layout.dims, partial, t.layout.reduction if partial else None))


@dataclass(frozen=True, slots=True)
class Option:
    """What a choice may be: of a line its `choice`; the types wanted and made; the seconds of the op, once."""

    wanted: tuple[TensorType, ...]
    made: tuple[TensorType, ...]
    seconds: float
    choice: Choice = field(default_factory=Choice)
    laid: Laid | None = None


@dataclass(frozen=True, slots=True)
class Settled:
    """The option of every choice, the seconds of all, and those that each sweep found."""

    sources: Mapping[Key, Source]
    options: Mapping[Maker, Option]
    lines: Mapping[Line, Maker]
    carries: Mapping[tuple[Path, int], Maker]
    seconds: float
    sweeps: tuple[float, ...]
    widest: int

    def type_of(self, key: Key) -> TensorType:
        """Return the type that a value is made in; of rows of a stack that of a row."""
        source = self.sources[key]
        t = source.fixed if source.maker is None else self.options[source.maker].made[source.result]
        assert t is not None  # of an input
        return source.seen(t)

    def laid(self, line: Line) -> Laid:
        """Return a line as it was laid."""
        found = self.options[self.lines[line]].laid
        assert found is not None  # of lines
        return found


class Problem:
    """The choices of a program, and who makes and wants its values.

    Args:
        root: The program.
        mesh: The mesh of a stage.
        given: The types of its inputs.
        wanted: Types that values must come to, at the end of their block.
        held: Of parameters how they are held where they are operands; of their gradients how they are made.
    """

    def __init__(
        self,
        root: Block,
        mesh: Mesh,
        given: Mapping[str, TensorType],
        wanted: Mapping[Key, TensorType],
        held: Mapping[str, Layout],
        gradients: Mapping[Key, Layout],
    ) -> None:
        self.mesh, self.layer = mesh, Layer(mesh)
        self.makers: list[Maker] = []
        self.lines: dict[Line, Maker] = {}
        self.carries: dict[tuple[Path, int], Maker] = {}
        self.sources: dict[Key, Source] = {}
        self.uses: list[Use] = []
        self.ends: list[End] = []
        self.held: dict[Key, Held] = {}
        self.gradients = {key: Held(layout.dims) for key, layout in gradients.items()}
        for name, _ in root.inputs:
            self.sources[(), name] = Source(None, 0, fixed=given[name], name=name)
            if name in held:
                self.held[(), name] = Held(held[name].dims)
        self._block(root)
        for key, t in wanted.items():
            source = self.sources[key]
            times = next(b.times for b in root.every() if b.path == key[0])
            asked = source.asked(t)
            assert asked is not None  # what ends is no row of a stack that is cut
            self.ends.append(End(source, times, asked))

    def _block(self, block: Block) -> None:
        for line in block.lines:
            if isinstance(line, Loop):
                self._loop(block, line)
                continue
            keys = [(block.path, o) for o in line.operands]
            bounds = Bounds(
                {k: self.held[key] for k, key in enumerate(keys) if key in self.held},
                {k: self.gradients[block.path, r] for k, r in enumerate(line.results) if (block.path, r) in self.gradients},
            )
            maker = self.lines[line] = Maker(block.path, block.times, line, bounds)
            self.makers.append(maker)
            for k, key in enumerate(keys):
                self.uses.append(Use(maker, k, block.path, block.times, self.sources[key]))
            for k, name in enumerate(line.results):
                self.sources[block.path, name] = Source(maker, k)

    def _loop(self, block: Block, loop: Loop) -> None:
        inner, op = loop.block, loop.op
        names = [name for name, _ in inner.inputs]
        whole = len(names) - op.cut
        carries: list[Maker] = []
        for k, (outside, (name, t)) in enumerate(zip(loop.operands, inner.inputs, strict=True)):
            if k < op.kept:
                dims = tuple(tuple(n) for n in inner.dims[name])
                maker = self.carries[inner.path, k] = Maker(inner.path, inner.times, None, Bounds({}, {}), t, dims)
                self.makers.append(maker)
                carries.append(maker)
                self.uses.append(Use(maker, 0, block.path, block.times, self.sources[block.path, outside]))
                self.sources[inner.path, name] = Source(maker, 0)
                continue
            source = self.sources[block.path, outside]
            lead = 0 if k < whole else -1
            held = self.held.get((block.path, outside))
            if held:
                self.held[inner.path, name] = Held(held.dims[-lead:] if lead else held.dims)
            if source.maker is None and lead:
                assert source.fixed is not None  # by its making
                source = source._replace(fixed=row(source.fixed))
            elif lead:
                source = source._replace(lead=source.lead - 1, count=op.times)
            self.sources[inner.path, name] = source
        self._block(inner)
        for k, (outside, name) in enumerate(zip(loop.results, inner.outputs, strict=True)):
            source = self.sources[inner.path, name]
            if k < op.kept:
                self.uses.append(Use(carries[k], 0, inner.path, inner.times, source))
                self.sources[block.path, outside] = Source(carries[k], 0)
            else:
                self.sources[block.path, outside] = source._replace(lead=source.lead + 1, count=op.times)


def settle(problem: Problem, serve: Groups, order: Sequence[str], prices: Prices) -> Settled:
    """Return the options that take the least seconds, axis by axis in `order`, until a sweep changes nothing.

    Raises `LayoutError` for a line that has no option.
    """
    now: dict[Maker, Option] = {m: _start(problem, m) for m in problem.makers}
    totals: list[float] = []
    widest = 0
    laid = set[str]()  # the first sweep knows only the axes that it has come to
    for _ in range(SWEEPS):
        before = dict(now)
        for axis in order:
            found = {m: list(_options(problem, m, axis, serve.get(axis, ()), now[m], prices)) for m in problem.makers}
            laid.add(axis)
            best = least(list(tables(problem, found, prices, laid)))
            if math.isinf(best.total):
                raise LayoutError(f"the axis {axis}: no movement leads from what lines make to what others take")
            widest = max(widest, best.widest)
            now = {m: found[m][k] for m, k in best.options.items() if isinstance(m, Maker)}
            totals.append(best.total)
        if now == before or not order:
            break
    return Settled(
        problem.sources, now, problem.lines, problem.carries, totals[-1] if totals else 0.0, tuple(totals), widest
    )


def _start(problem: Problem, maker: Maker) -> Option:
    """Nothing is cut."""
    if maker.line is None:
        assert maker.carried is not None  # by its making
        t = maker.carried.with_layout(Layout(()), problem.mesh)
        return Option((t,), (t,), 0.0)
    laid = problem.layer.typed(maker.line, Choice())
    return Option(laid.operands, laid.results, 0.0, Choice(), laid)


def _options(
    problem: Problem, maker: Maker, axis: str, groups: Sequence[Sequence[str]], now: Option, prices: Prices
) -> Iterator[Option]:
    """What a choice may do with an axis, the others being as they are."""
    if maker.line is not None:
        for choice, laid in options(problem.layer, maker.line, axis, groups, maker.bounds, now.choice):
            yield Option(laid.operands, laid.results, prices.op(laid.op, laid.operands), choice, laid)
        return
    (t,) = now.made
    dims = tuple(tuple(a for a in axes if a != axis) for axes in t.layout.dims)
    every = {name for group in groups for name in group}
    for d in (None, *(d for d, names in enumerate(maker.dims) if every & set(names) and t.shape[d] > 1)):
        for k in range(len(dims[d]) + 1) if d is not None else (0,):
            cut = list(dims)
            if d is not None:
                cut[d] = (*dims[d][:k], axis, *dims[d][k:])
            try:
                u = t.with_layout(Layout(tuple(cut)))
            except ShardplanError:
                continue
            yield Option((u,), (u,), 0.0)


def tables(
    problem: Problem, found: Mapping[Maker, Sequence[Option]], prices: Prices, axes: set[str]
) -> Iterator[Table[object]]:
    """Yield the tables of seconds over the options of every choice: of ops, and of movements value by value.

    Of types that are fixed only `axes` count.
    """
    for maker, mine in found.items():
        yield (maker,), np.array([o.seconds for o in mine]) * maker.times
    for end in problem.ends:
        if end.source.maker is not None:
            made = [o.made[end.source.result] for o in found[end.source.maker]]
            last = _onto(end.t, axes)
            cost = [prices.move(t, at_most(last, t)) for t in made]
            yield (end.source.maker,), np.array(cost) * end.times
    groups: dict[tuple[object, ...], list[Use]] = {}
    for use in problem.uses:
        origin = use.source.maker or use.source.name
        groups.setdefault((origin, use.source.result, use.path), []).append(use)
    for (_, result, path), uses in groups.items():
        source = uses[0].source
        made: Types = tuple(o.made[result] for o in found[source.maker]) if source.maker is not None else ()
        if source.fixed is not None:
            made = (_onto(source.fixed, axes),)
        wanted = [_wanted(use, found) for use in uses]
        yield from _movements(source.maker, made, uses, wanted, prices, (path, id(uses[0])))


def _onto(t: TensorType, axes: set[str]) -> TensorType:
    """A type as it is over some axes, whole over all others."""
    if set(t.layout.used) <= axes:
        return t
    partial = tuple(a for a in t.layout.partial if a in axes)
    dims = tuple(tuple(a for a in dim if a in axes) for dim in t.layout.dims)
    return t.with_layout(Layout(dims, partial, t.layout.reduction if partial else None))


def _wanted(use: Use, found: Mapping[Maker, Sequence[Option]]) -> Types:
    """By option of a user the type that it wants of what was made."""
    return tuple(use.source.asked(o.wanted[use.operand]) for o in found[use.maker])


def _movements(
    maker: Maker | None, made: Types, uses: Sequence[Use], wanted: Sequence[Types], prices: Prices, name: object
) -> Iterator[Table[object]]:
    """The seconds of moving one value in one block: each type that is wanted and not made, once."""
    kinds = list(dict.fromkeys(t for types in (made, *wanted) for t in types if t is not None))
    index = {t: k for k, t in enumerate(kinds)}
    cost = np.array([[math.inf if t is None else prices.move(t, u) for u in kinds] for t in made])
    cost *= uses[0].times
    # By user, option and kind whether it is wanted; of a type that no movement leads to the seconds are infinite.
    asks = [np.array([[t == u for u in kinds] for t in types]) for types in wanted]
    never = [np.array([t is None for t in types]) for types in wanted]
    owners: list[object] = [use.maker for use in uses]
    sizes = [len(types) for types in wanted]
    for owner, no in zip(owners, never, strict=True):
        if no.any():
            yield (owner,), np.where(no, math.inf, 0.0)
    joint = list(dict.fromkeys(o for o in (maker, *owners) if o is not None))
    length: dict[object, int] = dict(zip(owners, sizes, strict=True))
    if maker is not None:
        length[maker] = len(made)
    if math.prod(length[o] for o in joint) <= WIDE:
        shape = [length[o] for o in joint]
        want = np.zeros((len(kinds), *shape), dtype=bool)
        for owner, ask in zip(owners, asks, strict=True):
            want |= _spread(ask.T, owner, joint)
        price = _spread(np.ascontiguousarray(cost.T), maker, joint)
        yield tuple(joint), np.where(want, np.broadcast_to(price, want.shape), 0.0).sum(axis=0)
        return
    yield from _chained(maker, cost, owners, asks, name)


def _spread(array: np.ndarray, owner: object, joint: Sequence[object]) -> np.ndarray:
    """An array [kinds, options of an owner] along the axes of several."""
    if owner is None:
        return array.reshape(len(array), *(1 for _ in joint))
    return array.reshape(len(array), *(array.shape[1] if o is owner else 1 for o in joint))


def _chained(
    maker: Maker | None, cost: np.ndarray, owners: Sequence[object], asks: Sequence[np.ndarray], name: object
) -> Iterator[Table[object]]:
    """The same from user to user: a choice of its own says which kinds were wanted so far, as a set of bits."""
    kinds = cost.shape[1]
    bits = 1 << np.arange(kinds)
    sets = np.arange(1 << kinds)
    before: object = None
    for k, (owner, ask) in enumerate(zip(owners, asks, strict=True)):
        own = (ask * bits).sum(axis=1)  # a set by option
        after = (name, k)
        start = sets if before is not None else sets[:1]
        fits = (start[:, None, None] | own[None, :, None]) == sets[None, None, :]
        array = np.where(fits, 0.0, math.inf)
        scope = [before, owner, after]
        keep = [c for c in scope if c is not None]
        yield tuple(keep), array.reshape([n for c, n in zip(scope, array.shape, strict=True) if c is not None])
        before = after
    member = (sets[:, None] & bits[None, :]) > 0
    total = np.where(member[:, None, :], cost[None, :, :], 0.0).sum(axis=2)  # [sets, made]
    yield ((before, maker), total) if maker is not None else ((before,), total[:, 0])


