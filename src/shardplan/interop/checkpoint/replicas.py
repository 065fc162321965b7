"""Replicas of a checkpoint compared: copies of one element, on several devices or under several names, are equal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np

from shardplan.core.box_table import strides
from shardplan.core.dtypes import numpy_dtype
from shardplan.errors import line
from shardplan.interop.checkpoint.gather import WindowGather
from shardplan.interop.checkpoint.sources import OpenCheckpoint
from shardplan.movement.weights.refit import RefitPlan
from shardplan.movement.weights.regions import split_block
from shardplan.movement.weights.replicas import copy_ends, first_unlike
from shardplan.movement.weights.weights import names_of


def compare_copies(
    plan: RefitPlan, held: OpenCheckpoint, ranks: Iterable[int], gather: WindowGather, tell: Callable[[], None]
) -> int:
    """Compare what some ranks of the source hold with who holds it before them, and return the bytes compared.

    It takes two windows of the size of the gather's scratch for itself. `tell` is called now and then.

    Raises `LayoutError` naming the first element that differs, both places and both values.
    """
    replicas, size = plan.replicas, len(gather.scratch)
    if not replicas.moves:
        return 0
    ours, theirs = np.empty(size, dtype=np.uint8), np.empty(size, dtype=np.uint8)
    total = 0
    for rank in ranks:
        found = replicas.regions(rank)
        for k in range(len(found)):
            move = replicas.moves[int(found.move[k])]
            dtype = numpy_dtype(plan.source.families[move.target_family].dtype)
            ends = list(zip(copy_ends(found, k), (ours, theirs), strict=True))
            for start, sizes in split_block(tuple(found.sizes[k].tolist()), size // dtype.itemsize):
                count = math.prod(sizes)
                views: list[np.ndarray] = []
                for end, buffer in ends:
                    tensor = held.tensor(plan.source.place(end.rank), names_of(plan.source, end.rank)[end.number])
                    into = buffer[: count * dtype.itemsize].view(dtype)
                    first = end.offset + int(np.dot(start, end.strides))
                    gather.fill(into, tensor, sizes, (tuple(end.strides.tolist()), strides(sizes)), (first, 0), 0)
                    views.append(into)
                if (unlike := first_unlike(*views)) is not None:
                    at = tuple(i + int(x) for i, x in zip(start, np.unravel_index(unlike[0], sizes), strict=True))
                    more = f" in {line(held.path)}, or --no-replicas (compare_replicas=False), which takes one of them"
                    raise replicas.unlike(found, k, at, (views[0][unlike], views[1][unlike]), more)
                total += count * dtype.itemsize
            tell()
    return total
