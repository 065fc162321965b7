"""DualPipe (arXiv 2412.19437, github.com/deepseek-ai/DualPipe) and DualPipeV: forwards overlapped with backwards.

Both are one list of passes. A rank has two stages of p = 2h in a chain: in DualPipeV, on h ranks, the second is further
along the same chain; in DualPipe, on p ranks, a second copy of the parameters runs the other way, and takes half of
the microbatches.
"""

from __future__ import annotations

from collections import deque

from shardplan.errors import ScheduleError
from shardplan.strategy.schedules.action import OVERLAP, Action

Row = list[Action]


def dualpipev(ranks: int, microbatches: int) -> list[Row]:
    """The V shape: rank r has the stages r and 2p-1-r."""
    if microbatches < 2 * ranks:
        least = f"legal are at least twice the {ranks} ranks"
        raise ScheduleError(f"schedule dualpipev: {microbatches} microbatches; {least}")
    return [_passes(ranks, r, microbatches, (r, 2 * ranks - 1 - r), (0, 0)) for r in range(ranks)]


def dualpipe(ranks: int, microbatches: int) -> list[Row]:
    """Rank r has the stages r and 2p-1-r, of which those from p on are the second copy."""
    if ranks % 2 or microbatches % 2 or microbatches < 2 * ranks:
        raise ScheduleError(
            f"schedule dualpipe: {ranks} ranks, {microbatches} microbatches; "
            "legal are even numbers of both, and at least twice as many microbatches as ranks"
        )
    half, rows = microbatches // 2, list[Row]()
    for r in range(ranks):
        near = min(r, ranks - 1 - r)
        # The second half of the ranks is the first one's mirror image, in which the copies are exchanged.
        other = 2 * ranks - 1 - r
        stages, starts = ((r, other), (0, half)) if r == near else ((other, r), (half, 0))
        rows.append(_passes(ranks // 2, near, half, stages, starts))
    return rows


def _passes(h: int, r: int, m: int, stages: tuple[int, int], starts: tuple[int, int]) -> Row:
    """Return the passes of the r-th of h ranks; `starts` are the first microbatches of each of its two stages."""
    row: Row = []
    forward, backward, weights = list(starts), list(starts), deque[Action]()

    def f(phase: int) -> Action:
        forward[phase] += 1
        return Action(stages[phase], "F", forward[phase] - 1)

    def b(phase: int, split: bool = False) -> Action:
        backward[phase] += 1
        if split:
            weights.append(Action(stages[phase], "W", backward[phase] - 1))
        return Action(stages[phase], "I" if split else "B", backward[phase] - 1)

    def overlapped(ahead: int, back: int) -> Action:
        return Action(-1, OVERLAP, parts=(f(ahead), b(back)))

    row += [f(0) for _ in range(2 * (h - 1 - r))]
    row += [f(phase) for _ in range(r + 1) for phase in (0, 1)]
    for _ in range(h - 1 - r):
        row += [b(1, split=True), weights.popleft(), f(1)]
    for k in range(m - 2 * h + r + 1):
        row += [f(0), b(1)] if k == 0 and r == h - 1 else [overlapped(0, 1)]
        row.append(overlapped(1, 0))
    for _ in range(h - 1 - r):
        row += [b(1), overlapped(1, 0)]
    split = False
    for k in range(r + 1):
        split |= k == (r + 1) // 2 and r % 2 == 1
        row.append(b(1, split))
        split |= k == (r + 1) // 2 and r % 2 == 0
        row.append(b(0, split))
    for _ in range(h - 1 - r):
        row += [weights.popleft(), b(0, split)] if weights else [b(0, split)]
    row += weights
    return row
