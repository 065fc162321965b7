"""The memory that a kernel puts into: every rank's heap as this process sees it, and the ranks that run here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from shardplan.errors import BackendError, optional
from shardplan.fused.heap.symmetric import CHECKED, SymmetricHeap
from shardplan.fused.tiles.running import TileMode

if TYPE_CHECKING:
    import torch

ALIGN = 256
LINE = 128  # bytes of a counter


class TileMemory:
    """Heaps of `ranks` ranks, uint8 tensors of one size; ranks `rank0` to `rank0 + here - 1` run in this process.

    The int32 at offset 0 of each says that a rank failed. A process has one rank; `virtual` ranks are all here.
    """

    def __init__(
        self,
        parts: Sequence[torch.Tensor],
        rank0: int,
        here: int,
        alloc: Callable[[int, str], int],
        free: Callable[[int], None] | None = None,
    ) -> None:
        """Take the heaps, what reserves bytes in all of them and returns their offset, by 256, and what frees them."""
        torch = optional("torch", "torch")
        self.parts, self.rank0, self.here, self.alloc, self.free = list(parts), rank0, here, alloc, free
        self.ranks, self.device = len(self.parts), self.parts[rank0].device
        addresses = [part.data_ptr() for part in self.parts]
        if any(address % ALIGN for address in addresses):
            raise BackendError(f"tile memory: heaps at {addresses}; legal are multiples of {ALIGN}")
        self.table: torch.Tensor = torch.tensor(addresses, dtype=torch.int64, device=self.device)
        self.heap: SymmetricHeap | None = None
        self.kept: dict[Any, Any] = {}  # what operators keep beside memory that is no heap
        self.on_gpu = self.device.type != "cpu"

    @property
    def records(self) -> list[Any]:
        """What kernels say of failures: a `KernelRecord` for every instance."""
        return cache_on_heap(self, CHECKED, list)

    def check(self, op: str) -> None:
        """Raise what failed in a kernel before, here or on another rank, as far as it is known: without a wait."""
        for record in self.records:
            record.check()
        if self.heap is not None:
            self.heap.header.check(op)

    def is_capturing(self) -> bool:
        """Return whether a CUDA graph captures what is launched."""
        return self.on_gpu and optional("torch", "torch").cuda.is_current_stream_capturing()

    def settle(self) -> None:
        """Return once the device has done what was asked of it."""
        if self.on_gpu:
            optional("torch", "torch").cuda.synchronize(self.device)

    def modes(self, interpreter: bool) -> tuple[TileMode, ...]:
        """Return how programs may run: one after another in the interpreter, all at once on a GPU."""
        if self.here > 1:
            return ("virtual",) if interpreter else ("resident",)
        return ("ranks",) if interpreter else ("ranks", "resident")

    @classmethod
    def of(cls, heap: SymmetricHeap) -> TileMemory:
        """Return the memory of a symmetric heap, this process being one rank of it.

        Raises `BackendError` for a heap between nodes, whose other ranks a kernel cannot write.
        """
        torch = optional("torch", "torch")
        if heap.net is not None:
            raise BackendError(f"symmetric heap {heap.name}: Triton kernels store into peers; legal is the backend shm")

        def alloc(nbytes: int, label: str) -> int:
            return heap.alloc((nbytes,), "u8", label).offset

        def free(offset: int) -> None:
            heap.release(heap.tensors[offset])

        found = cls(heap.parts or [torch.from_numpy(part) for part in heap.memory], heap.rank, 1, alloc, free)
        found.heap = heap
        return found

    @classmethod
    def virtual(cls, ranks: int, nbytes: int, device: str = "cpu") -> TileMemory:
        """Return memory of `nbytes` for each of some ranks that all run in this process, in one launch."""
        torch = optional("torch", "torch")
        parts: list[torch.Tensor] = []
        for _ in range(ranks):
            raw = torch.zeros(nbytes + 2 * ALIGN, dtype=torch.uint8, device=device)
            skip = -raw.data_ptr() % ALIGN
            parts.append(raw[skip : skip + nbytes + ALIGN])
        return cls(parts, 0, ranks, bump_allocator(nbytes + ALIGN))

    def grow(self, offset: int | None, nbytes: int, label: str) -> int:
        """Return the offset of so many bytes, for which those at an offset are given up; collective."""
        if offset is not None and self.free is not None:
            self.free(offset)
        return self.alloc(nbytes, label)

    def view(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor on a rank's heap."""
        torch = optional("torch", "torch")
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if not nbytes:
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)
        return self.parts[rank][offset : offset + nbytes].view(dtype).view(tuple(shape))


def bump_allocator(nbytes: int) -> Callable[[int, str], int]:
    """Return what reserves bytes one after another, from `ALIGN` on, in heaps of so many.

    >>> alloc = bump_allocator(1024)
    >>> alloc(10, "a"), alloc(500, "b")
    (256, 512)
    """
    used = [ALIGN]

    def alloc(size: int, label: str) -> int:
        at = used[0]
        if at + size > nbytes:
            raise BackendError(f"alloc {label}: {size} bytes of tile memory, of which {nbytes - at} are left")
        used[0] = at + -(-size // ALIGN) * ALIGN
        return at

    return alloc


def cache_on_heap(memory: TileMemory, key: Any, make: Callable[[], Any]) -> Any:
    """Return what a heap keeps under a key, made where there is none; virtual memory keeps its own."""
    found: dict[Any, Any] = memory.heap.kept if memory.heap is not None else memory.kept
    if key not in found:
        found[key] = make()
    return found[key]


def is_interpreted(kernel: Any) -> bool:
    """Return whether Triton's interpreter runs a kernel, because TRITON_INTERPRET was set when it was imported."""
    return "Interpret" in type(kernel).__name__
