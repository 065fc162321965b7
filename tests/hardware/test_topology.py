"""Topology files and presets: round trips and error texts."""

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardplan.hardware
from hardware.topologies import any_topology
from shardplan.errors import ParseError, TopologyError
from shardplan.hardware import DeviceSpec, Level, Topology, presets
from shardplan.hardware.prices.library import libraries

FILE = """
version = 1
name = "dgx-a100"
library = "nccl"
[device]
flops = { f32 = "19.5 TFLOP/s", tf32 = "156 TFLOP/s", bf16 = "312 TFLOP/s" }
memory = "80 GB"
memory_bandwidth = "2.0 TB/s"
launch = "6 us"
[[levels]]                    # outermost first
name = "node"
size = 4
link = "switch"
bandwidth = "25 GB/s"
latency = "5 us"
uplinks = 8
source = "vendor datasheet"
efficiency = 0.85
degraded = { 2 = 0.5, "3.7" = 0.25 }
reduces = false
[[levels]]
name = "gpu"
size = 8
link = "switch"
bandwidth = "300 GB/s"
latency = "2 us"
"""
LEVEL = '[[levels]]\nname = "gpu"\nsize = 4\nlink = "switch"\nbandwidth = "1 GB/s"\nlatency = "1 us"\n'


def test_the_file_of_the_design():
    topology = Topology.parse(FILE)
    assert topology.levels[0] == Level(
        "node", 4, "switch", 25e9, 5e-6, 8, (), "vendor datasheet", ((2, 0.5),), False, 0.85, ((3, 7, 0.25),)
    )
    assert topology.levels[1] == Level("gpu", 8, "switch", 300e9, 2e-6)
    assert topology.device == DeviceSpec((("f32", 19.5e12), ("tf32", 156e12), ("bf16", 312e12)), 80e9, 2e12, 6e-6)
    assert topology.library == "nccl"
    assert (topology.size, topology.level_sizes, topology.strides) == (32, (4, 8), (8, 1))
    assert topology.describe() == "node=4 x gpu=8"
    assert topology.digits(np.array([0, 9, 31])).tolist() == [[0, 0], [1, 1], [3, 7]]
    assert topology.device.peak("f16") == 312e12
    assert Topology.parse(str(topology)) == topology


def test_optional_keys():
    assert Topology.parse(LEVEL) == Topology("", (Level("gpu", 4, "switch", 1e9, 1e-6),))
    one = Topology.parse('device = { flops = "1 PFLOP/s" }\n' + LEVEL)
    assert one.device.peak("anything") == 1e15
    assert math.isinf(one.device.memory)
    assert Topology.parse(str(one)) == one
    grid = Topology.parse(LEVEL.replace("size = 4", "shape = [2, 3]").replace("switch", "torus"))
    assert (grid.size, grid.levels[0].shape) == (6, (2, 3))
    full = Topology.parse(LEVEL.replace("switch", "full"))
    assert (full.levels[0].link, full.library, full.device.launch) == ("full", "ring", 0.0)
    assert Topology.parse(str(full)) == full


@given(any_topology(), st.data())
def test_text_round_trip(topology, data):
    """Also of what no price is asked for: a library, a launch, an efficiency and slow ports."""
    count, levels = 1, []
    for level in topology.levels:
        count *= level.size
        ports = st.tuples(st.integers(0, count - 1), st.integers(0, level.uplinks - 1))
        several = level.link == "switch" and level.uplinks > 1
        slow = data.draw(st.lists(ports, unique=True, max_size=3)) if several else []
        reached = data.draw(st.floats(0, 1, exclude_min=True))
        levels.append(replace(level, efficiency=reached, slow_ports=tuple((u, p, 1 / 3) for u, p in slow)))
    library = st.sampled_from(libraries()) | st.text().map(lambda text: f"{text}.toml")
    device = replace(topology.device, launch=data.draw(st.floats(0, 1)))
    topology = Topology(topology.name, tuple(levels), device, data.draw(library))
    assert Topology.parse(str(topology)) == topology


def test_what_is_slow():
    level = Level("node", 4, "switch", 25e9, 5e-6, 8, degraded=((2, 0.5),), slow_ports=((3, 7, 0.25), (3, 1, 0.5)))
    assert list(level.slow()) == [("node[2]", 2, 0.5), ("node[3].1", 3, 0.5), ("node[3].7", 3, 0.25)]
    assert level.sound() == Level("node", 4, "switch", 25e9, 5e-6, 8)


def test_awkward_strings_round_trip():
    level = Level("gpu", 2, "switch", 1e9 / 3, 1e-7 / 3, source='a "quoted"\tsource\\ \x7f é')
    topology = Topology('name "x"\n', (level,), DeviceSpec((("f8 e4", 1e12), ("bf16", 2e12)), 1 / 3, 1e11))
    assert Topology.parse(str(topology)) == topology


@pytest.mark.parametrize("name", presets())
def test_presets(name):
    topology = Topology.load(name)
    assert topology.name == name
    assert Topology.parse(str(topology)) == topology
    assert all(level.source for level in topology.levels)
    if name != "nominal":
        assert topology.device.peak("f16") > 1e14
        assert 1e10 < topology.device.memory < 1e12


def test_every_preset_of_published_measurements_ships():
    named = {
        "dgx-a100-40g", "dgx-a100-80g", "dgx-h100", "dgx2-v100-32g", "grand-teton-h100", "dgx-b200",
        "gb200-nvl72", "gb300-nvl72",
    }  # fmt: skip
    spec = {"gcp-a100x16", "gcp-v100x8", "dgx-a100", "dgx-h100", "nvl72", "tpu-v7", "nominal"}
    owned = {
        "mi250x", "mi300x", "mi325x", "mi355x", "tpu-v5p", "tpu-v6e", "p4d-efa", "p5-efa", "pcie-l40s", "dgx-b300",
    }  # fmt: skip
    assert named | spec | owned <= set(presets())


@pytest.mark.parametrize("name", presets())
def test_every_number_of_a_preset_says_where_it_comes_from(name):
    """Each has a tag, established, recalled or inferred; nominal has one for all."""
    text = (Path(shardplan.hardware.__file__).parent / "presets" / f"{name}.toml").read_text()
    stated = re.findall(r"^(?!version|name|library|link|size|shape|source)\w+ = .*$", text, re.MULTILINE)
    assert len(stated) >= 2
    if name == "nominal":
        stated = text.splitlines()[:1]
    assert [line for line in stated if not re.search(r"#.*\[[ERI]\]", line)] == []


def test_libraries_of_presets():
    """Those of the published systems keep the ring, whose price is a closed form."""
    found = {name: Topology.load(name).library for name in presets()}
    assert {name for name in found if found[name] == "ring"} == {"gcp-a100x16", "gcp-v100x8", "nominal"}
    assert {name for name in found if found[name] == "xla"} == {name for name in presets() if name.startswith("tpu")}
    assert {name for name in found if found[name] == "rccl"} == {name for name in presets() if name.startswith("mi")}
    assert set(found.values()) == {"nccl", "rccl", "xla", "ring"}
    assert all(Topology.load(name).device.launch > 0 for name in found if found[name] in ("nccl", "rccl"))


def test_numbers_of_machines_that_people_own():
    def numbers(name):
        return [(level.link, level.size, level.bandwidth, level.uplinks) for level in Topology.load(name).levels]

    assert numbers("mi300x") == numbers("mi325x") == [("switch", 4, 50e9, 8), ("full", 8, 64e9, 1)]
    assert numbers("mi355x")[1] == ("full", 8, 76.8e9, 1)
    assert numbers("mi250x") == [("switch", 4, 25e9, 4), ("full", 4, 50e9, 2), ("full", 2, 200e9, 1)]
    assert numbers("p5-efa")[0] == ("switch", 4, 12.5e9, 32)
    assert numbers("p4d-efa")[0] == ("switch", 4, 12.5e9, 4)
    assert numbers("dgx-b300") == [("switch", 4, 100e9, 8), ("switch", 8, 900e9, 1)]
    assert numbers("pcie-l40s") == [("switch", 4, 25e9, 2), ("full", 2, 22e9, 1), ("switch", 2, 32e9, 1)]
    assert (numbers("tpu-v5p"), Topology.load("tpu-v5p").levels[0].shape) == ([("torus", 64, 100e9, 1)], (4, 4, 4))
    assert (numbers("tpu-v6e"), Topology.load("tpu-v6e").levels[0].shape) == ([("torus", 256, 100e9, 1)], (16, 16))
    reduce = {name for name in presets() if any(level.reduces for level in Topology.load(name).levels)}
    assert reduce == {
        "dgx-h100", "dgx-h200", "dgx-b200", "dgx-b300", "gb200-nvl72", "gb300-nvl72", "nvl72", "grand-teton-h100",
        "p5-efa",
    }  # fmt: skip


def test_preset_numbers_of_the_specification():
    a100, h100 = Topology.load("dgx-a100", nodes=2), Topology.load("dgx-h100", node=3)
    assert [(level.bandwidth, level.uplinks) for level in a100.levels] == [(25e9, 8), (300e9, 1)]
    assert [(level.bandwidth, level.uplinks) for level in h100.levels] == [(50e9, 8), (450e9, 1)]
    assert (a100.level_sizes, h100.level_sizes) == ((2, 8), (3, 8))
    gcp, v100 = Topology.load("gcp-a100x16"), Topology.load("gcp-v100x8")
    assert [(level.size, level.link, level.bandwidth) for level in gcp.levels] == [
        (4, "switch", 8e9),
        (16, "switch", 270e9),
    ]
    assert [(level.link, level.bandwidth) for level in v100.levels] == [("switch", 8e9), ("ring", 135e9)]
    nvl = Topology.load("nvl72", nodes=2)
    assert [(level.size, level.bandwidth) for level in nvl.levels] == [(2, 50e9), (72, 900e9)]
    assert nvl.levels[0].uplinks == 72
    tpu = Topology.load("tpu-v7", chips=(2, 2, 4))
    assert [(level.link, level.size, level.bandwidth) for level in tpu.levels] == [
        ("torus", 16, 200e9),
        ("switch", 2, 1.2e12),
    ]
    nominal = Topology.load("nominal", devices=6)
    assert [(level.size, level.bandwidth, level.latency) for level in nominal.levels] == [(6, 50e9, 5e-6)]


def test_load_from_a_path(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(FILE)
    assert Topology.load(path, nodes=5).level_sizes == (5, 8)
    assert Topology.load(str(path)).level_sizes == (4, 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("colour = 1\n" + LEVEL, "topology: unknown key 'colour'; legal: version, name, library, device, levels"),
        ("nme = 'x'\n" + LEVEL, "topology: unknown key 'nme'; did you mean 'name'; "
         "legal: version, name, library, device, levels"),
        ("version = 2\n" + LEVEL, "topology: version 2 is unknown; this shardplan reads version 1"),
        ("name = 'x'", "topology: at least one [[levels]] table is needed, outermost first"),
        ("device = 3\n" + LEVEL, "topology: device must be a table with the keys flops, memory, "
         "memory_bandwidth, launch, kernels, processors, issue"),
        (
            LEVEL + "bandwith = 1",
            "levels[0] 'gpu': unknown key 'bandwith'; did you mean 'bandwidth'; legal: name, size, link, bandwidth, "
            "latency, uplinks, shape, source, efficiency, degraded, reduces, rails",
        ),
        ("device = { flop = '1 TFLOP/s' }\n" + LEVEL, "device: unknown key 'flop'; did you mean 'flops'; legal: flops, "
         "memory, memory_bandwidth, launch, kernels, processors, issue"),
        ("device = { flops = 3 }\n" + LEVEL, "device: flops must be a string or a table of dtypes, got 3"),
        (LEVEL.replace("size = 4\n", ""), "levels[0] 'gpu': key 'size' is missing"),
        (LEVEL.replace("size = 4", "size = true"), "levels[0] 'gpu': size must be a whole number, got True"),
        (LEVEL.replace("size = 4", "size = 0"), "level 'gpu': size 0 is below 1, the least number of children"),
        (LEVEL.replace("switch", "bus"), "level 'gpu': link 'bus' is unknown; legal: switch, ring, torus, mesh, "
         "full"),
        (LEVEL.replace("switch", "full") + "shape = [4]", "level 'gpu': a full takes no shape, got [4]; only torus and "
         "mesh do"),
        ("library = 3\n" + LEVEL, "topology: library must be a string, got 3"),
        ("library = 'nickel'\n" + LEVEL,
         "topology '': library 'nickel' is unknown; legal: gloo, nccl, rccl, ring, xla, "
         "or the path of a table (.toml)"),
        ("device = { launch = 6e-6 }\n" + LEVEL, "device: launch must be a string with a unit, like '6 us', got 6e-06"),
        (LEVEL + "efficiency = 0", "level 'gpu': efficiency 0.0 is not above 0 and at most 1"),
        (LEVEL + "efficiency = 1.2", "level 'gpu': efficiency 1.2 is not above 0 and at most 1"),
        (LEVEL + "efficiency = '85 %'", "levels[0] 'gpu': efficiency must be a number, got '85 %'"),
        (LEVEL.replace('latency = "1 us"\n', ""), "levels[0] 'gpu': key 'latency' is missing; write it like "
         "latency = '5 us'"),
        (LEVEL.replace('"1 us"', "1e-6"), "levels[0] 'gpu': latency must be a string with a unit, "
         "like '5 us', got 1e-06"),
        (LEVEL.replace('"1 GB/s"', '"0 GB/s"'), "level 'gpu': bandwidth 0.0 bytes per second is not "
         "positive and finite"),
        (LEVEL + "uplinks = 0", "level 'gpu': uplinks 0 is below 1; a child needs a port"),
        (LEVEL + "shape = [2, 2]", "level 'gpu': a switch takes no shape, got [2, 2]; only torus and mesh do"),
        (LEVEL + "shape = ['a']", "levels[0] 'gpu': shape must be a list of whole numbers, got ['a']"),
        (
            LEVEL.replace("switch", "torus"),
            "level 'gpu': a torus of size 4 needs a shape of that product; no shape is given",
        ),
        (
            LEVEL.replace("switch", "mesh") + "shape = [2, 3]",
            "level 'gpu': a mesh of size 4 needs a shape of that product; shape [2, 3] has product 6",
        ),
        (LEVEL + "degraded = { 4 = 0.5 }", "level 'gpu': degraded names gpu[4], but the whole level "
         "has 4 units, 0 to 3"),
        (
            LEVEL + "degraded = { 1 = 0.0 }",
            "level 'gpu': degraded factor 0.0 leaves gpu[1] unreachable; legal: above 0, at most 1",
        ),
        (LEVEL + "degraded = { 1 = 2 }", "level 'gpu': degraded factor 2.0 of gpu[1] is above 1"),
        *(
            (f"{LEVEL}degraded = {{ {key} = {factor} }}",
             "levels[0] 'gpu': degraded maps the number of a child, or of one of its ports, to a factor, as in "
             f'{{ 2 = 0.5, "3.1" = 0.5 }}; got {said}')
            for key, factor, said in (
                ("a", 0.5, "a = 0.5"), ("'1.'", 0.5, "1. = 0.5"), ("1", "true", "1 = True"),
                ("1.2", 0.5, "1 = {'2': 0.5}"),
            )
        ),
        (LEVEL + "degraded = { '1.0' = 0.5 }", "level 'gpu': degraded names a port, gpu[1].0; only a switch with "
         "several uplinks has ports that are slow one by one, this is a switch with 1"),
        (LEVEL.replace("switch", "ring") + "uplinks = 2\ndegraded = { '1.0' = 0.5 }", "level 'gpu': degraded names a "
         "port, gpu[1].0; only a switch with several uplinks has ports that are slow one by one, this is a ring "
         "with 2"),
        (LEVEL + "uplinks = 2\ndegraded = { '1.2' = 0.5 }", "level 'gpu': degraded names gpu[1].2, but a unit has the "
         "ports 0 to 1"),
        (LEVEL + "uplinks = 2\ndegraded = { '1.1' = 0.5, '1.01' = 0.5 }", "level 'gpu': degraded names gpu[1].1 twice"),
        (LEVEL + "uplinks = 2\ndegraded = { '4.1' = 0.5 }", "level 'gpu': degraded names gpu[4].1, but the whole level "
         "has 4 units, 0 to 3"),
        (LEVEL + "uplinks = 2\ndegraded = { '1.1' = 0 }", "level 'gpu': degraded factor 0.0 leaves gpu[1].1 "
         "unreachable; legal: above 0, at most 1"),
        (LEVEL.replace("switch", "ring") + "reduces = true", "level 'gpu': only a switch reduces in the network, "
         "this is a ring"),
        (LEVEL + "rails = true", "level 'gpu': rails are the uplinks of a child, one for each of its leaf switches; "
         "legal is a switch with several uplinks, this is a switch with 1"),
        (LEVEL.replace("gpu", "pod") + "uplinks = 4\nrails = true\n" + LEVEL.replace("gpu", "node") + "uplinks = 4\n",
         "level 'pod': rails are 4 leaf switches in a pod, NIC k of every node on leaf k: legal above a switch of "
         "nodes with 4 uplinks, whose devices are a level of their own"),
        (LEVEL + LEVEL, "topology '' names two levels 'gpu'; names are unique"),
        (LEVEL.replace('"gpu"', '"g p"'), "level 'g p': a level's name is a word of letters, digits and underscores, "
         "such as 'node'"),
    ],
)  # fmt: skip
def test_errors(text, message):
    with pytest.raises(TopologyError) as caught:
        Topology.parse(text)
    assert str(caught.value) == message


def test_parse_errors():
    with pytest.raises(ParseError) as caught:
        Topology.parse("version = 1\nname = dgx\n")
    assert str(caught.value) == "topology is no TOML: Invalid value\n  name = dgx\n         ^"
    with pytest.raises(ParseError) as caught:
        Topology.parse(LEVEL.replace("1 GB/s", "1 GiB"))
    assert str(caught.value).startswith("levels[0] 'gpu': bandwidth: 'GiB' is no unit of bytes per second; legal: B/s,")
    assert str(caught.value).endswith("\n  1 GiB\n    ^")


def test_load_errors(tmp_path):
    with pytest.raises(
        TopologyError,
        match=r"'dgx-a10' is no preset .* file; did you mean 'dgx-a100' or 'dgx-h100' or .* lists all \d+$",
    ):
        Topology.load("dgx-a10")
    for said in ("dgx-h100,nodes=32", "dgx-h100 x 32", "dgx-h100:32", "dgx-h100x32"):
        with pytest.raises(TopologyError, match=r"is said apart; legal is 'dgx-h100' with nodes=32 \(on"):
            Topology.load(said)
    with pytest.raises(TopologyError, match=r"topology file '.*none.toml' cannot be read: No such file or directory"):
        Topology.load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ParseError, match="is not UTF-8 text"):
        Topology.load(tmp_path / "bad.toml")
    with pytest.raises(TopologyError) as caught:
        Topology.load("dgx-a100", racks=4)
    assert str(caught.value) == "racks=4 names no level of topology 'dgx-a100'; legal: nodes=, gpus="
    with pytest.raises(TopologyError) as caught:
        Topology.load("dgx-a100", nodes=(2, 2))
    assert str(caught.value) == "nodes=(2, 2): level 'node' is a switch; give one size"
    with pytest.raises(TopologyError) as caught:
        Topology.load("tpu-v7", chips=16)
    assert str(caught.value) == "chips=16: level 'chip' is a torus of shape [4, 4, 4]; give 3 extents"
    with pytest.raises(TopologyError, match="size 0 is below 1"):
        Topology.load("dgx-a100", nodes=0)
    with pytest.raises(TopologyError) as caught:
        Topology.load("dgx-a100", nodes=2).digits([16])
    assert str(caught.value) == "device 16 is not in topology 'dgx-a100', whose devices are 0 to 15 (node=2 x gpu=8)"
    with pytest.raises(TopologyError) as caught:
        Topology.load("dgx-a100").index("rack")
    assert str(caught.value) == "topology 'dgx-a100' has no level 'rack'; levels: node=4 x gpu=8"
    with pytest.raises(TopologyError) as caught:
        Topology.load("gcp-v100x8").device.peak("f8e4m3")
    assert str(caught.value) == "device: no flops are stated for 'f8e4m3'; stated: f64, f32, f16"
    with pytest.raises(TopologyError, match="it needs at least one"):
        Topology("x", ())
    with pytest.raises(TopologyError, match="memory is 0, it must be above 0"):
        DeviceSpec(memory=0)
