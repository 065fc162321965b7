"""Where a result goes: into new memory, or into a tensor of the symmetric heap that the caller gave."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardplan.errors import TypingError
from shardplan.fused.heap.symmetric import SymmetricHeap, SymmetricTensor

if TYPE_CHECKING:
    import torch


def find_out_tensor(name: str, heap: SymmetricHeap, out: torch.Tensor | None) -> SymmetricTensor | None:
    """Return the symmetric tensor in which `out` lies, None where none is given; raises `TypingError`."""
    if out is None:
        return None
    found = heap.holding(out)
    if found is None:
        raise TypingError(f"{name}: out {list(out.shape)}; legal is a contiguous tensor that begins where one of "
                          f"symmetric heap {heap.name} does: heap.alloc(...).local, or its first rows")  # fmt: skip
    return found


def result_or_out(name: str, found: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Return a copy of a result on the heap, or `out`, in which it lies; raises `TypingError` where that is another."""
    if out is None:
        return found.clone()
    if out.shape != found.shape or out.dtype != found.dtype:
        here, there = (f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in (out, found))
        raise TypingError(f"{name}: out is {here}; legal is {there}, the result of this rank")
    return out
