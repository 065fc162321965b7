"""Which actions of a schedule say nothing new: whole periods that every rank repeats, left out of a sweep.

A rank repeats from place i on, with period P, while action i + P is action i on a microbatch `step` later. From such a
run whole periods can be cut out, as many on every rank for every stage and kind, and the microbatches behind the cut
renumbered: what is left is a schedule of fewer microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

Row = Sequence[tuple[int, str, int]]  # stage, kind and microbatch


class RepeatedSpan(NamedTuple):
    """Places of a rank's list that repeat: from `first`, `times` periods of `length` actions."""

    first: int
    length: int
    times: int


class PeriodCut(NamedTuple):
    """Periods that are left out before a place of a rank's own list: `length` actions, `times` times."""

    place: int  # in the whole list, where what is left out begins
    length: int
    times: int
    kinds: frozenset[tuple[int, str]]  # the stages and kinds that are cut
    before: int  # periods that stay before it


class Shorter(NamedTuple):
    """The lists of all ranks with `left_out` microbatches less, and their cuts in order of place."""

    rows: tuple[tuple[tuple[int, str, int], ...], ...]
    cuts: tuple[tuple[PeriodCut, ...], ...]
    left_out: int


def spans(row: Row, step: int) -> list[RepeatedSpan]:
    """Return the longest runs that repeat with this step of microbatches, each stage and kind in one of them at most.

    >>> spans([(0, "F", 0), (0, "F", 1), (0, "F", 2), (0, "B", 0), (0, "B", 1), (0, "B", 2)], 1)
    [RepeatedSpan(first=0, length=1, times=3), RepeatedSpan(first=3, length=1, times=3)]
    """
    places = {action: k for k, action in enumerate(row)}
    ahead = [places.get((s, kind, k + step), -1) - at for at, (s, kind, k) in enumerate(row)]
    starts = [0, *(k for k in range(1, len(row)) if ahead[k] != ahead[k - 1]), len(row)]
    found: list[RepeatedSpan] = []
    for a, b in pairwise(starts):
        length = ahead[a]
        if length > 0 and b - a >= length:
            found.append(RepeatedSpan(a, length, (b - a) // length + 1))
    found.sort(key=lambda s: -s.length * s.times)
    kept: list[RepeatedSpan] = []
    taken: set[tuple[int, str]] = set()
    for one in found:
        kinds = {(s, kind) for s, kind, _ in row[one.first : one.first + one.length]}
        if taken.isdisjoint(kinds):
            taken |= kinds
            kept.append(one)
    return sorted(kept) if taken == {(s, kind) for s, kind, _ in row} else []


def steps(rows: Sequence[Row]) -> list[int]:
    """Return the steps of microbatches with which ranks may repeat: times that are alike only every other period too.

    Where messages take longer than actions, ranks go round with as many microbatches as are under way (the cyclicity of
    the matrix of a period).
    """
    return sorted({n * ways for n in (1, len(rows), 2 * len(rows)) for ways in (1, 2, 3, 4)})


def shorter(rows: Sequence[Row], keep: int) -> Iterator[Shorter]:
    """Yield the lists with all but so many periods of the shortest run, step by step; none where none can be spared."""
    for step in steps(rows):
        found = [spans(row, step) for row in rows]
        if any(not mine for mine, row in zip(found, rows, strict=True) if row):
            continue
        out = min((span.times for mine in found for span in mine), default=0) - keep
        if out < 1:
            continue
        cuts = [[_cut(row, span, out) for span in mine] for row, mine in zip(rows, found, strict=True)]
        left = [_without(row, mine, out * step) for row, mine in zip(rows, cuts, strict=True)]
        yield Shorter(tuple(left), tuple(tuple(c) for c in cuts), out * step)


def _cut(row: Row, span: RepeatedSpan, out: int) -> PeriodCut:
    """Leave the last period where it is: what comes behind it begins as it would."""
    place = span.first + (span.times - out - 1) * span.length
    kinds = frozenset((s, kind) for s, kind, _ in row[place : place + span.length])
    return PeriodCut(place, span.length, out, kinds, span.times - out - 1)


def _without(row: Row, cuts: Sequence[PeriodCut], microbatches: int) -> tuple[tuple[int, str, int], ...]:
    kept: list[tuple[int, str, int]] = []
    behind: set[tuple[int, str]] = set()
    at = 0
    for cut in [*cuts, None]:
        end = len(row) if cut is None else cut.place
        kept += ((s, kind, k - microbatches * ((s, kind) in behind)) for s, kind, k in row[at:end])
        if cut is not None:
            behind |= cut.kinds
            at = cut.place + cut.length * cut.times
    return tuple(kept)
