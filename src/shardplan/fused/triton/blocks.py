"""`BlockKernel`: blocks from every rank to every rank, by a kernel that makes them; of counts it knows only a tensor.

An epoch is two launches: the kernel, which puts and never waits, and `read_kernel`, which waits for every rank and
copies what came to where the caller wants it. So its programs need not all run at once, results are ordered on the
stream, and a CUDA graph can capture a call: the kernels keep the epoch, which chooses slots; the host counts nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from shardplan.errors import BackendError, TypingError, optional
from shardplan.fused.heap.symmetric import SymmetricTensor, size_class
from shardplan.fused.tiles.schedule import TileSchedule
from shardplan.fused.tiles.shapes import BlockCuts, starts
from shardplan.fused.tiles.symmetry import prove
from shardplan.fused.triton.memory import LINE, TileMemory, cache_on_heap, is_interpreted
from shardplan.fused.triton.read_kernel import ack_kernel, read_kernel
from shardplan.fused.triton.record import STATE, KernelRecord

if TYPE_CHECKING:
    import torch

FORMS = ("rows", "stack", "beside", "whole")
MOST = 1024  # cuts whose tensors an instance keeps


class BlockCall(NamedTuple):
    """A call of some cuts: their tensor, and where results go, [ranks here, numbers], by rank [rows, columns]."""

    cuts: torch.Tensor
    given: BlockCuts
    out: torch.Tensor
    results: list[tuple[int, int]]
    adds: bool
    aligned: bool


class BoundKernel(NamedTuple):
    """A kernel with its own arguments and constants."""

    kernel: Any
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


class BlockKernel:
    """An operator that moves blocks, with so many programs, on the heaps of its ranks; every `launch` is an epoch."""

    def __init__(self, memory: TileMemory, op: str, programs: int, out: SymmetricTensor | None = None) -> None:
        """Prove its schedule, and have memory for its counters; with `out` results lie there until the next epoch."""
        torch = optional("torch", "torch")
        self.memory, self.op, self.programs, self.out = memory, op, programs, out
        self.seconds, self.reader = 30.0, read_kernel
        self.interpreted = is_interpreted(read_kernel)
        acks = out is not None
        schedule = TileSchedule("remote_first", programs, programs, programs, "second_launch", 2 - acks, acks)
        prove(schedule, memory.ranks, memory.modes(self.interpreted))
        flags = memory.alloc(LINE * 2 * memory.ranks, f"{op} flags")
        slices = memory.alloc(LINE * memory.ranks, f"{op} slices")
        self.record = KernelRecord(memory, op, programs)
        self.room, self.captured = 0, False
        self.words = [0, 0, 1, flags, slices, self.record.state] if out is None else [
            out.offset, 0, 0, flags, slices, self.record.state,
        ]  # fmt: skip
        self.spots = [torch.tensor(self.words, dtype=torch.int64, device=memory.device)]  # old ones are for graphs
        self.kept: dict[BlockCuts, torch.Tensor] = {}
        self.tables: dict[tuple[tuple[int, int], ...], torch.Tensor] = {}  # by addresses and rows: those, [2, n]
        self.local: torch.Tensor | None = None
        self.constants = {"programs": programs, "ranks": memory.ranks, "span": 1 << (memory.ranks - 1).bit_length()}

    def call(
        self, cuts: BlockCuts, dtype: torch.dtype, varying: bool = False, ahead: int = 1, adds: bool = False
    ) -> BlockCall:
        """Return the call of cuts, whose columns are numbers; collective. With `adds` blocks are added up.

        With `varying`, for cuts that data decides, their tensor is not kept. Of `beside` a table is `ahead` columns.
        Raises `BackendError` where the heap is full, or a captured graph needs what only a call before it makes.
        """
        torch, memory = optional("torch", "torch"), self.memory
        results = [cuts.result(rank) for rank in range(memory.ranks)]
        need = max(rows * columns for rows, columns in results) * dtype.itemsize
        held = self.kept.get(cuts)
        if held is None or (self.out is None and need > self.room):
            if memory.is_capturing():
                raise BackendError(
                    f"{self.op}: captured before its first call; legal is one call of these splits before"
                )
            self._grow(need)
            held = self._cuts_tensor(cuts, ahead)
            if not varying and len(self.kept) < MOST:
                self.kept[cuts] = held
        if adds:
            results = [(rows // memory.ranks, columns) for rows, columns in results]
        here = results[memory.rank0 : memory.rank0 + memory.here]
        pitch = max(rows * columns for rows, columns in here)
        if self.out is None:
            new = torch.zeros if adds else torch.empty
            out = new((memory.here, pitch), dtype=dtype, device=memory.device)
        else:
            out = self.out.local.view(-1).view(dtype)[:pitch][None]
        edges = [columns for _, columns in results] + [*(cuts.counts[1] if cuts.form in ("stack", "beside") else ())]
        return BlockCall(held, cuts, out, results, adds, not any(n % 16 for n in (pitch, *edges)))

    def call_on_device(self, cuts: torch.Tensor, rows: int, columns: int, dtype: torch.dtype) -> BlockCall:
        """Return the call of blocks of rows whose cuts only the device knows, of results of so many rows; collective.

        Raises as `call`. What is behind the rows that come is 0.
        """
        torch, memory = optional("torch", "torch"), self.memory
        if (need := rows * columns * dtype.itemsize) > self.room and memory.is_capturing():
            raise BackendError(f"{self.op}: captured before its first call; legal is one call of this size before")
        self._grow(need)
        out = torch.zeros((memory.here, rows * columns), dtype=dtype, device=memory.device)
        given = BlockCuts("rows", ((0,) * memory.ranks,) * memory.ranks, columns)
        return BlockCall(cuts, given, out, [(rows, columns)] * memory.ranks, False, columns % 16 == 0)

    def _cuts_tensor(self, cuts: BlockCuts, ahead: int) -> torch.Tensor:
        """The counts, and behind them what the ranks here have before each; copied without a wait of the host."""
        torch, memory = optional("torch", "torch"), self.memory
        here = range(memory.rank0, memory.rank0 + memory.here)
        sizes = [cuts.counts[1][r] // ahead if cuts.form == "beside" else cuts.count_rows(r) for r in here]
        numbers = [*(n for row in cuts.counts for n in row), *starts(sizes)[:-1]]
        on_gpu = memory.device.type != "cpu"
        return torch.tensor(numbers, dtype=torch.int64, pin_memory=on_gpu).to(memory.device, non_blocking=True)

    def _grow(self, need: int) -> None:
        """Have memory for the largest result of any rank in both slots."""
        if self.out is not None:
            if need > self.out.nbytes:
                text = f"out {self.out.label} of {self.out.nbytes} bytes; legal are at least {need}"
                raise TypingError(f"{self.op}: {text}, for the largest result of any rank")
            return
        if need > self.room or not self.room:
            old = self.words[0] if self.room and not self.captured else None  # of which a graph writes to the last
            self.room = size_class(need)
            self.words[:2] = self.memory.grow(old, 2 * self.room, f"{self.op} result"), self.room
            torch = optional("torch", "torch")
            self.spots.append(torch.tensor(self.words, dtype=torch.int64, device=self.memory.device))

    def run(
        self, kernel: Any, call: BlockCall, *arguments: Any, reader: BoundKernel | None = None, **constants: Any
    ) -> list[torch.Tensor]:
        """Run an epoch, and return the results of the ranks here: `launch`, after a look at what failed before."""
        self.memory.check(self.op)
        self.launch(kernel, call, *arguments, reader=reader, **constants)
        return [self.result(call, rank) for rank in range(self.memory.rank0, self.memory.rank0 + self.memory.here)]

    def launch(
        self, kernel: Any, call: BlockCall, *arguments: Any, reader: BoundKernel | None = None, **constants: Any
    ) -> list[Any]:
        """Launch an epoch: the kernel, and what reads; return what Triton returned of both.

        A `reader` is another kernel than `read_kernel`, which ends the epoch as that one does.
        """
        memory, given, kept = self.memory, call.given, self.out is not None
        grid, polls = (self.programs * memory.here,), self.record.polls(self.seconds)
        first = memory.table, call.cuts, self.spots[-1], memory.rank0
        more = self.constants | {"form": FORMS.index(given.form)}
        self.captured |= memory.is_capturing()
        if kept:
            ack: Any = ack_kernel
            ack[(memory.here,)](memory.table, self.spots[-1], memory.rank0, ranks=memory.ranks)
        made = kernel[grid](*first, polls, *arguments, **more, sends=True, acked=kept, **constants)
        block = {"block_m": 16, "block_n": 128, "aligned": call.aligned, "copies": not kept, "adds": call.adds}
        reading = (call.out, call.out.shape[1], given.columns)
        last, reads, reading_block = reader or BoundKernel(self.reader, reading, block)
        return [made, last[grid](*first, polls, *reads, **more, **reading_block)]

    def launch_local(
        self, kernel: Any, call: BlockCall, table: torch.Tensor, *arguments: Any, **constants: Any
    ) -> None:
        """Launch the kernel alone, without a signal: what ranks here make lies as it is in memory of their own.

        `table` int64 [ranks] are addresses of zeros: `local_start` bytes for epochs, then the results.
        """
        memory = self.memory
        words = [self.local_start, 0, 0, 0, 0, 0]
        if self.local is None:
            self.local = optional("torch", "torch").tensor(words, dtype=self.spots[0].dtype, device=memory.device)
        first = table, call.cuts, self.local, memory.rank0, 1
        more = self.constants | {"form": FORMS.index(call.given.form)}
        kernel[(self.programs * memory.here,)](*first, *arguments, **more, sends=False, acked=False, **constants)

    @property
    def local_start(self) -> int:
        """Where results of `launch_local` begin."""
        return -(-(STATE + 64 * self.programs) // 256) * 256

    def result(self, call: BlockCall, rank: int) -> torch.Tensor:
        """Return the result of a rank here, [rows, columns]."""
        rows, columns = call.results[rank]
        return call.out[rank - self.memory.rank0, : rows * columns].view(rows, columns)

    def finish(self) -> None:
        """Return once the device has done all that was asked of it; raises what failed."""
        self.memory.settle()
        self.memory.check(self.op)


def block_kernel(
    memory: TileMemory, op: str, programs: int, kind: str, seconds: float, out: SymmetricTensor | None = None
) -> BlockKernel:
    """Return the instance of an operator on this memory, new where there is none."""
    key = (op, programs, kind, None if out is None else out.offset)
    found: BlockKernel = cache_on_heap(memory, key, lambda: BlockKernel(memory, op, programs, out))
    found.seconds = seconds
    return found
