"""Primitives of JAX that order, choose, sum so far, shift or convolve, by what `indexing` writes of views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardplan.interop.importers import composites as ours
from shardplan.interop.importers import indexing as at
from shardplan.interop.importers.call import Handler, Operation
from shardplan.interop.importers.views import Seen


def _cumulate(c: Operation, x: Seen, axis: int, reverse: bool = False) -> Seen:
    return at.cumulate(c.w, x, axis, back=reverse)


def _sort(c: Operation, x: Seen, *others: Seen, dimension: int, num_keys: int = 1, **_: Any) -> list[Seen]:
    """By the first operand; the others in its order."""
    if num_keys != 1:
        raise NotImplementedError(f"by {num_keys} keys; legal is 1")
    values, places = at.top(c.w, x, x.shape[dimension], dimension, largest=False)
    return [values, *(at.choose(c.w, v, dimension, places) for v in others)]


def _top(c: Operation, x: Seen, k: int, axis: int = -1, **_: Any) -> list[Seen]:
    values, places = at.top(c.w, x, k, axis)
    return [values, c.w.cast(places, c.kinds[1])]


def _best_handler(*, largest: bool) -> Handler:
    def handler(c: Operation, x: Seen, axes: Sequence[int], **_: Any) -> Seen:
        (axis,) = axes
        return c.w.cast(at.top(c.w, x, 1, axis, largest=largest)[1].squeeze_dims([axis]), c.dtype)

    return handler


def _flip(c: Operation, x: Seen, dimensions: Sequence[int]) -> Seen:
    return at.flip(c.w, x, dimensions)


def _pad(c: Operation, x: Seen, value: Any, padding_config: Sequence[tuple[int, int, int]]) -> Seen:
    number = c.inline_constant(value, c.dtype)
    if isinstance(number, Seen):
        raise NotImplementedError("by a value that is no constant")
    for d, (_, _, inside) in enumerate(padding_config):
        x = _spread(c, x, d, inside + 1)
    return at.pad(c.w, x, [(before, after) for before, after, _ in padding_config], float(number))


def _spread(c: Operation, x: Seen, dim: int, stride: int) -> Seen:
    """Zeros between the elements of a dim, and none after the last."""
    return ours.part(c.w, at.spread(c.w, x, dim, stride), dim, 0, (x.shape[dim] - 1) * stride + 1)


def _convolution(
    c: Operation,
    x: Seen,
    weight: Seen,
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    dimension_numbers: Any,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    **_: Any,
) -> Seen:
    if batch_group_count != 1:
        raise NotImplementedError(f"of {batch_group_count} groups of the batch; legal is 1")
    x, weight = x.permute_dims(dimension_numbers.lhs_spec), weight.permute_dims(dimension_numbers.rhs_spec)
    for k, stride in enumerate(lhs_dilation):
        x = _spread(c, x, 2 + k, stride)
    y = at.convolution(c.w, x, weight, window_strides, padding, rhs_dilation, feature_group_count)
    return y.permute_dims([int(d) for d in np.argsort(dimension_numbers.out_spec)])


def _scatter_add(c: Operation, x: Seen, ids: Seen, values: Seen, dimension_numbers: Any, **_: Any) -> Seen:
    """Rows added to those of ids of one dim, or of one id; ids out of bounds add nothing."""
    d, ndim = dimension_numbers, len(x.dims)
    plain = tuple(d.inserted_window_dims) == tuple(d.scatter_dims_to_operand_dims) == (0,)
    lead = len(values.dims) - (ndim - 1)
    if not plain or tuple(d.update_window_dims) != tuple(range(lead, lead + ndim - 1)) or d.operand_batching_dims:
        raise NotImplementedError("of other than rows")
    hot = at.one_hot(c.w, c.w.materialize_view(ids.squeeze_dims([-1])), x.shape[0], c.dtype)
    batch, rest = [f"i{k}" for k in range(lead)], [f"d{k}" for k in range(ndim - 1)]
    total = c.w.einsum([[*batch, "v"], [*batch, *rest]], ["v", *rest], hot, c.w.materialize_view(values))
    return c.write_elementwise("{a} + {b}", x, total)


INDEXING: dict[str, Handler] = {
    "cumsum": _cumulate,
    "sort": _sort,
    "top_k": _top,
    "argmax": _best_handler(largest=True),
    "argmin": _best_handler(largest=False),
    "rev": _flip,
    "pad": _pad,
    "conv_general_dilated": _convolution,
    "scatter-add": _scatter_add,
}
