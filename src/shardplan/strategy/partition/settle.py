"""The settlement: which option every line takes, so that ops and movements take the least seconds.

One axis at a time, the slowest first, the others fixed: exact, by elimination (`elimination`); repeated until nothing
changes. A value has the type that its producer makes; each other type that lines of a block want is one movement
there, as often as the block runs. What a `repeat` carries has one type, which no line but the carrying itself chooses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardplan.core.layout import Layout
from shardplan.core.nested import stacked_type
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError, ShardplanError
from shardplan.strategy.partition.choices import Choice, Served, TypedLine, options, parts_of_served
from shardplan.strategy.partition.elimination import Least, Table, TooWide, least
from shardplan.strategy.partition.flow import Key, Line, Path
from shardplan.strategy.partition.prices import Prices
from shardplan.strategy.partition.problem import Maker, Option, SettleProblem, Types, Use, ValueSource, at_most, onto
from shardplan.strategy.partition.tables import LAYER

Groups = Mapping[str, tuple[tuple[str, ...], ...]]
WIDE = 20_000  # entries of a table of one movement: a wider one goes from consumer to consumer
SWEEPS = 8
TIE = 1e-18  # seconds a byte that is made: of options that take as long the one that holds less


@dataclass(frozen=True, slots=True)
class Settled:
    """The option of every choice, the seconds of all, and those that each sweep found."""

    sources: Mapping[Key, ValueSource]
    options: Mapping[Maker, Option]
    lines: Mapping[Line, Maker]
    carries: Mapping[tuple[Path, int], Maker]
    saves: Mapping[Key, Maker]
    wanted: Mapping[Key, TensorType]  # what values come to at the end of their block
    kept: Mapping[ValueSource, Types]  # of what is kept the types in which the backward pass has it
    seconds: float
    sweeps: tuple[float, ...]
    widest: int
    problem: SettleProblem  # what was asked, for those who ask what else there was
    serve: Groups
    prices: Prices

    def type_of(self, key: Key) -> TensorType:
        """Return the type that a value is made in; of rows of a stack that of a row."""
        return _made(self.sources[key], self.options)

    def saved(self, key: Key) -> Types:
        """Return the types in which a value leaves its body, or the forward pass."""
        if key in self.wanted:
            return (self.wanted[key],)
        return self.options[self.saves[key]].made if key in self.saves else self.kept.get(self.sources[key], ())

    def saved_rows(self, key: Key, made: TensorType) -> Iterator[TensorType]:
        """Yield the types in which bodies keep a stack row by row, of as many rows as it was made of."""
        if key not in self.saves:
            yield from (stacked_type(t, made.shape[0]) for t in self.kept.get(self.sources[key].row(), ()))

    def laid(self, line: Line) -> TypedLine:
        """Return a line as it was laid."""
        found = self.options[self.lines[line]].laid
        assert found is not None  # of lines
        return found


def settle(problem: SettleProblem, serve: Groups, order: Sequence[str], prices: Prices) -> Settled:
    """Return the options that take the least seconds, axis by axis in `order`, until a sweep changes nothing.

    An axis is settled again only where another has changed since. One that `serve` does not have is free: it may serve
    any dim, or nothing. Raises `LayoutError` for a line that has no option.
    """
    now: dict[Maker, Option] = {m: _start(problem, m) for m in problem.makers}
    totals: list[float] = []
    widest = 0
    laid = set[str]()  # the first sweep knows only the axes that it has come to
    fresh: dict[str, float] = {}  # axes since whose settlement nothing has changed, with what they found
    for _ in range(SWEEPS):
        for axis in order:
            if axis in fresh:
                totals.append(fresh[axis])
                continue
            laid.add(axis)
            found, best = _best_along(axis, problem, serve, now, prices, laid)
            if math.isinf(best.total):
                raise LayoutError(f"the axis {axis}: no movement leads from what lines make to what others take")
            widest = max(widest, best.widest)
            before, now = now, {m: found[m][k] for m, k in best.options.items() if isinstance(m, Maker)}
            totals.append(best.total)
            if now != before:
                fresh.clear()
            if len(laid) == len(order):
                fresh[axis] = best.total
        if len(fresh) == len(order):
            break
    seconds = totals[-1] if totals else 0.0
    return Settled(
        problem.sources,
        now,
        problem.lines,
        problem.carries,
        problem.saves,
        problem.wanted,
        _kept(problem, now),
        seconds,
        tuple(totals),
        widest,
        problem,
        serve,
        prices,
    )


def _best_along(
    axis: str, problem: SettleProblem, serve: Groups, now: Mapping[Maker, Option], prices: Prices, axes: set[str]
) -> tuple[dict[Maker, list[Option]], Least]:
    """Return what every choice may do with an axis, and what is best; where too much hangs together, in mesh order.

    What both passes keep ties their choices to each other: then a dim has its axes in the order of the mesh alone.
    """
    found = found_along(axis, problem, serve, now, prices, axes)
    try:
        return found, least(list(tables(problem, found, prices, axes)))
    except TooWide:
        place = {a: k for k, a in enumerate(problem.mesh.axes)}
        found = {m: _ordered(mine, place) for m, mine in found.items()}
    try:
        return found, least(list(tables(problem, found, prices, axes)))
    except TooWide:
        raise LayoutError(f"serve, {axis}: too many options hang together; legal are fewer dims") from None


def _ordered(options: list[Option], place: Mapping[str, int]) -> list[Option]:
    """The options whose types have the axes of each dim in order; all, where none has."""

    def is_ordered(t: TensorType) -> bool:
        return all([*map(place.__getitem__, dim)] == sorted(map(place.__getitem__, dim)) for dim in t.layout.dims)

    return [o for o in options if all(map(is_ordered, (*o.wanted, *o.made)))] or options


def _made(source: ValueSource, now: Mapping[Maker, Option]) -> TensorType:
    """The type in which a value is made, or given."""
    t = source.fixed if source.maker is None else now[source.maker].made[source.result]
    assert t is not None  # of an input
    return source.seen(t)


def _kept(problem: SettleProblem, now: Mapping[Maker, Option]) -> dict[ValueSource, Types]:
    """Of what is kept the types in which the backward pass has it: those that the forward pass has, or as it was made.

    What is made as a sum leaves as what it becomes. Inputs are there as they were given.
    """
    late = {id(use) for use in problem.late}
    there: dict[ValueSource, set[TensorType]] = {}
    for use in problem.uses:
        if id(use) not in late:
            there.setdefault(use.source, set()).add(now[use.maker].wanted[use.operand])
    found: dict[ValueSource, dict[TensorType, None]] = {}
    for use in problem.late:
        t, made = now[use.maker].wanted[use.operand], _made(use.source, now)
        if t not in there.get(use.source, ()) and not made.layout.partial:
            t = made
        if use.source.maker is not None or t != made:
            found.setdefault(use.source, {})[t] = None
    return {source: tuple(types) for source, types in found.items()}


def found_along(
    axis: str, problem: SettleProblem, serve: Groups, now: Mapping[Maker, Option], prices: Prices, axes: set[str]
) -> dict[Maker, list[Option]]:
    """Return what every choice may do with an axis, the others being as they are; of fixed types only `axes` count."""
    saves = {use.maker: use.source for use in problem.uses if use.maker in problem.saves.values()}
    found: dict[Maker, list[Option]] = {}
    for m in problem.makers:  # what is saved comes after what makes it
        found[m] = list(_options(problem, m, axis, serve.get(axis), now[m], prices))
        if m in saves:
            found[m] += _as_made(saves[m].types(found, axes), found[m])
    return found


def _start(problem: SettleProblem, maker: Maker) -> Option:
    """Nothing is cut."""
    if maker.line is None:
        assert maker.kept is not None  # by its making
        t = maker.kept.with_layout(Layout(()), problem.mesh)
        return Option((t, t), (t,), 0.0)
    laid = problem.layer.typed(maker.line, Choice())
    return Option(laid.operands, laid.results, 0.0, Choice(), laid)


def _options(
    problem: SettleProblem, maker: Maker, axis: str, groups: Served, now: Option, prices: Prices
) -> Iterator[Option]:
    """What a choice may do with an axis, the others being as they are."""
    if maker.line is not None:
        for choice, laid in options(problem.layer, maker.line, axis, groups, maker.bounds, now.choice):
            yield Option(laid.operands, laid.results, prices.op(laid.op, laid.operands), choice, laid)
        return
    (t,) = now.made
    dims = tuple(tuple(a for a in axes if a != axis) for axes in t.layout.dims)
    rest = tuple(a for a in t.layout.partial if a != axis)
    every = {name for group in groups or () for name in group}
    may = [
        d
        for d, names in enumerate(maker.dims)
        if (every & set(names) or parts_of_served(names, every) or (groups is None and LAYER not in names))
        and t.shape[d] > 1
    ]
    for d in (None, *may):
        for k in range(len(dims[d]) + 1) if d is not None else (0,):
            cut = list(dims)
            if d is not None:
                cut[d] = (*dims[d][:k], axis, *dims[d][k:])
            try:
                u = t.with_layout(Layout(tuple(cut)))
            except ShardplanError:
                continue
            for over in (rest, *([(*rest, axis)] if maker.sums and d is None else ())):
                partial = u.with_layout(Layout(u.layout.dims, over, "sum" if over else None))
                yield Option((partial, u), (partial,), 0.0)


def _as_made(types: Types, others: Sequence[Option]) -> list[Option]:
    """What may be saved besides others: a value as it was made, but no sum."""
    known = {o.made[0] for o in others}
    whole = dict.fromkeys(t.with_layout(Layout(t.layout.dims)) for t in types)
    return [Option((t,), (t,), 0.0) for t in whole if t not in known]


def tables(
    problem: SettleProblem, found: Mapping[Maker, Sequence[Option]], prices: Prices, axes: set[str]
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
            last = onto(end.t, axes)
            cost = [prices.move(t, at_most(last, t)) for t in end.source.types(found, axes)]
            yield (end.source.maker,), np.array(cost) * end.times
    for use in problem.uses:
        if use.maker in saves and use.source.maker is not None:
            yield (use.source.maker, use.maker), _no_more(use.source.types(found, axes), found[use.maker])
    for use in problem.late:  # what is kept is no sum
        sums = [bool(o.wanted[use.operand].layout.partial) for o in found[use.maker]]
        yield (use.maker,), np.where(sums, math.inf, 0.0)
    groups: dict[tuple[ValueSource, Path], list[Use]] = {}
    twins = problem.cut.twins
    for use in problem.uses:  # what is kept both passes read of one source, and a movement is paid once
        groups.setdefault((use.source, twins.get(use.path, use.path)), []).append(use)
    for (source, path), uses in groups.items():
        wanted = [tuple(o.wanted[use.operand] for o in found[use.maker]) for use in uses]
        yield from _movements(source.maker, source.types(found, axes), uses, wanted, prices, (source, path))


def _no_more(made: Types, kept: Sequence[Option]) -> np.ndarray:
    """Refuse to save a value in a type of more bytes than it was made in."""
    found, saved = (np.array([t.local_bytes() for t in types]) for types in (made, [o.made[0] for o in kept]))
    return np.where(saved[None, :] > found[:, None], math.inf, 0.0)


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
    kinds = tuple(dict.fromkeys(t for types in wanted for t in types))
    bit = {t: 1 << k for k, t in enumerate(kinds)}
    cost = np.array([prices.all_of(t, kinds) for t in made]) * uses[0].times
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
