"""DTensor's placements as layouts, and, where no layout says what they mean, as runs of indices.

A `DeviceMesh` becomes a `Mesh` of the same ranks; mesh dims without a usable name are called d0, d1, .... `Shard`s of
one dim nest in the order of the mesh dims; `_StridedShard`s that decode to another order become that order where the
dim is even. On uneven dims `_StridedShard` follows a rule of its own, and `holdings` asks DTensor itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._utils import (
    _get_shard_size_and_offsets,  # pyright: ignore[reportPrivateUsage]
)
from torch.distributed.tensor.placement_types import (
    Placement,
    _StridedShard,  # pyright: ignore[reportPrivateUsage]
)

from shardplan.core.layout import REDUCTIONS
from shardplan.core.mesh import Mesh
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError
from shardplan.execution.torch_dtypes import name_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Placements = tuple[Placement, ...]
Run = tuple[int, int, int]  # first global index, first local index, length


@lru_cache(maxsize=64)
def mesh_of(mesh: DeviceMesh) -> Mesh:
    """Return the mesh of the same ranks; its axes are the mesh dims, major first."""
    names = mesh.mesh_dim_names or ()
    usable = len(set(names)) == len(names) == mesh.ndim and all(n.isidentifier() and n.isascii() for n in names)
    axes = names if usable else tuple(f"d{k}" for k in range(mesh.ndim))
    ranks: list[int] = mesh.mesh.flatten().tolist()
    return Mesh(dict(zip(axes, (int(n) for n in mesh.mesh.shape), strict=True)), devices=ranks)


def normal(placements: Sequence[Any], ndim: int, mesh: DeviceMesh) -> Placements:
    """Return the placements with dims counted from the front, or raise `LayoutError` where they name none."""
    given: Any = placements
    if isinstance(given, Placement) or not isinstance(given, Sequence):
        raise LayoutError(f"placements={given!r}; legal is a list of {mesh.ndim}, one for each mesh dim")
    if len(placements) != mesh.ndim:
        raise LayoutError(
            f"{len(placements)} placements, {_text(placements)}, for a mesh of shape {tuple(mesh.mesh.shape)}; legal "
            "is one for each mesh dim"
        )
    out: list[Placement] = []
    for k, p in enumerate(placements):
        if not isinstance(p, Placement):
            raise LayoutError(f"placement {k} is {p!r}; legal are Shard(dim), Replicate() and Partial(op)")
        if isinstance(p, (Shard, _StridedShard)):
            if not -ndim <= p.dim < ndim:
                legal = f"dims {-ndim} to {ndim - 1}" if ndim else "Replicate()"
                raise LayoutError(f"{p!r} as placement {k} of a tensor of {ndim} dims; legal are {legal}")
            if p.dim < 0:
                d = p.dim + ndim
                p = _StridedShard(d, split_factor=p.split_factor) if isinstance(p, _StridedShard) else Shard(d)
        out.append(p)
    return tuple(out)


def type_of(
    shape: Sequence[int], dtype: torch.dtype, placements: Placements, mesh: DeviceMesh, ordered: bool = True
) -> TensorType | None:
    """Return the type of a DTensor, or None where only runs of indices can say what its devices hold.

    Args:
        shape: The global shape.
        dtype: The element type.
        placements: One a mesh dim, dims counted from the front.
        mesh: The mesh.
        ordered: Whether `_StridedShard` encodes an order of sharding (it does not inside DTensor's view ops).

    Raises:
        LayoutError: A partial placement that is no sum, max or min, or several kinds of them.
    """
    axes = mesh_of(mesh).axes
    partial = {a: _reduction(p) for a, p in zip(axes, placements, strict=True) if isinstance(p, Partial)}
    if len(set(partial.values())) > 1:
        raise LayoutError(f"{_text(placements)} has partial placements of several kinds; legal is one kind")
    if any(n == 0 for n in shape):
        return None
    dims: list[tuple[str, ...]] = [() for _ in shape]
    if any(isinstance(p, _StridedShard) for p in placements):
        order = DTensorSpec._maybe_convert_StridedShard_to_shard_order(  # pyright: ignore[reportPrivateUsage]
            placements, mesh
        )
        if not ordered or order is None:
            return None
        for entry in order:
            dims[entry.tensor_dim] = tuple(axes[k] for k in entry.mesh_dims)
            strided = any(isinstance(placements[k], _StridedShard) for k in entry.mesh_dims)
            if strided and shape[entry.tensor_dim] % math.prod(mesh.size(k) for k in entry.mesh_dims):
                return None
    else:
        for a, p in zip(axes, placements, strict=True):
            if isinstance(p, Shard):
                dims[p.dim] = (*dims[p.dim], a)
    return TensorType(name_of(dtype), tuple(shape), tuple(dims), mesh_of(mesh), partial=partial)


def ends(source: DTensorSpec, target: DTensorSpec) -> tuple[TensorType | None, TensorType | None]:
    """Return the types of both ends of a move; None for one that only runs of indices describe."""
    meta = source.tensor_meta
    if meta is None:
        raise LayoutError("the DTensor's spec has no global shape")
    ordered = bool(source.use_strided_shard_as_shard_order)
    return (
        type_of(meta.shape, meta.dtype, source.placements, source.mesh, ordered),
        type_of(meta.shape, meta.dtype, target.placements, target.mesh),
    )


def _reduction(p: Partial) -> str:
    if type(p) is not Partial or p.reduce_op not in REDUCTIONS:
        raise LayoutError(f"{p!r} is not supported; legal are {', '.join(f'Partial({r})' for r in REDUCTIONS)}")
    return p.reduce_op


def _text(placements: Sequence[Any]) -> str:
    return f"({', '.join(map(repr, placements))})"


@dataclass(frozen=True, slots=True)
class Holding:
    """What one rank holds: per dim its local size, and the runs of global indices that lie one after another."""

    shape: tuple[int, ...]
    runs: tuple[tuple[Run, ...], ...]


def holdings(shape: Sequence[int], placements: Placements, mesh: DeviceMesh) -> dict[int, Holding]:
    """Return what every rank of the mesh holds, from DTensor's own index function.

    Raises `LayoutError` for a partial placement of an array that is not empty: no indices describe it.
    """
    for p in placements:
        if 0 not in shape and not isinstance(p, (Shard, _StridedShard, Replicate)):
            raise LayoutError(
                f"{_text(placements)} of a tensor of shape {tuple(shape)}: {p!r} beside a _StridedShard of an uneven "
                "dim is not supported; legal are Shard and Replicate beside it"
            )
    sizes = [int(n) for n in mesh.mesh.shape]
    out: dict[int, Holding] = {}
    for place, rank in enumerate(mesh.mesh.flatten().tolist()):
        coordinate = [place // math.prod(sizes[k + 1 :]) % n for k, n in enumerate(sizes)]
        indices: list[torch.Tensor | None] = [None] * len(shape)
        local = list(shape)
        for k, p in enumerate(placements):
            if isinstance(p, (Shard, _StridedShard)):
                local[p.dim], indices[p.dim] = _get_shard_size_and_offsets(
                    local[p.dim], sizes[k], coordinate[k], p, indices[p.dim], shape[p.dim], False
                )
        runs = tuple(_runs(None if x is None else x.tolist(), n) for x, n in zip(indices, local, strict=True))
        out[int(rank)] = Holding(tuple(local), runs)
    return out


def _runs(indices: list[int] | None, size: int) -> tuple[Run, ...]:
    """Join neighbouring indices; None is all of a dim.

    >>> _runs([0, 1, 4, 5], 4)
    ((0, 0, 2), (4, 2, 2))
    """
    if size == 0:
        return ()
    if indices is None:
        return ((0, 0, size),)
    out: list[list[int]] = []
    for local, index in enumerate(indices[:size]):
        if out and out[-1][0] + out[-1][2] == index:
            out[-1][2] += 1
        else:
            out.append([index, local, 1])
    return tuple((a, b, n) for a, b, n in out)
