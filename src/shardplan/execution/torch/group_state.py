"""What a process keeps about its process group: the store, the runs it counted, and a thread that looks after waits.

gloo offers no way to ask whether a message has come, and a wait that times out closes every connection of the group.
So nothing is polled on the thread of a run, and a second thread looks at its waits from outside: one that lasts longer
than `GRACE` is slow, and only then is the store asked and told anything. A run that goes well and never waits that long
costs the store nothing.

Who touches what: the thread of a run counts, agrees and uses `store`; it notes what it waits for in `waits`, one entry
a watch, set before a wait and deleted after it. The second thread only reads `waits`, from a copy (one step of a dict,
so no lock is needed), and uses `aside`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import threading
import time
from collections import Counter, deque
from collections.abc import Generator
from contextvars import ContextVar
from typing import Any, Protocol
from unittest.mock import patch

import torch.distributed as dist

from shardplan.errors import BackendError, excerpt
from shardplan.execution.torch.libraries import libraries_of
from shardplan.execution.torch.posts import PostOffice

GRACE = 0.5  # seconds that a wait may last before the store is asked why
ENDING = 1.0  # seconds that the second thread has to end: it may be at the store
TICK = 0.1  # seconds between two looks: a fifth of `GRACE`, so that a slow wait is noticed soon after it


class WatchedRun(Protocol):
    """A run whose waits are looked after."""

    def slow(self, wait: Any, seconds: float) -> None:
        """Find out, and tell, why a wait has lasted so long; called at every look while it lasts."""
        ...

    def end_wait(self) -> None:
        """Take back what `slow` told, since that wait is over."""
        ...


class GroupState:
    """The state of one process in one process group; it ends with the group."""

    def __init__(self, group: Any, store: Any, ranks: tuple[int, ...] = ()) -> None:
        """Start with nothing counted and nothing agreed."""
        self.group = group
        self.store = store
        self.ranks = ranks  # global ones, in the order of the group
        self.rank_in = {rank: k for k, rank in enumerate(ranks)}
        self.runs: Counter[tuple[int, ...]] = Counter()  # by the ranks of a program: all of them count alike
        self.agreements: dict[tuple[int, ...], str] = {}  # where the last one lies in the store
        self.agreed: set[str] = set()  # digests of the programs that all their ranks have come with
        self.left_behind: list[Any] = []  # messages of failed runs: gloo breaks a connection whose buffer is gone
        self.waits: dict[WatchedRun, Any] = {}  # by watch, what it waits for now
        self.groups: dict[tuple[int, ...], Any] = {}  # of native collectives, by their ranks in member order
        self.mismatches: dict[tuple[int, ...], str] = {}  # by the ranks of unlike programs, what was told of them
        self.ended: deque[Any] = deque()  # wires of runs on a device that have ended with posts not compared yet
        self._thread: threading.Thread | None = None
        self._ends = threading.Event()  # set by `end`, waited for by the second thread between two looks

    def members(self, ranks: tuple[int, ...]) -> Any:
        """Return the process group of some ranks, in this order; made once, which all of them must come for.

        Steps come in one order on all ranks, so groups do, and no rank waits for one that waits for it.
        """
        if ranks == self.ranks:
            return self.group
        if ranks not in self.groups:
            with _fixed_group_name(f"shardplan {self.group.group_name} {' '.join(map(str, ranks))}"):
                self.groups[ranks] = dist.new_group(
                    list(ranks),
                    backend=dist.get_backend(self.group),  # else that of the default group
                    use_local_synchronization=True,
                    sort_ranks=False,
                )
        return self.groups[ranks]

    @functools.cached_property
    def posts(self) -> PostOffice:
        """Where ranks post what they run; opened by the first run that does."""
        return PostOffice(self.store, dist.get_rank())

    @functools.cached_property
    def libraries(self) -> dict[str, str]:
        """The library that carries tensors, by the type of their device; see `libraries`."""
        return libraries_of(self.group)

    @functools.cached_property
    def aside(self) -> Any:
        """The store for the second thread: a connection of its own, since a wait on one keeps it for itself."""
        return self.store.clone()

    def look_after_waits(self) -> None:
        """Start the second thread, once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="shardplan-waits", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Stop the second thread: one that the interpreter outlives would abort the process."""
        self._ends.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(ENDING)
        if "posts" in self.__dict__:
            self.posts.close()

    def _look(self) -> None:
        """Tell watches of their slow waits, and of the end of those, until `end`: what the second thread does."""
        seen: dict[WatchedRun, tuple[Any, float]] = {}  # by watch, its wait and since when
        told: set[WatchedRun] = set()
        while not self._ends.wait(TICK):
            if not (self.waits or seen or told):
                continue
            now, waits = time.monotonic(), dict(self.waits)  # a wait is known by its identity: each is a new object
            seen = {w: seen[w] if w in seen and seen[w][0] is x else (x, now) for w, x in waits.items()}
            slow = {w: (x, now - since) for w, (x, since) in seen.items() if now - since >= GRACE}
            with contextlib.suppress(RuntimeError):  # without a store nobody can be asked; the wait's own bound holds
                for watch in told - set(slow):
                    told.discard(watch)
                    watch.end_wait()
                for watch, (wait, seconds) in slow.items():
                    told.add(watch)
                    watch.slow(wait, seconds)


@contextlib.contextmanager
def _fixed_group_name(name: str) -> Generator[None]:
    """Give the next group a name that is the same on all its ranks.

    torch names a group that only its own ranks make by how many groups a rank has, of which ranks have unlike numbers;
    they then wait for each other under unlike names, for good.
    """
    with patch.object(dist.distributed_c10d, "_process_group_name", lambda *_, **__: name):
        yield


_states: dict[Any, GroupState] = {}  # by process group, of those that were asked for
_chosen: ContextVar[Any] = ContextVar("_chosen", default=None)


@contextlib.contextmanager
def process_group(group: Any = None) -> Generator[Any]:
    """Run what is started inside over a process group of its own: nothing of it meets what travels elsewhere.

    Ranks start moves in one order, whatever their groups, and end them in any.

    Args:
        group: The group, whose ranks include those of all programs that run inside; by default a new one of all ranks,
            which all of them come for together.

    Yields:
        The group, to be given again: making one takes time, and on a GPU memory.

    Raises:
        BackendError: torch.distributed is not initialised, or `group` is none of this rank.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise BackendError("process_group: torch.distributed is not initialised; call init_process_group first")
    if group is None:
        group = dist.new_group()
    if not isinstance(group, dist.ProcessGroup):
        raise BackendError(f"process_group: {excerpt(group)}; legal is a process group that this rank is in")
    token = _chosen.set(group)
    try:
        yield group
    finally:
        _chosen.reset(token)


def group_state() -> GroupState:
    """Return the state that belongs to the process group of what is started here: the default one, or that chosen."""
    c10d = dist.distributed_c10d
    default = c10d._get_default_group()  # pyright: ignore[reportPrivateUsage]
    group = _chosen.get() or default
    if group not in _states:
        for gone in [old for old in _states if old not in c10d._world.pg_map]:  # pyright: ignore[reportPrivateUsage]
            _states.pop(gone).end()
        store: Any = c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
        if group is not default:
            store = c10d.PrefixStore(f"shardplan {group.group_name}", store)
        _states[group] = GroupState(group, store, tuple(dist.get_process_group_ranks(group)))
    return _states[group]


@atexit.register
def _end_all_states() -> None:
    for old in _states.values():
        old.end()
