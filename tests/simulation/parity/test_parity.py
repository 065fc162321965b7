"""DistIR reproduced: results and lists are DistIR's own, grids counted apart, one replica stands for all."""

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.distir_parity import machine_of, point_of
from benchmarks.distir_points import gpt_grid, mlp_grid
from hypothesis import given, settings
from hypothesis import strategies as st

from shardplan.errors import LayoutError, TopologyError
from shardplan.simulation.parity import (
    DistirMachine,
    DistirModel,
    DistirPoint,
    DistirResult,
    ListedAction,
    distir,
    distir_listing,
)
from shardplan.simulation.parity.entry import compiled
from shardplan.simulation.parity.program import alternating
from shardplan.simulation.parity.replay import replayed, unrolled
from shardplan.strategy.strategy import Strategy

PEER = json.loads((Path(__file__).parents[3] / "benchmarks" / "results" / "distir_peer.json").read_text())


def agrees(row: dict[str, Any], found: DistirResult) -> bool:
    near = math.isclose(found.seconds, float(row["seconds"]), rel_tol=1e-9, abs_tol=0.0)
    return near and found.peak_bytes == row["peak_bytes"]


@pytest.mark.parametrize("grid", ["mlp", "gpt"])
def test_the_sampled_configurations_are_as_distir_has_them(grid: str) -> None:
    rows = PEER[grid]
    assert len({point_of(row) for row in rows}) == len(rows) >= 80
    assert {point_of(row) for row in rows} <= set(mlp_grid() if grid == "mlp" else gpt_grid())
    assert [row for row in rows if not agrees(row, distir(point_of(row)))] == []


def test_other_sizes_machines_and_failures_are_as_distir_has_them() -> None:
    rows = PEER["other"]
    failures = [distir(point_of(row), machine_of(row)).failure for row in rows if float(row["seconds"]) < 0]
    assert len(failures) > 20 and all(failures)
    assert [row for row in rows if not agrees(row, distir(point_of(row), machine_of(row)))] == []


def digest(point: DistirPoint) -> tuple[int, str]:
    """How many ops a list has, and a hash of their names and devices, as the peer's file has it."""
    count, text = 0, hashlib.sha256()
    for action in distir_listing(point):
        count += 1
        text.update(f"{action.kind} {','.join(map(str, sorted(action.devices)))}\n".encode())
    return count, text.hexdigest()[:16]


def test_the_lists_are_distirs_op_by_op() -> None:
    rows = [row for row in (*PEER["mlp"][::2], *PEER["gpt"], *PEER["other"]) if 0 < row["operations"] < 30_000]
    assert len(rows) > 70 and sum(row["operations"] > 10_000 for row in rows) > 5
    for row in rows:
        assert digest(point_of(row)) == (row["operations"], row["digest"]), row


def counted(worlds: list[int], batches: list[int], heads: list[int]) -> int:
    """The size of a grid, by solutions of `2^(i + j + k) = world` and microbatches below a bound."""
    count = 0
    for world in worlds:
        power = int(math.log2(world))
        for batch in batches:
            for i in range(power + 1):
                for j in range(power + 1 - i):
                    rows = batch / 2**i
                    fits = sum(h == 0 or 2**j <= h for h in heads)
                    if rows >= 1:
                        count += fits * (1 if i + j == power else sum(2**k <= rows for k in range(1, 8)))
    return count


def test_the_grids_have_as_many_configurations_as_counted_apart() -> None:
    heads = [12, 16, 16, 16, 32, 32, 40]
    assert len(gpt_grid()) == len(set(gpt_grid())) == counted([4, 8, 16], [64, 256], heads) == 1755
    assert counted([4, 8, 16], [64, 256], [16, *heads[1:]]) == 1757
    assert len(mlp_grid()) == len(set(mlp_grid())) == counted([1, 2, 4], [2**k for k in range(16)], [0] * 3) == 1263


def test_a_point_of_a_grid_is_a_strategy_and_back() -> None:
    for point in (*gpt_grid()[::50], *mlp_grid()[::50]):
        assert point.failure() is None
        assert DistirPoint.of(point.model, point.strategy) == point
        assert point.strategy.microbatches == point.microbatches


SMALL = st.builds(
    DistirPoint,
    st.one_of(
        st.builds(DistirModel, st.sampled_from([4, 8, 12]), st.sampled_from([8, 16])),
        st.builds(DistirModel, st.sampled_from([3, 12, 14]), st.just(96), st.just(12)),
    ),
    st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([32, 64]),
)  # fmt: skip


def replayed_list(actions: Iterable[ListedAction], initial: dict[int, int]) -> DistirResult:
    """What a list of actions takes, op by op, without knowing that devices do the same."""
    clock, live = defaultdict[int, float](float), defaultdict[int, int](int, initial)
    peak = defaultdict[int, int](int, initial)
    for action in actions:
        latest = max(clock[d] for d in action.devices)
        for d in action.devices:
            clock[d] = latest + action.seconds
        for d, added, _ in action.memory:
            live[d] += added
            peak[d] = max(peak[d], live[d])
        for d, _, freed in action.memory:
            live[d] -= freed
    return DistirResult(max(clock.values()), max(peak.values()))


@settings(max_examples=25)
@given(SMALL)
def test_one_replica_and_one_device_of_a_group_stand_for_all(point: DistirPoint) -> None:
    if point.failure():
        assert distir(point) == DistirResult(-1.0, -1, point.failure())
        return
    program = compiled(point, DistirMachine())
    initial = {
        1 + k + n * point.pipeline: x for n in range(point.data * point.tensor) for k, x in enumerate(program.initial)
    }
    assert replayed_list(unrolled(program), initial) == replayed(program)


@settings(max_examples=25)
@given(SMALL)
def test_nothing_is_freed_that_is_not_there(point: DistirPoint) -> None:
    if point.failure():
        return
    program = compiled(point, DistirMachine())
    live = [0] * (1 + point.data * point.tensor * point.pipeline)
    for action in unrolled(program):
        for d, added, freed in action.memory:
            live[d] += added - freed
        assert min(live) >= 0, action
    # What stays are results that nothing uses: in an MLP the loss and the gradient of its input.
    if not point.sizes.heads:
        rows = point.global_batch // point.data
        assert sum(live) == point.data * point.tensor * 2 * 4 * rows * point.sizes.hidden


@given(st.integers(1, 5), st.integers(1, 9), st.booleans())
def test_the_schedule_runs_every_block_once_after_what_it_waits_for(places: int, count: int, trained: bool) -> None:
    forward = list(range(places))
    where = [*forward, *reversed(forward)] if trained else forward
    waits = [[b - 1] if b else [] for b in range(len(where))]
    steps = alternating(where, [b >= places for b in range(len(where))], waits, count)
    done: dict[tuple[int, int], int] = {}
    for at, step in enumerate(steps):
        assert len({place for place, _, _ in step}) == len(step)
        for place, block, microbatch in step:
            assert where[block] == place and (block, microbatch) not in done
            assert all(done[before, microbatch] < at for before in waits[block])
        done |= {(block, microbatch): at for _, block, microbatch in step}
    assert len(done) == len(where) * count


def test_what_distir_does_not_know_is_refused() -> None:
    with pytest.raises(LayoutError, match="distir point: model 'gpt4' is unknown; legal: mlp-xs, mlp-small,"):
        DistirPoint("gpt4")
    with pytest.raises(LayoutError, match="has more than DistIR's strategies, which are data, tensor, pipeline"):
        DistirPoint.of("gpt3", Strategy(data=2, zero=1))
    with pytest.raises(LayoutError, match="has no program, DistIR fails on it: 2 microbatches without a pipeline"):
        distir_listing(DistirPoint("gpt3", microbatches=2, global_batch=2))
    with pytest.raises(TopologyError, match=r"flops_per_second is 0\.0; it must be positive"):
        DistirMachine(flops_per_second=0.0)
    with pytest.raises(TopologyError, match=r"allreduce has no fit for 2 devices; it has \[4\]"):
        distir(DistirPoint("mlp-xs", data=2, global_batch=2), DistirMachine(allreduce={4: (1.0, 1.0, 1.0)}))
