"""`TritonKernels`: Triton's kernels as what runs the operators of a heap, one rank a process."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from shardplan.errors import BackendError, optional
from shardplan.fused.heap.symmetric import SymmetricHeap
from shardplan.fused.kernels.bags import BagCall
from shardplan.fused.operators.asked import Asked
from shardplan.fused.tiles.events import TileBox
from shardplan.fused.tiles.shapes import BlockShape
from shardplan.fused.triton.embedding import embedding_bag_all_to_all
from shardplan.fused.triton.gemm import gemm_all_to_all
from shardplan.fused.triton.gemm_kernel import gemm_kernel
from shardplan.fused.triton.gemv import gemv_all_reduce
from shardplan.fused.triton.memory import TileMemory, is_interpreted
from shardplan.fused.triton.move import move
from shardplan.fused.triton.options import KernelOptions

if TYPE_CHECKING:
    import torch

SMALL = (32, 32, 32)  # a tile in the interpreter
LARGE = (128, 128, 64)


class TritonKernels:
    """The operators on local tensors, as `operators.asked.LocalKernels` says, on the memory of a heap.

    On a GPU a rank runs one program a processor; a destination's tiles of bags and of moved boxes signal together.
    Every call ends with a look at whether it failed, so that the host waits for the device, and a CUDA graph cannot
    capture one.
    """

    def __init__(self, heap: SymmetricHeap) -> None:
        """Stand on a heap; raises `BackendError` for one between nodes, or where the interpreter does not fit it."""
        self.heap, self.memory = heap, TileMemory.of(heap)
        if is_interpreted(gemm_kernel) != (heap.device == "cpu"):
            text = "set, which interprets them" if is_interpreted(gemm_kernel) else "not set"
            legal = "memory of CPUs with it, set before the first import, of GPUs without"
            said = f"symmetric heap {heap.name}: kernels of Triton on {heap.device}, TRITON_INTERPRET is {text}"
            raise BackendError(f"{said}; legal is {legal}")
        self.programs, self.block, self.vector = 2, SMALL, (16, 64)
        if heap.device != "cpu":
            torch = optional("torch", "torch")
            self.programs = torch.cuda.get_device_properties(self.memory.device).multi_processor_count
            self.block, self.vector = LARGE, (16, 256)

    def _options(self, asked: Asked) -> KernelOptions:
        return KernelOptions(self.programs, asked.order, signals=asked.tiles, seconds=asked.seconds)

    @contextmanager
    def _propagate_errors(self, op: str) -> Generator[None]:
        """What fails here the others hear."""
        if self.heap.tally is not None:
            raise BackendError(f"{op}: counted with kernels of Triton; legal is a heap that kernels of CPUs serve")
        if self.heap.device != "cpu" and optional("torch", "torch").cuda.is_current_stream_capturing():
            raise BackendError(f"{op}: captured in a CUDA graph; legal are calls outside of one")
        try:
            yield
        except BaseException as error:
            self.heap.header.propagate_error(op, error)
            raise

    def gemm(
        self,
        asked: Asked,
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str,
        scatter: int,
        counts: Sequence[Sequence[int]],
        columns: Sequence[int],
        varying: bool,
    ) -> torch.Tensor:
        """Return the result of `gemm_all_to_all`; a destination is signalled `asked.tiles` times, of 0 at each tile."""
        parts = columns if scatter else None
        given = (counts, scatter, activation, self.block, self._options(asked), parts, varying)
        with self._propagate_errors("gemm_all_to_all"):
            mine = None if bias is None else bias.contiguous()
            return gemm_all_to_all(self.memory, a.contiguous(), b.contiguous()[None], mine, *given)[0]

    def gemv(self, asked: Asked, a: torch.Tensor, x: torch.Tensor, shots: int) -> torch.Tensor:
        """Return the result of `gemv_all_reduce`, [M, C]."""
        options = replace(self._options(asked), signals=0)
        with self._propagate_errors("gemv_all_reduce"):
            return gemv_all_reduce(self.memory, [a.contiguous()], [x], shots, self.vector, asked.tiles, options)[0]

    def bags(
        self,
        asked: Asked,
        call: BagCall,
        held: Sequence[int],
        batches: Sequence[int],
        dim: int,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return the result of `embedding_bag_all_to_all`; `asked.tiles` signals a destination, 0 one."""
        options = replace(self._options(asked), signals=asked.tiles or 1)
        operands = (call.tables, call.indices, call.offsets, call.weights)
        given = (held, batches, dim, call.mode, max(self.programs, asked.tiles), 16, options, dtype)
        with self._propagate_errors("embedding_bag_all_to_all"):
            return embedding_bag_all_to_all(self.memory, *operands, *given)[0]

    def move(
        self, asked: Asked, op: str, shape: BlockShape, g: torch.Tensor, boxes: Sequence[TileBox], varying: bool
    ) -> torch.Tensor:
        """Return the blocks of all ranks, put together."""
        options = replace(self._options(asked), signals=1)
        with self._propagate_errors(op):
            return move(self.memory, op, shape, g, boxes, options, varying=varying)
