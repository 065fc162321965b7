"""Where MPI's own collective is used: an op whose rounds are one `Ialltoallw` each among the members of a group.

All else is point-to-point messages: an all-to-all goes through an entry of every member, and needs a communicator of
its own for every set of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardplan.core.op import Op
from shardplan.core.ops.collective import moving
from shardplan.core.tensor import TensorType

# By the algorithm of a lowering: from which part on, of all pairs of members that send or receive, an all-to-all is
# taken to be worth an entry, mostly of no bytes, for each pair that has no message.
NATIVE = {"direct": 0.5}


def all_to_all_members(op: Op, operands: Sequence[TensorType], group: Sequence[int]) -> tuple[int, ...]:
    """Return the members of a group, device ids, whose rounds are all-to-alls; nothing where all is messages.

    All members of the group find the same, since all look at the lowering of the whole group.
    """
    move = moving(op)
    least = None if move is None else NATIVE.get(move.algorithm or move.algorithms[0])
    if move is None or least is None or len(group) < 2:
        return ()
    ids = np.array(group)
    pairs: set[tuple[int, int]] = set()
    for one in move.lowering(operands, ids).rounds():
        if not one.closes:  # an all-to-all waits for all members: nobody would be ahead
            return ()
        for put in one.puts:
            there = put.source.elements() > 0
            pairs |= set(zip(ids[there].tolist(), put.peer[there].tolist(), strict=True))
        if len(pairs) == len(group) * (len(group) - 1):
            break  # most often after one round
    busy = {d for pair in pairs for d in pair}
    return tuple(d for d in group if d in busy) if len(pairs) >= least * len(busy) * (len(busy) - 1) else ()
