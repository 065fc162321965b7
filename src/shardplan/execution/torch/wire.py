"""Point-to-point traffic between the ranks of torch.distributed, with bounded waits and counted bytes.

All programs travel on one process group. gloo takes single sends and receives under the tag of the run, which mixes its
number with the identity of its program: messages of another run, or of another program, never match.

Any other backend (nccl) takes batches, since there the order of single messages could deadlock, and has no tags; a
library's own collectives have none either. There, the first time that a run has data for a rank, it posts to it what it
runs (see `posts`), ahead of the data. In a collective each member posts to the next one of its group. Nobody waits for
a post on the way: on the host it is compared when the run ends, where the data that came behind it has come already,
and on a device, where a run ends before its data has come, by the next run of this process group. So whatever a rank
runs in place of the others is found by those that hear of it, and they refuse what comes after; the others are told in
their next run.

A wire belongs to the thread of its run. Only `answer` and `cut` are called from the thread that looks after waits too:
they post on a copy, or end every connection.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardplan.errors import ShardplanError
from shardplan.execution.record import NativeCall
from shardplan.execution.torch.faults import TorchWatch
from shardplan.execution.torch.libraries import native_on, tell_composed
from shardplan.execution.torch.waits import Wait

Pending = list[tuple[int, Any]]  # peer, and the work of torch that is waited for
AT_ONCE = timedelta(milliseconds=1)  # a wait that is to fail: gloo's bound must be above 0


@dataclass(slots=True)
class TorchWire:
    """The traffic of one run."""

    group: Any  # torch.distributed.ProcessGroup
    watch: TorchWatch
    device: torch.device
    received: int = 0  # bytes of the messages received so far
    sent: int = 0
    batched: bool = field(default=False)  # messages in batches behind posts, without tags: any backend but gloo
    native: bool = field(default=False)  # collectives in groups are the library's own
    calls: list[NativeCall] = field(default_factory=list[NativeCall])  # of these, so far
    timeout: timedelta = field(init=False)
    tag: int = field(init=False)
    under_way: dict[Any, int] = field(default_factory=dict[Any, int])  # by work, the bytes that it sends
    met: set[tuple[int, bool]] = field(default_factory=set[tuple[int, bool]])  # peer, whether it gives data
    givers: list[int] = field(default_factory=list[int])  # whose posts are not compared yet
    calling: tuple[int, ...] = ()  # the ranks of the collective that is waited for

    def __post_init__(self) -> None:
        """Take the bound and the tag of the run."""
        self.timeout = timedelta(seconds=self.watch.timeout)
        self.tag = self.watch.tag

    @staticmethod
    def of(watch: TorchWatch, device: torch.device) -> TorchWire:
        """Return the wire of a run whose tensors lie on a device, by the library that the process group has for it."""
        state = watch.state
        library = state.libraries.get(device.type, "")  # none for a rank alone
        if not (native := native_on(library)) and len(watch.ranks) > 1:
            tell_composed(library, device.type)
        return TorchWire(state.group, watch, device, batched=library != "gloo" and device.type != "cpu", native=native)

    @property
    def is_streamed(self) -> bool:
        """Whether the library's work stands in line on a stream of the device, so that the host need not wait."""
        return self.batched and self.device.type != "cpu"

    def empty(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a staging buffer."""
        return torch.empty(elements, dtype=dtype, device=self.device)

    def post(
        self, receives: Sequence[tuple[int, torch.Tensor]], sends: Sequence[tuple[int, torch.Tensor]]
    ) -> tuple[Pending, Pending]:
        """Start contiguous messages; returns the pending receives and sends, in the order given.

        Messages of two ranks meet in the order in which each posts them. Raises what `TorchWatch.failed` makes of a
        failure.
        """
        for _, x in receives:
            self.received += x.nbytes
        for _, x in sends:
            self.sent += x.nbytes
        if self.batched:
            self.exchange_posts([p for p, _ in receives], [p for p, _ in sends])
            return self._batch(receives, sends)
        group, tag, under_way, rank_in = self.group, self.tag, self.under_way, self.watch.state.rank_in
        peer = -1
        try:
            ins: Pending = []
            for peer, x in receives:
                work = group.recv([x], rank_in[peer], tag)
                under_way[work] = 0
                ins.append((peer, work))
            outs: Pending = []
            for peer, x in sends:
                work = group.send([x], rank_in[peer], tag)
                under_way[work] = x.nbytes
                outs.append((peer, work))
        except RuntimeError as error:
            raise self.watch.wait_error(peer, error) from None
        return ins, outs

    def _batch(
        self, receives: Sequence[tuple[int, torch.Tensor]], sends: Sequence[tuple[int, torch.Tensor]]
    ) -> tuple[Pending, Pending]:
        ops = [dist.P2POp(dist.irecv, _bytes(x), peer, self.group) for peer, x in receives]
        ops += [dist.P2POp(dist.isend, _bytes(x), peer, self.group) for peer, x in sends]
        if not ops:
            return [], []
        works = dist.batch_isend_irecv(ops)
        if len(works) < len(ops):  # a backend that joins them has one work stand for all
            works = works[:1] * len(ops)
        peers = [peer for peer, _ in (*receives, *sends)]
        pending = list(zip(peers, works, strict=True))
        self.under_way.update(dict.fromkeys(works, 0))
        return pending[: len(receives)], pending[len(receives) :]

    def exchange_posts(self, givers: Iterable[int], takers: Iterable[int]) -> None:
        """Post what this rank runs to those that take data of it, once; those that give it some post, too."""
        new = {(p, True) for p in givers} | {(p, False) for p in takers}
        new -= self.met
        if not new:
            return
        self.met |= new
        watch = self.watch
        watch.refuse_after_mismatch()
        watch.untagged = True
        office = watch.state.posts
        self.givers += sorted(p for p, gives in new if gives)
        for peer in sorted(p for p, gives in new if not gives):
            try:
                office.send(peer, watch.posted_run, watch.post, watch.timeout)
            except (OSError, RuntimeError) as error:
                raise watch.wait_error(peer, error) from None

    def compare_posts(self) -> None:
        """Wait for the posts of all that gave data, and refuse the run where one is of another."""
        watch = self.watch
        while self.givers:
            peer = self.givers.pop(0)
            watch.state.waits[watch] = Wait(peer, 0, PostWait(self))
            try:
                found = watch.state.posts.take(peer, watch.posted_run, watch.timeout, lambda: bool(watch.verdict))
            except OSError as error:
                raise watch.wait_error(peer, error) from None
            finally:
                del watch.state.waits[watch]
            if found is None:
                raise watch.wait_error(peer, None)
            if found.identity != watch.post.identity:
                raise watch.mismatch_error(peer, found.name)

    def wait(self, pending: Pending) -> None:
        """Wait for messages, each at most the timeout; raises what `TorchWatch.failed` makes of a failure."""
        for peer, work in pending:
            self.wait_one(peer, work)

    def wait_one(self, peer: int, work: Any) -> None:
        """Wait for one message; while it waits, `waits` shows the second thread what for.

        On a device its stream waits, without a bound: with one the host would poll, and the library's watchdog has one.
        """
        watch = self.watch
        if self.is_streamed:
            work.wait()
            self.under_way.pop(work, None)
            return
        waits = watch.state.waits
        waits[watch] = Wait(peer, self.under_way.get(work, 0), self)
        try:
            work.wait(self.timeout)
        except RuntimeError as error:
            raise watch.wait_error(peer, error) from None
        finally:
            del waits[watch]
        self.under_way.pop(work, None)
        if watch.verdict:  # a message of no use: the run has failed
            raise watch.wait_error(peer, None)

    def group_of(self, ranks: tuple[int, ...]) -> Any:
        """Return the process group of a native collective, in which this run has posted to the next member."""
        me = ranks.index(self.watch.rank)
        self.exchange_posts([ranks[me - 1]], [ranks[(me + 1) % len(ranks)]])
        return self.watch.state.members(ranks)

    def wait_call(self, ranks: tuple[int, ...], work: Any) -> None:
        """Wait for a collective of some ranks: on a device its stream does, and the host goes on."""
        self.under_way[work], self.calling = 0, ranks
        self.wait_one(ranks[ranks.index(self.watch.rank) - 1], work)
        self.calling = ()

    # After a failure

    def answer(self, peer: int, sent: int, tag: int) -> None:
        """End the wait of `peer` for a message from this rank, or for `sent` bytes to be taken by it.

        A receive in gloo takes shorter messages, so one of no bytes ends any. The tag is the one of the peer's run.
        """
        if self.batched or tag < 0:
            return
        useless = torch.empty(sent, dtype=torch.uint8)
        other = copy.copy(self)
        other.tag, other.under_way = tag, {}
        with contextlib.suppress(ShardplanError):  # no way to it any more
            other.post([(peer, useless)] if sent else [], [] if sent else [(peer, useless)])
            other.abandon()

    def cut(self, peer: int) -> None:
        """End all waits of this rank, and its connections with them."""
        if self.is_streamed:
            self.abort()
            return
        group = self.watch.state.groups.get(self.calling)
        group, place = (
            (self.group, self.watch.state.rank_in[peer]) if group is None else (group, self.calling.index(peer))
        )
        with contextlib.suppress(RuntimeError):  # gloo closes all when any wait times out
            group.recv([torch.empty(1)], place, self.tag).wait(AT_ONCE)

    def abort(self) -> None:
        """End the communicators of a device: no kernel of a failed move waits for a peer that will not come."""
        for group in (self.group, *self.watch.state.groups.values()):
            if hasattr(group, "abort"):
                group.abort()

    def abandon(self) -> None:
        """Keep what is still under way: gloo breaks a connection on which a message for a buffer that is gone comes.

        Communicators of a device are aborted.
        """
        if self.is_streamed and self.under_way:
            self.abort()
        if self.under_way:
            self.watch.state.left_behind.append(tuple(self.under_way))


@dataclass(slots=True)
class PostWait:
    """How a wait for a post ends: by itself, once the run has failed."""

    wire: TorchWire
    tag: int = -1  # no message of the library ends it

    def answer(self, peer: int, sent: int, tag: int) -> None:
        """See `TorchWire.answer`."""
        self.wire.answer(peer, sent, tag)

    def cut(self, peer: int) -> None:
        """Nothing: it is over at its next look."""


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8) if x.dim() else x.view(1).view(torch.uint8)
