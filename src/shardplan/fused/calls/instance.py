"""`FusedInstance`: the memory, counters and epoch of an operator on a heap, and the run of an epoch.

A call with new shapes makes a `TileCall`: the rank's events of the proved schedule, each with the view or word that it
touches. Shapes vary within what has been allocated; all ranks see the same shapes, so that they grow together. Who
remembers a call is `agreement`: what is new is so on all ranks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from shardplan.errors import BackendError, TypingError
from shardplan.fused.calls.agreement import KNOWN
from shardplan.fused.heap.header import Words, has_reached, wrap_int32
from shardplan.fused.heap.symmetric import SymmetricHeap, SymmetricTensor, size_class
from shardplan.fused.kernels.native import native, why_not
from shardplan.fused.tiles.events import TileBox, TileProtocol, TilePut, TileSignal, TileWait
from shardplan.fused.tiles.schedule import TileSchedule
from shardplan.fused.tiles.shapes import TileShape
from shardplan.fused.tiles.symmetry import prove

if TYPE_CHECKING:
    import torch

SPIN = 20_000_000  # nanoseconds that the C++ wait takes before peers are looked at


class PutStep(NamedTuple):
    """A tile to be stored in `view`; of blocks, tile `box` of the result of rank `to`."""

    to: int
    buffer: str
    box: TileBox
    view: torch.Tensor


class SignalStep(NamedTuple):
    """A count to be stored: in epoch e `first + step * e`."""

    to: int
    word: Words
    address: int
    first: int
    step: int


class WaitStep(NamedTuple):
    """A count to wait for, as `TileWait` says; `source` sends it, `tiles` for each count."""

    word: Words
    address: int
    want: int
    step: int
    source: int
    tiles: int


class ReadStep(NamedTuple):
    """A box of the own memory that is complete."""

    buffer: str
    box: TileBox
    view: torch.Tensor


TileStep = PutStep | SignalStep | WaitStep | ReadStep


@dataclass(frozen=True, slots=True)
class TileCall:
    """A call of some shapes: per slot the rank's steps, and the buffers' own views by name."""

    steps: tuple[tuple[TileStep, ...], ...]
    views: tuple[dict[str, torch.Tensor], ...]
    protocol: TileProtocol
    grown: int  # how often its instance had grown
    facts: dict[Any, Any]  # what kernels keep beside it
    owed: tuple[SignalStep, ...] = ()  # acks of a result that outlives the call: sent when the next one begins


class FusedInstance:
    """An operator with a schedule on a heap; its epoch counts the calls."""

    def __init__(
        self, heap: SymmetricHeap, op: str, schedule: TileSchedule, seconds: float, out: SymmetricTensor | None = None
    ) -> None:
        """Begin without memory, or with `out` for the result; `seconds` bounds every wait."""
        if why := why_not():
            raise BackendError(f"{op}: {why}")
        self.heap, self.op, self.schedule, self.seconds = heap, op, schedule, seconds
        self.epoch = self.grown = 0
        self.flags: list[Words] = []
        self.out = out
        self.data: dict[str, SymmetricTensor] = {} if out is None else {"result": out}
        self.owed: list[tuple[SignalStep, int]] = []

    def call(
        self,
        shape: TileShape,
        dtypes: dict[str, torch.dtype],
        trailing: Sequence[int] = (),
    ) -> TileCall:
        """Return a new call of a shape, allocated where it needs more than there is; collective.

        The schedule is proved, once for every shape; boxes of a shape lie apart and fill the result. `dtypes` are those
        of the schedule's buffers by name, each of whose elements is `trailing` numbers. Raises `TileScheduleError`, and
        `BackendError` where the heap is full.
        """
        prove(self.schedule, self.heap.ranks, ("ranks",))
        protocol = self.schedule.protocol(self.heap.ranks, shape)
        if not self.flags:
            self.flags = self.heap.flags(protocol.counters, f"{self.op} flags")
        self._grow(protocol, dtypes, math.prod(trailing))
        return self._compile_call(protocol, dtypes, tuple(trailing))

    def _grow(self, protocol: TileProtocol, dtypes: dict[str, torch.dtype], trailing: int) -> None:
        """Have memory for the largest result of any rank in every slot; no call from before is of use any more."""
        for name, buffer in protocol.buffers.items():
            need = max(math.prod(e) for e in buffer.extents) * trailing * dtypes[name].itemsize
            if self.out is not None:
                if need > self.out.nbytes:
                    raise TypingError(
                        f"{self.op}: out {self.out.label} of {self.out.nbytes} bytes; legal are at least {need}, "
                        "for the largest result of any rank"
                    )
                continue
            old = self.data.get(name)
            if old is None or old.shape[1] < need:
                if old is not None:
                    self._give_up(old)
                self.data[name] = self.heap.alloc((buffer.slots, size_class(need)), "u8", f"{self.op} {name}")

    def _give_up(self, old: SymmetricTensor) -> None:
        """All ranks are here, and so have ended the call before; agreements on the old memory are forgotten."""
        self.heap.release(old)
        self.grown += 1
        known: dict[Any, Any] = self.heap.kept.get(KNOWN, {})
        for words in [words for words, call in known.items() if getattr(call, "made", None) is self]:
            del known[words]

    def _view(
        self, protocol: TileProtocol, name: str, rank: int, slot: int, dtype: torch.dtype, more: Sequence[int]
    ) -> torch.Tensor:
        """A whole buffer of a rank in a slot."""
        shape = (*protocol.buffers[name].extents[rank], *more)
        memory = self.data[name].peer(rank)
        raw = memory.view(-1).view(dtype) if self.out is not None else memory[slot].view(dtype)
        return raw[: math.prod(shape)].view(shape)

    def _compile_call(self, protocol: TileProtocol, dtypes: dict[str, torch.dtype], more: tuple[int, ...]) -> TileCall:
        heap = self.heap
        slots = max(buffer.slots for buffer in protocol.buffers.values())
        senders = _senders(protocol, heap.rank)
        steps: list[tuple[TileStep, ...]] = []
        views: list[dict[str, torch.Tensor]] = []
        for slot in range(slots):
            whole = {
                (name, rank): self._view(protocol, name, rank, slot % buffer.slots, dtypes[name], more)
                for name, buffer in protocol.buffers.items()
                for rank in range(heap.ranks)
            }
            steps.append(tuple(self._steps(protocol, whole, senders)))
            views.append({name: whole[name, heap.rank] for name in protocol.buffers})
        if self.out is None:
            return TileCall(tuple(steps), tuple(views), protocol, self.grown, {})
        first = next((k for k, step in enumerate(steps[0]) if isinstance(step, ReadStep)), len(steps[0]))
        owed = tuple(step for step in steps[0][first:] if isinstance(step, SignalStep))
        rest = tuple(step for k, step in enumerate(steps[0]) if k < first or not isinstance(step, SignalStep))
        return TileCall((rest,), tuple(views), protocol, self.grown, {}, owed)

    def _steps(
        self, protocol: TileProtocol, whole: dict[tuple[str, int], torch.Tensor], senders: dict[int, tuple[int, int]]
    ) -> list[TileStep]:
        """The rank's events on memory; of a slice only the last arrival signals."""
        rank = self.heap.rank
        found: list[TileStep] = []
        totals, arrived = _count_signals(protocol, rank), defaultdict[int, int](int)
        sent = defaultdict[tuple[int, int], int](int)
        for event in protocol.of(rank):
            match event:
                case TilePut(to, buffer, box):
                    found.append(PutStep(to, buffer, box, whole[buffer, to][_index(box)]))
                case TileSignal(to, counter, part, of):
                    arrived[part] += part >= 0
                    if part < 0 or arrived[part] % of == 0:
                        sent[to, counter] += 1
                        word = self.flags[to][counter]
                        found.append(SignalStep(to, word, word.ctypes.data, sent[to, counter], totals[to, counter]))
                case TileWait(counter, want, step):
                    word = self.flags[rank][counter]
                    source, of = senders.get(counter, (rank, 1))
                    found.append(WaitStep(word, word.ctypes.data, want, step, source, of))
                case _:
                    found.append(ReadStep(event.buffer, event.box, whole[event.buffer, rank][_index(event.box)]))
        return found

    def run(
        self,
        call: TileCall,
        put: Callable[[PutStep], None],
        read: Callable[[ReadStep], None] | None = None,
        ahead: Callable[[Sequence[TileStep]], int] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Run an epoch, and return the own buffers, whose contents last until the next one.

        `put` stores a tile, `read` takes what is complete, `ahead` does first steps at once and says how many. Raises
        `FusedTimeout` with rank, source and tile, and `PeerLost`; then the instance is of no use until a `reset`.
        """
        if call.grown != self.grown:
            raise BackendError(f"{self.op}: a call made before its instance has grown; legal is one made after that")
        slot = self.epoch % len(call.steps)
        steps, tally = call.steps[slot], self.heap.tally
        try:
            self.heap.header.check(self.op)
            for step, epoch in self.owed:
                self._signal(step, epoch)
            self.owed = []
            if tally is not None:
                tally.poison(self.heap, call.views[slot])
            for step in steps[0 if ahead is None else ahead(steps) :]:
                match step:
                    case PutStep():
                        put(step)
                        self.heap.push(step.to, step.view)
                    case SignalStep():
                        self._signal(step, self.epoch)
                    case WaitStep():
                        self._wait(step)
                    case _:
                        if read is not None:
                            read(step)
            if tally is not None:
                tally.count(self.op, self.heap.rank, call.protocol, call.views[slot])
        except BaseException as error:
            self.heap.header.propagate_error(self.op, error)
            raise
        self.owed = [(step, self.epoch) for step in call.owed]
        self.epoch += 1
        return call.views[slot]

    def _signal(self, step: SignalStep, epoch: int) -> None:
        kernels, count = native(), wrap_int32(step.first + step.step * epoch)
        if kernels is None:
            step.word[0] = count
        else:
            kernels.signal(step.address, count)
        self.heap.push_word(step.to, step.word)

    def _wait(self, step: WaitStep) -> None:
        want = wrap_int32(step.want + step.step * self.epoch)
        kernels, header = native(), self.heap.header
        if kernels is not None:
            left = self.seconds * 1e9
            while left > SPIN:
                if kernels.wait(step.address, want, SPIN):
                    return
                left -= SPIN
                header.check(self.op)
                header.look(self.op)

        def late(seen: int) -> str:
            tile = (seen - step.step * self.epoch) * step.tiles
            epoch = f"(epoch {self.epoch + 1}: want {want}, seen {seen})"
            who = f"{self.op}: rank {self.heap.rank} waited {self.seconds:.1f} s"
            return f"{who} for tile {tile} of rank {step.source} {epoch}"

        if not has_reached(int(step.word[0]), want):
            header.wait(step.word, want, self.seconds if kernels is None else 0.0, late, self.op)


def _index(box: TileBox) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def _count_signals(protocol: TileProtocol, rank: int) -> dict[tuple[int, int], int]:
    """How often a rank signals each counter in an epoch."""
    found, arrived = defaultdict[tuple[int, int], int](int), defaultdict[int, int](int)
    for event in protocol.of(rank):
        if isinstance(event, TileSignal):
            arrived[event.slice] += event.slice >= 0
            found[event.to, event.counter] += event.slice < 0 or arrived[event.slice] % event.of == 0
    return found


def _senders(protocol: TileProtocol, rank: int) -> dict[int, tuple[int, int]]:
    """Who signals each counter of a rank, and for how many tiles at once.

    Raises `BackendError` where several do: a counter is a plain word here, of one writer.
    """
    found: dict[int, tuple[int, int]] = {}
    for source in range(protocol.ranks):
        for event in protocol.of(source):
            if isinstance(event, TileSignal) and event.to == rank:
                if found.setdefault(event.counter, (source, event.of))[0] != source:
                    raise BackendError(
                        f"{protocol.name}: counter {event.counter} has two writers; legal is one on CPUs"
                    )
    return found


def instance(
    heap: SymmetricHeap, op: str, schedule: TileSchedule, kind: str, seconds: float, out: SymmetricTensor | None = None
) -> FusedInstance:
    """Return the instance of an operator with a schedule on a heap, new where there is none, or after a reset.

    With `out` the result lies there, and lasts until the next call that writes it: there is one slot, and a reader
    acknowledges an epoch when its next one begins.
    """
    if out is not None:
        schedule = replace(schedule, slots=1, acks=True)
    key = f"{op} {schedule} {kind} {'' if out is None else out.offset}"
    found: FusedInstance | None = heap.kept.get(key)
    if found is None:
        found = heap.kept[key] = FusedInstance(heap, op, schedule, seconds, out)
    found.seconds = seconds
    return found
