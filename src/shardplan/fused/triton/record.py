"""`KernelRecord`: an instance's state on the heap, and what failed in a kernel, which the host sees without waiting."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardplan.errors import TypingError, optional
from shardplan.fused.heap.failures import FusedTimeout
from shardplan.fused.triton.embedding_kernel import INDEX
from shardplan.fused.triton.memory import TileMemory, is_interpreted
from shardplan.fused.triton.read_kernel import read_kernel

if TYPE_CHECKING:
    from shardplan.fused.triton.rows import TileMissed

STATE = 64  # bytes of an instance's state before its epochs, 64 each
POLLS = {True: 1_500, False: 1_000_000}  # a second, in the interpreter and on a GPU, about


class KernelRecord:
    """The `state` of an instance in every heap: the address of its record here, who failed first, programs' epochs.

    A rank's record is two int64 of the host's memory: 0, or a number above what was seen, and the epoch. Kernels store
    there; of memory of GPUs it is pinned, and so has the same address there.
    """

    def __init__(self, memory: TileMemory, op: str, programs: int) -> None:
        """Have the state; collective."""
        torch = optional("torch", "torch")
        self.memory, self.op, self.seconds, self.failed = memory, op, 0.0, ""
        self.missed: list[TileMissed] = []  # what waits of a schedule's rows are; else waits are of blocks
        self.lengths: list[int] = []  # rows of the tables of the ranks here, or of what else is `indexed`
        self.indexed = "a table"
        self.state = memory.alloc(STATE + 64 * programs, f"{op} state")
        self.words: Any = torch.zeros((memory.here, 2), dtype=torch.int64, pin_memory=memory.on_gpu)
        self.seen = self.words.numpy()
        for k in range(memory.here):
            memory.view(memory.rank0 + k, self.state, (1,), torch.int64).fill_(self.words[k].data_ptr())
        memory.records.append(self)

    def polls(self, seconds: float) -> int:
        """Return how often a wait looks in so many seconds, about."""
        self.seconds = seconds
        return min(2**31 - 1, int(seconds * POLLS[is_interpreted(read_kernel)]))

    def check(self) -> None:
        """Raise what failed: `FusedTimeout` with the rank, the source and the tile, or `TypingError` of an index."""
        for k, word in enumerate(self.seen[:, 0]):
            if word:
                self._fail(self.memory.rank0 + k, int(word), int(self.seen[k, 1]))

    def _fail(self, rank: int, word: int, epoch: int) -> None:
        number, seen = (word >> 32) - 1, (word & 0xFFFFFFFF) - ((word & 0x80000000) << 1)
        header = None if self.memory.heap is None else self.memory.heap.header
        if number >= INDEX.value:
            legal = f"0 to {self.lengths[number - INDEX.value] - 1}"
            error: Exception = TypingError(f"{self.op}: index {seen} of {self.indexed}; legal are {legal}")
            if header is not None:
                header.propagate_error(self.op, error)
            raise error
        want, step, source, tiles = epoch + 1, 1, number, 1
        if self.missed:
            rank, source, first, step, tiles = self.missed[number]
            want = first + step * epoch
        tile = (seen - step * epoch) * tiles
        text = f"{self.op}: rank {rank} waited {self.seconds:.1f} s for tile {tile} of rank {source}"
        text += f" (epoch {epoch + 1}: want {want}, seen {seen})"
        if header is not None and not header.failed:
            header.check(self.op)  # another rank failed: this wait ended for that
            header.failed = text
            header.fail(text)
        elif self.failed or header is not None:
            raise FusedTimeout(f"{self.op}: failed before: {text}; legal is a reset of the heap on all ranks")
        self.failed = text
        raise FusedTimeout(text)
