"""Where hosts stand: by Slurm's topology.conf, by name; a hostfile orders ranks, and a shuffled one is seen."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from shardplan.cli.audit import audit_command
from shardplan.errors import ParseError, ShardplanError, TopologyError
from shardplan.hardware.topology import Topology
from shardplan.launches.host_order import order_by_name, order_by_switch, parse_switches, read_allocation

PODS = """
library = "nccl"
[device]
flops = "900 TFLOP/s"
memory = "80 GB"
memory_bandwidth = "3 TB/s"
[[levels]]
name = "pod"
size = 4
link = "switch"
bandwidth = "25 GB/s"
latency = "8 us"
uplinks = 8
[[levels]]
name = "node"
size = 4
link = "switch"
bandwidth = "50 GB/s"
latency = "5 us"
uplinks = 8
[[levels]]
name = "gpu"
size = 8
link = "switch"
bandwidth = "450 GB/s"
latency = "2 us"
"""
LEAVES = "".join(f"SwitchName=leaf{k} Nodes=h[{4 * k:02}-{4 * k + 3:02}]\n" for k in range(4))
CONF = LEAVES + "SwitchName=top Switches=leaf[0-3]\n"


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    (tmp_path / "pods.toml").write_text(PODS)
    (tmp_path / "topology.conf").write_text(CONF)
    return tmp_path


def test_a_shuffled_hostfile_is_a_shuffled_launch(cluster: Path) -> None:
    """16 nodes in 4 pods: in order all is well; shuffled, groups of data lie over pods, and the fix is in its ids."""
    names = [f"h{k:02}" for k in range(16)]
    hosts = cluster / "hosts"
    options: dict[str, Any] = {
        "topology": str(cluster / "pods.toml"),
        "mesh": "pp=4, dp=4, tp=8",
        "traffic": "dp=4GB,tp=256MB*400",
    }
    hosts.write_text("\n".join(names))
    good = audit_command(**options, hostfile=hosts)
    assert good.object["answer"] == "well placed" and good.object["ids"] == list(range(128))
    random.Random(3).shuffle(names)
    hosts.write_text("\n".join(names))
    for switches in (None, cluster / "topology.conf"):
        bad = audit_command(**options, hostfile=hosts, switches=switches)
        assert bad.object["ids"] == [int(name[1:]) * 8 + k for name in names for k in range(8)]
        assert bad.object["verdict"] == "not a placement" and "times the best: " in bad.object["answer"]
    # As Slurm lists and spreads them.
    listed = audit_command(**options, hostfile="h[00-15]", rank_order="cyclic")
    assert listed.object["ids"] == [r % 16 * 8 + r // 16 for r in range(128)]


def test_a_rankfile_leaves_the_hostfiles_order_to_the_units(cluster: Path) -> None:
    (cluster / "hosts").write_text("h2\nh1\n")
    (cluster / "ranks").write_text("".join(f"rank {r}=h{1 + r // 8} slot={r % 8}\n" for r in range(16)))
    found = audit_command("dgx-h100", "dp=2, tp=8", hostfile=cluster / "hosts", rank_order=cluster / "ranks")
    assert found.object["ids"] == [*range(8, 16), *range(8)]


def test_slurm_says_hosts_and_how_ranks_are_spread(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "h[00-15]")
    monkeypatch.setenv("SLURM_DISTRIBUTION", "cyclic")
    found = audit_command(
        str(cluster / "pods.toml"), "dp=16, tp=8", hostfile="slurm", switches=cluster / "topology.conf"
    )
    assert found.object["ids"] == [r % 16 * 8 + r // 16 for r in range(128)]
    monkeypatch.setenv("SLURM_DISTRIBUTION", "plane=4")
    with pytest.raises(ParseError, match=r"SLURM_DISTRIBUTION='plane=4'; legal are block and cyclic"):
        audit_command(str(cluster / "pods.toml"), "dp=16, tp=8", hostfile="slurm")
    with pytest.raises(ParseError, match="--hostfile slurm: SLURM_JOB_NODELIST is not set"):
        read_allocation({})


def test_switches_say_where_hosts_stand() -> None:
    text = "# racks\nSwitchName=a Nodes=x[3,1] LinkSpeed=1\nSwitchName=b Nodes=x[0,2]\nSwitchName=t Switches=b,a\n"
    switches = parse_switches(text)
    assert [(s.name, s.hosts) for s in switches] == [("b", ("x0", "x2")), ("a", ("x3", "x1"))]
    topology = Topology.parse(PODS).resize(pods=2, nodes=2)
    assert order_by_switch(("x0", "x1", "x2", "x3"), switches, topology) == ("x0", "x2", "x3", "x1")
    assert order_by_name(("n10", "n9", "m2b1", "m2a1")) == ("m2a1", "m2b1", "n9", "n10")
    assert parse_switches("BlockName=b1 Nodes=h[0-1]\nBlockSizes=2")[0].hosts == ("h0", "h1")


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("Nodes=h0", ParseError, "topology.conf, line 1: 'Nodes=h0'; legal are 'SwitchName=s Nodes=h[0-3]'"),
        ("SwitchName=a Nodes=h0\nSwitchName=b Nodes=h0", ParseError,
         "topology.conf, line 2: host 'h0' hangs on switch 'a' too; legal is one leaf switch"),
        ("SwitchName=a Switches=b", ParseError, "topology.conf: there is no switch 'b'; legal are a"),
        ("SwitchName=a Switches=a\nSwitchName=c Switches=a", ParseError, "topology.conf: switch 'a' is inside itself"),
        ("SwitchName=a Switches=a", ParseError, "topology.conf: names no host, or only switches that are inside each"),
        ("SwitchName=a Nodes=h[0-2]", TopologyError, "host 'h3' hangs on no switch; switches: a"),
        ("SwitchName=a Nodes=h[0-2]\nSwitchName=b Nodes=h3", TopologyError,
         "switch 'a' has 3 hosts of the launch, and pods of pod=2 x node=2 x gpu=8 have 2 each; legal is a topology"),
    ],
)  # fmt: skip
def test_errors(text: str, kind: type[ShardplanError], message: str) -> None:
    topology = Topology.parse(PODS).resize(pods=2, nodes=2)
    with pytest.raises(kind) as caught:
        order_by_switch(("h0", "h1", "h2", "h3"), parse_switches(text), topology)
    assert str(caught.value).startswith(message)
