"""The order in which one process may run all actions of a job."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shardplan.strategy.partition.job import Job
from shardplan.strategy.schedules.action import COMPUTE, MESSAGES
from shardplan.strategy.schedules.action_lists import CODED, ActionLists, leaves

Action = tuple[int, str, int]  # stage, kind and microbatch


def order(job: Job) -> Iterator[Action]:
    """Yield every computation and placed message, in an order in which one process may run them.

    Ranks do one each in turn, those that overlap one after another. Raises `ScheduleError` where they wait in a circle.
    """
    found = job.schedule
    rows = [[each for each in leaves(row) if each[1] in (*COMPUTE, *MESSAGES)] for row in found.ranks]
    lists = ActionLists.of(rows, found.owners, found.copies)
    edges, rank = lists.edges(), lists.rank
    # The round of each: the one behind that of the action before it, and no sooner than that of whose value it takes.
    lag = np.where(rank[edges.second] < rank, -1, 0).tolist()
    _, rounds = edges.run_once(lag, [1] * len(rank), -1)
    for at in np.lexsort((rank, np.array(rounds[:-1]))).tolist():
        yield int(lists.stage[at]), CODED[lists.kind[at]], int(lists.microbatch[at])
