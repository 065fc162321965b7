"""`tile_rows`: an op on rows that do not know of each other, some rows at a time, so that what it makes is small."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from shardplan.core.dtypes import numpy_dtype
from shardplan.core.mesh import Mesh
from shardplan.core.namespace import Namespace, Tensor
from shardplan.core.ops.compute import LocalRun, Where, at_place
from shardplan.core.tensor import TensorType

TILE = 1 << 20  # elements of the widest operand that a tile has, or one row
_ONE = Mesh(row=1)


def tile_rows(
    bind: Callable[[Sequence[TensorType], Where], LocalRun],
    operands: Sequence[TensorType],
    results: Sequence[TensorType],
    where: Where,
) -> LocalRun | None:
    """Return an op on the rows of one device, a tile after the other; None where they are few, or dims of a row cut.

    The rows are the dims that all operands and results share, those of the one with fewest; `bind` binds the op to
    operands of such types. Where a library traces what it runs (`xp.eager` is false), all rows are one tile.
    """
    lead = min(t.ndim for t in (*operands, *results))
    if any(names for t in (*operands, *results) for names in t.layout.dims[lead:]):
        return None
    shapes = [where(t)[1] for t in (*operands, *results)]
    rows = math.prod(shapes[0][:lead])
    ends = shapes[len(operands) :]
    many = max(1, TILE // max(math.prod(shape[lead:]) for shape in shapes))
    if many >= rows:
        return None
    kinds = [numpy_dtype(t.dtype) for t in results]

    def bound(count: int) -> LocalRun:
        types = [TensorType(t.dtype, (count, *t.shape[lead:]), (), _ONE) for t in operands]
        return bind(types, at_place(0))

    tile, rest = bound(many), bound(rows % many) if rows % many else None

    def run(xp: Namespace, arrays: Sequence[Tensor]) -> list[Tensor]:
        if not xp.eager:
            return bind(operands, where)(xp, arrays)
        flat = [x.reshape((rows, *x.shape[lead:])) for x in arrays]
        out = [xp.full(shape, 0, kind) for shape, kind in zip(ends, kinds, strict=True)]
        views = [y.reshape((rows, *y.shape[lead:])) for y in out]
        for start in range(0, rows, many):
            stop = min(start + many, rows)
            one = tile if stop - start == many or rest is None else rest
            for y, part in zip(views, one(xp, [x[start:stop] for x in flat]), strict=True):
                y[start:stop] = part
        return out

    return run
