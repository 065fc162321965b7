"""Numbers of places and tiles by their digits: coordinates along axes, groups over axes, and how axes cut a dim."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

Digits = tuple[tuple[int, int], ...]  # (size, stride) of every digit of a place, the first weighing most


@lru_cache(maxsize=64)  # facets of one op ask for the same ones; an entry takes 8 bytes a device
def digit_numbers(size: int, digits: Digits) -> np.ndarray:
    """Return the number that some digits of every place are, int64 [size]; read-only."""
    out = np.zeros(size, dtype=np.int64)
    for count, stride in digits:
        out *= count
        out.reshape(-1, count, stride)[...] += np.arange(count)[:, None]
    out.setflags(write=False)
    return out


@lru_cache(maxsize=16)
def digit_groups(size: int, digits: Digits) -> np.ndarray:
    """Return the places that differ in some digits only, a row a group: int64 [groups, members]; read-only."""
    offsets = np.zeros(1, dtype=np.int64)
    first = np.ones(size, dtype=bool)  # the member of its group at which all the digits are 0
    places = np.arange(size)
    for count, stride in digits:
        offsets = (offsets[:, None] + np.arange(count) * stride).reshape(-1)
        first &= places // stride % count == 0
    found = places[first][:, None] + offsets[None, :]
    found.setflags(write=False)
    return found


def nth_of_each(count: np.ndarray) -> np.ndarray:
    """Return the numbers from 0 below each of some counts, one range behind the other.

    >>> nth_of_each(np.array([2, 0, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    return np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)


def tile_bounds(n: int, sizes: Sequence[int]) -> np.ndarray:
    """Return the (start, stop) of every tile of a dim of `n` that axes of these sizes cut, int64 [tiles, 2].

    A tile's number is the mixed-radix index of its coordinates over the axes, major first.
    """
    count = math.prod(sizes)
    if n % count == 0:
        lo = np.arange(count, dtype=np.int64) * (n // count)
        return np.stack([lo, lo + n // count], axis=1)
    lo, hi = np.zeros(1, dtype=np.int64), np.full(1, n, dtype=np.int64)
    for size in sizes:
        chunk = -(-(hi - lo) // size)
        start = lo[:, None] + np.arange(size) * chunk[:, None]
        stop = np.minimum(start + chunk[:, None], hi[:, None])
        # What is left over is empty and stands at the end of its chunk: starts and stops ascend, and can be searched.
        lo, hi = np.minimum(start, hi[:, None]).reshape(-1), stop.reshape(-1)
    return np.stack([lo, hi], axis=1)
