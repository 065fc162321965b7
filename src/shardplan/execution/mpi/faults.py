"""Bounded waits of MPI ranks, and one clear error where a wait fails.

MPI has no way to take back a collective and none to raise an error on another rank: the rank that fails says why on
its standard error and aborts the job, so that every rank ends with a status that is not zero and none is left behind.
No exception comes out of a run that has started.

Ranks that wait answer each other's questions, so that a rank whose time is up can tell those that wait too from those
that never came: it asks what its peers run and for whom they wait, and follows the answers to ranks that are silent.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import termios
import threading
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from shardplan.errors import BackendError, ShardplanError, TimedOut
from shardplan.execution.agreement import late_error, silent
from shardplan.execution.mpi.letters import Letters
from shardplan.execution.rank_names import format_ranks, name_ranks

STATUS = 4  # of a process that fails while running
LAST_WORDS = 0.25  # seconds for a launcher to pass on what it has read: it drops it when a job aborts
UNREAD = 5.0  # seconds that a busy launcher may take to read it
SHORTEST, LONGEST = 2e-5, 1e-3  # seconds between polls: short for latency, then long for ranks that share a core
GROWTH = 1.5  # of the pause from poll to poll: the longest is reached at the ninth
ROLL_CALL = 2.0  # seconds that a rank whose time is up waits for answers, at most half of the timeout
INT_BYTES = 4  # what the ioctl fills in


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
    until = time.monotonic() + UNREAD
    while _unread() and time.monotonic() < until:
        time.sleep(LONGEST)
    time.sleep(LAST_WORDS)
    MPI.COMM_WORLD.Abort(STATUS)
    os._exit(STATUS)


def _unread() -> bool:
    """Whether standard error is a pipe that holds something."""
    held = bytearray(INT_BYTES)
    with contextlib.suppress(OSError, ValueError):  # not a pipe, or nothing that has a descriptor
        fcntl.ioctl(sys.stderr.fileno(), termios.FIONREAD, held)
    return any(held)


def error_line(error: BaseException) -> str:
    """Return an error in one line."""
    line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {line}"


@dataclass(frozen=True, slots=True)
class Question:
    """A letter: what does the receiver run, and for whom does it wait?"""


@dataclass(frozen=True, slots=True)
class Answer:
    """A letter: the program that the sender runs, and the ranks that it waits for."""

    name: str
    waits_for: tuple[int, ...]


@dataclass(slots=True)
class MpiWatch:
    """The view of one rank on one run of a program by `ranks`."""

    ranks: tuple[int, ...]
    rank: int
    name: str  # of the program, for messages
    steps: Sequence[str]  # their texts, for messages
    timeout: float  # seconds that any wait may take
    letters: Letters
    stopped: Callable[[], str] = str  # says why the run cannot end; an empty text where it can
    step: int = -1  # the one that runs; -1 before the first
    _waits_for: Callable[[], list[int]] = list[int]  # ranks, as it answers to those who ask

    def __post_init__(self) -> None:
        """Answer those who ask."""
        self.letters.set_reader(
            Question, lambda sender, _: self.letters.post(sender, Answer(self.name, tuple(self._waits_for())))
        )

    def gather(self, done: Callable[[], bool], waits_for: Callable[[], list[int]]) -> None:
        """Poll `done`, which reads letters, until the ranks have agreed; raises as `wait`, where ranks do not come."""
        self._waits_for = waits_for
        if not self._poll(done):
            raise self._late_error(f"{self.name} did not start", f" of {format_ranks(self.ranks)}")
        self._waits_for = list[int]

    def wait(self, done: Callable[[], bool], waits_for: Callable[[], list[int]], group: Sequence[int]) -> None:
        """Poll `done`, which tests requests under way, until it is true; letters are read meanwhile.

        Args:
            done: Whether all requests are done.
            waits_for: Lists the device ids whose messages are outstanding.
            group: The device ids that take part, for the message.

        Raises:
            TimedOut: It took longer than the timeout; the ranks that did not arrive are named.
            BackendError: MPI failed, a rank ended before the run or withdrew from it, or others run another program.
        """
        from mpi4py import MPI

        def test() -> bool:
            found = done()
            if not found:
                self.letters.collect()
                if why := self.stopped():
                    raise BackendError(f"{self._step_text(group)}: {why}")
            return found

        self._waits_for = waits_for
        try:
            if not self._poll(test):
                raise self._late_error(self._step_text(group))
        except MPI.Exception as error:
            raise BackendError(f"{self._step_text(group)}: MPI failed: {error}") from None
        self._waits_for = list[int]

    @contextlib.contextmanager
    def abort_on_timeout(self) -> Generator[None]:
        """Abort the job from a second thread if the block, which cannot be polled, takes longer than the timeout.

        The block makes communicators. The second thread does nothing else, and only if time is up.
        """
        error = TimedOut(
            f"{self.name} did not start: its communicators were not made by {format_ranks(self.ranks)} within "
            f"{self.timeout:g} s"
        )
        timer = threading.Timer(self.timeout, abort, [error])
        timer.daemon = True
        timer.start()
        try:
            yield  # to the block, on this thread
        finally:
            timer.cancel()

    def _step_text(self, group: Sequence[int]) -> str:
        text = self.steps[self.step] if 0 <= self.step < len(self.steps) else "start"
        return f"{self.name}, step {self.step} ({text}), group {format_ranks(group)}"

    def _poll(self, done: Callable[[], bool], seconds: float | None = None) -> bool:
        """Return whether `done` came true in time; the pauses between polls grow, since cores may be few."""
        deadline = time.monotonic() + (self.timeout if seconds is None else seconds)
        pause = 0.0
        while not done():
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(LONGEST, GROWTH * pause + SHORTEST)
        return True

    def _late_error(self, where: str, among: str = "") -> ShardplanError:
        """Return the error of a wait that took too long."""
        answers = self._roll_call()
        missing = silent(self.rank, self._waits_for(), {r: a.waits_for for r, a in answers.items()}.get)
        other = next((a.name for a in answers.values() if a.name != self.name), None)
        if other is not None and all(r in answers for r in missing):
            strays = name_ranks(r for r, a in answers.items() if a.name == other)
            return BackendError(f"{where}: {other} is run by {strays} at the same time")
        return late_error(where, missing, among, self.timeout)

    def _roll_call(self) -> dict[int, Answer]:
        """Ask the ranks that this one waits for, and those that they wait for, and so on; return what they answer."""
        answers: dict[int, Answer] = {}
        asked = {self.rank}
        self.letters.set_reader(Answer, answers.__setitem__)

        def done() -> bool:
            self.letters.collect()
            for r in {*self._waits_for(), *(r for a in answers.values() for r in a.waits_for)} - asked:
                asked.add(r)
                self.letters.post(r, Question())
            return len(answers) == len(asked) - 1

        self._poll(done, min(ROLL_CALL, self.timeout / 2))
        return answers
