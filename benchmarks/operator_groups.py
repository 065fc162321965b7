"""Ranks as forked processes that answer one question at a time, so that a crash or a hang of one loses one question.

The process that asks has imported everything and started no thread: a group of ranks costs a fork and a rendezvous,
and may be thrown away at every doubt.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

PATIENCE = 60.0  # seconds that all ranks may take to answer
GRACE = 4.0  # seconds for the others once a rank has failed: they may be waiting for it

Answer = Callable[[Any], Any]  # what answers the questions on a rank
Meet = Callable[[int], int]  # rank 0 tells its port, the others are told it


@dataclass(slots=True)
class Broken(Exception):
    """A question that some ranks did not answer: those that did, and what became of the others."""

    answers: dict[int, Any]
    why: str


def _never(_: Any) -> bool:
    return False


class Group:
    """`world` forked ranks; `make(rank, world, meet)` is called on each and gives what answers its questions."""

    def __init__(
        self, world: int, make: Callable[[int, int, Meet], Answer], grace: float = GRACE, verbose: bool = False
    ):
        context = multiprocessing.get_context("fork")
        self.world, self.grace = world, grace
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(world):
            mine, theirs = context.Pipe()
            self.pipes.append(mine)
            process = context.Process(
                target=_serve, args=(rank, world, make, theirs, list(self.pipes), verbose), daemon=True
            )
            process.start()
            theirs.close()
            self.processes.append(process)
        port = self._answers([0])[0]
        for pipe in self.pipes[1:]:
            pipe.send(port)
        self._answers(range(world))  # ready

    def ask(self, question: Any, failed: Callable[[Any], bool] = _never) -> list[Any]:
        """Ask all ranks and return their answers in order; raises `Broken`.

        Once an answer is `failed`, the others have only the grace to come.
        """
        for pipe in self.pipes:
            with contextlib.suppress(OSError):  # a rank that has ended is seen when its answer is read
                pipe.send(question)
        found = self._answers(range(self.world), failed)
        return [found[rank] for rank in range(self.world)]

    def _answers(self, ranks: Iterable[int], failed: Callable[[Any], bool] = _never) -> dict[int, Any]:
        """Wait for these ranks; raises `Broken` where one dies, fails or says nothing in time."""
        waiting = {self.pipes[rank]: rank for rank in ranks}
        found: dict[int, Any] = {}
        until = time.monotonic() + PATIENCE
        while waiting:
            ready = wait(list(waiting), max(0.0, until - time.monotonic()))
            if not ready:
                raise Broken(found, f"no answer of {_ranks(waiting.values())}")
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    found[rank] = pipe.recv()
                except (EOFError, OSError):
                    self.processes[rank].join(5)
                    raise Broken(found, f"rank {rank} ended, exit status {self.processes[rank].exitcode}") from None
                if failed(found[rank]):
                    until = min(until, time.monotonic() + self.grace)
        return found

    def close(self) -> None:
        """End the ranks, whatever they do."""
        for process in self.processes:
            process.kill()
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.join()
            process.close()
            pipe.close()


def _ranks(ranks: Iterable[int]) -> str:
    return "ranks " + ", ".join(map(str, sorted(ranks)))


def _serve(
    rank: int, world: int, make: Callable[[int, int, Meet], Answer], pipe: Connection, inherited: list[Connection],
    verbose: bool,
) -> None:  # fmt: skip
    """Answer until the asking process ends."""
    for other in inherited:  # or the end of the asking process would not be seen
        other.close()
    if not verbose:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)

    def meet(port: int) -> int:
        if rank == 0:
            pipe.send(port)
            return port
        return pipe.recv()

    try:
        answer = make(rank, world, meet)
        pipe.send(None)
        while True:
            pipe.send(answer(pipe.recv()))
    except (EOFError, BrokenPipeError):
        pass
    finally:
        os._exit(0)  # no destructor may wait for ranks that are gone
