"""The types around a few others: what is searched where all types over the runs are too many.

Two types are neighbours where a run goes to another place, comes, goes or changes places with another, or a suffix
changes dims. Paths lie among the neighbours of their ends and of what the closed form visits; the neighbours of the
best path found make the next pool, as long as that finds a cheaper one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

Dims = tuple[tuple[int, ...], ...]  # of every dim its runs, major first

MOST_TYPES = 1200  # of a pool
MOST_FINER = 300  # of them finer types of each end


def neighbours(dims: Dims, count: int) -> Iterator[Dims]:
    """Yield the neighbours of a type over runs 0 to `count` - 1."""
    where = {r: d for d, runs in enumerate(dims) for r in runs}
    free = [r for r in range(count) if r not in where]

    def put(*changed: tuple[int, tuple[int, ...]]) -> Dims:
        new = dict(changed)
        return tuple(new.get(d, runs) for d, runs in enumerate(dims))

    for d, runs in enumerate(dims):
        yield from (put((d, (*runs, r))) for r in free)
        for n in range(1, len(runs) + 1):
            left, suffix = runs[:-n], runs[-n:]
            yield put((d, left))
            yield from (put((d, left), (k, (*other, *suffix))) for k, other in enumerate(dims) if k != d)
    for r, d in where.items():
        without = tuple(x for x in dims[d] if x != r)
        yield put((d, without))
        for k, other in enumerate(dims):
            runs = without if k == d else other
            for at in range(len(runs) + 1):
                yield put((d, without), (k, (*runs[:at], r, *runs[at:])))
        for q in (*free, *(q for q in where if q > r)):
            swap = {r: q, q: r}
            yield tuple(tuple(swap.get(x, x) for x in runs) for runs in dims)


def finer(dims: Dims, count: int) -> Iterator[Dims]:
    """Yield the types that free runs make of one, minor in whichever dims: few of them first.

    A source is sliced to one of these, and a target gathered from one; between two of equal tiles lies a permute.
    """
    used = {r for runs in dims for r in runs}
    free = [r for r in range(count) if r not in used]
    for n in range(1, len(free) + 1):
        for some in itertools.combinations(free, n):
            for places in itertools.product(range(len(dims)), repeat=n):
                added = [tuple(r for r, d in zip(some, places, strict=True) if d == k) for k in range(len(dims))]
                yield tuple((*runs, *more) for runs, more in zip(dims, added, strict=True))


def pool(seeds: Iterable[Dims], count: int) -> tuple[Dims, ...]:
    """Return the seeds, finer types of the first and the last, and neighbours, at most `MOST_TYPES` (or all seeds)."""
    found = dict.fromkeys(seeds)
    ends = tuple(found)
    for dims in (ends[0], ends[-1]):
        found |= dict.fromkeys(itertools.islice(finer(dims, count), MOST_FINER))
    for dims in tuple(found):
        for other in neighbours(dims, count):
            if len(found) >= MOST_TYPES:
                return tuple(found)
            found[other] = None
    return tuple(found)
