"""Who sends what several devices hold: of the holders near a receiver each in turn.

The *candidates* of a receiver are the holders of what it wants inside the smallest block of device ids around it that
has one. `near` lists the sizes of nested blocks, (8, 32) for nodes of 8 and racks of 32; outside them all devices are
one block. Receivers of one thing with the same candidates, in order of their ids, take one candidate after another. So
holders share the load, what is near stays near, and nothing depends on how a mesh is written.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from shardplan.core import validation
from shardplan.errors import TypingError


def checked_near(op: str, near: object) -> tuple[int, ...]:
    """Return sizes of nested blocks, smallest first; raises `TypingError` for any other value."""
    given = validation.items(f"{op}: near", near, "sizes of blocks", TypingError)
    sizes = tuple(validation.whole_number(f"{op}: a block of near", size, 2, kind=TypingError) for size in given)
    if any(outer % inner or outer == inner for inner, outer in pairwise((1, *sizes))):
        raise TypingError(f"{op}: near={sizes}; legal are multiples of the one before, like (8, 32)")
    return sizes


def choose(
    want: np.ndarray, receivers: np.ndarray, have: np.ndarray, holders: np.ndarray, near: tuple[int, ...]
) -> np.ndarray:
    """Return the number of the holder that serves each receiver, -1 where nobody has what it wants: int64 [receivers].

    Args:
        want: The number of the thing that each receiver wants and does not hold, [receivers].
        receivers: Device ids, [receivers]; a device that wants several things stands there once for each.
        have: The number of the thing that each holder has, [holders].
        holders: Device ids, distinct for each thing, [holders].
        near: Sizes of nested blocks of ids, smallest first.

    >>> choose(np.zeros(3, int), np.array([3, 4, 5]), np.zeros(2, int), np.array([1, 2]), ()).tolist()
    [0, 1, 0]
    """
    things = 1 + int(max(have.max(initial=0), want.max(initial=0)))
    numbered = int(want.min(initial=0)) >= 0 and things <= len(have) + len(want)
    if numbered and int(np.bincount(have, minlength=1).max()) <= 1:
        only = np.full(things, -1)  # one holder of each thing serves all who want it
        only[have] = np.arange(len(have))
        return only[want]
    left = np.arange(len(want))
    first, count = np.zeros((2, len(want)), dtype=np.int64)  # of each receiver its candidates: places in `listed`
    listed: list[np.ndarray] = []
    top = 1 + int(max(receivers.max(initial=0), holders.max(initial=0)))
    for level, size in enumerate((*near, top)):
        blocks = -(-top // size)
        keys = have * blocks + holders // size
        # The outermost digit of the ids is the fastest, so that neighbours in the list lie in different blocks.
        parts = (1, *(n for n in near if n < size), size)
        digits = [holders % outer // inner for inner, outer in pairwise(parts)]
        listed.append(np.lexsort((*digits[::-1], keys)))
        named, starts, width = np.unique(keys[listed[-1]], return_index=True, return_counts=True)
        asked = want[left] * blocks + receivers[left] // size
        slot = np.searchsorted(named, asked)
        served = slot < len(named)
        served[served] = named[slot[served]] == asked[served]
        first[left[served]] = level * len(have) + starts[slot[served]]
        count[left[served]] = width[slot[served]]
        left = left[~served]
        if not len(left):
            break
    places = np.concatenate(listed)
    nth = np.zeros(len(want), dtype=np.int64)
    shared = np.flatnonzero(count > 1)
    # Candidates of two blocks, one inside the other, are the same where they are as many and begin with the same one.
    head = places[first[shared]]
    turn = np.lexsort((receivers[shared], count[shared], head))
    fresh = (np.diff(head[turn], prepend=-1) != 0) | (np.diff(count[shared][turn], prepend=0) != 0)
    nth[shared[turn]] = np.arange(len(turn)) - np.maximum.accumulate(np.where(fresh, np.arange(len(turn)), 0))
    found = np.full(len(want), -1)
    some = np.flatnonzero(count)
    found[some] = places[first[some] + nth[some] % count[some]]
    return found
