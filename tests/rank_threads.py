"""Ranks as threads of this process: what each returns, and a hub through which they exchange bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any


def in_threads(
    ranks: Iterable[int],
    work: Callable[[int], Any],
    seconds: float = 60.0,
    broken: Callable[[], object] = lambda: None,
) -> dict[int, Any]:
    """What `work(rank)` returned for each rank, all at once; raises what the first of them raised.

    A thread that has not ended after so many seconds is a failure, as a rank that hangs is. `broken` is called behind
    an error, so that nobody waits for the rank that had it.
    """
    found: dict[int, Any] = {}
    wrong: list[BaseException] = []

    def one(rank: int) -> None:
        try:
            found[rank] = work(rank)
        except BaseException as error:
            wrong.append(error)
            broken()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
        assert wrong or not thread.is_alive(), f"not ended after {seconds:g} s"
    if wrong:
        raise wrong[0]
    return dict(sorted(found.items()))


class Hub:
    """Where ranks that are threads hand all of them their bytes; who fails there ends the waiting of the others."""

    def __init__(self, ranks: int, seconds: float = 20.0) -> None:
        self.said: list[bytes] = [b""] * ranks
        self.meet = threading.Barrier(ranks, timeout=seconds)

    def exchange(self, rank: int, mine: bytes, meanwhile: Callable[[], object] = lambda: None) -> list[bytes]:
        """Give one's bytes; what all gave. `meanwhile` runs before anybody gives more."""
        self.said[rank] = mine
        self.meet.wait()
        found = list(self.said)
        meanwhile()
        self.meet.wait()
        return found

    def in_threads(self, work: Callable[[int], Any], seconds: float = 60.0) -> dict[int, Any]:
        """As the function does for all ranks; one that raises breaks the hub."""
        return in_threads(range(len(self.said)), work, seconds, self.meet.abort)
