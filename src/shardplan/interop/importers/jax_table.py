"""What each primitive of JAX is in ours: functions of a call, its operands, and its parameters by their names.

Those that order, choose, sum so far, shift or convolve go by what `indexing` writes of views.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from operator import eq, ge, gt, le, lt, ne
from typing import Any

import numpy as np

from shardplan.core.layout import Layout
from shardplan.core.ops import Pin
from shardplan.core.shardings import mesh_of
from shardplan.core.tensor import TensorType
from shardplan.interop.importers import composites as ours
from shardplan.interop.importers import indexing as at
from shardplan.interop.importers.call import Handler, Operation
from shardplan.interop.importers.formulas import (
    FORMULAS,
    FUNCTIONS,
    SIGNS,
    expression_handler,
    logical_handler,
    pass_through,
    write_power,
)
from shardplan.interop.importers.views import BROADCAST, AtomView, AxisFactor, Group
from shardplan.interop.importers.writer import FlatWriter

_LARGEST = {"f16": 65504.0, "bf16": 3.3895313892515355e38, "f32": 3.4028234663852886e38, "f64": sys.float_info.max}
_COMPARED = {"<": lt, "<=": le, ">": gt, ">=": ge, "==": eq, "!=": ne}


def _compare_handler(sign: str) -> Handler:
    def handler(c: Operation, x: Any, y: Any, **_: Any) -> Any:
        if isinstance(x, AtomView) or isinstance(y, AtomView):
            return c.compare(sign, x, y)
        return _COMPARED[sign](x, y)

    return handler


def _view(c: Operation, x: Any) -> AtomView:
    return x if isinstance(x, AtomView) else c.w.constant(x, c.dtype)


def _write_maximum(c: Operation, x: Any, y: Any, **_: Any) -> AtomView:
    """A maximum; of minus infinity it is the other."""
    for one, other in ((x, y), (y, x)):
        if not isinstance(one, AtomView) and one == -math.inf:
            return other
    return c.write_elementwise("maximum({a}, {b})", x, y)


def _select_case(c: Operation, which: Any, *cases: Any, **_: Any) -> Any:
    if not isinstance(which, AtomView):
        return cases[int(which)]
    if len(cases) != 2 or c.w.dtype(which) != "bool":
        raise NotImplementedError("of several cases")
    return c.write_elementwise("where({a}, {b}, {c})", which, cases[1], cases[0])


def _reduce_handler(kind: str) -> Handler:
    return lambda c, x, axes, **_: c.w.reduce_view(x, [int(d) for d in axes], kind, False)


def _broadcast(c: Operation, x: Any, shape: Sequence[int], broadcast_dimensions: Sequence[int], **_: Any) -> AtomView:
    if not isinstance(x, AtomView):
        return c.w.constant(x, c.dtype, c.shape)
    dims: list[Group] = [() if n == 1 else (AxisFactor(int(n), BROADCAST),) for n in shape]
    for group, n, d in zip(x.dims, x.shape, broadcast_dimensions, strict=True):
        dims[int(d)] = group if n == shape[d] else dims[int(d)]
    return AtomView(x.name, tuple(dims))


def _slice_dims(c: Operation, x: AtomView, start_indices: Any, limit_indices: Any, strides: Any, **_: Any) -> AtomView:
    if strides is not None and set(strides) != {1}:
        raise NotImplementedError("with strides")
    for d, (a, b) in enumerate(zip(start_indices, limit_indices, strict=True)):
        x = ours.part(c.w, x, d, int(a), int(b))
    return x


def _product(c: Operation, x: AtomView, y: AtomView, dimension_numbers: Any, **_: Any) -> AtomView:
    (left, right), (left_batch, right_batch) = dimension_numbers
    sides = [[f"x{d}" for d in range(len(x.dims))], [f"y{d}" for d in range(len(y.dims))]]
    for pairs in (zip(left, right, strict=True), zip(left_batch, right_batch, strict=True)):
        for a, b in pairs:
            sides[1][b] = sides[0][a]
    batch = [sides[0][d] for d in left_batch]
    rest = [n for side, gone in zip(sides, (left, right), strict=True)
            for d, n in enumerate(side) if d not in gone and n not in batch]  # fmt: skip
    x, y = (c.w.cast(v, c.dtype) for v in (x, y))
    return c.w.einsum(sides, [*batch, *rest], x, y)


def _rows(c: Operation, table: AtomView, ids: AtomView, dimension_numbers: Any, slice_sizes: Any, **_: Any) -> AtomView:
    d, ndim = dimension_numbers, len(c.shape)
    width = len(table.dims) - 1
    whole = tuple(slice_sizes) == (1, *table.shape[1:]) and tuple(d.offset_dims) == tuple(range(ndim - width, ndim))
    if not whole or tuple(d.collapsed_slice_dims) != (0,) or tuple(d.start_index_map) != (0,):
        raise NotImplementedError("of other than rows of a table")
    return ours.gather_rows(c.w, table, ids.squeeze_dims([-1]))


def _count(c: Operation, dimension: int, **_: Any) -> AtomView:
    n = c.shape[dimension]
    found = c.w.count(n, c.dtype)
    return AtomView(
        found.name, tuple(found.dims[0] if d == dimension else () for d in range(len(c.shape)))
    ).broadcast_dims(c.shape)


def _pin_sharding(c: Operation, x: AtomView, sharding: Any, **_: Any) -> AtomView:
    """A value that is pinned: to the axes of each dim of ours, of several those of the major one."""
    said = _said_axes(sharding)
    x = x.tidy
    if any(names and group and not group[0].has_axis for group, names in zip(x.dims, said, strict=False)):
        x = c.w.materialize_view(x)
    return AtomView(c.w.builder(Pin(Layout(seen_axes(c.w, x, said))), x.name), x.dims)


def _said_axes(sharding: Any) -> list[tuple[str, ...]]:
    said = [() if s is None else (s,) if isinstance(s, str) else s for s in sharding.spec]
    if not all(isinstance(names, tuple) for names in said):
        raise NotImplementedError("of dims that it leaves open")
    return said


def seen_axes(w: FlatWriter, x: AtomView, said: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """Return the axes of a value's dims, of axes that a source says of its own: of several dims the major one's."""
    axes: list[tuple[str, ...]] = [()] * w.builder.types[x.name].ndim
    for group, names in zip(x.dims, said, strict=False):
        if names and group:
            axes[group[0].axis] = names
    return tuple(axes)


def annotated_type(w: FlatWriter, x: AtomView, sharding: Any) -> TensorType | None:
    """Return how a value lies that a `NamedSharding` is said of; None where another thing is, or dims are left open."""
    if not hasattr(sharding, "spec") or not hasattr(sharding, "mesh"):
        return None
    try:
        said = _said_axes(sharding)
    except NotImplementedError:
        return None
    t, x = w.builder.types[x.name], x.tidy
    return TensorType(t.dtype, t.shape, seen_axes(w, x, said), mesh_of(sharding.mesh))


def _cumulate(c: Operation, x: AtomView, axis: int, reverse: bool = False) -> AtomView:
    return at.cumulate(c.w, x, axis, back=reverse)


def _sort(c: Operation, x: AtomView, *others: AtomView, dimension: int, num_keys: int = 1, **_: Any) -> list[AtomView]:
    """By the first operand; the others in its order."""
    if num_keys != 1:
        raise NotImplementedError(f"by {num_keys} keys; legal is 1")
    values, places = at.top(c.w, x, x.shape[dimension], dimension, largest=False)
    return [values, *(at.choose(c.w, v, dimension, places) for v in others)]


def _top(c: Operation, x: AtomView, k: int, axis: int = -1, **_: Any) -> list[AtomView]:
    values, places = at.top(c.w, x, k, axis)
    return [values, c.w.cast(places, c.kinds[1])]


def _best_handler(*, largest: bool) -> Handler:
    def handler(c: Operation, x: AtomView, axes: Sequence[int], **_: Any) -> AtomView:
        (axis,) = axes
        return c.w.cast(at.top(c.w, x, 1, axis, largest=largest)[1].squeeze_dims([axis]), c.dtype)

    return handler


def _flip(c: Operation, x: AtomView, dimensions: Sequence[int]) -> AtomView:
    return at.flip(c.w, x, dimensions)


def _pad(c: Operation, x: AtomView, value: Any, padding_config: Sequence[tuple[int, int, int]]) -> AtomView:
    number = c.inline_constant(value, c.dtype)
    if isinstance(number, AtomView):
        raise NotImplementedError("by a value that is no constant")
    for d, (_, _, inside) in enumerate(padding_config):
        x = _spread(c, x, d, inside + 1)
    return at.pad(c.w, x, [(before, after) for before, after, _ in padding_config], float(number))


def _spread(c: Operation, x: AtomView, dim: int, stride: int) -> AtomView:
    """Zeros between the elements of a dim, and none after the last."""
    return ours.part(c.w, at.spread(c.w, x, dim, stride), dim, 0, (x.shape[dim] - 1) * stride + 1)


def _convolution(
    c: Operation,
    x: AtomView,
    weight: AtomView,
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    dimension_numbers: Any,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    **_: Any,
) -> AtomView:
    if batch_group_count != 1:
        raise NotImplementedError(f"of {batch_group_count} groups of the batch; legal is 1")
    x, weight = x.permute_dims(dimension_numbers.lhs_spec), weight.permute_dims(dimension_numbers.rhs_spec)
    for k, stride in enumerate(lhs_dilation):
        x = _spread(c, x, 2 + k, stride)
    y = at.convolution(c.w, x, weight, window_strides, padding, rhs_dilation, feature_group_count)
    return y.permute_dims([int(d) for d in np.argsort(dimension_numbers.out_spec)])


def _scatter_add(
    c: Operation, x: AtomView, ids: AtomView, values: AtomView, dimension_numbers: Any, **_: Any
) -> AtomView:
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


TABLE: dict[str, Handler] = {
    **{name: expression_handler(f"{name}({{a}})") for name in FUNCTIONS},
    **{name: expression_handler(text) for name, text in FORMULAS.items()},
    **{name: _compare_handler(sign) for name, sign in SIGNS.items()},
    "logistic": expression_handler("sigmoid({a})"),
    "neg": expression_handler("-{a}"),
    "add": expression_handler("{a} + {b}"),
    "add_any": expression_handler("{a} + {b}"),
    "sub": expression_handler("{a} - {b}"),
    "mul": expression_handler("{a} * {b}"),
    "div": expression_handler("{a} / {b}"),
    "max": _write_maximum,
    "min": expression_handler("minimum({a}, {b})"),
    "pow": write_power,
    "square": expression_handler("{a} * {a}"),
    "integer_pow": write_power,
    "select_n": _select_case,
    "and": logical_handler("{a} * {b}"),
    "or": logical_handler("maximum({a}, {b})"),
    "not": logical_handler("1 - {a}"),
    "reduce_sum": _reduce_handler("sum"),
    "reduce_max": _reduce_handler("max"),
    "reduce_min": _reduce_handler("min"),
    "dot_general": _product,
    "gather": _rows,
    "iota": _count,
    "broadcast_in_dim": _broadcast,
    "reshape": lambda c, x, **_: c.w.reshape_view(_view(c, x), c.shape),
    "transpose": lambda c, x, permutation: x.permute_dims([int(d) for d in permutation]),
    "squeeze": lambda c, x, dimensions: x.squeeze_dims(dimensions),
    "expand_dims": lambda c, x, **_: c.w.reshape_view(_view(c, x), c.shape),
    "slice": _slice_dims,
    "split": lambda c, x, sizes, axis: ours.split_dim(c.w, x, axis, [int(n) for n in sizes]),
    "concatenate": lambda c, *views, dimension: ours.joined_along(c.w, views, dimension),
    "convert_element_type": lambda c, x, **_: c.w.cast(x, c.dtype) if isinstance(x, AtomView) else x,
    "sharding_constraint": _pin_sharding,
    "stop_gradient": lambda c, x, **_: c.w.stop_gradient(x) if isinstance(x, AtomView) else x,
    "clamp": lambda c, low, x, high: c.write_elementwise("minimum(maximum({a}, {b}), {c})", x, low, high),
    "is_finite": lambda c, x: c.compare(
        "<=", c.write_elementwise("abs({a})", x, dtype=c.w.dtype(x)), _LARGEST[c.w.dtype(x)]
    ),
    **dict.fromkeys(("copy", "copy_p", "name", "optimization_barrier"), pass_through),
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
