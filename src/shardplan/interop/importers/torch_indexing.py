"""What torch does at positions, in ours: rows, windows, orders, sums so far, convolutions; a part of torch's table.

`RAW` are those that look at ids which are constants: the tensors of torch themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardplan.interop.importers import composites as ours
from shardplan.interop.importers import indexing as at
from shardplan.interop.importers.call import Handler, Operation
from shardplan.interop.importers.constant_value import write_constant
from shardplan.interop.importers.torch_constants import array_of, is_tensor, mask_ids
from shardplan.interop.importers.views import AtomView, Group


def _ids(c: Operation, ids: Any, n: int) -> AtomView:
    """Ids from 0 on; below it they count from the end."""
    if is_tensor(ids):
        held = array_of(ids)
        if held.dtype == bool:
            raise NotImplementedError("by a mask")
        return write_constant(c.w, np.where(held < 0, held + n, held).astype(np.int64))
    if c.w.dtype(ids) == "bool":
        raise NotImplementedError("by a mask that is no constant: how many elements it has is not known")
    kind = c.w.dtype(ids)
    return c.w.write_elementwise(f"where(a < 0, a + {n}, a)", ids) if kind[0] == "i" else ids


def _view(c: Operation, x: Any) -> Any:
    return write_constant(c.w, array_of(x)) if is_tensor(x) else x


def _flat_ids(c: Operation, x: AtomView, indices: Sequence[Any]) -> tuple[AtomView, list[int], AtomView]:
    """A value whose indexed dims are one, before all others; these dims; and the ids in it."""
    indices = mask_ids(indices)
    dims = [d for d, ids in enumerate(indices) if ids is not None]
    rest = [d for d in range(len(x.dims)) if d not in dims]
    views = [c.w.cast(_ids(c, indices[d], x.shape[d]), "i64") for d in dims]
    flat = views[0]
    for d, ids in zip(dims[1:], views[1:], strict=True):
        flat = c.w.write_elementwise(f"a * {x.shape[d]} + b", flat, ids)
    moved = x.permute_dims([*dims, *rest])
    if len(dims) > 1:
        moved = c.w.reshape_view(moved, [math.prod(x.shape[d] for d in dims), *(x.shape[d] for d in rest)])
    return moved, dims, flat


def _index(c: Operation, x: Any, indices: Sequence[Any]) -> AtomView:
    x = _view(c, x)
    moved, dims, flat = _flat_ids(c, x, indices)
    found = at.take(c.w, moved, 0, flat)
    if dims == list(range(dims[0], dims[0] + len(dims))):  # ids side by side: their dims stand where they stood
        n = len(flat.dims)
        found = found.permute_dims([*range(n, n + dims[0]), *range(n), *range(n + dims[0], len(found.dims))])
    return found


def _index_put(c: Operation, x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> AtomView:
    x, values = _view(c, x), _view(c, values)
    moved, dims, flat = _flat_ids(c, x, indices)
    rest = moved.shape[1:]
    count = math.prod(flat.shape)
    values = c.w.reshape_view(c.w.materialize_view(values.broadcast_dims([*flat.shape, *rest])), [count, *rest])
    ids = c.w.reshape_view(flat, [count])
    ids = AtomView(ids.name, (*ids.dims, *((),) * len(rest))).broadcast_dims([count, *rest])
    found = at.put(c.w, moved, 0, c.w.materialize_view(ids), values, 0.0, accumulate)
    order = [*dims, *(d for d in range(len(x.dims)) if d not in dims)]
    found = c.w.reshape_view(found, [x.shape[d] for d in order])
    return found.permute_dims([order.index(d) for d in range(len(order))])


def _index_select(c: Operation, x: Any, dim: int, ids: Any) -> AtomView:
    x = _view(c, x)
    if is_tensor(ids):
        return at.take_constant(c.w, x, dim, array_of(ids).reshape(-1))
    return at.take(c.w, x, dim, _ids(c, ids, x.shape[dim]))


def _gather(c: Operation, x: Any, dim: int, ids: Any, sparse_grad: bool = False) -> AtomView:
    x = _view(c, x)
    return at.choose(c.w, x, dim, _ids(c, ids, x.shape[dim]))


def _scatter_handler(*, add: bool) -> Handler:
    def handler(c: Operation, x: Any, dim: int, ids: Any, values: Any) -> AtomView:
        x = _view(c, x)
        values = _view(c, values)
        given, number = (values, 0.0) if isinstance(values, AtomView) else (None, values)
        return at.put(c.w, x, dim, _ids(c, ids, x.shape[dim]), given, number, add)

    return handler


def _index_add(c: Operation, x: Any, dim: int, ids: Any, values: Any, alpha: Any = 1) -> AtomView:
    x, values = _view(c, x), _view(c, values)
    if alpha != 1:
        raise NotImplementedError("with a factor")
    view = _ids(c, ids, x.shape[dim])
    dims: list[Group] = [()] * len(x.dims)
    dims[dim] = view.dims[0]
    return at.put(c.w, x, dim, AtomView(view.name, tuple(dims)).broadcast_dims(values.shape), values, 0.0, True)


def _slice(c: Operation, x: AtomView, dim: int = 0, start: Any = None, stop: Any = None, step: int = 1) -> AtomView:
    dim %= len(x.dims)
    first, last = _ends(x.shape[dim], start, stop)
    if step == 1:
        return ours.part(c.w, x, dim, first, last)
    n = x.shape[dim]
    if first < step and last == n and not n % step:
        split = c.w.reshape_view(x, [*x.shape[:dim], n // step, step, *x.shape[dim + 1 :]])
        return ours.part(c.w, split, dim + 1, first, first + 1).squeeze_dims([dim + 1])
    return at.take_constant(c.w, x, dim, np.arange(first, last, step))


def _ends(n: int, start: Any, stop: Any) -> tuple[int, int]:
    first = 0 if start is None else max(start + n, 0) if start < 0 else min(start, n)
    return first, n if stop is None else stop + n if stop < 0 else min(stop, n)


def _slice_scatter(c: Operation, x: AtomView, values: AtomView, dim: int = 0, start: Any = None, stop: Any = None,
                   step: int = 1) -> AtomView:  # fmt: skip
    dim %= len(x.dims)
    first, last = _ends(x.shape[dim], start, stop)
    if step == 1:
        return at.put_part(c.w, x, values, dim, first, last)
    ids = write_constant(c.w, np.arange(first, last, step))
    dims: list[Group] = [()] * len(x.dims)
    dims[dim] = ids.dims[0]
    return at.put(c.w, x, dim, AtomView(ids.name, tuple(dims)).broadcast_dims(values.shape), values, 0.0, False)


def _select_scatter(c: Operation, x: AtomView, values: AtomView, dim: int, place: int) -> AtomView:
    dim, place = dim % len(x.dims), place % x.shape[dim]
    return at.put_part(c.w, x, values.with_one(dim), dim, place, place + 1)


def _pad(c: Operation, x: AtomView, widths: Sequence[int], value: float = 0.0) -> AtomView:
    pairs = [(widths[k], widths[k + 1]) for k in range(0, len(widths), 2)]
    every = [(0, 0)] * (len(x.dims) - len(pairs)) + pairs[::-1]
    return at.pad(c.w, x, every, value)


def _padded_by(ids: Any) -> Handler:
    """Padding with elements that are there: their ids, of so many before and after and a size."""

    def handler(c: Operation, x: AtomView, widths: Sequence[int]) -> AtomView:
        for k in range(0, len(widths), 2):
            d = len(x.dims) - 1 - k // 2
            x = at.take_constant(c.w, x, d, ids(widths[k], widths[k + 1], x.shape[d]))
        return x

    return handler


def _reflected_ids(before: int, after: int, n: int) -> Any:
    ids = np.abs(np.arange(-before, n + after))
    return np.where(ids >= n, 2 * (n - 1) - ids, ids)


def _replicated_ids(before: int, after: int, n: int) -> Any:
    return np.clip(np.arange(-before, n + after), 0, n - 1)


def _one_per_dim(values: Any, n: int) -> list[int]:
    held = [values] if isinstance(values, int) else list(values)
    return held * n if len(held) == 1 else held


def _convolution(c: Operation, x: AtomView, weight: AtomView, bias: Any, stride: Any, padding: Any, dilation: Any,
                 transposed: bool, more: Any, groups: int) -> AtomView:  # fmt: skip
    n = len(x.dims) - 2
    stride, padding, dilation, more = (_one_per_dim(v, n) for v in (stride, padding, dilation, more))
    pairs = [(p, p) for p in padding]
    if transposed:  # the same with zeros between elements, and the weight the other way round
        spatial = range(2, n + 2)
        for k in range(n):
            x = at.spread(c.w, x, 2 + k, stride[k])
            reach = dilation[k] * (weight.shape[2 + k] - 1)
            pairs[k] = (reach - padding[k], reach - padding[k] + more[k])
        weight, stride = at.flip(c.w, weight, spatial), [1] * n
        if groups > 1:
            i, o = weight.shape[:2]
            weight = c.w.reshape_view(weight, [groups, i // groups, o, *weight.shape[2:]])
            weight = weight.transpose_dims(1, 2)
            weight = c.w.reshape_view(weight, [groups * o, i // groups, *weight.shape[3:]])
        else:
            weight = weight.transpose_dims(0, 1)
    y = at.convolution(c.w, x, weight, stride, pairs, dilation, groups)
    return y if bias is None else c.w.write_elementwise("a + b", y, AtomView(bias.name, (*bias.dims, *((),) * n)))


def _pool_windows(c: Operation, x: AtomView, n: int, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool,
                  fill: float) -> tuple[AtomView, list[int]]:  # fmt: skip
    kernel = _one_per_dim(kernel, n)
    stride, padding, dilation = (_one_per_dim(v, n) for v in (stride or kernel, padding, dilation))
    lead = len(x.dims) - n
    if ceil:
        raise NotImplementedError("with sizes that are rounded up")
    if any(padding):
        x = at.pad(c.w, x, [*[(0, 0)] * lead, *((p, p) for p in padding)], fill)
    for k in range(n):
        x = at.windows(c.w, x, lead + 2 * k, kernel[k], stride[k], dilation[k])
    return x, [lead + 2 * k + 1 for k in range(n)]


def _max_pool_handler(n: int) -> Handler:
    def handler(c: Operation, x: AtomView, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1,
                ceil: bool = False) -> AtomView:  # fmt: skip
        x, dims = _pool_windows(c, x, n, kernel, stride, padding, dilation, ceil, -math.inf)
        return c.w.reduce_view(x, dims, "max", False)

    return handler


def _average_pool_handler(n: int) -> Handler:
    def handler(c: Operation, x: AtomView, kernel: Any, stride: Any = (), padding: Any = 0, ceil: bool = False,
                count_padding: bool = True, divisor: Any = None) -> AtomView:  # fmt: skip
        if divisor is not None or (any(_one_per_dim(padding, n)) and not count_padding):
            raise NotImplementedError("by another number than that of a window's elements")
        x, dims = _pool_windows(c, x, n, kernel, stride, padding, 1, ceil, 0.0)
        return c.w.reduce_view(x, dims, "mean", False)

    return handler


def _top(
    c: Operation, x: AtomView, k: int, dim: int = -1, largest: bool = True, ordered: bool = True
) -> list[AtomView]:
    return list(at.top(c.w, x, k, dim, largest=largest))


def _sort(c: Operation, x: AtomView, dim: int = -1, descending: bool = False) -> list[AtomView]:
    return list(at.top(c.w, x, x.shape[dim] if x.dims else 1, dim, largest=descending))


def _sort_stable(
    c: Operation, x: AtomView, stable: Any = None, dim: int = -1, descending: bool = False
) -> list[AtomView]:
    return _sort(c, x, dim, descending)


def _argsort(c: Operation, x: AtomView, dim: int = -1, descending: bool = False, **_: Any) -> AtomView:
    return _sort(c, x, dim, descending)[1]


def _best_handler(kind: str) -> Handler:
    def handler(c: Operation, x: AtomView, dim: int, keep: bool = False) -> list[AtomView]:
        values, places = at.top(c.w, x, 1, dim, largest=kind == "max")
        values = c.w.reduce_view(x, [dim], kind, True) if x.dims else values
        return [v if keep else v.squeeze_dims([dim]) for v in (values, places)]

    return handler


def _arg_handler(kind: str) -> Handler:
    def handler(c: Operation, x: AtomView, dim: Any = None, keep: bool = False) -> AtomView:
        if dim is None:
            x, dim = c.w.reshape_view(x, [x.size]), 0
        return _best_handler(kind)(c, x, dim, keep)[1]

    return handler


def _cumulate(c: Operation, x: AtomView, dim: int, dtype: Any = None) -> AtomView:
    return at.cumulate(c.w, c.w.cast(x, c.dtype), dim) if x.dims else x


def _product(c: Operation, x: AtomView, dim: Any = None, keep: bool = False, dtype: Any = None) -> AtomView:
    x = c.w.cast(x, c.dtype)
    if dim is None:
        x, dim = c.w.reshape_view(x, [x.size]), 0
    return _products(c, x, dim)[-1] if keep else _products(c, x, dim)[-1].squeeze_dims([dim])


def _products(c: Operation, x: AtomView, dim: int) -> list[AtomView]:
    n = x.shape[dim]
    if n > at.MOST_SORTED:
        raise NotImplementedError(f"of {n} elements; legal are up to {at.MOST_SORTED}")
    found = [ours.part(c.w, x, dim, 0, 1)]
    for k in range(1, n):
        found.append(c.w.write_elementwise("a * b", found[-1], ours.part(c.w, x, dim, k, k + 1)))
    return found


def _cumulate_product(c: Operation, x: AtomView, dim: int, dtype: Any = None) -> AtomView:
    return at.concatenate(c.w, _products(c, c.w.cast(x, c.dtype), dim), dim)


def _repeat_interleave(c: Operation, x: AtomView, times: Any, dim: Any = None, output_size: Any = None) -> AtomView:
    if not isinstance(times, int):
        raise NotImplementedError("with a number for each element")
    x, dim = (c.w.reshape_view(x, [x.size]), 0) if dim is None else (x, dim)
    return at.repeat(c.w, x, dim, times)


def _roll(c: Operation, x: AtomView, shifts: Any, dims: Any = ()) -> AtomView:
    if not dims:
        flat = c.w.reshape_view(x, [x.size])
        return c.w.reshape_view(_roll(c, flat, shifts, [0]), x.shape)
    for shift, d in zip(_one_per_dim(shifts, 1), _one_per_dim(dims, 1), strict=True):
        n = x.shape[d]
        cut = -shift % n
        x = at.concatenate(c.w, [ours.part(c.w, x, d, cut, n), ours.part(c.w, x, d, 0, cut)] if cut else [x], d)
    return x


def _diagonal(c: Operation, x: AtomView, offset: int = 0, a: int = 0, b: int = 1) -> AtomView:
    ndim = len(x.dims)
    a, b = a % ndim, b % ndim
    rows, columns = x.shape[a], x.shape[b]
    many = c.shape[-1]
    x = x.permute_dims([*(d for d in range(ndim) if d not in (a, b)), a, b])
    x = c.w.reshape_view(x, [*x.shape[:-2], rows * columns])
    first = offset if offset >= 0 else -offset * columns
    return at.take_constant(c.w, x, len(x.dims) - 1, first + np.arange(many) * (columns + 1))


def _unfold(c: Operation, x: AtomView, dim: int, size: int, step: int) -> AtomView:
    dim %= len(x.dims)
    found = at.windows(c.w, x, dim, size, step)
    return found.permute_dims([*(d for d in range(len(found.dims)) if d != dim + 1), dim + 1])


def _bags(c: Operation, table: Any, ids: Any, offsets: Any, scale: bool = False, mode: int = 0, sparse: bool = False,
          weights: Any = None, last: bool = False, padding: Any = None) -> list[Any]:  # fmt: skip
    if not is_tensor(offsets) or padding not in (None, -1):
        raise NotImplementedError("with bags that are no constants, or padding")
    view = _view(c, ids)
    ends = [*array_of(offsets).tolist()][: -1 if last else None]
    n = view.shape[0] // max(len(ends), 1)
    if [k * n for k in range(len(ends))] != ends or n * len(ends) != view.shape[0]:
        raise NotImplementedError("with bags of several sizes")
    found = ours.gather_rows(c.w, _view(c, table), c.w.materialize_view(c.w.reshape_view(view, [len(ends), n])))
    if weights is not None:
        found = c.w.write_elementwise("a * b", found, c.w.reshape_view(_view(c, weights), [len(ends), n, 1]))
    return [c.w.reduce_view(found, [1], ("sum", "mean", "max")[mode], False), None, None, None]


def _as_strided(c: Operation, x: AtomView, shape: Any, strides: Any, offset: Any = None) -> AtomView:
    """A view by strides of a value that lies row by row."""
    ids = np.full(tuple(shape), offset or 0)
    for d, (n, stride) in enumerate(zip(shape, strides, strict=True)):
        ids = ids + (np.arange(n) * stride).reshape([-1 if k == d else 1 for k in range(len(shape))])
    return at.take_constant(c.w, c.w.reshape_view(x, [x.size]), 0, ids)


INDEXING: dict[str, Handler] = {
    "aten.index.Tensor": _index,
    "aten.index_put.default": _index_put,
    "aten._unsafe_index.Tensor": _index,
    "aten.index_select.default": _index_select,
    "aten.gather.default": _gather,
    "aten.scatter.src": _scatter_handler(add=False),
    "aten.scatter.value": _scatter_handler(add=False),
    "aten.scatter_add.default": _scatter_handler(add=True),
    "aten.index_add.default": _index_add,
    "aten.embedding_bag.padding_idx": _bags,
    "aten._embedding_bag.default": _bags,
    "aten.embedding_bag.default": _bags,
    "aten.slice.Tensor": _slice,
    "aten.slice_scatter.default": _slice_scatter,
    "aten.select_scatter.default": _select_scatter,
    "aten.constant_pad_nd.default": _pad,
    **{f"aten.reflection_pad{n}d.default": _padded_by(_reflected_ids) for n in (1, 2, 3)},
    **{f"aten.replication_pad{n}d.default": _padded_by(_replicated_ids) for n in (1, 2, 3)},
    "aten.convolution.default": _convolution,
    **{f"aten.max_pool{n}d.default": _max_pool_handler(n) for n in (1, 2, 3)},
    **{f"aten.avg_pool{n}d.default": _average_pool_handler(n) for n in (1, 2, 3)},
    "aten.topk.default": _top,
    "aten.sort.default": _sort,
    "aten.sort.stable": _sort_stable,
    "aten.argsort.default": _argsort,
    "aten.max.dim": _best_handler("max"),
    "aten.min.dim": _best_handler("min"),
    "aten.argmax.default": _arg_handler("max"),
    "aten.argmin.default": _arg_handler("min"),
    "aten.cumsum.default": _cumulate,
    "aten.prod.default": _product,
    "aten.prod.dim_int": _product,
    "aten.cumprod.default": _cumulate_product,
    "aten.repeat_interleave.self_int": _repeat_interleave,
    "aten.flip.default": lambda c, x, dims: at.flip(c.w, x, dims),
    "aten.roll.default": _roll,
    "aten.diagonal.default": _diagonal,
    "aten.unfold.default": _unfold,
    "aten.as_strided.default": _as_strided,
    "aten.one_hot.default": lambda c, ids, n=-1: at.one_hot(c.w, ids, c.shape[-1], c.dtype),
}
RAW = frozenset({"aten.index.Tensor", "aten._unsafe_index.Tensor", "aten.index_put.default", "aten.gather.default",
                 "aten.index_select.default", "aten.scatter.src", "aten.scatter.value", "aten.scatter_add.default",
                 "aten.index_add.default", "aten.embedding_bag.padding_idx", "aten._embedding_bag.default",
                 "aten.embedding_bag.default"})  # fmt: skip
