"""What `audit` prints: the text and the JSON object."""

import doctest

import msgspec

from shardplan.core.mesh import Mesh
from shardplan.hardware import Topology
from shardplan.launches.audit import audit
from shardplan.report.audit import audit_object, audit_text

SMALL = Topology.load("gcp-a100x16", nodes=2)


def test_examples():
    import shardplan.launches.audit
    import shardplan.launches.fixes
    import shardplan.launches.hostfile
    import shardplan.launches.launch
    import shardplan.launches.megatron
    import shardplan.launches.verdict
    import shardplan.movement.placing.traffic
    import shardplan.report.audit
    import shardplan.report.placement_picture
    import shardplan.report.placement_svg

    for module in (
        shardplan.launches.hostfile,
        shardplan.launches.launch,
        shardplan.launches.megatron,
        shardplan.launches.verdict,
        shardplan.launches.audit,
        shardplan.movement.placing.traffic,
        shardplan.launches.fixes,
        shardplan.report.audit,
        shardplan.report.placement_picture,
        shardplan.report.placement_svg,
    ):
        found = doctest.testmod(module)
        assert found.attempted > 0 and found.failed == 0, module.__name__


def test_text_with_a_fix():
    found = audit(range(32), Mesh(tensor=2, data=16), SMALL, {"tensor": 2e9, "data": 1e6})
    lines = audit_text(found, "torch").splitlines()
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
        '  mesh = DeviceMesh("cuda", torch.arange(32).reshape(2, 2, 8).permute(1, 0, 2).reshape(2, 16), '
        "mesh_dim_names=('tensor', 'data'))",
    ]
    every = audit_text(found)
    for name in ("torch:", "jax:", "megatron:", "mpi:", "nccl-tests:"):
        assert f"\n{name}\n" in every
    assert "... 22 more lines (--json has all)" in every


def test_text_of_no_placement():
    found = audit(range(48), Mesh(data=16, tensor=3), Topology.load("dgx-a100", nodes=6))
    assert audit_text(found).splitlines() == [
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
