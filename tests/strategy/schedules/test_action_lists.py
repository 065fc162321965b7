"""The edges of schedules: by hand, and by both ways of running them."""

from random import Random

import numpy as np
import pytest

from shardplan.errors import ScheduleError
from shardplan.simulation.sweep import StageSeconds
from shardplan.strategy.schedules import Schedule, Times, place_messages
from shardplan.strategy.schedules.action_graph import FREE
from shardplan.strategy.schedules.action_lists import MODES, ActionLists
from strategy.schedules.drawn import drawn

PLACED = "schedule, 1 microbatches\n0: 0F0 0SEND_F0 0RECV_B0 0B0\n1: 1RECV_F0 1F0 1B0 1SEND_B0"


def told(text: str, messages: str = "buffered") -> list[tuple[int, int, bool, bool]]:
    """Each node's predecessors, whether a message is between it and the second, and whether it takes time itself."""
    edges = ActionLists.of_schedule(Schedule.parse(text)).edges(messages)
    rows = zip(*(each.tolist() for each in edges), strict=True)
    return [(first, second, lag != FREE, cost != FREE) for first, second, lag, cost in rows]


def test_values_come_from_the_stage_before_and_behind() -> None:
    ranks = "schedule, 1 microbatches\n0: 0F0 0B0\n1: 1F0 1I0 1W0"
    assert told(ranks) == [
        (-1, -1, False, True), (0, 3, True, True),
        (-1, 0, True, True), (2, -1, False, True), (3, -1, False, True),
    ]  # fmt: skip
    one = "schedule, 1 microbatches\n0: 0F0 1F0 1B0 0B0"
    assert told(one) == [(-1, -1, False, True), (0, 0, False, True), (1, -1, False, True), (2, 2, False, True)]


def test_placed_messages_are_what_waits() -> None:
    assert told(PLACED) == [
        (-1, -1, False, True), (0, -1, False, False), (1, 7, True, False), (2, -1, False, True),
        (-1, 1, True, False), (4, -1, False, True), (5, -1, False, True), (6, -1, False, False),
    ]  # fmt: skip
    assert told(PLACED, "blocking") == [
        (-1, -1, False, True), (0, -1, False, True), (1, 6, False, True), (2, -1, False, True),
        (-1, 0, False, True), (4, -1, False, True), (5, -1, False, True), (6, 1, False, True),
    ]  # fmt: skip
    # Both messages of rank 0 are posted behind 0F0, and a node more waits for the two.
    assert told(PLACED, "batched")[2:4] == [(0, 6, False, True), (8, -1, False, True)]
    assert told(PLACED, "batched")[8] == (1, 2, False, False)


@pytest.mark.parametrize("messages", MODES)
def test_node_by_node_is_as_by_levels(messages: str) -> None:
    random = Random(messages)
    for n in range(40):
        found = drawn(random, messages=n % 2 == 0)
        found = place_messages(found, Times(2, 1, 3), 0.5) if n % 3 == 0 else found
        lists = ActionLists.of_schedule(found)
        times = (
            np.array([[random.random() for _ in range(w)]]) for w in (*[lists.chunks] * 3, *[lists.chunks - 1] * 2)
        )
        table = StageSeconds(*times).table()
        edges, graph = lists.edges(messages), lists.graph(messages)
        end = np.zeros((graph.rows, 1))
        graph.run(table, end)
        lag, cost = table[edges.lag, 0].tolist(), table[edges.cost, 0].tolist()
        assert edges.run_once(lag, cost, 0.0)[1][:-1] == pytest.approx(end[graph.row, 0].tolist(), rel=1e-12)


def test_what_waits_in_a_circle_or_for_nobody() -> None:
    lists = ActionLists.of([[(0, "F", 0), (0, "B", 0)], [(1, "F", 0), (1, "B", 0)]], (0, 1))
    assert lists.turns() == [0, 1, 1, 0]
    crossed = ActionLists.of([[(0, "B", 0), (0, "F", 0)], [(1, "F", 0), (1, "B", 0)]], (0, 1))
    for run in (crossed.turns, crossed.graph, lambda: crossed.edges().run_once([0] * 4, [1] * 4, 0)):
        with pytest.raises(ScheduleError, match="wait for each other in a circle"):
            run()
    with pytest.raises(ScheduleError, match="0RECV_B0 has no other end; see check"):
        ActionLists.of([[(0, "RECV_B", 0)]], (0, 0)).edges()
