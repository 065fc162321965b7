"""Messages between stages that go once their receiver waits for them."""

from __future__ import annotations

import numpy as np
import pytest

import shardplan as sp
from shardplan.errors import ShardplanError
from shardplan.hardware.level import DeviceSpec, Level
from shardplan.hardware.topology import Topology
from shardplan.simulation.jobs.job_timeline import JobTimeline, simulate_job
from shardplan.simulation.jobs.op_intervals import MessagePlace
from shardplan.strategy.partition.job_order import order
from shardplan.strategy.schedules.action import value_pass as way
from simulation.jobs.job_cases import SIZES, job

GATHERED = "gathered"  # actions begin with parameters, which read no message
NAMES = ["1f1b", "tensor", "interleaved", "zb-h1", "dualpipe", "gpipe", "looped", GATHERED]
# Messages take about as long as actions.
SLOW = Topology(
    "2x4",
    (Level("node", 2, "switch", 1e7, 1e-6), Level("gpu", 4, "switch", 2e7, 1e-7)),
    DeviceSpec((("*", 1e11),), memory_bandwidth=1e10),
)


def made(name: str) -> sp.Job:
    if name != GATHERED:
        return job(name)
    return sp.partition(sp.Model.load("gpt", **SIZES), sp.Strategy(data=2, pipeline=2, fsdp=True, global_batch=8))


def met(found: sp.Job, contention: bool = True) -> JobTimeline:
    return simulate_job(found, SLOW, overlap=False, rendezvous=True, contention=contention)


@pytest.mark.parametrize("contention", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_message_begins_when_both_are_there(name: str, contention: bool) -> None:
    """Its receiver has done all before, and waits; its sender goes past the action that takes it only behind that."""
    found = made(name)
    line = met(found, contention)
    before = simulate_job(found, SLOW, overlap=False, contention=contention, fold=False)
    # On shared links a message that goes later may leave a collective more of them.
    assert (0.9 if contention else 1 - 1e-9) * before.seconds <= line.seconds < np.inf
    slack = 1e-9 * line.seconds
    owners, ranks = found.schedule.owners, line.swept.ranks
    places = {(s, way(kind), k): at for at, (s, kind, k) in enumerate(order(found))}
    at = {(s, way(kind), k): (r, i) for r, run in enumerate(ranks) for i, (s, kind, k) in enumerate(run.actions)}
    seen = 0
    for number, m in enumerate(line.compiled.messages):
        for (s, kind, k), (r, i) in at.items():
            if not m.seconds or k < 0 or (s, kind) != (m.transfer.target[0], m.transfer.kind):
                continue
            start, end, sender, _ = line.opened.messages[MessagePlace(number, k)]
            run, seen = ranks[r], seen + 1
            assert start >= run.done[:i].max(initial=0.0) - slack
            assert run.begin[i] >= end - slack
            assert sender == owners[m.transfer.source[0]]
            for (stage, other, n), begin in zip(ranks[sender].actions, ranks[sender].begin, strict=True):
                later = other != "OPT" and places[stage, way(other), n] > places[s, kind, k]
                assert not later or begin >= start - slack
    assert seen >= 8


def test_forwards_in_a_row_by_hand() -> None:
    """The second stage takes a message, then computes, then takes the next: n (s + f), where else the longer counts."""
    found = sp.partition(sp.Model.load("gpt", **SIZES), sp.Strategy(pipeline=2, global_batch=3, schedule="gpipe"))
    line = met(found)
    first, second = line.swept.ranks
    (number,) = (n for n, m in enumerate(line.compiled.messages) if m.transfer.kind == "F")
    s, f = line.compiled.messages[number].seconds, float(second.done[0] - second.begin[0])
    assert s > 0 and float(first.done[0]) < s + f
    assert float(second.done[2]) == pytest.approx(float(first.done[0]) + 3 * (s + f))
    free = simulate_job(found, SLOW, overlap=False, fold=False)
    assert float(free.swept.ranks[1].done[2]) < float(second.done[2]) * 0.9


def test_of_one_microbatch_nothing_changes() -> None:
    """Whoever takes a message waits for it already."""
    found = sp.partition(
        sp.Model.load("mlp", layers=4, hidden=64, optimizer="sgd"), sp.Strategy(pipeline=4, global_batch=1)
    )
    free = simulate_job(found, SLOW, overlap=False, fold=False)
    assert met(found, contention=False).seconds == pytest.approx(free.seconds, rel=1e-12)


def test_another_value_is_refused() -> None:
    with pytest.raises(ShardplanError, match="rendezvous"):
        simulate_job(job("1f1b"), SLOW, rendezvous="no")  # type: ignore[arg-type]
