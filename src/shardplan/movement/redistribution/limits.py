"""Paths that keep memory limits, of one tensor over its state graph.

They are found once for a problem, whatever limit is asked for: a limit only selects among them and cuts their steps, so
more memory never costs more. From the path that is cheapest without a limit they go down, each the cheapest whose steps
need less than the largest of the one before, to the least that any path needs; and two that are counted to the byte.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from shardplan.core.accounting import MANY_CHUNKS
from shardplan.core.op import Op
from shardplan.core.ops import Permute
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError, TypingError
from shardplan.movement.redistribution.cuts import Staging
from shardplan.movement.redistribution.emit import direct, edge
from shardplan.movement.redistribution.problem import Problem
from shardplan.movement.redistribution.search import Needs, Objective, Path, narrowest, shortest

# Paths between the cheapest and the narrowest. Each is a search; few problems have more.
_STAIRS = 8
# Steps that are counted to the byte for the narrowest of all paths, 1 ms each. Mostly the first path is it; of small
# arrays, in which staging is much of a step, some tens are counted.
_COUNTED = 24


class _Way(NamedTuple):
    """Ops of an edge, and what they need."""

    ops: tuple[Op, ...]
    stages: tuple[Staging, ...]

    def need(self, most: float) -> int:
        """Return what they need at the least in at most `most` chunks."""
        return max((x.base + x.staged(x.chunks(0, most)) for x in self.stages), default=0)


@dataclass(frozen=True)
class Narrowing:
    """A problem, and what the searches for its paths are given."""

    p: Problem
    portable: bool
    allowed: np.ndarray  # bool [types]
    extents: np.ndarray  # of the shard of every type along each dim
    keep: bool  # the source lives to the end
    budget: int  # expansions of a search
    counted: dict[tuple[int, int], list[_Way]] = field(default_factory=dict[tuple[int, int], "list[_Way]"])

    def paths(self, cheapest: Sequence[tuple[Objective, Path]]) -> Iterator[tuple[Op, ...]]:
        """Yield the ops of all paths, given objectives and the cheapest path under each."""
        a, b = self.p.node(self.p.source), self.p.node(self.p.target)
        needs = self._needs(MANY_CHUNKS)
        last = self._narrowest(a, b, needs)
        if last is None:
            return
        for objective, path in cheapest:
            for found in self._stairs(objective, path, needs, last):
                yield from self._ops(found)
        for most in (MANY_CHUNKS, math.inf):
            yield self._narrowest_path(a, b, most)

    def _stairs(self, objective: Objective, path: Path, needs: Needs, last: Path) -> Iterator[Path]:
        """Yield the cheapest of the narrowest paths, and from the cheapest of all down what lies between them."""

        def within(most: float) -> Path | None:
            ends, room = (path.nodes[0], path.nodes[-1]), (needs, most)
            return shortest(self.p.graph, *ends, objective, self.allowed, room, budget=self.budget)

        lowest = within(last.cost) or last
        yield lowest
        for _ in range(_STAIRS):
            yield path
            most = max(needs.path_needs(self.p.graph, path))
            found = within(float(np.nextafter(most, 0))) if most > last.cost else None
            if found is None or found.cost >= lowest.cost:
                break
            path = found

    def _ops(self, path: Path) -> Iterator[tuple[Op, ...]]:
        """Yield the ops of a path; and with one op for slices of several dims, the first of which is wider."""
        pairs = list(itertools.pairwise(path.nodes))
        edges = [tuple(edge(self.p, *pair, self.portable)) for pair in pairs]
        yield tuple(itertools.chain(*edges))
        if any(len(ops) > 1 for ops in edges):
            single = [ops if len(ops) < 2 else self._least_way(*x)[1] for ops, x in zip(edges, pairs, strict=True)]
            yield tuple(itertools.chain(*single))

    def _needs(self, most: float) -> Needs:
        p = self.p
        local = self.extents.prod(axis=1) * p.source.itemsize
        kept = p.node(p.source) if self.keep else None
        return Needs(p.graph.types, self.extents, local, p.source.itemsize, kept, p.nbytes / most)

    def _narrowest(self, a: int, b: int, needs: Needs) -> Path | None:
        return narrowest(self.p.graph, a, b, needs, self.allowed, self.portable, budget=self.budget)

    def _narrowest_path(self, a: int, b: int, most: float) -> tuple[Op, ...]:
        """The path whose steps, in at most `most` chunks, need least, counted to the byte.

        Steps are counted when a path takes them, and the narrowest path is sought again until it is all counted.
        Buffers are no larger than shards, so a step of half the need cannot be what decides.
        """
        needs, ways = self._needs(most), dict[tuple[int, int], tuple[Op, ...]]()
        least, best = math.inf, tuple[Op, ...]()
        while len(ways) < _COUNTED:
            path = self._narrowest(a, b, needs)
            if path is None or path.cost >= least:
                break
            pairs = list(itertools.pairwise(path.nodes))
            found = path.cost
            for pair, need in zip(pairs, needs.path_needs(self.p.graph, path), strict=True):
                if pair not in ways and 2 * need > path.cost:
                    needs.known[pair], ways[pair] = self._least_way(*pair, most)
                found = max(found, needs.known.get(pair, need))
            if found < least:
                least, best = (
                    found,
                    tuple(op for x in pairs for op in ways.get(x, edge(self.p, *x, self.portable))),
                )
        return best

    def _least_way(self, a: int, b: int, most: float = MANY_CHUNKS) -> tuple[float, tuple[Op, ...]]:
        """What an edge needs by the ops that need least, and these; inf where none types."""
        if (a, b) not in self.counted:
            self.counted[a, b] = list(self._edge_ops(a, b))
        none = math.inf, tuple[Op, ...]()
        return min((none, *((way.need(most), way.ops) for way in self.counted[a, b])), key=lambda way: way[0])

    def _edge_ops(self, a: int, b: int) -> Iterator[_Way]:
        """Yield the ops of one edge, and others that may stage less: the way of the graph types."""
        t, u = self.p.type(a), self.p.type(b)
        portable = self.portable
        ways: list[Sequence[Op]] = [edge(self.p, a, b, portable), [Permute(u.layout)]]
        if t.layout.partial == u.layout.partial and t.layout.root == u.layout.root:
            ways.append(direct(t, u, portable))
        for ops in dict.fromkeys(map(tuple, ways)):
            with contextlib.suppress(TypingError, LayoutError):
                yield _Way(ops, self._stages(t, ops))

    def _stages(self, t: TensorType, ops: Sequence[Op]) -> tuple[Staging, ...]:
        """What ops in a row need on `t`."""
        kept, stages = self.p.source.local_bytes() if self.keep else 0, list[Staging]()
        for op in ops:
            (u,) = op.infer(t)
            base = t.local_bytes() + u.local_bytes() + (kept if t != self.p.source else 0)
            stages.append(Staging.of(op, (t,), base))
            t = u
        return tuple(stages)
