"""The command `audit`: its options, its files, its exit status."""

import pytest

from shardplan.cli.audit import audit_command
from shardplan.errors import LayoutError, ParseError, ShardplanError, TopologyError


def test_options(tmp_path):
    hosts, ranks = tmp_path / "hosts", tmp_path / "ranks"
    hosts.write_text("alpha\nbeta\n")
    base = audit_command("gcp-a100x16", "data=16, tensor=2", hostfile=hosts, traffic="data=1GB")
    assert base.status == 0 and base.object["verdict"] == "canonical"
    assert base.object["topology"] == "node=2 x gpu=16"
    # Ranks in turn on the hosts: by word, by number, by rankfile, by hostfile, as one.
    cyclic = [r % 2 * 16 + r // 2 for r in range(32)]
    ranks.write_text("".join(f"rank {r}={('alpha', 'beta')[r % 2]} slot={r // 2}\n" for r in range(32)))
    lines = tmp_path / "lines"
    lines.write_text("alpha\nbeta\n" * 16)
    for order in ("cyclic", ",".join(map(str, cyclic)), ranks, lines):
        for hostfile in (hosts, None):
            nodes = 2 if hostfile is None else None
            found = audit_command("gcp-a100x16", "data=16, tensor=2", nodes, hostfile=hostfile, rank_order=order)
            assert found.object["ids"] == cyclic and found.object["matrix"] == [[1, 16], [2, 1]]
    assert audit_command("gcp-a100x16", "data=16, tensor=2", 2, rank_order="block").object["ids"] == list(range(32))
    assert audit_command("gcp-a100x16", "data=32", hostfile=lines).object["ids"] == cyclic


def test_a_mesh_does_not_resize_the_cluster():
    """Of 5 x 8 devices on 4 nodes of 8 nothing is said but that they do not fit; --nodes says how many there are."""
    with pytest.raises(TopologyError) as caught:
        audit_command("dgx-a100", "data=5, tensor=8")
    assert str(caught.value) == (
        "mesh data=5, tensor=8 has 40 devices, topology 'dgx-a100' has 32 (node=4 x gpu=8); a launch covers its "
        "topology: give the topology the launch's size, as in Topology.load(..., nodes=...) or with --nodes"
    )
    found = audit_command("dgx-a100", "data=5, tensor=8", 5)
    assert "on       dgx-a100: node=5 x gpu=8, 40 devices" in found.text.splitlines()
    assert (found.object["topology_name"], found.object["topology_size"]) == ("dgx-a100", 40)


def test_megatron():
    found = audit_command("dgx-a100", "dp=4, tp=4, pp=2", megatron="tp-cp-ep-dp-pp", nodes=4)
    assert found.object["matrix"] == [[2, 2], [1, 4], [2, 1]] and found.object["verdict"] == "equivalent"
    found = audit_command("dgx-a100", "dp=4, tp=4, pp=2", megatron="dp-tp-pp")
    assert found.object["matrix"] == [[1, 4], [2, 2], [2, 1]]


def test_fail_above():
    options = {"topology": "gcp-a100x16", "mesh": "tensor=2, data=16", "nodes": 2, "traffic": "tensor=2GB"}
    assert audit_command(**options).status == 0
    bad = audit_command(**options, fail_above=1.5)
    assert bad.status == bad.object["status"] == 1 and bad.object["fail_above"] == 1.5
    assert bad.text.splitlines()[-1].startswith("above    the ratio ") and "--fail-above 1.5" in bad.text
    assert audit_command(**options, fail_above=1e6).status == 0
    good = audit_command("gcp-a100x16", "data=16, tensor=2", 2, traffic="tensor=2GB", fail_above=1.0)
    assert good.status == 0 and "cause    no matrix is faster for this traffic" in good.text


def test_pictures():
    found = audit_command("dgx-a100", "data=16, tensor=2", traffic="tensor=1GB", show=True, svg=True)
    assert "\na cell is rank (data, tensor)" in found.text and found.svg.startswith("<svg ")
    assert audit_command("dgx-a100", "data=16, tensor=2").svg == ""


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"fail_above": 1.2}, LayoutError,
         "--fail-above compares seconds, which need --traffic, such as data=2GB,tensor=500MB"),
        ({"fail_above": 0.5, "traffic": "data=1GB"}, LayoutError,
         "--fail-above 0.5 is below 1, the ratio of the best matrix; legal is 1 or more"),
        ({"traffic": "data=1"}, ParseError, "--traffic: a number of bytes needs a unit; legal: B, kB, MB"),
        ({"traffic": "pipe=1GB"}, LayoutError, "unknown axis 'pipe': the mesh has data=16, tensor=2"),
        ({"mesh": "data=16,"}, TopologyError, "mesh data=16 has 16 devices, topology 'dgx-a100' has 32"),
        ({"mesh": "data;16"}, ParseError, "--mesh: "),
        ({"hostfile": "nowhere.txt"}, ParseError, "cannot read nowhere.txt: No such file or directory"),
        ({"rank_order": "cyclical"}, ParseError, "cannot read cyclical: No such file or directory"),
        ({"rank_order": "0,1,1"}, TopologyError,
         "--rank-order 0,1,1: legal is the device of every rank, each of 0 to 31 once"),
        ({"rank_order": "0, ,1"}, TopologyError, "--rank-order 0, ,1: legal is the device of every rank"),
        ({"rank_order": "0," + "1" * 5000}, TopologyError, "--rank-order 0,111"),
        ({"megatron": "tp-pp"}, ParseError, "order 'tp-pp' leaves out dp, but axis 'data' has size 16"),
        ({"mesh": f"data=16, tensor=2 devices=[{','.join(map(str, range(31, -1, -1)))}]", "megatron": "tp-dp"},
         LayoutError, "--megatron numbers the ranks of the mesh; give no devices= with it"),
        ({"framework": "tf"}, LayoutError,
         "fix for 'tf' is unknown; legal: all, torch, jax, megatron, torchrun, slurm, mpi, nccl-tests"),
        ({"nodes": 2}, TopologyError, "mesh data=16, tensor=2 has 32 devices, topology 'dgx-a100' has 16"),
    ],
)  # fmt: skip
def test_errors(options, kind, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = {"topology": "dgx-a100", "mesh": "data=16, tensor=2"}
    if options.get("mesh") == "data=16,":
        options = {"mesh": "data=16", "nodes": 4}
    with pytest.raises(ShardplanError) as caught:
        audit_command(**(base | options))
    assert isinstance(caught.value, kind) and str(caught.value).startswith(message)


def test_a_bare_size_is_a_steps_total():
    """What people type keeps the standard launch: tp in a node, gradients behind the backward pass but for a bucket."""
    found = audit_command("dgx-h100", "dp=4, tp=8", 4, traffic="tp=2GB, dp=4GB")
    assert found.object["answer"] == "well placed"
    assert found.text.splitlines()[1:5] == [
        "traffic  `tp`: 2 GB a step as 32 calls of 62.5 MB; tp=SIZE*N says N calls of",
        "           SIZE",
        "         `dp`: 4 GB a step as 25 calls of 160 MB, all but the last behind",
        "           compute; dp=SIZE*N says N calls of SIZE",
    ]
    counts = [(s["op"], s["bytes"], s["count"]) for s in found.object["shares"]]
    assert counts == [("all_reduce", 62.5e6, 32), ("all_reduce", 160e6, 25)]
    grads = found.object["shares"][1]
    assert grads["seconds"] * 24 == pytest.approx(grads["hidden_seconds"], rel=1e-4)
    # A count and what hides it hold as said; a stage sends to the next.
    said = audit_command("dgx-h100", "pp=2, dp=2, tp=8", 4, traffic="tp=2GB*1, dp=4GB behind 5ms, pp=32MB").object
    assert [(s["op"], s["count"]) for s in said["shares"]] == [("all_reduce", 1), ("all_reduce", 25), ("permute", 1)]
    assert said["shares"][1]["hidden_seconds"] == pytest.approx(5e-3)
