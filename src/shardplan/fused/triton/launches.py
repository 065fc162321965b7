"""`FusedKernel`: a schedule's memory, counters and epoch for a Triton kernel, and the launches of an epoch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from shardplan.errors import optional
from shardplan.fused.heap.failures import FusedTimeout
from shardplan.fused.tiles.events import TilePut, TileRead
from shardplan.fused.tiles.running import TileMode
from shardplan.fused.tiles.schedule import TileSchedule
from shardplan.fused.tiles.shapes import TileShape
from shardplan.fused.tiles.symmetry import prove
from shardplan.fused.triton.memory import TileMemory, is_interpreted
from shardplan.fused.triton.rows import LINE, Detail, TileMissed, TileRows, TileSpot, compile_launches

if TYPE_CHECKING:
    import torch

RECORD = 64  # bytes of what failed, before the epochs
POLLS = {True: 1_500, False: 1_000_000}  # a second, in the interpreter and on a GPU, about


class KernelCall(NamedTuple):
    """A call of some shapes: its launches, what its waits are, and where its buffers lie."""

    launches: list[TileRows]
    missed: list[TileMissed]
    spots: dict[str, TileSpot]
    slots: dict[str, int]


class FusedKernel:
    """An operator of Triton with a schedule, on the heaps of its ranks; every `run` is an epoch."""

    def __init__(self, memory: TileMemory, op: str, schedule: TileSchedule, seconds: float = 30.0) -> None:
        """Begin without memory; `seconds` bounds every wait."""
        self.memory, self.op, self.schedule, self.seconds = memory, op, schedule, seconds
        self.epoch = 0
        self.failed = ""
        self.flags = self.slices = self.state = -1
        self.spots: dict[str, TileSpot] = {}
        self.sizes: dict[str, int] = {}
        self.calls: dict[Any, KernelCall] = {}  # what operators keep, by their key

    def modes(self, interpreter: bool) -> tuple[TileMode, ...]:
        """Return how programs may run: one after another in the interpreter, all at once on a GPU."""
        if self.memory.here > 1:
            return ("virtual",) if interpreter else ("resident",)
        return ("ranks",) if interpreter else ("ranks", "resident")

    def call(
        self,
        kernel: Any,
        shape: TileShape,
        nbytes: Mapping[str, int],
        detail: Detail | None = None,
        varying: bool = False,
    ) -> KernelCall:
        """Return the call of a shape, proved in the modes in which the kernel may run; collective.

        `nbytes` are those of each buffer of the schedule, of the largest rank. `detail(rank, program, event)` gives the
        kernel up to 11 integers for a PUT or READ, or None to leave it out; by default they are the box's first row,
        end row, first column, end column, and the row length. With `varying`, for shapes that data decides, only the
        first one is proved: waits and signals are those of every other one. Raises `TileScheduleError`, and
        `BackendError` where the heap is full.
        """
        memory, schedule = self.memory, self.schedule
        prove(schedule, memory.ranks, self.modes(is_interpreted(kernel)))
        protocol = schedule.protocol(memory.ranks, shape)
        if self.flags < 0:
            programs = max(1, protocol.programs)
            self.flags = memory.alloc(LINE * protocol.counters, f"{self.op} flags")
            self.slices = memory.alloc(LINE * max(1, protocol.slices), f"{self.op} slices")
            self.state = memory.alloc(RECORD + 64 * programs, f"{self.op} state")
        for name, buffer in protocol.buffers.items():
            need = -(-max(1, nbytes[name]) // 256) * 256
            if self.sizes.get(name, 0) < need:
                self.spots[name] = TileSpot(memory.alloc(need * buffer.slots, f"{self.op} {name}"), need)
                self.sizes[name] = need

        def boxes(rank: int, program: int, event: TilePut | TileRead) -> Sequence[int]:
            extents = protocol.buffers[event.buffer].extents[event.to if isinstance(event, TilePut) else rank]
            (first, last), (left, right) = (*event.box, (0, 1))[:2]
            return first, last, left, right, (*extents, 1)[1]

        ranks = range(memory.rank0, memory.rank0 + memory.here)
        where = self.flags, self.slices, self.state + RECORD
        launches, missed = compile_launches(protocol, ranks, self.spots, *where, detail or boxes, memory.device)
        slots = {name: buffer.slots for name, buffer in protocol.buffers.items()}
        return KernelCall(launches, missed, dict(self.spots), slots)

    def cached_call(self, key: Any, make: Callable[[], KernelCall], varying: bool = False) -> KernelCall:
        """Return the call under a key, made where there is none; with `varying` it is not kept."""
        found = self.calls.get(key) or make()
        if not varying:
            self.calls[key] = found
        return found

    def run(self, kernel: Any, call: KernelCall, *arguments: Any, **constants: Any) -> None:
        """Run an epoch: the kernel on every launch, with `table, rows, begin, state, rank0, polls` before its own.

        `programs` is given by name. Raises `FusedTimeout` with the rank, the source and the tile that a wait missed,
        and `PeerLost`; then it is of no use any more.
        """
        self.launch(kernel, call, *arguments, **constants)
        self.finish(call)

    def launch(self, kernel: Any, call: KernelCall, *arguments: Any, **constants: Any) -> list[Any]:
        """Do the same without looking whether it failed, which `finish` does; return what Triton returned of launches.

        A graph can capture it: the epoch is a word of the heap.
        """
        memory = self.memory
        if self.failed:
            raise FusedTimeout(
                f"{self.op}: failed before: {self.failed}; legal is a new one, after a reset of the heap"
            )
        if memory.heap is not None:
            memory.heap.header.check(self.op)
        polls = min(2**31 - 1, int(self.seconds * POLLS[is_interpreted(kernel)]))
        self.started = time.monotonic()
        found: list[Any] = []
        for rows, begin, programs in call.launches:
            first = (memory.table, rows, begin, self.state, memory.rank0, polls)
            found.append(kernel[(programs * memory.here,)](*first, *arguments, programs=programs, **constants))
        return found

    def finish(self, call: KernelCall) -> None:
        """End the epoch: raise what failed in it."""
        torch = optional("torch", "torch")
        memory = self.memory
        for rank in range(memory.rank0, memory.rank0 + memory.here):
            bad, number, seen = memory.view(rank, self.state, (3,), torch.int32).tolist()
            if bad:
                self._fail(call.missed[number], seen)
        self.epoch += 1

    def _fail(self, missed: TileMissed, seen: int) -> None:
        want = missed.want + missed.step * self.epoch
        tile = (seen - missed.step * self.epoch) * missed.tiles
        text = (
            f"{self.op}: rank {missed.rank} waited {time.monotonic() - self.started:.1f} s for tile {tile} of rank "
            f"{missed.source} (epoch {self.epoch + 1}: want {want}, seen {seen})"
        )
        self.failed = text
        if self.memory.heap is not None:
            self.memory.heap.header.check(self.op)  # another rank failed: this wait ended for that
            self.memory.heap.header.fail(text)
        raise FusedTimeout(text)

    def result(
        self, call: KernelCall, buffer: str, rank: int, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return a buffer of a rank as the last epoch left it; two epochs later it is written again."""
        spot = call.spots[buffer]
        slot = (self.epoch - 1) % call.slots[buffer]
        return self.memory.view(rank, spot.offset + slot * spot.between, shape, dtype)


Kept = dict[Any, Any]


def cache_on_heap(memory: TileMemory, key: Any, make: Callable[[], Any]) -> Any:
    """Return what a heap keeps under a key, made where there is none; virtual memory keeps its own."""
    found: Kept = memory.heap.kept if memory.heap is not None else memory.kept
    if key not in found:
        found[key] = make()
    return found[key]
