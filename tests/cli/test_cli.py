"""The commands: what they print, what they write, and one clear line with the right status for every mistake."""

import hashlib
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from typer.main import get_command

import shardplan as sp
from cli.command_call import call
from shardplan.cli import app
from shardplan.core.ops import AllGather, Send
from shardplan.core.step import Step
from shardplan.plans.certificate import issue

MESH = "data=2,tensor=3"
SRC, DST = "f32[4@data, 6@tensor]", "f32[4, 6@data]"


def redistribute(*more, source=SRC, destination=DST, mesh=MESH):
    return ("redistribute", source, destination, "--mesh", mesh, *more)


@pytest.fixture
def plan_file(tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert call(capsys, *redistribute("--out", path))[0] == 0
    return path


def test_every_command_takes_a_topology_by_both_names():
    both = {"--topology", "--on"}
    named = {
        name: [set(o.opts) for o in c.params if both & set(o.opts)] for name, c in get_command(app).commands.items()
    }
    assert {n for n, found in named.items() if found} >= {"redistribute", "place", "plan", "fuse", "refit", "run"}
    assert all(found in ([], [both]) for found in named.values()), named


# What is printed


def test_redistribute_prints_the_annotated_plan(capsys):
    status, out, err = call(capsys, *redistribute())
    mesh = sp.Mesh(data=2, tensor=3)
    plan = sp.redistribute(sp.TensorType.parse(SRC, mesh), sp.TensorType.parse(DST, mesh))
    assert (status, err) == (0, "")
    assert out == f"{plan}\n"


def test_json_is_one_object_with_the_attribute_names(capsys):
    status, out, _ = call(capsys, *redistribute("--json"))
    found = json.loads(out)
    assert status == 0 and len(out.splitlines()) == 1
    assert {"program", "certificate", "seconds"} == set(found)
    assert str(sp.Program.parse(found["program"])) == found["program"]
    names = {"peak_bytes", "bound_bytes", "workspace_bytes", "received_bytes", "lower_bound_bytes", "level_bytes"}
    assert names | {"lower_bound_seconds", "status", "types"} <= set(found["certificate"])
    assert max(found["certificate"]["received_bytes"]) == 48


def test_a_batch_is_one_plan(capsys):
    found = call(capsys, *redistribute("--json", source=f"{SRC}; f32[6@data]", destination=f"{DST}; f32[6@tensor]"))
    assert found[0] == 0
    assert len(sp.Program.parse(json.loads(found[1])["program"]).inputs) == 2


def test_another_mesh_other_devices_and_a_topology(capsys):
    status, out, _ = call(
        capsys, *redistribute("--dst-mesh", "data=2 devices=8:10", "--topology", "dgx-a100", "--nodes", "2", "--json")
    )
    found = json.loads(out)
    assert status == 0
    assert len(found["certificate"]["level_bytes"]) == 2
    assert [m.devices for m in sp.Program.parse(found["program"]).meshes][-1] == (8, 9)


def test_a_memory_limit_is_kept(capsys):
    status, out, _ = call(capsys, *redistribute("--memory-limit", "100B", "--json"))
    certificate = json.loads(out)["certificate"]
    assert status == 0
    assert certificate["memory_limit"] == 100 and certificate["workspace_bytes"] <= 100


def test_a_limit_that_only_many_chunks_keep_is_planned_and_says_so(capsys):
    move = redistribute(source="f32[1024@x, 1024]", destination="f32[1024, 1024@x]", mesh="x=2")
    status, _, err = call(capsys, *move, "--memory-limit", "1B")
    assert status == 3
    assert err.rstrip().endswith(
        "within 1 bytes a device: no plan; the least that works is 4227072 bytes, or 4194312 bytes with more than 64 "
        "chunks a step"
    )
    status, out, _ = call(capsys, *move, "--memory-limit", "4194312B")
    assert status == 0
    assert "\nchunks     262144 in the largest step, more than 64: each pays its latency again\n" in out


def test_a_batch_above_its_bound_says_so(capsys, tmp_path):
    a, b = "f32[8@x]", "f32[8@x]"
    move = ("redistribute", a, b, "--mesh", "x=2", "--dst-mesh", "x=2 devices=2:4")
    assert "above the bound" not in call(capsys, *move)[1]
    m, n = sp.Mesh(x=2), sp.Mesh({"x": 2}, devices=(2, 3))
    s, t = (sp.TensorType("f32", (8,), ("x",), mesh) for mesh in (m, n))
    path = tmp_path / "plan.json"
    there, back = Step(Send(t.layout, n), ("a",), ("c",)), Step(Send(s.layout, m), ("b",), ("d",))
    program = sp.Program({"a": s, "b": t}, [there, back], ("c", "d"))  # one after the other, where planned at once
    sp.Plan(program, issue(program, (s, t), (t, s), None, None, False)).save(path)
    status, out, _ = call(capsys, "show", path)
    line = (
        "order      peak 16 B above the bound: no order found of these moves keeps it, and this is the least peak found"
    )
    assert status == 0 and line.split() == out[out.index("order  ") :].split()[: len(line.split())]
    assert call(capsys, "check", path)[0] == 0


def test_portable_uses_collectives_of_mpi(capsys):
    status, out, _ = call(capsys, *redistribute("--portable", "--json"))
    program = sp.Program.parse(json.loads(out)["program"])
    assert status == 0
    assert "exchange" not in {step.op.name for step in program.steps}


def test_the_picture_draws_every_device(capsys):
    status, out, _ = call(capsys, *redistribute("--show"))
    assert status == 0
    assert out.count("device 5 (1, 2)") == 2
    assert "step 1" in out and "before" in out


def test_show_of_a_type_a_plan_and_a_program(capsys, plan_file, tmp_path):
    status, out, _ = call(capsys, "show", SRC, "--mesh", MESH, "--json")
    assert status == 0
    assert json.loads(out)["devices"][5]["box"] == [[2, 4], [4, 6]]
    program = tmp_path / "program.txt"
    program.write_text(str(sp.Plan.load(plan_file).program))
    for path in (plan_file, program):
        status, out, _ = call(capsys, "show", path, "--json")
        assert status == 0
        assert [f["title"] for f in json.loads(out)["frames"]] == ["before", "step 1"]
        assert "device 5 (1, 2)" in call(capsys, "show", path)[1]


def test_check_runs_the_plan_and_compares(capsys, plan_file):
    status, out, err = call(capsys, "check", plan_file)
    assert (status, err) == (0, "")
    assert "6 shards (72 elements)" in out and out.endswith("ok\n")
    found = json.loads(call(capsys, "check", plan_file, "--json")[1])
    assert (found["ok"], found["runs"], found["skipped"]) == (True, ["index", "random"], None)


def large(capsys, path, source, destination, mesh=MESH):
    assert call(capsys, *redistribute("--out", path, source=source, destination=destination, mesh=mesh))[0] == 0
    return path


def test_a_large_array_is_checked_and_run_by_blocks(capsys, tmp_path):
    path = large(capsys, tmp_path / "large.json", "f32[8192@data, 2049@tensor]", "f32[8192@tensor, 2049]")
    status, out, _ = call(capsys, "check", path)
    assert status == 0 and out.endswith("\nok\n") and "not run" not in out
    assert "6 shards (33570816 elements) equal the destination's, on index data, in " in " ".join(out.split())
    found = json.loads(call(capsys, "run", path, "--json")[1])
    whole = np.arange(8192 * 2049, dtype=np.int64) % (2**24 - 3)
    assert found["outputs"][0]["checksum"] == hashlib.sha256(whole.astype(np.float32).tobytes()).hexdigest()[:16]
    assert found["ok"] is True


def test_what_is_too_much_to_run_is_run_in_part_and_said(capsys, tmp_path):
    path = large(capsys, tmp_path / "huge.json", "f32[262144@data, 65536@tensor]", "f32[262144@tensor, 65536]")
    status, out, _ = call(capsys, "check", path)
    assert status == 0 and out.endswith("\nok in what was run\n")
    found = json.loads(call(capsys, "check", path, "--json")[1])
    assert found["ok"] is None and 0 < found["elements"] < found["total_elements"] == 2 * 262144 * 65536
    assert found["skipped"].startswith(
        f"{found['total_elements'] - found['elements']} of {found['total_elements']} elements"
    )
    status, out, err = call(capsys, "run", path)
    assert (status, out) == (3, "") and "more than 17179869184 are not run" in err


def test_check_of_partial_and_rooted_ends(capsys, tmp_path):
    path = tmp_path / "partial.json"
    for source, destination in (
        ("bf16[4]{+data}", "bf16[4]{root:data}"),
        ("i8[5@data]{max:tensor}", "i8[5@tensor]"),
        ("f32[6@data]", "f32[6]{+tensor}"),
        ("bool[6@data]{+tensor}", "bool[6]"),
    ):
        assert call(capsys, *redistribute("--out", path, source=source, destination=destination))[0] == 0
        assert call(capsys, "check", path)[0] == 0, (source, destination)
        assert json.loads(call(capsys, "run", path, "--json")[1])["ok"] is True


def test_run_prints_checksums(capsys, plan_file, tmp_path):
    status, out, _ = call(capsys, "run", plan_file, "--json")
    found = json.loads(out)
    assert (status, found["ok"], found["backend"]) == (0, True, "reference")
    program = tmp_path / "program.txt"
    program.write_text(str(sp.Plan.load(plan_file).program))
    again = json.loads(call(capsys, "run", program, "--json")[1])
    assert again["outputs"] == found["outputs"]


def test_run_of_computed_values_has_nothing_to_compare_with(capsys, tmp_path):
    path = tmp_path / "sum.txt"
    path.write_text(
        "program\n  mesh x=2\n  input %a: f32[4@x]\n  input %b: f32[4@x]\n"
        '  %c = elementwise(%a, %b; expr="a+b")\n  output %c\n'
    )
    status, out, err = call(capsys, "run", path, "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)["ok"] is None


def test_a_run_whose_output_differs_fails(capsys, tmp_path, monkeypatch):
    """A gather that is wrong on all devices alike, of the first of two outputs only: replicas agree."""
    path = tmp_path / "two.txt"
    path.write_text(
        "program\n  mesh x=2\n  input %a: f32[4@x]\n  input %b: f32[6@x]\n  %c = all_gather(%a; dim=0, axes=(x))\n"
        "  %d = all_gather(%b; dim=0, axes=(x))\n  output %c, %d\n"
    )
    right = json.loads(call(capsys, "run", path, "--json")[1])
    move = AllGather.move
    monkeypatch.setattr(AllGather, "move", lambda self, x, t, u: [y + (t.shape == (4,)) for y in move(self, x, t, u)])
    status, out, err = call(capsys, "run", path, "--json")
    found = json.loads(out)
    assert (right["ok"], found["ok"]) == (True, False)
    assert [a == b for a, b in zip(right["outputs"], found["outputs"], strict=True)] == [False, True]
    assert (status, err) == (4, f"shardplan: {path}: an output that was only moved differs from its input\n")


def test_svg_is_well_formed_and_stands_alone(capsys, tmp_path, plan_file):
    path = tmp_path / "picture.svg"
    for arguments in (redistribute("--svg", path), ("show", plan_file, "--svg", path)):
        assert call(capsys, *arguments)[0] == 0
        root = ET.parse(path).getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert "href" not in path.read_text()


# Mistakes


MISTAKES = [
    (redistribute(mesh="data=2,tensr=3"), 2, "'tensor': the mesh has data=2, tensr=3; did you mean 'tensr'", 14),
    (redistribute(source="f32[4@data, 6@data]"), 2, "axis 'data' is used twice", None),
    (redistribute(source="f32[5@data, 6@tensor]"), 2, "dtype and global shape must be equal", None),
    (redistribute(source="bf16[4@data, 6@tensor]"), 2, "dtype and global shape must be equal", None),
    (redistribute(source="f32[0@data, 6@tensor]"), 2, "has size 0; every dim has at least 1 element", None),
    (redistribute(source="f32[4@data 6@tensor]"), 2, "expected '@', ',' or ']' in a type", 11),
    (redistribute(source="q7[4, 6]"), 2, "unknown dtype 'q7'", 0),
    (
        redistribute(source="f32[4, 6]{avg:data}"),
        2,
        "unknown reduction 'avg'; legal are sum, max, min, product, band, bor, bxor, root",
        10,
    ),
    (redistribute(source="f32[4, 6"), 2, "expected '@', ',' or ']' in a type", 8),
    (redistribute(source=f"{SRC}; f32[6]"), 2, "a batch of 2 sources and 1 destinations", None),
    (redistribute(mesh="data=2,,tensor=3"), 2, "--mesh: expected an axis name", 7),
    (redistribute(mesh="data=2,data=3"), 2, "--mesh: axis 'data' is named twice", 7),
    (redistribute(mesh="data=0,tensor=3"), 2, "--mesh: axis 'data' has size 0", None),
    (redistribute(mesh=f"{MESH} devices=[0,1,2,2,3,4]"), 2, "--mesh: device 2 is listed twice", None),
    (redistribute(mesh=f"{MESH} devices=0:4"), 2, "has 6 places, but 4 devices are given", None),
    (redistribute("--dst-mesh", "data=x"), 2, "--dst-mesh: expected the size of an axis", 5),
    (redistribute("--memory-limit", "4 GX"), 2, "--memory-limit: 'GX' is no unit of bytes", 2),
    (redistribute("--memory-limit", "4"), 2, "--memory-limit: a number of bytes needs a unit", 1),
    (redistribute("--memory-limit", "-4 GB"), 2, "--memory-limit: expected a non-negative number and a unit", 0),
    (redistribute("--memory-limit", "0 B"), 2, "the memory limit is 0 bytes; it must be at least 1", None),
    (redistribute("--memory-limit", "40 B"), 3, "within 40 bytes a device: no plan; the least that works is", None),
    (redistribute("--topology", "dgx-a10"), 2, "did you mean 'dgx-a100'", None),
    (redistribute("--topology", "none.toml"), 2, "'none.toml' cannot be read: No such file or directory", None),
    (redistribute("--nodes", "2"), 2, "give --topology too", None),
    (redistribute("--topology", "dgx-a100", "--nodes", "0"), 2, "level 'node': size 0 is below 1", None),
    (
        redistribute("--topology", "dgx-a100", "--nodes", "1", mesh=f"{MESH} devices=4:10"),
        2,
        "device 9 is not on the topology dgx-a100 of 8 devices; legal ids are 0 to 7",
        None,
    ),
    (("show", SRC), 2, "a type needs a mesh", None),
    (("show", "f32[4@data", "--mesh", MESH), 2, "expected '@', ',' or ']' in a type", 10),
    (("show", "nothing.json"), 2, "cannot read nothing.json: No such file or directory", None),
    (("check", "nothing.json"), 2, "cannot read the plan file nothing.json: No such file or directory", None),
    (("run", "nothing.json"), 2, "cannot read nothing.json: No such file or directory", None),
    (("run", "nothing.json", "--backend", "abacus"), 2, "unknown backend 'abacus'; legal are reference", None),
    (("frobnicate",), 2, "No such command 'frobnicate'", None),
    (redistribute("--jsn"), 2, "No such option: --jsn", None),
    (redistribute("--nodes", "many"), 2, "Invalid value for '--nodes'", None),
    (("redistribute", SRC, DST), 2, "Missing option '--mesh'", None),
    (("redistribute", SRC), 2, "Missing argument 'DST'", None),
]


@pytest.mark.parametrize(("arguments", "status", "message", "column"), MISTAKES, ids=lambda x: str(x)[:60])
def test_a_mistake_is_one_clear_line(capsys, tmp_path, monkeypatch, arguments, status, message, column):
    monkeypatch.chdir(tmp_path)
    if arguments[0] == "redistribute":
        arguments = (*arguments, "--out", "plan.json", "--svg", "plan.svg")
    found, out, err = call(capsys, *arguments)
    lines = err.splitlines()
    assert (found, out) == (status, "")
    assert lines[0].startswith("shardplan: ") and message in lines[0]
    if column is None:
        assert len(lines) == 1
    else:
        assert len(lines) == 3 and lines[2].index("^") == 2 + column
    assert list(tmp_path.iterdir()) == []


def test_the_least_limit_that_is_stated_works(capsys):
    _, _, err = call(capsys, *redistribute("--memory-limit", "1 B"))
    least = int(err.rsplit("is ", 1)[1].split()[0])
    assert call(capsys, *redistribute("--memory-limit", f"{least} B"))[0] == 0


@pytest.mark.parametrize("option", ["--out", "--svg"])
def test_a_file_that_cannot_be_written(capsys, tmp_path, option):
    status, out, err = call(capsys, *redistribute(option, tmp_path / "none" / "plan"))
    assert (status, out) == (2, "")
    assert "there is no folder" in err and len(err.splitlines()) == 1
    assert call(capsys, *redistribute(option, tmp_path))[0] == 2


@pytest.mark.parametrize("option", ["--out", "--svg"])
def test_a_folder_is_refused_before_any_work(capsys, tmp_path, option):
    """Of a request that nothing can satisfy, too."""
    status, out, err = call(capsys, *redistribute("--memory-limit", "1 B", option, tmp_path))
    assert (status, out, err) == (2, "", f"shardplan: cannot write {tmp_path}: it is a folder\n")


def test_a_topology_file_with_a_wrong_unit(capsys, tmp_path):
    path = tmp_path / "t.toml"
    path.write_text(
        '[device]\nflops = "1 TFLOP/s"\nmemory = "80 GB"\nmemory_bandwidth = "2 TB/s"\n'
        '[[levels]]\nname = "gpu"\nsize = 8\nlink = "switch"\nbandwidth = "25 GB"\nlatency = "5 us"\n'
    )
    status, _, err = call(capsys, *redistribute("--topology", path))
    assert status == 2
    assert "bandwidth" in err and "GB/s" in err


# Plan files


def broken(path, change):
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("claim", "value"),
    [
        ("peak_bytes", 1),
        ("workspace_bytes", 1),
        ("received_bytes", [0] * 6),
        ("lower_bound_bytes", [48] * 6),
        ("seconds", 1e-9),
        ("lower_bound_seconds", 1.0),
        ("status", "perfect"),
        ("destinations", ["f32[4, 6@tensor] on data=2, tensor=3"]),
        ("types", []),
    ],
)
def test_a_tampered_claim_is_found(capsys, plan_file, claim, value):
    broken(plan_file, lambda raw: raw["certificate"].update({claim: value}))
    status, out, err = call(capsys, "check", plan_file)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1


def test_a_tampered_program_is_found(capsys, plan_file):
    text = "program\n  mesh data=2, tensor=3\n  input %0: f32[4@data, 6@tensor]\n  output %0"
    broken(plan_file, lambda raw: raw.update(program=text))
    status, _, err = call(capsys, "check", plan_file)
    assert status == 2
    assert "the program ends in f32[4@data, 6@tensor], which is not f32[4, 6@data]" in err


def test_corrupt_plan_files(capsys, plan_file):
    whole = plan_file.read_bytes()
    for content in (
        b"",
        whole[: len(whole) // 2],
        b"\xff\xfe\x00",
        b"[]",
        b'{"format": 99}',
        b'{"format": 2}',
        b"program\n  input",
    ):
        plan_file.write_bytes(content)
        for command in ("check", "run", "show"):
            status, out, err = call(capsys, command, plan_file)
            assert (status, out) == (2, ""), (content[:20], command)
            assert err.startswith("shardplan: ") and "Traceback" not in err


def test_wrong_shards_are_named_by_device_index_and_value():
    from shardplan.execution.verify import compare, index_data

    mesh = sp.Mesh(data=2, tensor=3, devices=range(10, 16))
    t = sp.TensorType.parse(SRC, mesh)
    array = index_data(t)
    shards = sp.distribute(array, t)
    compare(shards, t, array, t, "output 0")
    shards[4][1, 0] += 100
    with pytest.raises(sp.BackendError, match=r"output 0: device 14 holds 120.0 at index \(3, 2\), not 20.0"):
        compare(shards, t, array, t, "output 0")


# The process


def process(*arguments, **more):
    code = "from shardplan.cli import main; main()"
    root = Path(__file__).parents[2] / "src"
    env = os.environ | {"PYTHONPATH": str(root)}
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=env, **more)


def test_a_process_exits_with_the_status():
    assert process("--help").returncode == 0
    found = process(*redistribute("--memory-limit", "40 B"))
    assert (found.returncode, found.stdout) == (3, "")
    assert process("--version").stdout == f"shardplan {sp.__version__}\n"


def test_help_without_arguments_names_the_commands():
    found = process()
    assert found.returncode == 0
    assert all(command in found.stdout for command in ("redistribute", "check", "show", "run"))


def test_a_closed_pipe_is_quiet(tmp_path):
    read, write = os.pipe()
    os.close(read)
    code = "from shardplan.cli import main; main()"
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    found = subprocess.run(
        [sys.executable, "-c", code, *redistribute()], stdout=write, stderr=subprocess.PIPE, text=True, env=env
    )
    os.close(write)
    assert (found.returncode, found.stderr) == (141, "")


def test_no_framework_is_loaded():
    code = (
        "import sys; from shardplan.cli import run_command; "
        f"run_command({list(redistribute('--show'))!r}); "
        "sys.exit(bool({'torch', 'jax', 'matplotlib'} & set(sys.modules)))"
    )
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, env=env).returncode == 0
