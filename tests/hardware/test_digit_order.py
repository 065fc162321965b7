"""The order in which axes share a level: digits, enumeration, text, recognition."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.core.mesh import Mesh
from shardplan.errors import ParseError, TopologyError
from shardplan.hardware import Level, Placement, Topology, orders, placements
from shardplan.hardware.digit_order import level_digits, level_orders, normal_order
from shardplan.hardware.level_factors import factors
from shardplan.hardware.recognise import order_of


def torus(*shape, link="torus"):
    return Level("chip", math.prod(shape), link, 1e9, 1e-6, shape=() if link in ("ring", "switch") else shape)


def sequences(level, sizes):
    """Every way to cut a level into digits, by plain search.

    Neighbours are of different axes, and a digit that is not the last of its axis covers whole dims.
    """
    ends = set(itertools.accumulate(level.shape, lambda a, b: a * b, initial=1)) if level.shape else set()

    def rest(need, done, last):
        if set(need.values()) <= {1}:
            yield ()
        for axis, n in need.items():
            for size in range(2, n + 1) if axis != last else ():
                if n % size == 0 and (size == n or {done, done * size} <= ends):
                    for others in rest(need | {axis: n // size}, done * size, axis):
                        yield ((axis, size), *others)

    return set(rest(sizes, 1, None))


@pytest.mark.parametrize(
    ("level", "sizes", "number"),
    [
        (torus(4, 4, 4), {"a": 16, "b": 4}, 3),
        (torus(4, 8, 16), {"a": 64, "b": 8}, 6),
        (torus(4, 8, 16, link="mesh"), {"a": 64, "b": 1, "c": 8}, 6),
        (torus(2, 2, 2, 2), {"a": 4, "b": 4}, 6),
        (torus(2, 3, 1, 4), {"a": 8, "b": 3}, 3),
        (torus(4, 4), {"a": 2, "b": 2, "c": 4}, 6),
        (torus(8, link="ring"), {"a": 2, "b": 4}, 2),
        (torus(6), {"a": 6}, 1),
        (torus(1), {"a": 1}, 1),
    ],
)
def test_orders_are_all_there_once(level, sizes, number):
    found = list(level_orders(level, sizes))
    assert found[0] == tuple(axis for axis, n in sizes.items() if n > 1)
    assert len(found) == number
    assert sorted(tuple(level_digits(level, sizes, one)) for one in found) == sorted(sequences(level, sizes))
    assert all(normal_order(level, sizes, one) == one for one in found)


@st.composite
def ordered(draw):
    outer, shape = draw(st.sampled_from([(1, (4, 2, 3)), (2, (2, 4, 2)), (3, (2, 2, 2)), (1, (4, 4)), (2, (6,))]))
    levels = (Level("rack", outer, "switch", 1e9, 0.0), torus(*shape), Level("core", 2, "ring", 1e9, 0.0))
    topology = Topology("any", levels)
    n = topology.size
    sizes = draw(
        st.sampled_from([(a, b, n // a // b) for a in range(1, n + 1) for b in range(1, n + 1) if n % (a * b) == 0])
    )
    placement = draw(st.sampled_from(list(placements(Mesh(dict(zip("abc", sizes, strict=True))), topology))))
    return draw(st.sampled_from(list(orders(placement))))


@given(ordered())
def test_laws(placement):
    """A permutation, that text keeps and the ids give back; digits are the sub-axes."""
    ids = placement.device_mesh()
    assert sorted(ids.reshape(-1)) == list(range(placement.topology.size))
    assert Placement.parse(str(placement)) == placement
    plain = Placement(placement.mesh, placement.topology, placement.matrix)
    assert order_of(ids, plain) == placement
    assert placement in set(orders(plain))
    split = placement.mesh_split()
    digits = [d for level in placement.digits() for d in level]
    assert math.prod(d.size for d in digits) == placement.topology.size
    for d in digits:
        assert split.span(d.name).size == d.size
        assert np.array_equal(ids.reshape(-1) // d.stride % d.size, split.coordinate(d.name))


def test_an_axis_on_dims_that_are_no_neighbours():
    topology = Topology("t", (torus(2, 3, 4),))
    p = Placement(Mesh(data=8, tensor=3), topology, ((8,), (3,)), (("data", "tensor", "data"),))
    # Dim 0 is worth 12 ids, dim 1 four and dim 2 one.
    assert p.device_mesh()[:, 0].tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert p.device_mesh()[0].tolist() == [0, 4, 8]
    assert str(p.mesh_split()) == "data=(chip0=2,chip1=4), tensor=3"
    found = factors(p, ("data",))
    assert [(f.name, f.axes, f.size) for f in found] == [("chip", ("data.chip0", "data.chip1"), 8)]
    assert [d.stride for d in found[0].digits] == [12, 1]


def test_axes_in_an_order_of_their_own():
    p = Placement(Mesh(a=2, b=3), Topology("t", (torus(6, link="ring"),)), ((2,), (3,)), [["b", "a"]])
    assert p.device_mesh().tolist() == [[0, 2, 4], [1, 3, 5]]
    assert p.describe() == "a=[2], b=[3]; order chip=(b, a)"
    assert repr(p).endswith("order=(('b', 'a'),))")


def test_what_changes_nothing_is_left_out():
    level = torus(4, 4, 4)
    assert normal_order(level, {"a": 16, "b": 4, "c": 1}, ("c", "a", "a", "b")) == ("a", "b")
    assert normal_order(level, {"a": 4, "b": 16}, ("a", "b", "c", "b")[:2]) == ("a", "b")
    same = [Placement(Mesh(a=16, b=4), Topology("t", (level,)), ((16,), (4,)), o) for o in ((), (("a", "a", "b"),))]
    assert same[0] == same[1]


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ((("a", "b"), ("a",)), "order [('a', 'b'), ('a',)] is of 2 levels; chip=64 has 1"),
        ((("a",),), "order (a) of level 'chip' lacks 'b', which is split over 4 there"),
        ((("a", "b", "x"),), "order (a, b, x) of level 'chip': 'x' is no axis of the mesh; axes: a, b"),
        ((("b", "a", "b"),), "order (b, a, b) of level 'chip': 'b' stands at place 0 and again later, so it takes a "
         "whole dim at place 0 and has some of its 4 left; the dim there has 4"),
        (5, "the order is 5; legal is a list of orders of axes, one a level"),
        (((5,),), "the order of a level is (5,); legal is a list of names of axes, and 5 is none"),
    ],
)  # fmt: skip
def test_errors(order, message):
    with pytest.raises(TopologyError) as caught:
        Placement(Mesh(a=16, b=4), Topology("t", (torus(4, 4, 4),)), ((16,), (4,)), order)
    assert str(caught.value) == message


def test_only_a_dim_that_begins_there_is_taken_whole():
    ring = Topology("t", (torus(64, link="ring"),))
    with pytest.raises(TopologyError) as caught:
        Placement(Mesh(a=16, b=4), ring, ((16,), (4,)), (("a", "b", "a"),))
    assert str(caught.value) == (
        "order (a, b, a) of level 'chip': 'a' stands at place 0 and again later, so it takes a whole dim at place 0 "
        "and has some of its 16 left; no dim of a torus or mesh begins there"
    )


@pytest.mark.parametrize("text", ["; order chop=(a, b)", "; order chip=()", "; order chip=(b, a), chip", " order"])
def test_parse_errors(text):
    p = Placement(Mesh(a=16, b=4), Topology("t", (torus(4, 4, 4),)), ((16,), (4,)))
    with pytest.raises(ParseError, match=r"expected the end of the matrix, or '; order ', a level and its axes"):
        Placement.parse(str(p).replace("b=[4]", f"b=[4]{text}"))
