"""The plain movements that a settlement pays: they lead where they are wanted, keep the value, and make no sums."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings

import oracle
from shardplan.core.draft import Draft
from shardplan.core.mesh import Mesh
from shardplan.core.ops import AllReduce, Einsum
from shardplan.core.program import Program
from shardplan.core.tensor import TensorType
from shardplan.hardware.placement import Placement
from shardplan.hardware.prices.cost import seconds
from shardplan.hardware.prices.fabric import Fabric
from shardplan.hardware.topology import Topology
from shardplan.strategy.partition.prices import Prices, moved, working
from strategies import rngs

MESH = Mesh({"x": 2, "y": 3, "z": 2})
FABRIC = Fabric(Topology.load("dgx-h100", nodes=2))


def random_type(rng: random.Random, shape: list[int]) -> TensorType:
    """Axes on dims in any order, of which some tile unevenly, and some of the others partial."""
    dims: list[list[str]] = [[] for _ in shape]
    partial: list[str] = []
    for axis in rng.sample("xyz", 3):
        place = rng.randrange(len(shape) + 2)
        if place < len(shape):
            dims[place].append(axis)
        elif place == len(shape):
            partial.append(axis)
    return TensorType("i32", shape, dims, MESH, dict.fromkeys(partial, "sum"))


@given(rngs())
@settings(max_examples=300)
def test_a_movement_leads_where_it_is_wanted_unless_to_a_sum(rng: random.Random) -> None:
    shape = [rng.choice((4, 5, 6, 12)) for _ in range(rng.randint(1, 3))]
    made, wanted = random_type(rng, shape), random_type(rng, shape)
    draft = Draft.of([made])
    name = moved(draft, "0", wanted)
    prices = Prices(FABRIC)
    assert (name is None) == (not set(wanted.layout.partial) <= set(made.layout.partial))
    if name is None:
        assert prices.move(made, wanted) == math.inf
        return
    assert draft.types[name] == wanted
    program = Program({"0": made}, draft.steps, (name,))
    assert oracle.unsound(program, [wanted]) is None
    every = [seconds(s.op.pattern(*(draft.types[o] for o in s.operands)), FABRIC) for s in draft.steps]
    assert prices.move(made, wanted) == sum(every)


@pytest.mark.parametrize(
    ("made", "wanted", "ops"),
    [
        ("[12, 12]{+x}", "[12@x, 12]", "reduce_scatter"),
        ("[12, 12]{+x}", "[12, 12]", "all_reduce"),
        ("[12, 12]{+x,+y}", "[12, 12@y]{+x}", "reduce_scatter"),
        ("[12@x, 12]{+y}", "[12, 12]", "all_reduce all_gather"),
        ("[12@(x,y), 12]", "[12@x, 12]", "all_gather"),
        ("[12@x, 12]", "[12@(x,y), 12]", "slice"),
        ("[12@x, 12]", "[12, 12@x]", "all_to_all"),
        ("[12@(x,y), 12]", "[12@(y,x), 12]", "exchange"),
        ("[12@x, 12]", "[12@y, 12@x]", "exchange"),
    ],
)
def test_the_steps_of_a_movement(made: str, wanted: str, ops: str) -> None:
    """Sums are scattered where they can be; nothing is gathered that changes its dim."""
    given, asked = (TensorType.parse(f"f32{text}", MESH) for text in (made, wanted))
    draft = Draft.of([given])
    assert moved(draft, "0", asked)
    assert " ".join(step.op.name for step in draft.steps) == ops


def test_what_a_device_does_not_state_is_the_nominal_ones() -> None:
    """Only work changes: a plan's seconds on the same hardware have none."""
    plain = Topology.load("nominal", devices=4)
    found, stated = working(plain), Topology.load("dgx-h100")
    assert isinstance(found, Topology) and found.levels == plain.levels and found.device.peak("bf16") == 500e12
    assert found.device.memory_bandwidth == 2e12
    assert working(stated) == stated
    placed = Placement(Mesh({"x": 4}), plain, ((4,),))
    assert working(placed) == Placement(Mesh({"x": 4}), found, ((4,),))


def test_an_op_takes_what_its_worst_device_does() -> None:
    a, b = TensorType.parse("f32[7@x, 6]", MESH), TensorType.parse("f32[6, 5]", MESH)
    prices = Prices(FABRIC)
    assert prices.op(Einsum("ab,bc->ac"), (a, b)) == seconds(Einsum("ab,bc->ac").pattern(a, b), FABRIC) > 0
    total = TensorType.parse("f32[7]{+x}", MESH)
    assert prices.op(AllReduce(("x",)), (total,)) == prices.move(total, TensorType.parse("f32[7]", MESH))


def test_no_movement_leads_from_one_reduction_to_another() -> None:
    ends = [TensorType("f32", (12,), ((),), MESH, {"x": reduction}) for reduction in ("sum", "max")]
    for made in ends:
        for wanted in ends:
            assert (moved(Draft.of([made]), "0", wanted) is None) == (made != wanted)
            assert math.isinf(Prices(FABRIC).move(made, wanted)) == (made != wanted)
