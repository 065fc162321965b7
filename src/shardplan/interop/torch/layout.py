"""DTensor's placements as layouts, and, where no layout says what they mean, as tables of boxes.

A `DeviceMesh` becomes a `Mesh` of the same ranks; mesh dims without a usable name are called d0, d1, .... `Shard`s of
one dim nest in the order that the spec says, by default that of the mesh dims; `_StridedShard`s that decode to another
order become it where the dim is even. On uneven dims `_StridedShard` follows a rule of its own: it leaves on some
devices several runs of indices, which `holdings` asks DTensor for, and every product of runs is a row of a table.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrder, ShardOrderEntry, TensorMeta
from torch.distributed.tensor._ops._math_ops import _NormPartial  # pyright: ignore[reportPrivateUsage]
from torch.distributed.tensor._utils import (
    _get_shard_size_and_offsets,  # pyright: ignore[reportPrivateUsage]
)
from torch.distributed.tensor.placement_types import (
    Placement,
    _MaskPartial,  # pyright: ignore[reportPrivateUsage]
    _StridedShard,  # pyright: ignore[reportPrivateUsage]
)

from shardplan.core.box_table import BoxRow, BoxTable, strides
from shardplan.core.dtypes import reduces
from shardplan.core.layout import REDUCTIONS
from shardplan.core.mesh import Mesh
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError
from shardplan.execution.torch.dtypes import carrier_of, short_name_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Placements = tuple[Placement, ...]
Run = tuple[int, int, int]  # first global index, first local index, length
MEANINGS = ("_reduce_value", "_reduce_shard_value", "_partition_value")  # what a partial placement is, for DTensor
MOST_MESHES = 64  # remembered: a model has a few


@lru_cache(maxsize=MOST_MESHES)
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
            f"{len(placements)} placements, {text_of(placements)}, for a mesh of shape {tuple(mesh.mesh.shape)}; legal "
            "is one for each mesh dim"
        )
    out: list[Placement] = []
    for k, p in enumerate(placements):
        check_known(p, k)
        if isinstance(p, (Shard, _StridedShard)):
            if not -ndim <= p.dim < ndim:
                legal = f"dims {-ndim} to {ndim - 1}" if ndim else "Replicate()"
                raise LayoutError(f"{p!r} as placement {k} of a tensor of {ndim} dims; legal are {legal}")
            if p.dim < 0:
                d = p.dim + ndim
                p = _StridedShard(d, split_factor=p.split_factor) if isinstance(p, _StridedShard) else Shard(d)
        out.append(p)
    return tuple(out)


def check_known(placement: Any, k: int) -> None:
    """Raise `LayoutError` for what is no placement, or one of a kind whose meaning nobody here knows."""
    if not isinstance(placement, (Shard, _StridedShard, Replicate, Partial)):
        raise LayoutError(f"placement {k} is {placement!r}; legal are Shard(dim), Replicate() and Partial(op)")


def parse_shard_order(shard_order: Any, placements: Placements) -> ShardOrder | None:
    """Return an order of sharding as DTensor's specs have it, or raise `LayoutError` unless it is one of `placements`.

    `shard_order` has, for every sharded dim, the mesh dims that cut it, the first one first, as a `ShardOrderEntry` or
    a pair, in any order of the dims; None is the default: mesh dims in their own order. Of `placements` there is one a
    mesh dim, and dims are counted from the front.
    """
    if shard_order is None:
        return None
    cuts: dict[int, list[int]] = {}
    for k, p in enumerate(placements):
        if isinstance(p, (Shard, _StridedShard)):
            cuts.setdefault(p.dim, []).append(k)
    legal = ", ".join(f"({d}, {tuple(dims)})" for d, dims in sorted(cuts.items()))
    wrong = LayoutError(
        f"shard_order={shard_order!r} for the placements {text_of(placements)}; legal are the orders of the mesh dims "
        f"in [{legal}]"
    )
    if any(isinstance(p, _StridedShard) for p in placements):
        raise LayoutError(f"shard_order={shard_order!r} beside {text_of(placements)}; legal beside it is Shard")
    try:
        given = {int(d): tuple(int(k) for k in dims) for d, dims in shard_order}
    except (TypeError, ValueError):
        raise wrong from None
    if {d: sorted(dims) for d, dims in given.items()} != cuts or len(given) != len(shard_order):
        raise wrong
    return tuple(ShardOrderEntry(d, dims) for d, dims in sorted(given.items()))


def _order_of(spec: DTensorSpec) -> ShardOrder | None:
    """Return which mesh dims cut a dim, the first one first; None where `_StridedShard`s say no such order."""
    if not any(isinstance(p, _StridedShard) for p in spec.placements):
        return spec.shard_order or DTensorSpec.compute_default_shard_order(spec.placements)
    if not spec.use_strided_shard_as_shard_order:  # inside DTensor's view ops
        return None
    return DTensorSpec._maybe_convert_StridedShard_to_shard_order(  # pyright: ignore[reportPrivateUsage]
        spec.placements, spec.mesh
    )


def type_of(spec: DTensorSpec) -> TensorType | None:
    """Return the type of a DTensor, or None where no layout says what its devices hold.

    Raises `LayoutError` for a partial placement without a meaning in the dtype, and for several kinds of them.
    """
    mesh, placements, shape, dtype = spec.mesh, spec.placements, spec.shape, spec.tensor_meta.dtype  # pyright: ignore
    axes = mesh_of(mesh).axes
    partial = {a: reduction_of(p, dtype) for a, p in zip(axes, placements, strict=True) if isinstance(p, Partial)}
    order = _order_of(spec)
    if order is None or 0 in shape:
        return None
    dims: list[tuple[str, ...]] = [() for _ in shape]
    for entry in order:
        dims[entry.tensor_dim] = tuple(axes[k] for k in entry.mesh_dims)
        strided = any(isinstance(placements[k], _StridedShard) for k in entry.mesh_dims)
        if strided and shape[entry.tensor_dim] % math.prod(mesh.size(k) for k in entry.mesh_dims):
            return None
    return TensorType(short_name_of(dtype), tuple(shape), tuple(dims), mesh_of(mesh), partial=partial)


def whole_type_of(spec: DTensorSpec) -> TensorType | None:
    """Return the type of a DTensor as though its partial placements replicated, or None of a tensor without elements.

    Where no layout says what the devices hold it is of a table of boxes, and their shards are made flat.
    """
    meta = spec.tensor_meta
    if meta is None or 0 in meta.shape:
        return None
    plain = respec(spec, tuple(Replicate() if isinstance(p, Partial) else p for p in spec.placements), meta)
    found = type_of(plain)
    if found is not None:
        return found
    rows: list[BoxRow] = []
    for rank, held in holdings(plain.shape, plain.placements, plain.mesh, plain.shard_order).items():
        step = strides(held.shape)
        for runs in itertools.product(*held.runs):
            offset = sum(local * n for (_, local, _), n in zip(runs, step, strict=True))
            rows.append(BoxRow(rank, tuple((start, start + n) for start, _, n in runs), offset, step))
    return TensorType(short_name_of(meta.dtype), tuple(meta.shape), BoxTable(rows), mesh_of(spec.mesh))


def type_at_coordinate(t: TensorType, kept: Sequence[int], coordinate: Sequence[int]) -> TensorType:
    """Return the type on the devices that share this coordinate on the mesh dims `kept`, over which it stays partial.

    DTensor moves the addends of each coordinate by themselves. A plan over the whole mesh may combine them and make the
    value partial anew: the same value, in other addends.
    """
    mesh, table = t.mesh, t.layout.boxes
    ids = np.array(mesh.devices).reshape(mesh.sizes)
    where = tuple(coordinate[k] if k in kept else slice(None) for k in range(len(mesh.axes)))
    here: list[int] = ids[where].reshape(-1).tolist()
    axes = {a: n for k, (a, n) in enumerate(zip(mesh.axes, mesh.sizes, strict=True)) if k not in kept}
    partial = {a: t.layout.reduction or "sum" for a in t.layout.partial if a in axes}
    held = t.layout.dims if table is None else BoxTable(row for row in table.rows if row.device in here)
    return TensorType(t.dtype, t.shape, held, Mesh(axes, devices=here), partial)


def local_shape(spec: DTensorSpec) -> tuple[int, ...] | None:
    """Return the shape of this process's shard, or None off the mesh."""
    coordinate = spec.mesh.get_coordinate()
    if coordinate is None:
        return None
    t = type_of(spec)
    if t is not None:
        return t.local_shape(tuple(coordinate))
    held = holdings(spec.shape, spec.placements, spec.mesh, spec.shard_order)
    return held[int(spec.mesh.mesh[tuple(coordinate)])].shape


def respec(spec: DTensorSpec, placements: Placements, meta: TensorMeta) -> DTensorSpec:
    """Return a spec with other placements and another dtype or strides, in the same order of sharding."""
    return DTensorSpec(
        spec.mesh,
        placements,
        tensor_meta=meta,
        shard_order=None if spec.use_strided_shard_as_shard_order else spec.shard_order,  # pyright: ignore
        use_strided_shard_as_shard_order=spec.use_strided_shard_as_shard_order,
    )


def reduction_of(p: Partial, dtype: torch.dtype) -> str:
    """Return the reduction of a partial placement; an average is a sum, to be divided afterwards, a norm one of powers.

    Raises `LayoutError` where the placement has no such reduction, or the dtype has it not.
    """
    kind = p.reduce_op
    if not _is_supported_partial(p) or kind not in (*REDUCTIONS, "avg"):
        legal = ", ".join(f"Partial({r})" for r in (*REDUCTIONS, "avg"))
        raise LayoutError(f"{p!r} is not supported; legal are {legal}")
    if dtype != carrier_of(dtype):
        legal = "legal are Shard and Replicate"
    elif (kind == "avg" or isinstance(p, _NormPartial)) and not (
        dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1)
    ):
        legal = "legal are floats of 16 bits and more, and complex numbers"
    elif kind in ("max", "min") and dtype.is_complex:
        legal = "legal are numbers that have an order"
    elif not reduces(kind if kind != "avg" else "sum", short_name_of(dtype)):
        legal = "legal are integers and bool"
    else:
        return "sum" if kind == "avg" else kind
    raise LayoutError(f"{p!r} is not defined for {dtype}; {legal}")


def _is_supported_partial(p: Partial) -> bool:
    """Whether the placement is reduced and made as one of DTensor's own, and not in a way that its class adds."""
    return any(
        all(getattr(type(p), name) is getattr(kind, name) for name in MEANINGS)
        for kind in (Partial, _MaskPartial, _NormPartial)
    )


def text_of(placements: Sequence[Any]) -> str:
    """Return placements as one line."""
    return f"({', '.join(map(repr, placements))})"


@dataclass(frozen=True, slots=True)
class Holding:
    """What one rank holds: per dim its local size, and the runs of global indices that lie one after another."""

    shape: tuple[int, ...]
    runs: tuple[tuple[Run, ...], ...]


def holdings(
    shape: Sequence[int], placements: Placements, mesh: DeviceMesh, order: ShardOrder | None = None
) -> dict[int, Holding]:
    """Return what every rank of the mesh holds, from DTensor's own index function.

    `order` is that in which mesh dims cut, by default their own; beside a `_StridedShard` it is always that. A partial
    placement cuts nothing.
    """
    sizes = [int(n) for n in mesh.mesh.shape]
    cutting = list(range(len(placements)))
    if order is not None and not any(isinstance(p, _StridedShard) for p in placements):
        cutting = [k for entry in order for k in entry.mesh_dims]
    out: dict[int, Holding] = {}
    for place, rank in enumerate(mesh.mesh.flatten().tolist()):
        coordinate = [place // math.prod(sizes[k + 1 :]) % n for k, n in enumerate(sizes)]
        indices: list[torch.Tensor | None] = [None] * len(shape)
        local = list(shape)
        for k in cutting:
            p = placements[k]
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
