"""Megatron's order strings against its rank generator, and the greedy matrix against the audit."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardware.topologies import switches
from launches.rank_generator import rank_groups
from launches.systems import systems
from shardplan.core.mesh import Mesh
from shardplan.errors import ParseError, TopologyError
from shardplan.hardware import Placement, matrix_of, placements
from shardplan.launches.launch import Launch
from shardplan.launches.megatron import NAMES, fastest_first, greedy_matrix, name_of, order_ranks, orders_of
from shardplan.launches.verdict import analyse


@given(systems(names=("dp", "tp", "pp", "cp", "ep")), st.permutations(list(NAMES)))
@settings(max_examples=80)
def test_ranks_are_those_of_the_rank_generator(system, names):
    mesh, topology = system
    order = "-".join(names)
    ranks = order_ranks(mesh, fastest_first(order, mesh))
    launch = Launch(Mesh(mesh.shape, devices=ranks.reshape(-1).tolist()), topology, tuple(ranks.reshape(-1).tolist()))
    for size in range(1, len(mesh.axes) + 1):
        for wanted in itertools.combinations(mesh.axes, size):
            theirs = rank_groups(order, dict(mesh.shape), set(wanted))
            ours = launch.groups([n for n in reversed(names) if n in wanted])
            assert sorted(map(tuple, ours.tolist())) == sorted(map(tuple, theirs))


@given(systems(names=("dp", "tp", "pp", "cp")), st.permutations(["tp", "cp", "dp", "pp"]))
@settings(max_examples=120)
def test_the_greedy_matrix_is_that_of_the_ranks(system, names):
    """It exists exactly where the order is a placement, and then it is no more than a renaming of units away."""
    mesh, topology = system
    fastest = fastest_first("-".join(names), mesh)
    ranks = order_ranks(mesh, fastest)
    try:
        matrix = greedy_matrix(mesh, topology, fastest)
    except TopologyError:
        assert matrix_of(ranks, topology) is None
        return
    found = analyse(Launch(mesh, topology, tuple(ranks.reshape(-1).tolist())))
    assert found.matrix == matrix == Placement(mesh, topology, matrix).matrix
    assert found.verdict in ("canonical", "equivalent")


@given(systems(most=48, names=("dp", "tp", "pp")))
@settings(max_examples=40)
def test_orders_are_found_exactly_where_there_are_some(system):
    mesh, topology = system
    for placement in placements(mesh, topology):
        wanted = set()
        for names in itertools.permutations(mesh.axes):
            if matrix_of(order_ranks(mesh, names), topology) == placement.matrix:
                wanted.add(tuple(a for a in names if mesh.shape[a] > 1))
        found = [fastest_first(order, mesh) for order in orders_of(placement)]
        assert {tuple(a for a in names if mesh.shape[a] > 1) for names in found} == wanted
        assert len(found) == len(wanted)


def test_names():
    assert [name_of(a) for a in ("tensor", "tp", "data", "pipeline", "context", "expert", "rows")] == [
        "tp", "tp", "dp", "pp", "cp", "ep", None,
    ]  # fmt: skip
    mesh = Mesh(data=4, tensor=2, pipeline=1)
    assert fastest_first("TP-dp", mesh) == ("tensor", "data", "pipeline")
    assert orders_of(Placement(Mesh(rows=4, tensor=2), switches(2, 4), ((2, 2), (1, 2)))) == ()


def test_the_best_may_be_no_order():
    """dp=[2,2], tp=[2,2]: both axes inside and across, which no string can say."""
    topology = switches(4, 4)
    assert orders_of(Placement(Mesh(dp=4, tp=4), topology, ((2, 2), (2, 2)))) == ()
    assert orders_of(Placement(Mesh(dp=4, tp=4), topology, ((4, 1), (1, 4))))[0] == "tp-cp-ep-dp-pp"
    assert orders_of(Placement(Mesh(dp=2, tp=4, pp=2), topology, ((2, 1), (1, 4), (2, 1))))[0] == "tp-cp-ep-dp-pp"


@pytest.mark.parametrize(
    ("order", "axes", "message"),
    [
        ("tp-dx", {"dp": 2, "tp": 2},
         "order 'tp-dx': 'dx' is unknown; legal is a row such as tp-cp-ep-dp-pp, fastest first"),
        ("tp-tp", {"tp": 2}, "order 'tp-tp': 'tp' stands twice"),
        ("tp-cp", {"dp": 2, "tp": 2},
         "order 'tp-cp' leaves out dp, but axis 'dp' has size 2; legal is to name every axis of more than one device"),
        ("tp-dp", {"rows": 2},
         "order 'tp-dp': axis 'rows' of mesh rows=2 has no name in Megatron; legal: tp: tensor, model; cp: context, "
         "sequence, seq; ep: expert; dp: data; pp: pipeline, pipe, stage"),
        ("tp-dp", {"tp": 2, "tensor": 2},
         "order 'tp-dp': the axes 'tp' and 'tensor' of mesh tp=2, tensor=2 are both tp"),
    ],
)  # fmt: skip
def test_order_errors(order, axes, message):
    with pytest.raises(ParseError) as caught:
        fastest_first(order, Mesh(axes))
    assert str(caught.value) == message


def test_boundaries_that_do_not_divide():
    with pytest.raises(TopologyError) as caught:
        greedy_matrix(Mesh(dp=8, tp=3), switches(3, 8), ("tp", "dp"))
    assert str(caught.value) == (
        "axis 'tp' of size 3 in the order tp, dp is no placement on l0=3 x l1=8: 3 more after 1 devices neither divide "
        "nor are a multiple of the 8 that are left of level 'l1'"
    )
    with pytest.raises(TopologyError, match="has 24 devices, topology 'test' has 16"):
        greedy_matrix(Mesh(dp=8, tp=3), switches(2, 8), ("tp", "dp"))
