"""What `audit` prints: the text and the JSON object."""

import math
from dataclasses import replace

import msgspec

from shardplan.core.mesh import Mesh
from shardplan.hardware import Topology
from shardplan.launches.audit import audit
from shardplan.launches.launch import count_units, plural
from shardplan.report.audit import audit_object, audit_text
from shardplan.report.fold import WIDTH, fold_lines

SMALL = Topology.load("gcp-a100x16", nodes=2)


def test_text_with_a_fix():
    found = audit(range(32), Mesh(tensor=2, data=16), SMALL, {"tensor": 2e9, "data": 1e6})
    lines = audit_text(found, "torch").splitlines()
    assert lines.pop(0) == "500.18 times the best: `tensor` spans 2 nodes; use the call for megatron"
    assert lines[:3] == [
        "verdict  canonical",
        "matrix   tensor=[2, 1], data=[1, 16]",
        "on       gcp-a100x16: node=2 x gpu=16, 32 devices",
    ]
    lines = lines[1:]
    assert lines[3].split() == [
        "axes",
        "node",
        "gpu",
        "groups",
        "a",
        "NIC",
        "load",
        "a",
        "NIC",
        "a",
        "step",
        "(all_reduce)",
    ]
    assert lines[4].startswith("tensor     2    1            16       32 GB  2 GB in ") and "(best " in lines[4]
    assert lines[7].startswith("cost     ") and " times the " in lines[7]
    assert lines[8:] == [
        "cause    `tensor` spans 2 nodes: 16 groups share each NIC",
        "best     tensor=[1, 2], data=[2, 8]",
        "",
        "torch:",
        "  import torch",
        "  from torch.distributed.device_mesh import DeviceMesh",
        '  mesh = DeviceMesh("cuda",',
        "      torch.arange(32).reshape(2, 2, 8).permute(1, 0, 2).reshape(2, 16),",
        "      mesh_dim_names=('tensor', 'data'))",
    ]
    every = audit_text(found)
    for name in ("torch:", "jax:", "megatron:", "mpi:", "nccl-tests:"):
        assert f"\n{name}\n" in every
    assert "... 22 more lines (--json has all)" in every
    assert max(map(len, every.splitlines())) <= WIDTH


def test_text_of_no_placement():
    found = audit(range(48), Mesh(data=16, tensor=3), Topology.load("dgx-a100", nodes=6))
    assert audit_text(found).splitlines() == [
        "4 of the 16 groups over `tensor` span 2 nodes where a placement has 1",
        "verdict  not a placement",
        "on       dgx-a100: node=6 x gpu=8, 48 devices",
        "why      4 of the 16 groups over `tensor` span 2 nodes where a placement has 1",
        "         tensor: ranks 6, 7, 8 span 2 nodes, not 1",
        "         tensor: ranks 15, 16, 17 span 2 nodes, not 1",
        "         tensor: ranks 30, 31, 32 span 2 nodes, not 1",
        "         tensor: ranks 39, 40, 41 span 2 nodes, not 1",
        "",
        "axes    node  gpu  groups a NIC",
        "data       6   16             1",
        "tensor   1-2    3             1",
        "        (units of each level that a group spans: there is no matrix)",
        "",
        "cause    4 of the 16 groups over `tensor` span 2 nodes where a placement has 1",
    ]


def test_object():
    found = audit_object(audit(range(32), Mesh(tensor=2, data=16), SMALL, {"tensor": 2e9, ("tensor", "data"): 1e6}))
    found = msgspec.json.decode(msgspec.json.encode(found))
    assert (found["verdict"], found["matrix"], found["best"]) == (
        "canonical", [[2, 1], [1, 16]], [[1, 2], [2, 8]],
    )  # fmt: skip
    assert found["ratio"] == found["seconds"] / found["best_seconds"]
    assert found["ids"] == list(range(32)) and found["mesh"] == "tensor=2, data=16"
    assert [row["axes"] for row in found["rows"]] == [["tensor"], ["data"], ["tensor", "data"]]
    assert set(found["fix"]["nccl_tests"]) == {"tensor", "data", "tensor,data"}
    assert found["fix"]["rankfile"].count("\n") == 32


def test_the_grammar_of_units():
    """A rack has an uplink and a chassis has them, and of one unit there is no plural."""
    nodes = Topology.load("gcp-a100x16", nodes=4).levels
    for outer, article, several in (("rack", "a", "racks"), ("island", "an", "islands"), ("chassis", "a", "chassis")):
        topology = Topology("", (replace(nodes[0], name=outer, size=2), replace(nodes[0], size=2), nodes[1]))
        text = audit_text(audit(range(64), Mesh(tensor=2, data=32), topology, {"tensor": 2e9}), "mpi")
        assert f"groups an uplink of {article} {outer}" in text and f"load an uplink of {article} {outer}" in text
        assert f"cause    `tensor` spans 2 {several}: 32 groups share each uplink of {article} {outer}" in text
    # 14 pairs over both nodes, and two inside one.
    pairs = audit([r % 2 * 16 + r // 2 for r in range(28)] + [14, 15, 30, 31], Mesh(data=16, tensor=2), SMALL)
    assert "span 1 node where a placement has 2\n" in audit_text(pairs) and "span 1 node, not 2\n" in audit_text(pairs)
    assert (count_units(1, "pod"), count_units("1 to 2", "switch"), plural("box")) == (
        "1 pod",
        "1 to 2 switches",
        "boxes",
    )


def test_the_first_line_is_the_answer():
    topology = Topology.load("dgx-h100", nodes=4)

    def said(mesh, traffic):
        return audit_text(audit(range(32), mesh, topology, traffic)).splitlines()[0]

    assert said("data=4,tensor=8", "tensor=2GB") == "well placed"
    pipelined = said("pp=2,dp=4,tp=4", "pp=2GB, dp=10MB, tp=8GB")
    assert pipelined.endswith("; use `--use-tp-pp-dp-mapping`") and "times the best: `pp` spans 2 nodes" in pipelined
    assert said("data=4,tensor=8", None).startswith("no traffic is given")


def test_what_runs_behind_compute_is_said():
    """Groups of 16 share a NIC of 8 GB/s: 100 MB each is 200 ms, of which 150 ms are hidden; tensor inside is not."""
    found = audit(range(32), Mesh(data=2, tensor=16), SMALL, "data=100MB behind 150ms, tensor=1GB")
    lines = audit_text(found).splitlines()[1:]
    assert lines[8:10] == ["a step (all_reduce)", "data    100 MB in 200 ms, 50 ms of it not behind compute"]
    data, tensor = found.shares
    assert lines[12].startswith("cost     ") and " a step beside 150 ms behind compute, as on the best" in lines[12]
    assert (data.hidden_seconds, tensor.hidden_seconds) == (0.15, 0.0)
    assert found.seconds == data.seconds + tensor.seconds and 0.05 < data.seconds < 0.0501
    told = audit_object(found)["shares"]
    assert [(s["seconds"], s["hidden_seconds"]) for s in told] == [(s.seconds, s.hidden_seconds) for s in found.shares]


def test_all_of_it_hidden_on_the_best():
    found = audit(range(32), Mesh(tensor=2, data=16), SMALL, "tensor=100MB behind 10ms")
    assert (found.ratio, found.best_seconds) == (math.inf, 0) and audit_object(found)["ratio"] is None
    assert ", all of it hidden on the best matrix" in audit_text(found) and found.fix is not None


def test_why_there_is_no_fix_is_no_command():
    """Ranks dealt out in turn, which torchrun cannot say: prose, without a backslash at its end."""
    ids = [8 * (k % 2) + k // 2 for k in range(16)]
    found = audit(ids, Mesh(a=2, data=2, tensor=4), Topology.load("dgx-h100", nodes=2), {("tensor",): 1e9})
    said = fold_lines(audit_text(found, "torchrun")).partition("\ntorchrun:\n")[2]
    assert " ".join(said.split()) == found.fixes["torchrun"].strip() and "\n" in said
    assert found.fixes["torchrun"].startswith("not expressible: torchrun gives a host ranks in a row")
