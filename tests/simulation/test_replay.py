"""Scripts timed: links are shared fairly, full duplex and by all groups; devices go on at their own pace."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardplan as sp
from conformance import cases
from shardplan.core.ops import AllGather, AllReduce, Op, ReduceScatter
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.errors import ShardplanError, TopologyError
from shardplan.hardware.level import Level
from shardplan.hardware.placement import Placement
from shardplan.hardware.prices.fabric import Fabric, Flows, busiest
from shardplan.hardware.prices.group_loads import resource_starts, routes
from shardplan.hardware.topology import Topology
from shardplan.hardware.topology_file import presets
from shardplan.plans.pricing import Where
from shardplan.simulation.engine import Uses, fair_rates
from shardplan.simulation.replay import Constants, replayed
from shardplan.simulation.script import Script, ScriptError, ScriptRound, Stage
from shardplan.simulation.scripts import script_of
from shardplan.simulation.switch_tree import Tree
from shardplan.simulation.timeline import Timeline
from simulation.fluid import script_seconds

OUTER, INNER = 1e6, 1e7  # bytes per second
CLUSTER = Topology("2x4", (Level("node", 2, "switch", OUTER, 0.0), Level("gpu", 4, "switch", INNER, 0.0)))
FLAT = Topology("4", (Level("gpu", 4, "switch", 1e6, 0.25),))
PLACES = (
    Topology("", (Level("node", 2, "switch", 1e6, 1e-3, uplinks=2), Level("gpu", 3, "switch", 1e7, 1e-4))),
    Topology("", (Level("chip", 6, "torus", 1e6, 1e-4, shape=(2, 3)),)),
    Topology("", (Level("node", 2, "switch", 1e6, 0.0), Level("gpu", 2, "full", 1e6, 1e-5))),
)
MESH = sp.Mesh(data=2, tensor=4)
FREE = Constants(latency=0.0)


def program(text: str, *ops: Op, mesh: sp.Mesh = MESH) -> Program:
    steps = [Step(op, (str(k),), (str(k + 1),)) for k, op in enumerate(ops)]
    return Program({"0": sp.TensorType.parse(text, mesh)}, steps, (str(len(ops)),))


def simulate(what: Program | Script, where: Where, **options: Any) -> Timeline:
    return replayed(script_of(what) if isinstance(what, Program) else what, where, **options)


def stage(step: int, *messages: tuple[int, int, int]) -> Stage:
    return Stage(step, (ScriptRound(*np.array(messages).T),))


def script(*messages: tuple[int, int, int], kind: str = "send") -> Script:
    """One message after another posted, all at once, by (sender, receiver, bytes)."""
    return Script((stage(0, *messages),), (kind,), (kind,))


def test_a_ring_alone_is_its_closed_form() -> None:
    """2 (q - 1) rounds, each a q-th of the shard and a latency."""
    p = program("f32[1000]{+x}", AllReduce(("x",)), mesh=sp.Mesh(x=4))
    assert simulate(p, FLAT).seconds == pytest.approx(6 * (1000 / 1e6 + 0.25))
    slow = simulate(p, FLAT, constants=Constants(latency=0.5, payload_share=0.5))
    assert slow.seconds == pytest.approx(6 * (2000 / 1e6 + 0.5))


def test_groups_that_share_a_link_share_its_rate() -> None:
    """Four groups over the node's link take four times as long as one: what costing one group alone would miss."""
    one = Program({"0": sp.TensorType.parse("f32[1000]{+x}", pair := sp.Mesh({"x": 2}, devices=(0, 4)))},
                  [Step(AllReduce(("x",)), ("0",), ("1",))], ("1",))  # fmt: skip
    assert pair.size == 2
    alone, together = (simulate(p, CLUSTER, constants=FREE).seconds
                       for p in (one, program("f32[1000]{+data}", AllReduce(("data",)))))  # fmt: skip
    assert alone == pytest.approx(2 * 2000 / OUTER)
    assert together == pytest.approx(4 * alone)


def test_a_placement_decides_which_links() -> None:
    p = program("f32[1000]{+data}", AllReduce(("data",)))
    near, far = Placement(MESH, CLUSTER, ((1, 2), (2, 2))), Placement(MESH, CLUSTER, ((2, 1), (1, 4)))
    inside, across = (simulate(p, where, constants=FREE).seconds for where in (near, far))
    assert inside == pytest.approx(2 * 2000 / INNER)
    assert across == pytest.approx(2 * 4 * 2000 / OUTER)


def test_both_directions_of_a_link_are_full() -> None:
    swap = script((0, 1, 1000), (1, 0, 1000))
    one = script((0, 1, 1000))
    apart, host = ([simulate(s, FLAT, constants=FREE, shared=x).seconds for s in (one, swap)] for x in (False, True))
    assert apart == pytest.approx([1e-3, 1e-3])
    assert host == pytest.approx([1e-3, 2e-3])  # a shared loopback is half duplex


def test_incast_and_a_bottleneck_elsewhere() -> None:
    """Two senders into one receiver halve; a third flow takes what they leave of its own sender's link."""
    found = simulate(script((0, 2, 1000), (1, 2, 1000), (1, 3, 1500)), FLAT, constants=FREE)
    assert found.seconds == pytest.approx(2.5e-3)  # 1 sends 2500 bytes
    assert {i.device: i.end for i in found.intervals} == pytest.approx({0: 2e-3, 1: 2.5e-3, 2: 2e-3, 3: 2.5e-3})


def test_messages_of_a_pair_keep_their_order() -> None:
    found = simulate(script((0, 1, 1000), (0, 1, 500)), FLAT)
    assert found.seconds == pytest.approx(0.25 + 1.5e-3)  # both latencies at once, the bytes one after another
    rounds = (stage(0, (0, 1, 1000)).rounds + stage(0, (0, 1, 500), (1, 2, 1000)).rounds,)
    handed_on = simulate(Script((Stage(0, *rounds),), ("x",), ("x",)), FLAT)
    assert handed_on.seconds == pytest.approx(2 * (0.25 + 1e-3))  # device 1 has the first message first


def test_what_starts_alone_again_may_be_longer() -> None:
    stages = [stage(k, (0, to, n)) for k, (to, n) in enumerate([(1, 1000), (1, 500), (2, 500), (1, 1000)])]
    found = simulate(Script(tuple(stages), ("x",) * 4, ("x",) * 4), FLAT)
    assert found.seconds == pytest.approx(4 * 0.25 + 3e-3)


def test_a_bucket_lets_the_first_bytes_through() -> None:
    constants = Constants(latency=0.0, bucket=400, burst=1e8)
    quick = 400 / (1e8 - 1e6)  # the bucket fills while it empties
    one = simulate(script((0, 1, 1000)), FLAT, constants=constants).seconds
    assert one == pytest.approx(quick + (1000 - 1e8 * quick) / 1e6)
    assert one < 1000 / 1e6
    assert simulate(script((0, 1, 300)), FLAT, constants=constants).seconds == pytest.approx(300 / 1e8)


def test_an_idle_link_saves_up_to_its_bucket() -> None:
    """A second message, long after the first one, has one full bucket and no more."""
    constants = Constants(latency=0.5, bucket=400, burst=1e8)
    quick = 400 / (1e8 - 1e6)
    one = 0.5 + quick + (1000 - 1e8 * quick) / 1e6
    both = Script((stage(0, (0, 1, 1000)), stage(1, (0, 1, 1000))), ("x", "y"), ("x", "y"))
    assert simulate(both, FLAT, constants=constants).seconds == pytest.approx(2 * one)


def test_a_message_waits_for_its_receiver() -> None:
    """Device 1 takes one message in its first stage, and another, long posted, in its second: latencies add up."""
    found = simulate(Script((stage(0, (2, 1, 1000)), stage(1, (0, 1, 1000))), ("x", "y"), ("x", "y")), FLAT)
    once = 0.25 + 1e-3
    assert {(i.device, i.step): i.end for i in found.intervals} == pytest.approx(
        {(2, 0): once, (1, 0): once, (0, 1): 2 * once, (1, 1): 2 * once}
    )


def test_a_message_has_the_latency_of_the_outermost_level_it_crosses() -> None:
    levels = (Level("node", 2, "switch", OUTER, 0.5), Level("gpu", 4, "switch", INNER, 0.25))
    for receiver, seconds in ((1, 0.25 + 1000 / INNER), (4, 0.5 + 1000 / OUTER)):
        assert simulate(script((0, receiver, 1000)), Topology("", levels)).seconds == pytest.approx(seconds)


def test_a_message_flows_beside_a_longer_one() -> None:
    """Across nodes a millisecond later than inside, and done while the other is still under way."""
    levels = (Level("node", 2, "switch", OUTER, 1e-3), Level("gpu", 4, "switch", INNER, 0.0))
    found = simulate(script((0, 1, 40_000), (2, 6, 1000)), Topology("", levels))
    assert {i.device: i.end for i in found.intervals} == pytest.approx({0: 4e-3, 1: 4e-3, 2: 2e-3, 6: 2e-3})


def test_a_degraded_link_is_slow_both_ways() -> None:
    slow = Topology("", (Level("node", 2, "switch", OUTER, 0.0, degraded=((1, 0.25),)), CLUSTER.levels[1]))
    for pair, rate in (((0, 4), OUTER / 4), ((4, 0), OUTER / 4), ((4, 5), INNER)):
        assert simulate(script((*pair, 1000)), slow).seconds == pytest.approx(1000 / rate)


def test_devices_go_on_at_their_own_pace() -> None:
    """The group on the fast links is in its second step while the other, on the slow one, is still in its first."""
    mixed = sp.Mesh({"g": 2, "x": 2}, devices=(0, 1, 2, 4))
    gather, reduce = AllGather(0, ("x",)), ReduceScatter(0, ("x",))
    p = program("f32[1000]{+x}", reduce, gather, mesh=mixed)
    found = simulate(p, CLUSTER, constants=FREE)
    ends = {(i.device, i.step): i.end for i in found.intervals}
    assert ends[0, 1] < ends[2, 0]
    assert ends[0, 1] == pytest.approx(2 * 2000 / INNER)
    assert ends[2, 1] == pytest.approx(2 * 2000 / OUTER)


def test_the_timeline_is_one() -> None:
    inner = ("tensor",)
    p = program("f32[1024]{+data,+tensor}", ReduceScatter(0, inner), AllReduce(("data",)), AllGather(0, inner))
    found = simulate(p, CLUSTER)
    assert found.source == "predicted"
    assert found.devices == tuple(range(8))
    assert sum(i.seconds for i in found.critical_path) == pytest.approx(found.seconds)
    assert list(found.breakdown) and set(found.breakdown) <= {"reduce_scatter", "all_reduce", "all_gather"}
    for k, step in enumerate(p.steps):
        want = step.op.received_bytes(*p.step_types(step)[0]).tolist()
        assert [i.received_bytes for d in range(8) for i in found.intervals if i.step == k and i.device == d] == want


def test_bounds_on_every_program() -> None:
    """No faster than its busiest edge allows, no slower than all its bytes one after another over it."""
    tree = Tree(CLUSTER)
    for case in cases(5, 60, 8):
        found = script_of(case.program)
        load = tree.edge_bytes(found.payload())
        least = max((n / e.bandwidth for n, e in zip(load, tree.edges, strict=True)), default=0.0)
        most = sum(n / e.bandwidth for n, e in zip(load, tree.edges, strict=True))
        seconds = simulate(case.program, CLUSTER).seconds
        assert least * (1 - 1e-6) <= seconds <= most * (1 + 1e-6) + 1e-9, case.name


def test_what_is_no_script_is_an_error() -> None:
    for message in ((0, 1, 0), (1, 1, 8)):
        with pytest.raises(ScriptError, match=r"^a message of a script has at least one byte, and goes to another"):
            script(message)
    with pytest.raises(TopologyError, match=r"^level 'gpu' is no switch with one uplink, whose devices share a link$"):
        simulate(script((0, 1, 8)), Topology("", (Level("gpu", 4, "ring", 1e6, 0.0),)), shared=True)
    with pytest.raises(ShardplanError, match="a payload share above 0"):
        Constants(payload_share=0)


def messages(draws: st.DataObject, devices: int) -> Script:
    """A script of some stages and rounds, with messages of a few sizes between any devices, several a pair.

    In a stage up to three rounds are under way at once.
    """
    pair = st.tuples(st.integers(0, devices - 1), st.integers(0, devices - 1)).filter(lambda p: p[0] != p[1])
    message = st.tuples(pair, st.sampled_from((100, 1000, 1700))).map(lambda m: (*m[0], m[1]))
    rounds = st.lists(st.lists(message, min_size=1, max_size=6), min_size=1, max_size=3)
    stages = draws.draw(st.lists(st.tuples(rounds, st.integers(1, 3)), min_size=1, max_size=3))
    made = [(tuple(ScriptRound(*np.array(one).T) for one in stage), flying) for stage, flying in stages]
    return Script(tuple(Stage(k, *one) for k, one in enumerate(made)), ("x",) * len(made), ("x",) * len(made))


@given(st.data(), st.sampled_from(PLACES))
def test_scripts_are_as_the_plain_simulation_has_them(draws: st.DataObject, topology: Topology) -> None:
    script = messages(draws, topology.size)
    fabric = Fabric(topology)
    loads = {
        (a, b): routes(fabric, np.array([a]), np.array([b])) for a in range(topology.size) for b in range(topology.size)
    }
    capacity = np.ones(int(resource_starts(fabric)[-1]))
    for load in loads.values():
        capacity[load.resource] = 1 / load.seconds

    def way(a: int, b: int) -> tuple[list[int], float]:
        level = int(fabric.outermost_level(np.array([a]), np.array([b]))[0])
        return loads[a, b].resource.tolist(), topology.levels[level].latency

    found = simulate(script, topology)
    assert found.seconds == pytest.approx(script_seconds(script, way, capacity.tolist()), rel=1e-8)
    assert sum(i.received_bytes for i in found.intervals) == sum(script.payload().values())


@pytest.mark.parametrize("name", presets())
def test_every_preset_carries_messages(name: str) -> None:
    """No faster than the busiest port or link allows, no slower than one message after another."""
    topology = Topology.load(name)
    topology = topology.resize(node=2) if "node" in topology.describe() else topology
    last = topology.size - 1
    turn = script((0, last, 10**6), (last, 0, 10**6), (0, last // 2, 10**6), (1, last, 10**6), (last // 2, last, 10**6))
    fabric, table = Fabric(topology), turn.table()
    least = busiest(fabric.load(Flows(table.sender, table.receiver, table.nbytes.astype(float))))
    alone = [
        simulate(script(m), topology).seconds for m in zip(table.sender, table.receiver, table.nbytes, strict=True)
    ]
    assert max(least, *alone) * (1 - 1e-9) <= simulate(turn, topology).seconds <= sum(alone) * (1 + 1e-9)


@given(
    st.lists(st.sets(st.integers(0, 4), min_size=1).map(tuple), min_size=1, max_size=8),
    st.lists(st.floats(0.5, 100), min_size=5, max_size=5),
)
def test_rates_are_max_min_fair(paths: list[tuple[int, ...]], capacity: list[float]) -> None:
    """No edge is above its capacity, and each flow crosses a full edge on which none has a higher rate."""
    first = np.cumsum([0, *map(len, paths)])
    uses = Uses(first, np.concatenate(paths), np.ones(first[-1]), np.array(capacity))
    rates = fair_rates(uses, np.arange(len(paths)), uses.capacity).tolist()
    load = [sum(r for r, p in zip(rates, paths, strict=True) if e in p) for e in range(5)]
    assert all(n <= c * (1 + 1e-9) for n, c in zip(load, capacity, strict=True))
    for rate, path in zip(rates, paths, strict=True):
        assert any(
            load[e] >= capacity[e] * (1 - 1e-9)
            and rate >= max(r for r, p in zip(rates, paths, strict=True) if e in p) * (1 - 1e-9)
            for e in path
        )


def test_edges_of_a_tree() -> None:
    slow = Tree(Topology("", (Level("node", 2, "switch", 1e6, 0.0, degraded=((1, 0.25),)),)))
    assert [(e.name, e.bandwidth) for e in slow.edges] == [
        ("node[0] up", 1e6), ("node[0] down", 1e6), ("node[1] up", 2.5e5), ("node[1] down", 2.5e5)
    ]  # fmt: skip


def test_a_tree_of_several_uplinks_has_the_rails_of_its_fabric() -> None:
    """What every message loads, edge by edge, is what the events take: the same link for as long."""
    levels = (
        Level("pod", 2, "switch", 3e6, 0.0, uplinks=3, degraded=((1, 0.5),)),
        Level("node", 2, "switch", 2e6, 0.0, uplinks=8, slow_ports=((2, 5, 0.25),)),
        Level("gpu", 4, "switch", 9e6, 0.0, uplinks=2),
    )
    tree = Tree(Topology("", levels))
    fabric = tree.fabric
    ids = np.array(list(itertools.permutations(range(16), 2))).T
    loads = routes(fabric, *ids)
    assert len({e.name for e in tree.edges}) == len(tree.edges) == int(resource_starts(fabric)[-1])
    for row, (a, b) in enumerate(ids.T.tolist()):
        mine = sorted(1 / tree.edges[k].bandwidth for k in tree.path(a, b))
        assert mine == pytest.approx(sorted(loads.seconds[loads.row == row].tolist()))
    together = np.bincount(loads.resource, loads.seconds, int(resource_starts(fabric)[-1]))
    counted = tree.edge_bytes(dict.fromkeys(map(tuple, ids.T.tolist()), 1))
    seconds = [n / e.bandwidth for n, e in zip(counted, tree.edges, strict=True)]
    assert sorted(seconds) == pytest.approx(sorted(together.tolist()))


def test_paths_of_a_tree() -> None:
    deep = Topology("", tuple(Level(n, 2, "switch", 1.0, 0.0) for n in ("pod", "node", "gpu")))
    tree = Tree(deep)
    assert len(tree.edges) == 2 * (2 + 4 + 8)
    for a, b in itertools.product(range(8), repeat=2):
        there, back = tree.path(a, b), tree.path(b, a)
        names = [tree.edges[k].name for k in there]
        turned = [n.replace("up", "?").replace("down", "up").replace("?", "down") for n in names[::-1]]
        assert [tree.edges[k].name for k in back] == turned
        assert len(there) == (0 if a == b else 2 * (3 - [a // s == b // s for s in (4, 2, 1)].index(False)))
    host = Tree(deep, shared=True)
    assert [host.edges[k].name for k in host.path(2, 3)] == ["node[1] local"]
    assert [host.edges[k].name for k in host.path(0, 3)] == ["node[0] up", "node[1] down"]
    assert math.isclose(sum(host.edge_bytes({(2, 3): 8, (0, 3): 4})), 16)
