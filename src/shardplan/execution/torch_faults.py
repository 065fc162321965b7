"""What ranks tell each other through the store, so that a failure on one is one clear error on every other.

Before a program starts its ranks compare a digest of its text; while it runs each posts the step it is at, and what
went wrong. A rank whose wait fails reads these posts, follows them to the first cause, and names it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shardplan.errors import BackendError, ShardplanError, TimedOut
from shardplan.execution.words import listed, named

_agreements: Counter[str] = Counter()  # how often a set of ranks compared programs, in this process
_runs: Counter[str] = Counter()


@dataclass(slots=True)
class Watch:
    """The view of one rank on one run of a program by `ranks`; `name` and `steps` are for messages."""

    ranks: tuple[int, ...]
    rank: int
    name: str
    steps: Sequence[str]
    timeout: float
    posts: bool = True  # whether every step is posted
    step: int = -1
    number: int = 0
    prefix: str = field(init=False)

    def __post_init__(self) -> None:
        """Number the run: every rank of the set counts alike."""
        self.prefix = ranks_key(self.ranks)
        _runs[self.prefix] += 1
        self.number = _runs[self.prefix]

    @property
    def tag(self) -> int:
        """A tag for the messages of this run, the same on all its ranks."""
        return (int(self.prefix, 16) + self.number * 7919) % 2**30

    def agree(self, digest: str) -> None:
        """Wait until every rank has come with the same program.

        Raises:
            TimedOut: Some ranks did not come; they are named.
            BackendError: A rank runs another program.
        """
        if len(self.ranks) == 1:
            return
        store, timeout = _store(), timedelta(seconds=self.timeout)
        _agreements[self.prefix] += 1
        number = _agreements[self.prefix]
        keys = {r: f"shardplan/{self.prefix}/{number}/{r}" for r in self.ranks}
        value = f"{digest} {self.name}"
        try:
            store.set(keys[self.rank], value)
            store.wait(list(keys.values()), timeout)
            found = {r: store.get(k).decode() for r, k in keys.items()}
            if number > 1:  # all have come to this one, so nobody reads the last one any more
                store.delete_key(f"shardplan/{self.prefix}/{number - 1}/{self.rank}")
        except RuntimeError as error:
            raise self._absent(store, keys, error) from None
        others = {r: text for r, text in found.items() if text.split()[0] != digest}
        if others:
            text = next(iter(others.values()))
            raise BackendError(
                f"the ranks {listed(self.ranks)} do not run one program: rank {self.rank} runs {self.name}, "
                f"{named(others)} {text.partition(' ')[2]}{'' if len(others) == 1 else ' and others'}; "
                "nothing was sent"
            )

    def _absent(self, store: Any, keys: dict[int, str], error: Exception) -> Exception:
        try:
            missing = [r for r, k in keys.items() if not store.check([k])]
        except RuntimeError:
            missing = []
        if not missing:
            return BackendError(f"{self.name}: the store of torch.distributed failed: {_line(error)}")
        return TimedOut(
            f"{self.name} did not start: {named(missing)} of {listed(self.ranks)} did not arrive within "
            f"{self.timeout:g} s"
        )

    def at(self, step: int) -> None:
        """Note, and post, that the rank begins a step."""
        self.step = step
        if self.posts and len(self.ranks) > 1:
            try:
                _store().set(f"shardplan/{self.prefix}/at/{self.rank}", f"{self.number}:{step}")
            except RuntimeError as error:
                raise BackendError(f"{self.name}: the store of torch.distributed failed: {_line(error)}") from None

    def failed(self, peer: int, error: Exception) -> Exception:
        """Return the error to raise after traffic with `peer` failed (see `torch_wire.Faults`)."""
        late = "timed out" in str(error).lower() or "timeout" in str(error).lower()
        self._post(f"peer {peer} {_line(error)}")
        where = f"{self.name}, step {self.step} ({self.steps[self.step] if self.steps else 'start'})"
        cause, told = self._cause(peer)
        behind = self._behind()
        if told:
            return BackendError(f"{where}: rank {cause} failed: {told}")
        if late:
            who = named(behind or [cause])
            return TimedOut(f"{where}: {who} of {listed(self.ranks)} did not arrive within {self.timeout:g} s")
        return BackendError(f"{where}: lost rank {cause} of {listed(self.ranks)}: {_line(error)}")

    def broke(self, error: BaseException) -> None:
        """Post an exception of this rank's own, for the others to read."""
        if not isinstance(error, ShardplanError):
            self._post(f"own {type(error).__name__}: {_line(error)}")

    def _post(self, text: str) -> None:
        with contextlib.suppress(RuntimeError):  # without a store nobody can be told
            _store().set(f"shardplan/{self.prefix}/failed/{self.number}/{self.rank}", text)

    def _told(self, rank: int) -> str:
        key = f"shardplan/{self.prefix}/failed/{self.number}/{rank}"
        try:
            store = _store()
            return store.get(key).decode() if store.check([key]) else ""
        except RuntimeError:
            return ""

    def _cause(self, peer: int) -> tuple[int, str]:
        """Follow the posts from `peer` to the rank that failed first, and what it said of itself."""
        seen: set[int] = {self.rank}
        while peer not in seen:
            seen.add(peer)
            kind, _, rest = self._told(peer).partition(" ")
            if kind == "own":
                return peer, rest
            if kind != "peer" or int(rest.split()[0]) in seen:
                break
            peer = int(rest.split()[0])
        return peer, ""

    def _behind(self) -> list[int]:
        """The ranks that have not come to this step."""
        if not self.posts:
            return []
        out: list[int] = []
        try:
            store = _store()
            for r in self.ranks:
                key = f"shardplan/{self.prefix}/at/{r}"
                at = tuple(map(int, store.get(key).decode().split(":"))) if store.check([key]) else (-1, -1)
                if at < (self.number, self.step):
                    out.append(r)
        except RuntimeError:
            return []
        return out


@functools.lru_cache(maxsize=1024)
def ranks_key(ranks: tuple[int, ...]) -> str:
    """Return a short name of a set of ranks, in hexadecimal."""
    return hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:7]


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__
