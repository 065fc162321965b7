"""Movements of stacks: planned once for numbers of rows that are near; and how much a partition calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from shardplan import Model, Strategy, TensorType, Topology, partition, redistribute
from shardplan.core.mesh import Mesh
from shardplan.strategy.partition import row_plans
from shardplan.strategy.partition.partition import make_job
from shardplan.strategy.partition.row_plans import RowPlans

MESH = Mesh(data=4, tensor=2)
BOX = Topology.load("dgx-h100", nodes=1)
ROWS = frozenset({3, 4, 6, 7, 8})


def stack(rows: int, rest: str = "64@data, 48@tensor") -> TensorType:
    return TensorType.parse(f"f32[{rows}, {rest}]", MESH)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[TensorType]:
    """What was searched for."""
    found: list[TensorType] = []

    def counted(made: TensorType, wanted: TensorType, where: Topology) -> Any:
        found.append(made)
        return redistribute(made, wanted, where)

    monkeypatch.setattr(row_plans, "redistribute", counted)
    return found


def test_other_rows_are_moved_by_the_same_ops(planned: list[TensorType]) -> None:
    plans = RowPlans(BOX, ROWS)
    ends = "64@data, 48@tensor", "64, 48@tensor"
    one, other = (plans(*(stack(n, rest) for rest in ends)) for n in (8, 7))
    assert planned == [stack(8)]
    assert [s.op for s in one.program.steps] == [s.op for s in other.program.steps] != []
    assert other.program.input_types == (stack(7),) and other.program.output_types == (stack(7, ends[1]),)
    assert other.seconds == pytest.approx(redistribute(stack(7), stack(7, ends[1]), BOX).seconds)
    other.certificate.check()
    assert other.certificate.status != "exact"  # the search was of other sizes
    assert plans(stack(8), stack(8, ends[1])) is one


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ((8, "64@data, 48@tensor"), (6, "64@data, 48")),  # to another layout
        ((8, "64@data, 48@tensor"), (3, "64, 48@tensor")),  # much fewer rows
        ((8, "64@data, 48@tensor"), (9, "64, 48@tensor")),  # no stage has so many
        ((8, "64@data, 32@tensor"), (7, "64, 48@tensor")),  # another row
    ],
    ids=str,
)
def test_all_else_is_planned_by_itself(
    planned: list[TensorType], first: tuple[int, str], then: tuple[int, str]
) -> None:
    plans = RowPlans(BOX, ROWS)
    plans(stack(*first), stack(first[0], first[1].replace("64@data", "64")))
    made, wanted = stack(then[0]), stack(*then)
    assert plans(made, wanted) == redistribute(made, wanted, BOX)
    assert planned[1:] == [made]


def test_rows_that_a_plan_cuts_are_planned_for_themselves(planned: list[TensorType]) -> None:
    """Of 8 rows two devices take four each between nodes, and gather them inside; of 7 rows they cannot."""
    mesh, plans = Mesh(data=8, tensor=2), RowPlans(Topology.load("dgx-h100", nodes=4), ROWS)
    ends = [
        [TensorType.parse(f"f32[{n}, 7168{end}", mesh) for end in (", 1536]{+data}", "@data, 1536]")] for n in (8, 7)
    ]
    many, few = (plans(*pair) for pair in ends)
    assert any(t.layout.dims[0] for t in many.program.types.values())
    assert planned == [made for made, _ in ends] and few.program.output_types == (ends[1][1],)


@pytest.mark.parametrize(
    ("made", "wanted", "searched"),
    [
        ("f32[64, 48]", "f32[64@data, 48]", False),
        ("f32[64@tensor, 48]", "f32[64@(tensor,data), 48]", False),
        ("f32[64@tensor, 48]", "f32[64@(data,tensor), 48]", True),
        ("f32[64, 48]{+tensor}", "f32[64@data, 48]{+tensor}", True),
        ("f32[64, 48]", "f32[64@data, 48@tensor]", True),
    ],
)
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_cut_is_a_slice_and_not_searched(
    planned: list[TensorType], made: str, wanted: str, searched: bool, nodes: int
) -> None:
    """On a topology that the mesh fills (one node) the planner says on which placement."""
    source, target = TensorType.parse(made, MESH), TensorType.parse(wanted, MESH)
    topology = Topology.load("dgx-h100", nodes=nodes)
    found, plan = RowPlans(topology, ROWS)(source, target), redistribute(source, target, topology)
    assert found.program == plan.program and found.certificate == plan.certificate
    assert bool(planned) == (searched or nodes == 1)
    found.certificate.check()


def calls(run: Callable[[], object]) -> tuple[int, int]:
    """How many calls a run makes, and how many of these lead into another file."""
    found = [0, 0]

    def count(frame: FrameType, event: str, _: object) -> None:
        if event in ("call", "c_call"):
            found[0] += 1
        if event == "call" and frame.f_back and frame.f_back.f_code.co_filename != frame.f_code.co_filename:
            found[1] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(before)
    return found[0], found[1]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gpt3-175b", {"data": 2, "tensor": 2, "pipeline": 2, "zero": 1, "sequence_parallel": True}),
        ("llama3-8b", {"data": 4, "tensor": 4, "zero": 1, "sequence_parallel": True}),
        ("mixtral-8x7b", {"data": 8, "expert": 4, "tensor": 2}),
    ],
)
def test_a_partition_of_two_layers_calls_little(name: str, said: dict[str, Any]) -> None:
    """Once it is warm: types, laid lines, prices and plans are known."""
    model, strategy = Model.load(name, layers=2), Strategy(**said, global_batch=8)
    partition(model, strategy)
    every, away = calls(lambda: make_job(model, strategy))
    assert every <= 1_000_000 and away <= 200_000
    # Whether an axis leaves work whole is looked at with each, for a fifth more.
    assert calls(lambda: partition(model, strategy))[0] <= 1.2 * every
