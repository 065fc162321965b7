"""Elements as unsigned integers of the same bits: what a move carries where a dtype cannot travel as it is.

A sum of floats with zeros loses -0.0 and NaNs, some collectives do not know narrow floats, and a program has no name
for elements of less than 8 bits: those travel one in a byte.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
import ml_dtypes
import numpy as np
from jax import lax  # pyright: ignore[reportMissingImports]

from shardplan.core.dtypes import short_name
from shardplan.errors import LayoutError

_PLAIN = ("bool", "i8", "u8", "i16", "u16")  # narrow, and moved as they are
_WIDE = 4  # bytes of an element from which on XLA:CPU sends floats as they are


def carrier(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which a program moves elements: `dtype` where it has a name, else unsigned integers.

    >>> import ml_dtypes
    >>> [str(carrier(np.dtype(d))) for d in ("f4", ml_dtypes.int4, ml_dtypes.float8_e8m0fnu)]
    ['float32', 'uint8', 'uint8']
    """
    try:
        short_name(dtype)
    except LayoutError:
        if dtype.kind != "V":
            raise
        return np.dtype(f"u{dtype.itemsize}")
    return dtype


def to_bits(x: Any) -> Any:
    """Return an array's elements as unsigned integers; a complex one's two halves lie along a new first dim."""
    if x.dtype == bool:
        return x.astype(jnp.uint8)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([lax.real(x), lax.imag(x)])
    narrow = _bits_of(x.dtype)
    if narrow:
        return lax.bitcast_convert_type(x, _unsigned_dtype(narrow)).astype(jnp.uint8)
    return lax.bitcast_convert_type(x, np.dtype(f"u{x.dtype.itemsize}"))


def from_bits(bits: Any, dtype: np.dtype[Any]) -> Any:
    """Return the elements of `dtype` that `to_bits` made integers of."""
    if dtype.kind == "b":
        return bits.astype(bool)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        half = lax.bitcast_convert_type(bits, np.dtype(f"f{dtype.itemsize // 2}"))
        return lax.complex(half[0], half[1])
    narrow = _bits_of(dtype)
    if narrow:
        bits = bits.astype(_unsigned_dtype(narrow))
    return lax.bitcast_convert_type(bits, dtype)


def carry_bits(x: Any) -> Any:
    """Return what travels of an array: the bits of a narrow float, which XLA:CPU would send as a wider one."""
    return to_bits(x) if x.dtype.itemsize < _WIDE and short_name(x.dtype) not in _PLAIN else x


def restore_dtype(y: Any, dtype: np.dtype[Any]) -> Any:
    """Return the elements of `dtype` that `carry_bits` may have made integers of."""
    return y if y.dtype == dtype else from_bits(y, dtype)


def is_narrow(dtype: np.dtype[Any]) -> bool:
    """Return whether elements have less than 8 bits.

    >>> is_narrow(np.dtype(ml_dtypes.int4)), is_narrow(np.dtype("i1")), is_narrow(np.dtype(bool))
    (True, False, False)
    """
    return _bits_of(dtype) > 0


def _bits_of(dtype: np.dtype[Any]) -> int:
    """The bits of an element of less than 8, else 0; numpy knows bytes only."""
    if dtype.itemsize > 1 or dtype.kind == "b":
        return 0
    bits = (jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo)(dtype).bits
    return bits if bits < 8 else 0


def _unsigned_dtype(bits: int) -> Any:
    """The unsigned integers of a width that narrow elements have."""
    return {2: ml_dtypes.uint2, 4: ml_dtypes.uint4}[bits]
