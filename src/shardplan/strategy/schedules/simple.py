"""Schedules that alternate: each rank does some forwards ahead, then one forward and one backward in turn.

GPipe (arXiv 1811.06965), 1F1B (arXiv 1806.03377), interleaved 1F1B (arXiv 2104.04473), combined 1F1B (Megatron-Core,
`pipeline_parallel/combined_1f1b.py`), breadth first (arXiv 2211.05953), ZB-H1 and ZB-H2 (arXiv 2401.10241, whose B is I
here).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardplan.errors import ScheduleError
from shardplan.strategy.schedules.action import OVERLAP, Action

Row = list[Action]
_Turn = tuple[int, int]  # stage, microbatch


def gpipe(ranks: int, microbatches: int) -> list[Row]:
    """All forwards, then all backwards."""
    return [[Action(r, kind, m) for kind in "FB" for m in range(microbatches)] for r in range(ranks)]


def looped_bfs(ranks: int, microbatches: int, chunks: int) -> list[Row]:
    """All microbatches through a stage before the next stage of the rank; backward the other way round."""
    rows: list[Row] = []
    for r in range(ranks):
        turns = [(s, m) for s in range(r, ranks * chunks, ranks) for m in range(microbatches)]
        rows.append([Action(s, kind, m) for kind, way in (("F", turns), ("B", turns[::-1])) for s, m in way])
    return rows


def one_f_one_b(ranks: int, microbatches: int) -> list[Row]:
    """As few forwards ahead as the backward of microbatch 0 takes to come back."""
    return [_alternating(t := _one_stage(r, microbatches), t, ranks - 1 - r) for r in range(ranks)]


def interleaved_rows(ranks: int, microbatches: int, chunks: int) -> list[Row]:
    """1F1B of several stages a rank, in rounds of microbatches that go through all stages; as many rounds as fit."""
    return [_alternating(*turns) for turns in _round_turns("interleaved", ranks, microbatches, chunks)]


def combined_rows(ranks: int, microbatches: int, chunks: int) -> list[Row]:
    """Interleaved 1F1B with one more forward ahead, behind which a forward and a backward run together.

    The one more makes them independent of each other on every rank (Megatron-Core, `get_pp_rank_microbatches`).
    """
    rows: list[Row] = []
    for there, back, ahead in _round_turns("combined-1f1b", ranks, microbatches, chunks):
        row, alone = _alternating(there, back, ahead + 1), min(ahead + 1, len(there))
        last = 2 * len(there) - alone
        pairs = zip(row[alone:last:2], row[alone + 1 : last : 2], strict=True)
        rows.append([*row[:alone], *(Action(-1, OVERLAP, parts=pair) for pair in pairs), *row[last:]])
    return rows


def _round_turns(
    name: str, ranks: int, microbatches: int, chunks: int
) -> Iterator[tuple[list[_Turn], list[_Turn], int]]:
    """Of every rank its forwards and its backwards in order, and how many forwards are ahead."""
    rounds = max(1, microbatches // ranks)
    if microbatches % rounds:
        raise ScheduleError(
            f"schedule {name}: {microbatches} microbatches in {rounds} rounds of {ranks} ranks are not even; "
            f"legal are multiples of {rounds}, as {microbatches // rounds * rounds}"
        )
    each = microbatches // rounds
    for r in range(ranks):
        stages = range(r, ranks * chunks, ranks)
        there, back = (
            [(s, k * each + m) for k in range(rounds) for s in way for m in range(each)]
            for way in (stages, stages[::-1])
        )
        yield there, back, (chunks - 1) * each + 2 * (ranks - 1 - r)


def zb_h1(ranks: int, microbatches: int) -> list[Row]:
    """1F1B whose W come later, so many that each rank holds as many microbatches as the first rank of 1F1B."""
    return [_alternating(t := _one_stage(r, microbatches), t, ranks - 1 - r, r) for r in range(ranks)]


def zb_h2(ranks: int, microbatches: int) -> list[Row]:
    """Twice as many forwards ahead as 1F1B, and W later by as many: each rank holds 2p-1 microbatches."""
    return [_alternating(t := _one_stage(r, microbatches), t, 2 * (ranks - 1 - r), 2 * r) for r in range(ranks)]


def _one_stage(stage: int, microbatches: int) -> list[_Turn]:
    return [(stage, m) for m in range(microbatches)]


def _alternating(forwards: Sequence[_Turn], backwards: Sequence[_Turn], ahead: int, late: int | None = None) -> Row:
    """Forwards and backwards in turn behind so many forwards `ahead`; split where W are `late` by so many I."""
    ahead = min(ahead, len(forwards))
    row = [Action(s, "F", m) for s, m in forwards[:ahead]]
    for k, (s, m) in enumerate(backwards):
        row += [Action(to, "F", n) for to, n in forwards[ahead + k : ahead + k + 1]]
        row.append(Action(s, "B" if late is None else "I", m))
        if late is not None and k >= late:
            row.append(Action(backwards[k - late][0], "W", backwards[k - late][1]))
    if late is not None:
        row += [Action(s, "W", m) for s, m in backwards[max(0, len(backwards) - late) :]]
    return row
