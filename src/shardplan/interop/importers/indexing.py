"""What frameworks do at positions, with our ops: rows by ids along any dim, windows, padding, convolution, sums so far.

Each takes and returns views; none knows a framework. A window, a flip, a stride, a repetition is rows by constant ids;
an element by ids that are values is a product with where the ids are (`choose`), which any sharding types.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardplan.core.dtypes import numpy_dtype
from shardplan.core.ops import TopK
from shardplan.interop.importers import composites as ours
from shardplan.interop.importers.constant_value import write_constant
from shardplan.interop.importers.views import BROADCAST, AtomView, AxisFactor
from shardplan.interop.importers.writer import FlatWriter

MOST_SORTED = 1024  # elements along a dim that is sorted: each is compared with each

_Array = np.ndarray[Any, Any]


def take(w: FlatWriter, x: AtomView, dim: int, ids: AtomView) -> AtomView:
    """The elements of a dim at ids of any shape, whose dims stand in its place."""
    dim %= len(x.dims)
    if w.dtype(x) == "bool":
        return w.cast(take(w, w.cast(x, "i32"), dim, ids), "bool")
    order = [dim, *(d for d in range(len(x.dims)) if d != dim)]
    ids = w.materialize_view(ids)
    found = ours.gather_rows(w, x.permute_dims(order), ids)
    n = len(ids.dims)
    return found.permute_dims([*range(n, n + dim), *range(n), *range(n + dim, len(found.dims))])


def take_constant(w: FlatWriter, x: AtomView, dim: int, ids: _Array) -> AtomView:
    """The elements of a dim at ids that are known; neighbours are a part of it."""
    n = x.shape[dim]
    ids = np.where(ids < 0, ids + n, ids)
    if ids.ndim == 1 and len(ids) and np.array_equal(ids, np.arange(len(ids)) + ids[0]):
        return ours.part(w, x, dim, int(ids[0]), int(ids[-1]) + 1)
    return take(w, x, dim, write_constant(w, ids.astype(np.int64)))


def one_hot(w: FlatWriter, ids: AtomView, count: int, dtype: str) -> AtomView:
    """1 where a new last dim counts to the id, 0 elsewhere."""
    kind = w.dtype(ids) if numpy_dtype(w.dtype(ids)).kind in "iu" else "i64"
    hot = w.write_elementwise("where(a == b, 1, 0)", w.cast(ids, kind).with_one(-1), w.count(count, kind))
    return w.cast(hot, dtype)


def choose(w: FlatWriter, x: AtomView, dim: int, ids: AtomView) -> AtomView:
    """Of a dim the element at each id, where all other dims are those of the ids."""
    dim %= len(x.dims)
    for d, (n, m) in enumerate(zip(x.shape, ids.shape, strict=True)):
        if d != dim and n > m:
            x = ours.part(w, x, d, 0, m)
    kind = w.dtype(x)
    if kind == "bool":
        return w.cast(choose(w, w.cast(x, "i32"), dim, ids), "bool")
    names = [f"d{d}" for d in range(len(x.dims))]
    side = [*names[:dim], "v", *names[dim + 1 :]]
    return w.einsum([side, [*names, "v"]], names, x, one_hot(w, ids, x.shape[dim], kind))


def put(
    w: FlatWriter, x: AtomView, dim: int, ids: AtomView, values: AtomView | None, number: float, add: bool
) -> AtomView:
    """Put values, or one number, at ids along a dim; the other dims are those of the ids, or the first of them."""
    dim %= len(x.dims)
    kind, more = w.dtype(x), [n - m for n, m in zip(x.shape, ids.shape, strict=True)]
    if any(k and d != dim for d, k in enumerate(more)):
        raise NotImplementedError("of a part of the other dims")
    wide = "i32" if kind == "bool" else kind
    names = [f"d{d}" for d in range(len(x.dims))]
    out = [*names[:dim], "v", *names[dim + 1 :]]
    hot = one_hot(w, ids, x.shape[dim], wide)
    given = w.cast(values, wide) if values is not None else w.constant(number, wide, ids.shape)
    total = w.einsum([[*names, "v"], names], out, hot, w.materialize_view(given))
    if add:
        return w.write_elementwise("a + b", x, total)
    hits = w.reduce_view(hot.permute_dims([*(d for d in range(len(names)) if d != dim), dim, len(names)]), [-2], "max",
                         False)  # fmt: skip
    rest = list(range(len(names) - 1))
    hits = hits.permute_dims([*rest[:dim], len(rest), *rest[dim:]])
    chosen = w.write_elementwise("where(a, b, c)", w.cast(hits, "bool"), total, w.cast(x, wide))
    return w.cast(chosen, kind)


def put_part(w: FlatWriter, x: AtomView, values: AtomView, dim: int, start: int, stop: int) -> AtomView:
    """Values in the place of a part of a dim."""
    n = x.shape[dim]
    pieces = [ours.part(w, x, dim, 0, start)] if start else []
    pieces += [w.cast(values, w.dtype(x))] + ([ours.part(w, x, dim, stop, n)] if stop < n else [])
    return concatenate(w, pieces, dim)


def concatenate(w: FlatWriter, pieces: Sequence[AtomView], dim: int) -> AtomView:
    """After one another along a dim, bools too."""
    if w.dtype(pieces[0]) != "bool" or len(pieces) < 2:
        return ours.joined_along(w, pieces, dim)
    return w.cast(ours.joined_along(w, [w.cast(v, "i32") for v in pieces], dim), "bool")


def pad(w: FlatWriter, x: AtomView, widths: Sequence[tuple[int, int]], value: float = 0.0) -> AtomView:
    """So many elements of a value before and after each dim; fewer than none are taken away."""
    for dim, (before, after) in enumerate(widths):
        n = x.shape[dim]
        x = ours.part(w, x, dim, max(-before, 0), n - max(-after, 0))
        sides = [w.constant(value, w.dtype(x), [*x.shape[:dim], m, *x.shape[dim + 1 :]]) if m > 0 else None
                 for m in (before, after)]  # fmt: skip
        x = concatenate(w, [v for v in (sides[0], x, sides[1]) if v is not None], dim)
    return x


def windows(w: FlatWriter, x: AtomView, dim: int, size: int, stride: int, dilation: int = 1) -> AtomView:
    """Windows along a dim, which becomes two: how many, and their size."""
    n, reach = x.shape[dim], dilation * (size - 1) + 1
    many = (n - reach) // stride + 1
    if size == stride and dilation == 1:
        x = ours.part(w, x, dim, 0, many * size)
        return w.reshape_view(x, [*x.shape[:dim], many, size, *x.shape[dim + 1 :]])
    return take_constant(w, x, dim, np.arange(many)[:, None] * stride + np.arange(size) * dilation)


def spread(w: FlatWriter, x: AtomView, dim: int, stride: int) -> AtomView:
    """Zeros between the elements of a dim."""
    if stride == 1:
        return x
    x = x.with_one(dim + 1)
    x = pad(w, x, [(0, stride - 1) if d == dim + 1 else (0, 0) for d in range(len(x.dims))])
    shape = [*x.shape[:dim], x.shape[dim] * stride, *x.shape[dim + 2 :]]
    return ours.part(w, w.reshape_view(x, shape), dim, 0, shape[dim] - stride + 1)


def convolution(
    w: FlatWriter,
    x: AtomView,
    weight: AtomView,
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    groups: int,
) -> AtomView:
    """Products of windows of `[batch in ...]` with a weight `[out in/groups ...]`: one einsum over both."""
    n = len(x.dims) - 2
    if any(p != (0, 0) for p in padding):
        x = pad(w, x, [(0, 0), (0, 0), *padding])
    for k in range(n):
        x = windows(w, x, 2 + 2 * k, weight.shape[2 + k], stride[k], dilation[k])
    spots, taps = [f"s{k}" for k in range(n)], [f"k{k}" for k in range(n)]
    between = [name for pair in zip(spots, taps, strict=True) for name in pair]
    if groups == 1:
        return w.einsum([["b", "i", *between], ["o", "i", *taps]], ["b", "o", *spots], x, weight)
    x = w.reshape_view(x, [x.shape[0], groups, x.shape[1] // groups, *x.shape[2:]])
    weight = w.reshape_view(weight, [groups, weight.shape[0] // groups, *weight.shape[1:]])
    y = w.einsum([["b", "g", "i", *between], ["g", "o", "i", *taps]], ["b", "g", "o", *spots], x, weight)
    return w.reshape_view(y, [y.shape[0], y.shape[1] * y.shape[2], *y.shape[3:]])


def flip(w: FlatWriter, x: AtomView, dims: Sequence[int]) -> AtomView:
    """The other way round along some dims."""
    for d in dims:
        x = take_constant(w, x, d % len(x.dims), np.arange(x.shape[d])[::-1])
    return x


def cumulate(w: FlatWriter, x: AtomView, dim: int, *, back: bool = False) -> AtomView:
    """Sums up to each element of a dim, or from it on: a product with a triangle; a dim that is cut types, too."""
    dim %= len(x.dims)
    n, kind = x.shape[dim], w.dtype(x)
    triangle = write_constant(w, np.tri(n, dtype=bool) if back else np.tri(n, dtype=bool).T)
    names = [f"d{d}" for d in range(len(x.dims))]
    out = [*names[:dim], "n", *names[dim + 1 :]]
    return w.einsum([names, [names[dim], "n"]], out, x, w.materialize_view(w.cast(triangle, kind)))


def top(w: FlatWriter, x: AtomView, k: int, dim: int, *, largest: bool = True) -> tuple[AtomView, AtomView]:
    """The k largest, or smallest, of a dim in their order, and their positions in i64."""
    if not x.dims:
        return x, w.constant(0, "i64")
    if k > MOST_SORTED:
        raise NotImplementedError(f"{k} elements in their order; legal are up to {MOST_SORTED}")
    dim %= len(x.dims)
    kind = w.dtype(x)
    if numpy_dtype(kind).kind not in "fV":
        x = w.cast(x, "f64")  # whole numbers below 2**53
    x = x if largest else w.write_elementwise("-a", x)
    order = [*(d for d in range(len(x.dims)) if d != dim), dim]
    name = w.materialize_groups(x, [x.permute_dims(order).dims[d] for d in range(len(order))])
    values, places = (w.view_value(v) for v in w.builder.write_step(TopK(k), name))
    back = [*range(dim), len(order) - 1, *range(dim, len(order) - 1)]
    values = values if largest else w.write_elementwise("-a", values)
    return w.cast(values, kind).permute_dims(back), w.cast(places, "i64").permute_dims(back)


def repeat(w: FlatWriter, x: AtomView, dim: int, times: int) -> AtomView:
    """Every element of a dim so often, one after another."""
    dim %= len(x.dims)
    return AtomView(x.name, (*x.dims[:dim], (*x.dims[dim], AxisFactor(times, BROADCAST)), *x.dims[dim + 1 :]))


def variance(w: FlatWriter, x: AtomView, dims: Sequence[int], less: float, keep: bool) -> tuple[AtomView, AtomView]:
    """The variance along some dims, of so many elements less, and the mean."""
    n = math.prod(x.shape[d] for d in dims)
    mean = w.reduce_view(x, dims, "mean", True)
    apart = w.write_elementwise("a - b", x, mean)
    found = w.reduce_view(w.write_elementwise("a * a", apart), dims, "mean", keep)
    if less:
        found = w.write_elementwise(f"a * {n / max(n - less, 1e-300)}", found)
    return found, mean if keep else mean.squeeze_dims(dims)
