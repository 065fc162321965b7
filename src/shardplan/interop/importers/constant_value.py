"""A constant of a source, written as what its value says: a number, a count along a dim, a band of a matrix, an array.

What made it does not matter, so a causal mask is one whether it was counted, compared or cut; and nothing as large as
a mask is kept where its value can be said.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shardplan.core.dtypes import short_name
from shardplan.interop.importers.call import number
from shardplan.interop.importers.views import AtomView, Group
from shardplan.interop.importers.writer import FlatWriter

_Array = np.ndarray[Any, Any]


def write_constant(w: FlatWriter, array: _Array) -> AtomView:
    """Write an array; dims along which it is the same are repeated, and no elements of ours."""
    dtype = short_name(array.dtype)
    if not array.size:
        return w.empty(dtype, array.shape)
    small = _distinct_part(array)
    large = [d for d, n in enumerate(small.shape) if n > 1]
    core = small.reshape([small.shape[d] for d in large])
    if not large:
        return w.constant(core.item(), dtype, array.shape)
    said = (
        _arithmetic_row(w, core, dtype)
        if len(large) == 1
        else _band_matrix(w, core, dtype)
        if len(large) == 2
        else None
    )
    held = said or w.declare_constant(np.ascontiguousarray(core))
    dims: list[Group] = [()] * array.ndim
    for d, group in zip(large, held.dims, strict=True):
        dims[d] = group
    return AtomView(held.name, tuple(dims)).broadcast_dims(array.shape)


def _distinct_part(array: _Array) -> _Array:
    """An array of size 1 along the dims in which it does not change."""
    for d in range(array.ndim):
        first = array[(*(slice(None),) * d, slice(0, 1))]
        if array.shape[d] > 1 and (array.strides[d] == 0 or np.array_equal(array, np.broadcast_to(first, array.shape))):
            array = first
    return array


def _arithmetic_row(w: FlatWriter, array: _Array, dtype: str) -> AtomView | None:
    """Whole numbers with one step between them."""
    if array.dtype.kind not in "iuf" or (array.dtype.kind == "f" and not np.array_equal(array, np.trunc(array))):
        return None
    start, step = array[0].item(), array[1].item() - array[0].item()
    if abs(start) + abs(step) * len(array) >= 2 ** (24 if array.dtype.itemsize > 2 else 8):
        return None
    if not np.array_equal(array, start + step * np.arange(len(array))):
        return None
    count = w.count(len(array), dtype)
    return count if (start, step) == (0, 1) else w.write_elementwise(
        f"a * {number(step, dtype)} + {number(start, dtype)}", count
    )  # fmt: skip


def _band_matrix(w: FlatWriter, array: _Array, dtype: str) -> AtomView | None:
    """One value on some neighbouring diagonals of a matrix, another one elsewhere."""
    inside = array == array[-1, 0]
    values = (array[-1, 0].item(), array[~inside][0].item())
    if array.dtype.kind == "c" or not (inside | (array == values[1])).all():
        return None
    rows, columns = array.shape
    diagonal = np.arange(columns) - np.arange(rows)[:, None]
    for within, pair in ((inside, values), (~inside, values[::-1])):  # noqa: B007 - read below
        low, high = int(diagonal[within].min()), int(diagonal[within].max())
        if np.array_equal(within, (diagonal >= low) & (diagonal <= high)):
            break
    else:
        return None
    text = f"where(b - a <= {high}, 1, 0)" if high < columns - 1 else "1 + 0 * (a + b)"
    text = f"where(b - a >= {low}, {text}, 0)" if low > 1 - rows else text
    row, column = (w.count(n, "i32") for n in (rows, columns))
    mask = w.cast(w.write_elementwise(text, row.with_one(1), column), "bool")
    if dtype == "bool":
        return mask if pair[0] else w.cast(w.write_elementwise("1 - a", w.cast(mask, "i32")), "bool")
    yes, no = (w.constant(v, dtype) for v in pair)
    return w.write_elementwise("where(a, b, c)", mask, yes, no)
