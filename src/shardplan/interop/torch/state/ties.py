"""Which tensors of a state share storage on this rank: ties, views that overlap, and what others hold beside it.

Equal views of one storage are one tensor under several names. Views that do not overlap, as slices of a flat buffer,
are tensors of their own. Views that overlap and differ have no meaning once they are laid out anew.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardplan.errors import LayoutError
from shardplan.interop.torch.pending_moves import wait_for_tensor
from shardplan.interop.torch.state.names import Path, name_of


def local_of(x: DTensor) -> torch.Tensor:
    """Return the shard of this rank, waited for."""
    return wait_for_tensor(x._local_tensor)  # pyright: ignore[reportPrivateUsage]


def ties(tensors: Mapping[Path, DTensor], moved: Collection[Path]) -> dict[Path, Path | None]:
    """Return, for every tensor, the least name of the same one; None where this rank holds nothing and cannot say.

    Raises:
        LayoutError: Two tensors, one of them moved, are different views of the same elements; both are named.
    """
    first: dict[Any, Path] = {}
    out: dict[Path, Path | None] = {}
    views: dict[int, list[tuple[Path, torch.Tensor]]] = {}
    for path, x in sorted(tensors.items(), key=lambda item: name_of(item[0])):  # one order on all ranks
        local = local_of(x)
        key: Any = id(x)
        if local.numel():
            storage = local.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
            key = (storage, local.storage_offset(), local.shape, local.stride(), local.dtype, x._spec)  # pyright: ignore
            if key not in first:
                views.setdefault(storage, []).append((path, local))
        known = first.setdefault(key, path)
        out[path] = known if local.numel() else None
    for same in views.values():
        for k, (path, local) in enumerate(same):
            for other, theirs in same[:k]:
                if (path in moved or other in moved) and _overlap(local, theirs):
                    raise LayoutError(
                        f"{name_of(other)} and {name_of(path)} are different views of the same elements; legal are "
                        "equal views, which stay tied, and views without a common element"
                    )
    return out


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Say whether two views of one storage have a byte in common."""
    (low, end), (other_low, other_end) = _span(a), _span(b)
    if end <= other_low or other_end <= low:
        return False
    if a.dtype != b.dtype:  # within one span no two such views are laid out apart
        return True
    start, stop = min(low, other_low) // a.itemsize, max(end, other_end) // a.itemsize
    taken = torch.zeros(stop - start, dtype=torch.bool, device=a.device)
    taken.as_strided(a.shape, a.stride(), a.storage_offset() - start).fill_(True)
    return bool(taken.as_strided(b.shape, b.stride(), b.storage_offset() - start).any())


def _span(x: torch.Tensor) -> tuple[int, int]:
    """The bytes of a storage from the first to after the last that a view reaches."""
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    start = int(x.storage_offset())
    return start * x.itemsize, (start + int(last) + 1) * x.itemsize


def held_elsewhere(tensors: Mapping[Path, DTensor], tied: Mapping[Path, Path | None]) -> set[Path]:
    """Return the tensors whose storage outlives the state: others refer to the tensor, its shard, or the storage.

    `tensors` must be the only other holder of what is in the state; `tied` says what is one tensor.
    """
    spare = object()  # held by nobody else: what the counting itself adds to a count
    times = Counter(map(id, tensors.values()))
    # In this tuple everything has as many references from here; before it a tensor has two for every name, `spare` one.
    counts = [sys.getrefcount(x) for x in (*tensors.values(), spare)]
    base = counts.pop() - 2
    counted = {id(x): x for x in tensors.values()}
    uses = Counter(id(x._local_tensor) for x in counted.values())  # pyright: ignore[reportPrivateUsage]
    lent = {
        k
        for k, x in counted.items()
        if sys.getrefcount(x._local_tensor) > _ALONE + uses[id(x._local_tensor)]  # pyright: ignore[reportPrivateUsage]
    }
    groups: dict[Path, list[torch.Tensor]] = {}
    for path, x in tensors.items():
        groups.setdefault(tied[path] or path, []).append(local_of(x))
    shared = {first for first, locals_ in groups.items() if _has_other_users(locals_)}
    return {
        path
        for (path, x), count in zip(tensors.items(), counts, strict=True)
        if count - 3 * times[id(x)] > base or id(x) in lent or (tied[path] or path) in shared
    }


_ALONE = sys.getrefcount(object())  # references that the call itself holds


def _has_other_users(locals_: Sequence[torch.Tensor]) -> bool:
    """Say whether anything but these tensors, and those that they are views of, refers to their storage."""
    views = {id(x): x for x in locals_}
    bases = {id(b): b for x in views.values() if (b := x._base) is not None}  # pyright: ignore[reportPrivateUsage]
    storage = locals_[0].untyped_storage()
    users = torch._C._storage_Use_Count(storage._cdata) - 1  # pyright: ignore  # one is the Python object `storage`
    held = any(sys.getrefcount(b) > _ALONE + 2 for b in bases.values())  # the dict and the variable
    return held or users > len(views.keys() | bases.keys())


def surplus(locals_: list[torch.Tensor]) -> int:
    """Return the bytes that the shards keep alive beyond their own: larger storages, and copies of those not dense."""
    storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in locals_}  # pyright: ignore
    copies = sum(x.nbytes for x in locals_ if not x.is_contiguous())
    return sum(storages.values()) + copies - sum(x.nbytes for x in locals_)
