"""The frozen public surface of DESIGN.md, for the parts that exist: names, signatures, attributes."""

import importlib
import inspect
import json
from pathlib import Path

import numpy as np
import pytest

import shardplan as sp

NAMES = (
    "Mesh", "TensorType", "Program", "Certificate", "Plan", "redistribute", "distribute", "collect", "run", "same",
    "Topology", "Placement", "placements", "ShardplanError", "ParseError", "LayoutError", "TypingError",
    "TopologyError", "Infeasible", "CertificateError", "ScheduleError", "TimedOut", "BackendError", "Timeline",
    "place", "reduce", "reductions", "audit", "simulate", "search", "Model", "Strategy",
    "partition", "Schedule", "Job", "load", "Requests", "fuse", "Weights", "refit",
    "why", "start",
)  # fmt: skip
SIGNATURES = {
    "redistribute": [("src", "-"), ("dst", "-"), ("topology", None), ("memory_limit", None), ("portable", False)],
    "distribute": [("array", "-"), ("t", "-")],
    "collect": [("shards", "-"), ("t", "-")],
    "placements": [("mesh", "-"), ("topology", "-")],
    "place": [("mesh", "-"), ("topology", "-"), ("traffic", None)],
    "reductions": [("placement", "-"), ("axes", "-"), ("nbytes", "-"), ("limit", 5)],
    "audit": [("ids", "-"), ("mesh", None), ("topology", None), ("traffic", None)],
    "simulate": [
        ("program", "-"),
        ("placement", "-"),
        ("topology", None),
        ("fidelity", None),
        ("params", None),
        ("algorithm", "auto"),
        ("requests", None),
    ],
    "search": [
        ("model", "-"),
        ("topology", "-"),
        ("global_batch", None),
        ("objective", "step"),
        ("prompt", None),
        ("output", None),
        ("concurrency", None),
        ("prune", True),
        ("executor", None),
        ("resume", None),
        ("top", 10),
        ("schedules", ("1f1b", "interleaved", "gpipe")),
        ("attention", None),
        ("placements", False),
        ("fidelity", "closed"),
        ("params", None),
        ("done", None),
    ],
    "fuse": [("program", "-"), ("placement", "-"), ("calibration", None)],
    "partition": [("model", "-"), ("strategy", "-"), ("topo", None)],
    "refit": [("source", "-"), ("target", "-"), ("topology", None), ("memory_limit", None), ("only", None)],
    "reduce": [("placement", "-"), ("axes", "-"), ("nbytes", "-")],
    "why": [("job", "-"), ("topology", None)],
    "start": [("job", "-"), ("state", "-"), ("backend", "reference"), ("timeout", 300.0)],
    "run": [("program", "-"), ("shards", "-"), ("backend", "reference"), ("timeout", 300.0)],
}
DROP_INS = {
    "shardplan.interop.torch.redistribute": [
        ("dtensor", "-"), ("placements", "-"), ("device_mesh", None), ("memory_limit", None), ("async_op", False),
    ],
    "shardplan.interop.torch.redistribute_state": [
        ("state", "-"), ("layouts", "-"), ("device_mesh", None), ("memory_limit", None),
    ],
    "shardplan.interop.jax.compare_with_xla": [
        ("source", "-"), ("sharding", "-"), ("shape", "-"), ("dtype", "-"), ("memory_limit", None),
    ],
    "shardplan.interop.jax.plan_of": [("source", "-"), ("destination", "-"), ("memory_limit", None)],
    "shardplan.interop.jax.type_of": [("array", "-"), ("sharding", "-"), ("dtype", None)],
    "shardplan.interop.jax.reshard": [("array", "-"), ("sharding", "-"), ("source", None)],
}  # fmt: skip
PLAN = ("program", "certificate", "seconds", "save", "load")
CERTIFICATE = (
    "program", "peak_bytes", "bound_bytes", "workspace_bytes", "sent_bytes", "received_bytes", "lower_bound_bytes",
    "level_bytes", "lower_bound_seconds", "status", "types", "check",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_names(name: str) -> None:
    assert hasattr(sp, name)
    assert name in sp.__all__
    assert name in dir(sp)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    found = inspect.signature(getattr(sp, name)).parameters.values()
    wanted = SIGNATURES[name]
    got = [(p.name, "-" if p.default is p.empty else p.default) for p in found]
    assert got[: len(wanted)] == wanted
    assert all(default != "-" for _, default in got[len(wanted) :]), "what is added has a default"


@pytest.mark.parametrize("name", DROP_INS)
def test_drop_ins(name: str) -> None:
    module, _, function = name.rpartition(".")
    pytest.importorskip(module.rpartition(".")[2])
    found = inspect.signature(getattr(importlib.import_module(module), function)).parameters.values()
    got = [(p.name, "-" if p.default is p.empty else p.default) for p in found]
    assert got[: len(DROP_INS[name])] == DROP_INS[name]
    assert all(default != "-" for _, default in got[len(DROP_INS[name]) :]), "what is added has a default"


def test_the_first_lines_of_the_surface() -> None:
    mesh = sp.Mesh(data=4, tensor=2)
    assert sp.Mesh({"data": 4, "tensor": 2}, devices=range(8, 16)).devices == tuple(range(8, 16))
    t = sp.TensorType("f32", (64, 48), ("data", "tensor"), mesh)
    assert t == sp.TensorType.parse("f32[64@data, 48@tensor]", mesh)
    assert sp.TensorType("f32", (64, 48), (None, ()), mesh, partial={"data": "sum"}, root=("tensor",)).layout.root
    assert t.local_shape(0) == (16, 24) == t.local_shape((0, 0))
    assert t.box(3) == ((16, 32), (24, 48)) == t.box((1, 1))
    assert t.mesh is mesh and t.layout.dims == (("data",), ("tensor",))
    u = sp.TensorType("f32", (64, 48), ("tensor", "data"), mesh)
    plan = sp.redistribute(t, u, topology=None, memory_limit=None, portable=False)
    assert all(hasattr(plan, name) for name in PLAN)
    assert isinstance(plan, sp.Plan) and isinstance(plan.program, sp.Program) and isinstance(plan.seconds, float)
    c = plan.certificate
    assert isinstance(c, sp.Certificate) and all(hasattr(c, name) for name in CERTIFICATE)
    assert c.check() is None and c.status in ("floor", "exact", "heuristic")
    for name in ("peak_bytes", "bound_bytes", "workspace_bytes"):
        assert type(getattr(c, name)) is int
    for name in ("sent_bytes", "received_bytes", "lower_bound_bytes"):
        value = getattr(c, name)
        assert type(value) is tuple and len(value) == 8 and all(type(n) is int for n in value)
    assert c.level_bytes == () and isinstance(c.lower_bound_seconds, float)
    assert c.types[-1] == u and len(c.types) == len(plan.program.steps)
    array = np.arange(64 * 48, dtype=np.float32).reshape(64, 48)
    shards = sp.distribute(array, t)
    assert isinstance(shards, list) and len(shards) == 8
    outs = sp.run(plan.program, shards, backend="reference")
    assert np.array_equal(sp.collect(outs, u), array)
    batch = sp.redistribute([t, u], [u, t])
    two = sp.run(batch.program, [shards, sp.distribute(array, u)])
    assert np.array_equal(sp.collect(two[0], u), array) and np.array_equal(sp.collect(two[1], t), array)


def test_topologies() -> None:
    topo = sp.Topology.load("dgx-a100", nodes=4)
    mesh = sp.Mesh(data=4, tensor=8)
    found = list(sp.placements(mesh, topo))
    assert found and all(p.device_mesh().shape == (4, 8) for p in found)
    assert all(np.prod(p.matrix) == 32 for p in found)
    t, u = (sp.TensorType.parse(x, mesh) for x in ("f32[64@data, 64@tensor]", "f32[64@tensor, 64@data]"))
    for where in (topo, found[0]):
        c = sp.redistribute(t, u, topology=where).certificate
        c.check()
        assert len(c.level_bytes) == 2 and 0 < c.lower_bound_seconds <= c.seconds


def test_placing_and_reducing() -> None:
    topo = sp.Topology.load("dgx-a100", nodes=2)
    mesh = sp.Mesh(data=4, tensor=4)
    best = sp.place(mesh, topo, traffic={("data",): 2e9, ("tensor",): 5e8})
    assert len(best) == len(list(sp.placements(mesh, topo)))
    assert isinstance(best[0].placement, sp.Placement) and isinstance(best[0].seconds, float)
    assert set(best[0].plans) == {("data",), ("tensor",)}
    assert all(isinstance(p, sp.Plan) for p in best[0].plans.values())
    assert 0 < best[0].lower_bound_seconds <= best[0].seconds <= best[-1].seconds
    listed = sp.place(mesh, topo, traffic={("data",): [("all_gather", 1e6, 3), ("all_reduce", 1e6, 1)]})
    assert isinstance(listed[0].plans["data",], tuple)
    placement = best[-1].placement
    plans = sp.reductions(placement, axes=("data",), nbytes=2**26, limit=5)
    assert all(hasattr(plans[0], name) for name in ("instructions", "seconds", "program", "certificate"))
    plan = sp.reduce(placement, axes=("data",), nbytes=2**26)
    assert isinstance(plan, sp.Plan) and plan.seconds <= plans[0].seconds * (1 + 1e-9)
    assert plan.program.input_types[0].local_bytes() == 2**26
    plan.certificate.check()
    assert sp.place(plan.program, topo)[0].seconds > 0


def test_texts_parse_back() -> None:
    topo = sp.Topology.load("dgx-a100", nodes=2)
    mesh = sp.Mesh(data=2, tensor=8)
    t = sp.TensorType("f32", (16,), ("tensor",), mesh)
    place = next(iter(sp.placements(mesh, topo)))
    program = sp.redistribute(t, sp.TensorType("f32", (16,), ("data",), mesh)).program
    assert sp.Mesh.parse(str(mesh)) == mesh
    assert sp.TensorType.parse(str(t), mesh) == t
    assert sp.Topology.parse(str(topo)) == topo
    assert sp.Placement.parse(str(place)) == place
    assert sp.Program.parse(str(program)) == program


def test_plan_files(tmp_path: Path) -> None:
    mesh = sp.Mesh(x=2)
    plan = sp.redistribute(sp.TensorType("f32", (8,), ("x",), mesh), sp.TensorType("f32", (8,), (None,), mesh))
    plan.save(tmp_path / "plan.json")
    raw = json.loads((tmp_path / "plan.json").read_text())
    assert set(raw) == {"format", "program", "certificate", "seconds"}
    assert set(CERTIFICATE) - {"check", "program"} <= set(raw["certificate"])
    assert sp.Plan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize("package", ["shardplan", "shardplan.fused", "shardplan.fused.triton"])
def test_every_name_that_is_loaded_late_is_there(package: str) -> None:
    """A package's table of late names says modules by text, which no type checker follows after a rename."""
    module = importlib.import_module(package)
    assert module.__all__
    for name in module.__all__:
        assert getattr(module, name) is not None
