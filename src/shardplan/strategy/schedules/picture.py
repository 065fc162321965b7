"""A picture of a schedule in time: as text for a terminal, and as SVG."""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

from shardplan.core import validation
from shardplan.errors import ScheduleError
from shardplan.strategy.schedules.action import COMPUTE, MESSAGES, Action
from shardplan.strategy.schedules.replay import Cost, Replayed, Times, replay
from shardplan.strategy.schedules.schedule import Schedule

_COLOURS = {"F": "#4c78a8", "B": "#f2a65a", "I": "#72b7b2", "W": "#79a65a"}
_OTHER = "#9a9a9a"
_MARGIN, _ROW, _WIDTH = 64, 24, 1200  # of the SVG, in its units
_Span = tuple[Action, float, float]


def schedule_picture(found: Schedule, cost: Cost | None = None, columns: int = 100) -> str:
    """Return a picture in at most so many columns: a line a rank, each pass over its time, idle time as dots.

    A pass is written with its kind and its microbatch where that fits, else with what of it fits; of several stages a
    rank, the later ones in small letters. The last line tells both bubbles.

    >>> from shardplan.strategy.schedules import schedule
    >>> print(schedule_picture(schedule("1f1b", 2, 3), columns=32))
    rank 0  F0F1....B0--F2B1--..B2--
    rank 1  ..F0B0--F1B1--F2B2--....
    bubble 3, idle 3 of 12
    """
    whole = validation.whole_number("columns", columns, 20, kind=ScheduleError)
    replayed = replay(found, cost or Times())
    label = len(f"rank {len(found.ranks) - 1}  ")
    scale = min(2.0 / _shortest(replayed), (whole - label) / max(replayed.makespan, 1e-300))
    width = round(replayed.makespan * scale)
    lines: list[str] = []
    for rank, spans in enumerate(replayed.spans):
        cells = ["."] * width
        mine = sorted({a.stage for slot, _, _ in spans for a in _leaves(found, rank, slot)})
        for slot, begin, end in spans:
            for action, b, e in _parts(_action_at(found, rank, slot), begin, end):
                first, last = round(b * scale), round(e * scale)
                if action.kind in COMPUTE:
                    text = f"{action.kind}{action.microbatch}"
                    text = text.lower() if mine.index(action.stage) % 2 else text
                    cells[first:last] = f"{text[: last - first]:-<{last - first}}"
        lines.append(f"{f'rank {rank}':<{label}}{''.join(cells)}".rstrip())
    return "\n".join([*lines, _idle_text(replayed)])


def svg(found: Schedule, cost: Cost | None = None) -> str:
    """Return a picture as SVG: a row a rank, time to the right, each pass with its name as a title."""
    replayed = replay(found, cost or Times())
    scale = (_WIDTH - _MARGIN - 8) / max(replayed.makespan, 1e-300)
    height = _ROW * (len(found.ranks) + 1) + 8
    font = 'font-family="sans-serif" font-size="11"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" {font}>',
        f"<title>{escape(f'schedule {found.name}'.rstrip())}</title>",
    ]
    for rank, spans in enumerate(replayed.spans):
        top = 4 + _ROW * rank
        lines.append(f'<text x="4" y="{top + 15}">rank {rank}</text>')
        for slot, begin, end in spans:
            for action, b, e in _parts(_action_at(found, rank, slot), begin, end):
                if e > b:
                    lines += _box(action, _MARGIN + b * scale, (e - b) * scale, top)
    lines.append(f'<text x="4" y="{height - 10}">{escape(_idle_text(replayed))}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _box(action: Action, left: float, width: float, top: float) -> Iterator[str]:
    colour = _OTHER if action.kind in MESSAGES else _COLOURS.get(action.kind, _OTHER)
    yield (
        f'<rect x="{left:.2f}" y="{top}" width="{width:.2f}" height="{_ROW - 4}" fill="{colour}" stroke="white">'
        f"<title>{action}</title></rect>"
    )
    if action.microbatch is not None and width > 7 * len(str(action.microbatch)):
        yield f'<text x="{left + width / 2:.2f}" y="{top + 14}" text-anchor="middle">{action.microbatch}</text>'


def _idle_text(replayed: Replayed) -> str:
    return f"bubble {replayed.bubble:g}, idle {replayed.idle:g} of {replayed.makespan:g}"


def _action_at(found: Schedule, rank: int, slot: int) -> Action:
    action = found.ranks[rank][slot]
    assert action is not None, "an idle slot is not run"
    return action


def _leaves(found: Schedule, rank: int, slot: int) -> tuple[Action, ...]:
    return _action_at(found, rank, slot).leaves


def _parts(action: Action, begin: float, end: float) -> Iterator[_Span]:
    """The parts of an overlap share its time."""
    each = (end - begin) / len(action.leaves)
    for k, leaf in enumerate(action.leaves):
        yield leaf, begin + k * each, begin + (k + 1) * each


def _shortest(replayed: Replayed) -> float:
    return min((e - b for spans in replayed.spans for _, b, e in spans if e > b), default=1)
