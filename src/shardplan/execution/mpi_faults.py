"""Bounded waits of MPI ranks, and one clear error where a wait fails.

MPI has no way to take back a collective and none to raise an error on another rank: the rank that fails says why on
its standard error and aborts the job, so that every rank ends with a status that is not zero and none is left behind.
No exception comes out of a run that has started.

Ranks that wait answer each other's roll calls, so that a rank whose time is up can tell those that wait too from those
that never came: it asks who waits for whom, and follows the answers from its own peers to the ranks that are silent.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from shardplan.errors import BackendError, ShardplanError, TimedOut
from shardplan.execution.words import listed, named

if TYPE_CHECKING:
    from mpi4py import MPI

STATUS = 4  # of a process that fails while running
AGREE, CALL, ANSWER = 2**14 + 11, 2**14 + 12, 2**14 + 13  # tags on COMM_WORLD: no program of the user may take them
LAST_WORDS = 0.25  # seconds for a launcher to pass the message on: it drops what it has not read when a job aborts
SHORTEST, LONGEST = 2e-5, 1e-3  # seconds between polls


def abort(error: BaseException) -> NoReturn:
    """Say on standard error what went wrong on this rank, and end all ranks of the job."""
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.Get_rank()
    if isinstance(error, ShardplanError):
        text = f"{type(error).__name__}: {error}\n"
    else:
        text = "".join(traceback.format_exception(error))
    print(f"shardplan: rank {rank} ends all ranks: {text}", end="", file=sys.stderr, flush=True)
    sys.stdout.flush()
    time.sleep(LAST_WORDS)
    MPI.COMM_WORLD.Abort(STATUS)
    os._exit(STATUS)


@dataclass(slots=True)
class Watch:
    """The view of one rank on one run of a program by `ranks`; `name` and `steps` are for messages."""

    ranks: tuple[int, ...]
    rank: int
    name: str
    steps: Sequence[str]
    timeout: float
    step: int = -1
    _waits_for: list[int] = field(default_factory=list[int])
    _answers: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    _posted: list[MPI.Request] = field(default_factory=list["MPI.Request"])  # each keeps its buffer

    def agree(self, digest: bytes) -> None:
        """Wait until every rank has come with the same program.

        Raises:
            TimedOut: Some ranks did not come; they are named.
            BackendError: A rank runs another program.
        """
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        others = [r for r in self.ranks if r != self.rank]
        heard = {r: bytearray(len(digest)) for r in others}
        missing = {r: world.Irecv([heard[r], MPI.BYTE], r, AGREE) for r in others}
        sends = [world.Isend([digest, MPI.BYTE], r, AGREE) for r in others]
        strange: dict[int, bytes] = {}

        def done() -> bool:
            for r in [r for r, request in missing.items() if request.Test()]:
                del missing[r]
                if bytes(heard[r]) != digest:
                    strange[r] = bytes(heard[r])
            return bool(strange) or (not missing and MPI.Request.Testall(sends))

        if not self._poll(done):
            late = sorted(missing) or others
            raise TimedOut(
                f"{self.name} did not start: {named(late)} of {listed(self.ranks)} did not arrive within "
                f"{self.timeout:g} s"
            )
        if strange:
            first = next(iter(strange.values()))
            raise BackendError(
                f"the ranks {listed(self.ranks)} do not run one program: rank {self.rank} runs {self.name}, "
                f"{named(r for r, d in strange.items() if d == first)} {name_of(first)}; nothing was sent"
            )

    def wait(self, done: Callable[[], bool], waits_for: Callable[[], list[int]], group: Sequence[int]) -> None:
        """Poll `done` until it is true.

        Args:
            done: Tests the requests under way.
            waits_for: Lists the device ids whose messages are outstanding.
            group: The device ids that take part, for the message.

        Raises:
            TimedOut: It took longer than the timeout; the ranks that did not arrive are named.
            BackendError: MPI failed.
        """
        from mpi4py import MPI

        def test() -> bool:
            found = done()
            if not found:
                self._waits_for = waits_for()
                self._answer()
            return found

        try:
            if self._poll(test):
                self._waits_for = []
                return
            missing = self._roll_call()
        except MPI.Exception as error:
            raise BackendError(f"{self._where(group)}: MPI failed: {error}") from None
        raise TimedOut(f"{self._where(group)}: {named(missing)} did not arrive within {self.timeout:g} s")

    @contextlib.contextmanager
    def bounded(self, what: str) -> Generator[None]:
        """Abort the job from a second thread if the block, which cannot be polled, takes longer than the timeout."""
        error = TimedOut(f"{self.name} did not start: {what} by {listed(self.ranks)} within {self.timeout:g} s")
        timer = threading.Timer(self.timeout, abort, [error])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _where(self, group: Sequence[int]) -> str:
        text = self.steps[self.step] if 0 <= self.step < len(self.steps) else "start"
        return f"{self.name}, step {self.step} ({text}), group {listed(group)}"

    def _poll(self, done: Callable[[], bool], seconds: float | None = None) -> bool:
        """Return whether `done` came true in time; the pauses between polls grow, since cores may be few."""
        deadline = time.monotonic() + (self.timeout if seconds is None else seconds)
        pause = 0.0
        while not done():
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(LONGEST, 1.5 * pause + SHORTEST)
        return True

    def _answer(self) -> None:
        """Tell the ranks that ask for whom this one waits."""
        from mpi4py import MPI

        world, status = MPI.COMM_WORLD, MPI.Status()
        while world.Iprobe(MPI.ANY_SOURCE, CALL, status):
            world.Recv([bytearray(1), MPI.BYTE], status.Get_source(), CALL)
            waits = np.array(self._waits_for, dtype=np.int64)
            self._posted.append(world.Isend([waits, MPI.INT64_T], status.Get_source(), ANSWER))

    def _roll_call(self) -> list[int]:
        """Return the ranks that this one waits for, at first or at last hand, and that do not answer."""
        from mpi4py import MPI

        world, status = MPI.COMM_WORLD, MPI.Status()
        others = [r for r in self.ranks if r != self.rank]
        self._posted += [world.Isend([b"?", MPI.BYTE], r, CALL) for r in others]

        def done() -> bool:
            self._answer()
            while world.Iprobe(MPI.ANY_SOURCE, ANSWER, status):
                waits = np.empty(status.Get_count(MPI.INT64_T), dtype=np.int64)
                world.Recv([waits, MPI.INT64_T], status.Get_source(), ANSWER)
                self._answers[status.Get_source()] = waits.tolist()
            return len(self._answers) == len(others)

        self._poll(done, min(2.0, self.timeout / 2))
        return silent(self.rank, self._waits_for, self._answers)


def silent(rank: int, waits_for: Sequence[int], answers: dict[int, list[int]]) -> list[int]:
    """Return the ranks without an answer that `rank` waits for, over others if need be; if all answer, its own peers.

    >>> silent(0, [1], {1: [2], 3: [0]})
    [2]
    """
    seen, found, ahead = {rank}, set[int](), list(waits_for)
    while ahead:
        r = ahead.pop()
        if r in seen:
            continue
        seen.add(r)
        if r in answers:
            ahead += answers[r]
        else:
            found.add(r)
    return sorted(found or set(waits_for))


def name_of(digest: bytes) -> str:
    """Return what a program is called in messages."""
    return f"program {digest.hex()[:8]}"
