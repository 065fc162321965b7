"""A predicted timeline beside a measured one: step by step, and kind by kind.

Of one device of either, intervals are taken in the order of their starts, without the issues of a host. Where both
number their steps, equal numbers lie beside each other; else the longest runs of equal kinds are matched, and what is
between them has only one side.

Source: longest matching blocks, Ratcliff and Obershelp, as in `difflib`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import NamedTuple, Protocol

from shardplan.errors import ShardplanError
from shardplan.simulation.interval import Interval
from shardplan.simulation.trace import HOST

MOST = 20_000  # intervals of a side: matching takes their product at worst


class HasIntervals(Protocol):
    """What is compared: a `Timeline`, or a `JobTimeline`."""

    @property
    def intervals(self) -> tuple[Interval, ...]: ...  # noqa: D102
    @property
    def seconds(self) -> float: ...  # noqa: D102


class ComparedStep(NamedTuple):
    """A step of either side, or of both; None where the other side has it alone."""

    kind: str
    predicted: Interval | None
    measured: Interval | None


class KindTotal(NamedTuple):
    """All intervals of a kind: how many, and their seconds, on either side."""

    kind: str
    predicted_count: int
    measured_count: int
    predicted_seconds: float
    measured_seconds: float

    @property
    def ratio(self) -> float | None:
        """Predicted by measured seconds; None where nothing is measured."""
        return self.predicted_seconds / self.measured_seconds if self.measured_seconds else None


@dataclass(frozen=True, slots=True)
class TimelineComparison:
    """Steps in order, kinds by the seconds that the two differ, and both makespans."""

    steps: tuple[ComparedStep, ...]
    kinds: tuple[KindTotal, ...]
    predicted_seconds: float
    measured_seconds: float

    @property
    def matched(self) -> int:
        """How many steps have both sides."""
        return sum(1 for s in self.steps if s.predicted is not None and s.measured is not None)


def compare(
    predicted: HasIntervals,
    measured: HasIntervals,
    devices: tuple[int, int] | None = None,
) -> TimelineComparison:
    """Return two timelines side by side.

    Args:
        predicted: What was expected.
        measured: What was, such as `read_kineto` gives.
        devices: Which device of either; by default the first of each.

    Raises `ShardplanError` for a device that is not there, and for more than `MOST` intervals a side.

    >>> from shardplan.simulation.timeline import Timeline
    >>> a = Timeline((Interval(0, "comm", 0.0, 2.0, "all_reduce", "all_reduce"),))
    >>> b = Timeline((Interval(0, "comm", 0.0, 1.0, "nccl", "all_reduce"),), source="measured")
    >>> compare(a, b).kinds[0].ratio
    2.0
    """
    sides = [_side(what, line, None if devices is None else devices[k]) for k, (what, line) in
             enumerate((("predicted", predicted), ("measured", measured)))]  # fmt: skip
    a, b = sides
    steps = tuple(_numbered(a, b) if _has_numbers(a) and _has_numbers(b) else _aligned(a, b))
    kinds: list[KindTotal] = []
    for kind in dict.fromkeys(i.kind for side in sides for i in side):
        mine = [[i.seconds for i in side if i.kind == kind] for side in sides]
        kinds.append(KindTotal(kind, len(mine[0]), len(mine[1]), sum(mine[0]), sum(mine[1])))
    kinds.sort(key=lambda k: -abs(k.predicted_seconds - k.measured_seconds))
    return TimelineComparison(steps, tuple(kinds), predicted.seconds, measured.seconds)


def _side(what: str, line: HasIntervals, device: int | None) -> list[Interval]:
    there = sorted({i.device for i in line.intervals})
    device = (there[0] if there else 0) if device is None else device
    if there and device not in there:
        raise ShardplanError(
            f"compare: the {what} timeline has no device {device}; it has {', '.join(map(str, there))}"
        )
    found = sorted(
        (i for i in line.intervals if i.device == device and i.stream != HOST), key=lambda i: (i.start, i.end)
    )
    if len(found) > MOST:
        raise ShardplanError(
            f"compare: the {what} timeline has {len(found)} intervals on device {device}; legal are {MOST}"
        )
    return found


def _has_numbers(side: Sequence[Interval]) -> bool:
    numbers = [i.step for i in side]
    return bool(numbers) and None not in numbers and len(set(numbers)) == len(numbers)


def _numbered(a: Sequence[Interval], b: Sequence[Interval]) -> Iterable[ComparedStep]:
    left, right = ({i.step: i for i in side} for side in (a, b))
    for number in sorted({*left, *right}, key=lambda n: -1 if n is None else n):
        one, other = left.get(number), right.get(number)
        yield ComparedStep((one or other).kind if one or other else "", one, other)  # pyright: ignore


def _aligned(a: Sequence[Interval], b: Sequence[Interval]) -> Iterable[ComparedStep]:
    match = SequenceMatcher(None, [i.kind for i in a], [i.kind for i in b], autojunk=False)
    for tag, i, j, k, l in match.get_opcodes():  # noqa: E741
        if tag == "equal":
            yield from (ComparedStep(x.kind, x, y) for x, y in zip(a[i:j], b[k:l], strict=True))
        else:
            yield from (ComparedStep(x.kind, x, None) for x in a[i:j])
            yield from (ComparedStep(y.kind, None, y) for y in b[k:l])
