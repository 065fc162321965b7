"""`QueryTiles`: attention a few rows of queries at a time on one device, and back, so that few scores are there.

A row sees all its keys in one tile: nothing is folded, and the values are those of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shardplan.core.namespace import Namespace, Tensor, wide
from shardplan.core.ops.compute import Where
from shardplan.core.ops.ring_rounds import ScoreRule, tile_backward, tile_forward
from shardplan.core.tensor import TensorType

TILE = 1 << 20  # scores that a device has at once, or those of one row of queries


@dataclass(frozen=True, slots=True)
class QueryTiles:
    """Attention of so many `rows` of queries of a device at a time; `firsts` are where its queries and keys start.

    Operands behind the values are those of `Attention`: both `segments`, the `sinks`, the positions before.
    """

    rows: int
    firsts: tuple[Any, Any]
    rule: ScoreRule
    segments: bool = False
    sinks: bool = False

    @staticmethod
    def of(
        operands: Sequence[TensorType], where: Where, rule: ScoreRule, *, segments: bool = False, sinks: bool = False
    ) -> QueryTiles | None:
        """Return tiles of at most `TILE` scores; None where all scores are no more."""
        (b, s, g, r, _), t = where(operands[0])[1], where(operands[1])[1][1]
        rows = max(1, TILE // max(1, b * g * r * t))
        firsts = where(operands[0])[0][1], where(operands[1])[0][1]
        return None if rows >= s else QueryTiles(rows, firsts, rule, segments, sinks)

    def forward(self, xp: Namespace, arrays: Sequence[Tensor]) -> list[Tensor]:
        """Return what the queries see of the values."""
        q, k, v, *more = arrays
        k, v = (xp.astype(x, wide(xp.dtype(x))) for x in (k, v))
        found = [xp.astype(self._tile(xp, part, k, v, at, more)[0], xp.dtype(q)) for at, part in self._parts(q)]
        return [xp.concatenate(found, 1)]

    def backward(self, needs: Sequence[int], xp: Namespace, arrays: Sequence[Tensor]) -> list[Tensor]:
        """Return the cotangents of the operands `needs`, given that of the result."""
        (q, k, v, *more), came = arrays[:-1], arrays[-1]
        kinds = [xp.dtype(x) for x in (q, k, v)]
        k, v = (xp.astype(x, wide(xp.dtype(x))) for x in (k, v))
        rows: list[Tensor] = []
        sums: list[Tensor] = []
        for at, part in self._parts(q):
            dy = xp.astype(came[:, at : at + self.rows], xp.dtype(k))
            out, lse = self._tile(xp, part, k, v, at, more)
            inner = xp.einsum("bsgre,bsgre->bsgr", dy, out)
            tile = part, k, v, lse, inner, dy
            dq, *others = tile_backward(
                xp, tile, self._numbers(at, more), self.rule, self._segment_mask(part, at, more)
            )
            if self.sinks:
                sink = xp.astype(self._sink(more), xp.dtype(lse))
                others.append(xp.reduce("sum", -xp.exp(sink - lse) * inner, (0, 1), False, 0))
            rows.append(xp.astype(dq, kinds[0]))
            sums = [a + b for a, b in zip(sums, others, strict=True)] if sums else others
        made = dict(enumerate((xp.concatenate(rows, 1), *map(xp.astype, sums[:2], kinds[1:]))))
        if self.sinks:
            made[3 + 2 * self.segments] = xp.astype(sums[2], xp.dtype(self._sink(more)))
        return [made[n] for n in needs]

    def _parts(self, q: Tensor) -> Iterator[tuple[int, Tensor]]:
        return ((at, q[:, at : at + self.rows]) for at in range(0, q.shape[1], self.rows))

    def _sink(self, more: Sequence[Tensor]) -> Tensor:
        return more[2 * self.segments]

    def _segment_mask(self, q: Tensor, at: int, more: Sequence[Tensor]) -> Tensor | None:
        """Which queries and keys are of other sequences, `[b s 1 1 t]`."""
        if not self.segments:
            return None
        mine, theirs = more[0][:, at : at + q.shape[1]], more[1]
        return mine[:, :, None, None, None] != theirs[:, None, None, None, :]

    def _numbers(self, at: int, more: Sequence[Tensor]) -> tuple[Any, Any]:
        first, keys = self.firsts
        before = more[2 * self.segments + self.sinks :]
        return (first + at + before[0] if before else first + at), keys

    def _tile(
        self, xp: Namespace, q: Tensor, k: Tensor, v: Tensor, at: int, more: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """What queries see, and the log-sum-exp of their scores: a sink is what was found before, of nothing."""
        state: list[Tensor] = []
        if self.sinks:
            kind = xp.dtype(k)
            known = xp.full(q.shape[:4], 0, kind) + xp.astype(self._sink(more), kind)
            state = [xp.full((*q.shape[:4], v.shape[-1]), 0, kind), known]
        return tile_forward(xp, (q, k, v, *state), self._numbers(at, more), self.rule, self._segment_mask(q, at, more))
