"""Element types, from the short name that types print to the numpy dtype that holds the data; reductions over them."""

from __future__ import annotations

import functools
import math
from typing import Any

import ml_dtypes
import numpy as np

from shardplan.errors import LayoutError, excerpt

_NUMPY: dict[str, Any] = {
    "bool": np.bool_,
    "i8": np.int8,
    "i16": np.int16,
    "i32": np.int32,
    "i64": np.int64,
    "u8": np.uint8,
    "u16": np.uint16,
    "u32": np.uint32,
    "u64": np.uint64,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "f32": np.float32,
    "f64": np.float64,
    "f8e4m3": ml_dtypes.float8_e4m3fn,
    "f8e5m2": ml_dtypes.float8_e5m2,
    "c64": np.complex64,
    "c128": np.complex128,
}
_ALIASES = {
    "bfloat16": "bf16",
    "float8_e4m3fn": "f8e4m3",
    "float8_e5m2": "f8e5m2",
    "s8": "i8",
    "s16": "i16",
    "s32": "i32",
    "s64": "i64",
    "pred": "bool",
} | {np.dtype(kind).name: name for name, kind in _NUMPY.items()}

NAMES = tuple(_NUMPY)

COMBINE: dict[str, Any] = {  # what a reduction makes of two addends
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "product": np.multiply,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
IDEMPOTENT = ("max", "min", "band", "bor")  # equal addends reduce to themselves
_DIGITS = 1e-10  # of a number that is written out, against the one that it stands for
_ROUNDED = 2.0**-22  # four roundings to f32
_EXACT = ("f64", "c128")


def short_name(dtype: Any) -> str:
    """Return the short name of `dtype`, which may be a short name, a numpy name, a numpy dtype or a scalar's class.

    Raises `LayoutError` naming the legal dtypes.
    """
    if isinstance(dtype, str):
        found = dtype if dtype in _NUMPY else _ALIASES.get(dtype)
    else:
        found = _name_of(dtype)
    if found is None:
        raise LayoutError(f"unknown dtype {excerpt(dtype)}; legal dtypes are {', '.join(NAMES)}")
    return found


def _name_of(dtype: object) -> str | None:
    """The short name of what numpy takes as a dtype; None is none here, though numpy reads it as f64."""
    # jax.numpy.float32 is an object with a dtype
    kind = dtype if isinstance(dtype, (np.dtype, type)) else getattr(dtype, "dtype", None)
    if not isinstance(kind, (np.dtype, type)) or kind is type(None):
        return None
    try:
        exact = np.dtype(kind)
    except (TypeError, ValueError):
        return None
    name = _ALIASES.get(exact.name)
    return name if name is not None and exact == numpy_dtype(name) else None  # another byte order is another dtype


@functools.cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype of a short name."""
    return np.dtype(_NUMPY[name])


@functools.cache
def itemsize(name: str) -> int:
    """Return the bytes of one element."""
    return numpy_dtype(name).itemsize


def stands_for(number: float, wanted: float, name: str) -> bool:
    """Say whether a number in a formula of a dtype is another one that is known: attention's scale, 1 of n, a root.

    In f64 it has at least ten digits right, as people write them out; in f32 and narrower floats it may have been
    rounded to f32, alone and as a product of a few. What is farther from it is a number of its own.

    >>> stands_for(0.7978845608, (2 / 3.141592653589793) ** 0.5, "f64"), stands_for(0.7978846, 0.7978845608, "f64")
    (True, False)
    >>> stands_for(0.7978846, 0.7978845608, "f32"), stands_for(0.7978843, 0.7978845608, "f32")
    (True, False)
    """
    return math.isclose(number, wanted, rel_tol=_DIGITS if name in _EXACT else _ROUNDED)


def reduces(reduction: str, name: str) -> bool:
    """Say whether a reduction is defined on a dtype: those of bits are on integers and bool only.

    >>> reduces("product", "f32"), reduces("bxor", "u8"), reduces("bor", "f32")
    (True, True, False)
    """
    return reduction not in ("band", "bor", "bxor") or numpy_dtype(name).kind in "biu"


def identity(reduction: str, dtype: np.dtype[Any]) -> Any:
    """Return the value that leaves a reduction of `COMBINE` unchanged, for a numpy dtype."""
    if reduction in ("sum", "bor", "bxor"):
        return dtype.type(0)
    if reduction == "product":
        return dtype.type(1)
    if reduction == "band":
        return np.invert(dtype.type(0))
    if dtype.kind == "b":
        return dtype.type(reduction == "min")
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return dtype.type(info.min if reduction == "max" else info.max)
    if dtype.name == "float8_e4m3fn":  # the one format without an infinity
        info = ml_dtypes.finfo(dtype)
        return dtype.type(info.min if reduction == "max" else info.max)
    return dtype.type(-np.inf if reduction == "max" else np.inf)
