"""The parameters of a live module by the names of a table: bound once, and looked after at every call.

They are those of `named_parameters()` and `named_buffers()`, never of `state_dict()`, which may return copies. Of a
DTensor the rank's own shard is bound.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardplan.errors import LayoutError, excerpt
from shardplan.execution.torch.dtypes import torch_dtype
from shardplan.movement.weights.binding import check_named
from shardplan.movement.weights.weights import Weights

_WRAPPED = "_orig_mod."  # what torch.compile puts in front of a module's names


@dataclass(frozen=True, slots=True, eq=False)
class BoundTensor:
    """A tensor of a module: who holds it under which key, itself, and where its memory was when it was bound."""

    holder: MutableMapping[str, Any]
    key: str
    tensor: torch.Tensor
    local: torch.Tensor
    place: int

    def stands(self) -> bool:
        """Whether the module still holds this tensor, in the memory that was bound."""
        return self.holder.get(self.key) is self.tensor and _shard(self.tensor).data_ptr() == self.place


class BoundTensors:
    """The tensors of one rank, in the order of `names(rank)`."""

    def __init__(self, weights: Weights, model: Any, rank: int, side: str) -> None:
        """Bind; raises `LayoutError` for every missing, additional or misshapen parameter at once, and wrong dtypes."""
        self.weights, self.model, self.rank, self.side = weights, model, rank, side
        self.held: list[BoundTensor] = []
        self.bind()

    @property
    def locals(self) -> list[torch.Tensor]:
        """The tensors themselves, detached, in order of the names."""
        return [b.local for b in self.held]

    def rebind_moved(self) -> bool:
        """Bind again where the module holds other tensors, or in other memory, than were bound; whether it did."""
        if all(b.stands() for b in self.held):
            return False
        self.bind()
        return True

    def bind(self) -> None:
        """Find every tensor; see `__init__`."""
        legal = self.weights.parameters(self.rank)
        found = _tensors_by_name(self.model, self.side)
        names = {name for name, _, _ in legal}
        known = {id(found[name][2]) for name in names if name in found}
        kept = {  # buffers that the table does not name, and other names of tied tensors, are none of its business
            name: entry for name, entry in found.items() if name in names or not (entry[3] or id(entry[2]) in known)
        }
        where = f"rank {self.rank} of {self.weights.table.name or 'the table'}, {self.side}"
        shards = {name: _shard(entry[2]) for name, entry in kept.items()}
        check_named(legal, shards, where, self.weights.table.recomputed)
        self.held = [_bind_tensor(name, kept[name], dtype, where) for name, _, dtype in legal]


def _bind_tensor(name: str, entry: Sequence[Any], dtype: str, where: str) -> BoundTensor:
    holder, key, tensor = entry[:3]
    local = _shard(tensor)
    if local.dtype != torch_dtype(dtype):
        raise LayoutError(f"{where}: {name} is {local.dtype}; legal is {torch_dtype(dtype)}, as the weights say")
    if local.layout is not torch.strided or not local.is_contiguous() or local.is_meta:
        raise LayoutError(
            f"{where}: {name} has strides {tuple(local.stride())}; legal is a contiguous tensor with memory"
        )
    return BoundTensor(holder, key, tensor, local, local.data_ptr())


def _shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return a rank's own shard of a DTensor, or the tensor, detached."""
    local = getattr(tensor, "_local_tensor", tensor)
    return local.detach()


def _tensors_by_name(model: Any, side: str) -> dict[str, tuple[MutableMapping[str, Any], str, torch.Tensor, bool]]:
    """Return by name: holder, key, tensor, and whether it may be left out (a buffer)."""
    if isinstance(model, torch.nn.Module):
        return _of_module(model, "")
    if isinstance(model, list | tuple):
        out: dict[str, Any] = {}
        for k, chunk in enumerate(model):
            if not isinstance(chunk, torch.nn.Module):
                raise LayoutError(
                    f"the {side} has {excerpt(chunk)} in its list; legal are modules, the chunks of a model"
                )
            out |= _of_module(chunk, f"{k}.")
        return out
    if isinstance(model, Mapping):
        wrong = [k for k, v in model.items() if not isinstance(v, torch.Tensor)]
        if not wrong:
            return {str(k): (model, k, v, False) for k, v in model.items()}  # pyright: ignore[reportReturnType]
        raise LayoutError(f"the {side} has {excerpt(model[wrong[0]])} as {wrong[0]}; legal are tensors by name")
    raise LayoutError(f"the {side} is {excerpt(model)}; legal is a module, a list of chunks, or tensors by name")


def _of_module(model: torch.nn.Module, prefix: str) -> dict[str, tuple[Any, str, torch.Tensor, bool]]:
    out: dict[str, tuple[Any, str, torch.Tensor, bool]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        start = prefix + (f"{path}." if path else "").replace(_WRAPPED, "")
        of: Any = module
        for holder, buffer in ((of._parameters, False), (of._buffers, True)):
            for key, tensor in holder.items():
                if tensor is not None:
                    out[start + key] = (holder, key, tensor, buffer)
    return out
