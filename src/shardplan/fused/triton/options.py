"""How a Triton operator is launched: `KernelOptions`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardplan.errors import optional
from shardplan.fused.triton.memory import TileMemory, is_interpreted
from shardplan.fused.triton.product_tiles import ProductTile

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """Programs a rank, seconds of a wait, and Triton's own options.

    Programs of a launch whose own others they wait for must all run at once: at most what the processors hold.
    """

    programs: int = 2
    seconds: float = 30.0
    warps: int = 4
    stages: int = 3

    def product(
        self, memory: TileMemory, kernel: Any, tile: ProductTile, a: torch.Tensor, b: torch.Tensor, aligned: bool
    ) -> tuple[dict[str, Any], tuple[Any, Any]]:
        """Return what every product's kernel is told of a [rows, K] and b [products, K, N], and the two as it has them.

        `aligned` says whether all that is beside them is of multiples of 16.
        """
        described, operands = tile.operands(a, b, b.shape[0])
        even = a.shape[1] % 16 == b.shape[2] % 16 == 0
        upcast = is_interpreted(kernel) and a.dtype == optional("torch", "torch").bfloat16  # of which see gemm_kernel
        constants = {**tile.names, **described, "aligned": aligned and even, "upcast": upcast}
        return constants | self.launch(memory, kernel, tile=tile), operands

    def launch(
        self, memory: TileMemory, kernel: Any, waits: bool = False, tile: ProductTile | None = None
    ) -> dict[str, Any]:
        """Return Triton's own options, a tile's where there is one.

        Where programs wait for each other, all of a GPU must run at once.
        """
        if is_interpreted(kernel):
            return {}
        more = {"launch_cooperative_grid": True} if memory.here > 1 and waits else {}
        asks = self if tile is None else tile
        return {"num_warps": asks.warps, "num_stages": asks.stages, **more}
