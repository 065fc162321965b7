"""What else a choice could have been costs the least of all that has it so: beside all options of random programs."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, reject, settings

from shardplan import Job, Strategy, partition
from shardplan.errors import LayoutError
from shardplan.hardware.prices.fabric import Fabric
from shardplan.strategy.partition.alternatives import along, forced
from shardplan.strategy.partition.prices import Prices
from shardplan.strategy.partition.write import Movement
from strategies import rngs
from strategy.jobs import model
from strategy.settling import all_totals, single
from strategy.test_settle import MACHINE, MOST, random_case


@given(rngs())
@settings(max_examples=60)
def test_an_option_costs_the_least_of_all_that_take_it(rng: random.Random) -> None:
    case, prices = random_case(rng, repeat=rng.random() < 0.5), Prices(Fabric(MACHINE))
    walk = case.walk()
    options = single(walk, case.mesh, "x", case.serve.get("x"), prices)
    if math.prod(len(mine) for mine in options.values()) > MOST:
        reject()
    try:
        settled = case.settled(prices)
    except LayoutError:
        reject()
    totals = all_totals(walk, options, prices)
    order = [c for c in walk.choosers if len(options[c]) > 1]
    found, every = along(settled, "x")
    for k, chooser in enumerate(order):
        if chooser.line is None:
            continue
        least = totals.min(axis=tuple(j for j in range(len(order)) if j != k))
        want = {(o.wanted, o.made): s for o, s in zip(options[chooser], least, strict=True) if math.isfinite(s)}
        got = {(o.wanted, o.made): s for o, s, _ in forced(settled.lines[chooser.line], found, every)}
        assert got == pytest.approx(want, rel=1e-12)
        assert min(got.values()) == pytest.approx(settled.seconds, rel=1e-12)


def moved(job: Job) -> list[tuple[str, Movement]]:
    return [(kind, one) for (_, kind), every in job.movements.items() for one in every]


@pytest.mark.parametrize(
    "said", [{"data": 2, "tensor": 2, "zero": 1}, {"context": 2, "data": 2, "fsdp": True}], ids=str
)
def test_every_movement_says_what_else_its_ends_could_be(said: dict[str, int]) -> None:
    """What was settled is among it, and removes nothing; nothing is cheaper, whatever it removes."""
    job = partition(model("llama"), Strategy(**said), MACHINE)  # type: ignore[arg-type]
    told = removing = 0
    for kind, one in moved(job):
        rows = job.alternatives(one)
        if kind == "OPT":
            assert rows == ()
            continue
        assert [row.more for row in rows] == sorted(row.more for row in rows)
        if rows:
            told += 1
            assert rows[0].more == pytest.approx(0, abs=1e-9 * job.settled.seconds)
            asked = {row.by for row in rows if row.role == "asks"}
            assert not asked or one.by.startswith("step") or asked == {"what is saved"}
        ends = {(row.role, row.axis) for row in rows}
        for role, axis in ends:
            mine = [row for row in rows if (row.role, row.axis) == (role, axis)]
            assert mine[0].more == pytest.approx(0, abs=1e-9 * job.settled.seconds)
            assert any(not row.removes for row in mine)
            removing += sum(row.removes for row in mine)
    assert told and (removing > 0) == ("tensor" in said)  # of strict FSDP tables leave no choice


def test_a_sum_that_is_passed_on_is_not_reduced_here() -> None:
    """The reduction of a cotangent may go to the next step; there is one less here, and more elsewhere."""
    job = partition(model("llama"), Strategy(tensor=2))
    movement = next(m for m in job.movements[0, "B"] if m.path and "backward" in m.by)
    mine = [row for row in job.alternatives(movement) if row.role == "asks"]
    assert [(row.option.split(" of ")[0], row.removes) for row in mine] == [
        ("every device does the same", False),
        ("passes sums", True),
    ]
    assert mine[1].more > 0
