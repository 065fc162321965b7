"""The zigzag order of a sequence: the first half of every tile is as early as the second is late.

Tile w of W, of ceil(n / W) elements, has the w-th run of positions from the start, then the w-th from the end; a last
tile that is not full has what is left. So under a causal mask all tiles have as many pairs. Over one tile it is no
order but the sequence's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from shardplan.core.layout import Layout
from shardplan.core.lowering import Ints
from shardplan.core.mesh import Mesh
from shardplan.core.namespace import Namespace, Tensor
from shardplan.core.ops.arithmetic import Elementwise
from shardplan.core.ops.indexing import Iota
from shardplan.core.ops.placing import Crop, Reshape


class Zigzag(NamedTuple):
    """The order of `n` elements over so many tiles.

    >>> Zigzag(8, 2).order().tolist(), Zigzag(7, 3).order().tolist()
    ([0, 1, 6, 7, 2, 3, 4, 5], [0, 1, 6, 2, 3, 5, 4])
    """

    n: int
    tiles: int

    @property
    def tile(self) -> int:
        """The elements of a tile."""
        return -(-self.n // self.tiles)

    @property
    def early_size(self) -> int:
        """Those of them that are early."""
        return -(-self.tile // 2)

    @property
    def full(self) -> int:
        """How many tiles are full."""
        return self.n // self.tile

    def order(self) -> Ints:
        """Return the position of every element, int64 [n]."""
        return np.concatenate([np.arange(p, p + b - a) for a, b, p in self.runs().tolist()])

    def positions(self, xp: Namespace, index: Tensor) -> Tensor:
        """Return the positions of elements by their indices, in any namespace."""
        if self.tiles == 1:
            return index
        w, late = index // self.tile, self.tile - self.early_size
        back = (index % self.tile >= self.early_size) & (w < self.full)
        return xp.where(back, self.n - (w + 1) * self.tile + index - w * late, index - w * late)

    def runs(self) -> Ints:
        """Return the runs of positions that follow each other: first index, the one behind the last, first position."""
        found: list[tuple[int, int, int]] = []
        late = self.tile - self.early_size
        for w in range(self.full):
            first = w * self.tile
            found.append((first, first + self.early_size, w * self.early_size))
            found.append((first + self.early_size, first + self.tile, self.n - (w + 1) * late))
        found.append((self.full * self.tile, self.n, self.full * self.early_size))
        return np.array([run for run in found if run[0] < run[1]])

    def position_runs(self, start: Ints, stop: Ints) -> tuple[Ints, Ints]:
        """Return the runs of tiles, indices int64 [tiles]: first positions and those behind the last, [tiles, runs]."""
        first, last, position = self.runs().T
        low, high = np.maximum(start[:, None], first), np.minimum(stop[:, None], last)
        none = low >= high
        few = np.argsort(none, axis=1, kind="stable")[:, : int((~none).sum(axis=1).max(initial=0))]
        begin, size = position + low - first, np.where(none, 0, high - low)
        begin, size = (np.take_along_axis(x, few, axis=1) for x in (begin, size))
        return begin, begin + size

    def write_positions(self, write: Callable[..., str], mesh: Mesh) -> str:
        """Write the positions of all elements, i32 [n] on every device; `write` takes an op and names."""
        if self.tiles == 1:
            return write(Iota("i32", (self.n,), 0, Layout(((),)), mesh))
        count, late = -(-self.n // self.tile), self.tile - self.early_size
        row, column = (
            write(Iota("i32", shape, d, Layout(((), ())), mesh)) for d, shape in enumerate(((count, 1), (1, self.tile)))
        )
        early = f"a * {self.early_size} + b"
        turned = f"{self.n} - (a + 1) * {late} + b - {self.early_size}"
        expression = f"where(b < {self.early_size}, {early}, where(a < {self.full}, {turned}, {early}))"
        found = write(Reshape("tile of -> (tile of)"), write(Elementwise(expression), row, column))
        return write(Crop((0,), (self.n,)), found) if count * self.tile > self.n else found


def count_visible(queries: tuple[Ints, Ints], keys: tuple[Ints, Ints]) -> tuple[Ints, Ints]:
    """Return whether any query of runs sees any key of others, and how many pairs: half of those on the diagonal.

    Runs are their first positions, and those behind the last: int64 [..., runs].
    """
    low, high = (x[..., :, None] for x in queries)
    start, stop = (x[..., None, :] for x in keys)

    def before(end: Ints) -> Any:
        inside = np.clip(end, start, stop) - start
        return inside * inside / 2 + np.maximum(end - stop, 0) * (stop - start)

    there = (low < high) & (start < stop) & (start < high)
    return np.asarray(there.any(axis=(-2, -1))), (before(high) - before(low)).sum(axis=(-2, -1))
