"""Ranks of a symmetric heap as forked processes, with a hub through which they exchange bytes; bounded in time.

`run` starts a process that loads torch once and forks; `forked` does that in the process that it is called in.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
Exchange = Callable[[bytes], list[bytes]]
DIED = "died"


def forked(ranks: int, work: Callable[[int, Exchange], Any], seconds: float = 60.0) -> list[Any]:
    """What `work(rank, exchange)` returned on every rank; of one that raised the error's text, of one killed `DIED`."""
    ends: list[Connection] = []
    pids: list[int] = []
    for rank in range(ranks):
        ours, theirs = Pipe()
        pid = os.fork()
        if not pid:
            for end in (*ends, ours):
                end.close()
            _child(theirs, work, rank)
        theirs.close()
        ends.append(ours)
        pids.append(pid)
    results: list[Any] = [DIED] * ranks
    said: dict[int, bytes] = {}
    live = dict(enumerate(ends))
    deadline = time.monotonic() + seconds
    while live:
        ready = wait(list(live.values()), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for rank, end in list(live.items()):
            if end not in ready:
                continue
            try:
                kind, value = end.recv()
            except EOFError:
                del live[rank]
                continue
            if kind == "result":
                results[rank] = value
            else:
                said[rank] = value
        if said and len(live) < ranks:  # one has ended, and the others ask it for more
            for rank in list(said):
                ends[rank].close()
                live.pop(rank, None)
            said.clear()
        if len(said) == ranks:
            for end in ends:
                end.send([said[r] for r in range(ranks)])
            said.clear()
    for pid in pids:
        if live:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    for end in ends:
        end.close()
    return results if not live else [f"not ended after {seconds} s", *results]


def _child(end: Connection, work: Callable[[int, Exchange], Any], rank: int) -> None:
    def exchange(mine: bytes) -> list[bytes]:
        end.send(("exchange", mine))
        return end.recv()

    try:
        result = work(rank, exchange)
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
        if os.environ.get("FUSED_TRACE"):
            traceback.print_exc()
    end.send(("result", result))
    end.close()
    os._exit(0)


def refused(call: Callable[[], object]) -> str:
    """What a call raises, as text."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def segments() -> list[str]:
    """Names of segments that lie about."""
    from shardplan.fused.heap.segments import PREFIX, folder

    return [path.name for path in folder().glob(f"{PREFIX}-*")]


def run(module: str, *arguments: object, seconds: float = 120.0) -> Any:
    """What a child module prints as its last line, JSON."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", f"tests.fused.{module}", *map(str, arguments)],
        cwd=HERE.parent.parent, env=environment, capture_output=True, text=True, timeout=seconds,
    )  # fmt: skip
    if done.returncode or not done.stdout.strip():
        raise AssertionError(f"{module} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])
