"""The plain movements that a settlement pays: they lead where they are wanted, keep the value, and make no sums."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings

import oracle
from shardplan.core.mesh import Mesh
from shardplan.core.ops import AllReduce, Einsum
from shardplan.core.program import Program
from shardplan.core.program_builder import ProgramBuilder
from shardplan.core.tensor import TensorType
from shardplan.hardware.placement import Placement
from shardplan.hardware.prices.cost import seconds
from shardplan.hardware.prices.fabric import Fabric
from shardplan.hardware.topology import Topology
from shardplan.strategy.partition.prices import Prices, common_axes, moved, moved_by_parts, with_default_device
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
    builder = ProgramBuilder.of([made])
    name = moved(builder, "0", wanted)
    prices = Prices(FABRIC)
    assert (name is None) == (not set(wanted.layout.partial) <= set(made.layout.partial))
    if name is None:
        assert prices.move(made, wanted) == math.inf
        return
    assert builder.types[name] == wanted
    program = Program({"0": made}, builder.steps, (name,))
    assert oracle.unsound(program, [wanted]) is None
    ways = [priced(builder)]
    for axis in common_axes(made, wanted):
        by_parts = ProgramBuilder.of([made])
        if (last := moved_by_parts(by_parts, "0", wanted, axis)) is not None:
            assert by_parts.types[last] == wanted
            assert oracle.unsound(Program({"0": made}, by_parts.steps, (last,)), [wanted]) is None
            ways.append(priced(by_parts))
    assert prices.move(made, wanted) == min(ways)


def priced(builder: ProgramBuilder) -> float:
    return sum(seconds(s.op.pattern(*(builder.types[o] for o in s.operands)), FABRIC) for s in builder.steps)


@pytest.mark.parametrize(
    ("made", "wanted", "steps"),
    [
        ("[12@x, 12, 6]", "[12, 12@x, 6]", "slice all_to_all all_gather"),
        ("[12@x, 12, 6]{+z}", "[12, 12@x, 6]", "reduce_scatter all_to_all all_gather"),
        ("[12@x, 6]", "[12, 6]", "slice all_gather all_gather"),
    ],
)
def test_what_devices_have_alike_they_move_by_parts(made: str, wanted: str, steps: str) -> None:
    given, asked = (TensorType.parse(f"f32{text}", MESH) for text in (made, wanted))
    builder = ProgramBuilder.of([given])
    assert common_axes(given, asked) == ("y", "z")
    assert moved_by_parts(builder, "0", asked, "z")
    assert " ".join(step.op.name for step in builder.steps) == steps


def test_between_nodes_tokens_of_a_tensor_group_go_by_parts() -> None:
    """Eight devices of a node have them alike: each sends an eighth over its own link, and NVLink does the rest."""
    mesh = Mesh({"expert": 2, "tensor": 8})
    ends = "[2@expert, 8, 4096, 8192]", "[2, 8@expert, 4096, 8192]"
    given, asked = (TensorType.parse(f"bf16{text}", mesh) for text in ends)
    plain = ProgramBuilder.of([given])
    assert moved(plain, "0", asked)
    assert Prices(FABRIC).move(given, asked) < priced(plain) / 2
    assert common_axes(given, asked) == ("tensor",)


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
    builder = ProgramBuilder.of([given])
    assert moved(builder, "0", asked)
    assert " ".join(step.op.name for step in builder.steps) == ops


def test_what_a_device_does_not_state_is_the_nominal_ones() -> None:
    """Only work changes: a plan's seconds on the same hardware have none."""
    plain = Topology.load("nominal", devices=4)
    found, stated = with_default_device(plain), Topology.load("dgx-h100")
    assert isinstance(found, Topology) and found.levels == plain.levels and found.device.peak("bf16") == 500e12
    assert found.device.memory_bandwidth == 2e12
    assert with_default_device(stated) == stated
    placed = Placement(Mesh({"x": 4}), plain, ((4,),))
    assert with_default_device(placed) == Placement(Mesh({"x": 4}), found, ((4,),))


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
            assert (moved(ProgramBuilder.of([made]), "0", wanted) is None) == (made != wanted)
            assert math.isinf(Prices(FABRIC).move(made, wanted)) == (made != wanted)
