"""Launches of child scripts on ranks of this machine: forked from a process that has imported torch, or by torchrun.

A rank that imports torch itself pays two seconds or more for it, and so does torchrun; a forked one pays none. It has
the variables of a launch by torchrun, and a store that no rank hosts.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import multiprocessing
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
PATHS = os.pathsep.join(map(str, (ROOT / "src", ROOT, ROOT / "tests")))
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["torch._inductor.compile_fx", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
     "shardplan.interop.torch", "conformance", "execution.torch_warm"]
)  # fmt: skip


class Launch:
    """A script on ranks, started; `wait` for some or all of them, then `end` what is left. Its output is in `said`.

    With `to_the_end` the interpreter of a rank is taken down object by object, which costs a second and more.
    """

    def __init__(self, count: int, script: Path, *arguments: Any, to_the_end: bool = False):
        from torch.distributed import TCPStore

        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.output = Path(tempfile.mkdtemp())
        common = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
        }
        self._rank = lambda rank, name: FORKS.Process(
            target=_rank,
            args=(
                [str(script), *map(str, arguments)],
                common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                str(self.output / name),
                to_the_end,
            ),
        )
        self.ranks = [self._rank(rank, str(rank)) for rank in range(count)]
        paths = os.pathsep.join(filter(None, (PATHS, os.environ.get("PYTHONPATH"))))
        with patch.dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=paths):  # for what is imported before the fork
            for rank in self.ranks:
                rank.start()

    def again(self, rank: int) -> None:
        """Start a rank once more; what it says is in the files `RANK-again.out` and `.err`."""
        self.ranks[rank].join()
        self.ranks[rank] = self._rank(rank, f"{rank}-again")
        self.ranks[rank].start()

    def wait(self, seconds: float, ranks: Iterable[int] | None = None, together: bool = True) -> None:
        """Until the ranks (all) have ended, or, `together`, one has failed."""
        waiting = {self.ranks[r].sentinel: self.ranks[r] for r in (range(len(self.ranks)) if ranks is None else ranks)}
        until = time.monotonic() + seconds
        while waiting:
            ended = wait(list(waiting), max(0.0, until - time.monotonic()))
            if not ended:
                raise TimeoutError(f"after {seconds:g} s not all ranks had ended: {self.said('.err')[-3000:]}")
            for sentinel in ended:
                rank = waiting.pop(sentinel)
                rank.join()
                if together and rank.exitcode:
                    return

    def end(self) -> None:
        """Kill what is left."""
        for rank in self.ranks:
            if rank.exitcode is None:
                rank.kill()  # a stopped one too
            rank.join()
        shutil.rmtree(self.output)

    @property
    def status(self) -> int:
        """The first exit status that is not 0; of a signal it is below 0."""
        return next((rank.exitcode for rank in self.ranks if rank.exitcode), 0)

    def said(self, what: str) -> str:
        """What the ranks wrote to `.out` or `.err`, in their order."""
        files = (self.output / f"{rank}{what}" for rank in range(len(self.ranks)))
        return "".join(file.read_text(encoding="utf-8", errors="replace") for file in files if file.exists())


def _rank(command: list[str], variables: dict[str, str], output: str, to_the_end: bool) -> None:
    """Be a rank: run the script as the interpreter would, and what is registered for its end."""
    gc.freeze()  # a collection would copy every page that is shared with the process that was forked
    for fd, name in ((1, ".out"), (2, ".err")):
        file = os.open(output + name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, fd)
        os.close(file)
    os.environ.update(variables)
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))
    status: Any = 0
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
        status = 1
    if to_the_end:
        ctypes.pythonapi.Py_Exit(status or 0)
    atexit._run_exitfuncs()  # which multiprocessing leaves out
    sys.exit(status)


def launch(
    ranks: int, script: Path, *arguments: Any, seconds: float = 300, to_the_end: bool = False
) -> tuple[int, str, str]:
    """Run a script on so many ranks; its status, output and errors. Nothing outlives the call."""
    job = Launch(ranks, script, *arguments, to_the_end=to_the_end)
    try:
        job.wait(seconds)
        return job.status, job.said(".out"), job.said(".err")
    finally:
        job.end()


def printed(ranks: int, script: Path, *arguments: Any, seconds: float = 300) -> Any:
    """Run a script on so many ranks; the JSON that rank 0 printed."""
    status, out, err = launch(ranks, script, *arguments, seconds=seconds)
    assert status == 0, err[-4000:]
    start = min(k for k in (out.find("{"), out.find("[")) if k >= 0)
    return json.loads(out[start:])


def torchrun(processes: int, *command: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run a command on so many processes of this machine, under torchrun itself."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": PATHS}
    return subprocess.run([*launcher, *command], capture_output=True, text=True, env=environment, timeout=timeout)
