"""Element types between numpy and torch, and the reductions that torch itself lacks on some of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shardplan.core.dtypes import COMBINE, identity, numpy_dtype, short_name
from shardplan.errors import BackendError

_TORCH = {
    "bool": torch.bool,
    "i8": torch.int8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "u8": torch.uint8,
    "u16": torch.uint16,
    "u32": torch.uint32,
    "u64": torch.uint64,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
    "f8e4m3": torch.float8_e4m3fn,
    "f8e5m2": torch.float8_e5m2,
    "c64": torch.complex64,
    "c128": torch.complex128,
}
# Moved as the integers of their width: nothing here, and no op of torch, adds or orders them.
_CARRIERS = {
    torch.float8_e8m0fnu: torch.uint8,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
    torch.float4_e2m1fn_x2: torch.uint8,
    torch.complex32: torch.int32,
}
_NAMES = {dtype: name for name, dtype in _TORCH.items()}
_COMBINE: dict[str, Any] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes: what numpy can look into
# torch adds and orders these not at all, so numpy does it, on the host.
FOREIGN = {torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2}


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a short name.

    >>> torch_dtype("bf16")
    torch.bfloat16
    """
    return _TORCH[name]


def short_name_of(dtype: torch.dtype) -> str:
    """Return the short name of a torch dtype; raises `BackendError` for one that shardplan does not know."""
    found = _NAMES.get(dtype)
    if found is None:
        raise BackendError(f"dtype {dtype} has no name here; legal are {', '.join(map(str, _NAMES))}")
    return found


def carrier_of(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype as which tensors are moved where nothing is reduced: their own, or an integer of its width.

    >>> carrier_of(torch.float32), carrier_of(torch.float4_e2m1fn_x2)
    (torch.float32, torch.uint8)
    """
    return _CARRIERS.get(dtype, dtype)


def to_torch(array: np.ndarray) -> torch.Tensor:
    """Return a tensor that shares the memory of an array of any of our dtypes (a copy if it is read-only)."""
    array = np.ascontiguousarray(array).reshape(array.shape)
    if not array.flags.writeable:
        array = array.copy()
    name = short_name(array.dtype)
    size = array.dtype.itemsize
    bits = array.view(np.dtype(f"i{size}")) if array.dtype.kind not in "c" else array
    return torch.from_numpy(bits).view(_TORCH[name])


def to_numpy(x: torch.Tensor) -> np.ndarray:
    """Return the values of a tensor as an array of our dtype; it shares the memory of a tensor on the host."""
    x = x.detach().cpu()
    dtype = numpy_dtype(short_name_of(x.dtype))
    if x.dtype.is_complex:
        return x.numpy()
    return x.view(_INTEGERS[x.itemsize]).numpy().view(dtype)


def fold(total: torch.Tensor, addend: torch.Tensor, reduction: str) -> None:
    """Reduce `addend` into `total`, in the dtype of both, as the reference does."""
    if total.dtype not in FOREIGN:
        _COMBINE[reduction](total, addend, out=total)
        return
    a, b = to_numpy(total), to_numpy(addend)
    result = COMBINE[reduction](a, b).astype(a.dtype)
    if total.device.type == "cpu":  # where `a` shares the memory of `total`
        a[...] = result
    else:
        total.copy_(to_torch(result).to(total.device))


def identity_of(reduction: str, name: str) -> torch.Tensor:
    """Return the identity of a reduction as a tensor without dims."""
    return to_torch(np.array(identity(reduction, numpy_dtype(name))))
