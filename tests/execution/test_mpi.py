"""The MPI backend under mpiexec: conformance, counted bytes, allocated memory; and what needs no launch."""

import functools
import importlib.util
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import shardplan as sp
from execution.mpi_launch import ROOT, launched, run
from shardplan.core.ops import AllReduce
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.errors import BackendError
from shardplan.interop.exports.mpi import bind_reduction

CHILD = "mpi_child.py"
OBJECTS = 2**15  # bytes of Python objects that a run makes beside its arrays


# Conformance


@launched
@pytest.mark.parametrize(("ranks", "count"), [(4, 60), (2, 30)])
def test_equals_the_reference_and_receives_what_the_ops_say(ranks: int, count: int) -> None:
    told = run(CHILD, ranks, "cases", "1", str(count)).told()
    assert told["wrong"] == []
    assert told["cases"] == count
    assert told["received"] > 0
    assert told["bound programs"] == 8
    if ranks == 4:
        ops = {"all_gather", "all_reduce", "all_to_all", "exchange", "permute", "reduce_scatter", "send", "repeat"}
        assert ops <= set(told["ops"])


@launched
def test_equals_the_reference_without_all_to_alls() -> None:
    told = run(CHILD, 4, "messages", "2", "40").told()
    assert told["wrong"] == []
    assert told["received"] > 0


@functools.cache
def traced() -> Any:
    return run(CHILD, 4, "memory").told()


@launched
def test_allocates_no_more_than_the_certificate_says() -> None:
    over = [f"{name}: {peak} of {most}" for name, peak, most in traced()["rows"] if peak > most + OBJECTS]
    assert over == []
    assert len(traced()["rows"]) >= 4 * 16


@launched
def test_long_messages_and_many_rounds_equal_the_reference() -> None:
    assert traced()["wrong"] == []


# Without a launch


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")
def test_alone_it_says_how_to_launch() -> None:
    script = (
        "import numpy as np, shardplan as sp\n"
        "t = sp.TensorType('i32', (4,), ('x',), sp.Mesh(x=2))\n"
        "plan = sp.redistribute(t, sp.TensorType('i32', (4,), (None,), t.mesh))\n"
        "try: sp.run(plan.program, [np.zeros(2, np.int32)], backend='mpi')\n"
        "except sp.errors.BackendError as error: print(error)\n"
        "one = sp.TensorType('i32', (4,), (), sp.Mesh(x=1))\n"
        "print(sp.run(sp.redistribute(one, one).program, [np.arange(4, dtype=np.int32)], backend='mpi'))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout.splitlines() == [
        "the program runs on device 1, but this process is alone: launch one process a device with mpiexec, of the MPI "
        "that mpi4py uses",
        "[array([0, 1, 2, 3], dtype=int32)]",
    ], done.stderr


def test_without_mpi4py_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    t = sp.TensorType("i32", (4,), ("x",), sp.Mesh(x=1))
    program = sp.redistribute(t, t).program
    with pytest.raises(BackendError) as caught:
        sp.run(program, [np.arange(4, dtype=np.int32)], backend="mpi")
    assert str(caught.value) == "mpi4py is not installed: pip install 'shardplan[mpi]'"


def test_exports_say_what_to_install_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    t = sp.TensorType("f32", (4, 5), (), sp.Mesh(x=1), partial={"x": "sum"})
    with pytest.raises(BackendError, match=r"^mpi4py is not installed: pip install 'shardplan\[mpi\]'$"):
        bind_reduction(Program({"0": t}, [Step(AllReduce(("x",)), ("0",), ("1",))], ("1",)))


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")
def test_without_an_mpi_library_it_says_what_to_install() -> None:
    script = (
        "import numpy as np, shardplan as sp\n"
        "t = sp.TensorType('i32', (4,), (), sp.Mesh(x=1))\n"
        "try: sp.run(sp.redistribute(t, t).program, [np.zeros(4, np.int32)], backend='mpi')\n"
        "except sp.errors.BackendError as error: print(error)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "MPI4PY_LIBMPI": "/nowhere/libmpi.so.12"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=60)
    (line,) = done.stdout.splitlines()
    assert line.startswith("mpi4py finds no MPI library: pip install 'shardplan[mpi]' brings one ("), done


def test_importing_the_backend_does_not_start_mpi() -> None:
    script = "import sys, shardplan.execution.mpi.run; print('mpi4py' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout == "False\n", done.stderr
