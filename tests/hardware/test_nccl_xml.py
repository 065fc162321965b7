"""Topologies read from NCCL's XML."""

import pytest

from shardplan.errors import ParseError, TopologyError
from shardplan.hardware import Topology, parse_nccl_xml


def machine(gpus=8, sm=80, links=12, nets=8, speed=200000, width=16, gts="16.0 GT/s PCIe"):
    lines = ['<system version="1">', '<cpu numaid="0" affinity="ffff" arch="x86_64">']
    for i in range(gpus):
        lines += [f'<pci busid="0000:{i:02x}:00.0" class="0x030200" link_speed="{gts}" link_width="{width}">']
        lines += [f'<gpu dev="{i}" sm="{sm}" rank="{i}" gdr="1">']
        if links:
            lines += [f'<nvlink target="0000:c{s}:00.0" count="{links // 2}" tclass="0x068000"/>' for s in range(2)]
        lines += ["</gpu>", "</pci>"]
    for i in range(nets):
        lines += [f'<pci busid="0000:a{i}:00.0" class="0x020700"><nic>']
        lines += [
            f'<net name="mlx5_{i}" dev="{i}" speed="{speed}" port="1" latency="0.000000" gdr="1"/>',
            "</nic></pci>",
        ]
    return "\n".join([*lines, "</cpu>", "</system>"])


def test_a_node_of_eight_with_nvlink():
    topology = Topology(*parse_nccl_xml(machine(), name="a100"))
    node, gpu = topology.levels
    assert (node.name, node.size, node.bandwidth, node.uplinks, node.latency) == ("node", 1, 25e9, 8, 9e-6)
    assert (gpu.name, gpu.size, gpu.bandwidth, gpu.latency) == ("gpu", 8, 240e9, 0.99e-6)
    assert Topology.parse(str(topology)) == topology


@pytest.mark.parametrize(("sm", "rate"), [(60, 18), (70, 20), (80, 20), (86, 12), (90, 20.6), (100, 40.1)])
def test_nvlink_rates_are_nccls(sm, rate):
    assert parse_nccl_xml(machine(sm=sm, links=2)).levels[-1].bandwidth == pytest.approx(2 * rate * 1e9)


@pytest.mark.parametrize(("gts", "width", "rate"), [("8 GT/s", 16, 12e9), ("16.0 GT/s PCIe", 8, 12e9), ("", 16, 12e9)])
def test_pci_where_there_is_no_nvlink(gts, width, rate):
    gpu = parse_nccl_xml(machine(links=0, gts=gts, width=width)).levels[-1]
    assert (gpu.bandwidth, gpu.latency) == (rate, 2 * 0.99e-6)


def test_one_level_without_network():
    assert Topology(*parse_nccl_xml(machine(nets=0, gpus=4))).level_sizes == (4,)


def test_load_sets_the_nodes(tmp_path):
    path = tmp_path / "dump.xml"
    path.write_text(machine())
    topology = Topology.load(path, nodes=4)
    assert (topology.name, topology.level_sizes) == ("dump", (4, 8))


def test_errors():
    with pytest.raises(ParseError) as caught:
        parse_nccl_xml("<system>\n <cpu>\n</system>")
    assert str(caught.value) == "NCCL topology is malformed XML: mismatched tag\n  </system>\n    ^"
    with pytest.raises(ParseError, match="malformed XML: no element found"):
        parse_nccl_xml("")
    with pytest.raises(ParseError, match="the root element is <graphs>, expected <system>"):
        parse_nccl_xml("<graphs/>")
    with pytest.raises(TopologyError, match="names no <gpu>"):
        parse_nccl_xml("<system><cpu/></system>")
    with pytest.raises(ParseError, match="attribute 'speed' of <net> is 'fast', not a number"):
        parse_nccl_xml(machine(speed="fast"))
    with pytest.raises(ParseError, match="attribute 'sm' of <gpu> is missing"):
        parse_nccl_xml(machine().replace('sm="80"', ""))
    with pytest.raises(ParseError, match="<gpu sm=35> has NVLinks of unknown speed"):
        parse_nccl_xml(machine(sm=35))
