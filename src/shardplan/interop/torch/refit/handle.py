"""`Refit`: the handle that a trainer and a server call at every step: prepared once, a call moves, and no more."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable
from itertools import zip_longest
from typing import Any, Self

import torch
import torch.distributed as dist

from shardplan.errors import BackendError, LayoutError, excerpt
from shardplan.execution.torch.faults import TorchWatch
from shardplan.execution.torch.group_state import GroupState
from shardplan.execution.torch.wire import TorchWire
from shardplan.interop.torch.refit.commit import RefitCommit, RefitStarted, ServedVersion, served_by
from shardplan.interop.torch.refit.exchange import HopDeltas, RefitExchange
from shardplan.interop.torch.refit.meeting import RefitMeeting, close_store, join_sides, store_of
from shardplan.interop.torch.refit.tensors import BoundTensors
from shardplan.movement.weights.refit import RefitPlan
from shardplan.movement.weights.weights import Weights

TIMEOUT = 300.0  # seconds that any wait may take
_COMMIT = "every rank says that it has all"


class Refit:
    """A refit of a live model, prepared: plan, agreement, process group, staging and views are made once.

    Every rank of both sides makes one, and then calls it equally often. A call plans nothing, agrees on nothing, asks
    the store nothing and makes no storage. What it brings is in place in the target's own tensors, and `version` is set
    on all ranks or on none. Where a call fails, `version` is None, `serve` refuses, a handle of a part of the model
    refuses to run, and the next call of a full one meets the others anew, also where some were started again.

    Sources must not change their parameters during a call, and targets not use theirs.
    """

    def __init__(
        self,
        plan: RefitPlan,
        model: Any = None,
        *,
        rank: int | None = None,
        store: Any = None,
        group: Any = None,
        finish: Callable[[Any], object] | None = None,
        source: Any = None,
        target: Any = None,
        timeout: float = TIMEOUT,
        name: str = "refit",
        changed_only: bool = False,
    ) -> None:
        """Bind the model, meet the other ranks, and make everything that calls need.

        Args:
            plan: what `shardplan.refit` returns, with one hash on all ranks.
            model: the live model of the side that this rank is on: a module, a list of modules (Megatron's chunks,
                whose names start with their number), or tensors by name; contiguous, of the weights' dtypes.
            rank: the device id of this process in the plan; that of `group` where none is given.
            store: where all ranks meet: `tcp://HOST:PORT` or `tcp://SECRET@HOST:PORT` (HOST is the lowest rank's, which
                serves it), `file:///PATH`, or a store.
            group: in place of a store, a process group of torch.distributed whose global ranks are the plan's ids.
            finish: called with the target's model once its parameters are there, before they have a version: an
                engine's own processing after loading.
            source: in place of `model` on a rank that has both sides: the trainer's.
            target: likewise, the server's, a model of its own.
            timeout: seconds that any wait may take.
            name: tells refits apart that meet in one store, in unlike orders on their ranks.
            changed_only: send only the messages whose bytes differ from those of the last call, by a hash of each; all,
                where a receiver has not what that call brought. Equal on all ranks; `finish` must change nothing.

        Raises:
            LayoutError: parameters that are missing, additional or misshapen, all at once; a rank with another plan,
                named.
            Infeasible: a memory limit without room for the staging.
            TimedOut: ranks that did not come, named.
            BackendError: no store, or one that fails.
        """
        if not isinstance(plan, RefitPlan):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise LayoutError(f"Refit of {excerpt(plan)}; legal is what shardplan.refit returns")
        self.plan, self.finish, self.timeout, self.name = plan, finish, float(timeout), name
        place, self.rank = _meeting_place(store, group, rank, plan.ranks)
        if self.rank not in plan.ranks:
            raise LayoutError(f"rank {excerpt(self.rank)} is on neither side of the plan; legal are {plan.ranks}")
        sides = _sides(plan, self.rank, model, source, target)
        self.source = None if sides[0] is None else BoundTensors(plan.source, sides[0], self.rank, "source")
        self.target = None if sides[1] is None else BoundTensors(plan.target, sides[1], self.rank, "target")
        self._exchange = RefitExchange(plan, self.rank, self.source, self.target, torch.device("cpu"))
        held = [] if self.target is None else self.target.held
        self._served = served_by(held[0].tensor) if held else ServedVersion()
        self._deltas = [HopDeltas(hop) for hop in self._exchange.hops] if changed_only else []
        self._left = -1  # how often the target had changed when the last call ended
        self.sent_bytes = 0  # of this rank at the last call
        self._commit = RefitCommit(plan.ranks, self.rank)
        self._own_store = isinstance(place, str)
        place = store_of(place, plan.ranks, self.rank, self.timeout)
        self._meeting = RefitMeeting(place, plan.ranks, self.rank, name, self.timeout)
        self._texts = (
            *(f"round {k} of {len(self._exchange.rounds)}" for k in range(len(self._exchange.rounds))),
            _COMMIT,
        )
        self._state: GroupState | None = None
        self._following = 1
        self._busy = threading.Lock()
        self._closed = False
        self.said = f"refit {plan.source.table.name or 'source'} to {plan.target.table.name or 'target'}"
        try:
            self._meet()
        except BaseException:
            self._close_store()
            raise

    @staticmethod
    def join(
        weights: Weights,
        model: Any,
        *,
        side: str,
        rank: int,
        store: Any,
        memory_limit: float | str | None = None,
        topology: Any = None,
        only: Any = None,
        finish: Callable[[Any], object] | None = None,
        timeout: float = TIMEOUT,
        name: str = "refit",
        changed_only: bool = False,
        drop: str | Iterable[str] = (),
        differ: str | Iterable[str] = (),
    ) -> Refit:
        """Prepare a refit from one's own side alone: the sides' texts and hashes are exchanged, and each rank plans.

        Args:
            weights: how this side stores the model, with devices that are its ranks.
            model: the live model, as of `Refit`.
            side: "source" or "target".
            rank: the device id of this process.
            store: where both sides meet, as of `Refit`; the lowest rank of either side serves `tcp://`, if HOST is its
                own: the first that comes.
            memory_limit: as of `shardplan.refit`, equal on all ranks.
            topology: likewise.
            only: likewise.
            finish: as of `Refit`.
            timeout: seconds that any wait may take.
            name: as of `Refit`.
            changed_only: likewise.
            drop: what the source stores and the target does not take, as of `shardplan.refit`, equal on all ranks.
            differ: fields in which the sides' configs may differ, likewise.

        Raises:
            LayoutError: two sides that disagree (a config, a shape, a tensor that only one has), in one line, or ranks
                of one side that do.
            TimedOut: a side that did not come.
        """
        place = store_of(store, (*weights.devices, rank), rank, timeout)
        try:
            plan = join_sides(weights, side, rank, place, (memory_limit, topology, only), timeout, name, drop, differ)
            found = Refit(
                plan,
                model,
                rank=rank,
                store=place,
                finish=finish,
                timeout=timeout,
                name=name,
                changed_only=changed_only,
            )
        except BaseException:
            if isinstance(store, str):
                close_store(place)
            raise
        found._own_store = isinstance(store, str)
        return found

    # What a loop calls

    def __call__(self, version: int | None = None) -> int:
        """Move; collective over both sides. Returns the version of all ranks: that given on some, else one more.

        Raises:
            TimedOut, BackendError: a rank that did not arrive, or was lost, named; parameters may be torn.
            LayoutError: ranks that gave different versions, or a module whose parameters no longer fit.
        """
        self._take()
        return self._run(version)

    def start(self, version: int | None = None) -> RefitStarted:
        """Move on a thread; `wait` on what is returned. Raises `BackendError` where one is under way."""
        self._take()
        return RefitStarted(lambda: self._run(version))

    @property
    def version(self) -> int | None:
        """The version that the target's parameters hold (on a source: that were sent); None where there is none."""
        return self._served.version

    def serve(self) -> int:
        """Return the version; raises `BackendError`, with the reason, where the weights must not be served."""
        return self._served.served_version()

    @property
    def staging_bytes(self) -> int:
        """The bytes that the handle holds beside the parameters."""
        return self._exchange.nbytes

    def close(self) -> None:
        """End the process group, leave a store given as text, give the staging back; calls are errors afterwards."""
        self._closed = True
        self._leave()
        self._close_store()
        self._deltas = []
        del self._exchange.staging, self._exchange.hops

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # One call

    def _take(self) -> None:
        if self._closed:
            raise BackendError(f"{self.said}: the handle is closed; legal is a new one")
        if not self._busy.acquire(blocking=False):
            raise BackendError(f"{self.said}: a call is under way; legal is to wait for it first")

    def _run(self, version: int | None) -> int:
        try:
            if self._served.torn and self.plan.only is not None:
                self._served.served_version()
            if self._state is None:
                self._meet()
            assert self._state is not None
            everything = self._served.changes != self._left
            self._served.begin()
            watch = TorchWatch(
                self.plan.ranks, self.rank, self.said, self._digest, self._texts, self.timeout, self._state
            )
            wire = TorchWire(self._state.group, watch, torch.device("cpu"))
            try:
                watch.begin("")
                with torch.inference_mode() if self._exchange.inference else torch.no_grad():
                    self._move(watch, wire, everything)
                found = self._commit.run(wire, version, self._following)
            except BaseException as error:
                watch.broke(error, wire)
                wire.abandon()
                raise
            self._following, self._left, self.sent_bytes = found + 1, self._served.changes, wire.sent
            for deltas in self._deltas:
                deltas.keep()
            self._served.succeed(found)
            return found
        except BaseException as error:
            self._served.fail(error)
            self._leave()
            raise
        finally:
            self._busy.release()

    def _move(self, watch: TorchWatch, wire: TorchWire, everything: bool) -> None:
        moved = [side.rebind_moved() for side in (self.source, self.target) if side is not None]  # each of them looks
        if any(moved):
            self._exchange.bind()
        local, step = self._exchange.local, 0
        for hop, deltas in zip_longest(self._exchange.hops, self._deltas):
            if deltas is not None:
                watch.begin_step(step)
                deltas.settle(wire, everything or any(moved))
            for k, (sends, receives) in enumerate(hop.rounds):
                watch.begin_step(step)
                if deltas is not None:
                    sends, receives = deltas.travelling_messages(k, sends, receives)
                ins, _ = wire.post([(m.peer, m.data) for m in receives], [])
                outs = []
                for message in sends:
                    message.copies.run()
                    outs += wire.post([], [(message.peer, message.data)])[1]
                if not step:
                    local.run()  # while the first messages travel
                for message, pending in zip(receives, ins, strict=True):
                    wire.wait([pending])
                    message.copies.run()
                wire.wait(outs)
                step += 1
        if not step:
            local.run()
        watch.begin_step(step)
        if self.target is not None and self.finish is not None:
            self.finish(self.target.model)

    # Meeting the others

    @property
    def _digest(self) -> str:
        text = f"{self.plan.hash} {self.plan.memory_limit} {bool(self._deltas)}"
        return hashlib.sha256(text.encode()).hexdigest()

    def _meet(self) -> None:
        said = {
            "source": f"{self.plan.source.table.name} {self.plan.source.hash}",
            "target": f"{self.plan.target.table.name} {self.plan.target.hash}",
            "only": excerpt(self.plan.only),
            "relays": str(bool(self.plan.relays)),
            "changed_only": str(bool(self._deltas)),
            "memory limit": str(self.plan.memory_limit),
        }
        self._meeting.agree(said, self.said)
        self._state = self._meeting.state()
        self._state.agreed.add(self._digest)

    def _leave(self) -> None:
        """End the group: whoever still waits for this rank learns of it."""
        state, self._state = self._state, None
        if state is not None:
            state.end()
            state.group = None
        self._meeting.leave()

    def _close_store(self) -> None:
        if self._own_store:
            close_store(self._meeting.place)


def _meeting_place(store: Any, group: Any, rank: int | None, ranks: tuple[int, ...]) -> tuple[Any, int]:
    """Return the store, or its text, and this rank."""
    if store is not None and group is not None:
        raise LayoutError("Refit with store= and group=; legal is one of them")
    if store is not None:
        if rank is None:
            raise LayoutError("Refit with store= and no rank; legal is rank= the device id of this process in the plan")
        return store, rank
    if not dist.is_available() or not dist.is_initialized():
        raise BackendError("Refit: neither store= nor a process group; legal is store=, or init_process_group first")
    c10d: Any = dist.distributed_c10d
    group = group or c10d._get_default_group()
    known = dist.get_process_group_ranks(group)
    if strange := [r for r in ranks if r not in known]:
        raise LayoutError(
            f"the plan has device {strange[0]}, and the group the ranks {excerpt(known)}; legal are ids in it"
        )
    own = c10d.PrefixStore(f"shardplan {group.group_name}", c10d._get_default_store())
    return own, dist.get_rank() if rank is None else rank


def _sides(plan: RefitPlan, rank: int, model: Any, source: Any, target: Any) -> tuple[Any, Any]:
    """Return the models of both sides on this rank, None where it is not on one."""
    on = rank in plan.source.devices, rank in plan.target.devices
    if model is not None:
        if source is not None or target is not None or all(on):
            raise LayoutError(
                f"rank {rank} is on {'both sides' if all(on) else 'one side'}; legal is "
                + ("source= and target=" if all(on) else "model= alone")
            )
        return (model, None) if on[0] else (None, model)
    for is_on, given, side in ((on[0], source, "source"), (on[1], target, "target")):
        if is_on != (given is not None):
            raise LayoutError(
                f"rank {rank} is {'' if is_on else 'not '}on the {side}'s side, and {side}= is "
                f"{'missing' if is_on else 'given'}; legal is a model for each side that the rank is on"
            )
    return source, target
