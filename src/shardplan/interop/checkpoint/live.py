"""A live side: the tensors of one rank, a module's or by name, read as those of a checkpoint are.

A module's are those of `named_parameters()` and `named_buffers()`, never of `state_dict()`, which may return copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardplan.core.dtypes import numpy_dtype
from shardplan.errors import LayoutError, excerpt, optional
from shardplan.interop.checkpoint.gather import StoredTensor
from shardplan.interop.checkpoint.sources import OpenCheckpoint
from shardplan.movement.weights.binding import check_named
from shardplan.movement.weights.weights import Weights


@dataclass(frozen=True, slots=True, eq=False)
class LiveTensor:
    """A tensor in memory, of numpy or of torch: flat elements in C order, which are read as they are now."""

    flat: Any
    shape: tuple[int, ...]
    dtype_name: str

    @property
    def dtype(self) -> np.dtype[Any]:
        """Its dtype."""
        return numpy_dtype(self.dtype_name)

    def read_into(self, target: memoryview, start: int) -> None:
        """Fill bytes from the element `start` on."""
        part = self.flat[start : start + len(target) // self.dtype.itemsize]
        if not isinstance(part, np.ndarray):
            torch = optional("torch", "torch")
            part = part.view(torch.uint8).cpu().numpy()
        target[:] = memoryview(part.view(np.uint8))  # pyright: ignore


class LiveSide(OpenCheckpoint):
    """One rank of a side, in memory; the other ranks are elsewhere."""

    def check(self, weights: Weights, ignored: Sequence[str] = ()) -> None:
        """Do nothing: it was checked when it was bound."""


def live_side(model: Any, weights: Weights, rank: int) -> LiveSide:
    """Return the live tensors of a rank.

    Args:
        model: a `torch.nn.Module`, a list of them (the chunks of a model), or tensors by name, of torch or of numpy.
        weights: how the side stores the model.
        rank: the device that the tensors are of.

    Raises:
        LayoutError: tensors that are missing, additional, misshapen, or of another dtype or strides than weights say.
        MissingExtra: tensors of torch, without torch.
    """
    legal = weights.parameters(rank)
    held: Any = model
    if isinstance(model, Mapping) and all(isinstance(x, np.ndarray) for x in held.values()):
        where = f"rank {rank} of {weights.table.name or 'the table'}, live"
        found = _of_numpy(held, legal, where, weights.table.recomputed)
    else:
        tensors: Any = optional("shardplan.interop.torch.refit.tensors", "torch")
        bound = tensors.BoundTensors(weights, model, rank, "live").locals
        found = [x.reshape(-1) for x in bound]
    tensors_of_rank: dict[str, StoredTensor] = {
        name: LiveTensor(flat, shape, dtype) for flat, (name, shape, dtype) in zip(found, legal, strict=True)
    }
    empty: dict[str, StoredTensor] = {}
    places = [tensors_of_rank if device == rank else empty for device in weights.devices]
    return LiveSide(Path("live"), "live", places, [])


def _of_numpy(
    held: Mapping[str, np.ndarray], legal: list[tuple[str, tuple[int, ...], str]], where: str, spare: Sequence[str]
) -> list[Any]:
    check_named(legal, held, where, spare)
    for name, _, dtype in legal:
        if held[name].dtype != numpy_dtype(dtype):
            raise LayoutError(f"{where}: {name} is {held[name].dtype}; legal is {dtype}, as the weights say")
        if not held[name].flags.c_contiguous:
            raise LayoutError(f"{where}: {name} has strides {held[name].strides}; legal is a contiguous array")
    return [held[name].reshape(-1) for name, _, _ in legal]


def live_rank(weights: Weights | None, rank: int | None) -> tuple[Weights, int]:
    """Return the weights and the rank of a live side; raises `LayoutError` where they are not said."""
    if weights is None:
        raise LayoutError("a live model without its weights, which say how it is stored; legal is weights= or other=")
    if rank is None:
        if len(weights.devices) > 1:
            raise LayoutError(f"a live model of {len(weights.devices)} devices without rank=; legal is one of them")
        return weights, min(weights.devices)
    if rank not in weights.devices:
        raise LayoutError(f"rank = {excerpt(rank)} is not one of the live side; legal are its devices")
    return weights, rank
