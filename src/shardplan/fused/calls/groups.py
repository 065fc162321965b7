"""Which heap serves a process group's name: one explicit table, filled by the caller."""

from __future__ import annotations

from shardplan.errors import BackendError, excerpt
from shardplan.fused.heap.symmetric import SymmetricHeap

_HEAPS: dict[str, SymmetricHeap] = {}


def bind(group: str, heap: SymmetricHeap) -> None:
    """Have a heap serve the operators of a process group, named as torch names it."""
    _HEAPS[group] = heap


def unbind(group: str) -> None:
    """Forget the heap of a group."""
    _HEAPS.pop(group, None)


def bound(group: str) -> SymmetricHeap:
    """Return the heap of a group; raises `BackendError` where none is bound."""
    found = _HEAPS.get(group)
    if found is None or found.closed:
        legal = ", ".join(g for g, heap in _HEAPS.items() if not heap.closed) or "none yet: bind(group, heap)"
        raise BackendError(f"group {excerpt(group)} has no open symmetric heap; bound are {legal}")
    return found


def bound_groups() -> list[tuple[str, SymmetricHeap]]:
    """Return the names of groups with an open heap, and the heaps."""
    return [(group, heap) for group, heap in _HEAPS.items() if not heap.closed]
