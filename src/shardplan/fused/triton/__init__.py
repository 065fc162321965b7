"""Fused kernels by Triton: the operators, and what users' own kernels are made of (arXiv 2305.06942).

Reading order:

- `memory_ops` `put`, `signal`, `wait`, memory of peers, and the walk along a schedule's rows, as functions of Triton
- `memory`    `TileMemory`: the heaps of all ranks, and the ranks that run in this process
- `rows`      a proved protocol of tiles as the integers that a kernel reads
- `launches`  `FusedKernel`: the schedule's memory, counters and epoch, and the launches of an epoch
- `options`   `KernelOptions`: programs, seconds, and Triton's own options
- `product_tiles`  `ProductTile`, and which of a table a product has
- `record`    what failed in a kernel, seen by the host without a wait
- `blocks`    `BlockKernel`: blocks from every rank to every rank, of which kernels know a matrix of counts
- `gemm`, `gemv`, `embedding`, `tensor_parallel`   the operators, with their kernels in modules of their own
- `move`           the all-to-all of blocks that gradients need
- `serving`        all of them as what runs the operators of a heap
- `compile_ahead`  kernels compiled without a GPU

One source of a kernel runs in Triton's interpreter (TRITON_INTERPRET=1 before the first import), on NVIDIA and on AMD.
Names here are imported when they are first used: this needs `pip install 'shardplan[triton]'`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardplan.errors import optional

if TYPE_CHECKING:
    from shardplan.fused.triton.compile_ahead import compile_kernel, source_hash
    from shardplan.fused.triton.embedding import embedding_bag_all_to_all
    from shardplan.fused.triton.gemm import gemm_all_to_all
    from shardplan.fused.triton.gemv import gemv_all_reduce
    from shardplan.fused.triton.launches import FusedKernel
    from shardplan.fused.triton.memory import TileMemory
    from shardplan.fused.triton.memory_ops import PUT, READ, WIDE, enter, peer, place, put, signal, turn, wait
    from shardplan.fused.triton.options import KernelOptions
    from shardplan.fused.triton.product_tiles import ProductTile

__all__ = [
    "put",
    "signal",
    "wait",
    "peer",
    "enter",
    "place",
    "turn",
    "PUT",
    "READ",
    "WIDE",
    "FusedKernel",
    "KernelOptions",
    "ProductTile",
    "TileMemory",
    "compile_kernel",
    "source_hash",
    "embedding_bag_all_to_all",
    "gemm_all_to_all",
    "gemv_all_reduce",
]

_WHERE = {
    "memory_ops": ("PUT", "READ", "WIDE", "enter", "peer", "place", "put", "signal", "turn", "wait"),
    "compile_ahead": ("compile_kernel", "source_hash"),
    "launches": ("FusedKernel",),
    "memory": ("TileMemory",),
    "options": ("KernelOptions",),
    "product_tiles": ("ProductTile",),
    "embedding": ("embedding_bag_all_to_all",),
    "gemm": ("gemm_all_to_all",),
    "gemv": ("gemv_all_reduce",),
}
_HOME = {name: f"shardplan.fused.triton.{module}" for module, names in _WHERE.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'shardplan.fused.triton' has no attribute {name!r}")
    optional("triton", "triton")
    return getattr(optional(_HOME[name], "triton"), name)
