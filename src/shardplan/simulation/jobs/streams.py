"""A run of ops on streams: when each starts and ends, in numbers, or in rows of (max,+).

An op starts when its operands are there, its stream is free, and its host has issued it; an op that no host issues is
where its operands are. A host issues an op every `launch` seconds, in the order of the program, and waits for nothing.

Times are floats, or arrays [entries]: the time is then the largest of `entry + array`, minus infinity where it does not
hang on an entry. Either adds up and has a later of two, and no more is asked of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from shardplan.hardware.prices.fabric import Floats
from shardplan.simulation.jobs.timing import Node, TimedLoop, TimedOp, of_parameters, streams_of
from shardplan.simulation.trace import HOST

Time = Any  # a float, or float64 [entries]


class OpSpan(NamedTuple):
    """An op that was run: when its host had issued it, when it started and ended; in which runs of the bodies."""

    op: TimedOp
    issued: Time
    start: Time
    end: Time
    runs: tuple[int, ...]
    reads: tuple[int, ...]  # indices of the spans that made what it reads, -1 for what was there


class StreamRun:
    """Ops under way: when streams are free, and when values are there (those that always were are left out)."""

    def __init__(
        self,
        free: dict[str, Time],
        values: dict[str, Time],
        launch: float,
        *,
        one: str | None = None,
        fold: bool = False,
        later: Callable[[Time, Time], Time] = max,
        spans: list[OpSpan] | None = None,
    ) -> None:
        """Begin; `one` is the stream of all, `fold` says that loops are raised to a power, `spans` takes every op."""
        self.free, self.values, self.launch, self.later = free, values, launch, later
        self.one, self.fold, self.spans = one, fold, spans
        self.first: Time = None  # when the first op starts
        self.last: Time = None  # when the last one ends
        self.makers: dict[str, int] = {}

    def run(self, nodes: Sequence[Node], runs: tuple[int, ...] = ()) -> None:
        """Run ops in order."""
        for node in nodes:
            if isinstance(node, TimedOp):
                self._op(node, runs)
            elif self.fold and node.times > 2:
                self._power(node)
            else:
                self._loop(node, runs)

    def hold_streams(self, names: Iterable[str]) -> None:
        """Let all streams but the host's, and those of parameters, go on when values are there, and no sooner."""
        for at in (self.values[name] for name in names if name in self.values):
            for stream in self.free:
                if stream != HOST and not of_parameters(stream):
                    self.free[stream] = self.latest_time(self.free[stream], at)

    def latest_time(self, a: Time, b: Time) -> Time:
        """Return the later of two times."""
        return self.later(a, b)

    def _op(self, op: TimedOp, runs: tuple[int, ...]) -> None:
        later, there = self.later, None
        for name in op.reads:
            at = self.values.get(name)
            if at is not None:
                there = at if there is None else later(there, at)
        if op.issued:
            stream = self.one or op.cost.stream
            issued = self.free[HOST] = self.free[HOST] + self.launch
            start = later(issued, self.free[stream])
            if there is not None:
                start = later(start, there)
            end = start + op.cost.seconds
            self.free[stream] = end
            self.first = start if self.first is None else self.first
            self.last = end if self.last is None else later(self.last, end)
            if self.spans is not None:
                causes = tuple(sorted({self.makers[name] for name in op.reads if name in self.makers}))
                self.spans.append(OpSpan(op, issued, start, end, runs, causes))
                for name in op.results:
                    self.makers[name] = len(self.spans) - 1
            there = end
        elif self.spans is not None:
            spans, made = self.spans, [self.makers[name] for name in op.reads if name in self.makers]
            source = max(made, key=lambda k: spans[k].end, default=None)
            for name in op.results:
                self.makers.pop(name, None)
                if source is not None:
                    self.makers[name] = source
        for name in op.results:
            if there is None:
                self.values.pop(name, None)
            else:
                self.values[name] = there

    def _enter(self, loop: TimedLoop) -> tuple[dict[str, Time], dict[str, int]]:
        """Give a body its values; return those outside."""
        outside = self.values, self.makers
        self.values = {name: outside[0][o] for o, name in loop.enters if o in outside[0]}
        self.makers = {name: outside[1][o] for o, name in loop.enters if o in outside[1]}
        return outside

    def _leave(self, loop: TimedLoop, outside: tuple[dict[str, Time], dict[str, int]]) -> None:
        """Give what a body made to those outside."""
        inside = self.values, self.makers
        self.values, self.makers = outside
        for name, inner in loop.results:
            for mine, theirs in zip((self.values, self.makers), inside, strict=True):
                mine.pop(name, None)
                if inner in theirs:
                    mine[name] = theirs[inner]  # pyright: ignore[reportArgumentType]

    def _loop(self, loop: TimedLoop, runs: tuple[int, ...]) -> None:
        if not loop.times:
            for (name, _), (outside, _) in zip(loop.results, loop.enters, strict=False):
                for mine in (self.values, self.makers):
                    if outside in mine:
                        mine[name] = mine[outside]  # pyright: ignore[reportArgumentType]
            return
        outside = self._enter(loop)
        made = [r for node in loop.early for r in _results(node)]
        self.run(loop.early, (*runs, 0))
        loop = _with_room(loop)
        for k in range(loop.times - 1):
            self._early_beside(loop, made, (*runs, k))
        self.run(loop.late, (*runs, loop.times - 1))
        self._leave(loop, outside)

    def _put(self, found: Mapping[str, tuple[Time, int | None]]) -> None:
        for name, (at, maker) in found.items():
            for mine, value in ((self.values, at), (self.makers, maker)):
                mine.pop(name, None)
                if value is not None:
                    mine[name] = value

    def _hand_on(self, loop: TimedLoop) -> None:
        """What a run leaves enters the next."""
        found = [(into, self.values.get(out), self.makers.get(out)) for into, out in loop.carried]
        self._put({into: (at, maker) for into, at, maker in found})

    def _power(self, loop: TimedLoop) -> None:
        """Run a loop as a power of the matrix of one run, with what is run early for the next; then the last run."""
        outside = self._enter(loop)
        made = [r for node in loop.early for r in _results(node)]
        self.run(loop.early)
        loop = _with_room(loop)
        entering = [name for name, _ in loop.carried]
        names = [*dict.fromkeys([*entering, *made, *(name for _, name in loop.enters)])]
        matrix, first = self._body(loop, names, made)
        power, square, count = None, matrix, loop.times - 1
        while count:
            if count & 1:
                power = square if power is None else product(square, power)
            square, count = (product(square, square) if count > 1 else square), count >> 1
        now = self._rows(names)
        if self.first is None and first is not None:
            self.first = (first[:, None] + now).max(axis=0)
        if power is not None:
            now = product(power, now)
        streams = list(self.free)
        self.free.update(zip(streams, now, strict=False))
        self._put(
            {
                name: (row if np.isfinite(row).any() else None, None)
                for name, row in zip(names, now[len(streams) :], strict=True)
            }
        )
        self.run(loop.late)
        # No stream goes back, so the last run ends last on each that the body uses.
        for stream in {self.one or s for s in streams_of((*loop.early, *loop.late))}:
            row = self.free[stream]
            self.last = row if self.last is None else self.later(self.last, row)
        self._leave(loop, outside)

    def _rows(self, names: Sequence[str]) -> Floats:
        never = np.full_like(self.free[HOST], -np.inf)
        return np.array([*self.free.values(), *(self.values.get(n, never) for n in names)])

    def _body(self, loop: TimedLoop, names: Sequence[str], made: Sequence[str]) -> tuple[Floats, Floats | None]:
        """The matrix of a run over streams and values, and when its first op starts."""
        count = len(self.free) + len(names)
        unit = np.full((count, count), -np.inf)
        np.fill_diagonal(unit, 0.0)
        inner = dict(zip(names, unit[len(self.free) :], strict=True))
        free = dict(zip(self.free, unit, strict=False))
        one = StreamRun(free, inner, self.launch, one=self.one, fold=True, later=np.maximum)
        one._early_beside(loop, made, ())
        return one._rows(names), one.first

    def _early_beside(self, loop: TimedLoop, made: Sequence[str], runs: tuple[int, ...]) -> None:
        """A run, after what is run early for the next, whose rows are made beside its own; and hand on."""
        k = runs[-1] if runs else 0
        kept = {r: (self.values.pop(r, None), self.makers.pop(r, None)) for r in made}
        self.run(loop.early, (*runs[:-1], k + 1) if runs else ())
        ahead = {r: (self.values.pop(r, None), self.makers.pop(r, None)) for r in made}
        self._put(kept)
        self.run(loop.late, runs)
        self._hand_on(loop)
        self._put(ahead)


def _with_room(loop: TimedLoop) -> TimedLoop:
    """A loop in which what is run early for the next run waits until a run may begin.

    There is room for two layers' parameters: streams of gathers wait for the copy of the layer before (FSDP2's
    `FSDPParamGroup.wait_for_unshard`), and certificates of memory count so many.
    """
    enters = tuple(name for name, _ in loop.carried)
    early = (replace(n, reads=(*n.reads, *enters)) if isinstance(n, TimedOp) else n for n in loop.early)
    return replace(loop, early=tuple(early))


def _results(node: Node) -> tuple[str, ...]:
    return node.results if isinstance(node, TimedOp) else tuple(name for name, _ in node.results)


def product(a: Floats, b: Floats) -> Floats:
    """Return the product of matrices of (max,+): the largest over k of `a[i, k] + b[k, j]`."""
    return (a[:, :, None] + b[None, :, :]).max(axis=1)
