"""Library models: their tables, and what a row makes of a collective, against plain loops."""

import dataclasses
import math
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardware.topologies import GB, grouped
from shardplan.core.pattern import AtOnce, Groups, Messages, StepPattern
from shardplan.errors import ParseError, TopologyError
from shardplan.hardware import Fabric, Level, Topology, presets, price, seconds
from shardplan.hardware.level import DeviceSpec
from shardplan.hardware.prices.affine_costs import affine_costs
from shardplan.hardware.prices.cost import KINDS
from shardplan.hardware.prices.library import (
    ALGORITHM_NAMES,
    Library,
    LibraryRow,
    libraries,
    library,
    library_text,
    parse_library,
)
from shardplan.hardware.prices.traffic import ALGORITHMS

OPS = ("all_reduce", "all_gather", "reduce_scatter", "reduce", "broadcast")
TABLE = Library(
    "t",
    (
        LibraryRow("ring", "Simple", OPS, 8e-6, 30e-6, 1.5, 3e-6, 0.8, 0.9),
        LibraryRow("ring", "LL", OPS, 1e-6, 2e-6, 0.5, 0.0, 0.3, 0.4),
        LibraryRow("tree", "LL", ("all_reduce",), None, 2e-6, 0.6, 1e-6, 0.3, 0.4),
        LibraryRow("nvls", "Simple", ("all_reduce",), 12e-6, None, near_share=0.75, members=3, per_member=0.01),
        LibraryRow("nvls_tree", "Simple", ("all_reduce",), None, 50e-6, far=2e-6, near_share=0.75, far_share=0.9),
        LibraryRow("collnet", "Simple", ("all_reduce",), None, 60e-6, near_share=0.75, far_share=0.95),
        LibraryRow("p2p", "Simple", ("all_to_all", "messages"), 5e-6, 9e-6, 0.5, 1e-6, 0.7, 0.8),
    ),
    own_copy=0.5,
)


def fabric_with(topology, table):
    made = Fabric(topology)
    made.library = table
    return made


def cluster(n, g, nics=1, racks=0, reduces=False, network=False):
    levels = [
        Level("node", n, "switch", 50 * GB, 9e-6, nics, efficiency=0.9, reduces=network),
        Level("gpu", g, "switch", 400 * GB, 2e-6, reduces=reduces),
    ]
    if racks:
        levels = [Level("rack", racks, "switch", 100 * GB, 11e-6, 2), *levels]
    return Topology("c", tuple(levels), DeviceSpec((), math.inf, 2000 * GB, 4e-6))


# ---- the formula, by loops ----

VOLUME = {
    "all_reduce": lambda k: 2 * (k - 1) / k,
    "reduce_scatter": lambda k: (k - 1) / k,
    "all_gather": lambda k: k - 1,
    "reduce": lambda k: 1,
    "broadcast": lambda k: 1,
}


def double_tree(n):
    """What the busiest of n nodes sends over B, each tree carrying half of it up and down; by recursion on ranks."""
    if n < 2:
        return 0.0
    sent = [0.0] * n

    def parent(rank):
        if rank == 0:
            return None
        bit = rank & -rank
        up = (rank ^ bit) | (bit << 1)
        return up if up < n else rank ^ bit

    for rank in range(n):
        if (up := parent(rank)) is None:
            continue
        for low, high in (
            (rank, up),
            *([(n - 1 - rank, n - 1 - up)] if n % 2 == 0 else [((rank + 1) % n, (up + 1) % n)]),
        ):
            sent[low] += 0.5
            sent[high] += 0.5
    return max(sent)


def plain(row, table, kind, groups, nbytes, topology):
    """Seconds of a row for all groups at once; None where it does not serve them. Levels are switches."""
    levels, strides = topology.levels, topology.strides
    far = [level.name for level in levels].index("node") + 1
    load, latency, base, own = defaultdict(float), 0.0, row.base, 0.0
    for members, held in zip(groups, nbytes, strict=True):
        k, node_size = len(members), strides[far - 1]
        nodes = []
        for m in members:
            if m // node_size not in nodes:
                nodes.append(m // node_size)
        n = len(nodes)
        counts = [sum(m // node_size == node for m in members) for node in nodes]
        least, most = min(counts), max(counts)
        spans = [len({m // s for m in members}) for s in strides]
        crossed = [a > b for a, b in zip(spans, [1, *spans], strict=False)]
        inner = [level.reduces for level, c in zip(levels[far:], crossed[far:], strict=True) if c]
        outer = [level.reduces for level, c in zip(levels[:far], crossed[:far], strict=True) if c]
        if row.algorithm in ("nvls", "nvls_tree", "collnet") and (not inner or not all(inner) or least < row.members):
            return None
        if row.algorithm == "collnet" and not all(outer):
            return None
        base = row.base_far if n > 1 else base
        # One hop a new unit; trees are as deep as their logarithm, chains as long as a unit has members.
        times = 2 if kind == "all_reduce" else 1
        hop = [levels[j].latency + row.far if j < far else levels[j].latency * row.near for j in range(len(levels))]
        if row.algorithm == "ring":
            near = out = VOLUME[kind](k) * held
            hops = [times * (a - b) for a, b in zip(spans, [1, *spans], strict=False)]
        else:
            chain = row.algorithm == "tree"
            near = held * (min(2, most - 1) if chain else 1 + 1 / least + row.per_member * most)
            out = held * (1 if row.algorithm == "collnet" else double_tree(n))
            hops = [0] * len(levels)
            for j in range(far, len(levels)):
                inside = math.ceil(spans[j] / (spans[j - 1])) - 1
                hops[j] = (2 if chain else 1) * inside
            if n > 1:
                hops[crossed.index(True)] = 2 * math.ceil(math.log2(n))
        latency = max(latency, sum(h * t for h, t in zip(hops, hop, strict=True)))
        own = max(own, (held if kind == "all_gather" else held / k) if row.algorithm == "ring" else 0.0)
        for j, stride in enumerate(strides):
            for unit in {m // stride for m in members}:
                inside = [m for m in members if m // stride == unit]
                if len(inside) == k:
                    continue
                walk = [node * node_size // stride for node in nodes]
                leaves = (
                    sum(a == unit != b for a, b in zip(walk, walk[1:] + walk[:1], strict=True)) if j < far - 1 else 1
                )
                ways = min(levels[j].uplinks, stride)
                for m in inside:
                    port = unit, m % stride * ways // stride
                    rate = levels[j].bandwidth * levels[j].efficiency * levels[j].uplinks / ways
                    share = row.far_share if j < far else row.near_share
                    load[j, port] += leaves * (out if j < far else near) / len(inside) / (rate * share)
    copied = table.own_copy * own / (levels[-1].bandwidth * levels[-1].efficiency * row.near_share)
    return None if base is None else topology.device.launch + base + latency + max(load.values()) + copied


@st.composite
def clusters(draw):
    topology = cluster(
        draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.sampled_from([0, 0, 2, 3])),
        draw(st.booleans()), draw(st.booleans()),
    )  # fmt: skip
    if draw(st.booleans()) or topology.size == 1:
        members, nbytes = draw(grouped(topology))
    else:  # as meshes make them: every k-th device, in some order
        k = draw(st.sampled_from([d for d in range(2, topology.size + 1) if topology.size % d == 0]))
        ids = (
            np.arange(topology.size).reshape(k, -1).T
            if draw(st.booleans())
            else np.arange(topology.size).reshape(-1, k)
        )
        members, nbytes = ids[:, draw(st.permutations(range(k)))], np.full(len(ids), 1e6)
    return topology, members, nbytes


@given(clusters(), st.sampled_from(OPS))
@settings(max_examples=200, deadline=None)
def test_a_row_costs_what_its_formula_says(case, kind):
    topology, members, nbytes = case
    if members.shape[1] < 2:
        return
    fabric = fabric_with(topology, TABLE)
    legal = []
    for row in TABLE.rows[:6]:
        if kind not in row.ops:
            continue
        expected = plain(row, TABLE, kind, members.tolist(), nbytes.tolist(), topology)
        if expected is not None:
            legal.append(expected)
            assert seconds(Groups(kind, members, nbytes), fabric, row.name) == pytest.approx(expected, rel=1e-9), row
    assert seconds(Groups(kind, members, nbytes), fabric) == pytest.approx(min(legal), rel=1e-9)


@given(clusters(), st.sampled_from(KINDS))
@settings(max_examples=60, deadline=None)
def test_offers_are_the_price_at_every_size(case, kind):
    topology, members, _ = case
    if members.shape[1] < 2:
        return
    fabric = fabric_with(topology, TABLE)
    lines = affine_costs(kind, members, fabric)
    for nbytes in (1.0, 1e4, 1e6, 1e9):
        whole = seconds(Groups(kind, members, np.full(len(members), nbytes)), fabric)
        assert min(a + b * nbytes for a, b in lines) == pytest.approx(whole, rel=1e-9)


# ---- what follows ----


def all_reduce(members, nbytes=1e9):
    members = np.array(members)
    return Groups("all_reduce", members, np.full(len(members), float(nbytes)))


def test_the_order_of_ranks_inside_a_node_costs_nothing_and_that_of_nodes_over_racks_does():
    fabric = fabric_with(cluster(4, 4, 4), TABLE)
    ordered = np.arange(16)[None]
    dealt = np.arange(16).reshape(4, 4).T.reshape(1, -1)  # round-robin over nodes: every edge would cross
    assert price(all_reduce(ordered), fabric, "ring Simple") == price(all_reduce(dealt), fabric, "ring Simple")
    racks = fabric_with(cluster(2, 2, 2, racks=2), TABLE)
    along, across = np.arange(8)[None], np.array([[0, 1, 4, 5, 2, 3, 6, 7]])
    one, two = (price(all_reduce(m), racks, "ring Simple").load[0].max() for m in (along, across))
    assert two == pytest.approx(2 * one)


def test_channels_use_the_nics_of_all_members():
    one, eight = (fabric_with(cluster(2, 8, nics), TABLE) for nics in (1, 8))
    loads = [price(all_reduce(np.arange(16)[None]), f, "ring Simple").load[0].max() for f in (one, eight)]
    assert loads[0] == pytest.approx(8 * loads[1])
    # A group with one member a node has that member's NIC; eight of them have all.
    alone, beside = all_reduce([[0, 8]]), all_reduce(np.arange(16).reshape(2, 8).T)
    assert price(alone, eight, "ring Simple").seconds == pytest.approx(price(beside, eight, "ring Simple").seconds)


def test_messages_cost_what_the_same_all_to_all_does():
    fabric = fabric_with(cluster(3, 4, 2, racks=2), TABLE)
    members = np.arange(24)[None]
    sender, receiver = np.nonzero(~np.eye(24, dtype=bool))
    whole = price(Groups("all_to_all", members, np.array([24e6])), fabric)
    listed = price(Messages(sender, receiver, np.full(len(sender), 1e6)), fabric)
    assert listed.alpha == pytest.approx(whole.alpha)
    assert listed.transfer == pytest.approx(whole.transfer - whole.own)
    # Three partners inside, twenty outside started there too, two other nodes of the rack and three of the other rack.
    assert whole.alpha == pytest.approx(4e-6 + 9e-6 + 23 * 0.5 * 2e-6 + 2 * (9e-6 + 1e-6) + 3 * (11e-6 + 1e-6))


def test_slow_ports_slow_what_passes_them():
    topology = cluster(2, 8, 8)
    slow = dataclasses.replace(topology.levels[0], slow_ports=((0, 5, 0.5),))
    fabric = fabric_with(dataclasses.replace(topology, levels=(slow, topology.levels[1])), TABLE)
    healthy = fabric_with(topology, TABLE)
    pair = [all_reduce([[k, k + 8]]) for k in (4, 5)]
    loads = [[price(p, f, "ring Simple").load[0].max() for f in (fabric, healthy)] for p in pair]
    assert [a / b for a, b in loads] == pytest.approx([1, 2])


def test_switches_that_reduce_serve_inside_a_node_and_over_nodes_where_they_do():
    inside, over = all_reduce(np.arange(8)[None], 1e9), all_reduce(np.arange(16)[None], 1e9)
    switch = fabric_with(cluster(2, 8, 8, reduces=True), TABLE)
    assert price(inside, switch).algorithm == "nvls Simple"
    assert price(inside, switch).transfer == pytest.approx((1 + 1 / 8 + 0.08) * 1e9 / (400 * GB * 0.75))
    assert price(over, switch).algorithm == "nvls_tree Simple"
    assert price(inside, fabric_with(cluster(2, 8, 8), TABLE), "nvls").algorithm.startswith("ring")
    assert price(over, fabric_with(cluster(2, 8, 8, reduces=True, network=True), TABLE), "collnet").load[0].max() == (
        pytest.approx(1e9 / (8 * 50 * GB * 0.9 * 0.95))
    )


def torus(shape, link="torus"):
    size = math.prod(shape)
    level = Level("chip", size, link, GB, 0.0, shape=shape if link in ("torus", "mesh") else ())
    return Fabric(Topology("t", (level,), library="xla"))


def test_rings_use_all_links_of_the_dims_they_span():
    b = 1e9
    whole = all_reduce(np.arange(16)[None], b)
    volume = 2 * 15 / 16 * b / GB
    assert price(whole, torus((4, 4))).transfer == pytest.approx(volume / 4)
    assert price(whole, torus((4, 4), "mesh")).transfer == pytest.approx(volume / 2)
    assert price(whole, torus((16,))).transfer == pytest.approx(volume / 2)
    # One dim of four at a time, all four lines at once; strided groups of two share every link of their line.
    line = all_reduce(np.arange(16).reshape(4, 4), b)
    assert price(line, torus((4, 4))).transfer == pytest.approx(2 * 3 / 4 * b / GB / 2)
    pairs = all_reduce([[0, 2], [1, 3]], b)
    assert price(pairs, torus((4,))).transfer == pytest.approx(2 * 1 / 2 * b / GB * 2)
    # Half of a ring is a line: the ring through it goes there and back.
    assert price(all_reduce([[0, 1, 2, 3]], b), torus((8,))).transfer == pytest.approx(2 * 3 / 4 * b / GB)
    # A closed dim of four carries twice what an open one of two does.
    assert price(all_reduce(np.arange(8)[None], b), torus((4, 2))).transfer == pytest.approx(2 * 7 / 8 * b / GB / 3)
    # What is no grid is one ring each way: 0 - 1 - 3 on a square.
    assert price(all_reduce([[0, 1, 3]], b), torus((2, 2))).transfer <= 2 * 2 / 3 * b / GB


def test_rings_use_all_pairs_of_a_full_level():
    fabric = torus((8,), "full")
    b = 1e9
    assert price(all_reduce(np.arange(8)[None], b), fabric).transfer == pytest.approx(2 * 7 / 8 * b / GB / 7)
    assert price(all_reduce([[0, 5]], b), fabric).transfer == pytest.approx(b / GB)
    assert price(all_reduce([[0, 5], [1, 2], [3, 4]], b), fabric).transfer == pytest.approx(b / GB)
    everyone = Groups("all_to_all", np.arange(8)[None], np.array([8 * b]))
    assert price(everyone, fabric).transfer == pytest.approx(b / GB)


def test_what_runs_at_once_adds_its_loads_and_waits_once():
    fabric = fabric_with(cluster(2, 4), TABLE)
    one = Messages(np.array([0]), np.array([4]), np.array([1e9]))
    two = Messages(np.array([1]), np.array([5]), np.array([2e9]))
    near = all_reduce(np.arange(8).reshape(2, 4), 1e9)
    alone = [price(p, fabric) for p in (one, two, near)]
    everyone = np.arange(8)
    got = price(AtOnce(tuple(StepPattern(p, everyone) for p in (one, two, near))), fabric)
    assert got.alpha == max(p.alpha for p in alone)
    assert got.transfer == pytest.approx(alone[0].transfer + alone[1].transfer + alone[2].own)
    assert got.level_bytes == pytest.approx(np.sum([p.level_bytes for p in alone], axis=0))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(KINDS), st.lists(st.integers(6, 28), min_size=2, max_size=8), st.sampled_from([1, 2, 4]))
def test_collectives_alike_at_once_take_no_longer_than_one_of_all_their_bytes(kind, sizes, nodes):
    """A row that spares rounds for each of them alone loads links with more bytes: they share the rounds."""
    fabric = Fabric(Topology.load("dgx-h100", nodes=nodes))
    everyone = np.arange(fabric.topology.size)
    parts = [Groups(kind, everyone[None], np.array([2.0**n])) for n in sizes]
    found = seconds(AtOnce(tuple(StepPattern(p, everyone) for p in parts)), fabric)
    whole = seconds(Groups(kind, everyone[None], np.array([sum(2.0**n for n in sizes)])), fabric)
    assert max(seconds(p, fabric) for p in parts) <= found * (1 + 1e-12) and found <= whole * (1 + 1e-12)


@pytest.mark.parametrize("name", presets())
def test_prices_of_presets_are_monotone_in_bytes(name):
    topology = Topology.load(name)
    counts = (1, 2, 3, 4, 12, 64) if "node" in [level.name for level in topology.levels] else (1,)
    for n in counts:
        fabric = Fabric(topology if counts == (1,) else Topology.load(name, nodes=n))
        members = np.arange(fabric.topology.size)[None, :4096]
        for kind in KINDS:
            lines = affine_costs(kind, members, fabric) if members.size > 1 else ()
            assert all(a >= 0 and b > 0 for a, b in lines)
            costs = [min((a + b * 2.0**e for a, b in lines), default=e) for e in range(10, 34)]
            assert costs == sorted(set(costs)), (name, n, kind)


# ---- tables ----


@pytest.mark.parametrize("name", libraries())
def test_tables_print_and_serve_every_op(name):
    table = library(name)
    assert parse_library(library_text(table)) == table
    for op in (*KINDS, "messages"):
        assert table.serving(op), op
    assert set(ALGORITHMS) == set(ALGORITHM_NAMES)


def test_a_table_prints_whatever_text_it_holds():
    table = dataclasses.replace(TABLE, name='a "b"', measured='rows of "x\\y.jsonl",\na \x7f and a café')
    assert parse_library(library_text(table)) == table


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", "is no TOML"),
        ("name = 'x'", "at least one"),
        ("rows = [3]", "legal is a table"),
        ("[[rows]]\nalgorithm = 'rong'\nops = ['all_reduce']\nbase = '0 us'", "algorithm 'rong' is unknown"),
        ("[[rows]]\nalgorithm = 'ring'\nops = ['all_reduce']\nbase = 2.0", "base is 2.0; legal is a string"),
        ("[[rows]]\nalgorithm = 'ring'\nops = ['all_reduce']\nbase = '0 us'\nnear_share = 0", "near_share is 0; legal"),
        ("[[rows]]\nalgorithm = 'ring'\nops = 3\nbase = '0 us'", "ops is 3; legal is a list of names of collectives"),
        ("[[rows]]\nalgorithm = 'ring'\nops = ['all_reduce']\nspeed = 1", "unknown key 'speed'"),
        ("[[rows]]\nalgorithm = 'ring'\nops = ['allreduce']\nbase = '0 us'", "op 'allreduce' is unknown; legal: all_"),
        ("[[rows]]\nalgorithm = 'ring'\nops = ['all_reduce']\nbase = '2 parsec'", "library table: rows[0]: base: "),
        ("[[rows]]\nalgorithm = 'ring'\nops = ['all_reduce']", "neither base nor base_far is given"),
        ("sped = 1\n[[rows]]\nalgorithm = 'ring'\nops = ['all_reduce']", "unknown key 'sped'"),
    ],
)  # fmt: skip
def test_malformed_tables_get_one_line(text, message):
    with pytest.raises((TopologyError, ParseError), match=message.replace("[", r"\[")) as caught:
        parse_library(text)
    assert "\n" not in str(caught.value).split("\n")[0]


def test_unknown_libraries_and_missing_files_get_one_line(tmp_path):
    with pytest.raises(
        TopologyError, match="library 'nickel' is unknown; legal: gloo, nccl, rccl, ring, xla, or a path"
    ):
        library("nickel")
    with pytest.raises(TopologyError, match="cannot be read"):
        library(str(tmp_path / "none.toml"))
    table = tmp_path / "mine.toml"
    table.write_text(library_text(TABLE))
    assert library(str(table)) == TABLE
    assert Fabric(Topology("t", (Level("gpu", 2, "switch", GB, 0.0),), library=str(table))).library == TABLE
