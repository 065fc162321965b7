"""Exports of reduction programs on real process groups, JAX devices and MPI ranks, and what they refuse."""

import ast
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardplan as sp
from execution.jax_child import said
from execution.torch_launch import printed
from interop.export_cases import RANKS, Case, cases, chain, place, random_case, topology
from shardplan.core.ops import AllGather, AllReduce, AllToAll, Broadcast, Reduce, ReduceScatter, Slice, ToPartial
from shardplan.core.pattern import Groups
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.errors import BackendError
from shardplan.hardware.prices.cost import price
from shardplan.hardware.prices.fabric import Fabric
from shardplan.interop.exports.export import EXPORTS, export_text
from shardplan.interop.exports.recipe import SHOWN, RecipeStep, heading, recipe

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
BY_NAME = {case.name: case for case in cases()}
TWO = BY_NAME["two levels, uneven"]


def child(command: list[str], seconds: float = 120) -> Any:
    """The JSON object that a job prints; nothing of it outlives the call."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1] / "src")}
    job = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    try:
        out, err = job.communicate(timeout=seconds)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait(10)
    assert job.returncode == 0, err[-3000:]
    return json.loads(out[out.index("{") :])


def test_torch_on_gloo() -> None:
    """Bound, as text, and on a torch that sorts ranks and lacks the newer names."""
    pytest.importorskip("torch")
    found = printed(RANKS, HERE / "export_torch_child.py")
    assert found["wrong"] == []
    assert found["groups"] == found["distinct"] > 20  # shared between programs
    if found["sorts"]:
        assert found["kept order"] and found["unsorted"] > 5


def test_jax_on_cpu_devices() -> None:
    pytest.importorskip("jax")
    found = said("interop/export_jax_child.py")
    assert found["wrong"] == []
    assert found["devices"] == RANKS
    assert all(found["compiled"].values())  # the collectives themselves, each kind


@pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None or not (BIN / "mpiexec").exists(), reason="no MPI beside this Python"
)
def test_mpi() -> None:
    assert child([str(BIN / "mpiexec"), "-n", str(RANKS), sys.executable, str(HERE / "export_mpi_child.py")]) == {
        "wrong": []
    }


def test_the_cases_are_what_they_claim() -> None:
    found = cases()
    ops = {step.op.name for case in found for step in case.program.steps}
    assert ops == {"reduce_scatter", "all_reduce", "all_gather", "reduce", "broadcast", "to_partial"}
    masters = [case for case in found if any(move.masters for move in recipe(case.program).moves)]
    assert len(masters) >= 7
    assert any(move.kind == "reduce_scatter" for case in masters for move in recipe(case.program).moves if move.masters)
    assert any(case.size % 8 for case in found)
    for case in found:  # the reference sums
        if case.whole and case.name != "ends at a root":
            groups = case.input_type.mesh.group_places(case.input_type.layout.partial)
            for group in groups:
                total = case.payloads()[group].sum(axis=0)
                assert all((case.expected()[k] == total).all() for k in group), case.name


# The recipe


def test_member_order_is_level_major() -> None:
    """data.node and tensor share the outer level, which comes first, though the mesh has data's axes together."""
    r = recipe(BY_NAME["level order is not mesh order"].program)
    assert r.names == ("data.node", "data.gpu", "tensor")
    assert r.moves[0].axes == ("data.node", "tensor", "data.gpu")
    assert r.groups(r.moves[0]) == [(0, 2, 1, 3, 4, 6, 5, 7)]


def test_master_is_read_off_the_type() -> None:
    r = recipe(BY_NAME["master"].program)
    assert [(m.kind, m.axes, m.masters) for m in r.moves] == [
        ("reduce", ("data.gpu",), ()),
        ("all_reduce", ("data.node",), ("data.gpu",)),
        ("broadcast", ("data.gpu",), ()),
    ]
    assert r.groups(r.moves[1]) == [(0, 4)]
    assert r.moves[1].label == "data.node at data.gpu=0"


def test_prime_sub_axes_are_factors_where_a_program_cuts_an_axis() -> None:
    t = TensorType("i32", (2, 2, 3), (), sp.Mesh(data=4), partial={"data": "sum"})
    first = Step(AllReduce(("data.1",)), ("0",), ("1",))
    r = recipe(Program({"0": t}, [first, Step(AllReduce(("data.0",)), ("1",), ("2",))], ("2",)))
    assert r.names == ("data.0", "data.1")
    assert [r.groups(m) for m in r.moves] == [[(0, 1), (2, 3)], [(0, 2), (1, 3)]]


def refused(name: str, program: Program) -> str:
    with pytest.raises(BackendError) as caught:
        export_text(name, program)
    return str(caught.value)


@pytest.mark.parametrize("name", ["torch", "jax", "mpi", "msccl"])
def test_refusals(name: str) -> None:
    flat = TWO.placement
    mesh = flat.mesh_split()
    total = (ReduceScatter(1, ("data.gpu",)), AllReduce(("data.node",)), AllGather(1, ("data.gpu",)))
    kept = chain(flat, ["data"], (2, 4), 64, *total, Slice(0, ("data.node",)))
    assert refused(name, kept) == (
        "export: step 3 (slice(%3; dim=0, axes=(data.node))): legal are reduce_scatter, all_reduce, all_gather, "
        "reduce, broadcast, and to_partial with root"
    )
    moved = chain(flat, ["data"], (8, 8), 64, ReduceScatter(0, ("data.gpu",)), AllToAll(0, 1, ("data.gpu",)))
    assert "export: step 1 (all_to_all(" in refused(name, moved)
    again = chain(flat, ["data"], (2, 4), 64, AllReduce(("data",)), ToPartial(("data",)))
    assert "to_partial with root" in refused(name, again)
    t = TensorType("i32", (2, 4, 8), (), mesh, partial={"data": "max"})
    most = Program({"0": t}, [Step(AllReduce(("data",), "max"), ("0",), ("1",))], ("1",))
    assert refused(name, most) == (
        "export: the program starts from i32[2, 4, 8]{max:data}; legal is a whole payload that is partial with a sum"
    )
    t = TensorType("i32", (16,), (), mesh, partial={"data": "sum"})
    one = Program({"0": t}, [Step(ReduceScatter(0, ("data",)), ("0",), ("1",))], ("1",))
    assert refused(name, one) == (
        "export: i32[16@data] on the mesh data=(node=2,gpu=4): legal is a payload [chunks, ..., c] whose chunks are "
        "cut evenly, and whose last dim is never cut"
    )
    t = TensorType("i32", (2, 4, 3), (), mesh, partial={"data": "sum"})
    two = Program({"0": t, "1": t}, [Step(AllReduce(("data",)), ("0",), ("2",))], ("2",))
    assert refused(name, two) == "export: the program has 2 inputs and 1 outputs; legal is one of each"
    steps = [Step(AllReduce(("data",)), ("0",), ("1",)), Step(AllReduce(("data",)), ("0",), ("2",))]
    assert refused(name, Program({"0": t}, steps, ("2",))) == (
        "export: step 1 (all_reduce(%0; axes=(data))) does not read %1, the value before it; legal is a chain of one "
        "value"
    )
    assert refused(name, Program({"0": t}, steps[:1], ("0",))) == (
        "export: the output is %0; legal is the last value, %1"
    )


# The texts


@pytest.mark.parametrize("name", ["torch", "jax", "mpi"])
@pytest.mark.parametrize("case", [TWO, BY_NAME["master that scatters"]], ids=lambda c: c.name)
def test_a_text_needs_nothing_of_ours(name: str, case: Case) -> None:
    text = EXPORTS[name](case.program, case.placement)
    tree = ast.parse(text)
    imports = {a.name.partition(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    imports |= {(n.module or "").partition(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    own = {"torch": {"torch", "inspect", "typing"}, "jax": {"jax", "numpy"}, "mpi": {"mpi4py", "numpy", "typing"}}
    assert imports == own[name]
    assert max(map(len, text.splitlines())) <= 120
    assert str(case.program.types["1"]) in (ast.get_docstring(tree) or "")


@pytest.mark.parametrize("name", EXPORTS)
def test_a_text_says_where_ranks_run(name: str) -> None:
    text = EXPORTS[name](TWO.program, TWO.placement)
    assert "Placed as data=[2, 4] on node=2 x gpu=4." in text
    assert "Rank r runs on device r of the topology" in text
    beside = BY_NAME["level order is not mesh order"]
    found = EXPORTS[name](beside.program, beside.placement)
    assert "Rank r runs on device r of the topology" in found
    assert "Ranks of the mesh, row-major: 0, 2, 1, 3, 4, 6, 5, 7" in found
    # ids that a caller gave are its ranks
    own = place([[2, 2], [1, 2]], topology(node=2, gpu=4), [7, 6, 5, 4, 3, 2, 1, 0])
    moved = chain(own, ["data"], (2, 2), 64, AllReduce(("data",)))
    assert "7: 0, 6: 1, 5: 2, 4: 3, 3: 4, 2: 5, 1: 6, 0: 7" in EXPORTS[name](moved, own)
    assert "Placed as" not in EXPORTS[name](TWO.program, None)


def emitted(name: str, text: str, move: RecipeStep) -> np.ndarray:
    """The ranks of the groups of a move as a text has them, [groups, members], read from its source alone."""
    tree = ast.parse(text)
    said = {
        n.targets[0].id: n.value for n in tree.body if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name)
    }
    if name == "torch":
        return np.array(ast.literal_eval(said["GROUPS"])[move.label])
    if name == "jax":
        names, ids = ast.literal_eval(said["NAMES"]), eval(ast.unparse(said["DEVICES"].generators[0].iter))
        sizes = [ast.literal_eval(n) for n in said["MESH"].args[0].args]
        at, zero = [names.index(a) for a in move.axes], []
    else:
        sizes, ids = ast.literal_eval(said["SIZES"]), eval(ast.unparse(said["RANKS"]))
        at, zero = ast.literal_eval(said["MOVES"])[move.label]
    array = np.array(list(ids)).reshape(sizes)
    for k in zero:
        array = array.take([0], axis=k)
    rest = [k for k in range(array.ndim) if k not in at]
    return array.transpose([*rest, *at]).reshape(-1, move.size)


@pytest.mark.parametrize("name", ["torch", "jax", "mpi"])
@pytest.mark.parametrize("matrix", [[[1, 4], [2, 1]], [[2, 2], [1, 2]], [[2, 1], [1, 4]]])
def test_what_is_emitted_takes_the_plans_seconds(name: str, matrix: list[list[int]]) -> None:
    """Rank r on device r: the groups of the text, priced on the topology, cost what the plan says."""
    levels = sp.Topology.load("gcp-v100x8", nodes=2)
    placement = place([[a, 2 * b] if k == 0 else [a, b] for k, (a, b) in enumerate(matrix)], levels)
    plan = sp.reduce(placement, ("data",), 2**26)
    text = export_text(name, plan.program, placement)
    seconds = 0.0
    for move in recipe(plan.program).moves:
        members = emitted(name, text, move)
        pattern = plan.program.steps[move.step].op.pattern(*plan.program.step_types(plan.program.steps[move.step])[0])
        assert isinstance(pattern, Groups)
        held = np.full(len(members), pattern.nbytes.max())
        seconds += price(Groups(move.kind, members, held), Fabric(levels)).seconds
    assert seconds == pytest.approx(plan.seconds, rel=1e-9)


def test_many_ranks_are_not_listed() -> None:
    placement = place([[2, SHOWN], [1, 2]], topology(node=2, gpu=2 * SHOWN))
    shuffled = place([[2, SHOWN], [1, 2]], topology(node=2, gpu=2 * SHOWN), list(range(4 * SHOWN))[::-1])
    program = chain(placement, ["data"], (2, SHOWN), 64, AllReduce(("data",)))
    assert heading(program, placement)[-1] == "Rank r runs on device r of the topology, counted level by level."
    assert heading(program, shuffled)[-1].endswith("is `placement.position()`.")


def test_equal_programs_give_equal_texts() -> None:
    for export in EXPORTS.values():
        assert export(TWO.program, TWO.placement) == export(Program.parse(str(TWO.program)), TWO.placement)


def test_an_export_imports_no_framework() -> None:
    code = (
        "import sys, shardplan.interop.exports.export as e; from shardplan.core.program import Program; "
        f"p = Program.parse({str(TWO.program)!r}); [f(p, None) for f in e.EXPORTS.values()]; "
        "print({'torch', 'jax', 'mpi4py'} & set(sys.modules))"
    )
    path = os.environ | {"PYTHONPATH": str(HERE.parents[1] / "src")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=path, timeout=60)
    assert done.stdout.strip() == "set()", done.stderr


def test_binding_without_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from torch import distributed

    from shardplan.interop.exports.torch import bind_reduction

    # Another test of this process may have left a process group.
    monkeypatch.setattr(distributed, "is_initialized", lambda: False)
    with pytest.raises(BackendError, match=r"^torch.distributed is not initialised: launch with torchrun"):
        bind_reduction(TWO.program)


def test_random_programs_differ() -> None:
    programs = {str(random_case(seed).program) for seed in range(30)}
    assert len(programs) > 20
    assert {type(step.op) for seed in range(30) for step in random_case(seed).program.steps} == {
        ReduceScatter, AllReduce, AllGather, Reduce, Broadcast, ToPartial,
    }  # fmt: skip
