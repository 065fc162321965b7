"""The types around a few others: what is searched where all types over the runs are too many.

Two types are neighbours where a run goes to another place, comes, goes or changes places with another, or a suffix
changes dims. Paths lie among the neighbours of their ends and of what the closed form visits; the neighbours of the
best path found make the next pool, as long as that finds a cheaper one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

Dims = tuple[tuple[int, ...], ...]  # of every dim its runs, major first

MOST_TYPES = 1200  # of a pool


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


def pool(seeds: Iterable[Dims], count: int) -> tuple[Dims, ...]:
    """Return the seeds and their neighbours, at most `MOST_TYPES` (or all of the seeds)."""
    found = dict.fromkeys(seeds)
    for dims in tuple(found):
        for other in neighbours(dims, count):
            if len(found) >= MOST_TYPES:
                return tuple(found)
            found[other] = None
    return tuple(found)
