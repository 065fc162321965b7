"""Pictures of placements: every cell stands on its device, bytes and crossings are the audit's, nothing is too wide."""

import itertools
import random
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardware.topologies import switches
from launches.systems import placed, plain_groups
from shardplan.core.mesh import Mesh
from shardplan.hardware import Fabric, Placement, Topology
from shardplan.launches.audit import leaving_bytes
from shardplan.launches.launch import Launch
from shardplan.movement.placing.traffic import demands_of
from shardplan.report.placement_picture import WIDTH, crossed, scene, text_placement
from shardplan.report.placement_svg import CELL, GAP, MARGIN, svg_placement

TRAFFIC = {"data": 2e9, "tensor": 5e8}


@given(placed(most=48), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_the_scene_is_the_launch(placement, random):
    ids = list(range(placement.topology.size))
    random.shuffle(ids)
    launch = Launch(placement.mesh, placement.topology, tuple(ids))
    mesh, topology = launch.mesh, launch.topology
    drawn = scene(launch, {mesh.axes[0]: 1e6}, most=64)
    seen = {}
    room = topology.size if drawn.level is None else topology.strides[topology.index(drawn.level.name)]
    for box in drawn.boxes:
        assert len(box.cells) == room
        for k, cell in enumerate(box.cells):
            device = box.units[0] * room + k
            seen[device] = cell
            place = launch.ids.index(device)
            assert (cell.rank, cell.coordinates) == (mesh.devices[place], mesh.coordinates(place))
    assert sorted(seen) == list(range(topology.size))
    for i, axis in enumerate(mesh.axes):
        by_number = {}
        for device, cell in seen.items():
            by_number.setdefault(cell.groups[i], set()).add(device)
            group = next(g for g in plain_groups(mesh, launch.ids, (axis,)) if device in g)
            assert cell.leaves[i] == (len({d // room for d in group}) > 1)
        assert sorted(map(sorted, by_number.values())) == sorted(map(sorted, plain_groups(mesh, launch.ids, (axis,))))
    if drawn.level is not None:
        demand = drawn.demands[0]
        out = leaving_bytes(launch.groups(demand.axes), demand, Fabric(topology))[topology.index(drawn.level.name)]
        assert [box.out[0] for box in drawn.boxes] == out.sum(axis=1).tolist()


@given(placed(most=48), st.booleans())
@settings(max_examples=60)
def test_pictures_are_narrow_and_well_formed(placement, loaded):
    traffic = {placement.mesh.axes[0]: 1e6} if loaded else None
    assert max(map(len, text_placement(placement, traffic).splitlines())) <= WIDTH
    ET.fromstring(svg_placement(placement, traffic))


def test_text():
    topology = replace(Topology.load("dgx-a100").resize(nodes=2, gpus=4), library="xla")  # rings alone
    launch = Launch(Mesh(data=4, tensor=2), topology, tuple(range(8)), hosts=("alpha", "beta"))
    assert text_placement(launch, TRAFFIC) == (
        "data=4, tensor=2 on dgx-a100 (node=2 x gpu=4): canonical\n"
        "\n"
        "axis    node  gpu\n"
        "data       2    2  spans 2 nodes, 2 groups leave each over 8 NICs\n"
        "tensor     1    2  stays inside\n"
        "\n"
        "+ node 0 (alpha) -- 6 GB out, up to 750 MB a NIC +\n"
        "| 0 (0, 0)  1 (0, 1)  2 (1, 0)  3 (1, 1)         |\n"
        "+------------------------------------------------+\n"
        "+ node 1 (beta) --- 6 GB out, up to 750 MB a NIC +\n"
        "| 4 (2, 0)  5 (2, 1)  6 (3, 0)  7 (3, 1)         |\n"
        "+------------------------------------------------+\n"
        "a cell is rank (data, tensor)"
    )


def test_no_placement_shows_what_groups_span():
    drawn = scene(Launch(Mesh(data=8, tensor=3), Topology.load("dgx-a100", nodes=3), tuple(range(24))))
    assert crossed(drawn) == [
        "spans 3 nodes, 3 groups leave each over 8 NICs",
        "spans 1 to 2 nodes, 2 groups leave each over 8 NICs",
    ]
    text = text_placement(drawn.launch)
    assert "axis    node  gpu  (units spanned: no matrix)" in text and "\ntensor   1-2    3  " in text


def test_large_clusters_are_elided():
    placement = Placement(Mesh(data=64, tensor=8), Topology.load("dgx-a100", nodes=64), ((64, 1), (1, 8)))
    text = text_placement(placement, TRAFFIC)
    assert "+ nodes 0-63: 64 alike " in text and "| 0-504 (0-63, 0) " in text and len(text.splitlines()) < 12
    assert "nodes 0-63: 64 alike" in svg_placement(placement)
    ids = list(range(512))
    random.Random(0).shuffle(ids)
    mixed = Launch(placement.mesh, placement.topology, tuple(ids))
    text = text_placement(mixed, TRAFFIC)
    assert "... 58 more nodes" in text and "+ node 63 " in text and len(text.splitlines()) < 40
    assert "... 56 more nodes" in svg_placement(mixed)
    wide = text_placement(Placement(Mesh(data=9, tensor=8), Topology.load("nvl72"), ((1, 9), (1, 8))))
    assert "... 40 more devices" in wide


@given(placed(most=48), st.integers(1, 6), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_alike_hosts_hold_the_mesh_in_the_same_way(placement, most, random):
    """Beside a picture of every host: those of a box differ in which coordinates they hold, not in how."""
    topology = placement.topology
    ids = list(range(topology.size))
    if random.random() < 0.5:
        i = random.randrange(len(ids))
        ids[0], ids[i] = ids[i], ids[0]
    launch = Launch(placement.mesh, topology, tuple(ids))
    traffic = dict.fromkeys(placement.mesh.axes, 1000000.0)
    whole, drawn = scene(launch, traffic, most=10**6), scene(launch, traffic, most=most)
    every = {box.units[0]: box for box in whole.boxes}
    assert drawn.hidden + sum(len(box.units) for box in drawn.boxes) == len(every) and len(drawn.boxes) <= max(2, most)
    for box in drawn.boxes:
        assert box.cells == every[box.units[0]].cells
        for k, (low, high) in enumerate(zip(box.least, box.greatest, strict=True)):
            alike = [every[unit].cells[k] for unit in box.units]
            ranks = sorted(cell.rank for cell in alike)
            assert (low.rank, high.rank) == (ranks[0], ranks[-1])
            for i in range(len(low.coordinates)):
                own = sorted((cell.coordinates[i], cell.groups[i]) for cell in alike)
                assert (low.coordinates[i], high.coordinates[i]) == (own[0][0], own[-1][0])
                assert low.groups[i] == min(g for _, g in own) and high.groups[i] == max(g for _, g in own)
        for own in (every[unit] for unit in box.units):
            assert (own.out, own.busiest) == (box.out, box.busiest)
            for i in range(len(placement.mesh.axes)):
                for a, b in itertools.combinations(range(len(box.cells)), 2):
                    shares = [x.cells[a].groups[i] == x.cells[b].groups[i] for x in (own, box)]
                    apart = [x.cells[a].coordinates[i] - x.cells[b].coordinates[i] for x in (own, box)]
                    assert shares[0] == shares[1] and apart[0] == apart[1]


def test_pods_are_named_and_folded():
    found = Placement(Mesh(data=32, tensor=2), switches(4, 8, 2), ((4, 8, 1), (1, 1, 2)))
    assert "\nl0s 0-3: 4 alike\n+ l1s 0-31: 32 alike -" in text_placement(found)
    slow = replace(found.topology, levels=tuple(
        replace(x, degraded=((9, 0.5),)) if x.name == "l1" else x for x in found.topology.levels
    ))  # fmt: skip
    text = text_placement(replace(found, topology=slow))
    assert [line.rstrip(" -+") for line in text.splitlines() if line.startswith(("l0", "+ l1"))] == [
        "l0 0", "+ l1s 0-7: 8 alike", "l0 1", "+ l1 8", "+ l1 9", "+ l1s 10-15: 6 alike",
        "l0s 2-3: 2 alike", "+ l1s 16-31: 16 alike",
    ]  # fmt: skip


def test_a_host_with_a_slow_part_stands_alone():
    """A slow GPU or port is no less than a slow node; what is slow in the same way is alike."""
    found = Placement(Mesh(data=32, tensor=2), switches(4, 8, 2), ((4, 8, 1), (1, 1, 2)))

    def lines(**slow):
        levels = tuple(replace(x, **slow.get(x.name, {})) for x in found.topology.levels)
        text = text_placement(replace(found, topology=replace(found.topology, levels=levels)))
        return [line.rstrip(" -+") for line in text.splitlines() if line.startswith(("l0", "+ l1"))]

    assert lines(l2={"degraded": ((3, 0.5),)}) == [
        "l0 0", "+ l1 0", "+ l1 1", "+ l1s 2-7: 6 alike", "l0s 1-3: 3 alike", "+ l1s 8-31: 24 alike",
    ]  # fmt: skip
    ports = tuple((unit, port, 0.5) for unit in (1, 9, 17, 25) for port in (0, 1))
    assert lines(l1={"uplinks": 2, "slow_ports": ports}) == [
        "l0s 0-3: 4 alike", "+ l1 0 of each: 4 alike", "+ l1 1 of each: 4 alike", "+ l1s 2-7 of each: 24 alike",
    ]  # fmt: skip


def test_one_level_is_one_box():
    text = text_placement(Placement(Mesh(x=4), Topology.load("nominal", devices=4), ((4,),)), {"x": 1e6})
    assert "+ nominal -------------------+\n| 0 (0)  1 (1)  2 (2)  3 (3) |" in text and " out" not in text


@pytest.mark.parametrize("title", ["", "tensor < data & more"])
def test_svg(title):
    launch = Launch(Mesh(data=8, tensor=3), Topology.load("dgx-a100", nodes=3), tuple(range(24)), ("a<", "b", "c"))
    root = ET.fromstring(svg_placement(launch, TRAFFIC, title))
    texts = [t.text for t in root.iter("{http://www.w3.org/2000/svg}text")]
    assert title in texts or not title
    assert [t for t in texts if t and t.startswith("rank ")] == [f"rank {k}" for k in range(24)]
    assert "node 0 (a<)" in texts and "all_reduce over data: 2 GB" in texts
    demands = demands_of(TRAFFIC, launch.mesh)
    out = sum(leaving_bytes(launch.groups(d.axes), d, Fabric(launch.topology))[0].sum(axis=1) for d in demands)
    bars = [float(r.get("width")) for r in root.iter("{http://www.w3.org/2000/svg}rect") if r.get("height") == "12"]
    bars = [w for w in bars if w != 30]
    assert len(bars) == 6
    scaled = [a + b for a, b in zip(bars[::2], bars[1::2], strict=True)]
    assert [w / max(scaled) for w in scaled] == pytest.approx([x / max(out) for x in out], abs=1e-3)
    # Two groups of three straddle a boundary: six dark strips; data's cross everywhere.
    edges = [r for r in root.iter("{http://www.w3.org/2000/svg}rect") if r.get("stroke") == "#7b1e1e"]
    assert len(edges) == 24 + 6 + 1
    assert not re.search(r"(href|url\()", svg_placement(launch))


def test_uplinks_of_deeper_levels():
    drawn = scene(Placement(Mesh(a=8), switches(2, 2, 2), ((2, 2, 2),)))
    assert crossed(drawn) == ["spans 2 l0s, 1 group leaves each; spans 4 l1s, 1 group leaves each"]


def test_no_label_of_alike_hosts_lies_on_another():
    """A device's rank and coordinates share a line: 64 nodes folded have long ranges of both."""
    found = Placement(Mesh(dp=16, pp=4, tp=8), switches(4, 16, 8), ((4, 4, 1), (1, 4, 1), (1, 1, 8)))
    root = ET.fromstring(svg_placement(found))
    lines: dict[tuple[str, int], list[ET.Element]] = {}
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        wide = float(text.get("font-size", "0")) * 0.6 * len(text.text or "")
        start = float(text.get("x", "0")) - (wide if text.get("text-anchor") == "end" else 0)
        lines.setdefault((text.get("y", ""), int((start - MARGIN - 12) // (CELL + GAP))), []).append(text)
    ranks = [texts for texts in lines.values() if (texts[0].text or "").startswith("rank")]
    assert len(ranks) == 8 and all("-" in (texts[0].text or "") for texts in ranks)
    for texts in ranks:
        assert sum(float(x.get("font-size", "0")) * 0.6 * len(x.text or "") for x in texts) <= CELL, texts[0].text
