"""What of an export depends on no input, parameter or trained buffer: torch evaluates it, as it would in a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from shardplan.core.dtypes import numpy_dtype, short_name
from shardplan.errors import optional
from shardplan.interop.importers.views import AtomView, ComplexPair

# What reads of a tensor its shape and dtype alone: the value it is filled with, or the place of it among the arguments.
_FILLS: Mapping[str, Callable[[list[Any]], Any]] = {
    "aten.ones_like.default": lambda args: 1,
    "aten.zeros_like.default": lambda args: 0,
    "aten.empty_like.default": lambda args: 0,
    "aten.full_like.default": lambda args: args[1],
    "aten.new_ones.default": lambda args: 1,
    "aten.new_zeros.default": lambda args: 0,
    "aten.new_empty.default": lambda args: 0,
    "aten.new_full.default": lambda args: args[2],
    "aten.ones.default": lambda args: 1,
    "aten.zeros.default": lambda args: 0,
    "aten.empty.memory_format": lambda args: 0,
    "aten.full.default": lambda args: args[1],
}  # fmt: skip


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor of torch that has its elements here."""
    return hasattr(value, "untyped_storage") and type(value).__name__ != "FakeTensor" and value.device.type != "meta"


def folds(node: Any, name: str, args: Any, kwargs: Any) -> bool:
    """Whether an operation depends on no input."""
    target = node.target
    if not hasattr(target, "_schema") or _nondeterministic(target):
        return False
    filled = name in _FILLS and not _is_given(_FILLS[name](args))
    return filled or not _mentions([args, list(kwargs.values())], _is_given)


def fold(node: Any, name: str, args: Any, kwargs: Any) -> Any:
    """What an operation on constants makes: tensors and numbers of torch."""
    torch: Any = optional("torch", "torch")
    fake = node.meta.get("val")
    if name in _FILLS and hasattr(fake, "shape"):
        value = _FILLS[name](args)
        value = value.item() if hasattr(value, "item") else value
        return torch.full((), value, dtype=fake.dtype).expand(tuple(int(n) for n in fake.shape))
    with torch.no_grad():
        return node.target(*map(_on_host, args), **{k: _on_host(v) for k, v in kwargs.items() if k != "pin_memory"})


def array_of(tensor: Any) -> np.ndarray[Any, Any]:
    """The elements of a tensor; those that are repeated lie once."""
    kind, tensor = numpy_dtype(short_name(str(tensor.dtype).removeprefix("torch."))), tensor.detach().resolve_conj()
    if kind.kind != "V":
        return tensor.cpu().numpy()
    torch: Any = optional("torch", "torch")
    return tensor.cpu().view(getattr(torch, f"int{8 * kind.itemsize}")).numpy().view(kind)


def _on_host(value: Any) -> Any:
    """An argument, on this machine's processor."""
    if type(value).__name__ == "device":
        torch: Any = optional("torch", "torch")
        return torch.device("cpu")
    return [_on_host(v) for v in value] if isinstance(value, list) else value


def _nondeterministic(target: Any) -> bool:
    return any("nondeterministic" in str(tag) for tag in target.tags)


def _is_given(value: Any) -> bool:
    return isinstance(value, AtomView | ComplexPair) or type(value).__name__ in ("FakeTensor", "GraphModule")


def _mentions(values: Any, of: Callable[[Any], bool]) -> bool:
    if isinstance(values, (list, tuple)) and not isinstance(values, AtomView | ComplexPair):
        return any(_mentions(v, of) for v in values)
    return of(values)


def mask_ids(indices: Sequence[Any]) -> list[Any]:
    """Ids, where a mask that is a constant says them."""
    found = list[Any]()
    for ids in indices:
        if ids is not None and is_tensor(ids) and array_of(ids).dtype == bool:
            found += ids.nonzero(as_tuple=True)
        else:
            found.append(ids)
    return found
