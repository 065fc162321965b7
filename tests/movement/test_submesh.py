"""A placement says where device ids lie, so it prices every mesh of them, whatever its axes and its order."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
import shardplan as sp
from benchmarks import suites
from shardplan.core.pattern import Groups, Local, Messages, Pattern
from shardplan.hardware.prices.cost import Fabric, price

TOPOLOGY = sp.Topology.load("dgx-a100", nodes=2)


@st.composite
def placed(draw: st.DrawFn) -> sp.Placement:
    """A placement of 16 devices whose ids are in any order, with an offset at times."""
    first = draw(st.sampled_from((0, 0, 5)))
    ids = draw(st.permutations(range(first, first + 16)))
    sizes = draw(st.sampled_from(((4, 4), (8, 2), (2, 8), (16,))))
    mesh = sp.Mesh({f"m{k}": n for k, n in enumerate(sizes)}, devices=ids)
    return draw(st.sampled_from(list(sp.placements(mesh, TOPOLOGY))))


def moved(pattern: Pattern, where: dict[int, int]) -> Pattern:
    """The pattern on topology ids."""
    look = np.vectorize(where.__getitem__, otypes=[np.int64])
    match pattern:
        case Messages():
            return Messages(look(pattern.sender), look(pattern.receiver), pattern.nbytes, pattern.chunks, pattern.own)
        case Groups():
            return replace(pattern, members=look(pattern.members))
        case Local():
            return pattern


@settings(max_examples=80, deadline=None)
@given(placed(), st.integers(0, 10**6), st.booleans())
def test_a_mesh_of_some_devices_is_priced_where_they_lie(where: sp.Placement, seed: int, across: bool) -> None:
    rng = random.Random(seed)
    meshes = [
        sp.Mesh({f"x{k}": n for k, n in enumerate(sizes)}, devices=rng.sample(where.mesh.devices, int(np.prod(sizes))))
        for sizes in rng.choices(((2, 2), (4, 2), (2, 4), (2, 3), (8,), (4, 4)), k=2)
    ]
    s, t = suites.cross_pair(rng, meshes[0], meshes[across], 2, even=True, marked=False)
    plan = sp.redistribute(s, t, topology=where)
    plan.certificate.check()
    assert oracle.unsound(plan.program, [t]) is None
    lies = dict(zip(where.mesh.devices, where.device_mesh().reshape(-1).tolist(), strict=True))
    apart = Fabric(TOPOLOGY)
    seconds = 0.0
    for step in plan.program.steps:
        seconds += price(moved(step.op.pattern(*plan.program.step_types(step)[0]), lies), apart).seconds
    assert plan.seconds == pytest.approx(seconds, rel=1e-12)


def test_a_smaller_mesh_on_the_placement_of_a_larger() -> None:
    """It raised an IndexError."""
    mesh, small = sp.Mesh(data=4, tensor=2), sp.Mesh(x=2, y=2)
    place = next(iter(sp.placements(mesh, sp.Topology.load("dgx-a100", nodes=1))))
    s, t = (sp.TensorType.parse(x, small) for x in ("f32[8@x, 8@y]", "f32[8@y, 8@x]"))
    plan = sp.redistribute(s, t, topology=place)
    plan.certificate.check()
    assert plan.certificate.level_bytes == (0.0, 128.0)
    both = sp.redistribute([s, s], [t, t], topology=place)
    both.certificate.check()


def test_devices_that_no_placement_places() -> None:
    mesh = sp.Mesh(data=4, tensor=2)
    place = next(iter(sp.placements(mesh, sp.Topology.load("dgx-a100", nodes=1))))
    small = sp.Mesh({"x": 2, "y": 2}, devices=(6, 7, 8, 9))
    s, t = (sp.TensorType.parse(x, small) for x in ("f32[8@x, 8@y]", "f32[8@y, 8@x]"))
    with pytest.raises(sp.TopologyError) as error:
        sp.redistribute(s, t, topology=place)
    assert str(error.value) == (
        "the mesh x=2, y=2 devices=6:10 has device 8, which the placement of data=4, tensor=2 does not place; "
        "legal are the device ids of that mesh"
    )
