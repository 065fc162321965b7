"""Where layers are cut into stages: the best of all cuts, in time within memory; and what they weigh in a job."""

from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardplan import Job, LayoutError, Strategy, Topology, partition
from shardplan.core.ops.compute import computing
from shardplan.core.walk import program_leaves
from shardplan.strategy.partition.balance import balanced, in_flight_of_stages
from shardplan.strategy.partition.memory import certify, state_bytes
from shardplan.strategy.schedules import GENERATORS, in_flight, schedule
from strategy.jobs import model, wrong


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[int], list[list[int]], list[int]]:
    """Layers, what each would hold on each stage, and what stages may hold."""
    n = draw(st.integers(1, 8))
    stages = draw(st.integers(1, n))
    weights = draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))
    held = [draw(st.lists(st.integers(0, 9), min_size=n, max_size=n)) for _ in range(stages)]
    return weights, held, [draw(st.integers(1, 40)) for _ in range(stages)]


def cuts(n: int, stages: int) -> list[tuple[int, ...]]:
    """All of them."""
    return [(0, *inner) for inner in combinations(range(1, n), stages - 1)]


@settings(max_examples=150)
@given(chains())
def test_the_best_of_all_cuts(chain: tuple[list[int], list[list[int]], list[int]]) -> None:
    weights, held, room = chain
    n, stages = len(weights), len(held)

    def cost(starts: tuple[int, ...], bounded: bool) -> tuple[float, float, float]:
        """How much too full the fullest stage is, what the heaviest weighs, and how uneven they are."""
        parts = list(pairwise((*starts, n)))
        sums = [sum(weights[a:b]) for a, b in parts]
        full = [sum(row[a:b]) / most for (a, b), row, most in zip(parts, held, room, strict=True)]
        return max(1.0, *full) if bounded else 1.0, max(sums), sum(x * x for x in sums)

    for bounded in (False, True):
        got = balanced(weights, stages, np.array(held), room) if bounded else balanced(weights, stages)
        want = min(cost(starts, bounded) for starts in cuts(n, stages))
        assert got in cuts(n, stages) and cost(got, bounded) == pytest.approx(want)


@pytest.mark.parametrize("name", GENERATORS)
def test_what_is_in_flight_on_a_stage(name: str) -> None:
    """At most what its rank has, and on all of them together at least that."""
    found = schedule(name, 2, 4)
    flights = in_flight_of_stages(found)
    for rank in range(2):
        mine = [n for n, owner in zip(flights, found.owners, strict=True) if owner == rank]
        most = in_flight(found)[rank]
        assert max(mine) <= most <= sum(mine)
    for stage, most in enumerate(flights):  # each of its microbatches is there from its F to the end of its B or W
        row = [a for action in found.ranks[found.owners[stage]] if action for a in action.leaves if a.stage == stage]
        ends = [row[: k + 1] for k in range(len(row))]
        assert most == max(sum(a.kind == "F" for a in done) - sum(a.kind in "BW" for a in done) for done in ends)


def flops(job: Job) -> list[float]:
    """The operations of a microbatch, by stage."""
    out = [0.0] * job.stages
    for (stage, kind), program in job.programs.items():
        for times, one, types in program_leaves(program):
            op = computing(one)
            out[stage] += times * op.flops(*types) if op is not None and kind != "OPT" else 0.0
    return out


def starts(job: Job) -> tuple[int, ...]:
    """The first layers of stages."""
    rows = {part.stage: part.rows for part in job.parts.values() if part.rows is not None}
    return tuple(rows[stage][0] for stage in range(job.stages))


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [("llama", {"vocab": 600}, {}), ("gpt", {"layers": 4}, {"tensor": 2})],
    ids=str,
)
def test_no_other_cut_has_a_lighter_heaviest_stage(name: str, fields: dict[str, Any], said: dict[str, Any]) -> None:
    """By the operations of the written programs, with embedding and head, since the nominal device has no speeds."""
    small = model(name, **fields)
    layers = small.fields["layers"]
    found = partition(small, Strategy(pipeline=2, global_batch=2, **said))
    others = (Strategy(pipeline=2, global_batch=2, cuts=(k,), **said) for k in range(1, layers))
    every = [max(flops(partition(small, other))) for other in others]
    assert max(flops(found)) == pytest.approx(min(every))


def test_a_list_of_cuts() -> None:
    """Stages begin where it says, and the steps are the model's."""
    strategy = Strategy(pipeline=3, global_batch=3, cuts=[1, 4])  # type: ignore[arg-type]
    small = model("mlp", layers=6)
    assert starts(partition(small, strategy)) == (0, 1, 4)
    assert wrong(small, strategy) == []
    for cuts_, text in (
        ((1, 6), r"cuts before the layers \[1, 6\] of a model of 6, for 3 stages; legal are 2 of the layers 1 to 5"),
        ((1,), r"cuts before the layers \[1\] of a model of 6, for 3 stages; legal are 2 of the layers 1 to 5"),
        ((4, 1), r"strategy: cuts=\(4, 1\); legal are layers in order, each once"),
    ):
        with pytest.raises(LayoutError, match=f"^{text}$"):
            partition(small, Strategy(pipeline=3, global_batch=3, cuts=cuts_))


def test_a_stage_that_would_not_fit_gives_layers_away() -> None:
    """1F1B has more in flight on the first rank: on a device with too little memory for that it gets fewer layers."""
    small = model("mlp", layers=8, batch=40)
    strategy = Strategy(pipeline=2, microbatch=40, global_batch=160)

    def held(job: Job) -> list[int]:
        found = certify(job)
        return [state_bytes(job, r) + n * found.saved_bytes[r] for r, n in enumerate((2, 1))]

    free = partition(small, strategy)
    assert starts(free) == (0, 4)
    limit = held(free)[0] - 1
    text = f'version = 1\nname = "small"\n[device]\nflops = {{"*" = "1 TFLOP/s"}}\nmemory = "{limit} B"\n'
    text += '[[levels]]\nname = "device"\nsize = 2\nlink = "switch"\nbandwidth = "50 GB/s"\nlatency = "5 us"\n'
    tight = partition(small, strategy, Topology.parse(text))
    assert starts(tight) == (0, 3)
    assert max(held(tight)) <= limit
    assert wrong(small, strategy, steps=1) == []
