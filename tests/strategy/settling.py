"""What a settlement is to find, said apart from it: who chooses, what values are wanted as, and the seconds of it.

A block is walked as it runs. *Choosers* are its lines, what loops carry, and what is saved for later. A *wish* is a
value in a block, and the choosers that want it there; it costs the least way to have all types in which they want it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from shardplan.core.dim_names import Names
from shardplan.core.layout import Layout
from shardplan.core.mesh import Mesh
from shardplan.core.nested import row_type, stacked_type
from shardplan.core.tensor import TensorType
from shardplan.errors import ShardplanError
from shardplan.strategy.partition.choices import Bounds, Choice, HeldDims, Layer, Served, options
from shardplan.strategy.partition.flow import Key, Line, LineBlock, Loop, Path
from shardplan.strategy.partition.prices import Prices
from shardplan.strategy.partition.problem import Cut
from shardplan.strategy.partition.settle import TIE

ROW = 0  # in a form: a row of a stack; other numbers are stacks of so many


@dataclass(eq=False)
class Chooser:
    """A line with what of it is held, or a value of one type that is carried or saved, with the names of its dims."""

    times: int
    line: Line | None = None
    bounds: Bounds = field(default_factory=lambda: Bounds({}, {}))
    kept: TensorType | None = None
    dims: tuple[Names, ...] = ()
    saves: Origin | None = None


class Origin(NamedTuple):
    """Whose result a value is, in which form; or an input, of a type."""

    chooser: Chooser | None
    result: int = 0
    form: tuple[int, ...] = ()
    fixed: TensorType | None = None
    held: HeldDims | None = None
    again: bool = False  # an input that is read after the cut, where nothing moved before is there

    def seen(self, t: TensorType) -> TensorType:
        for count in self.form:
            t = stacked_type(t, count) if count else row_type(t)
        return t


@dataclass
class Wish:
    """A value in a block that runs `times` times, and the operands that it is."""

    origin: Origin
    times: int
    asks: list[tuple[Chooser, int]] = field(default_factory=list[tuple[Chooser, int]])


class Option(NamedTuple):
    """What a chooser may do: types that it wants and makes, and its seconds."""

    wanted: tuple[TensorType, ...]
    made: tuple[TensorType, ...]
    seconds: float

    @property
    def bytes(self) -> int:
        return sum(t.local_bytes() for t in self.made)


@dataclass
class Walk:
    """All choosers and wishes of a block; the arguments are those of the settlement's problem."""

    block: LineBlock
    given: Mapping[str, TensorType]
    wanted: Mapping[Key, TensorType]
    held: Mapping[str, Layout]
    gradients: Mapping[Key, Layout]
    cut: Cut | None
    choosers: list[Chooser] = field(default_factory=list[Chooser])
    wishes: dict[tuple[Path, str, Origin], Wish] = field(default_factory=dict)
    ends: list[tuple[Origin, int, TensorType]] = field(default_factory=list)

    def __post_init__(self) -> None:
        start = {
            name: Origin(
                None, fixed=self.given[name], held=HeldDims(self.held[name].dims) if name in self.held else None
            )
            for name, _ in self.block.inputs
        }
        self._run(self.block, start)

    def _new(self, chooser: Chooser) -> Chooser:
        self.choosers.append(chooser)
        return chooser

    def _ask(self, block: LineBlock, name: str, origin: Origin, chooser: Chooser, operand: int = 0) -> None:
        wish = self.wishes.setdefault((block.path, name, origin), Wish(origin, block.times))
        wish.asks.append((chooser, operand))

    def _keep(self, block: LineBlock, name: str) -> Chooser:
        return self._new(Chooser(block.times, kept=block.types[name], dims=block.dims[name]))

    def _save(self, block: LineBlock, name: str, here: dict[str, Origin]) -> Origin:
        chooser = self._keep(block, name)
        chooser.saves = here[name]
        self._ask(block, name, here[name], chooser)
        return Origin(chooser)

    def _run(self, block: LineBlock, here: dict[str, Origin]) -> dict[str, Origin]:
        """Return where all values come from; `here` has the inputs."""
        saved = False
        for line in block.lines:
            if self.cut and not block.path and not saved and line.number >= self.cut.number:
                here |= {name: self._save(block, name, here) for name in self.cut.values}
                here |= {name: here[name]._replace(again=True) for name, _ in block.inputs}
                saved = True
            if isinstance(line, Loop):
                self._loop(block, line, here)
            else:
                self._line(block, line, here)
        for (path, name), t in self.wanted.items():
            if path == block.path:
                self.ends.append((here[name], block.times, t))
        return here

    def _line(self, block: LineBlock, line: Line, here: dict[str, Origin]) -> None:
        held = {k: h for k, o in enumerate(line.operands) if (h := here[o].held)}
        made = {
            k: HeldDims(self.gradients[key].dims)
            for k, r in enumerate(line.results)
            if (key := (block.path, r)) in self.gradients
        }
        chooser = self._new(Chooser(block.times, line, Bounds(held, made)))
        for k, o in enumerate(line.operands):
            self._ask(block, o, here[o], chooser, k)
        here |= {r: Origin(chooser, k) for k, r in enumerate(line.results)}

    def _loop(self, block: LineBlock, loop: Loop, here: dict[str, Origin]) -> None:
        body, op = loop.block, loop.op
        inside: dict[str, Origin] = {}
        carries: list[Chooser] = []
        for k, (outside, (name, _)) in enumerate(zip(loop.operands, body.inputs, strict=True)):
            origin = here[outside]
            if k < op.carried_count:
                carries.append(self._keep(body, name))
                self._ask(block, outside, origin, carries[-1])
                inside[name] = Origin(carries[-1])
            elif k < len(body.inputs) - op.cut:
                inside[name] = origin
            else:
                held = HeldDims(origin.held.dims[1:]) if origin.held else None
                inside[name] = origin._replace(form=(*origin.form, ROW), held=held)
        inside = self._run(body, inside)
        saved: dict[str, Origin] = {}
        for k, (outside, name) in enumerate(zip(loop.results, body.outputs, strict=True)):
            if k < op.carried_count:
                self._ask(body, name, inside[name], carries[k])
                here[outside] = Origin(carries[k])
                continue
            if (body.path, name) in self.wanted:
                origin = inside[name]
            else:
                origin = saved[name] = saved.get(name) or self._save(body, name, inside)
            here[outside] = origin._replace(form=(*origin.form, op.times))


Options = Mapping[Chooser, Sequence[Option]]


def single(walk: Walk, mesh: Mesh, axis: str, groups: Served, prices: Prices) -> Options:
    """What choosers may do with the one axis of a mesh."""
    return every(walk, mesh, {axis: groups}, prices)


def every(walk: Walk, mesh: Mesh, serve: Mapping[str, Served], prices: Prices) -> Options:
    """What choosers may do with all axes: of a line what each axis may do where the others are as they are."""
    layer, out = Layer(mesh), dict[Chooser, list[Option]]()
    for chooser in walk.choosers:
        if chooser.line is None:
            types = dict.fromkeys(_cuts(chooser, mesh, serve))
            if chooser.saves is not None and chooser.saves.chooser is not None:
                made = seen(chooser.saves, out)
                types |= dict.fromkeys(t.with_layout(Layout(t.layout.dims)) for t in made)
            out[chooser] = [Option((t,), (t,), 0.0) for t in types]
            continue
        found: dict[Choice, dict[str, set[Choice]]] = {}
        new = [Choice()]
        while new:
            choice = new.pop()
            if choice in found:
                continue
            found[choice] = {}
            for axis in mesh.axes:
                try:
                    mine = options(layer, chooser.line, axis, serve.get(axis), chooser.bounds, choice)
                except ShardplanError:
                    mine = []
                found[choice][axis] = {c for c, _ in mine}
                new += found[choice][axis]
        legal = [c for c, mine in found.items() if all(c in one for one in mine.values())]
        laid = [layer.typed(chooser.line, c) for c in legal]
        out[chooser] = [Option(one.operands, one.results, prices.op(one.op, one.operands)) for one in laid]
    return out


def _cuts(chooser: Chooser, mesh: Mesh, serve: Mapping[str, Served]) -> Iterator[TensorType]:
    """The types of a value whose dims the axes serve, each on at most one of them, in any order."""
    assert chooser.kept is not None
    places: list[list[int | None]] = []
    for axis in mesh.axes:
        groups = serve.get(axis)
        names = {name for mine in chooser.dims for name in mine} if groups is None else set().union(*groups)
        names -= {"layer"}
        dims = [d for d, mine in enumerate(chooser.dims) if names & set(mine) and chooser.kept.shape[d] > 1]
        places.append([None, *dims])
    for order in itertools.permutations(range(len(mesh.axes))):
        for chosen in itertools.product(*places):
            dims = [tuple(mesh.axes[k] for k in order if chosen[k] == d) for d in range(chooser.kept.ndim)]
            try:
                yield chooser.kept.with_layout(Layout(tuple(dims)), mesh)
            except ShardplanError:
                continue


def seen(origin: Origin, found: Options) -> list[TensorType]:
    """The types in which a value may come, by option of its chooser."""
    if origin.chooser is None:
        assert origin.fixed is not None
        return [origin.seen(origin.fixed)]
    return [origin.seen(o.made[origin.result]) for o in found[origin.chooser]]


def end_type(made: TensorType, last: TensorType) -> TensorType:
    """What a value comes to at its end: a sum only where it is made as one."""
    sums = tuple(a for a in last.layout.partial if a in made.layout.partial)
    return last.with_layout(Layout(last.layout.dims, sums, last.layout.reduction if sums else None))


def least_way(
    made: TensorType, wanted: frozenset[TensorType], move: Callable[[TensorType, TensorType], float]
) -> float:
    """The least seconds to have all types, each moved from one that is there, in the best of all orders."""
    return min(
        sum(min(move(t, u) for t in (made, *order[:k])) for k, u in enumerate(order))
        for order in itertools.permutations(wanted - {made})
    )


def all_totals(walk: Walk, found: Options, prices: Prices) -> np.ndarray:
    """The seconds of everything at every option of every chooser, an axis each."""
    order = [c for c in walk.choosers if len(found[c]) > 1]
    total = np.zeros([len(found[c]) for c in order])
    way = lru_cache(None)(lambda made, wanted: least_way(made, wanted, prices.move))

    def add(choosers: Sequence[Chooser | None], cost: Callable[..., float]) -> None:
        """Add what hangs on some choosers, which `cost` gives by their options."""
        mine = list(dict.fromkeys(c for c in choosers if c is not None))
        table = np.zeros([len(found[c]) for c in mine])
        for at in np.ndindex(table.shape):
            table[at] = cost(dict(zip(mine, at, strict=True)))
        shape = [table.shape[mine.index(c)] if c in mine else 1 for c in order]
        kept = [c for c in order if c in mine]
        lone = [k for k, c in enumerate(mine) if c not in order]
        table = table.squeeze(axis=tuple(lone))
        now = [c for c in mine if c in order]
        total[...] += table.transpose([now.index(c) for c in kept]).reshape(shape)

    def type_of(origin: Origin, at: Mapping[Chooser, int]) -> TensorType:
        return seen(origin, found)[at[origin.chooser] if origin.chooser is not None else 0]

    for chooser in walk.choosers:
        add([chooser], lambda at, c=chooser: (found[c][at[c]].seconds + TIE * found[c][at[c]].bytes) * c.times)
        if (origin := chooser.saves) is not None and origin.chooser is not None:
            add(
                [chooser, origin.chooser],
                lambda at, c=chooser, o=origin: (
                    math.inf if found[c][at[c]].bytes > type_of(o, at).local_bytes() else 0.0
                ),
            )
    for origin, times, last in walk.ends:
        if origin.chooser is not None:
            add(
                [origin.chooser],
                lambda at, o=origin, n=times, t=last: n * prices.move(u := type_of(o, at), end_type(u, t)),
            )
    for wish in walk.wishes.values():
        add(
            [wish.origin.chooser, *(c for c, _ in wish.asks)],
            lambda at, w=wish: (
                w.times * way(type_of(w.origin, at), frozenset(found[c][at[c]].wanted[k] for c, k in w.asks))
            ),
        )
    return total


def programmed(walk: Walk, found: Options, prices: Prices, seconds: float = 60.0) -> tuple[float, float]:
    """The least seconds by an integer programme: a bound that nothing is below, and what it found.

    Each option of a chooser is a variable. A type that is wanted is made, or moved into from what is made, or from a
    type that was moved into from what is made.
    """
    import scipy.optimize as so
    from scipy.sparse import coo_array

    cost: list[float] = []
    rows_: list[tuple[dict[int, float], float, float]] = []  # a sum of variables between bounds

    def variable(c: float) -> int:
        cost.append(c)
        return len(cost) - 1

    x = {}
    for chooser in walk.choosers:
        x[chooser] = [variable((o.seconds + TIE * o.bytes) * chooser.times) for o in found[chooser]]
        rows_.append((dict.fromkeys(x[chooser], 1.0), 1.0, 1.0))
    for origin, times, last in walk.ends:
        if origin.chooser is not None:
            for k, t in enumerate(seen(origin, found)):
                cost[x[origin.chooser][k]] += min(times * prices.move(t, end_type(t, last)), 1e6)
    for chooser in walk.choosers:
        if chooser.saves is not None and chooser.saves.chooser is not None:
            made = {
                v: float(t.local_bytes())
                for v, t in zip(x[chooser.saves.chooser], seen(chooser.saves, found), strict=True)
            }
            kept = {v: -float(o.bytes) for v, o in zip(x[chooser], found[chooser], strict=True)}
            rows_.append((made | kept, 0.0, math.inf))
    for wish in walk.wishes.values():
        made: dict[TensorType, list[int]] = {}
        for k, t in enumerate(seen(wish.origin, found)):
            made.setdefault(t, []).extend([x[wish.origin.chooser][k]] if wish.origin.chooser is not None else [])
        fixed = wish.origin.chooser is None
        kinds = list(dict.fromkeys(o.wanted[k] for c, k in wish.asks for o in found[c]))
        into: dict[TensorType, list[int]] = {t: [] for t in kinds}
        first: dict[TensorType, list[int]] = {t: [] for t in kinds}
        for s, makers in made.items():
            for t in kinds:
                if t != s and math.isfinite(c := prices.move(s, t)):
                    v = variable(c * wish.times)
                    first[t].append(v)
                    if not fixed:
                        rows_.append(({v: 1.0} | dict.fromkeys(makers, -1.0), -math.inf, 0.0))
        for t in kinds:
            into[t] = list(first[t])
        for s, t in itertools.permutations(kinds, 2):
            c = prices.move(s, t)
            if math.isfinite(c) and any(c < prices.move(u, t) for u in made if u != t):
                v = variable(c * wish.times)
                into[t].append(v)
                rows_.append(({v: 1.0} | dict.fromkeys(first[s], -1.0), -math.inf, 0.0))
        for chooser, operand in wish.asks:
            for t in kinds:
                wanting = [v for v, o in zip(x[chooser], found[chooser], strict=True) if o.wanted[operand] == t]
                if not wanting or (fixed and t in made):
                    continue
                line = dict.fromkeys(wanting, 1.0)
                for v in (*made.get(t, []), *into[t]):
                    line[v] = line.get(v, 0.0) - 1.0
                rows_.append((line, -math.inf, 0.0))
    data = [(k, v, a) for k, (line, _, _) in enumerate(rows_) for v, a in line.items()]
    at, of, values = zip(*data, strict=True)
    matrix = coo_array((values, (at, of)), shape=(len(rows_), len(cost))).tocsc()
    bounds = so.LinearConstraint(matrix, [low for _, low, _ in rows_], [high for _, _, high in rows_])
    scale = 1e6  # microseconds: the solver's tolerances are absolute
    done = so.milp(
        np.array(cost) * scale,
        constraints=bounds,
        integrality=np.ones(len(cost)),
        bounds=so.Bounds(0, 1),
        options={"mip_rel_gap": 1e-4, "time_limit": seconds},
    )
    assert done.x is not None, done.message
    return done.mip_dual_bound / scale, done.fun / scale
