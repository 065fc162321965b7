"""Another kind of value than is meant, anywhere, is one clear line; a text is taken where its value is."""

import contextlib
import io
import json
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardplan as sp
from shardplan.cli import run_command

MESH = sp.Mesh(x=2, y=2)
T = sp.TensorType("f32", (8, 8), ("x", None), MESH)
U = sp.TensorType("f32", (8, 8), (None, "y"), MESH)
TOPO = sp.Topology.load("dgx-a100", nodes=2)
SMALL = sp.Topology.load("nominal", devices=4)
PLACE = next(iter(sp.placements(MESH, SMALL)))
PLAN = sp.redistribute(T, U)
ARRAY = np.arange(64, dtype=np.float32).reshape(8, 8)
SHARDS = sp.distribute(ARRAY, T)
TRAFFIC = {("x",): 1e6}


def one_line(error: sp.ShardplanError) -> bool:
    """A message is a line; of a malformed text the text and a mark below it follow."""
    message = str(error)
    lines = message.split("\n")
    pointed = isinstance(error, sp.ParseError) and error.position is not None
    return bool(message) and (len(lines) == 1 or (pointed and len(lines) == 3 and lines[2].strip() == "^"))


# What was accepted, or raised something of Python's own, before all was checked.

REFUSED: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: sp.redistribute(T, U, memory_limit=math.nan),
        "the memory limit is nan; legal is a whole number of bytes, its text such as '1 GB', or None",
    ),
    (
        lambda: sp.redistribute(T, U, memory_limit=math.inf),
        "the memory limit is inf; legal is a whole number of bytes, its text such as '1 GB', or None",
    ),
    (
        lambda: sp.redistribute(T, U, memory_limit=True),
        "the memory limit is True; legal is a whole number of bytes, its text such as '1 GB', or None",
    ),
    (
        lambda: sp.redistribute(T, U, memory_limit=1000.5),
        "the memory limit is 1000.5; legal is a whole number of bytes, its text such as '1 GB', or None",
    ),
    (lambda: sp.redistribute(T, U, memory_limit=-8), "the memory limit is -8 bytes; it must be at least 1"),
    (lambda: sp.redistribute(T, U, portable="no"), "portable is 'no'; legal is True or False"),
    (lambda: sp.redistribute(T, U, topology=5), "topology is 5; legal is a Topology, or its text such as 'dgx-h100'"),
    (lambda: sp.redistribute(None, None), "src is None; legal is a list of types"),
    (lambda: sp.redistribute(T, None), "redistribute takes two types, or two lists of types of equal length"),
    (lambda: sp.redistribute([T], [None]), "destination 0 is None; legal is a TensorType, or with mesh= its text"),
    (
        lambda: sp.redistribute("f32[8@x]", "f32[8]"),
        "the source is the text 'f32[8@x]', which needs mesh=: a Mesh or its text",
    ),
    (
        lambda: sp.redistribute(T, U, mesh="x=4"),
        "the source f32[8@x, 8] is on the mesh x=2, y=2, but mesh= is x=4; give mesh= with texts",
    ),
    (
        lambda: sp.TensorType("f32", (8.7,), ("x",), MESH),
        "the size of dim 0 is 8.7; legal is a whole number below 10**18",
    ),
    (lambda: sp.TensorType("f32", "88", ("x",), MESH), "shape is '88'; legal is a list of sizes"),
    (lambda: sp.TensorType("f32", 8, ("x",), MESH), "shape is 8; legal is a list of sizes"),
    (
        lambda: sp.TensorType("f32", (2**70,), ("x",), MESH),
        "the size of dim 0 is 1180591620717411303424; legal is a whole number below 10**18",
    ),
    (lambda: sp.TensorType("f32", (8,), (3,), MESH), "entry 0 of the layout is 3; legal is a list of names of axes"),
    (
        lambda: sp.TensorType("f32", (8,), "x", MESH),
        "the layout is 'x'; legal is a list of entries, one a dim: None, an axis, or a tuple of axes",
    ),
    (
        lambda: sp.TensorType("f32", (8,), (), MESH, partial=["x"]),
        "partial is ['x']; legal is a mapping of names of axes to a reduction",
    ),
    (lambda: sp.TensorType("f32", (8,), (), MESH, root="x"), "root is 'x'; legal is a list of names of axes"),
    (
        lambda: sp.TensorType("f32", (8,), (), None),
        "mesh is None; legal is a Mesh, or its text such as 'data=4,tensor=2'",
    ),
    (
        lambda: sp.TensorType(None, (8,), (), MESH).dtype,
        "unknown dtype None; legal dtypes are bool, i8, i16, i32, i64, "
        "u8, u16, u32, u64, f16, bf16, f32, f64, f8e4m3, f8e5m2, c64, c128",
    ),
    (
        lambda: sp.TensorType("f32", (8,), sp.Layout((("x",),)), MESH, partial={"y": "sum"}),
        "the layout [@x] says itself what is partial or root; give no partial= or root= with it",
    ),
    (
        lambda: sp.Layout((("x",),), ("y",)),
        "the partial axes ('y',) have the reduction None; legal are sum, max, min, product, band, bor, bxor",
    ),
    (lambda: sp.Mesh(x=2, devices=[0.5, 1.7]), "a device id is 0.5; legal is a whole number below 10**18"),
    (lambda: sp.Mesh(x=2, devices="01"), "devices is '01'; legal is a list of device ids"),
    (
        lambda: sp.Mesh(x=2, devices=[0, 2**63]),
        "device 9223372036854775808 is too large; device ids are 0 to 999999999999999999",
    ),
    (lambda: sp.Mesh([("x", 2)]), "the mesh is [('x', 2)]; legal is a mapping of names of axes to sizes, or keywords"),
    (lambda: sp.Mesh(x=4).split("x", a=2.0, b=2), "the part x.a is 2.0; legal is a whole number of at least 0"),
    (lambda: sp.Topology.load("dgx-a100", nodes=1.5), "nodes is 1.5; legal is a whole number below 10**18"),
    (lambda: sp.Topology.load(None), "topology None: legal is a preset's name, or a path to a .toml or .xml file"),
    (
        lambda: sp.Topology.load("dgx-a100", nodes=2**70),
        "nodes is 1180591620717411303424; legal is a whole number below 10**18",
    ),
    (lambda: sp.run(5, []), "run takes a Program, a Plan or a Job, got 5"),
    (lambda: sp.run(PLAN, 5), "shards is 5; legal is a list of arrays; for several inputs of such lists"),
    (lambda: sp.run(PLAN, SHARDS, timeout="5"), "timeout='5'; legal is a positive number of seconds"),
    (lambda: sp.distribute([1.0], T), "distribute takes a numpy array, got [1.0]"),
    (lambda: sp.distribute(ARRAY, None), "the type is None; legal is a TensorType, or with mesh= its text"),
    (lambda: sp.collect(None, T), "shards is None; legal is a list of arrays, one a device"),
    (
        lambda: sp.place(MESH, SMALL, 5),
        "traffic is 5; legal is a mapping of axes to bytes, or its text such as 'data=2GB'",
    ),
    (
        lambda: sp.place(MESH, SMALL, {"x": True}),
        "traffic over ('x',): all_reduce of True bytes, 1.0 times; legal are finite numbers of 0 or more",
    ),
    (
        lambda: sp.reduce(None, "x", 8),
        "placement is None; legal is a Placement, such as placements(mesh, topology) or place() gives",
    ),
    (lambda: sp.reduce(PLACE, "x", math.nan), "nbytes, in bytes, is nan; legal is a finite number of 0 or more"),
    (lambda: sp.reductions(PLACE, "x", 8, limit=2.5), "limit is 2.5; legal is a whole number below 10**18"),
    (lambda: sp.placements(MESH, None), "topology is None; legal is a Topology, or its text such as 'dgx-h100'"),
    (lambda: sp.Plan.load(5), "the path of a plan file is 5; legal is a path, or its text"),
    (
        lambda: sp.audit(None, MESH, SMALL),
        "ids is None; legal are a Launch, or topology ids, whole numbers in the mesh's shape",
    ),
    (
        lambda: sp.audit([0.0, 1, 2, 3], MESH, SMALL),
        "ids is [0.0, 1, 2, 3]; legal are a Launch, or topology ids, whole numbers in the mesh's shape",
    ),
    (lambda: sp.same(T, None), "an operand of same is None; legal is a TensorType, or with mesh= its text"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[m[:60] for _, m in REFUSED])
def test_another_kind_of_value_is_one_line(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(sp.ShardplanError) as caught:
        call()
    assert str(caught.value) == message


# Texts


def test_a_text_is_taken_where_its_value_is() -> None:
    text = "x=2, y=2"
    assert sp.TensorType("f32", (8, 8), ("x", None), text) == T == sp.TensorType.parse("f32[8@x, 8]", text)
    for mesh in (MESH, text, "x=2,y=2"):
        assert sp.redistribute("f32[8@x, 8]", "f32[8, 8@y]", mesh=mesh) == PLAN
        assert sp.redistribute(["f32[8@x, 8]", T], [U, "f32[8, 8@y]"], mesh=mesh) == sp.redistribute([T, T], [U, U])
        assert all(map(np.array_equal, sp.distribute(ARRAY, "f32[8@x, 8]", mesh=mesh), SHARDS))
        assert np.array_equal(sp.collect(SHARDS, "f32[8@x, 8]", mesh=mesh), ARRAY)
    limited = sp.redistribute(T, U, memory_limit=1000)
    assert sp.redistribute(T, U, memory_limit="1 kB") == limited == sp.redistribute(T, U, memory_limit=1e3)
    whole = sp.Topology.load("dgx-h100")
    mesh = sp.Mesh(data=whole.size // 8, tensor=8)
    ends = [sp.TensorType.parse(t, mesh) for t in ("f32[64@data]", "f32[64@tensor]")]
    for topology in ("dgx-h100", str(whole)):
        assert sp.redistribute(*ends, topology=topology) == sp.redistribute(*ends, topology=whole)
        assert [p.matrix for p in sp.placements(str(mesh), topology)] == [p.matrix for p in sp.placements(mesh, whole)]
        said = sp.place(str(mesh), topology, "data=2GB*1, tensor=all_gather:1MB*3")
        meant = sp.place(mesh, whole, {"data": 2e9, "tensor": [("all_gather", 1e6, 3)]})
        assert [(r.placement, r.seconds) for r in said] == [(r.placement, r.seconds) for r in meant]
    assert sp.place(mesh, whole, {"data": "2 GB"})[0].seconds == sp.place(mesh, whole, {"data": 2e9})[0].seconds
    assert sp.reduce(PLACE, "x", "64 MB") == sp.reduce(PLACE, ("x",), 64e6)
    assert [r.seconds for r in sp.reductions(PLACE, "x", "64 MB")] == [
        r.seconds for r in sp.reductions(PLACE, "x", 64e6)
    ]
    assert sp.Placement("x=2,y=2", str(SMALL), PLACE.matrix) == PLACE


def test_run_takes_a_plan() -> None:
    assert all(map(np.array_equal, sp.run(PLAN, SHARDS), sp.run(PLAN.program, SHARDS)))


def test_audit_is_a_value() -> None:
    ids = np.arange(16).reshape(2, 8).T  # tensor crosses the nodes
    found = sp.audit(ids, "data=8, tensor=2", TOPO, "tensor=2GB, data=1MB")
    assert (found.verdict, found.placement.describe()) == ("canonical", "data=[1, 8], tensor=[2, 1]")
    assert found.seconds > 0 and len(found.causes) == 1 and found.causes[0].startswith("`tensor` spans 2 nodes")
    assert set(found.fixes) == {"torch", "jax", "megatron", "mpi", "nccl-tests", "slurm", "torchrun"}
    assert "init_device_mesh" in found.fixes["torch"] or "DeviceMesh" in found.fixes["torch"]
    good = sp.audit(range(16), sp.Mesh(data=8, tensor=2), TOPO, {"tensor": 2e9})
    assert good.fixes == {} and good.causes == ("no matrix is faster for this traffic",)
    assert sp.audit(good.launch, traffic="tensor=2GB*1") == good
    with pytest.raises(sp.TopologyError, match=r"mesh data=5, tensor=8 has 40 devices, topology 'dgx-a100' has 32"):
        sp.audit(range(40), "data=5, tensor=8", "dgx-a100")
    with pytest.raises(sp.TopologyError, match="a Launch brings its own mesh, topology and hosts; give none with it"):
        sp.audit(good.launch, MESH)


# Garbage, drawn

HUGE = 10**5000
LISTS: list[Any] = [
    [],
    (),
    [None],
    [[]],
    [1, "a"],
    {},
    {"a": 1},
    {1: 2},
    {"x": None},
    {"x": []},
    set(),
    {1, 2},
    [[1, 2], [3]],
    (("x",), 5),
    [("x", "y", "z")],
    range(3),
    {("x",): [("all_reduce", "y", 1)]},
]
PLAIN: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    7,
    2**31,
    2**63,
    2**70,
    -(2**70),
    HUGE,
    0.5,
    1.5,
    -2.0,
    1e30,
    math.nan,
    math.inf,
    -math.inf,
    1j,
    b"",
    b"x",
    object(),
    object,
    int,
    type(None),
    len,
    Ellipsis,
    np.float32(2.5),
    np.int64(3),
    np.array(3),
    np.array([1.5, 2]),
    np.array([[1, 2], [3, 4]]),
    np.array(["a"]),
    np.dtype(">f4"),
    np.dtype([("a", "i4")]),
    Path("none"),
    Path("/"),
    MESH,
    T,
    TOPO,
    PLACE,
    PLAN,
    PLAN.program,
    PLAN.certificate,
    ARRAY,
    SHARDS,
    TRAFFIC,
]
TEXTS: list[Any] = [
    "",
    " ",
    "x",
    "no",
    "1",
    "-1",
    "nan",
    "inf",
    "1e9",
    "1 GB",
    "GB",
    "1 GX",
    "x=2",
    "x=0",
    "x=-1",
    "x=2,x=2",
    "x=99999999999999999999",
    "x=2 devices=0:999999999999999",
    "x=2 devices=[",
    "x=(a=2",
    "f32[8@x]",
    "f32[8@z]",
    "f32[",
    "f32[8]{+}",
    "f32[99999999999999999999]",
    "[@x]",
    "dgx-a100",
    "dgx",
    "a.toml",
    "/.toml",
    "\0.toml",
    "\0",
    "a\nb",
    "version = 1\n",
    "a = " + "[" * 3000,
    "x = 1" + "0" * 5000 + "\n",
    "data=2GB",
    "x=2GB",
    "x=1e400GB",
    "x=all_reduce:1GB*",
    "x=none:1GB",
    "x+x=1GB",
    "x" * 5000,
    "ü",
    "\u2028",
    "program",
    "program\n  mesh x=2\n  input %0: f32[8@x]\n  output %0",
    "program\n  mesh x=2\n  input %0: f32[8@x]\n  %1 = all_gather(%0; dim=(x), axes=3)\n  output %1",
    'program\n  mesh x=2\n  input %0: f32[8@x]\n  %1 = all_gather(%0; dim="\\q", axes=(x))\n  output %1',
    "mesh x=2\nplacement x=[99999999999999999999999]\n",
    "mesh x=2\nplacement x=[2]\n" + str(SMALL),
]
GARBAGE = PLAIN + LISTS + TEXTS

# Every function of the surface with arguments that are right; any of them is exchanged for garbage.
RIGHT: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "Mesh": (lambda axes, devices: sp.Mesh(axes, devices=devices), {"axes": {"x": 2}, "devices": [0, 1]}),
    "Mesh sizes": (lambda x: sp.Mesh(x=x), {"x": 2}),
    "Mesh.split": (lambda axis, a, b: MESH.split(axis, a=a, b=b), {"axis": "x", "a": 2, "b": 1}),
    "Mesh.parse": (sp.Mesh.parse, {"text": "x=2"}),
    "TensorType": (
        sp.TensorType,
        {"dtype": "f32", "shape": (8,), "spec": ("x",), "mesh": MESH, "partial": None, "root": ()},
    ),
    "TensorType.parse": (sp.TensorType.parse, {"text": "f32[8@x]", "mesh": MESH}),
    "TensorType.box": (T.box, {"device": 0}),
    "TensorType.local_shape": (T.local_shape, {"device": 0}),
    "Layout": (sp.Layout, {"dims": (("x",),), "partial": ("y",), "reduction": "sum", "root": ()}),
    "Layout.parse": (sp.Layout.parse, {"text": "[@x]"}),
    "same": (sp.same, {"t": T, "u": U}),
    "Program": (sp.Program, {"inputs": {"0": T}, "steps": (), "outputs": ("0",)}),
    "Program.parse": (sp.Program.parse, {"text": str(PLAN.program)}),
    "redistribute": (
        sp.redistribute,
        {"src": T, "dst": U, "topology": None, "memory_limit": None, "portable": False, "mesh": None},
    ),
    "redistribute a batch": (
        lambda a, b, mesh: sp.redistribute([T, a], [U, b], mesh=mesh),
        {"a": T, "b": U, "mesh": None},
    ),
    "distribute": (sp.distribute, {"array": ARRAY, "t": T, "mesh": None}),
    "collect": (sp.collect, {"shards": SHARDS, "t": T, "mesh": None}),
    "collect one": (lambda shard: sp.collect([shard, *SHARDS[1:]], T), {"shard": SHARDS[0]}),
    "run": (sp.run, {"program": PLAN, "shards": SHARDS, "backend": "reference", "timeout": 5.0}),
    "run one": (lambda shard: sp.run(PLAN, [*SHARDS[:-1], shard]), {"shard": SHARDS[-1]}),
    "Topology": (sp.Topology, {"name": "a", "levels": SMALL.levels, "device": SMALL.device}),
    "Topology.load": (sp.Topology.load, {"source": "dgx-a100", "nodes": 2}),
    "Topology.parse": (sp.Topology.parse, {"text": str(SMALL)}),
    "Topology.resize": (TOPO.resize, {"nodes": 2}),
    "Placement": (sp.Placement, {"mesh": MESH, "topology": SMALL, "matrix": PLACE.matrix}),
    "Placement.parse": (sp.Placement.parse, {"text": str(PLACE)}),
    "placements": (
        lambda **given: list(sp.placements(**given)),
        {"mesh": MESH, "topology": SMALL, "bounds": None, "inside": None},
    ),
    "place": (
        sp.place,
        {
            "mesh": MESH,
            "topology": SMALL,
            "traffic": TRAFFIC,
            "programs": "best",
            "algorithm": "auto",
            "bounds": None,
            "inside": None,
        },
    ),
    "place bytes": (
        lambda nbytes, count: sp.place(MESH, SMALL, {"x": [("all_reduce", nbytes, count)]}),
        {"nbytes": 8, "count": 1},
    ),
    "reduce": (
        sp.reduce,
        {
            "placement": PLACE,
            "axes": ("x",),
            "nbytes": 64,
            "target": "replicated",
            "algorithm": "auto",
            "subsets": False,
            "uncollapsed": False,
        },
    ),
    "reductions": (
        sp.reductions,
        {
            "placement": PLACE,
            "axes": ("x",),
            "nbytes": 64,
            "limit": 3,
            "top": None,
            "algorithm": "auto",
            "uncollapsed": False,
        },
    ),
    "audit": (
        sp.audit,
        {"ids": [0, 1, 2, 3], "mesh": MESH, "topology": SMALL, "traffic": TRAFFIC, "hosts": (), "device": "cuda"},
    ),
    "Plan": (sp.Plan, {"program": PLAN.program, "certificate": PLAN.certificate}),
    "Plan.load": (sp.Plan.load, {"path": "none.json"}),
    "Plan.save": (PLAN.save, {"path": "plan.json"}),
}
CASES = [(name, parameter) for name, (_, right) in RIGHT.items() for parameter in right]


def called(name: str, parameter: str, value: Any) -> str:
    """Call with one argument exchanged: empty where it is refused in one line or taken, else what went wrong."""
    function, right = RIGHT[name]
    try:
        function(**(right | {parameter: value}))
    except sp.ShardplanError as error:
        return "" if one_line(error) else f"several lines: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("values"))


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_taken(name: str) -> None:
    """The cases are no strawmen: without an exchange every call works (a file that is not there apart)."""
    function, right = RIGHT[name]
    if name == "Plan.load":
        PLAN.save("none.json")
    function(**right)


@pytest.mark.parametrize(("name", "parameter"), CASES, ids=[f"{n}-{p}" for n, p in CASES])
def test_garbage_raises_nothing_raw(name: str, parameter: str) -> None:
    wrong = {repr(value)[:60] if value is not HUGE else "huge": called(name, parameter, value) for value in GARBAGE}
    assert {value: found for value, found in wrong.items() if found} == {}


def garbage() -> st.SearchStrategy[Any]:
    """Values of any kind, nested."""
    # Hypothesis prints what fails, and Python no integer of 5,000 digits
    plain = [value for value in GARBAGE if value is not HUGE]
    leaves = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=12),
        st.binary(max_size=4),
        st.complex_numbers(),
        st.sampled_from(plain),
    )
    keys = st.one_of(st.integers(), st.text(max_size=4), st.sampled_from(("x", "y", ("x",), ("x", "y"))))
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(keys, inner, max_size=3),
        ),
        max_leaves=6,
    )


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(CASES), garbage())
def test_drawn_garbage_raises_nothing_raw(case: tuple[str, str], value: Any) -> None:
    if case == ("Plan.save", "path") and isinstance(value, (str, Path)) and os.path.isabs(value):
        return  # a folder that is there would be written to
    assert called(*case, value) == ""


# What garbage may be taken for: a value of the kind that is meant, and no other.

KINDS: dict[tuple[str, str], tuple[Any, ...]] = {
    ("redistribute", "portable"): (True, False),
    ("redistribute", "memory_limit"): (None, 2**31, "1 GB"),
    ("Mesh sizes", "x"): (1, 2, 7, np.int64(3)),
    ("TensorType.box", "device"): (0, 1, 2, np.int64(3)),
    ("run", "timeout"): (1, 2, 7, 2**31, 0.5, 1.5),
    ("Topology.load", "nodes"): (1, 2, 7, [1], (2,), np.int64(3)),
    ("reduce", "subsets"): (True, False),
    ("reductions", "limit"): (None, 1, 2, 7, np.int64(3)),
}


@pytest.mark.parametrize("case", KINDS, ids=["-".join(case) for case in KINDS])
def test_nothing_is_taken_that_is_not_meant(case: tuple[str, str]) -> None:
    function, right = RIGHT[case[0]]
    for value in GARBAGE:
        meant = any(
            value is x
            or (type(value) is type(x) and isinstance(x, (int, float, str, list, tuple, np.generic)) and value == x)
            for x in KINDS[case]
        )
        if meant:
            continue
        with pytest.raises(sp.ShardplanError):
            function(**(right | {case[1]: value}))


# The command line, under --json

WORDS = [t for t in TEXTS if "\0" not in t] + ["--", "-", "[]", "{}", "1.5", "-5", "1e309", "0x10", "None", "true"]
FUZZED: dict[str, list[str]] = {
    "redistribute": [
        "f32[8@x]",
        "f32[8]",
        "--mesh=x=2",
        "--memory-limit=1 GB",
        "--topology=dgx-a100",
        "--nodes=2",
        "--dst-mesh=x=2",
        "--out=plan.out",
        "--svg=plan.svg",
    ],
    "check": ["plan.json"],
    "show": ["f32[8@x]", "--mesh=x=2", "--svg=picture.svg"],
    "run": ["plan.json", "--backend=reference", "--timeout=5", "--trace=trace.json"],
    "place": [
        "--topology=dgx-a100",
        "--nodes=2",
        "--mesh=x=16",
        "--traffic=x=1GB",
        "--programs=best",
        "--algorithm=ring",
        "--inside=x=node",
        "--top=1",
    ],
    "reduce": [
        "x",
        "--topology=dgx-a100",
        "--nodes=2",
        "--mesh=x=16",
        "--bytes=1MB",
        "--target=root",
        "--algorithm=ring",
        "--placement=x=[2,8]",
        "--limit=2",
        "--top=1",
        "--export=torch",
        "--out=plan.out",
    ],
    "audit": [
        "--topology=dgx-a100",
        "--nodes=2",
        "--mesh=x=16",
        "--traffic=x=1GB",
        "--fail-above=2",
        "--fix=torch",
        "--rank-order=block",
        "--hostfile=hosts",
        "--megatron=tp-dp",
        "--svg=picture.svg",
    ],
    "lab run": [
        "plan.json",
        "--cluster=2x2",
        "--rates=100,1000",
        "--engine=ring",
        "--leaf=ns",
        "--repetitions=1",
        "--mesh=x=4",
        "--reduce=x",
        "--bytes=1MB",
        "--png=a.png",
    ],
    "lab sweep": [
        "--cluster=2x2",
        "--rates=100,1000",
        "--mesh=x=4",
        "--axes=x",
        "--bytes=1MB",
        "--engine=ring",
        "--limit=1",
        "--repetitions=1",
        "--out=sweep.json",
    ],
    "lab validate": ["none.json", "--png=a.png"],
}


def drawn_arguments(count: int, seed: int) -> list[list[str]]:
    """Commands with one argument exchanged, left out or doubled, under --json."""
    rng = random.Random(seed)
    out: list[list[str]] = []
    for k in range(count):
        command = list(FUZZED)[k % len(FUZZED)]
        words = list(FUZZED[command])
        at = rng.randrange(len(words))
        name, sep, _ = words[at].partition("=")
        option = sep and name.startswith("--")
        garbage = rng.choice(WORDS)
        words[at : at + 1] = rng.choice([[f"{name}={garbage}" if option else garbage]] * 4 + [[], [words[at]] * 2])
        keep = [w for w in words if not w.startswith("--") or rng.random() < 0.7 or w.startswith(name)]
        out.append([*command.split(), *keep, "--json"])
    return out


def ran(arguments: list[str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = run_command(arguments)
    return status, out.getvalue(), err.getvalue()


@pytest.mark.parametrize("block", range(10))
def test_the_command_line_prints_one_object_or_one_line(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 commands, seeded; the lab is not started: what it is asked is read first."""
    from shardplan.execution.lab import needs

    monkeypatch.setattr(needs, "missing", lambda: "there is no lab here")
    Path("plan.json").write_text("")
    PLAN.save("plan.json")
    for arguments in drawn_arguments(300, 20211201)[block::10]:
        try:
            status, out, err = ran(arguments)
        except Exception as error:
            raise AssertionError(f"{arguments}: {type(error).__name__}: {error}") from error
        lines = err.splitlines()
        if arguments[0] == "lab":  # long work says before what it is about to do
            lines = [line for k, line in enumerate(lines) if line.startswith(("shardplan: ", "  "))]
        assert status in (0, 1, 2, 3, 4), arguments
        said = json.loads(out)
        assert isinstance(said, dict) and len(out.splitlines()) == 1, arguments
        if status > 1 and "fits" not in said:
            assert said["status"] == status and lines and f"shardplan: {said['message']}\n" in err, (
                arguments,
                out,
                err,
            )
            assert len(lines) == 1 or (len(lines) == 3 and lines[2].strip() == "^"), (arguments, err)
