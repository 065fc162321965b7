"""`add_offloads`: a schedule in which what a forward pass saves is on the host until just before its backward pass."""

from __future__ import annotations

from dataclasses import replace

from shardplan.strategy.schedules.action import Action
from shardplan.strategy.schedules.schedule import Schedule


def add_offloads(found: Schedule) -> Schedule:
    r"""Return a schedule with an OFFLOAD after every F and a RELOAD one action before its B, or I.

    Where nothing would run between the two nothing leaves.

    >>> print(add_offloads(Schedule.parse("schedule gpipe, 3 microbatches\n0: 0F0 0F1 0F2 0B0 0B1 0B2")))
    schedule gpipe, 3 microbatches
    0: 0F0 0OFFLOAD0 0F1 0OFFLOAD1 0RELOAD0 0F2 0OFFLOAD2 0RELOAD1 0B0 0RELOAD2 0B1 0B2
    """
    return replace(found, ranks=tuple(tuple(_row(row)) for row in found.ranks))


def _row(row: tuple[Action | None, ...]) -> list[Action | None]:
    actions = [a for a in row if a is not None]
    leaves = [(k, a) for k, action in enumerate(actions) for a in action.leaves]
    back = {(a.stage, a.microbatch): k for k, a in reversed(leaves) if a.kind in ("B", "I")}
    away = {a: k for k, a in leaves if a.kind == "F" and back.get((a.stage, a.microbatch), 0) > k + 2}
    out: list[Action | None] = []
    for k, action in enumerate(actions):
        out += (Action(a.stage, "RELOAD", a.microbatch) for a in away if back[a.stage, a.microbatch] - 1 == k)
        out.append(action)
        out += (Action(a.stage, "OFFLOAD", a.microbatch) for a in action.leaves if a in away)
    return out
