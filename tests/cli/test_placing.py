"""The commands place, reduce and audit: what they print and write, and one line for every mistake."""

import json
import xml.etree.ElementTree as ET

import pytest

import shardplan as sp
from cli.command_call import call

WHERE = ("--topology", "gcp-a100x16", "--nodes", "2", "--mesh", "data=16,tensor=2")


def test_place_prints_the_ranking(capsys, tmp_path):
    path = tmp_path / "best.svg"
    status, out, err = call(capsys, "place", *WHERE, "--traffic", "data=2GB*1,tensor=500MB", "--show", "--svg", path)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("traffic  `tensor`: 500 MB a step as 8 calls of 62.5 MB")
    assert max(map(len, lines[:2])) <= 80
    lines = lines[3:]
    assert lines[0].split() == ["seconds", "x", "best", "bound", "stock", "placement"]
    assert lines[1].endswith("data=[2, 8], tensor=[1, 2]")
    assert "all_reduce over data: 2 GB" in out and "a cell is rank (data, tensor)" in out
    assert ET.fromstring(path.read_text()).tag.endswith("svg")


def test_place_as_json_has_the_attribute_names(capsys):
    _, out, _ = call(capsys, "place", *WHERE, "--traffic", "data=2GB*1", "--json", "--top", "1")
    found = json.loads(out)
    (row,) = found["placements"]
    assert {"placement", "seconds", "plans", "lower_bound_seconds"} <= set(row)
    best = sp.place(sp.Mesh(data=16, tensor=2), sp.Topology.load("gcp-a100x16", nodes=2), {"data": 2e9})
    assert row["seconds"] == best[0].seconds
    assert found["count"] == len(best) and found["placement_gain"] == best.placement_gain
    assert [sp.Program.parse(p) for p in row["plans"]["data"]] == [best[0].plans["data",].program]


def test_a_bare_size_is_a_steps_total(capsys):
    """As in `audit`, and as `sp.place` reads the same text."""
    _, out, _ = call(capsys, "place", *WHERE, "--traffic", "data=2GB", "--json", "--top", "1")
    found = json.loads(out)
    best = sp.place(sp.Mesh(data=16, tensor=2), sp.Topology.load("gcp-a100x16", nodes=2), "data=2GB")
    assert found["placements"][0]["seconds"] == best[0].seconds
    assert found["traffic"] == [
        "`data`: 2 GB a step as 13 calls of 154 MB, all but the last behind compute; data=SIZE*N says N calls of SIZE"
    ]


def test_place_takes_a_program(capsys, tmp_path):
    plan = tmp_path / "plan.json"
    assert call(capsys, "reduce", "data", *WHERE, "--bytes", "1MiB", "--out", plan)[0] == 0
    status, out, _ = call(capsys, "place", plan, "--topology", "gcp-a100x16", "--nodes", "2")
    assert status == 0 and "all_reduce over data: 1.05 MB" in out


def test_reduce_prints_plan_paper_and_stock(capsys, tmp_path):
    path = tmp_path / "plan.json"
    more = ("--placement", "data=[2,8],tensor=[1,2]", "--bytes", "256MiB", "--algorithm", "ring")
    status, out, err = call(capsys, "reduce", "data", *WHERE, *more, "--out", path)
    assert (status, err) == (0, "")
    assert out.startswith("placement  data=[2, 8], tensor=[1, 2] on node=2 x gpu=16: as asked\nprogram\n")
    assert out.count("placement  ") == 1
    assert "\npaper      (node, InsideGroup, ReduceScatter); (node, Parallel(root),\n" in out
    assert "stock      one collective takes 126 ms, 1.83 x this" in out
    plan = sp.Plan.load(path)
    plan.certificate.check()
    assert plan.certificate.algorithm == "ring"
    assert call(capsys, "check", path)[0] == 0
    _, text, _ = call(capsys, "reduce", "data", *WHERE, *more, "--json")
    found = json.loads(text)
    assert found["seconds"] == plan.seconds and found["matrix"] == [[2, 8], [1, 2]]


def test_reduce_answers_for_a_launch(capsys, tmp_path):
    """As `audit` takes it: cyclic ranks have pairs of neighbours across the nodes, block ones the whole of `tensor`."""
    base = ("reduce", "data", *WHERE, "--bytes", "1MiB")
    best = "placement  data=[1, 16], tensor=[2, 1] on node=2 x gpu=16: the best for this;\n"
    assert call(capsys, *base)[1].startswith(f"{best}           --placement says another\n")
    block = "placement  data=[2, 8], tensor=[1, 2] on node=2 x gpu=16: that of the launch\n"
    status, out, _ = call(capsys, *base, "--rank-order", "block")
    asked = call(capsys, *base, "--placement", "data=[2,8],tensor=[1,2]")[1]
    assert status == 0 and out.startswith(block) and out.split("\n", 1)[1] == asked.split("\n", 1)[1]
    _, out, _ = call(capsys, *base, "--rank-order", "cyclic")
    assert out.startswith("placement  data=[1, 16], tensor=[2, 1] on node=2 x gpu=16: that of the launch\n")
    hosts = tmp_path / "hosts"
    hosts.write_text("h[00-01] slots=16\n")
    assert call(capsys, *base, "--hostfile", hosts)[1].startswith(block)
    code = call(capsys, *base, "--hostfile", hosts, "--export", "jax")[1]
    assert code == call(capsys, *base, "--placement", "data=[2,8],tensor=[1,2]", "--export", "jax")[1]
    for more, message in (
        (("--rank-order", "cyclic", "--export", "jax"), "an export has the ranks of --placement, host by host; those"),
        (("--rank-order", "block", "--placement", "data=[2,8],tensor=[1,2]"), "--placement says where, and so does a"),
        (("--rank-order", ",".join(map(str, [*range(1, 32), 0]))), "the launch is no placement: 2 of the 16 groups"),
    ):
        status, out, err = call(capsys, *base, *more)
        assert (status, out) == (2, "") and message in err


@pytest.mark.parametrize(
    ("spelling", "ours"),
    [
        ("Ring", "ring"),
        ("NCCL_ALGO=Tree", "tree"),
        ("NCCL_ALGO=NVLSTree NCCL_PROTO=Simple", "nvls_tree Simple"),
        ("NVLS", "nvls"),
        ("ring,ll128", "ring LL128"),
        ("NCCL_PROTO=LL NCCL_ALGO=Ring", "ring LL"),
    ],
)
def test_algorithms_by_the_names_that_users_set(spelling, ours, capsys):
    where = ("--topology", "dgx-h100", "--nodes", "2", "--mesh", "data=16")
    for command in (
        ("place", *where, "--traffic", "data=1GB", "--json"),
        ("reduce", "data", *where, "--bytes", "1MiB"),
        ("audit", *where, "--traffic", "data=1GB", "--json"),
    ):
        told = [call(capsys, *command, "--algorithm", name) for name in (spelling, ours)]
        assert told[0] == told[1] and told[0][0] == 0
    assert json.loads(told[0][1])["shares"][0]["algorithm"].startswith(ours)


@pytest.mark.parametrize("text", ["NCCL_PROTO=LL", "Ring,Tree", "NCCL_PROTO=LL NCCL_PROTO=LL128 NCCL_ALGO=Ring", ""])
def test_one_algorithm_prices_all(text, capsys):
    status, _, err = call(capsys, "place", *WHERE, "--traffic", "data=1GB", "--algorithm", text)
    assert status == 2 and f"--algorithm {text!r}: legal is one algorithm, with a protocol or without: Ring, " in err


def test_an_axis_is_kept_inside_a_node(capsys):
    """A tensor axis of 16 is worth two nodes for a gigabyte of data, unless it is to stay inside one."""
    where = ("--topology", "gcp-a100x16", "--nodes", "2", "--mesh", "tensor=2,data=16", "--traffic", "data=1GB")
    for command in ("place", "audit"):
        found = json.loads(call(capsys, command, *where, "--inside", "tensor=node", "--json")[1])
        best = found["placements"][0]["matrix"] if command == "place" else found["best"]
        assert best == [[1, 2], [2, 8]]
        free = json.loads(call(capsys, command, *where, "--json")[1])
        assert (free["placements"][0]["matrix"] if command == "place" else free["best"]) == [[2, 1], [1, 16]]
        status, _, err = call(capsys, command, *where, "--inside", "tensor=node,data=node")
        assert status == 2 and "satisfies the options; to stay inside: tensor=node, data=node" in err
        status, _, err = call(capsys, command, "--topology", "dgx-a100", "--mesh", "tensor=2,data=16",
                              "--traffic", "data=1GB", "--inside", "data=node")  # fmt: skip
        assert status == 2 and "axis 'data' of size 16 cannot stay inside a node of 8 devices (node=4 x gpu=8)" in err
    _, out, _ = call(capsys, "audit", *where, "--inside", "tensor=node")
    assert "\ninside   tensor=node\n" in out and "\ncause    `tensor` spans 2 nodes, and is to stay inside one\n" in out
    assert "\nbest     tensor=[1, 2], data=[2, 8]\n" in out and "less than the " in out


def test_reduce_lists_programs(capsys):
    more = ("--placement", "data=[2,8],tensor=[1,2]", "--bytes", "1MiB", "--all", "--top", "3")
    _, out, _ = call(capsys, "reduce", "data", *WHERE, *more)
    assert out.startswith("93 programs, 1.05 MB a device over node=2 x gpu=8")
    assert [line[:4] for line in out.splitlines() if line[:4].strip()] == ["93 p", "   1", "   2", "   3", "... "]
    _, out, _ = call(capsys, "reduce", "data", *WHERE, *more, "--limit", "0", "--json")
    assert json.loads(out)["count"] == 3


@pytest.mark.parametrize(
    ("name", "part"), [("torch", "def "), ("jax", "shard_map"), ("mpi", "Split"), ("msccl", "<algo ")]
)
def test_reduce_exports(name, part, capsys):
    more = ("--placement", "data=[2,8],tensor=[1,2]", "--bytes", "1MiB", "--export", name)
    status, out, _ = call(capsys, "reduce", "data", *WHERE, *more)
    assert status == 0 and part in out


def test_audit_and_its_status(capsys, tmp_path):
    path = tmp_path / "launch.svg"
    launch = ("audit", "--topology", "gcp-a100x16", "--nodes", "2", "--mesh", "data=2,tensor=16")
    more = ("--rank-order", "cyclic", "--traffic", "tensor=2GB,data=100MB")
    status, out, err = call(capsys, *launch, *more, "--svg", path)
    assert (status, err) == (0, "")
    assert out.startswith(
        "34.55 times the best: `tensor` spans 2 nodes; use the call for megatron\ntraffic  `tensor`: 2 GB a step as 32"
    )
    assert ET.fromstring(path.read_text()).tag.endswith("svg")
    assert call(capsys, *launch, *more, "--fail-above", "2")[0] == 1
    assert call(capsys, *launch, *more, "--fail-above", "100")[0] == 0
    status, out, _ = call(capsys, *launch, *more, "--json", "--fail-above", "2")
    assert status == 1 and json.loads(out)["verdict"] == "interleaved"


@pytest.mark.parametrize(
    "command",
    [
        ("place", "--mesh", "data=16,tensor=4", "--traffic", "data=1GB"),
        ("reduce", "data", "--mesh", "data=16,tensor=4", "--bytes", "1MiB"),
        ("reduce", "data", "--mesh", "data=16,tensor=4", "--bytes", "1MiB", "--all"),
        ("audit", "--mesh", "data=16,tensor=4", "--traffic", "data=1GB"),
        ("redistribute", "f32[64@data]", "f32[64]", "--mesh", "data=16,tensor=4"),
    ],
)
def test_a_library_that_nobody_measured_says_so(command, capsys):
    told = []
    for preset, library in (("tpu-v5p", "xla"), ("gcp-a100x16", "ring")):
        _, out, _ = call(capsys, *command, "--topology", preset)
        told.append("\nlibrary  " in out and f" {library}: nobody measured it" in out)
        _, out, _ = call(capsys, *command, "--topology", preset, "--json")
        found = json.loads(out)["library"]
        assert (found["name"], found["measured"] is None) == (library, library == "xla")
    assert told == [True, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("place", *WHERE), "place needs --mesh with --traffic"),
        (("place", "--mesh", "data=4", "--traffic", "data=1GB"), "--topology is needed"),
        (("place", *WHERE, "--traffic", "data=1GB", "--top", "0"), "--top 0: at least 1 placement is printed"),
        (("place", *WHERE, "--traffic", "data"), "--traffic: expected axes=bytes"),
        (("place", *WHERE, "--traffic", "pipe=1GB"), "unknown axis 'pipe': the mesh has data=16, tensor=2"),
        (("place", *WHERE, "--traffic", "tesor=1GB"), "tensor=2; did you mean 'tensor'"),
        (("place", *WHERE, "--traffic", "data=1GB", "--inside", "dat=node"), "did you mean 'data'"),
        (("place", *WHERE, "--traffic", "data=1GB", "--inside", "data=nod"), "did you mean 'node'"),
        (("place", *WHERE, "--traffic", "data=1GB", "--inside", "data"), "--inside 'data': legal is AXIS=LEVEL"),
        (("place", *WHERE, "--traffic", "data=1GB", "--programs", "x"), "programs='x' is unknown; legal are 'best'"),
        (("place", *WHERE, "--traffic", "data=1GB", "--svg", "no/such/file"), "there is no folder no/such"),
        (("reduce", "pipe", *WHERE, "--bytes", "1MB"), "the mesh has data=16, tensor=2"),
        (("reduce", "data", *WHERE, "--bytes", "much"), "--bytes: "),
        (
            ("reduce", "data", *WHERE, "--bytes", "1MB", "--placement", "data=16"),
            "--placement 'data=16': expected data=[",
        ),
        (("reduce", "data", *WHERE, "--bytes", "1MB", "--placement", "data=[2,2], tensor=[1,2]"), "has product 4"),
        (("reduce", "data", *WHERE, "--bytes", "1MB", "--target", "half"), "target 'half' is unknown"),
        (
            ("reduce", "data", *WHERE, "--bytes", "1MB", "--algorithm", "halving-doubling"),
            "algorithm 'halving-doubling' is unknown to library ring; legal: auto, ring, tree, network, p2p",
        ),
        (
            ("place", *WHERE, "--traffic", "data=1GB", "--algorithm", "nvls"),
            "algorithm 'nvls' is unknown to library ring; legal: auto, ring, tree, network, p2p",
        ),
        (("reduce", "data", *WHERE, "--bytes", "1MB", "--all", "--top", "0"), "--top 0: at least 1 program is printed"),
        (("reduce", "data", *WHERE, "--bytes", "1MB", "--all", "--export", "jax"), "--all lists all-reduces"),
        (("reduce", "data", *WHERE, "--bytes", "1MB", "--all", "--subsets"), "--all lists all-reduces"),
        (("audit", *WHERE, "--fail-above", "2"), "--fail-above compares seconds, which need --traffic"),
    ],
)
def test_mistakes(arguments, message, capsys):
    status, out, err = call(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("shardplan: ") and message in err
    assert len(err.splitlines()) <= 3


def test_an_unknown_export(capsys):
    more = ("--placement", "data=[2,8],tensor=[1,2]", "--bytes", "1MiB", "--export", "nccl")
    status, out, err = call(capsys, "reduce", "data", *WHERE, *more)
    assert status in (2, 4) and out == ""
    assert "torch" in err and "msccl" in err
