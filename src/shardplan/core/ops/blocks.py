"""`run_in_blocks`: a function of single elements, some of them at a time, so that what it makes meanwhile is small."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from shardplan.core.namespace import Dtype, Namespace, Tensor

BLOCK = 1 << 18  # elements: 1 MiB of f32, which stays in a core's cache; a call of Python is little beside it


def run_in_blocks(
    xp: Namespace,
    run: Callable[[Namespace, Sequence[Tensor]], Sequence[Tensor]],
    arrays: Sequence[Tensor],
    shape: tuple[int, ...],
    kinds: Sequence[Dtype],
) -> list[Tensor]:
    """Return the results of a function, all of this shape, whose elements are each of those at its place alone.

    Arrays broadcast to the shape; `kinds` are the dtypes of what the function returns. Where a library runs each call
    as it comes (`xp.eager`), whole arrays between one call and the next would take more than the operands.
    """
    if not xp.eager or math.prod(shape) <= BLOCK:
        return [xp.broadcast_to(x, shape) for x in run(xp, arrays)]
    out = [xp.full(shape, 0, kind) for kind in kinds]
    dim = next(d for d, n in enumerate(shape) if n > 1)
    many = max(1, BLOCK // math.prod(shape[dim + 1 :]))
    for start in range(0, shape[dim], many):
        stop = min(start + many, shape[dim])
        parts = [_cut(x, dim - len(shape), slice(start, stop)) for x in arrays]
        inner = (*shape[:dim], stop - start, *shape[dim + 1 :])
        for whole, part in zip(out, run_in_blocks(xp, run, parts, inner, kinds), strict=True):
            whole[(slice(None),) * dim + (slice(start, stop),)] = part
    return out


def _cut(x: Tensor, dim: int, part: slice) -> Tensor:
    """A part of a dim, counted from the last; all of an array that broadcasts along it."""
    at = len(x.shape) + dim
    return x if at < 0 or x.shape[at] == 1 else x[(slice(None),) * at + (part,)]
