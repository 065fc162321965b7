"""`FusedKernel`: a schedule's memory, counters and epoch for a Triton kernel, and the launches of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from shardplan.errors import BackendError
from shardplan.fused.heap.symmetric import size_class
from shardplan.fused.tiles.events import TilePut, TileRead
from shardplan.fused.tiles.schedule import TileSchedule
from shardplan.fused.tiles.shapes import TileShape
from shardplan.fused.tiles.symmetry import prove
from shardplan.fused.triton.memory import LINE, TileMemory, is_interpreted
from shardplan.fused.triton.record import STATE, KernelRecord
from shardplan.fused.triton.rows import Detail, TileMissed, TileRows, TileSpot, compile_launches

if TYPE_CHECKING:
    import torch


class KernelCall(NamedTuple):
    """A call of some shapes: its launches, what its waits are, and where its buffers lie."""

    launches: list[TileRows]
    missed: list[TileMissed]
    spots: dict[str, TileSpot]
    slots: dict[str, int]
    grown: int  # how often its instance had grown


class FusedKernel:
    """An operator of Triton with a schedule, on the heaps of its ranks; every `run` is an epoch."""

    def __init__(self, memory: TileMemory, op: str, schedule: TileSchedule, seconds: float = 30.0) -> None:
        """Begin without memory; `seconds` bounds every wait."""
        self.memory, self.op, self.schedule, self.seconds = memory, op, schedule, seconds
        self.epoch = 0
        self.flags = self.slices = -1
        self.grown = 0
        self.spots: dict[str, TileSpot] = {}
        self.sizes: dict[str, int] = {}
        self.calls: dict[Any, KernelCall] = {}  # what operators keep, by their key

    def call(
        self,
        kernel: Any,
        shape: TileShape,
        nbytes: Mapping[str, int],
        detail: Detail | None = None,
    ) -> KernelCall:
        """Return the call of a shape, its schedule proved in the modes in which the kernel may run; collective.

        `nbytes` are those of each buffer of the schedule, of the largest rank. `detail(rank, program, event)` gives the
        kernel up to 11 integers for a PUT or READ, or None to leave it out; by default they are the box's first row,
        end row, first column, end column, and the row length. Raises `TileScheduleError`, and `BackendError` where the
        heap is full.
        """
        memory, schedule = self.memory, self.schedule
        prove(schedule, memory.ranks, memory.modes(is_interpreted(kernel)))
        protocol = schedule.protocol(memory.ranks, shape)
        if self.flags < 0:
            programs = max(1, protocol.programs)
            self.flags = memory.alloc(LINE * protocol.counters, f"{self.op} flags")
            self.slices = memory.alloc(LINE * max(1, protocol.slices), f"{self.op} slices")
            self.record = KernelRecord(memory, self.op, programs)
        for name, buffer in protocol.buffers.items():
            if self.sizes.get(name, 0) < nbytes[name] or name not in self.sizes:
                old, self.sizes[name] = self.spots.get(name), size_class(nbytes[name])
                self.grown += old is not None
                room = memory.grow(old and old.offset, self.sizes[name] * buffer.slots, f"{self.op} {name}")
                self.spots[name] = TileSpot(room, self.sizes[name])

        def boxes(rank: int, program: int, event: TilePut | TileRead) -> Sequence[int]:
            extents = protocol.buffers[event.buffer].extents[event.to if isinstance(event, TilePut) else rank]
            (first, last), (left, right) = (*event.box, (0, 1))[:2]
            return first, last, left, right, (*extents, 1)[1]

        ranks = range(memory.rank0, memory.rank0 + memory.here)
        where = self.flags, self.slices, self.record.state + STATE
        launches, missed = compile_launches(protocol, ranks, self.spots, *where, detail or boxes, memory.device)
        slots = {name: buffer.slots for name, buffer in protocol.buffers.items()}
        return KernelCall(launches, missed, dict(self.spots), slots, self.grown)

    def cached_call(self, key: Any, make: Callable[[], KernelCall]) -> KernelCall:
        """Return the call under a key, made where there is none, or its instance has grown."""
        found = self.calls.get(key)
        if found is None or found.grown != self.grown:
            found = self.calls[key] = make()
        return found

    def run(self, kernel: Any, call: KernelCall, *arguments: Any, **constants: Any) -> None:
        """Run an epoch: `launch`, after a look at what failed before.

        Raises `FusedTimeout` with the rank, the source and the tile that a wait missed, and `PeerLost`; then it is of
        no use any more.
        """
        self.memory.check(self.op)
        self.launch(kernel, call, *arguments, **constants)
        self.epoch += 1

    def launch(self, kernel: Any, call: KernelCall, *arguments: Any, **constants: Any) -> list[Any]:
        """Launch an epoch: the kernel on every launch, with `table, rows, begin, state, rank0, polls` before its own.

        `programs` is given by name. The host does not wait; a graph can capture it: the epoch is a word of the heap.
        Returns what Triton returned of launches.
        """
        memory = self.memory
        if call.grown != self.grown:
            raise BackendError(f"{self.op}: a call made before its instance has grown; legal is one made after that")
        self.record.missed = call.missed
        polls = self.record.polls(self.seconds)
        found: list[Any] = []
        for rows, begin, programs in call.launches:
            first = (memory.table, rows, begin, self.record.state, memory.rank0, polls)
            found.append(kernel[(programs * memory.here,)](*first, *arguments, programs=programs, **constants))
        return found

    def finish(self) -> None:
        """Return once the device has done all that was asked of it; raises what failed."""
        self.memory.settle()
        self.memory.check(self.op)

    def result(
        self, call: KernelCall, buffer: str, rank: int, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return a buffer of a rank as the last epoch left it; two epochs later it is written again."""
        spot = call.spots[buffer]
        slot = (self.epoch - 1) % call.slots[buffer]
        return self.memory.view(rank, spot.offset + slot * spot.between, shape, dtype)
