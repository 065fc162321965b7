"""Letters between ranks: small Python values, of one tag on the world, read by ranks that wait for something.

They carry agreements, withdrawals and roll calls, never data. Who reads registers what a kind of letter does. Between
two ranks letters come in the order in which they were posted, as MPI has it for messages of one tag. Only the thread of
the run posts and collects.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py import MPI

LEAVING = 1.0  # seconds that last letters may take to leave
PAUSE = 1e-4  # seconds between two looks whether they have
TAG = 2**14 + 11  # on COMM_WORLD, where the user's own messages travel: within what MPI promises (32767), rarely chosen


@dataclass(slots=True)
class Letters:
    """The letters of this process."""

    sent: int = 0  # letters posted so far
    _readers: dict[type, Callable[[int, Any], None]] = field(default_factory=dict[type, Callable[[int, Any], None]])
    _under_way: list[MPI.Request] = field(default_factory=list["MPI.Request"])  # each keeps its buffer

    def set_reader(self, kind: type, reader: Callable[[int, Any], None]) -> None:
        """Have letters of a kind read by `reader`, with the sender's rank."""
        self._readers[kind] = reader

    def post(self, rank: int, letter: object) -> None:
        """Send a letter to a rank of the world, without waiting."""
        from mpi4py import MPI

        self.sent += 1
        self._under_way.append(MPI.COMM_WORLD.isend(letter, rank, TAG))

    def collect(self) -> None:
        """Read the letters that have come."""
        from mpi4py import MPI

        status = MPI.Status()
        while (letter := MPI.COMM_WORLD.improbe(MPI.ANY_SOURCE, TAG, status)) is not None:
            value = letter.recv()
            self._readers[type(value)](status.Get_source(), value)

    def has_sent_all(self) -> bool:
        """Say whether all letters have left, so that this process may turn to something other than MPI."""
        self._under_way = [r for r in self._under_way if not r.Test()]
        return not self._under_way

    def flush(self, seconds: float) -> None:
        """Wait until all letters have left, at most `seconds`: the receiver of one may be gone."""
        until = time.monotonic() + seconds
        while not self.has_sent_all() and time.monotonic() < until:
            time.sleep(PAUSE)


@functools.cache
def letters() -> Letters:
    """Return the letters of this process."""
    return Letters()
