"""Jobs under mpiexec for the tests of MPI, bounded in time."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
MPIEXEC = Path(sys.executable).parent / "mpiexec"
PATIENCE = 300.0  # seconds after which a job is taken to hang, on however busy a machine


def missing() -> str:
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    return "" if MPIEXEC.exists() else "no mpiexec beside this Python"


launched = pytest.mark.skipif(bool(missing()), reason=missing() or "installed")


class Launch:
    """A job of a child script, started; `wait` for it, or send it signals and then wait."""

    def __init__(self, child: str, ranks: int, *arguments: str) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        command = [str(MPIEXEC), "-n", str(ranks), sys.executable, str(ROOT / "tests" / "execution" / child)]
        self.arguments = arguments
        self.begun = time.monotonic()
        self.job = subprocess.Popen(
            [*command, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        self.out, self.err = "", ""
        self._readers = [threading.Thread(target=self._read, args=(name,), daemon=True) for name in ("out", "err")]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str) -> None:
        pipe = self.job.stdout if name == "out" else self.job.stderr
        assert pipe is not None
        with pipe:
            for line in pipe:
                setattr(self, name, getattr(self, name) + line)

    def until(self, text: str) -> None:
        """Wait until the job has said something on its standard error."""
        while text not in self.err:
            if self.job.poll() is not None or time.monotonic() > self.begun + PATIENCE:
                self.end()
                pytest.fail(f"{self.arguments} did not say {text!r}: {self.err}")
            time.sleep(0.005)

    def wait(self) -> "Launch":
        """Wait until the job has ended, with all its processes."""
        try:
            self.status = self.job.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.end()
            pytest.fail(f"{' '.join(self.arguments)} took more than {PATIENCE:g} s: {self.err}")
        self.ended = time.monotonic()
        while family(self.job.pid):
            if time.monotonic() > self.ended + PATIENCE:
                left = family(self.job.pid)
                self.end()
                pytest.fail(f"{' '.join(self.arguments)} left processes behind: {left}")
            time.sleep(0.01)
        for reader in self._readers:
            reader.join(PATIENCE)
        return self

    def end(self) -> None:
        """Kill what is left."""
        for pid in family(self.job.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.job.wait()

    def told(self) -> Any:
        """The object that rank 0 printed."""
        assert self.status == 0, self.err
        return json.loads(self.out)


def run(child: str, ranks: int, *arguments: str) -> Launch:
    return Launch(child, ranks, *arguments).wait()


def family(session: int) -> list[int]:
    """The processes of a session that we started, by Linux's table; elsewhere none are found."""
    out: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, number, *_ = path.read_text().rpartition(")")[2].split()
            if int(number) == session and state != "Z":
                out.append(int(path.parent.name))
    return out
