"""Audits: seconds, causes, and fixes that are run or read back."""

import itertools
import math
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardware.topologies import any_topology, route, switches, under_library
from launches.fixes import executed, split_by
from launches.rank_generator import rank_groups, takes
from launches.systems import linked_systems, placed, plain_groups, renaming, systems
from shardplan.core.mesh import Mesh
from shardplan.errors import LayoutError, ParseError, TopologyError
from shardplan.hardware import Fabric, Level, Placement, Topology, count, placements
from shardplan.launches.audit import ADVISED, WORTH, audit, leaving_bytes, stock_ranking, stock_seconds
from shardplan.launches.fixes import fix, nccl_split, ranks_by_coordinate, strided_text
from shardplan.launches.hostfile import Hosts, devices_of, host_names, launch_of, parse_hostfile, parse_rankfile
from shardplan.launches.launch import Launch
from shardplan.launches.megatron import takes_order
from shardplan.launches.verdict import analyse
from shardplan.movement.placing.traffic import OPS, Demand, demands_of, parse_traffic

A100X16 = Topology.load("gcp-a100x16", nodes=2)
SIX = Topology.load("gcp-a100x16").resize(nodes=2, gpus=6)


def traffic_of(draw, mesh):
    axes = [a for a in mesh.axes if mesh.shape[a] > 1]
    return {a: float(draw(st.integers(1, 1000))) * 1e6 for a in axes} or {mesh.axes[0]: 1e6}


@st.composite
def launches(draw, most=24, names=("data", "tensor", "pipeline", "context")):
    """A mesh on a system in any order of the devices, or where its ranks stand anyhow."""
    mesh, topology = draw(systems(most, names) | linked_systems(most, names[:2]))
    topology = draw(st.just(topology) | under_library(topology))
    kind = draw(st.sampled_from(["any", "placed", "cyclic"]))
    if kind == "placed":
        launch = Launch.of(draw(st.sampled_from(list(placements(mesh, topology)))))
    elif kind == "any":
        launch = Launch(mesh, topology, tuple(draw(st.permutations(range(topology.size)))))
    else:
        room = topology.strides[0]
        ids = tuple(r % topology.level_sizes[0] * room + r // topology.level_sizes[0] for r in range(topology.size))
        launch = Launch(mesh, topology, ids)
    return launch, traffic_of(draw, mesh)


@given(launches())
@settings(max_examples=60)
def test_the_fix_costs_what_the_best_matrix_costs(case):
    """The renumbered mesh (torch, JAX), the moved ranks (MPI) and the order string, each read back and audited."""
    launch, traffic = case
    found = audit(launch, traffic=traffic)
    ranking = stock_ranking(launch.mesh, launch.topology, demands_of(traffic, launch.mesh))
    assert len({row.placement.matrix for row in ranking}) == count(launch.mesh, launch.topology)
    assert ranking[0].seconds * (1 - 1e-9) <= found.best_seconds <= ranking[0].seconds * (1 + WORTH)
    assert found.seconds == pytest.approx(sum(s.seconds for s in found.shares))
    if found.fix is None:
        assert found.ratio <= 1 + ADVISED
        return
    assert found.ratio > 1 + ADVISED
    best = found.fix.placement
    table = launch.device_of_rank()
    ranks = ranks_by_coordinate(launch, best)
    again = Launch(Mesh(launch.mesh.shape, devices=ranks.reshape(-1).tolist()), launch.topology,
                   tuple(table[r] for r in ranks.reshape(-1).tolist()))  # fmt: skip
    after = audit(again, traffic=traffic)
    assert after.seconds == pytest.approx(found.best_seconds) and after.fix is None
    assert after.matrix == best.matrix and not after.findings.felt
    units = Hosts(host_names(launch), (), ())
    for text, read in ((found.fix.rankfile, parse_rankfile), (found.fix.hostfile, parse_hostfile)):
        if text is not None and launch.mesh.devices == tuple(range(launch.mesh.size)):
            moved = audit(launch_of(launch.mesh, launch.topology, read(text, hosts=units)), traffic=traffic)
            assert moved.seconds == pytest.approx(found.best_seconds)
            assert moved.matrix == best.matrix


@given(placed(most=24), st.randoms(use_true_random=False), st.sampled_from(sorted(OPS)), st.data())
@settings(max_examples=60)
def test_renaming_units_changes_no_seconds(placement, random, op, data):
    placement = data.draw(under_library(placement.topology).map(lambda t: replace(placement, topology=t)))
    traffic = {axis: [(op, 1e6, 1.0)] for axis in placement.mesh.axes}
    renamed = renaming(placement.topology, random)[placement.device_mesh()]
    now = audit(Launch.of(placement), traffic=traffic)
    then = audit(renamed, placement.mesh, placement.topology, traffic)
    assert then.verdict in ("canonical", "equivalent")
    assert [s.seconds for s in then.shares] == pytest.approx([s.seconds for s in now.shares])


@given(launches(names=("dp", "tp", "pp", "cp")))
@settings(max_examples=50)
def test_megatron_fixes_against_the_rank_generator(case):
    launch, _ = case
    table = launch.device_of_rank()
    for best in itertools.islice(placements(launch.mesh, launch.topology), 3):
        found = fix(launch, best)
        degrees = dict(launch.mesh.shape)
        if found.megatron_order is None:
            assert found.megatron.startswith("not expressible")
            order, devices = (
                "tp-cp-ep-dp-pp",
                devices_of(
                    parse_rankfile(found.megatron_rankfile, hosts=Hosts(host_names(launch), (), ())), launch.topology
                ),
            )
        else:
            assert f'order="{found.megatron_order}"' in found.megatron
            order, devices = found.megatron_order, [table[r] for r in range(launch.mesh.size)]
        for axis in launch.mesh.axes:
            units = []
            for group in rank_groups(order, degrees, {axis}):
                ids = [devices[r] for r in group]
                units.append([len({d // s for d in ids}) for s in launch.topology.strides])
            spans = np.cumprod(best.matrix[launch.mesh.axes.index(axis)]).tolist()
            assert all(u == spans for u in units)


def test_megatron_takes_every_order_of_a_fix():
    """Random meshes with experts, contexts and pipelines, their nodes in order or not, against its two assertions."""
    rng, found = random.Random(0), Counter()
    topology = Topology.load("dgx-h100", nodes=4)
    for _ in range(250):
        names = rng.sample(("tp", "cp", "ep", "dp", "pp"), rng.randint(2, 5))
        sizes = dict.fromkeys(names, 1)
        for _ in range(5):
            sizes[rng.choice(names)] *= 2
        nodes = rng.sample(range(4), 4) if rng.random() < 0.3 else range(4)
        launch = Launch(Mesh(sizes), topology, tuple(8 * node + gpu for node in nodes for gpu in range(8)))
        order = fix(launch, rng.choice(list(placements(launch.mesh, topology)))).megatron_order
        found[order is not None] += 1
        assert order is None or takes(order, sizes), (sizes, order)
    assert min(found.values()) > 20


@given(st.fixed_dictionaries({n: st.sampled_from([1, 2, 3, 4]) for n in ("tp", "cp", "ep", "dp", "pp")}))
def test_orders_are_taken_where_megatron_asserts_nothing(sizes):
    for names in itertools.permutations(sizes):
        assert takes_order("-".join(names), Mesh(sizes)) == takes("-".join(names), sizes), names


def test_a_fix_names_the_option_of_megatron():
    topology = Topology.load("dgx-h100", nodes=4)
    mesh = Mesh(pp=4, dp=2, tp=4)
    plain = Launch(mesh, topology, tuple(range(32)))
    matrices = {"default": ((4, 1), (1, 2), (1, 4)), "option": ((2, 2), (2, 1), (1, 4))}
    found = {k: fix(plain, Placement(mesh, topology, m)) for k, m in matrices.items()}
    assert found["default"].megatron.endswith("# Megatron-LM's default")
    assert found["option"].megatron.endswith("# Megatron-LM's option --use-tp-pp-dp-mapping")
    assert found["option"].use == "`--use-tp-pp-dp-mapping`"


@given(placed())
@settings(max_examples=60)
def test_nccl_tests_split_into_the_groups(placement):
    launch = Launch.of(placement)
    for size in range(1, len(placement.mesh.axes) + 1):
        for axes in itertools.combinations(placement.mesh.axes, size):
            groups = plain_groups(placement.mesh, launch.ids, axes)
            setting = nccl_split(launch.groups(axes))
            if setting is not None:
                assert split_by(setting, placement.mesh.size) == sorted(map(sorted, groups))
            else:
                # Every power-of-two set of digits has a mask, every run at either end a number.
                assert placement.topology.size & (placement.topology.size - 1)


def test_nccl_tests_settings():
    assert nccl_split(np.arange(16).reshape(2, 8)) == 'NCCL_TESTS_SPLIT="DIV 8"'
    assert nccl_split(np.arange(24).reshape(3, 8).T) == 'NCCL_TESTS_SPLIT="MOD 8"'
    middle = np.arange(16).reshape(2, 4, 2).transpose(0, 2, 1).reshape(4, 4)
    assert nccl_split(middle) == 'NCCL_TESTS_SPLIT="AND 0x9"'
    assert nccl_split(np.arange(12).reshape(2, 3, 2).transpose(0, 2, 1).reshape(4, 3)) is None


def cases():
    """Launches with every form of fix: row-major, literal, expression; ranks host by host and cyclic."""
    rng = np.random.default_rng(5)
    for levels, axes in (
        ((2, 8), (8, 2)),
        ((4, 4), (2, 4, 2)),
        ((2, 3), (3, 2)),
        ((4, 2, 8), (4, 16)),
        ((3, 4), (12,)),
    ):
        topology = switches(*levels)
        mesh = Mesh({f"a{k}": n for k, n in enumerate(axes)})
        n = topology.size
        cyclic = [r % levels[0] * (n // levels[0]) + r // levels[0] for r in range(n)]
        for ids in (range(n), cyclic, rng.permutation(n).tolist()):
            launch = Launch(mesh, topology, tuple(ids))
            for placement in placements(mesh, topology):
                yield launch, placement


def test_torch_and_jax_fixes_run():
    """What the texts make, executed, is the placement on the devices where the ranks run."""
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    every = list(cases())
    fixes = [fix(launch, placement, device="cpu") for launch, placement in every]
    forms = {"init_device_mesh": 0, "torch.tensor": 0, "torch.arange": 0, "create_device_mesh": 0, "np.array": 0}
    made = {}
    for name in ("torch", "jax"):
        texts = [
            {"text": getattr(f, name), "size": launch.mesh.size} for f, (launch, _) in zip(fixes, every, strict=True)
        ]
        made[name] = executed(name, texts)
    for k, (launch, placement) in enumerate(every):
        table = launch.device_of_rank()
        for name in ("torch", "jax"):
            one = made[name][k]
            assert tuple(one["names"]) == placement.mesh.axes
            ranks = np.array(one["ids"])
            assert ranks.shape == placement.mesh.sizes
            mesh = Mesh(placement.mesh.shape, devices=ranks.reshape(-1).tolist())
            found = analyse(Launch(mesh, launch.topology, tuple(table[r] for r in mesh.devices)))
            assert found.matrix == placement.matrix and found.verdict in ("canonical", "equivalent")
        for form in forms:
            forms[form] += f"{form}(" in fixes[k].torch + fixes[k].jax
        # torch sorts the members of its groups; where that costs something the fix says so.
        groups = [[table[r] for r in g] for g in made["torch"][k]["groups"]]
        lost = any(_crossings(g, s) > _least(g, s) for g in groups for s in launch.topology.strides)
        assert not lost or "sort_ranks=False" in fixes[k].torch_note
        if launch.ids == tuple(range(launch.mesh.size)):
            assert fixes[k].torch_note == ""
    assert min(forms.values()) > 0
    assert any(f.torch_note for f in fixes)


def _crossings(group, stride):
    units = [d // stride for d in group]
    return sum(a != b for a, b in zip(units, units[1:] + units[:1], strict=True))


def _least(group, stride):
    units = len({d // stride for d in group})
    return units if units > 1 else 0


@given(st.permutations([2, 3, 2, 4]), st.permutations(range(4)), st.sampled_from([(48,), (12, 4), (4, 3, 4)]))
@settings(max_examples=60)
def test_strided_texts_evaluate_to_the_array(sizes, order, shape):
    ids = np.arange(48).reshape(sizes).transpose(order).reshape(shape)
    text = strided_text(ids, "np.arange", "transpose")
    if text is not None:
        assert np.array_equal(eval(text, {"np": np}), ids)
    shuffled = np.random.default_rng(0).permutation(48)
    assert strided_text(shuffled, "np.arange", "transpose") is None


def test_tensor_across_nodes():
    found = audit(range(32), Mesh(tensor=2, data=16), A100X16, {"tensor": 2e9, "data": 1e6})
    assert (found.verdict, found.matrix) == ("canonical", ((2, 1), (1, 16)))
    assert found.cause == "`tensor` spans 2 nodes: 16 groups share each NIC"
    assert found.best.matrix == ((1, 2), (2, 8))
    assert found.rows[0].spans == ((2, 2), (2, 2)) and found.rows[0].per_uplink == (16, 1)
    assert found.ratio == found.seconds / found.best_seconds > 10
    # 16 groups of 2 send 2 GB each out of a node.
    assert found.shares[0].uplink_bytes[0] == pytest.approx(16 * 2e9)


@pytest.mark.parametrize(
    ("ids", "mesh", "topology", "traffic", "cause"),
    [
        (range(32), Mesh(data=2, tensor=16), A100X16, {"tensor": 1e9}, "no matrix is faster for this traffic"),
        (range(32), Mesh(tensor=4, data=8), Topology.load("dgx-a100"), {"tensor": 1e9},
         "`tensor` spans 4 nodes: 8 groups share 8 NICs of 25 GB/s; it could span 1"),
        ([r % 2 * 6 + r // 2 for r in range(12)], Mesh(data=12), SIX, {"data": [("reduce_scatter", 1e9, 1)]},
         "the rings over `data` pass between nodes 12 times, 2 would do"),
        ([r % 2 * 16 + r // 2 for r in range(32)], Mesh(data=32), A100X16, {"data": [("all_to_all", 1e9, 1)]},
         "no matrix is faster for this traffic"),
        ([*range(1, 8), 0], Mesh(data=4, tensor=2), Topology.load("dgx-a100").resize(nodes=2, gpus=4), {"tensor": 1e9},
         "2 of the 4 groups over `tensor` span 2 nodes where a placement has 1"),
        (np.arange(12).reshape(6, 2).T.reshape(-1), Mesh(tensor=2, data=6), SIX,
         {("tensor", "data"): [("reduce_scatter", 1e9, 1)]},
         "the rings over `tensor`, `data` pass between nodes 4 times, 2 would do: list the members of these groups in "
         "the order of their devices"),
    ],
)  # fmt: skip
def test_causes(ids, mesh, topology, traffic, cause):
    found = audit(ids, mesh, topology, traffic)
    assert found.cause == cause


def test_causes_are_where_load_goes_away():
    """`a` leaves its pod by an uplink of 8 GB/s for 8 groups and its node by a NIC of 1 GB/s for 4: it is the NIC."""
    rates = {"pod": (2, 8e9), "node": (2, 1e9), "gpu": (4, 1e11)}
    topology = Topology("", tuple(Level(name, n, "switch", rate, 0.0) for name, (n, rate) in rates.items()))
    found = audit(range(16), Mesh(a=2, b=2, c=4), topology, {"a": 1e8, "c": 1e6})
    assert found.cause == "`a` spans 2 nodes: 4 groups share each NIC" and found.fix is not None


def test_the_worst_cause_is_the_first():
    """Over `a` 10 MB cross pods at 0.1 GB/s, over `b` 100 MB nodes at 1 GB/s: a loses 0.8 s, b 0.4 s."""
    rates = {"pod": (2, 1e8), "node": (2, 1e9), "gpu": (4, 1e10)}
    topology = Topology("", tuple(Level(name, n, "switch", rate, 0.0) for name, (n, rate) in rates.items()))
    wanted = ("`a` spans 2 pods: 8 groups share each uplink of a pod", "`b` spans 2 nodes: 4 groups share each NIC")
    for axes in itertools.permutations("abc"):
        traffic = {axis: {"a": 1e7, "b": 1e8, "c": 1e6}[axis] for axis in axes}
        assert audit(range(16), Mesh(a=2, b=2, c=4), topology, traffic).causes == wanted


def test_the_order_string_is_that_of_where_ranks_run():
    """Ranks in turn on two hosts: to have tp inside a host it must be the slow one, and host by host the fast one."""
    mesh, topology = Mesh(dp=2, tp=2), switches(2, 2)
    inside = Placement(mesh, topology, ((2, 1), (1, 2)))
    orders = {ids: fix(Launch(mesh, topology, ids), inside).megatron_order for ids in ((0, 1, 2, 3), (0, 2, 1, 3))}
    assert orders == {(0, 1, 2, 3): "tp-cp-ep-dp-pp", (0, 2, 1, 3): "cp-ep-dp-tp-pp"}


RACKS = Topology("", tuple(replace(level, name=name) for level, name in zip(
    switches(2, 2, 4, uplinks=4).levels, ("rack", "node", "gpu"), strict=True)), library="nccl")  # fmt: skip


def test_nccl_feels_the_order_of_nodes_over_racks_alone():
    """It orders a node's members itself, and walks the nodes in the order of their first members."""
    data, one = {"data": 1e9}, Mesh(data=16)
    in_turn = [r % 4 * 4 + r // 4 for r in range(16)]
    found = audit(in_turn, one, RACKS, data)
    assert (found.verdict, found.fix, found.rows[0].detours) == ("interleaved", None, (0, 0, 0))
    assert found.ratio == pytest.approx(1)
    assert found.cause == "no matrix is faster for this traffic"
    assert found.findings.reason == (
        "the rings over `data` pass between racks 8 times, 2 would do; nccl orders members itself and does not feel it"
    )
    assert audit(in_turn, one, RACKS).fix is None
    # Nodes 0, 2, 1, 3: the racks in turn.
    across = [r // 4 % 2 * 8 + r // 8 * 4 + r % 4 for r in range(16)]
    found = audit(across, one, RACKS, data)
    assert (found.verdict, found.rows[0].detours) == ("interleaved", (2, 0, 0)) and found.ratio > 1.5
    assert found.cause == "the rings over `data` pass between racks 4 times, 2 would do"
    assert found.fix.placement.matrix == ((2, 2, 4),) and audit(across, one, RACKS).fix is not None
    # Which devices form a group is felt by all.
    found = audit(range(16), Mesh(tensor=4, data=4), RACKS, {"tensor": 1e9})
    assert found.ratio > 1.5
    assert found.cause == ("`tensor` spans 2 racks: 4 groups share 4 uplinks of a rack of 1 GB/s; it could span 1")


def test_no_note_on_sorted_ranks_where_the_library_orders_them():
    launch = Launch(Mesh({"data": 16}), RACKS, tuple(r % 4 * 4 + r // 4 for r in range(16)))
    best = Placement(launch.mesh, RACKS, ((2, 2, 4),))
    assert fix(launch, best).torch_note == ""
    assert "sort_ranks=False" in fix(replace(launch, topology=replace(RACKS, library="ring")),
                                     replace(best, topology=replace(RACKS, library="ring"))).torch_note  # fmt: skip


def test_without_traffic():
    topology = replace(Topology.load("dgx-a100", nodes=2), library="ring")
    found = audit(range(16), Mesh(data=8, tensor=2), topology)
    assert (found.seconds, found.ratio, found.fix, found.shares) == (None, None, None, ())
    assert found.cause == "no traffic is given, so nothing is known to be better than this matrix"
    cyclic = [r % 2 * 8 + r // 2 for r in range(16)]
    found = audit(cyclic, Mesh(data=16), topology)
    assert found.verdict == "interleaved" and found.fix.placement.matrix == ((2, 8),)
    found = audit(range(24), Mesh(data=8, tensor=3), Topology.load("dgx-a100", nodes=3))
    assert (found.verdict, found.best, found.fix) == ("not a placement", None, None)


def test_what_is_equally_good_stays():
    """Of equal matrices the launch's own is the best, and there is nothing to fix."""
    topology = switches(2, 2, bandwidth=1e9)
    for placement in placements(Mesh(a=2, b=2), topology):
        found = audit(Launch.of(placement), traffic={"a": 1e6, "b": 1e6})
        assert found.best.matrix == placement.matrix and found.fix is None


def test_the_best_order_on_a_ring_is_advised():
    """An axis of four should lie on neighbours of a ring of eight, and the fix puts it there."""
    ring = Topology("r", (Level("chip", 8, "ring", 1e9, 0.0),))
    plain = Placement(Mesh(data=4, tensor=2), ring, ((4,), (2,)))
    found = audit(Launch.of(plain), traffic={"data": 1e9})
    assert found.placement == plain
    assert found.best == replace(plain, order=(("tensor", "data"),))
    assert found.ratio > 1.5
    assert f"np.array({found.best.device_mesh().tolist()})" in found.fix.jax
    again = audit(Launch.of(found.best), traffic={"data": 1e9})
    assert (again.placement, again.best, again.ratio, again.fix) == (found.best, found.best, 1.0, None)


def messages_of(group, op, nbytes):
    """What the members of a group send under `ring`, by plain loops: (sender, receiver, bytes)."""
    k = len(group)
    if op == "all_to_all":
        return [(a, b, nbytes / k) for a, b in itertools.permutations(group, 2)]
    if op in ("broadcast", "permute", "reduce"):
        chain = group[::-1] if op == "reduce" else group
        return [(a, b, nbytes) for a, b in itertools.pairwise(chain)]
    share = {"all_reduce": 2 * (k - 1) / k, "reduce_scatter": (k - 1) / k, "all_gather": k - 1}[op]
    return [(a, b, nbytes * share) for a, b in zip(group, group[1:] + group[:1], strict=True)]


@given(any_topology(16), st.sampled_from(sorted(OPS)), st.data())
@settings(max_examples=80)
def test_bytes_that_leave_units(topology, op, data):
    """Against a router that goes hop by hop: on every link, and what a unit passes on counts."""
    k = data.draw(st.sampled_from([d for d in range(1, topology.size + 1) if topology.size % d == 0]))
    groups = np.array(data.draw(st.permutations(range(topology.size)))).reshape(-1, k)
    found = leaving_bytes(groups, Demand(("data",), op, 12.0, 2.0), Fabric(topology))
    wanted = [np.zeros(topology.size // stride) for stride in topology.strides]
    for group in groups.tolist():
        for sender, receiver, nbytes in messages_of(group, op, 24.0):
            for (j, unit, *where), _ in route(topology, sender, receiver) if sender != receiver else ():
                wanted[j][unit] += nbytes if where[0] != "in" else 0.0
    for sums, own in zip(found, wanted, strict=True):
        assert sums.sum(axis=1).tolist() == pytest.approx(own.tolist())


@pytest.mark.parametrize("nbytes", [1e3, 1e6, 1e9])
def test_the_load_of_a_nic(nbytes):
    """Every NIC of a node carries its part, whatever share of its rate the protocol reaches that is best at a size."""
    topology = Topology.load("dgx-h100", nodes=2)
    one = audit(range(16), Mesh(data=16), topology, {"data": [("all_gather", nbytes, 3)]}).shares[0]
    assert (one.uplink_bytes[0], one.port_bytes[0]) == pytest.approx((3 * 15 * nbytes, 3 * 15 * nbytes / 8))
    eight = audit(range(16), Mesh(data=2, tensor=8), topology, {"data": [("all_gather", nbytes, 1)]}).shares[0]
    assert (eight.uplink_bytes[0], eight.port_bytes[0]) == pytest.approx((8 * nbytes, nbytes))
    # Four devices deal eight NICs out among them.
    half = audit(range(8), Mesh(data=8), topology.resize(gpus=4), {"data": [("all_gather", nbytes, 1)]}).shares[0]
    assert (half.uplink_bytes[0], half.port_bytes[0]) == pytest.approx((7 * nbytes, 7 * nbytes / 8))


def test_ranking_prices_single_axes_as_the_launch_of_the_placement():
    mesh, topology = Mesh(data=8, tensor=4), Topology.load("dgx-a100")
    demands = demands_of({"data": 1e9, "tensor": [("all_gather", 1e6, 24), ("all_to_all", 5e6, 2)]}, mesh)
    fabric = Fabric(topology)
    ranking = stock_ranking(mesh, topology, demands)
    assert [row.seconds for row in ranking] == sorted(row.seconds for row in ranking)
    for row in ranking:
        launch, each = Launch.of(row.placement), [share.seconds for share in row.shares]
        assert each == pytest.approx([stock_seconds(launch.groups(d.axes), d, fabric) for d in demands], rel=1e-12)
    assert math.isclose(audit(Launch.of(ranking[-1].placement), traffic=demands).seconds, ranking[-1].seconds)


def test_traffic():
    mesh = Mesh(data=4, tensor=2)
    found = demands_of({("data", "tensor"): 5, "data": [("all_to_all", 1e6, 3)]}, mesh)
    assert found == (Demand(("data", "tensor"), "all_reduce", 5.0), Demand(("data",), "all_to_all", 1e6, 3.0))
    assert [str(d) for d in found] == ["all_reduce over data, tensor: 5 B", "all_to_all over data: 1 MB x 3"]
    text = "data=2GB, data + tensor = all_gather: 64 MB * 24, data=1 GiB"
    assert parse_traffic(text) == {
        ("data",): [("all_reduce", 2e9, 1.0), ("all_reduce", 2.0**30, 1.0)],
        ("data", "tensor"): [("all_gather", 64e6, 24.0)],
    }
    text = "data=reduce_scatter:2GB*3 behind 120 ms, data=1GB*1 behind 90%"
    assert parse_traffic(text) == {("data",): [("reduce_scatter", 2e9, 3.0, "120 ms"), ("all_reduce", 1e9, 1.0, "90%")]}
    assert demands_of("tensor=1MB, data=1GB behind 90%", mesh)[1].count == 7  # a bare size is a step's total
    assert demands_of(text, mesh) == (
        Demand(("data",), "reduce_scatter", 2e9, 3.0, hidden_seconds=0.12),
        Demand(("data",), "all_reduce", 1e9, hidden_part=0.9),
    )


@pytest.mark.parametrize(
    ("traffic", "message"),
    [
        ({"pipe": 1e9}, "unknown axis 'pipe': the mesh has data=4, tensor=2"),
        ({("data", "data"): 1e9}, "traffic over ('data', 'data'): legal are distinct axes, one or more; the mesh has"),
        (
            {"data": [("sum", 1e9, 1)]},
            "traffic over ('data',): op 'sum' is unknown; legal: all_reduce, reduce_scatter,",
        ),
        ({"data": -1.0}, "traffic over ('data',): all_reduce of -1.0 bytes, 1.0 times; legal are finite numbers of 0"),
        (
            {"data": [(1e9, 1)]},
            "traffic over ('data',): (1000000000.0, 1); legal are bytes, or rows (op, bytes, count)",
        ),
    ],
)
def test_traffic_errors(traffic, message):
    with pytest.raises(LayoutError) as caught:
        audit(range(8), Mesh(data=4, tensor=2), switches(2, 4), traffic)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "message", "column"),
    [
        ("data=2GB,tensor", "expected axes=bytes, such as data=2GB or data+tensor=all_gather:64MB*24, got 'tensor'", 9),
        ("data=2 parsecs", "'parsecs' is no unit of bytes; legal: B, kB, MB, GB, TB, KiB, MiB, GiB, TiB", 5),
        ("data=sum:2GB", "op 'sum' is unknown; legal: all_reduce, reduce_scatter, all_gather, reduce,", 5),
        (
            "a=1GB,data=2GB behind 110%",
            "'110%' is no part of the seconds; legal is 0% to 100%, or seconds such as 12",
            22,
        ),
        ("data=2GB behind it", "expected a non-negative number and a unit (s, ms, us, ns), got 'it'", 16),
    ],
)
def test_traffic_text_errors(text, message, column):
    with pytest.raises(ParseError) as caught:
        parse_traffic(text)
    assert str(caught.value).startswith(message) and caught.value.position == column


def test_errors():
    with pytest.raises(
        TopologyError, match="an array of device ids needs a mesh and a topology; a Launch brings its own"
    ):
        audit(range(8))
    with pytest.raises(
        TopologyError, match=r"ids of shape \(2, 4\) for mesh data=4, tensor=2; legal are \(4, 2\), and"
    ):
        audit(np.arange(8).reshape(2, 4), Mesh(data=4, tensor=2), switches(2, 4))


def test_large_systems_are_quick():
    topology = switches(64, 4, 8)
    mesh = Mesh(data=64, tensor=32)
    found = audit(range(2048), mesh, topology, {"data": 1e9, "tensor": 1e8})
    assert found.verdict == "canonical"
    best = Placement(mesh, topology, found.best.matrix)
    assert found.best_seconds <= found.seconds and count(mesh, topology) >= 5 and best.mesh is mesh
