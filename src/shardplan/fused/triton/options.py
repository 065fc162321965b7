"""How a Triton operator is launched: `KernelOptions`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardplan.fused.tiles.schedule import TileSchedule
from shardplan.fused.triton.launches import FusedKernel
from shardplan.fused.triton.memory import TileMemory, cache_on_heap, is_interpreted
from shardplan.fused.triton.product_tiles import ProductTile


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """Programs a rank, seconds of a wait, and Triton's own options.

    Programs of a launch whose own others they wait for must all run at once: at most what the processors hold.
    """

    programs: int = 2
    seconds: float = 30.0
    warps: int = 4
    stages: int = 3

    def schedule(self, memory: TileMemory, kernel: Any, **fields: Any) -> TileSchedule:
        """Return the schedule.

        Virtual ranks in the interpreter are one sequence of programs, so that only a second launch may wait.
        """
        if memory.here > 1 and is_interpreted(kernel):
            fields["waits"] = "second_launch"
        return TileSchedule(**{"programs": self.programs} | fields)

    def kernel_instance(self, memory: TileMemory, op: str, schedule: TileSchedule, kind: str) -> FusedKernel:
        """Return the operator's instance on this memory, new where there is none."""
        found = cache_on_heap(memory, f"triton {op} {schedule} {kind}", lambda: FusedKernel(memory, op, schedule))
        found.seconds = self.seconds
        return found

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
