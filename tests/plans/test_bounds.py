"""Lower bounds in seconds: entry bytes, cuts, and the collectives' bounds."""

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import shardplan as sp
import strategies as some
from hardware.topologies import GB, any_topology, grouped, route, switches
from shardplan.core.accounting import account, bound_bytes
from shardplan.core.pattern import Groups, Messages
from shardplan.hardware import Fabric, Level, Topology, price, seconds
from shardplan.movement.redistribution.choice import Rules, programs
from shardplan.movement.redistribution.single_move import _searched_candidates
from shardplan.plans import bounds
from shardplan.plans.bounds import Tiles, crossing, moves_bound
from shardplan.plans.collective_bounds import all_gather_bound, all_reduce_bound, reduce_scatter_bound
from shardplan.plans.pricing import boxes_on, price_program, seconds_bound

BOUNDS = {
    "all_reduce": all_reduce_bound,
    "reduce_scatter": reduce_scatter_bound,
    "all_gather": all_gather_bound,
}


LIBRARIES = ("ring", "nccl", "xla")


def cells(box):
    return set(itertools.product(*(range(lo, hi) for lo, hi in box)))


@st.composite
def tilings(draw):
    """Boxes of devices on both sides, as `seconds_bound` gives them: on one mesh or two, even or not, replicated."""
    kinds = ("even", "uneven", "rooted")
    s, t = draw(some.pairs(kinds, most=12) if draw(st.booleans()) else some.cross_pairs(12, marked=False))
    ids = np.array(sorted({*s.mesh.devices, *t.mesh.devices}))
    units = np.array(draw(st.lists(st.integers(0, 3), min_size=len(ids), max_size=len(ids))))
    return (boxes_on(s, ids), boxes_on(t, ids)), units


def true_crossing(src, dst, units):
    """What enters every unit, and by sets of units what leaves it, out of sets of cells."""
    inside = range(int(units.max()) + 1)
    has = [set().union(*(cells(src[d]) for d in np.flatnonzero(units == u))) for u in inside]
    needs = [set().union(*(cells(dst[d]) for d in np.flatnonzero(units == u))) for u in inside]
    leave = Counter()
    for cell in set().union(*has):
        holders = tuple(u for u in inside if cell in has[u])
        leave[holders] += any(cell in needs[u] for u in inside if u not in holders)
    return [len(needs[u] - has[u]) for u in inside], leave


def found_crossing(src, dst, units):
    source, target = Tiles.of(src), Tiles.of(dst)
    found = crossing(source, target, units)
    leave = Counter()
    for box, elements in enumerate(found.leave.tolist()):
        leave[tuple(found.holders[found.holders[:, 0] == box, 1].tolist())] += elements
    return found.enter.tolist(), leave


@given(tilings())
@settings(max_examples=150, deadline=None)
def test_what_crosses_equals_sets_of_cells(case):
    (src, dst), units = case
    assert found_crossing(src, dst, units) == true_crossing(src, dst, units)


@given(tilings())
@settings(max_examples=150, deadline=None)
def test_the_coarse_bound_is_a_bound(case):
    (src, dst), units = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounds, "_PAIRS", -1)
        enter, leave = found_crossing(src, dst, units)
    assert all(0 <= n <= most for n, most in zip(enter, true_crossing(src, dst, units)[0], strict=True))
    assert not any(leave.values())


def test_what_enters_is_what_the_unit_lacks(monkeypatch):
    # Of a row in quarters unit 0 holds the first half and unit 1 the second: of the whole row each lacks the other's.
    units = np.array([0, 0, 1, 1])
    quarters = np.array([[[0, 10]], [[10, 20]], [[20, 30]], [[30, 40]]])
    row, swapped = np.broadcast_to(np.array([[0, 40]]), (4, 1, 2)), quarters[[2, 3, 0, 1]]
    assert found_crossing(quarters, row, units) == ([20, 20], {(0,): 20, (1,): 20})
    # With the halves swapped all that they hold is of no use; with neighbours swapped all of it is.
    assert found_crossing(quarters, swapped, units) == ([20, 20], {(0,): 20, (1,): 20})
    assert found_crossing(quarters, quarters[[1, 0, 3, 2]], units) == ([0, 0], {(0,): 0, (1,): 0})
    # Held by both, what one wants need not leave them.
    halves = np.array([[[0, 20]], [[20, 40]], [[0, 20]], [[20, 40]]])
    assert found_crossing(halves, quarters, units) == ([0, 0], {(0, 1): 0})
    # The coarse bound attains the first; of the second it counts the largest box of a device, which is a quarter.
    monkeypatch.setattr(bounds, "_PAIRS", 0)
    assert found_crossing(quarters, row, units)[0] == [20, 20]
    assert found_crossing(quarters, swapped, units)[0] == [10, 10]


def test_the_coarse_bound_sees_that_a_unit_holds_something_else(monkeypatch):
    monkeypatch.setattr(bounds, "_PAIRS", -1)
    halves = np.array([[[0, 20]], [[20, 40]]])
    assert found_crossing(halves, halves[::-1], np.arange(2))[0] == [20, 20]


def test_boxes_of_one_unit_leave_it_together():
    # Each device of the first node has a cell for another node: its one way out carries both. A third cell stays.
    topology = Topology("t", (Level("node", 4, "switch", 1.0, 0.0), Level("gpu", 2, "switch", 100.0, 0.0)))
    held, wanted = ["a", "b", *4 * [""], "c", ""], ["", "", "a", "", "b", "", "c", ""]
    bound, *_ = cell_bound(topology, lettered(held), lettered(wanted))
    assert bound == pytest.approx(2)


def test_nothing_crosses_where_nobody_is():
    none = Tiles.of(np.zeros((0, 1, 2), int))
    assert crossing(none, none, np.zeros(0, int)).enter.tolist() == []


def test_gathering_a_row():
    topology = Topology("t", (Level("node", 2, "switch", GB, 5e-6, 2), Level("gpu", 2, "switch", 10 * GB, 1e-6)))
    src = np.array([[[0, 1000]], [[1000, 2000]], [[2000, 3000]], [[3000, 4000]]])
    dst = np.broadcast_to(np.array([[0, 4000]]), (4, 1, 2))
    fabric = Fabric(topology, launch=1e-6)
    # Each node lacks 2000 elements of 4 bytes and has two ports of 1 GB/s.
    assert moves_bound([(src, dst, 4)], np.arange(4), fabric).seconds == pytest.approx(1e-6 + 5e-6 + 8000 / 2e9)
    assert moves_bound([(src, src, 4)], np.arange(4), fabric).seconds == 0
    swapped = src[[1, 0, 3, 2]]
    assert moves_bound([(src, swapped, 4)], np.arange(4), fabric).seconds == pytest.approx(2e-6 + 4000 / 10e9)


def test_tensors_of_a_batch_share_the_wires():
    src = np.array([[[0, 1000]], [[1000, 2000]]])
    dst = np.broadcast_to(np.array([[0, 2000]]), (2, 1, 2))
    # Each device lacks 1000 elements of 4 bytes and 1000 of 2.
    bound = moves_bound([(src, dst, 4), (src, dst, 2)], np.arange(2), Fabric(switches(2))).seconds
    assert bound == pytest.approx((4000 + 2000) / GB)
    # One receiver, and a sender for each tensor; one sender, and a receiver for each.
    cell, none = [[0, 1000]], [[0, 0]]
    first, second, third = (np.array([cell if d == k else none for d in range(3)]) for k in range(3))
    for moves in ([(first, third, 4), (second, third, 2)], [(third, first, 4), (third, second, 2)]):
        assert moves_bound(moves, np.arange(3), Fabric(switches(3))).seconds == pytest.approx(6000 / GB)


@given(st.sampled_from(LIBRARIES), st.booleans(), st.one_of(some.pairs(some.KINDS), some.cross_pairs(), some.batches()))
@settings(max_examples=120, deadline=None)
# One of two members has all of a dim of one: a library's all-to-all is as long as its largest part.
@example("ring", False, tuple(sp.TensorType.parse(t, sp.Mesh(c=2)) for t in ("i32[1, 4@c]", "i32[1@c, 4]")))
def test_no_plan_beats_its_bound(library, flat, ends):
    levels = (Level("node", 12, "switch", GB, 5e-6, 2), Level("gpu", 4, "switch", 8 * GB, 1e-6))
    topology = Topology("t", levels[:1] if flat else levels, library=library)
    topology = replace(topology, levels=(replace(levels[0], size=48),)) if flat else topology
    try:
        c = sp.redistribute(*ends, topology=topology).certificate
    except sp.Infeasible:
        return
    assert c.lower_bound_seconds <= c.seconds * (1 + 1e-9)


DGX = sp.Topology.load("dgx-h100", nodes=4)


@given(st.one_of(some.pairs(), some.cross_pairs(most=16, marked=False)), st.sampled_from((1, 1 << 12, 1 << 20)))
@settings(max_examples=80, deadline=None)
def test_no_candidate_is_below_the_bound(ends, longer):
    """Not the best plan alone: whatever is proposed, small and large, also over a mesh that joins the two."""
    s, t = (sp.TensorType("bf16", (*x.shape, longer), (*x.layout.dims, ()), x.mesh) for x in ends)
    fabric, ids = Fabric(DGX), sorted({*s.mesh.devices, *t.mesh.devices})
    most = bound_bytes([s], [t])
    rules = Rules(most, fabric=fabric)
    for program, _ in programs(_searched_candidates(s, t, rules), s, t, rules, set()):
        if account(program).peak_bytes > most:  # shards on the way are larger than at the ends
            continue
        found, bound = price_program(program, fabric), seconds_bound([s], [t], fabric, program.meshes)
        assert bound.seconds <= found.seconds * (1 + 1e-9)
        assert bound.transfer <= found.transfer * (1 + 1e-9)
    joined = sp.Mesh({"all": len(ids)}, devices=ids)
    wide, narrow = (seconds_bound([s], [t], fabric, meshes) for meshes in ((joined,), ()))
    assert wide.seconds <= narrow.seconds and wide.transfer <= narrow.transfer


def between(a, b):
    """A tensor of 64 MB, cut evenly on either side."""
    s = sp.TensorType("bf16", (1 << 25,), ("x",), sp.Mesh({"x": len(a)}, devices=a))
    return s, s.with_layout(sp.Layout((("y",),)), sp.Mesh({"y": len(b)}, devices=b))


def test_what_goes_between_meshes_goes_as_messages():
    """Eight ports of 46.5 GB/s, of which messages reach 0.8; a mesh over all would carry it at that of gathers."""
    s, t = between(range(8), range(8, 16))
    whole = s.nbytes / (8 * 0.93 * 50e9)
    fabric, everyone = Fabric(DGX), sp.Mesh(all=16)
    assert seconds_bound([s], [t], fabric).transfer == pytest.approx(whole / 0.8)
    assert seconds_bound([s], [t], fabric, (everyone,)).transfer == pytest.approx(whole / 1.0)
    plan = sp.redistribute(s, t, topology=DGX)
    assert plan.seconds == pytest.approx(plan.certificate.lower_bound_seconds, rel=1e-3)
    assert plan.certificate.status == "floor"


def test_only_ways_of_devices_that_take_part_count():
    s, t = between(range(4), range(8, 12))
    assert seconds_bound([s], [t], Fabric(DGX)).transfer == pytest.approx(s.nbytes / (4 * 0.8 * 0.93 * 50e9))


def test_meshes_in_one_node_share_no_island():
    """On either side of a border inside the nodes ports of devices count, at the share of messages there."""
    s, t = between((0, 1, 2, 3), (4, 5, 6, 7))
    assert seconds_bound([s], [t], Fabric(DGX)).transfer == pytest.approx(s.nbytes / (4 * 0.746 * 450e9))
    # A mesh over both nodes on either side: what leaves a node may do so in a gather, if there is room for its result.
    for a, b in (((0, 1, 8, 9), (10, 11, 2, 3)), ((0, 1, 2, 3, 8, 9, 10, 11), (8, 9, 10, 11, 0, 1, 2, 3))):
        s, t = between(a, b)
        assert seconds_bound([s], [t], Fabric(DGX)).transfer == pytest.approx(s.nbytes / 2 / (4 * 0.8 * 0.93 * 50e9))
    s = s.with_layout(sp.Layout((("x",),)), sp.Mesh(x=4, free=2, devices=(0, 4, 1, 5, 8, 12, 9, 13)))
    t = s.with_layout(s.layout, sp.Mesh(x=4, free=2, devices=(8, 12, 9, 13, 0, 4, 1, 5)))
    assert seconds_bound([s], [t], Fabric(DGX)).transfer == pytest.approx(s.nbytes / 2 / (4 * 1.0 * 0.93 * 50e9))


def test_what_stays_is_copied():
    """A device copies what it has beside what it receives, in 0.578 of the time of as much on the wire."""
    mesh = sp.Mesh(x=2)
    s, t = (sp.TensorType("bf16", (1 << 14, 1 << 14), dims, mesh) for dims in (("x",), (None, "x")))
    quarter, rate = s.nbytes / 4, 0.746 * 450e9
    found = seconds_bound([s], [t], Fabric(sp.Topology.load("dgx-h100", nodes=1)))
    assert found.transfer == pytest.approx((1 + 0.578) * quarter / rate)


def test_copies_beyond_the_first_are_gathered():
    """Two nodes want all of it: once it is sent, and then copies come at the share of gathers, to all devices."""
    s, _ = between(range(16), range(8))
    t = s.with_layout(sp.Layout(((),)), sp.Mesh({"y": 16}, devices=range(16, 32)))
    sent, gathered = s.nbytes / (16 * 0.8 * 0.93 * 50e9), 15 * s.nbytes / (16 * 0.874 * 450e9)
    assert seconds_bound([s], [t], Fabric(DGX)).transfer == pytest.approx(sent + gathered)
    # Two tensors may be sent while others are gathered: only what enters the nodes adds up.
    both = 2 * s.nbytes / (16 * 0.93 * 50e9) * (1 / 0.8 + 1 / 1.0)
    assert seconds_bound([s, s], [t, t], Fabric(DGX)).transfer == pytest.approx(both)


def test_a_row_that_starts_sooner_is_slower():
    """Few bytes go at the start of LL, many at that of Simple: never the start of one with the rate of the other."""
    for longer in (1 << 12, 1 << 20, 1 << 28):
        s, t = between(range(8), range(8, 16))
        s, t = (sp.TensorType("bf16", (8, longer), (x.layout.dims[0], ()), x.mesh) for x in (s, t))
        plan = sp.redistribute(s, t, topology=DGX)
        assert plan.certificate.lower_bound_seconds > 0.85 * plan.seconds


def test_a_batch_that_reduces_attains_its_bound_in_seconds():
    mesh, n = sp.Mesh(a=2), 250_000
    source = sp.TensorType("f32", (n,), (None,), mesh, partial={"a": "sum"})
    target = sp.TensorType("f32", (n,), (None,), mesh, root=("a",))
    plan = sp.redistribute([source, source], [target, target], topology=switches(2, latency=5e-6))
    # One message with the addends of both tensors.
    assert plan.seconds == pytest.approx(5e-6 + 2 * 4 * n / GB, rel=1e-9)
    assert plan.certificate.lower_bound_seconds == pytest.approx(plan.seconds, rel=1e-9)


@st.composite
def rows_in_tiles(draw, n, cells=12):
    """A row of cells cut into tiles, each on a device at least, the other devices with one of them or nothing."""
    count = draw(st.integers(1, min(n, cells, 4)))
    cuts = [0, *sorted(draw(st.permutations(range(1, cells)))[: count - 1]), cells]
    tiles = [*range(count), *(draw(st.integers(-1, count - 1)) for _ in range(n - count))]
    tiles = draw(st.permutations(tiles))
    return np.array([[[cuts[k], cuts[k + 1]] if k >= 0 else [0, 0]] for k in tiles])


@given(any_topology(), st.data(), st.sampled_from(LIBRARIES))
@settings(max_examples=150, deadline=None)
def test_no_exchange_beats_the_bound(topology, data, library):
    n = topology.size
    src, dst = data.draw(rows_in_tiles(n)), data.draw(rows_in_tiles(n))
    sender, receiver = [], []
    for d in range(n):
        for c in range(*dst[d, 0]):
            holders = [h for h in range(n) if src[h, 0, 0] <= c < src[h, 0, 1]]
            if d not in holders:
                sender.append(data.draw(st.sampled_from(holders)))
                receiver.append(d)
    fabric = Fabric(replace(topology, library=library))
    pattern = Messages(np.array(sender, np.int64), np.array(receiver, np.int64), np.full(len(sender), 1000.0))
    bound = moves_bound([(src, dst, 1000)], np.arange(n), fabric).seconds
    assert bound <= seconds(pattern, fabric) * (1 + 1e-9)
    assert (bound > 0) == bool(sender)


def ways(n, holders, wanters):
    """Every way in which one cell reaches those that want it: messages, each device hearing from at most one other."""
    others = [d for d in range(n) if d not in holders]
    for senders in itertools.product(range(-1, n), repeat=len(others)):
        sender = {d: s for d, s in zip(others, senders, strict=True) if s >= 0}
        reached, size = set(holders), -1
        while size < len(reached):
            size = len(reached)
            reached |= {d for d, s in sender.items() if s in reached}
        if reached >= wanters | set(sender):
            yield [(s, d) for d, s in sender.items()]


def optimum(topology, held, wanted):
    """The least seconds of the busiest resource over all routes of all cells, relays included, by enumeration."""
    n = topology.size
    names = {}  # resources in the order in which they are met
    pairs = {}
    for a, b in itertools.permutations(range(n), 2):
        pairs[a, b] = [(names.setdefault(r, len(names)), 1 / rate) for r, rate in route(topology, a, b)]

    def load(messages):
        seconds = [0.0] * len(names)
        for pair in messages:
            for resource, part in pairs[pair]:
                seconds[resource] += part
        return tuple(seconds)

    def least(loads):
        kept = []
        for one in sorted(set(loads), key=sum):
            if not any(all(a <= b for a, b in zip(other, one, strict=True)) for other in kept):
                kept.append(one)
        return kept

    total = [(0.0,) * len(names)]
    for holders, wanters in zip(held, wanted, strict=True):
        found = least(map(load, ways(n, holders, wanters)))
        total = least(tuple(x + y for x, y in zip(a, b, strict=True)) for a in total for b in found)
    return min(map(max, total))


TWO_SLOW = Topology("slow", (Level("device", 4, "switch", 1.0, 0.0, degraded=((0, 0.25), (1, 0.25))),))
SMALL = (
    TWO_SLOW,
    Topology("flat", (Level("device", 4, "switch", 1.0, 0.0, degraded=((0, 0.25),)),)),
    Topology("three", (Level("device", 3, "switch", 1.0, 0.0),)),
    Topology("nodes", (Level("node", 2, "switch", 1.0, 0.0), Level("gpu", 2, "switch", 4.0, 0.0))),
    Topology("ring", (Level("device", 4, "ring", 1.0, 0.0),)),
    Topology("linked", (Level("node", 2, "full", 1.0, 0.0), Level("gpu", 2, "full", 2.0, 0.0))),
)


def cell_bound(topology, src, dst):
    """The bound in seconds of bytes laid out in rows, and who holds and wants every cell."""
    sides = [[{d for d in range(len(x)) if x[d, 0, 0] <= c < x[d, 0, 1]} for c in range(x.max())] for x in (src, dst)]
    return moves_bound([(src, dst, 1)], np.arange(topology.size), Fabric(topology)).seconds, *sides


def lettered(side):
    """Boxes of a row of cells a, b, ..., given by device as text."""
    return np.array([[[ord(x[0]) - ord("a"), ord(x[-1]) - ord("a") + 1] if x else [0, 0]] for x in side])


@given(st.sampled_from(SMALL), st.data())
@settings(max_examples=60, deadline=None)
def test_no_bound_is_above_the_optimum(topology, data):
    src, dst = (data.draw(rows_in_tiles(topology.size, 3)) for _ in range(2))
    bound, held, wanted = cell_bound(topology, src, dst)
    assert bound <= optimum(topology, held, wanted) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("topology", "held", "wanted", "least"),
    [
        # A receiver: device 3 lacks three cells.
        (SMALL[2], ["abc", "", ""], ["abc", "abc", ""], 3),
        # A sender: what only device 1 holds leaves it, wherever it goes.
        (SMALL[2], ["abc", "", ""], ["", "a", "bc"], 3),
        # A sender whose port is slow.
        (SMALL[1], ["ab", "c", "", ""], ["", "", "abc", ""], 8),
        # A node, though every device takes in one cell only.
        (SMALL[3], ["a", "b", "", ""], ["", "", "a", "b"], 2),
        # Of what two slow devices hold each sends a half: four cells over twice 0.25 a second.
        (TWO_SLOW, ["abcd", "abcd", "", ""], ["", "", "ab", "cd"], 8),
        # A chain of relays sends each cell once out of its holder.
        (SMALL[2], ["ab", "", ""], ["ab", "ab", "ab"], 2),
    ],
)
def test_bounds_that_the_optimum_attains(topology, held, wanted, least):
    bound, *sides = cell_bound(topology, lettered(held), lettered(wanted))
    assert bound == pytest.approx(least) == pytest.approx(optimum(topology, *sides))


def test_all_holders_together_attain_their_bound():
    # Three slow nodes hold each of three cells twice: two of them could send one in 2 s, all three send three in 4 s.
    outer = Level("node", 5, "switch", 1.0, 0.0, degraded=((0, 0.25), (1, 0.25), (2, 0.25)))
    topology = Topology("t", (outer, Level("gpu", 2, "switch", 100.0, 0.0)))
    held, wanted = ["a", "b", "b", "c", "c", "a", "", "", "", ""], [*6 * [""], "a", "b", "c", ""]
    bound, *_ = cell_bound(topology, lettered(held), lettered(wanted))
    sent = Messages(np.array([0, 2, 4]), np.array([6, 7, 8]), np.ones(3))
    assert bound == pytest.approx(4) == pytest.approx(seconds(sent, Fabric(topology)))


@given(any_topology(), st.data(), st.sampled_from(sorted(BOUNDS)), st.sampled_from(LIBRARIES))
@settings(max_examples=150, deadline=None)
def test_no_collective_beats_its_bound(topology, data, kind, library):
    members, nbytes = data.draw(grouped(topology))
    fabric = Fabric(replace(topology, library=library))
    bound = BOUNDS[kind](members, nbytes, fabric)
    for name in fabric.library.algorithms():
        found = price(Groups(kind, members, nbytes), fabric, name)
        assert bound <= found.transfer * (1 + 1e-9)
        assert found.alpha >= fabric.first_hop() or found.algorithm == "none"
    assert (bound > 0) == (members.shape[1] > 1)


@pytest.mark.parametrize("k", [2, 3, 8])
def test_the_ring_is_optimal_on_a_switch(k):
    fabric = Fabric(switches(k))
    members, nbytes = np.arange(k)[None, :], np.array([1e9])
    for kind, bound in BOUNDS.items():
        assert bound(members, nbytes, fabric) == pytest.approx(
            price(Groups(kind, members, nbytes), fabric, "ring").transfer
        )


def test_count_bound_gives_what_a_cut_misses():
    topology = Topology("t", (Level("node", 4, "switch", GB, 0.0), Level("gpu", 2, "switch", 100 * GB, 0.0)))
    assert all_reduce_bound(np.arange(8)[None, :], np.array([1e9]), Fabric(topology)) == pytest.approx(2 * 3 / 4)


def test_gather_bound_takes_complements():
    # ForestColl: M/N max |S| / capacity out of S; the complement of a degraded unit is the bottleneck.
    level = Level("node", 4, "switch", GB, 0.0, degraded=((3, 0.25),))
    members, nbytes = np.arange(4)[None, :], np.array([1e9])
    assert all_gather_bound(members, nbytes, Fabric(Topology("t", (level,)))) == pytest.approx(3 / 0.25)


@pytest.mark.parametrize(("kind", "slow", "share"), [("all_gather", 0, 3), ("reduce_scatter", 1, 3 / 4)])
def test_what_a_unit_gives_out_bounds_it_too(kind, slow, share):
    # Three members in one node and one in the other: to gather, 3 B leave the first and B enters it; to scatter sums,
    # three of four parts of B leave the second and one enters it. The ring moves no more, and each way out is slow.
    outer = Level("node", 2, "switch", GB, 0.0, degraded=((slow, 0.25),))
    fabric = Fabric(Topology("t", (outer, Level("gpu", 3, "switch", 1000 * GB, 0.0))))
    members, nbytes = np.arange(4)[None, :], np.array([1e9])
    assert BOUNDS[kind](members, nbytes, fabric) == pytest.approx(share / 0.25)
    assert price(Groups(kind, members, nbytes), fabric, "ring").transfer == pytest.approx(share / 0.25)


def test_ring_arcs():
    # Half a ring of 8 must receive half of all data over two links.
    ring = Fabric(Topology("r", (Level("gpu", 8, "ring", GB, 0.0),)))
    members, nbytes = np.arange(8)[None, :], np.array([1e9])
    assert all_gather_bound(members, nbytes, ring) == pytest.approx(7 / 2)
    ends = np.array([[0, 4], [1, 5], [2, 6], [3, 7]])
    assert all_reduce_bound(ends, np.full(4, 1e9), ring) == pytest.approx(4 / 2)


def test_in_network_reduction_keeps_only_cuts():
    level = Level("node", 4, "switch", GB, 0.0, reduces=True)
    fabric = Fabric(Topology("n", (level,)))
    members, nbytes = np.arange(4)[None, :], np.array([1e9])
    assert all_reduce_bound(members, nbytes, fabric) == pytest.approx(1.0)
    assert seconds(Groups("all_reduce", members, nbytes), fabric) == pytest.approx(1.0)
