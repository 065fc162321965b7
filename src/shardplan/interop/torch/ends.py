"""Both ends of a DTensor's move: what a plan sees of them, and what a rank does to its shard before and after.

A plan knows layouts and one reduction. The rest of what DTensor means is arithmetic on this rank's own shard: an
average is a sum and a division, a norm the root of a sum of powers, a mask is zeros, a value becomes partial by being
divided (or kept by one rank alone, or masked), a dtype is cast, and one without arithmetic travels as the integers of
its width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._ops._math_ops import _NormPartial  # pyright: ignore[reportPrivateUsage]
from torch.distributed.tensor.placement_types import (
    Placement,
    _MaskPartial,  # pyright: ignore[reportPrivateUsage]
)

from shardplan.core.dtypes import IDEMPOTENT
from shardplan.core.tensor import TensorType, same
from shardplan.errors import LayoutError
from shardplan.execution.torch.dtypes import carrier_of, identity_of, short_name_of
from shardplan.interop.torch.layout import (
    check_known,
    local_shape,
    mesh_of,
    reduction_of,
    respec,
    text_of,
    type_at_coordinate,
    type_of,
    whole_type_of,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True, eq=False)
class Ends:
    """The source and the target of a move of one tensor, as `of` reads them."""

    source: DTensorSpec  # as it is moved: in the dtype of the messages
    target: DTensorSpec  # replicated where a value becomes partial afterwards
    types: tuple[TensorType, TensorType] | None  # None: the tensor has no elements
    reduced: dict[str, str]  # by axis of the source: addends that are reduced before a move of boxes, which has none
    shapes: tuple[tuple[int, ...] | None, ...]  # of this rank's shard at either end, None off the mesh
    masks: tuple[_MaskPartial, ...]  # of the source, to be applied on this rank
    spares: bool  # whether the mask is applied to a copy, as where DTensor gathers an inner mesh dim first
    given: torch.dtype  # of the caller's shard
    travels: torch.dtype  # in which it is reduced
    result: torch.dtype  # of the shard that the caller gets
    power: float | None  # of a norm that ends: its powers are added up, and the root is taken of the sum
    divisors: tuple[float, ...]  # of averages that end, then of sums that begin
    partitions: bool  # whether only some ranks keep the value
    blank: torch.Tensor | None  # no dims: what this rank's shard becomes where another rank keeps the value
    masking: tuple[tuple[int, _MaskPartial], ...]  # by mesh dim of the target: masks that begin

    @staticmethod
    def of(source: DTensorSpec, target: DTensorSpec, travels: torch.dtype | None = None) -> Ends:
        """Return what to plan between two specs of one tensor, and what to do around it.

        The target's dtype may be another; `travels` is the dtype in which it moves, by default the target's. Raises
        `LayoutError` for placements that make no sense together, or a reduction that the dtype has not.
        """
        if source.tensor_meta is None:
            raise LayoutError("the DTensor's spec has no global shape")
        given = source.tensor_meta.dtype
        result = given if target.tensor_meta is None else target.tensor_meta.dtype
        dtype = result if travels is None else travels
        for spec in (source, target):
            _check_kinds(spec.placements, dtype)
        stays = source.placements if source.mesh == target.mesh else (None,) * len(target.placements)
        begins = {
            k: p
            for k, (p, q) in enumerate(zip(target.placements, stays, strict=True))
            if isinstance(p, Partial) and p != q
        }
        for k, p in begins.items():
            if isinstance(stays[k], Partial):
                raise LayoutError(
                    f"cannot redistribute from {stays[k]!r} to {p!r}, mesh dim {k} of {tuple(target.placements)}; "
                    "legal are Shard, Replicate and the Partial that the tensor has there already"
                )
        there = tuple(Replicate() if k in begins else p for k, p in enumerate(target.placements))
        ends = {
            k: p
            for k, p in enumerate(source.placements)
            if isinstance(p, Partial) and not (source.mesh == target.mesh and there[k] == p)
        }
        masks = tuple(p for p in source.placements if isinstance(p, _MaskPartial))
        if kept := [p for p in masks if p not in ends.values()]:
            raise LayoutError(
                f"cannot redistribute {text_of(source.placements)} to {text_of(target.placements)}: the mask of "
                f"{kept[0]!r} fits the tensor as it lies; legal is to reduce it"
            )
        carrier = dtype if ends else carrier_of(dtype)
        meta = source.tensor_meta._replace(dtype=carrier)
        before, after = respec(source, source.placements, meta), respec(target, there, meta)
        types, reduced = (type_of(before), type_of(after)), dict[str, str]()
        if None in types:
            types = whole_type_of(before), whole_type_of(after)
            reduced = {mesh_of(source.mesh).axes[k]: reduction_of(p, dtype) for k, p in ends.items()}
        stays_partial = [k for k, p in enumerate(source.placements) if isinstance(p, Partial) and k not in ends]
        coordinate = source.mesh.get_coordinate()
        if coordinate is not None and 0 < len(stays_partial) < source.mesh.ndim:
            types = tuple(None if t is None else type_at_coordinate(t, stays_partial, coordinate) for t in types)
        averaged = [source.mesh.size(k) for k, p in ends.items() if p.reduce_op == "avg"]
        masking = tuple((k, p) for k, p in begins.items() if isinstance(p, _MaskPartial))
        divided, blank = _partition({k: p for k, p in begins.items() if (k, p) not in masking}, target, dtype)
        return Ends(
            source=before,
            target=after,
            types=None if types[0] is None or types[1] is None else (types[0], types[1]),
            reduced=reduced,
            shapes=(local_shape(before), local_shape(after)),
            masks=masks if coordinate is not None else (),
            spares=any(
                isinstance(p, _MaskPartial) and source.placements[k + 1 :] != target.placements[k + 1 :]
                for k, p in enumerate(source.placements)
            ),
            given=given,
            travels=dtype,
            result=result,
            power=next((power for p in ends.values() if (power := _power_of(p)) is not None), None),
            divisors=tuple(n for n in (*averaged, *divided) if n != 1),
            partitions=any(_kept_once(p, dtype) for p in begins.values() if not isinstance(p, _MaskPartial)),
            blank=blank,
            masking=masking,
        )

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that move together, ascending."""
        if self.types is None:
            return ranks_of(self.source.mesh, self.target.mesh)
        return tuple(sorted({d for t in self.types for d in t.mesh.devices}))

    @property
    def text(self) -> str:
        """What is done around the move, for ranks to compare; what differs between ranks is left out."""
        dtypes = f"{self.given} {self.travels} {self.result}"
        return f"{self.reduced} {dtypes} {self.power} {self.divisors} {self.masking}"

    @property
    def copies(self) -> bool:
        """Whether the move starts from a copy of the shard, so that the caller's own lies beside it."""
        return self.given != self.travels or self.spares or self.power is not None or not _dense(self.source)

    def apply_masks(self, local: torch.Tensor) -> torch.Tensor:
        """Put zeros where another rank has the value, in place where DTensor does so, and forget the mask."""
        if self.masks and self.spares:
            local = local.clone()
        for p in self.masks:
            if p.mask_buffer.data is None:
                raise LayoutError(f"{p!r}: its mask was used by an earlier redistribution; legal is one")
            p.mask_buffer.apply_mask(local)
            p.mask_buffer.release_mask()
        return local

    def prepare_shard(self, local: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard as the move takes it: contiguous, in the dtype of the messages."""
        given = local
        if local.dtype != self.travels:
            local = local.to(self.travels)
        if self.power is not None:
            local = local.pow(self.power) if local is given else local.pow_(self.power)
        if local.is_conj() or local.is_neg():  # bits of the view, which no message carries
            local = local.resolve_conj().resolve_neg()
        if not local.is_contiguous():
            local = local.contiguous()
        meta = self.source.tensor_meta
        return local if meta is None or meta.dtype == local.dtype else local.view(meta.dtype)

    @property
    def fresh(self) -> bool:
        """Whether the move makes a tensor, which may be written to; where nothing moves it gives the source itself."""
        return self.types is None or bool(self.reduced) or not same(*self.types)

    def finish_shard(self, moved: torch.Tensor) -> torch.Tensor:
        """Return the shard of the target, given what the move left on this rank."""
        fresh = self.fresh
        if moved.dtype != self.travels:
            moved = moved.view(self.travels)
        if self.power is not None:  # a copy, whether or not it moved
            moved, fresh = moved.pow_(1.0 / self.power), True
        for n in self.divisors:
            moved, fresh = moved.div_(n) if fresh else moved / n, True
        if self.blank is not None:
            moved = (moved if fresh else torch.empty_like(moved)).copy_(self.blank)
        if self.masking and self.target.mesh.get_coordinate() is not None:
            for k, p in self.masking:  # the mask goes into the buffer of the target's own placement
                moved = p._partition_value(moved, self.target.mesh, k)  # pyright: ignore[reportPrivateUsage]
        return moved if moved.dtype == self.result else moved.to(self.result)

    @property
    def remakes(self) -> bool:
        """Whether `after` makes a tensor of its own."""
        return (
            bool(self.masking)
            or self.result != self.travels
            or (not self.fresh and (bool(self.divisors) or self.partitions))
        )


def ranks_of(*meshes: DeviceMesh) -> tuple[int, ...]:
    """Return the ranks of some meshes, ascending."""
    return tuple(sorted({rank for mesh in meshes for rank in mesh_of(mesh).devices}))


def _check_kinds(placements: Sequence[Placement], dtype: torch.dtype) -> None:
    """Raise `LayoutError` for unknown placements, and for partial ones of several kinds; sums and averages are one."""
    for k, p in enumerate(placements):
        check_known(p, k)
    kinds = {(reduction_of(p, dtype), _power_of(p)) for p in placements if isinstance(p, Partial)}
    if len(kinds) > 1:
        raise LayoutError(f"{text_of(placements)} has partial placements of several kinds; legal is one kind")


def _power_of(p: Partial) -> float | None:
    return p.norm_type if isinstance(p, _NormPartial) else None


def _partition(
    begins: Mapping[int, Partial], target: DTensorSpec, dtype: torch.dtype
) -> tuple[list[float], torch.Tensor | None]:
    """Return by what a value is divided, and what replaces it on this rank, for it to become partial.

    DTensor divides for sums and norms, and leaves the value for averages, max and min. What does not divide (integers,
    products) is kept at coordinate 0 and is the identity of the reduction elsewhere.
    """
    divided = {k: p for k, p in begins.items() if p.reduce_op == "sum" and not _kept_once(p, dtype)}
    divisors: list[float] = [
        target.mesh.size(k) if (power := _power_of(p)) is None else math.pow(target.mesh.size(k), 1 / power)
        for k, p in divided.items()
    ]
    coordinate = target.mesh.get_coordinate()
    blank: torch.Tensor | None = None
    for k, p in begins.items():
        if _kept_once(p, dtype) and coordinate is not None and coordinate[k]:
            blank = identity_of(p.reduce_op, short_name_of(dtype))
    return divisors, blank


def _kept_once(p: Partial, dtype: torch.dtype) -> bool:
    """Whether a value that becomes partial is kept by one rank, the others taking the identity."""
    divides = dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1)
    return p.reduce_op not in ("avg", *IDEMPOTENT) and not (p.reduce_op == "sum" and divides)


def _dense(spec: DTensorSpec) -> bool:
    """Whether the tensor is said to be contiguous, dims of one element aside."""
    expected = 1
    for n, stride in zip(reversed(spec.shape), reversed(spec.stride), strict=True):
        if n != 1 and stride != expected:
            return 0 in spec.shape
        expected *= n
    return True
