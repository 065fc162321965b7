"""Schedules of one stage a rank with whole backwards: GPipe (arXiv 1811.06965), 1F1B (arXiv 1806.03377)."""

from __future__ import annotations

from shardplan.strategy.schedules.action import Action


def gpipe(ranks: int, microbatches: int) -> list[list[Action]]:
    """All forwards, then all backwards."""
    return [[Action(r, kind, m) for kind in "FB" for m in range(microbatches)] for r in range(ranks)]


def one_f_one_b(ranks: int, microbatches: int) -> list[list[Action]]:
    """As few forwards ahead as the backward of microbatch 0 takes to come back, then one forward and one backward."""
    return [_alternating(r, min(ranks - r, microbatches), microbatches) for r in range(ranks)]


def _alternating(stage: int, ahead: int, microbatches: int) -> list[Action]:
    row = [Action(stage, "F", m) for m in range(ahead)]
    for m in range(microbatches):
        row.append(Action(stage, "B", m))
        if m + ahead < microbatches:
            row.append(Action(stage, "F", m + ahead))
    return row
