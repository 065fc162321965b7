"""Job-level placement: traffic, ranking, plans and bounds, degraded units."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.hardware.topologies import any_topology

import shardplan as sp
from shardplan.core.pattern import Groups
from shardplan.errors import LayoutError, TopologyError
from shardplan.hardware.level import Level
from shardplan.hardware.placement import Placement, count, orders
from shardplan.hardware.prices.cost import price
from shardplan.hardware.prices.fabric import Fabric
from shardplan.movement.placing.placement_price import rank_placements
from shardplan.movement.placing.traffic import OPS, demands_of, parse_traffic, program_traffic


def switches(*levels, **options):
    return sp.Topology("t", tuple(Level(f"l{j}", n, "switch", b, 1e-6, **options) for j, (n, b) in enumerate(levels)))


@st.composite
def jobs(draw):
    topology = draw(any_topology())
    n = topology.size
    a = draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0]))
    mesh = sp.Mesh(a=a, b=n // a)
    ops = st.sampled_from(sorted(set(OPS)))
    rows = st.lists(
        st.tuples(ops, st.sampled_from([20160.0, 2016e4]), st.sampled_from([1.0, 5.0])), min_size=1, max_size=2
    )
    keys = draw(st.lists(st.sampled_from([("a",), ("b",), ("a", "b")]), min_size=1, unique=True))
    return mesh, topology, {key: draw(st.one_of(st.sampled_from([20160.0, 2016e5]), rows)) for key in keys}


@given(jobs(), st.sampled_from(["auto", "ring"]))
@settings(max_examples=60, deadline=None)
def test_ranking(job, algorithm):
    mesh, topology, traffic = job
    found = sp.place(mesh, topology, traffic, algorithm=algorithm)
    assert len(found) == count(mesh, topology)
    assert [row.seconds for row in found] == sorted(row.seconds for row in found)
    stock = sp.place(mesh, topology, traffic, programs="stock", algorithm=algorithm)
    by_matrix = {row.placement.matrix: row for row in stock}
    for row in found:
        assert row.seconds <= row.stock_seconds * (1 + 1e-9)
        # In the order that is best for one op each, or in the same.
        one = by_matrix[row.placement.matrix]
        assert one.seconds <= row.stock_seconds * (1 + 1e-9)
        if one.placement == row.placement:
            assert one.seconds == pytest.approx(row.stock_seconds, rel=1e-9)
        assert row.seconds == pytest.approx(sum(share.seconds for share in row.shares))
        assert row.lower_bound_seconds <= row.seconds * (1 + 1e-9)
        assert found.mitigation(row) >= 1 - 1e-9
    assert found.placement_gain >= 1


@given(jobs())
@settings(max_examples=40, deadline=None)
def test_plans_have_the_prices_of_the_shares(job):
    mesh, topology, traffic = job
    for programs in ("best", "stock"):
        row = sp.place(mesh, topology, traffic, programs=programs)[0]
        plans = [p for found in row.plans.values() for p in (found if isinstance(found, tuple) else (found,))]
        shares = [share for axes in row.plans for share in row.shares if share.demand.axes == axes]
        shares = [share for share in shares if share.demand.op != "permute"]
        assert len(plans) == len(shares)
        for plan, share in zip(plans, shares, strict=True):
            plan.certificate.check()
            if share.demand.op != "all_to_all":
                assert plan.seconds * share.demand.count == pytest.approx(share.seconds, rel=1e-9)


@given(jobs())
@settings(max_examples=60, deadline=None)
def test_stock_prices_are_those_of_all_groups_at_once(job):
    mesh, topology, traffic = job
    for row in sp.place(mesh, topology, traffic, programs="stock"):
        fabric = Fabric(topology, row.placement.position())
        for share in row.shares:
            demand = share.demand
            places = mesh.group_places(demand.axes)
            if demand.op == "permute" or places.shape[1] == 1:
                continue
            # Members in the order of their level digits, as reductions take them.
            members = np.sort(row.placement.device_mesh().reshape(-1)[places], axis=1)
            whole = price(Groups(demand.op, members, np.full(len(members), demand.nbytes)), Fabric(topology)).seconds
            if len(demand.axes) == 1:
                assert share.seconds == pytest.approx(demand.count * whole, rel=1e-9)
            assert fabric.topology is topology


def test_best_equals_brute_force():
    topology = switches((2, 5e9), (3, 2e10), (4, 1e11))
    mesh = sp.Mesh(data=6, tensor=4)
    traffic = {("data",): 3e8, ("tensor",): [("all_gather", 1e7, 20), ("reduce_scatter", 4e7, 20)]}
    found = sp.place(mesh, topology, traffic)
    for row in found:
        expected = sp.reduce(row.placement, "data", 3e8).seconds
        expected += 20 * sp.reduce(row.placement, "tensor", 4e7, target="sharded").seconds
        gather = row.plans["tensor",]
        assert isinstance(gather, tuple)
        expected += 20 * gather[0].seconds
        assert row.seconds == pytest.approx(expected, rel=1e-9)
    # The heavy, frequent axis stays inside the innermost level.
    assert found[0].placement.matrix == ((2, 3, 1), (1, 1, 4))


TORUS = {(2, 4): "torus", (4, 4): "torus", (2, 2, 3): "torus", (2, 3, 2): "mesh", (8,): "ring"}


def on_torus(shape, link):
    chips = Level("chip", math.prod(shape), link, 1e11, 1e-6, shape=() if link == "ring" else shape)
    return sp.Topology("t", (Level("slice", 2, "switch", 1e10, 1e-5), chips))


@pytest.mark.parametrize("shape", TORUS)
@pytest.mark.parametrize("traffic", [{"a": 1e8, "b": 1e6}, {"a": 1e6, "b": [("all_to_all", 1e8, 3)], ("a", "b"): 1e7}])
def test_the_best_order_is_the_least_of_all(shape, traffic):
    """Each priced one by one, on a level whose dims differ in size."""
    topology = on_torus(shape, TORUS[shape])
    mesh = sp.Mesh(a=2, b=topology.size // 4, c=2)
    found = sp.place(mesh, topology, traffic)
    demands = demands_of(traffic, mesh)
    for row in found:
        singly = [rank_placements([one], demands)[0].seconds for one in orders(row.placement)]
        assert row.seconds == pytest.approx(min(singly), rel=1e-9)
        assert len(singly) == len(set(orders(row.placement)))


def test_an_axis_of_stages_sends_to_the_next():
    """By its name, where no op stands; joint with another it is reduced, as any."""
    said = {
        "pp=2GB": "permute",
        "stage = 2GB*3": "permute",
        "pp=all_reduce:2GB": "all_reduce",
        "pp+dp=2GB": "all_reduce",
    }
    assert {text: parse_traffic(text).popitem()[1][0][0] for text in said} == said


def test_the_order_matters():
    # An axis of 4 in a ring of 8: neighbours share no link, every second chip shares each.
    topology = sp.Topology("t", (Level("chip", 8, "ring", 1e11, 0.0),))
    near, far = (Placement(sp.Mesh(a=4, b=2), topology, ((4,), (2,)), (order,)) for order in (("b", "a"), ("a", "b")))
    demands = demands_of({"a": 1e9}, near.mesh)
    seconds = {p.order: rank_placements([p], demands, "stock")[0].seconds for p in (near, far)}
    assert seconds[near.order] < seconds[far.order]
    (row,) = sp.place(near.mesh, topology, {"a": 1e9}, programs="stock")
    assert (row.placement, row.seconds) == (near, seconds[near.order])


def test_an_axis_goes_where_its_dims_are():
    # data = 64 on the two dims of 8, tensor = 4 on the dim between them: rings that close, and share no link.
    topology = sp.Topology.load("tpu-v5p", chips=(8, 4, 8))
    job = sp.Mesh(data=64, tensor=4), topology, {"data": 1e9, "tensor": 1e9}
    (row,) = sp.place(*job, programs="stock")
    assert row.placement.order == (("data", "tensor", "data"),)
    plain = rank_placements([replace(row.placement, order=())], demands_of(job[2], job[0]), "stock")[0]
    assert plain.seconds > 2 * row.seconds


def test_a_program_says_its_traffic():
    mesh = sp.Mesh(data=4, tensor=4)
    text = """program
  mesh data=4, tensor=4
  input %0: f32[64@data, 1024]{+tensor}
  %1 = all_reduce(%0; axes=(tensor)): f32[64@data, 1024]
  %2 = all_gather(%1; dim=0, axes=(data)): f32[64, 1024]
  output %2
"""
    program = sp.Program.parse(text)
    topology = switches((4, 1e9), (4, 1e11))
    found = sp.place(program, topology)
    by_hand = sp.place(mesh, topology, {"tensor": 64 * 256 * 4, "data": [("all_gather", 64 * 256 * 4, 1)]})
    assert [r.placement.matrix for r in found] == [r.placement.matrix for r in by_hand]
    assert [r.seconds for r in found] == pytest.approx([r.seconds for r in by_hand])
    assert [str(e) for e in program_traffic(program)[1]] == [
        "all_reduce over tensor: 65.5 kB", "all_gather over data: 65.5 kB",
    ]  # fmt: skip
    twice = sp.Program.parse("""program
  mesh data=4, tensor=4
  input %0: f32[64@data, 1024]{+tensor}
  input %1: f32[64@data, 1024]{+tensor}
  %2 = all_reduce(%0; axes=(tensor)): f32[64@data, 1024]
  %3 = all_reduce(%1; axes=(tensor)): f32[64@data, 1024]
  output %2, %3
""")
    assert [str(e) for e in program_traffic(twice)[1]] == ["all_reduce over tensor: 65.5 kB x 2"]
    moved = sp.redistribute(
        sp.TensorType("f32", (64, 64), ("data", "tensor"), mesh),
        sp.TensorType("f32", (64, 64), ("tensor", "data"), mesh),
    )
    ranked = sp.place(moved.program, topology)
    assert ranked[0].shares == ()
    assert ranked[0].seconds == ranked[0].other_seconds > 0
    with pytest.raises(LayoutError, match="a program says its own traffic"):
        sp.place(program, topology, {"data": 1.0})


def test_contention_of_all_groups_makes_the_difference():
    topology = sp.Topology.load("gcp-a100x16", nodes=2)
    found = sp.place(sp.Mesh(a=2, b=16), topology, {"a": 2**32}, programs="stock", algorithm="ring")
    ratio = found[-1].seconds / found[0].seconds
    assert ratio == pytest.approx(540, rel=0.01)
    assert found.placement_gain == pytest.approx(ratio)


def test_a_degraded_unit():
    topology = switches((4, 1e10), (4, 1e11))
    slow = replace(topology, levels=(replace(topology.levels[0], degraded=((2, 0.1),)), topology.levels[1]))
    mesh = sp.Mesh(data=4, tensor=4)
    assert sp.place(mesh, topology, {"data": 1e9}).degraded is None
    found = sp.place(mesh, slow, {"data": 1e9, "tensor": 1e9}).degraded
    assert found is not None
    assert found.units == ("l0[2]",)
    assert found.regret >= 1
    port = replace(
        topology, levels=(replace(topology.levels[0], uplinks=2, slow_ports=((2, 1, 0.1),)), topology.levels[1])
    )
    assert sp.place(mesh, port, {"data": 1e9}).degraded.units == ("l0[2].1",)
    # Every group of an axis across nodes meets every node: no renaming helps.
    assert found.gain == pytest.approx(1.0)
    broken = {"data": [("broadcast", 1e9, 1)]}
    chain = sp.place(mesh, slow, broken, algorithm="ring", bounds={("data", "l0"): (4, 4)}).degraded
    assert chain is not None
    # The end of a chain sends nothing on, its start receives nothing: still each must pass the slow port once.
    assert chain.gain == pytest.approx(1.0)
    shift = sp.place(mesh, slow, broken, bounds={("data", "l0"): (2, 2)})
    assert shift[0].seconds > 0


@pytest.mark.parametrize(
    ("levels", "slow", "before", "after", "renaming"),
    [
        # A binomial tree over four nodes: 0 sends to 2, then 0 to 1 and 2 to 3. Node 0, at a tenth of the rate, makes
        # both rounds last 10. Swapped with node 1, at half of it, they last 2 and 10; swapped with node 3, 1 and 10.
        (((4, 1e9),), ((0, 0.1), (1, 0.5)), 10 + 10, 1 + 10, (3, 1, 2, 0)),
        # In two racks of two a slow node takes part in both rounds unless its own neighbour stands in for it.
        (((2, 1e12), (2, 1e9)), ((2, 0.1),), 10 + 10, 1 + 10, (0, 1, 3, 2)),
    ],
)
def test_the_best_renaming_is_taken_among_siblings(levels, slow, before, after, renaming):
    topology = switches(*levels)
    *outer, last = topology.levels
    topology = replace(topology, levels=(*outer, replace(last, degraded=slow)))
    ranking = sp.place(sp.Mesh(data=4), topology, {"data": [("broadcast", 1e9, 1)]}, programs="stock", algorithm="tree")
    found = ranking.degraded
    assert found is not None
    assert ranking[0].seconds == pytest.approx(before, rel=1e-6)
    assert found.gain == pytest.approx(before / after, rel=1e-6)
    assert found.renaming == renaming


def test_a_stock_program_is_not_called_exact():
    topology, mesh = switches((2, 1e9), (4, 1e10)), sp.Mesh(data=8)
    best, stock = (
        sp.place(mesh, topology, {"data": 1e9}, programs=kind, algorithm="ring")[0] for kind in ("best", "stock")
    )
    assert best.seconds < stock.seconds
    assert [row.plans["data",].certificate.status for row in (best, stock)] == ["exact", "heuristic"]


def test_two_members_attain_the_bound_of_a_demand():
    # A kilobyte each way in a microsecond, and a microsecond of latency; both steps of it.
    (row,) = sp.place(sp.Mesh(data=2), switches((2, 1e9)), {"data": [("all_gather", 1e3, 2)]})
    assert row.lower_bound_seconds == pytest.approx(row.seconds, rel=1e-9)
    assert row.lower_bound_seconds == pytest.approx(2 * 2e-6, rel=1e-9)


def test_the_gain_of_placing_is_the_worst_over_the_best_of_stock_collectives():
    # Best programs rank placements otherwise than stock collectives do.
    job = sp.Mesh(a=4, b=4), switches((4, 1e9), (4, 1e11)), {"a": [("reduce", 1e8, 1)], "b": 1e8}
    found, stock = (sp.place(*job, programs=kind, algorithm="ring") for kind in ("best", "stock"))
    assert found[0].placement != stock[0].placement
    assert found.placement_gain == pytest.approx(stock[-1].seconds / stock[0].seconds, rel=1e-9)


def test_a_renaming_gains_nothing_from_what_has_no_program():
    topology = switches((4, 1e10), (8, 1e11))
    slow = replace(topology, levels=(replace(topology.levels[0], degraded=((2, 0.5),)), topology.levels[1]))
    traffic = {("data",): 1e9, ("tensor",): [("permute", 1e9, 1)]}
    found = sp.place(sp.Mesh(data=4, tensor=8), slow, traffic).degraded
    assert found is not None
    assert found.gain == pytest.approx(1.0)
    assert found.renaming is None


def test_a_slow_unit_changes_the_choice():
    # Two racks of two nodes: healthy, data lies across racks; with a slow rack port it moves inside.
    topology = switches((2, 4e10), (2, 1e10), (2, 1e11))
    mesh = sp.Mesh(data=2, tensor=4)
    traffic = {"data": 4e9, "tensor": [("all_reduce", 1e8, 1)]}
    slow = replace(topology, levels=(replace(topology.levels[0], degraded=((1, 0.01),)), *topology.levels[1:]))
    healthy, degraded = sp.place(mesh, topology, traffic), sp.place(mesh, slow, traffic)
    report = degraded.degraded
    assert report is not None
    assert report.healthy == replace(healthy[0].placement, topology=slow)
    assert report.regret == pytest.approx(
        next(r.seconds for r in degraded if r.placement.matrix == healthy[0].placement.matrix) / degraded[0].seconds
    )


def test_options_and_errors():
    mesh, topology = sp.Mesh(data=4, tensor=4), switches((4, 1e9), (4, 1e11))
    inside = sp.place(mesh, topology, {"data": 1e9}, inside={"tensor": "l1"})
    assert [r.placement.matrix for r in inside] == [((4, 1), (1, 4))]
    with pytest.raises(LayoutError, match="a mesh needs its traffic"):
        sp.place(mesh, topology)
    with pytest.raises(LayoutError, match=r"unknown axis 'pipe': the mesh has data=4, tensor=4"):
        sp.place(mesh, topology, {"pipe": 1e9})
    with pytest.raises(LayoutError, match="op 'sum' is unknown; legal: all_reduce"):
        sp.place(mesh, topology, {"data": [("sum", 1e9, 1)]})
    with pytest.raises(LayoutError, match="there is no traffic to place"):
        sp.place(mesh, topology, {"data": 0})
    with pytest.raises(LayoutError, match=r"all_reduce of -1 bytes, 1\.0 times; legal are finite numbers of 0 or more"):
        sp.place(mesh, topology, {"data": -1})
    with pytest.raises(LayoutError, match=r"no placement of .* satisfies the options"):
        sp.place(mesh, topology, {"data": 1}, bounds={("data", "l0"): (3, 3)})
    with pytest.raises(LayoutError, match="programs='fast' is unknown; legal are 'best' and 'stock'"):
        sp.place(mesh, topology, {"data": 1}, programs="fast")
    with pytest.raises(TopologyError, match="a placement needs equal counts"):
        sp.place(sp.Mesh(data=3), topology, {"data": 1})
    assert [e.axes for e in demands_of({("tensor", "data"): 5}, mesh)] == [("data", "tensor")]
    assert list(itertools.islice(iter(inside), 1)) == [inside[0]]


@pytest.mark.parametrize("preset", ["dgx-a100", "dgx-h100", "dgx-b200", "p5-efa"])
def test_a_small_reduction_is_one_collective_under_nccl(preset):
    """To launch costs, and the library's own all-reduce is hierarchical: three launches are not made for 4 KiB."""
    topology = sp.Topology.load(preset, nodes=2)
    mesh = sp.Mesh(data=topology.size)
    for nbytes in (256, 4096):
        (row,) = sp.place(mesh, topology, {"data": nbytes})
        assert [step.op.name for step in row.plans["data",].program.steps] == ["all_reduce"]
        assert row.seconds == row.stock_seconds >= topology.device.launch > 0


def test_an_axis_stays_inside_a_unit():
    """Of pod, node and gpu: inside a node is on gpus; a gpu is one device, so the unit around it is meant."""
    topology = sp.Topology("t", tuple(Level(name, 4, "switch", 1e9, 0.0) for name in ("pod", "node", "gpu")))
    mesh = sp.Mesh(a=4, b=16)
    wanted = {"pod": {(1, 1, 4), (1, 4, 1), (1, 2, 2)}, "node": {(1, 1, 4)}, "gpu": {(1, 1, 4)}}
    for level, rows in wanted.items():
        found = sp.place(mesh, topology, {"a": 1e9}, inside={"a": level})
        assert {row.placement.matrix[0] for row in found} == rows
    with pytest.raises(LayoutError) as caught:
        sp.place(mesh, topology, {"a": 1e9}, inside={"b": "node"})
    assert str(caught.value) == (
        "axis 'b' of size 16 cannot stay inside a node of 4 devices (pod=4 x node=4 x gpu=4); legal is a size that "
        "divides 4, or a level further out"
    )
    with pytest.raises(LayoutError, match="satisfies the options; to stay inside: a=node, c=node"):
        sp.place(sp.Mesh(a=4, b=4, c=4), topology, {"a": 1e9}, inside={"a": "node", "c": "node"})
    with pytest.raises(TopologyError, match="inside: unknown axis 'x': the mesh has a=4, b=16"):
        sp.place(mesh, topology, {"a": 1e9}, inside={"x": "node"})


@pytest.mark.parametrize(("behind", "left"), [("0.5 s", 1.5), ("90%", 0.2), ("3 s", 0.0), ("0%", 2.0), ("100%", 0.0)])
def test_what_runs_behind_compute_costs_what_sticks_out(behind, left):
    """1 GB twice in a ring of two over ports of 1 GB/s is 2 s."""
    topology = sp.Topology("t", (Level("l0", 2, "switch", 1e9, 0.0),))
    for traffic in ({"a": [("all_reduce", 1e9, 2, behind)]}, f"a=1GB*2 behind {behind}"):
        (row,) = sp.place(sp.Mesh(a=2), topology, traffic, algorithm="ring")
        assert (row.seconds, row.stock_seconds) == pytest.approx(
            (left, left)
        ) and row.lower_bound_seconds <= row.seconds
    (demand,) = demands_of(traffic, sp.Mesh(a=2))
    said = {"0.5 s": " behind 500 ms", "0%": ""}.get(behind, f" behind {behind}")
    assert str(demand) == f"all_reduce over a: 1 GB x 2{said}"


def test_of_equal_placements_the_more_local_comes_first():
    """All of it is hidden, so every placement costs nothing; `b` has ten times the bytes of `c`, and `a` has none."""
    topology = switches((2, 1e9), (2, 1e9), (2, 1e9))
    found = sp.place(sp.Mesh(a=2, c=2, b=2), topology, "c=1MB behind 1 s, b=10MB behind 100%")
    assert {row.seconds for row in found} == {0.0}
    assert found[0].placement.matrix == ((2, 1, 1), (1, 2, 1), (1, 1, 2))
    # 4 groups of two units: an all-reduce passes its payload twice.
    assert found[0].crossing_bytes == (0.0, 8e6, 8e6 + 8e7)
    assert list(found) == sorted(found, key=lambda row: row.crossing_bytes)


def test_what_leaves_units_in_an_all_to_all_is_counted_pair_by_pair():
    topology, mesh, nbytes = switches((2, 1e9), (2, 1e9), (2, 1e9)), sp.Mesh(a=4, b=2), 12e6
    for row in sp.place(mesh, topology, {"a": [("all_to_all", nbytes, 3)]}):
        ids = row.placement.device_mesh().reshape(4, 2)
        for crossed, stride in zip(row.crossing_bytes, topology.strides, strict=True):
            pairs = [(x, y) for group in ids.T.tolist() for x in group for y in group]
            apart = sum(x // stride != y // stride for x, y in pairs)
            assert crossed == pytest.approx(3 * nbytes / 4 * apart)
