"""The meeting of all ranks of a refit in a store: who has come, that all run one plan, and a group of their own.

A meeting has a number, which is how often a rank has come, and the largest of all ranks: a rank that was started again
finds those that failed with the one before it. What lies in the store, below `shardplan/refit/NAME`: `words/RANK` (the
meeting to which that rank has come, and what it runs), and below the number `connected/RANK`, the group's own keys, and
those of `faults`.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store

from shardplan.errors import BackendError, LayoutError, ParseError, TimedOut, excerpt, line
from shardplan.execution.agreement import Agreement, RankReady, Refusal, Word, Words, late_error, meet
from shardplan.execution.rank_names import name_ranks
from shardplan.execution.torch.group_state import GroupState
from shardplan.interop.torch.refit.store import MeetingStore
from shardplan.movement.weights.refit import RefitPlan, refit
from shardplan.movement.weights.weights import Weights

LEGAL = "tcp://HOST:PORT, tcp://SECRET@HOST:PORT, file:///PATH, or a store of torch.distributed"
POLL = 0.01, 0.25  # seconds between two looks for ranks that have not come: at first, and at the longest


def store_of(text: Any, ranks: Sequence[int], rank: int, timeout: float) -> Any:
    """Return the store that a text names, or a store as it is.

    Legal are `tcp://HOST:PORT` and `tcp://SECRET@HOST:PORT`, which the lowest rank serves if HOST is its own, and which
    end with it, `file:///PATH`, and any store of torch.distributed. Raises `ParseError` and `BackendError`.
    """
    if isinstance(text, Store):
        return text
    kind, _, rest = text.partition("://") if isinstance(text, str) else ("", "", "")
    secret, _, place = rest.rpartition("@")
    host, _, port = place.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    said = excerpt(f"tcp://...@{place}" if kind == "tcp" and secret else text)  # a secret is for nobody to read
    try:
        if kind == "tcp" and host and port.isdecimal() and 0 < int(port) < 1 << 16:
            return MeetingStore.meet(host, int(port), secret.encode(), rank == min(ranks), timeout)
        if kind == "file" and rest:
            return FileStore(rest, -1)
    except (RuntimeError, OSError, BackendError) as error:
        raise BackendError(f"store = {said}, rank {rank}: {line(str(error).splitlines()[0])}") from None
    raise ParseError(f"store = {said}; legal is {LEGAL}")


def close_store(store: Any) -> None:
    """Leave a store that `store_of` made of a text."""
    if isinstance(store, MeetingStore):
        store.close()


class RefitMeeting:
    """One rank's view of the ranks that refit together over a store."""

    def __init__(self, store: Any, ranks: Sequence[int], rank: int, name: str, timeout: float) -> None:
        """Take the store, the device ids of all ranks, the own one, a name and the seconds that a wait may take."""
        self.place = store
        self.store = PrefixStore(f"shardplan/refit/{name}", store)
        self.ranks, self.rank, self.name, self.timeout = tuple(ranks), rank, name, timeout
        self.number = 0
        self.said: Mapping[str, str] = {}

    @property
    def limit(self) -> timedelta:
        """How long a wait may take."""
        return timedelta(seconds=self.timeout)

    def agree(self, said: Mapping[str, str], what: str) -> None:
        """Come to the next meeting, and return once all ranks have, with the same.

        Raises `TimedOut` naming who is absent, and `LayoutError` naming who differs; `what` is for that message.
        """
        agreement, self.said = Agreement.among_all(self.ranks, self.rank, RankReady(said)), said
        try:
            self.number = max(self.number, self._heard(self.rank)[0]) + 1
            meet(agreement, self, self.timeout)
            if agreement.verdict is None:  # who comes later waits for this rank
                self.store.set(f"words/{self.rank}", json.dumps([self.number - 1, said]))
        except (RuntimeError, dist.DistError) as error:
            raise BackendError(
                f"{self.name}, rank {self.rank}: the store of the refit failed: {line(str(error).splitlines()[0])}"
            ) from None
        if isinstance(agreement.verdict, Refusal):
            raise unlike_error(agreement.verdict.offers, what)
        if agreement.verdict is None:
            among = f" of {len(self.ranks)} ranks"
            raise late_error(f"{self.name} did not start", agreement.waits_for, among, self.timeout)

    def post(self, words: Words) -> None:
        """Say to all what this rank comes with, and to which meeting."""
        self.store.set(f"words/{self.rank}", json.dumps([self.number, self.said]))

    def collect(self, seconds: float) -> Mapping[int, Word]:
        """Return what ranks come with, once all have come as often as the one that has come the most, or in time."""
        until, pause = time.monotonic() + seconds, POLL[0]
        heard: dict[int, tuple[int, Any]] = {}
        while True:
            heard |= {r: self._heard(r) for r in self.ranks if r not in heard or heard[r][0] < self.number}
            if (top := max(number for number, _ in heard.values())) > self.number:
                self.number = top
                self.post([])
                continue
            here = {r: RankReady(said) for r, (number, said) in heard.items() if number == self.number}
            if len(here) == len(self.ranks) or time.monotonic() > until:
                return here
            time.sleep(pause)
            pause = min(2 * pause, POLL[1])

    def close(self) -> None:
        """Nothing: words stay for those that come late."""

    def _heard(self, rank: int) -> tuple[int, Any]:
        """Return to which meeting a rank has come, and with what; 0 where to none."""
        key = f"words/{rank}"
        return json.loads(self.store.get(key)) if self.store.check([key]) else (0, None)

    def _key(self, part: str) -> str:
        return f"{self.number}/{part}"

    def state(self) -> GroupState:
        """Return the state of a process group of gloo, made now for these ranks in their order.

        No rank has it before all have: one that left at once would end connections that others are still making.
        """
        try:
            own = PrefixStore(self._key("gloo"), self.store)
            group = dist.ProcessGroupGloo(own, self.ranks.index(self.rank), len(self.ranks), self._gloo())
            self.store.set(self._key(f"connected/{self.rank}"), "")
            self.store.wait([self._key(f"connected/{rank}") for rank in self.ranks], self.limit)
        except (RuntimeError, dist.DistError) as error:
            raise BackendError(f"{self.name}, rank {self.rank}: {line(str(error).splitlines()[0])}") from None
        return GroupState(group, PrefixStore(self._key("faults"), self.store), self.ranks)

    def _gloo(self) -> Any:
        """Options of a group that listens where this rank reaches the meeting, unless a user says an interface."""
        if not isinstance(self.place, MeetingStore) or not self.place.address or "GLOO_SOCKET_IFNAME" in os.environ:
            return self.limit
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = self.limit
        options._devices = [gloo.create_device(hostname=self.place.address)]
        return options

    def leave(self) -> None:
        """Close what the state of a group had of the store for itself."""
        if isinstance(self.place, MeetingStore):
            self.place.close_clones()


def unlike_error(heard: Mapping[int, Mapping[str, str]], name: str) -> LayoutError:
    """Return the error of ranks that do not say the same: it names those that differ from most, and in what."""
    texts = {rank: json.dumps(said, sort_keys=True) for rank, said in sorted(heard.items())}
    most, _ = Counter(texts.values()).most_common(1)[0]  # of as many that of the lowest rank
    usual = next(rank for rank in texts if texts[rank] == most)
    other = [rank for rank in texts if texts[rank] != most]
    first = heard[other[0]]
    keys = [key for key in heard[usual] if first.get(key) != heard[usual][key]]
    said = "; ".join(f"its {key} is {first.get(key)}, on rank {usual} it is {heard[usual][key]}" for key in keys)
    return LayoutError(
        f"{name}: {name_ranks(other)} of {len(heard)} ranks came with another plan: {said}; legal is one plan on all "
        "ranks, and nothing was sent"
    )


def join_sides(
    weights: Weights,
    side: str,
    rank: int,
    store: Any,
    settings: tuple[Any, Any, Any],
    timeout: float,
    name: str,
    drop: str | Iterable[str] = (),
    differ: str | Iterable[str] = (),
) -> RefitPlan:
    """Return the plan of this side and the other; see `Refit.join`, and `shardplan.refit` of what may differ."""
    sides = ("source", "target")
    if side not in sides:
        raise LayoutError(f"side = {excerpt(side)}; legal are {' and '.join(sides)}")
    weights.place(rank)
    texts = PrefixStore(f"shardplan/refit/{name}/sides", store)
    if rank == min(weights.devices):
        texts.set(side, str(weights))
    other = sides[1 - sides.index(side)]
    try:
        texts.wait([other], timedelta(seconds=timeout))
    except (RuntimeError, dist.DistError):
        raise TimedOut(f"refit: the {other}'s side did not arrive within {timeout:g} s") from None
    found = Weights.parse(texts.get(other).decode())
    source, target = (weights, found) if side == "source" else (found, weights)
    limit, topology, only = settings
    return refit(source, target, topology, limit, only, drop=drop, differ=differ)
