"""What each operation of torch's ATen is in ours: functions of a call and its arguments, by the operation's name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardplan.interop.importers import composites as ours
from shardplan.interop.importers.call import Handler, Operation
from shardplan.interop.importers.formulas import (
    FUNCTIONS,
    SIGNS,
    expression_handler,
    logical_handler,
    pass_through,
    write_einsum,
    write_power,
)
from shardplan.interop.importers.torch_complex import MADE, complex_table
from shardplan.interop.importers.torch_indexing import INDEXING
from shardplan.interop.importers.torch_pointwise import POINTWISE, reduce_losses
from shardplan.interop.importers.views import AtomView


def _scaled_sum_handler(sign: str) -> Handler:
    def handler(c: Operation, x: Any, y: Any, alpha: Any = 1) -> AtomView:
        return c.write_elementwise(f"{{a}} {sign} {{b}}" if alpha == 1 else f"{{a}} {sign} {{c}} * {{b}}", x, y, alpha)

    return handler


def _compare_handler(sign: str) -> Handler:
    return lambda c, x, y: c.compare(sign, x, y)


def _clamp(c: Operation, x: AtomView, low: Any = None, high: Any = None) -> AtomView:
    x = c.w.cast(x, c.dtype)
    x = x if low is None else c.write_elementwise("maximum({a}, {b})", x, low)
    return x if high is None else c.write_elementwise("minimum({a}, {b})", x, high)


def _gelu(c: Operation, x: AtomView, approximate: str = "none") -> AtomView:
    return ours.gelu(c.w, x, tanh=approximate == "tanh")


def _norm(
    c: Operation, x: AtomView, order: Any = 2, dims: Any = None, keep: bool = False, dtype: Any = None
) -> AtomView:
    if order != 2:
        raise NotImplementedError("of another order than 2")
    every = range(len(x.dims)) if dims is None else [dims] if isinstance(dims, int) else dims
    x = c.w.cast(x, c.dtype)
    return c.write_elementwise("sqrt({a})", c.w.reduce_view(c.write_elementwise("{a} * {a}", x), every, "sum", keep))


def _dropout(c: Operation, x: AtomView, p: float, train: bool) -> AtomView:
    if train and p:
        raise NotImplementedError("in training; export model.eval()")
    return x


def _write_where(c: Operation, condition: AtomView, x: Any, y: Any) -> AtomView:
    return c.write_elementwise("where({a}, {b}, {c})", condition, x, y)


def _masked_fill(c: Operation, x: AtomView, mask: AtomView, value: Any) -> AtomView:
    return c.write_elementwise("where({a}, {b}, {c})", mask, value, x)


def _reduce_handler(kind: str) -> Handler:
    def handler(c: Operation, x: AtomView, dims: Any = None, keep: bool = False, dtype: Any = None) -> AtomView:
        every = range(len(x.dims)) if dims is None or dims == [] else dims
        x = c.w.cast(x, c.dtype) if kind in ("sum", "mean") else x
        return c.w.reduce_view(x, [every] if isinstance(every, int) else every, kind, keep)

    return handler


def _layer_norm(c: Operation, x: AtomView, shape: Sequence[int], gain: Any = None, bias: Any = None, eps: float = 1e-5,
                _: Any = None) -> AtomView:  # fmt: skip
    if len(shape) != 1:
        raise NotImplementedError("over several dims")
    return ours.layer_norm(c.w, x, gain, bias, eps)


_EPSILON = {"f16": 2.0**-23, "bf16": 2.0**-23, "f32": 2.0**-23, "f64": 2.0**-52}  # of what torch computes in


def _rms_norm(c: Operation, x: AtomView, shape: Sequence[int], gain: Any = None, eps: float | None = None) -> AtomView:
    if len(shape) != 1:
        raise NotImplementedError("over several dims")
    return ours.rms_norm(c.w, x, gain, _EPSILON[c.w.dtype(x)] if eps is None else eps)


def _log_softmax(c: Operation, x: AtomView, dim: int, dtype: Any = None) -> AtomView:
    x = c.w.cast(x, c.dtype)
    top = c.w.reduce_view(x, [dim], "max", True)
    total = c.w.reduce_view(c.write_elementwise("exp({a} - {b})", x, top), [dim], "sum", True)
    return c.write_elementwise("{a} - {b} - log({c})", x, top, total)


def _attention(c: Operation, q: AtomView, k: AtomView, v: AtomView, mask: Any = None, dropout: float = 0.0,
               causal: bool = False, scale: Any = None, enable_gqa: bool = False) -> AtomView:  # fmt: skip
    if dropout:
        raise NotImplementedError("with dropout; export model.eval()")
    return ours.attention(c.w, q, k, v, causal, scale, mask)


def _cross_entropy(c: Operation, x: AtomView, targets: AtomView, weight: Any = None, reduction: int = 1,
                   ignored: int = -100, smoothing: float = 0.0) -> AtomView:  # fmt: skip
    if weight is not None or smoothing:
        raise NotImplementedError("with weights or smoothing")
    if len(targets.dims) > 1:
        x = x.permute_dims([0, *range(2, len(x.dims)), 1])
    return reduce_losses(c, ours.cross_entropy(c.w, x, targets), reduction)


def _select(c: Operation, x: AtomView, dim: int, at: int) -> AtomView:
    at %= x.shape[dim]
    return ours.part(c.w, x, dim, at, at + 1).squeeze_dims([dim])


def _moved_order(ndim: int, source: int, target: int) -> list[int]:
    """The dims in order when one of them has moved to another place."""
    order = [d for d in range(ndim) if d != source % ndim]
    order.insert(target % ndim, source % ndim)
    return order


def _split(c: Operation, x: AtomView, sizes: Any, dim: int = 0) -> list[AtomView]:
    n = x.shape[dim]
    every = [min(sizes, n - k) for k in range(0, n, sizes)] if isinstance(sizes, int) else sizes
    return ours.split_dim(c.w, x, dim, every)


def _chunk(c: Operation, x: AtomView, count: int, dim: int = 0) -> list[AtomView]:
    return _split(c, x, -(-x.shape[dim] // count), dim)


def _squeeze(c: Operation, x: AtomView, dims: Any = None) -> AtomView:
    every = range(len(x.dims)) if dims is None else [dims] if isinstance(dims, int) else dims
    return x.squeeze_dims(every)


def _stack(c: Operation, views: Sequence[AtomView], dim: int = 0) -> AtomView:
    at = dim % (len(views[0].dims) + 1)
    return ours.joined_along(c.w, [v.with_one(at) for v in views], at)


def _addmm(c: Operation, bias: AtomView, x: AtomView, y: AtomView, beta: Any = 1, alpha: Any = 1) -> AtomView:
    if (beta, alpha) != (1, 1):
        raise NotImplementedError("with factors")
    return c.w.write_elementwise("a + b", ours.matmul(c.w, x, y), bias)


def _arange(c: Operation, *numbers: Any, **_: Any) -> AtomView:
    start, step = (0, 1) if len(numbers) < 2 else (numbers[0], numbers[2] if len(numbers) > 2 else 1)
    count = c.w.count(c.shape[0], c.dtype)
    return count if (start, step) == (0, 1) else c.write_elementwise("{a} * {b} + {c}", count, step, start)


def _constant(value: float) -> Handler:
    return lambda c, *_, **__: c.w.constant(value, c.dtype, c.shape)


def _full(c: Operation, _: Any, value: Any, **__: Any) -> AtomView:
    return c.w.constant(value, c.dtype, c.shape)


def _triangle(sign: str) -> Handler:
    def handler(c: Operation, x: AtomView, diagonal: int = 0) -> AtomView:
        rows, columns = (c.w.count(n, "i32") for n in x.shape[-2:])
        kind = "i32" if c.dtype == "bool" else c.dtype
        mask = c.write_elementwise(
            f"where({{a}} + {{b}} {sign} {{c}}, 1, 0)", rows.with_one(1), diagonal, columns, dtype="i32"
        )
        kept = c.write_elementwise("{a} * {b}", c.w.cast(x, kind), c.w.cast(mask, kind), dtype=kind)
        return c.w.cast(kept, c.dtype)

    return handler


def _to(c: Operation, x: AtomView, *_: Any, **__: Any) -> AtomView:
    return c.w.cast(x, c.dtype)


_FUNCTIONS = (*FUNCTIONS, "relu", "sigmoid", "silu")
TABLE: dict[str, Handler] = {
    **POINTWISE,
    **INDEXING,
    **MADE,
    **{f"aten.{name}.default": expression_handler(f"{name}({{a}})") for name in _FUNCTIONS},
    **{f"aten.{name}.{kind}": _compare_handler(sign) for name, sign in SIGNS.items() for kind in ("Tensor", "Scalar")},
    **{f"aten.{n}.{k}": _scaled_sum_handler(s) for n, s in (("add", "+"), ("sub", "-")) for k in ("Tensor", "Scalar")},
    **{f"aten.{n}_.{k}": _scaled_sum_handler(s) for n, s in (("add", "+"), ("sub", "-")) for k in ("Tensor", "Scalar")},
    **{f"aten.{n}{i}.{k}": expression_handler(f"{{a}} {s} {{b}}") for n, s in (("mul", "*"), ("div", "/"))
       for k in ("Tensor", "Scalar") for i in ("", "_")},
    "aten.rsub.Scalar": expression_handler("{b} - {a}"),
    "aten.neg.default": expression_handler("-{a}"),
    "aten.reciprocal.default": expression_handler("1 / {a}"),
    "aten.square.default": lambda c, x: c.write_elementwise("{a} * {a}", x),
    "aten.pow.Tensor_Scalar": write_power,
    "aten.pow.Tensor_Tensor": write_power,
    "aten.pow.Scalar": write_power,
    "aten.maximum.default": expression_handler("maximum({a}, {b})"),
    "aten.minimum.default": expression_handler("minimum({a}, {b})"),
    "aten.clamp.default": _clamp,
    "aten.clamp_min.default": _clamp,
    "aten.clamp.Tensor": _clamp,
    "aten.linalg_vector_norm.default": _norm,
    "aten.gelu.default": _gelu,
    "aten.where.self": _write_where,
    "aten.where.ScalarSelf": _write_where,
    "aten.where.ScalarOther": _write_where,
    "aten.masked_fill.Scalar": _masked_fill,
    "aten.masked_fill.Tensor": _masked_fill,
    "aten.logical_and.default": logical_handler("{a} * {b}"),
    "aten.bitwise_and.Tensor": logical_handler("{a} * {b}"),
    "aten.logical_or.default": logical_handler("maximum({a}, {b})"),
    "aten.bitwise_or.Tensor": logical_handler("maximum({a}, {b})"),
    "aten.logical_not.default": logical_handler("1 - {a}"),
    "aten.bitwise_not.default": logical_handler("1 - {a}"),
    "aten.mean.dim": _reduce_handler("mean"),
    "aten.mean.default": _reduce_handler("mean"),
    "aten.sum.dim_IntList": _reduce_handler("sum"),
    "aten.sum.default": _reduce_handler("sum"),
    "aten.amax.default": _reduce_handler("max"),
    "aten.amin.default": _reduce_handler("min"),
    "aten.linear.default": lambda c, *views: ours.linear(c.w, *views),
    "aten.matmul.default": lambda c, x, y: ours.matmul(c.w, x, y),
    "aten.mm.default": lambda c, x, y: ours.matmul(c.w, x, y),
    "aten.bmm.default": lambda c, x, y: ours.matmul(c.w, x, y),
    "aten.addmm.default": _addmm,
    "aten.einsum.default": lambda c, spec, views, path=None: write_einsum(c, spec, views),
    "aten.layer_norm.default": _layer_norm,
    "aten.rms_norm.default": _rms_norm,
    "aten.softmax.int": lambda c, x, dim, dtype=None: ours.softmax(c.w, c.w.cast(x, c.dtype), dim),
    "aten._softmax.default": lambda c, x, dim, _=None: ours.softmax(c.w, c.w.cast(x, c.dtype), dim),
    "aten.log_softmax.int": _log_softmax,
    "aten.scaled_dot_product_attention.default": _attention,
    "aten.cross_entropy_loss.default": _cross_entropy,
    "aten.embedding.default": lambda c, table, ids, *_: ours.gather_rows(c.w, table, ids),
    "aten.dropout.default": _dropout,
    "aten.view.default": lambda c, x, _: c.w.reshape_view(x, c.shape),
    "aten.reshape.default": lambda c, x, _: c.w.reshape_view(x, c.shape),
    "aten._unsafe_view.default": lambda c, x, _: c.w.reshape_view(x, c.shape),
    "aten.flatten.using_ints": lambda c, x, *_: c.w.reshape_view(x, c.shape),
    "aten.unflatten.int": lambda c, x, *_: c.w.reshape_view(x, c.shape),
    "aten.transpose.int": lambda c, x, a, b: x.transpose_dims(a, b),
    "aten.t.default": lambda c, x: x.permute_dims(range(len(x.dims))[::-1]),
    "aten.movedim.int": lambda c, x, a, b: x.permute_dims(_moved_order(len(x.dims), a, b)),
    "aten.permute.default": lambda c, x, order: x.permute_dims(order),
    "aten.unsqueeze.default": lambda c, x, dim: x.with_one(dim),
    "aten.squeeze.default": _squeeze,
    "aten.squeeze.dim": _squeeze,
    "aten.squeeze.dims": _squeeze,
    "aten.expand.default": lambda c, x, _: x.broadcast_dims(c.shape),
    "aten.expand_as.default": lambda c, x, _: x.broadcast_dims(c.shape),
    "aten.select.int": _select,
    "aten.split.Tensor": _split,
    "aten.split_with_sizes.default": _split,
    "aten.chunk.default": _chunk,
    "aten.unbind.int": lambda c, x, dim=0: [_select(c, x, dim, k) for k in range(x.shape[dim])],
    "aten.cat.default": lambda c, views, dim=0: ours.joined_along(c.w, views, dim),
    "aten.stack.default": _stack,
    "getitem": lambda c, values, k: values[k],
    "aten.arange.default": _arange,
    "aten.arange.start": _arange,
    "aten.arange.start_step": _arange,
    "aten.ones.default": _constant(1),
    "aten.zeros.default": _constant(0),
    "aten.ones_like.default": _constant(1),
    "aten.zeros_like.default": _constant(0),
    "aten.full.default": _full,
    "aten.full_like.default": _full,
    "aten.scalar_tensor.default": lambda c, value, **_: c.w.constant(value, c.dtype),
    "aten.tril.default": _triangle(">="),
    "aten.triu.default": _triangle("<="),
    **dict.fromkeys(("aten.to.dtype", "aten.to.dtype_layout", "aten.to.device", "aten.to.other", "aten.type_as.default",
                     "aten._to_copy.default", "aten.float.default"), _to),
    **dict.fromkeys(("aten.contiguous.default", "aten.clone.default", "aten.alias.default",
                     "aten.lift_fresh_copy.default"), pass_through),
    **dict.fromkeys(("aten.detach.default", "aten.detach_.default"), lambda c, x: c.w.stop_gradient(x)),
    "aten._assert_tensor_metadata.default": lambda c, *_, **__: None,
}  # fmt: skip
COMPLEX = complex_table(TABLE)
