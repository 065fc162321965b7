"""`TritonKernels`: Triton's kernels as what runs the operators of a heap, one rank a process."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shardplan.errors import BackendError, optional
from shardplan.fused.heap.symmetric import SymmetricHeap, SymmetricTensor
from shardplan.fused.kernels.bags import BagCall
from shardplan.fused.operators.out import result_or_out
from shardplan.fused.tiles.shapes import BlockCuts
from shardplan.fused.triton.embedding import embedding_bag_all_to_all
from shardplan.fused.triton.gemm import gemm_all_to_all
from shardplan.fused.triton.gemm_kernel import gemm_kernel
from shardplan.fused.triton.gemv import gemv_all_reduce
from shardplan.fused.triton.grouped import grouped_multiply, move_back
from shardplan.fused.triton.memory import TileMemory, is_interpreted
from shardplan.fused.triton.move import move
from shardplan.fused.triton.options import KernelOptions
from shardplan.fused.triton.product_tiles import ProductTile, can_describe, choose_tile, power_of_two
from shardplan.fused.triton.tensor_parallel import gather_multiply, multiply_scatter

if TYPE_CHECKING:
    import torch

# Programs on a processor of a GPU: of products one, whose warps have all of it; of the others as many as registers and
# shared memory let fit of each variant on each target, which tests/fused/test_triton.py counts.
FIT = {"gemm": 1, "gemv": 2, "embedding": 4, "move": 8}


class TritonKernels:
    """The operators on checked local tensors by Triton, in place of the kernels of CPUs, on the memory of a heap.

    On a GPU a rank runs as many programs a processor as `FIT` says, whose tiles are the kernel's own: `tiles` that a
    call asks for are those of kernels of CPUs. No call waits for the device, and a CUDA graph can capture one; what
    fails is raised by the next call, or by `SymmetricHeap.check`.
    """

    def __init__(self, heap: SymmetricHeap) -> None:
        """Stand on a heap; raises `BackendError` for one between nodes, or where the interpreter does not fit it."""
        self.heap, self.memory = heap, TileMemory.of(heap)
        if is_interpreted(gemm_kernel) != (heap.device == "cpu"):
            text = "set, which interprets them" if is_interpreted(gemm_kernel) else "not set"
            legal = "memory of CPUs with it, set before the first import, of GPUs without"
            said = f"symmetric heap {heap.name}: kernels of Triton on {heap.device}, TRITON_INTERPRET is {text}"
            raise BackendError(f"{said}; legal is {legal}")
        self.target, self.programs, self.vector = "cpu", 2, (16, 64)
        if heap.device != "cpu":
            torch = optional("torch", "torch")
            self.programs = torch.cuda.get_device_properties(self.memory.device).multi_processor_count
            self.target, self.vector = "cuda" if torch.version.hip is None else "hip", (16, 256)

    def _options(self, seconds: float, op: str) -> KernelOptions:
        """So many programs on each processor of a GPU as `FIT` says."""
        programs = self.programs * (1 if self.heap.device == "cpu" else FIT[op])
        return KernelOptions(programs, seconds)

    def _tile(self, a: torch.Tensor, blocks: int, rows: int, columns: int, describable: bool) -> ProductTile:
        """The tile of a product whose blocks have at most so many rows."""
        each = (blocks, power_of_two(rows), columns, a.shape[1])
        return choose_tile(self.target, a.dtype.itemsize, describable, self.programs, *each)

    @contextmanager
    def _propagate_errors(self, op: str) -> Generator[None]:
        """What fails here the others hear."""
        if self.heap.tally is not None:
            raise BackendError(f"{op}: counted with kernels of Triton; legal is a heap that kernels of CPUs serve")
        try:
            yield
        except BaseException as error:
            self.heap.header.propagate_error(op, error)
            raise

    def gemm(
        self,
        seconds: float,
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str,
        cuts: BlockCuts,
        varying: bool,
        into: SymmetricTensor | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the result of `gemm_all_to_all`, in `out` where that is given, which lies in `into`."""
        operands = (a.contiguous(), b.contiguous()[None])
        tile = self._tile(a, self.heap.ranks, *cuts.largest_block(), can_describe(*operands, 1))
        given = (cuts, 0, activation, tile, self._options(seconds, "gemm"), None, varying, into)
        with self._propagate_errors("gemm_all_to_all"):
            mine = None if bias is None else bias.contiguous()
            found = gemm_all_to_all(self.memory, *operands, mine, *given)[0]
            return found if out is None else result_or_out("gemm_all_to_all", found, out)

    def gemv(self, seconds: float, a: torch.Tensor, x: torch.Tensor, shots: int, tiles: int, out: torch.Tensor) -> None:
        """Store the result of `gemv_all_reduce`, [M, C]."""
        with self._propagate_errors("gemv_all_reduce"):
            given = (shots, self.vector, tiles, self._options(seconds, "gemv"), out[None])
            gemv_all_reduce(self.memory, [a.contiguous()], [x], *given)

    def bags(
        self,
        seconds: float,
        call: BagCall,
        held: Sequence[int],
        batches: Sequence[int],
        dim: int,
        dtype: torch.dtype,
        into: SymmetricTensor | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the bags of all tables for this rank's batch: rank s holds `held[s]` tables, d has `batches[d]` bags.

        An index that is no row of its table is a `TypingError` at the next call, or at `SymmetricHeap.check`.
        """
        operands = (call.tables, call.indices, call.offsets, call.weights)
        given = (held, batches, dim, call.mode, 1, 16, self._options(seconds, "embedding"), dtype, into)
        with self._propagate_errors("embedding_bag_all_to_all"):
            found = embedding_bag_all_to_all(self.memory, *operands, *given)[0]
            return found if out is None else result_or_out("embedding_bag_all_to_all", found, out)

    def gather_multiply(
        self, seconds: float, a: torch.Tensor, b: torch.Tensor, cuts: BlockCuts
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the results of `all_gather_gemm`."""
        with self._propagate_errors("all_gather_gemm"):
            operands = (a.contiguous(), b.contiguous()[None], cuts)
            tile = self._tile(a, self.heap.ranks, cuts.largest_block()[0], b.shape[1], False)
            out, rows = gather_multiply(self.memory, *operands, tile, self._options(seconds, "gemm"))
            return out[0], rows[0]

    def multiply_scatter(self, seconds: float, a: torch.Tensor, b: torch.Tensor, cuts: BlockCuts) -> torch.Tensor:
        """Return the result of `gemm_reduce_scatter`."""
        with self._propagate_errors("gemm_reduce_scatter"):
            operands = (a.contiguous(), b.contiguous()[None], cuts)
            tile = self._tile(a, self.heap.ranks, *cuts.largest_block(), can_describe(*operands[:2], 1))
            return multiply_scatter(self.memory, *operands, tile, self._options(seconds, "gemm"))[0]

    def grouped_multiply(
        self, seconds: float, a: torch.Tensor, b: torch.Tensor, counts: torch.Tensor, capacity: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the results of `grouped_gemm_all_to_all`."""
        with self._propagate_errors("grouped_gemm_all_to_all"):
            operands = (a.contiguous(), b.contiguous(), counts, capacity)
            blocks = self.heap.ranks * len(b)
            tile = self._tile(a, blocks, -(-capacity // blocks), b.shape[2], can_describe(*operands[:2], len(b)))
            return grouped_multiply(self.memory, *operands, tile, self._options(seconds, "gemm"))

    def move_grouped_back(
        self, seconds: float, g: torch.Tensor, counts: torch.Tensor, rows: int, most: int
    ) -> torch.Tensor:
        """Return the rows of g that this rank's experts made, `rows` of them."""
        with self._propagate_errors("grouped_gemm_all_to_all_backward"):
            return move_back(self.memory, g.contiguous(), counts, most, self._options(seconds, "move"))[:rows]

    def move(self, seconds: float, op: str, cuts: BlockCuts, g: torch.Tensor, varying: bool) -> torch.Tensor:
        """Return the blocks of all ranks, put together."""
        with self._propagate_errors(op):
            return move(self.memory, op, cuts, g, self._options(seconds, "move"), varying=varying)
