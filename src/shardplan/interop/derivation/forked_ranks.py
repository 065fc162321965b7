"""Ranks as forked processes over gloo: each loads a part of a model, and gives what it then has by name."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

_SECONDS = 300.0
_END = 10.0

Parameters = dict[str, np.ndarray]


def fork_ranks(count: int, load: Callable[[int], Parameters]) -> dict[int, Parameters]:
    """Call `load(rank)` in `count` forked processes, each in one gloo group of them all; return what each gave.

    The parent's imports are the children's: the framework is imported once. A rank that raises is the caller's
    RuntimeError, with its last lines; nothing is left running.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(count):
            mine, its = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(rank, count, Path(folder) / "store", its, load))
            process.start()
            its.close()
            started.append((process, mine))
        try:
            return {rank: _receive_rank(rank, mine) for rank, (_, mine) in enumerate(started)}
        finally:
            for process, _ in started:
                process.join(_END)
                if process.is_alive():
                    process.kill()


def _receive_rank(rank: int, mine: Connection) -> Parameters:
    """What a rank sent, or its error."""
    if not mine.poll(_SECONDS):
        raise RuntimeError(f"rank {rank} gave nothing in {_SECONDS:g} s")
    try:
        found = mine.recv()
    except EOFError:
        raise RuntimeError(f"rank {rank} ended without a word") from None
    if isinstance(found, str):
        raise RuntimeError(f"rank {rank}: {found}")
    return found


def _rank(rank: int, count: int, store: Path, its: Connection, load: Callable[[int], Parameters]) -> None:
    """The body of a rank."""
    import torch

    torch.set_num_threads(1)
    try:
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
        its.send({name: np.array(a, np.float32) for name, a in load(rank).items()})
    except BaseException:
        its.send(traceback.format_exc()[-3000:])
    its.close()
