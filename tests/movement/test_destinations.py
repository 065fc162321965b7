"""A plan ends in the very types asked for: mesh, names and the order of the shards included."""

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings

import shardplan as sp
import strategies as some
from benchmarks import destinations
from shardplan.core.ops import Send
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.core.walk import walk
from shardplan.execution.verify import verify
from shardplan.movement.batches import batch
from shardplan.movement.redistribution.choice import chain

SQUARE, TURNED = sp.Mesh.parse("a=2,b=2"), sp.Mesh.parse("b=2,a=2 devices=[0,2,1,3]")
TEXT = "f32[8@(a,b)]"
ARRAY = np.arange(8, dtype=np.float32)
WAYS: dict[str, dict[str, Any]] = {
    "alone": {},
    "portable": {"portable": True},
    "limited": {"memory_limit": "16 B"},
    "on a topology": {"topology": "dgx-a100"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [1, 2])
def test_shards_come_in_the_order_of_the_destinations_mesh(way: str, count: int, tmp_path: Path) -> None:
    """Every device holds already what it shall hold; only its place in the list is another."""
    s, t = sp.TensorType.parse(TEXT, SQUARE), sp.TensorType.parse(TEXT, TURNED)
    how: dict[str, Any] = WAYS[way] | ({"memory_limit": "32 B"} if way == "limited" and count == 2 else {})
    plan = sp.redistribute(s, t, **how) if count == 1 else sp.redistribute([s] * 2, [t] * 2, **how)
    assert plan.program.output_types == plan.certificate.destinations == (t,) * count
    shards = sp.distribute(ARRAY, s)
    found = [sp.run(plan.program, shards)] if count == 1 else sp.run(plan.program, [shards] * 2)
    assert all((sp.collect(x, t) == ARRAY).all() for x in found)
    assert [shard.tolist() for shard in found[0]] == [[0, 1], [4, 5], [2, 3], [6, 7]]
    c = plan.certificate
    assert (max(c.received_bytes), c.workspace_bytes, c.seconds, c.status) == (0, 8 * count, 0.0, "floor")
    plan.save(tmp_path / "plan.json")
    assert verify(sp.Plan.load(tmp_path / "plan.json")).complete


def test_a_certificate_of_the_sources_mesh_is_refused() -> None:
    """What was said to be ok: no step, and the output where the source is."""
    s, t = sp.TensorType.parse(TEXT, SQUARE), sp.TensorType.parse(TEXT, TURNED)
    plan = sp.redistribute(s, s)
    assert not plan.program.steps
    false = dataclasses.replace(plan.certificate, destinations=(t,))
    message = (
        r"^the program ends in f32\[8@\(a,b\)\] on a=2, b=2, "
        r"which is not f32\[8@\(a,b\)\] on b=2, a=2 devices=\[0,2,1,3\]$"
    )
    with pytest.raises(sp.CertificateError, match=message):
        false.check()


def test_names_of_one_mesh_are_those_asked_for() -> None:
    """An axis of size 1 says nothing of the boxes, but stands in the type."""
    plan = sp.redistribute("f32[8@a, 8]", "f32[8, 8@(a,one)]", mesh="a=4,one=1")
    assert [str(t) for t in plan.program.output_types] == ["f32[8, 8@(a,one)]"]
    *_, last = walk(plan.program)
    assert last.relabels and plan.certificate.gap == 1.0


def test_tables_of_boxes_keep_the_order_of_their_mesh() -> None:
    """They are said by device id, so they hold under every order of the devices."""
    mesh, turned = sp.Mesh(x=2), sp.Mesh({"x": 2}, devices=[1, 0])
    table = some.random_table(random.Random(3), [5], mesh)
    s, t = sp.TensorType("i32", (5,), table, mesh), sp.TensorType("i32", (5,), table, turned)
    plan, array = sp.redistribute(s, t), np.arange(5, dtype=np.int32)
    assert plan.program.output_types == (t,)
    assert (sp.collect(sp.run(plan.program, sp.distribute(array, s)), t) == array).all()


def test_addends_that_stay_where_they_are_are_not_sent() -> None:
    """Of a type that is partial, a device whose place changes keeps its own addend."""
    s, t = (sp.TensorType.parse("i32[4]{+b}", mesh) for mesh in (SQUARE, TURNED))
    program = Program({"0": s}, [Step(Send(t.layout, t.mesh), ("0",), ("1",))], ("1",))
    array = np.arange(4, dtype=np.int32)
    given = sp.distribute(array, s)
    found = sp.run(program, given)
    assert all((found[k] == given[TURNED.devices[k]]).all() for k in range(4))
    assert (sp.collect(found, t) == array).all()


@settings(max_examples=60, deadline=None)
@given(some.rngs())
@example(random.Random(5))
def test_outputs_are_the_destinations(rng: random.Random) -> None:
    """Meshes of the same, overlapping and other devices, in any order; alone, portable, limited, and in batches."""
    way = rng.choice(destinations.WAYS)
    ends = destinations.drawn(rng, way)
    plan = None if ends is None else destinations.planned(*ends, way)
    assert ends is None or plan is None or destinations.wrong(plan, ends[1]) == ""


def test_other_tiles_of_a_batch_end_in_the_type() -> None:
    """A send of smaller tiles and the gathers behind it name no axis of size 1 that the destination names."""
    mesh = sp.Mesh({"x": 2}, devices=[4, 5])
    s, t = sp.TensorType.parse("f32[8@x]", mesh), sp.TensorType.parse("f32[8@one]", sp.Mesh(a=2, one=1))
    ways = batch._sends(s, t, None)  # pyright: ignore[reportPrivateUsage]
    assert max(map(len, ways)) == 3
    assert [chain(ops, s).output_types for ops in ways] == [(t,)] * len(ways)
