"""Pointwise operations of torch that are formulas of ours, and sums and norms on them; a part of torch's table.

What torch itself decomposes into these is not here, but for what its decomposition takes apart into functions of other
libraries (`expm1`, `log1p`): these are written in the functions that expressions have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from shardplan.core.dtypes import numpy_dtype
from shardplan.interop.importers import indexing as at
from shardplan.interop.importers.call import Handler, Operation
from shardplan.interop.importers.formulas import FORMULAS, FUNCTIONS, SIGNS, expression_handler
from shardplan.interop.importers.views import AtomView

_SOFTPLUS = "where({a} * {b} > {c}, {a}, log(1 + exp({a} * {b})) / {b})"


def _elu(c: Operation, x: AtomView, alpha: float = 1.0, scale: float = 1.0, inner: float = 1.0) -> AtomView:
    below = f"tanh({{a}} * {inner / 2}) * (exp({{a}} * {inner}) + 1) * {alpha * scale}"
    return c.write_elementwise(f"where({{a}} > 0, {{a}} * {scale}, {below})", x)


def _softplus(c: Operation, x: AtomView, beta: float = 1.0, threshold: float = 20.0) -> AtomView:
    return c.write_elementwise(_SOFTPLUS, x, float(beta), float(threshold))


def _write_trunc(c: Operation, x: AtomView) -> AtomView:
    """Without what stands behind the point; what is so large has nothing there."""
    kind = c.w.dtype(x)
    if numpy_dtype(kind).kind not in "fV":
        return x
    whole = c.w.cast(c.w.cast(c.write_elementwise("where(abs({a}) < 1e15, {a}, 0)", x, dtype=kind), "i64"), kind)
    return c.write_elementwise("where(abs({a}) < 1e15, {b}, {a})", x, whole, dtype=kind)


def _write_floor(c: Operation, x: AtomView) -> AtomView:
    kind = c.w.dtype(x)
    return c.write_elementwise("{b} - where({b} > {a}, 1, 0)", x, _write_trunc(c, x), dtype=kind)


def _ceil(c: Operation, x: AtomView) -> AtomView:
    return c.write_elementwise("{b} + where({b} < {a}, 1, 0)", x, _write_trunc(c, x))


def _round(c: Operation, x: AtomView, decimals: int = 0) -> AtomView:
    """To the nearest, and of two to the even one."""
    if decimals:
        raise NotImplementedError("to decimals")
    up = _write_floor(c, c.write_elementwise("{a} + 0.5", x))
    half = _write_floor(c, c.write_elementwise("{a} / 2", up))
    return c.write_elementwise("where({b} - {a} == 0.5, where({b} - 2 * {c} == 1, {b} - 1, {b}), {b})", x, up, half)


def _quotient(c: Operation, x: Any, y: Any, rounding_mode: Any = None) -> AtomView:
    """A quotient, whole numbers too; of these the digits of f64 are those that count."""
    kind = c.dtype
    wide = kind if numpy_dtype(kind).kind in "fV" else "f64"
    views = [c.w.cast(v, wide) if isinstance(v, AtomView) else v for v in (x, y)]
    found = c.write_elementwise("{a} / {b}", *views, dtype=wide)
    if rounding_mode is not None:
        found = (_write_floor if rounding_mode == "floor" else _write_trunc)(c, found)
    return c.w.cast(found, kind)


def _rest_handler(rounding: str) -> Handler:
    def handler(c: Operation, x: Any, y: Any) -> AtomView:
        return c.write_elementwise("{a} - {b} * {c}", x, y, _quotient(c, x, y, rounding))

    return handler


def _is_nan(c: Operation, x: AtomView) -> AtomView:
    return c.compare("!=", x, x)


def _sum_of_logs(c: Operation, x: AtomView, dims: Any, keep: bool = False) -> AtomView:
    every = [dims] if isinstance(dims, int) else dims
    top = c.w.stop_gradient(c.w.reduce_view(x, every, "max", True))
    total = c.w.reduce_view(c.write_elementwise("exp({a} - {b})", x, top), every, "sum", True)
    found = c.write_elementwise("log({a}) + {b}", total, top)
    return found if keep else found.squeeze_dims(every)


def _spread_handler(*, root: bool, mean: bool = False) -> Handler:
    """Of a variance or a standard deviation."""

    def handler(
        c: Operation, x: AtomView, dims: Any = None, correction: Any = 1, keepdim: bool = False, **_: Any
    ) -> Any:
        if isinstance(dims, bool):
            dims, correction = None, int(dims)
        if isinstance(correction, bool):
            correction = int(correction)
        every = list(range(len(x.dims))) if not dims and dims != 0 else [dims] if isinstance(dims, int) else list(dims)
        every = [d % len(x.dims) for d in every]
        found, middle = at.variance(c.w, x, every, 1 if correction is None else correction, keepdim)
        found = c.write_elementwise("sqrt({a})", found) if root else found
        return [found, middle] if mean else found

    return handler


def _group_norm(c: Operation, x: AtomView, groups: int, gain: Any = None, bias: Any = None, eps: float = 1e-5,
                _: Any = None) -> AtomView:  # fmt: skip
    n, channels, *rest = x.shape
    parts = c.w.reshape_view(x, [n, groups, channels // groups, *rest])
    y = _normalize(c, parts, range(2, len(parts.dims)), eps)
    return _apply_gain(c, c.w.reshape_view(y, [n, channels, *rest]), gain, bias)


def _instance_norm(c: Operation, x: AtomView, gain: Any, bias: Any, mean: Any, variance: Any, use_input: bool,
                   _: float, eps: float, __: Any) -> AtomView:  # fmt: skip
    if not use_input:
        return _batch_norm(c, x, gain, bias, mean, variance, False, 0.0, eps, False)
    return _apply_gain(c, _normalize(c, x, range(2, len(x.dims)), eps), gain, bias)


def _normalize(c: Operation, x: AtomView, dims: Sequence[int], eps: float) -> AtomView:
    variance, mean = at.variance(c.w, x, dims, 0, True)
    return c.write_elementwise(f"({{a}} - {{b}}) * rsqrt({{c}} + {eps!r})", x, mean, variance)


def _apply_gain(c: Operation, x: AtomView, gain: Any, bias: Any) -> AtomView:
    """Times a gain and plus a bias of dim 1, where there are any."""
    for text, v in (("a * b", gain), ("a + b", bias)):
        if v is not None:
            x = c.w.write_elementwise(text, x, _along_channels(v, len(x.dims)))
    return x


def _along_channels(v: AtomView, ndim: int) -> AtomView:
    return AtomView(v.name, (*v.dims, *((),) * (ndim - 2)))


def _batch_norm(c: Operation, x: AtomView, gain: Any, bias: Any, mean: Any, variance: Any, train: bool, momentum: float,
                eps: float, _: Any = None) -> Any:  # fmt: skip
    if train or mean is None:
        raise NotImplementedError("in training; export model.eval()")
    of = [_along_channels(v, len(x.dims)) for v in (mean, variance)]
    return _apply_gain(c, c.write_elementwise(f"({{a}} - {{b}}) * rsqrt({{c}} + {eps!r})", x, *of), gain, bias)


def _cosine(c: Operation, x: AtomView, y: AtomView, dim: int = 1, eps: float = 1e-8) -> AtomView:
    pairs = ((x, y), (x, x), (y, y))
    top, one, two = (c.w.reduce_view(c.write_elementwise("{a} * {b}", *p), [dim], "sum", False) for p in pairs)
    return c.write_elementwise(
        f"{{a}} / (maximum(sqrt({{b}}), {eps!r}) * maximum(sqrt({{c}}), {eps!r}))", top, one, two
    )


def _binary_cross_entropy(c: Operation, x: AtomView, y: AtomView, weight: Any = None, positive: Any = None,
                          reduction: int = 1) -> AtomView:  # fmt: skip
    by = "1" if positive is None else "(1 + ({c} - 1) * {b})"
    given = [x, y, *(v for v in (positive,) if v is not None)]
    text = f"(1 - {{b}}) * {{a}} + {by} * (log(1 + exp(-abs({{a}}))) + maximum(-{{a}}, 0))"
    found = c.write_elementwise(text, *given)
    found = found if weight is None else c.write_elementwise("{a} * {b}", found, weight)
    return reduce_losses(c, found, reduction)


def reduce_losses(c: Operation, losses: AtomView, reduction: int) -> AtomView:
    """Losses as they are, their mean or their sum, by torch's number of the reduction."""
    kind = ("", "mean", "sum")[reduction]
    return c.w.reduce_view(losses, range(len(losses.dims)), kind, False) if kind else losses


def _bilinear(c: Operation, x: AtomView, y: AtomView, weight: AtomView, bias: Any = None) -> AtomView:
    lead = [f"d{d}" for d in range(len(x.dims) - 1)]
    found = c.w.einsum([[*lead, "i"], ["o", "i", "j"]], [*lead, "o", "j"], x, weight)
    found = c.w.einsum([[*lead, "o", "j"], [*lead, "j"]], [*lead, "o"], found, y)
    return found if bias is None else c.w.write_elementwise("a + b", found, bias)


def _copy(c: Operation, x: AtomView, source: Any, *_: Any) -> AtomView:
    view = source if isinstance(source, AtomView) else c.w.constant(source, c.dtype)
    return c.w.cast(view, c.dtype).broadcast_dims(c.shape)


def _reduce_all(kind: str) -> Handler:
    return lambda c, x: c.w.reduce_view(x, range(len(x.dims)), kind, False)


_FORMULAS = {
    **FORMULAS,
    "log2": f"log({{a}}) * {1 / math.log(2)!r}",
    "log10": f"log({{a}}) * {1 / math.log(10)!r}",
    "sgn": FORMULAS["sign"],
    "log_sigmoid": "minimum({a}, 0) - log(1 + exp(-abs({a})))",
    "mish": "{a} * tanh(maximum({a}, 0) + log(1 + exp(-abs({a}))))",
}
_PRIMS = {"mul": "{a} * {b}", "add": "{a} + {b}", "sub": "{a} - {b}", "div": "{a} / {b}", "neg": "-{a}",
          "maximum": "maximum({a}, {b})", "minimum": "minimum({a}, {b})", "where": "where({a}, {b}, {c})"}  # fmt: skip

POINTWISE: dict[str, Handler] = {
    **{f"{room}.{name}.default": expression_handler(text)
       for room in ("aten", "prims") for name, text in _FORMULAS.items()},
    **{f"prims.{name}.default": expression_handler(text) for name, text in _PRIMS.items()},
    **{f"prims.{name}.default": expression_handler(f"{name}({{a}})") for name in FUNCTIONS},
    **{f"prims.{name}.default": (lambda c, x, y, sign=sign: c.compare(sign, x, y)) for name, sign in SIGNS.items()},
    "prims.convert_element_type.default": lambda c, x, *_: c.w.cast(x, c.dtype),
    "prims.sum.default": lambda c, x, dims, **_: c.w.reduce_view(c.w.cast(x, c.dtype), dims, "sum", False),
    "aten.elu.default": _elu,
    "aten.celu.default": lambda c, x, alpha=1.0: _elu(c, x, alpha, 1.0, 1.0 / alpha),
    "aten.selu.default": lambda c, x: _elu(c, x, 1.6732632423543772, 1.0507009873554805),
    "aten.softplus.default": _softplus,
    "aten.trunc.default": _write_trunc,
    "aten.fix.default": _write_trunc,
    "aten.floor.default": _write_floor,
    "aten.ceil.default": _ceil,
    "aten.round.default": _round,
    "aten.div.Tensor_mode": _quotient,
    "aten.div.Scalar_mode": _quotient,
    "aten.floor_divide.default": lambda c, x, y: _quotient(c, x, y, "floor"),
    **{f"aten.remainder.{kind}": _rest_handler("floor") for kind in ("Scalar", "Tensor", "Scalar_Tensor")},
    **{f"aten.fmod.{kind}": _rest_handler("trunc") for kind in ("Scalar", "Tensor")},
    "aten.isnan.default": _is_nan,
    "aten.logsumexp.default": _sum_of_logs,
    **{f"aten.var.{kind}": _spread_handler(root=False) for kind in ("default", "dim", "correction")},
    **{f"aten.std.{kind}": _spread_handler(root=True) for kind in ("default", "dim", "correction")},
    "aten.var_mean.correction": _spread_handler(root=False, mean=True),
    "aten.group_norm.default": _group_norm,
    "aten.instance_norm.default": _instance_norm,
    "aten.batch_norm.default": _batch_norm,
    "aten._native_batch_norm_legit_no_training.default": lambda c, x, gain, bias, mean, variance, _, eps: [
        _batch_norm(c, x, gain, bias, mean, variance, False, 0.0, eps), None, None],
    "aten.cosine_similarity.default": _cosine,
    "aten.binary_cross_entropy_with_logits.default": _binary_cross_entropy,
    "aten.bilinear.default": _bilinear,
    "aten.copy.default": _copy,
    "aten.fill.Scalar": _copy,
    "aten.fill.Tensor": _copy,
    "aten.max.default": _reduce_all("max"),
    "aten.min.default": _reduce_all("min"),
    "aten.max.other": expression_handler("maximum({a}, {b})"),
    "aten.min.other": expression_handler("minimum({a}, {b})"),
    **dict.fromkeys(("aten._assert_async.msg", "aten._assert_async.default", "aten._assert_scalar.default",
                     "aten._functional_assert_async.msg"), lambda c, *_, **__: None),
}  # fmt: skip
