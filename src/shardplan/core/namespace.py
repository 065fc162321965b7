"""`Namespace`: what array libraries spell differently, as the functions that a compute op is written with.

Whatever numpy, torch and jax.numpy spell alike is used as it is: arithmetic, comparisons, slices, `reshape`, `shape`.
Dtypes are numpy's in all of them; a number of Python takes the dtype of the array beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardplan.core.contraction import contract
from shardplan.core.error_function import erf

Tensor = Any  # an array of the namespace
Dtype = np.dtype[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """The functions; of an outside library an instance is one call."""

    dtype: Callable[[Tensor], Dtype]
    astype: Callable[[Tensor, Dtype], Tensor]  # rounds once
    arange: Callable[[int], Tensor]  # 0, 1, ... as i32
    full: Callable[[tuple[int, ...], Any, Dtype], Tensor]
    broadcast_to: Callable[[Tensor, tuple[int, ...]], Tensor]
    concatenate: Callable[[list[Tensor], int], Tensor]  # along a dim
    where: Callable[[Tensor, Tensor, Tensor], Tensor]
    take: Callable[[Tensor, Tensor], Tensor]  # the rows (dim 0) of an array, at indices of any shape
    # So many rows of sums; of rows [n, ...], at indices [n], of which one past the last row is left out.
    scatter_add: Callable[[int, Tensor, Tensor], Tensor]
    einsum: Callable[..., Tensor]
    reduce: Callable[[str, Tensor, tuple[int, ...], bool, Any], Tensor]  # sum, max, min; dims, keep, what nothing gives
    maximum: Callable[[Tensor, Tensor], Tensor]
    minimum: Callable[[Tensor, Tensor], Tensor]
    exp: Callable[[Tensor], Tensor]
    log: Callable[[Tensor], Tensor]
    sqrt: Callable[[Tensor], Tensor]
    tanh: Callable[[Tensor], Tensor]
    erf: Callable[[Tensor], Tensor]
    sin: Callable[[Tensor], Tensor]
    cos: Callable[[Tensor], Tensor]
    eager: bool = False  # whether each call runs as it comes, and makes an array that can be written


def wide(dtype: Dtype) -> Dtype:
    """Return the dtype that sums of `dtype` are accumulated in: at least f32, i64, u64."""
    if dtype.kind in "iu":
        return np.dtype(np.int64 if dtype.kind == "i" else np.uint64)
    # ml_dtypes' formats (bf16, f8) are of kind V to numpy.
    return np.dtype(np.float32) if dtype.itemsize < 4 and dtype.kind in "fV" else dtype


def _scatter_add(rows: int, index: Tensor, values: Tensor) -> Tensor:
    out, kept = np.zeros((rows, *values.shape[1:]), values.dtype), index < rows
    np.add.at(out, *((index, values) if kept.all() else (index[kept], values[kept])))
    return out


def _reduce(reduction: str, x: Tensor, dims: tuple[int, ...], keep: bool, nothing: Any) -> Tensor:
    if reduction == "sum":
        return np.sum(x, axis=dims, keepdims=keep)
    reducer = np.maximum if reduction == "max" else np.minimum
    return reducer.reduce(x, axis=dims, keepdims=keep, initial=nothing)


NUMPY = Namespace(
    dtype=lambda x: x.dtype,
    astype=lambda x, dtype: x.astype(dtype, copy=False),
    arange=lambda n: np.arange(n, dtype=np.int32),
    full=np.full,
    broadcast_to=lambda x, shape: x if x.shape == shape else np.broadcast_to(x, shape),
    concatenate=np.concatenate,
    where=np.where,
    take=lambda x, index: x[index],
    scatter_add=_scatter_add,
    einsum=contract,
    reduce=_reduce,
    maximum=np.maximum,
    minimum=np.minimum,
    exp=np.exp,
    log=np.log,
    sqrt=np.sqrt,
    tanh=np.tanh,
    erf=erf,
    sin=np.sin,
    cos=np.cos,
    eager=True,
)
