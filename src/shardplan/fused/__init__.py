"""Fused operators: a computation whose tiles leave for their destination as soon as they are there (arXiv 2305.06942).

Reading order:

- `tiles/`      `TileSchedule`: which tile is sent when, who waits for what, and the proof that this is right
- `heap/`       `SymmetricHeap`: memory of the same layout on every rank, which every rank can write on every other
- `kernels/`    tiles on CPUs, by torch or by one C++ file
- `calls/`      tile schedules run on a heap: what ranks agree on, and the run of an epoch
- `operators/`  the operators on a rank's local tensors, forward and backward
- `deciding/`   where fusing pays: the pass over programs, jobs and graphs of torch
- `library`     the same as operators of PyTorch, traced and differentiated

This room imports the rooms below it and numpy; torch only inside functions.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardplan.fused.calls.groups import bind, bound, unbind
    from shardplan.fused.calls.moved_tally import MovedTally, MovedTile, counted
    from shardplan.fused.deciding.calibrate import calibrate
    from shardplan.fused.deciding.fuse import fuse
    from shardplan.fused.deciding.graphs import GraphGroup, fuse_graph
    from shardplan.fused.deciding.rows import Fusion, FusionRow
    from shardplan.fused.heap.failures import FusedTimeout, HeapMismatch, PeerLost
    from shardplan.fused.heap.symmetric import SymmetricHeap, SymmetricTensor
    from shardplan.fused.library import (
        all_gather_gemm,
        bind_group,
        embedding_bag_all_to_all,
        gemm_all_to_all,
        gemm_reduce_scatter,
        gemv_all_reduce,
        grouped_gemm_all_to_all,
    )
    from shardplan.fused.tiles.events import TileProtocol, TileScheduleError
    from shardplan.fused.tiles.schedule import TileSchedule
    from shardplan.fused.tiles.shapes import BlockShape, RowShape

__all__ = [
    "Fusion",
    "FusionRow",
    "GraphGroup",
    "fuse",
    "fuse_graph",
    "BlockShape",
    "FusedTimeout",
    "HeapMismatch",
    "MovedTally",
    "MovedTile",
    "PeerLost",
    "RowShape",
    "SymmetricHeap",
    "SymmetricTensor",
    "TileProtocol",
    "TileSchedule",
    "TileScheduleError",
    "all_gather_gemm",
    "bind",
    "bind_group",
    "bound",
    "calibrate",
    "counted",
    "embedding_bag_all_to_all",
    "gemm_all_to_all",
    "gemm_reduce_scatter",
    "gemv_all_reduce",
    "grouped_gemm_all_to_all",
    "unbind",
]

_WHERE = {
    "calls.groups": ("bind", "bound", "unbind"),
    "calls.moved_tally": ("MovedTally", "MovedTile", "counted"),
    "deciding.calibrate": ("calibrate",),
    "deciding.fuse": ("fuse",),
    "deciding.graphs": ("GraphGroup", "fuse_graph"),
    "deciding.rows": ("Fusion", "FusionRow"),
    "heap.failures": ("FusedTimeout", "HeapMismatch", "PeerLost"),
    "heap.symmetric": ("SymmetricHeap", "SymmetricTensor"),
    "library": (
        "all_gather_gemm",
        "bind_group",
        "embedding_bag_all_to_all",
        "gemm_all_to_all",
        "gemm_reduce_scatter",
        "gemv_all_reduce",
        "grouped_gemm_all_to_all",
    ),
    "tiles.events": ("TileProtocol", "TileScheduleError"),
    "tiles.schedule": ("TileSchedule",),
    "tiles.shapes": ("BlockShape", "RowShape"),
}
_HOME = {name: f"shardplan.fused.{module}" for module, names in _WHERE.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'shardplan.fused' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
