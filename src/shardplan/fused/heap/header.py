"""The words that every heap begins with: abort, barrier counts, notes, calls, what failed; and the bounded wait on one.

A word that peers write has a line of 64 bytes of its own and one writer, so that a plain aligned store is enough on
x86, where stores of a core become visible in order. Counts are int32, only grow, and may wrap.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Container, Sequence
from typing import Protocol

import numpy as np

from shardplan.errors import BackendError, ShardplanError
from shardplan.fused.heap.failures import FusedTimeout, HeapMismatch, PeerLost

LINE = 64
NOTE = 8192  # bytes of what a rank tells all others at once
RECORD = 512  # bytes of what failed
PAUSES = 30
YIELDING = 1e-3  # seconds before it sleeps
SLEEP = 5e-5
LOOK = 0.1  # seconds between looks at peers
DIGEST = 48  # bits of a word that says what a rank calls; above them are those of which call it is
OTHERS = (
    "Dummy-"  # how names of threads begin that Python did not start: autograd's, in which the owner's backward runs
)

Words = np.ndarray  # int32
Push = Callable[[int, int, int, int], None]  # to a rank, from the memory of a rank as it is here: offset, bytes


class HeapPeer(Protocol):
    """A rank as others see it."""

    @property
    def pid(self) -> int:
        """Its process."""
        ...

    def alive(self) -> bool:
        """Return whether it runs."""
        ...


def has_reached(seen: int, want: int) -> bool:
    """Return whether a count that wraps at 32 bits is there.

    >>> has_reached(3, 3), has_reached(2, 3), has_reached(-(2**31), 2**31 - 1)
    (True, False, True)
    """
    return (seen - want) & 0xFFFFFFFF < 1 << 31


def wrap_int32(count: int) -> int:
    """Return a count as an int32.

    >>> wrap_int32(2**31)
    -2147483648
    """
    return (count + (1 << 31)) % (1 << 32) - (1 << 31)


class HeapHeader:
    """The words of all heaps that one rank sees: `parts[r]` begins rank r's memory, uint8 [size]."""

    def __init__(
        self, parts: Sequence[np.ndarray], rank: int, peers: Sequence[HeapPeer], push: Push | None = None
    ) -> None:
        """Cut the words out; `push` carries what is stored for ranks whose memory is not mapped."""
        self.push = push
        self.parts, self.rank, self.peers, self.ranks = parts, rank, peers, len(parts)
        self.abort = [_words(part, 0) for part in parts]
        self.record = [part[LINE : LINE + RECORD] for part in parts]
        begin = LINE + RECORD
        self.lines = [[_words(part, begin + LINE * s) for s in range(self.ranks)] for part in parts]
        begin += LINE * self.ranks
        self.notes = [[part[begin + k * NOTE : begin + (k + 1) * NOTE] for k in (0, 1)] for part in parts]
        self.place = begin + 2 * NOTE
        lines = [part[self.place : self.place + LINE] for part in parts]
        self.said = [memoryview(line).cast("Q") for line in lines]  # type: ignore[arg-type]  # numpy's own buffer
        self.stamps = [[line.view(np.int32)[k:] for k in (1, 3)] for line in lines]  # upper halves of the two words
        self.count = self.calls = 0
        self.failed = ""  # the wait of this rank that ended before its signal
        self.thread = threading.current_thread()
        self.elsewhere = [p for p in enumerate(peers) if p[1].pid != peers[rank].pid]

    @staticmethod
    def size(ranks: int) -> int:
        """Return the bytes of a header, a multiple of a page."""
        return -(-(2 * LINE + RECORD + LINE * ranks + 2 * NOTE) // 4096) * 4096

    def clear(self) -> None:
        """Set the own words to what they were at first, for the thread that asks for it."""
        self.parts[self.rank][: self.size(self.ranks)] = 0
        self.count = self.calls = 0
        self.failed = ""
        self.thread = threading.current_thread()

    def wait(self, word: Words, want: int, seconds: float, late: Callable[[int], str], asking: str) -> None:
        """Return once the first word is at least `want`.

        Raises `FusedTimeout` with `late(seen)` after so many seconds, and `PeerLost` where a peer failed or died; then
        all ranks fail, at once.
        """
        for _ in range(PAUSES):
            if has_reached(int(word[0]), want):
                return
        started = time.monotonic()
        look = started + LOOK
        while not has_reached(int(word[0]), want):
            self.check(asking)
            now = time.monotonic()
            if now - started > seconds:
                self.failed = text = late(int(word[0]))
                self.fail(text)
                raise FusedTimeout(text)
            if now > look:
                look = now + LOOK
                self.look(asking)
            if now - started < YIELDING:
                os.sched_yield()
            else:
                time.sleep(SLEEP)

    def check(self, asking: str) -> None:
        """Raise `PeerLost` where a rank has failed."""
        if self.abort[self.rank][0]:
            raise PeerLost(f"{asking}: rank {self.rank} ended: {self.failure()}")

    def look(self, asking: str) -> None:
        """Raise `PeerLost` where the process of a peer has died."""
        for rank, peer in self.elsewhere:
            if not peer.alive():
                text = f"{asking}: rank {rank} (pid {peer.pid}) died"
                self.fail(text)
                raise PeerLost(text)

    def fail(self, text: str) -> None:
        """Have all ranks fail, and say why."""
        raw = np.frombuffer(text.encode()[: RECORD - 1] + b"\0", np.uint8)
        for rank, (record, abort) in enumerate(zip(self.record, self.abort, strict=True)):
            if not abort[0]:
                record[: len(raw)] = raw
                self._push_bytes(rank, rank, LINE, len(raw))
                abort[0] = 1
                self._push_bytes(rank, rank, 0, 4)

    def propagate_error(self, asking: str, error: BaseException) -> None:
        """Have all ranks fail by an error of this one, unless it is how this one heard that they do."""
        if not (isinstance(error, ShardplanError) and self.abort[self.rank][0]):
            self.fail(f"{asking}: rank {self.rank} failed: {type(error).__name__}: {error}")

    def failure(self) -> str:
        """Return what another rank said when it failed."""
        return bytes(self.record[self.rank]).partition(b"\0")[0].decode(errors="replace")

    def _push_bytes(self, to: int, part: int, offset: int, nbytes: int) -> None:
        if self.push is not None:
            self.push(to, part, offset, nbytes)

    def barrier(self, seconds: float, asking: str) -> None:
        """Return once all ranks are here; raises as `wait`."""
        self.check(asking)
        self.count += 1
        for peer in range(self.ranks):
            self.lines[peer][self.rank][0] = wrap_int32(self.count)
            self._push_bytes(peer, peer, LINE + RECORD + LINE * self.rank, 4)
        for source in range(self.ranks):

            def late(seen: int, source: int = source) -> str:
                said = f"(want {self.count}, seen {seen})"
                return f"{asking}: rank {self.rank} waited {seconds:g} s for rank {source} at a barrier {said}"

            self.wait(self.lines[self.rank][source], self.count, seconds, late, asking)

    def gather(self, note: bytes, seconds: float, asking: str) -> list[bytes]:
        """Return what every rank says, in the order of ranks; collective. Notes take turns, so one barrier is enough.

        Raises `HeapMismatch` where a note is longer than `NOTE` - 4 bytes, and as `wait`.
        """
        if len(note) > NOTE - 4:
            text = f"{asking}: a note of {len(note)} bytes; legal are {NOTE - 4}"
            self.fail(text)
            raise HeapMismatch(text)
        turn = self.count % 2
        mine = self.notes[self.rank][turn]
        mine[4 : 4 + len(note)] = np.frombuffer(note, np.uint8)
        mine[:4].view(np.int32)[0] = len(note)
        for peer in range(self.ranks):
            self._push_bytes(peer, self.rank, LINE + RECORD + LINE * self.ranks + turn * NOTE, 4 + len(note))
        self.barrier(seconds, asking)
        return [bytes(part[turn][4 : 4 + int(part[turn][:4].view(np.int32)[0])]) for part in self.notes]

    def begin(self, asking: str) -> None:
        """Raise where no call may begin: `FusedTimeout` after one of this rank, `BackendError` in another thread.

        A heap serves the thread that made it, or reset it last: which of several threads' calls meet on all ranks
        nobody knows. One that has ended leaves it to the next.
        """
        if self.failed:
            raise FusedTimeout(f"{asking}: failed before: {self.failed}; legal is a reset of the heap on all ranks")
        if threading.get_ident() == self.thread.ident:
            return
        this = threading.current_thread()
        if this.name.startswith(OTHERS):
            return
        if self.thread.is_alive():
            raise BackendError(
                f"{asking}: called in thread {this.name}, on a heap of thread {self.thread.name}; legal is the thread "
                "that made the heap, or reset it last, or a group and a heap for each thread"
            )
        self.thread = this

    def exchange(self, digest: int, known: Container[tuple[int, ...]], seconds: float, asking: str) -> tuple[int, ...]:
        """Return what every rank says of its next call, `DIGEST` bits each, in the order of ranks; collective.

        Two words take turns: who says the next one has seen this one of all others, so that none is stored over before
        it is read. What is `known` has come, as a word that has not is out of range. Raises as `wait`.
        """
        self.calls += 1
        turn, stamp = self.calls & 1, (self.calls & 0xFFFF) << DIGEST
        mine = self.said[self.rank]
        before, mine[turn] = mine[turn], stamp | digest
        if self.push is not None:
            self._carry_said(turn, before != 0 and not (before ^ digest) & 0xFFFFFFFF)
        for _ in range(PAUSES):
            found = tuple([line[turn] - stamp for line in self.said])
            if found in known:
                return found
        self._wait_said(turn, seconds, asking)
        return tuple([line[turn] - stamp for line in self.said])

    def _carry_said(self, turn: int, known: bool) -> None:
        """Send the own word to ranks elsewhere: the lower half, unless they have it, and then the upper one."""
        for peer in range(self.ranks):
            for half in (1,) if known else (0, 1):
                self._push_bytes(peer, self.rank, self.place + 8 * turn + 4 * half, 4)

    def _wait_said(self, turn: int, seconds: float, asking: str) -> None:
        """Return once all ranks have said what they call; raises as `wait`."""
        want = (self.calls & 0xFFFF) << DIGEST - 32
        for source in range(self.ranks):

            def late(seen: int, source: int = source) -> str:
                who = f"{asking}: rank {self.rank} waited {seconds:g} s for rank {source}"
                return f"{who}, which has not begun call {self.calls} of this heap; legal is the same call on all"

            self.wait(self.stamps[source][turn], want, seconds, late, asking)


def _words(part: np.ndarray, start: int) -> Words:
    return part[start : start + LINE].view(np.int32)
