"""How a Triton operator is launched: `KernelOptions`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardplan.fused.tiles.schedule import TileSchedule
from shardplan.fused.triton.launches import FusedKernel
from shardplan.fused.triton.memory import TileMemory, cache_on_heap, is_interpreted


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """Programs a rank, order of destinations, tiles that signal together, seconds of a wait, and Triton's own options.

    `signals`, where it is not 0, says instead how often a destination is signalled.
    A rank's programs of a launch on a GPU must all run at once: at most what its processors hold, over the ranks there.
    """

    programs: int = 2
    order: str = "remote_first"
    slice: int = 1
    signals: int = 0
    seconds: float = 30.0
    warps: int = 4
    stages: int = 3

    def tiles_per_signal(self, tiles: int) -> int:
        """Return how many of a destination's tiles signal together.

        >>> KernelOptions(slice=4).tiles_per_signal(3), KernelOptions(signals=2).tiles_per_signal(5)
        (3, 3)
        """
        return -(-tiles // min(self.signals, tiles)) if self.signals else min(self.slice, tiles)

    def schedule(self, memory: TileMemory, kernel: Any, **fields: Any) -> TileSchedule:
        """Return the schedule.

        Virtual ranks in the interpreter are one sequence of programs, so that only a second launch may wait.
        """
        if memory.here > 1 and is_interpreted(kernel):
            fields["waits"] = "second_launch"
        all_fields: dict[str, Any] = {"order": self.order, "programs": self.programs} | fields
        return TileSchedule(**all_fields)

    def kernel_instance(self, memory: TileMemory, op: str, schedule: TileSchedule, kind: str) -> FusedKernel:
        """Return the operator's instance on this memory, new where there is none."""
        found = cache_on_heap(memory, f"triton {op} {schedule} {kind}", lambda: FusedKernel(memory, op, schedule))
        found.seconds = self.seconds
        return found

    def launch(self, memory: TileMemory, kernel: Any) -> dict[str, Any]:
        """Return Triton's own options: of ranks in one launch on a GPU all programs must run at once."""
        if is_interpreted(kernel):
            return {}
        more = {"launch_cooperative_grid": True} if memory.here > 1 else {}
        return {"num_warps": self.warps, "num_stages": self.stages, **more}
