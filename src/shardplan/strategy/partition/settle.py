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

from shardplan.core.dim_names import Names
from shardplan.core.layout import Layout
from shardplan.core.mesh import Mesh
from shardplan.core.nested import row, rows
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError, ShardplanError
from shardplan.strategy.partition.choices import Bounds, Choice, Held, Laid, Layer, options
from shardplan.strategy.partition.elimination import Table, TooWide, least
from shardplan.strategy.partition.flow import Block, Key, Line, Loop, Path
from shardplan.strategy.partition.prices import Prices

Groups = Mapping[str, tuple[tuple[str, ...], ...]]
Types = tuple[TensorType, ...]  # by option of a choice
WIDE = 20_000  # entries of a table of one movement: a wider one goes from consumer to consumer
SWEEPS = 8
TIE = 1e-18  # seconds a byte that is made: of options that take as long the one that holds less


class Source(NamedTuple):
    """Who makes a value: a choice and the number of its result, or None and the type of an input.

    The value is a row of it, `cut` times over, and then a stack of `counts` of those, the outermost first.
    """

    maker: Maker | None
    result: int
    cut: int = 0
    counts: tuple[int, ...] = ()
    fixed: TensorType | None = None
    name: str = ""  # of the input
    again: bool = False  # read by the backward pass, which has no copy of what the forward pass moved

    def seen(self, t: TensorType) -> TensorType:
        """Return the type of the value, given that of what was made."""
        for _ in range(self.cut):
            t = row(t)
        for count in reversed(self.counts):
            t = rows(t, count)
        return t

    def row(self) -> Source:
        """Return where a row of the value comes from."""
        return self._replace(counts=self.counts[1:]) if self.counts else self._replace(cut=self.cut + 1)

    def stack(self, count: int) -> Source:
        """Return where a stack of so many of the value comes from."""
        return self._replace(counts=(count, *self.counts))

    def types(self, found: Mapping[Maker, Sequence[Option]], axes: set[str]) -> Types:
        """Return the types of the value by option of its maker; of an input its only one, of which `axes` count."""
        if self.maker is not None:
            return tuple(self.seen(o.made[self.result]) for o in found[self.maker])
        assert self.fixed is not None  # of an input
        return (self.seen(_onto(self.fixed, axes)),)


@dataclass(frozen=True, slots=True, eq=False)
class Maker:
    """What chooses: a line; or the type of a value that a loop carries, or that is saved for the backward pass.

    Of such a value `kept` is its type on one device and `dims` the names of its dims; the type is never partial.
    """

    path: Path
    times: int
    line: Line | None
    bounds: Bounds
    kept: TensorType | None = None
    dims: tuple[Names, ...] = ()


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
    saves: Mapping[Key, Maker]
    wanted: Mapping[Key, TensorType]  # what values come to at the end of their block
    seconds: float
    sweeps: tuple[float, ...]
    widest: int

    def type_of(self, key: Key) -> TensorType:
        """Return the type that a value is made in; of rows of a stack that of a row."""
        source = self.sources[key]
        t = source.fixed if source.maker is None else self.options[source.maker].made[source.result]
        assert t is not None  # of an input
        return source.seen(t)

    def saved(self, key: Key) -> TensorType:
        """Return the type in which a value leaves its body, or the forward pass."""
        return self.wanted[key] if key in self.wanted else self.options[self.saves[key]].made[0]

    def laid(self, line: Line) -> Laid:
        """Return a line as it was laid."""
        found = self.options[self.lines[line]].laid
        assert found is not None  # of lines
        return found


class Cut(NamedTuple):
    """From which line on the backward pass is, and the values that it reads of those before."""

    number: int
    values: tuple[str, ...]


class Problem:
    """The choices of a program, and who makes and wants its values.

    Args:
        root: The program.
        mesh: The mesh of a stage.
        given: The types of its inputs.
        wanted: Types that values must come to, at the end of their block.
        held: Of parameters how they are held where they are operands.
        gradients: Of values that are gradients how their parameters are held.
        cut: What is saved for the backward pass.
    """

    def __init__(
        self,
        root: Block,
        mesh: Mesh,
        given: Mapping[str, TensorType],
        wanted: Mapping[Key, TensorType],
        held: Mapping[str, Layout],
        gradients: Mapping[Key, Layout],
        cut: Cut | None = None,
    ) -> None:
        self.mesh, self.layer = mesh, Layer(mesh)
        self.makers: list[Maker] = []
        self.lines: dict[Line, Maker] = {}
        self.carries: dict[tuple[Path, int], Maker] = {}
        self.saves: dict[Key, Maker] = {}
        self.sources: dict[Key, Source] = {}
        self.uses: list[Use] = []
        self.ends: list[End] = []
        self.held: dict[Key, Held] = {}
        self.gradients = {key: Held(layout.dims) for key, layout in gradients.items()}
        for name, _ in root.inputs:
            self.sources[(), name] = Source(None, 0, fixed=given[name], name=name)
            if name in held:
                self.held[(), name] = Held(held[name].dims)
        self.wanted = wanted
        self._block(root, cut)
        for key, t in wanted.items():
            times = next(b.times for b in root.every() if b.path == key[0])
            self.ends.append(End(self.sources[key], times, t))

    def _saved(self, block: Block, name: str) -> Source:
        """What is saved of a value: in the type in which it was made, or in another of no more bytes."""
        key = block.path, name
        if key not in self.saves:
            self.saves[key] = self._keeps(block, name)
            self.uses.append(Use(self.saves[key], 0, block.path, block.times, self.sources[key]))
        return Source(self.saves[key], 0)

    def _keeps(self, block: Block, name: str) -> Maker:
        none = Bounds({}, {})
        maker = Maker(block.path, block.times, None, none, block.types[name], block.dims[name])
        self.makers.append(maker)
        return maker

    def _block(self, block: Block, cut: Cut | None = None) -> None:
        for line in block.lines:
            if cut is not None and line.number >= cut.number:
                for name in cut.values:
                    self.sources[block.path, name] = self._saved(block, name)
                for name, _ in block.inputs:
                    self.sources[block.path, name] = self.sources[block.path, name]._replace(again=True)
                cut = None
            if isinstance(line, Loop):
                self._loop(block, line)
                continue
            keys = [(block.path, o) for o in line.operands]
            bounds = Bounds(
                {k: self.held[key] for k, key in enumerate(keys) if key in self.held},
                {
                    k: self.gradients[block.path, r]
                    for k, r in enumerate(line.results)
                    if (block.path, r) in self.gradients
                },
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
        for k, (outside, (name, _)) in enumerate(zip(loop.operands, inner.inputs, strict=True)):
            if k < op.kept:
                maker = self.carries[inner.path, k] = self._keeps(inner, name)
                carries.append(maker)
                self.uses.append(Use(maker, 0, block.path, block.times, self.sources[block.path, outside]))
                self.sources[inner.path, name] = Source(maker, 0)
                continue
            source = self.sources[block.path, outside]
            held = self.held.get((block.path, outside))
            if held:
                self.held[inner.path, name] = Held(held.dims[k >= whole :])
            self.sources[inner.path, name] = source.row() if k >= whole else source
        self._block(inner)
        for k, (outside, name) in enumerate(zip(loop.results, inner.outputs, strict=True)):
            source = self.sources[inner.path, name]
            if k < op.kept:
                self.uses.append(Use(carries[k], 0, inner.path, inner.times, source))
                self.sources[block.path, outside] = Source(carries[k], 0)
            else:
                if (inner.path, name) not in self.wanted:
                    source = self._saved(inner, name)
                self.sources[block.path, outside] = source.stack(op.times)


def settle(problem: Problem, serve: Groups, order: Sequence[str], prices: Prices) -> Settled:
    """Return the options that take the least seconds, axis by axis in `order`, until a sweep changes nothing.

    Raises `LayoutError` for a line that has no option.
    """
    now: dict[Maker, Option] = {m: _start(problem, m) for m in problem.makers}
    totals: list[float] = []
    widest = 0
    saves = {use.maker: use.source for use in problem.uses if use.maker in problem.saves.values()}
    laid = set[str]()  # the first sweep knows only the axes that it has come to
    for _ in range(SWEEPS):
        before = dict(now)
        for axis in order:
            laid.add(axis)
            found: dict[Maker, list[Option]] = {}
            for m in problem.makers:  # what is saved comes after what makes it
                found[m] = list(_options(problem, m, axis, serve.get(axis, ()), now[m], prices))
                if m in saves:
                    found[m] += _as_made(saves[m].types(found, laid), found[m])
            try:
                best = least(list(tables(problem, found, prices, laid)))
            except TooWide:
                raise LayoutError(f"serve, {axis}: too many options hang together; legal are fewer dims") from None
            if math.isinf(best.total):
                raise LayoutError(f"the axis {axis}: no movement leads from what lines make to what others take")
            widest = max(widest, best.widest)
            now = {m: found[m][k] for m, k in best.options.items() if isinstance(m, Maker)}
            totals.append(best.total)
        if now == before or not order:
            break
    seconds = totals[-1] if totals else 0.0
    return Settled(
        problem.sources,
        now,
        problem.lines,
        problem.carries,
        problem.saves,
        problem.wanted,
        seconds,
        tuple(totals),
        widest,
    )


def _start(problem: Problem, maker: Maker) -> Option:
    """Nothing is cut."""
    if maker.line is None:
        assert maker.kept is not None  # by its making
        t = maker.kept.with_layout(Layout(()), problem.mesh)
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


def _as_made(types: Types, others: Sequence[Option]) -> list[Option]:
    """What may be saved besides others: a value as it was made, but no sum."""
    known = {o.made[0] for o in others}
    whole = dict.fromkeys(t.with_layout(Layout(t.layout.dims)) for t in types)
    return [Option((t,), (t,), 0.0) for t in whole if t not in known]


def tables(
    problem: Problem, found: Mapping[Maker, Sequence[Option]], prices: Prices, axes: set[str]
) -> Iterator[Table[object]]:
    """Yield the tables of seconds over the options of every choice: of ops, and of movements value by value.

    Of types that are fixed only `axes` count.
    """
    for maker, mine in found.items():
        held = [sum(t.local_bytes() for t in o.made) for o in mine]
        yield (maker,), (np.array([o.seconds for o in mine]) + TIE * np.array(held)) * maker.times
    saves = set(problem.saves.values())
    for end in problem.ends:
        if end.source.maker is not None:
            last = _onto(end.t, axes)
            cost = [prices.move(t, at_most(last, t)) for t in end.source.types(found, axes)]
            yield (end.source.maker,), np.array(cost) * end.times
    for use in problem.uses:
        if use.maker in saves and use.source.maker is not None:
            yield (use.source.maker, use.maker), _no_more(use.source.types(found, axes), found[use.maker])
    groups: dict[tuple[Source, Path], list[Use]] = {}
    for use in problem.uses:
        groups.setdefault((use.source, use.path), []).append(use)
    for (source, path), uses in groups.items():
        wanted = [tuple(o.wanted[use.operand] for o in found[use.maker]) for use in uses]
        yield from _movements(source.maker, source.types(found, axes), uses, wanted, prices, (source, path))


def _no_more(made: Types, kept: Sequence[Option]) -> np.ndarray:
    """Refuse to save a value in a type of more bytes than it was made in."""
    found, saved = (np.array([t.local_bytes() for t in types]) for types in (made, [o.made[0] for o in kept]))
    return np.where(saved[None, :] > found[:, None], math.inf, 0.0)


def _onto(t: TensorType, axes: set[str]) -> TensorType:
    """A type as it is over some axes, whole over all others."""
    if set(t.layout.used) <= axes:
        return t
    partial = tuple(a for a in t.layout.partial if a in axes)
    dims = tuple(tuple(a for a in dim if a in axes) for dim in t.layout.dims)
    return t.with_layout(Layout(dims, partial, t.layout.reduction if partial else None))


def _movements(
    maker: Maker | None,
    made: Sequence[TensorType],
    uses: Sequence[Use],
    wanted: Sequence[Types],
    prices: Prices,
    name: object,
) -> Iterator[Table[object]]:
    """The seconds of moving one value in one block, to all types that are wanted there.

    Types have bits; a set of them costs `cost[by option of the maker, set]`.
    """
    kinds = list(dict.fromkeys(t for types in wanted for t in types))
    bit = {t: 1 << k for k, t in enumerate(kinds)}
    known = {t: _ways(t, kinds, prices) for t in dict.fromkeys(made)}
    cost = np.array([known[t] for t in made]) * uses[0].times
    asks = [(use.maker, np.array([bit[t] for t in types])) for use, types in zip(uses, wanted, strict=True)]
    joint = list(dict.fromkeys(m for m in (maker, *(m for m, _ in asks)) if m is not None))
    length = {m: len(ask) for m, ask in asks} | ({maker: len(made)} if maker is not None else {})
    if math.prod(length[m] for m in joint) <= WIDE:
        sets = np.zeros([length[m] for m in joint], dtype=np.int64)
        for owner, ask in asks:
            sets |= _along(ask, owner, joint)
        place = _along(np.arange(len(made)), maker, joint) if maker is not None else 0
        yield tuple(joint), cost[place, sets]
        return
    yield from _chained(maker, cost, asks, name)


def _along(array: np.ndarray, owner: object, joint: Sequence[object]) -> np.ndarray:
    """An array [options of an owner] along its axis among those of several."""
    return array.reshape([len(array) if o is owner else 1 for o in joint])


def _ways(made: TensorType, kinds: Sequence[TensorType], prices: Prices) -> np.ndarray:
    """The least seconds to have a value in every set of types, each moved from the one made or from one before."""
    move = [[prices.move(t, u) for u in kinds] for t in (*kinds, made)]
    out = np.full(1 << len(kinds), math.inf)
    out[0] = 0.0
    for chosen in range(1, len(out)):
        for k in range(len(kinds)):
            if chosen >> k & 1:
                rest = chosen ^ 1 << k
                sources = [move[-1][k], *(move[j][k] for j in range(len(kinds)) if rest >> j & 1)]
                out[chosen] = min(out[chosen], out[rest] + min(sources))
    return out


def _chained(
    maker: Maker | None, cost: np.ndarray, asks: Sequence[tuple[Maker, np.ndarray]], name: object
) -> Iterator[Table[object]]:
    """The same from user to user: a choice of its own is the set of types that were wanted so far."""
    sets = np.arange(cost.shape[1])
    before: object = None
    for k, (owner, ask) in enumerate(asks):
        start = sets if k else sets[:1]
        fits = (start[:, None, None] | ask[None, :, None]) == sets[None, None, :]
        array = np.where(fits, 0.0, math.inf)
        after = (name, k)
        yield (before, owner, after) if k else (owner, after), array if k else array[0]
        before = after
    yield ((before, maker), cost.T) if maker is not None else ((before,), cost[0])
