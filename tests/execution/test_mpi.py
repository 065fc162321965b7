"""The MPI backend under mpiexec: conformance, counted bytes, allocated memory, faults; and what needs no launch."""

import contextlib
import functools
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardplan as sp
from shardplan.errors import BackendError
from shardplan.execution.mpi_faults import silent

ROOT = Path(__file__).resolve().parents[2]
CHILD = ROOT / "tests" / "execution" / "mpi_child.py"
MPIEXEC = Path(sys.executable).parent / "mpiexec"
OBJECTS = 2**15  # bytes of Python objects that a run makes beside its arrays
TIMEOUT = {"never": 3.0, "late": 10.0}  # seconds, of the runs that break
START, END = 30.0, 2.0  # seconds allowed for starting and ending four processes on a busy machine


def missing() -> str:
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    return "" if MPIEXEC.exists() else "no mpiexec beside this Python"


launched = pytest.mark.skipif(bool(missing()), reason=missing() or "installed")


class Launch:
    """A job of the child script under mpiexec, bounded in time, and what came out of it."""

    def __init__(self, ranks: int, *arguments: str, seconds: float = 60.0) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        command = [str(MPIEXEC), "-n", str(ranks), sys.executable, str(CHILD), *arguments]
        job = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        try:
            self.out, self.err = job.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            for pid in family(job.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            job.wait()
            pytest.fail(f"{' '.join(arguments)} on {ranks} ranks took more than {seconds:g} s")
        self.status = job.returncode
        self.ended = time.monotonic()
        self.group = job.pid

    def told(self) -> Any:
        """The object that rank 0 printed."""
        assert self.status == 0, self.err
        return json.loads(self.out)

    def left_behind(self) -> list[int]:
        """The processes of the session of the job that still run; they get a moment to end."""
        for _ in range(50):
            if not (found := family(self.group)):
                break
            time.sleep(0.02)
        return found


def family(session: int) -> list[int]:
    """The processes of a session that we started, by Linux's table; elsewhere none are found."""
    out: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, number, *_ = path.read_text().rpartition(")")[2].split()
            if int(number) == session and state != "Z":
                out.append(int(path.parent.name))
    return out


# Conformance


@launched
@pytest.mark.parametrize(("ranks", "count"), [(4, 60), (2, 30)])
def test_equals_the_reference_and_receives_what_the_ops_say(ranks: int, count: int) -> None:
    told = Launch(ranks, "cases", "1", str(count)).told()
    assert told["wrong"] == []
    assert told["cases"] == count
    assert told["received"] > 0
    assert told["bound programs"] == 8
    if ranks == 4:
        assert {"all_gather", "all_reduce", "all_to_all", "exchange", "permute", "reduce_scatter", "send"} <= set(
            told["ops"]
        )


@functools.cache
def traced() -> Any:
    return Launch(4, "memory").told()


@launched
def test_allocates_no_more_than_the_certificate_says() -> None:
    over = [f"{name}: {peak} of {most}" for name, peak, most in traced()["rows"] if peak > most + OBJECTS]
    assert over == []
    assert len(traced()["rows"]) >= 4 * 16


@launched
def test_long_messages_and_many_rounds_equal_the_reference() -> None:
    assert traced()["wrong"] == []


# Faults: rank 2 of four


def broken(kind: str) -> Launch:
    timeout = TIMEOUT.get(kind, 1.5)
    job = Launch(4, "fault", kind, str(timeout), seconds=2 * timeout + START)
    assert job.left_behind() == []
    return job


@launched
def test_wrong_shards_only_raise_and_a_late_rank_is_waited_for() -> None:
    job = broken("late")
    assert job.told() == {"same": True}
    assert "caught: input %0: rank 2 passes 0 shards of i32[8@x, 4]; legal is 1, its own" in job.err


@launched
def test_a_killed_rank_ends_all() -> None:
    assert broken("killed").status != 0  # by mpiexec, which watches its processes


@launched
def test_another_program_is_named() -> None:
    job = broken("other")
    assert job.status == 4
    assert re.search(
        r"shardplan: rank (\d) ends all ranks: BackendError: the ranks \[0, 1, 2, 3\] do not run one program: rank \1 "
        r"runs program [0-9a-f]{8}, (rank \d|ranks \[[013, ]+\]) program [0-9a-f]{8}; nothing was sent\n",
        job.err,
    )


@launched
def test_an_exception_ends_all_with_its_traceback() -> None:
    job = broken("raising")
    assert job.status == 4
    assert "shardplan: rank 2 ends all ranks: Traceback (most recent call last):" in job.err
    assert "ZeroDivisionError: made to fail\n" in job.err


@launched
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("never", r"program [0-9a-f]{8} did not start: rank 2 of \[0, 1, 2, 3\] did not arrive within 3 s\n"),
        ("stopped", r"program [0-9a-f]{8} did not start: rank 2 of \[0, 1, 2, 3\] did not arrive within 1.5 s\n"),
        (
            "stuck",
            r"program [0-9a-f]{8}, step 1 \(all_gather\(%2; dim=1, axes=\(x\)\)\), group \[0, 1, 2, 3\]: rank 2 did "
            r"not arrive within 1.5 s\n",
        ),
        (
            "chain",
            r"program [0-9a-f]{8}, step 0 \(reduce\(%0; axes=\(x\)\)\), group \[0, 1, 2, 3\]: rank 2 did not arrive "
            r"within 1.5 s\n",
        ),
        (
            "creation",
            r"program [0-9a-f]{8} did not start: its communicators were not made by \[0, 1, 2, 3\] within 1.5 s\n",
        ),
    ],
)
def test_a_rank_that_does_not_come_is_named_in_time(kind: str, text: str) -> None:
    job = broken(kind)
    assert job.status == 4
    said = [line for line in job.err.splitlines(keepends=True) if line.startswith("shardplan: ")]
    assert said
    assert [
        line for line in said if not re.fullmatch(r"shardplan: rank [013] ends all ranks: TimedOut: " + text, line)
    ] == []
    started = float(re.findall(r"started at ([0-9.]+)", job.err)[0])
    assert job.ended - started < 2 * TIMEOUT.get(kind, 1.5) + END


def test_the_roll_call_follows_those_who_wait_to_those_who_are_silent() -> None:
    assert silent(0, [1], {1: [2], 3: [0]}) == [2]
    assert silent(0, [1, 4], {1: [2, 0], 2: [3], 3: [1], 4: [5]}) == [5]
    assert silent(0, [1, 2], {1: [0], 2: []}) == [1, 2]


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


def test_importing_the_backend_does_not_start_mpi() -> None:
    script = "import sys, shardplan.execution.mpi; print('mpi4py' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout == "False\n", done.stderr
