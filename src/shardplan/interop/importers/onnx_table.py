"""What each operation of ONNX is in ours: functions of a call, its inputs and its attributes by name.

An input is a view, or a numpy array where its elements are known; operations on such alone are done in numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardplan.core.dtypes import numpy_dtype, short_name
from shardplan.core.error_function import erf
from shardplan.interop.importers import composites as ours
from shardplan.interop.importers.call import Handler, Operation
from shardplan.interop.importers.constant_value import write_constant
from shardplan.interop.importers.formulas import pass_through, write_einsum
from shardplan.interop.importers.views import AtomView

_AXES_ARE_INPUTS = 13


def _view(c: Operation, x: Any, dtype: str = "") -> AtomView:
    return x if isinstance(x, AtomView) else write_constant(c.w, np.asarray(x).astype(numpy_dtype(dtype or c.dtype)))


def _elementwise_handler(expression: str, numpy: Callable[..., Any], *, boolean: bool = False) -> Handler:
    def handler(c: Operation, *values: Any, **_: Any) -> Any:
        if not any(isinstance(v, AtomView) for v in values):
            return numpy(*values)
        kind = c.dtype
        given = [_scalar(v) if not isinstance(v, AtomView) else v for v in values]
        given = [_view(c, v, kind) if isinstance(v, np.ndarray) else v for v in given]
        if boolean:
            given = [c.w.cast(v, "i32") if isinstance(v, AtomView) else v for v in given]
            return c.w.cast(c.write_elementwise(expression, *given, dtype="i32"), "bool")
        return c.write_elementwise(expression, *given, dtype=kind)

    return handler


def _scalar(x: Any) -> Any:
    """A number where an array is one, without dims that broadcasting would add."""
    x = np.asarray(x)
    if x.size != 1:
        return x
    return float(str(x.reshape(()))) if x.dtype.kind == "f" else x.item()


def _power(c: Operation, x: Any, y: Any) -> Any:
    if isinstance(y, AtomView):
        base = x if isinstance(x, AtomView) else _scalar(x)
        base = write_constant(c.w, base) if isinstance(base, np.ndarray) else base
        return c.write_elementwise("exp({b} * log({a}))", base, y, dtype=c.w.dtype(y))
    if not isinstance(x, AtomView):
        return np.power(x, y)
    power = _scalar(y)
    if isinstance(power, float) and power.is_integer():
        power = int(power)
    return c.write_elementwise("{a} * {a}", x) if power == 2 else c.write_elementwise("{a} ** {b}", x, power)


def _compare_handler(sign: str, numpy: Callable[..., Any]) -> Handler:
    def handler(c: Operation, x: Any, y: Any) -> Any:
        if not isinstance(x, AtomView) and not isinstance(y, AtomView):
            return numpy(x, y)
        given = (v if isinstance(v, AtomView) or not isinstance(v, np.ndarray) else write_constant(c.w, v)
                 for v in (_scalar(v) if not isinstance(v, AtomView) else v for v in (x, y)))  # fmt: skip
        return c.compare(sign, *given)

    return handler


def _write_where(c: Operation, condition: Any, x: Any, y: Any) -> Any:
    if not any(isinstance(v, AtomView) for v in (condition, x, y)):
        return np.where(condition, x, y)
    kinds = [c.w.dtype(v) if isinstance(v, AtomView) else short_name(np.asarray(v).dtype) for v in (x, y)]
    given = [v if isinstance(v, AtomView) else _scalar(v) for v in (x, y)]
    given = [write_constant(c.w, v) if isinstance(v, np.ndarray) else v for v in given]
    return c.write_elementwise("where({a}, {b}, {c})", _view(c, condition, "bool"), *given, dtype=kinds[0])


def _matmul(c: Operation, x: Any, y: Any) -> AtomView:
    return ours.matmul(c.w, _view(c, x), _view(c, y))


def _gemm(
    c: Operation, x: AtomView, y: AtomView, bias: Any = None, *, alpha: float = 1.0, beta: float = 1.0, **turned: int
) -> AtomView:
    if (alpha, beta) != (1.0, 1.0):
        raise NotImplementedError("with factors")
    x, y = (v.transpose_dims(0, 1) if turn else v for v, turn in ((x, turned.get("transA")), (y, turned.get("transB"))))
    found = ours.matmul(c.w, x, y)
    return found if bias is None else c.w.write_elementwise("a + b", found, _view(c, bias))


def _reduce_handler(kind: str) -> Handler:
    def handler(c: Operation, x: Any, axes: Any = None, *, keepdims: int = 1, **more: Any) -> Any:
        axes = more.get("axes") if axes is None else [int(d) for d in np.asarray(axes).ravel()]
        if not isinstance(x, AtomView):
            return getattr(np, kind)(x, axis=tuple(axes) if axes is not None else None, keepdims=bool(keepdims))
        return c.w.reduce_view(x, range(len(x.dims)) if axes is None else axes, kind, bool(keepdims))

    return handler


def _softmax(c: Operation, x: AtomView, *, axis: int | None = None) -> AtomView:
    dim = (-1 if c.about[0] >= _AXES_ARE_INPUTS else 1) if axis is None else axis
    if c.about[0] < _AXES_ARE_INPUTS and dim % len(x.dims) != len(x.dims) - 1:
        raise NotImplementedError("over several dims")
    return ours.softmax(c.w, x, dim)


def _layer_norm(c: Operation, x: AtomView, gain: AtomView, bias: Any = None, *, axis: int = -1, epsilon: float = 1e-5,
                **_: Any) -> AtomView:  # fmt: skip
    if axis % len(x.dims) != len(x.dims) - 1:
        raise NotImplementedError("over several dims")
    return ours.layer_norm(c.w, x, gain, bias, _scalar(np.float32(epsilon)))


def _rms_norm(
    c: Operation, x: AtomView, gain: AtomView, *, axis: int = -1, epsilon: float = 1e-5, **_: Any
) -> AtomView:
    return ours.rms_norm(c.w, x, gain, _scalar(np.float32(epsilon)))


def _gelu(c: Operation, x: AtomView, *, approximate: str = "none") -> AtomView:
    return ours.gelu(c.w, x, tanh=approximate == "tanh")


def _reshape(c: Operation, x: Any, shape: Any, *, allowzero: int = 0) -> Any:
    sizes = [int(n) for n in np.asarray(shape)]
    if not allowzero:
        sizes = [x.shape[d] if n == 0 else n for d, n in enumerate(sizes)]
    return c.w.reshape_view(x, sizes) if isinstance(x, AtomView) else np.reshape(x, sizes)


def _flatten(c: Operation, x: AtomView, *, axis: int = 1) -> AtomView:
    return c.w.reshape_view(x, [int(np.prod(x.shape[:axis])), -1])


def _transpose(c: Operation, x: Any, *, perm: Sequence[int] | None = None) -> Any:
    order = (
        list(perm) if perm is not None else list(range(x.ndim if not isinstance(x, AtomView) else len(x.dims)))[::-1]
    )
    return x.permute_dims(order) if isinstance(x, AtomView) else np.transpose(x, order)


def _squeeze_dims(c: Operation, x: Any, axes: Any = None, **more: Any) -> Any:
    dims = more.get("axes") if axes is None else [int(d) for d in np.asarray(axes).ravel()]
    if isinstance(x, AtomView):
        return x.squeeze_dims(range(len(x.dims)) if dims is None else dims)
    return np.squeeze(x, None if dims is None else tuple(dims))


def _unsqueeze_dims(c: Operation, x: Any, axes: Any = None, **more: Any) -> Any:
    dims = more["axes"] if axes is None else [int(d) for d in np.asarray(axes).ravel()]
    if not isinstance(x, AtomView):
        return np.expand_dims(x, tuple(dims))
    ndim = len(x.dims) + len(dims)
    for d in sorted(d % ndim for d in dims):
        x = x.with_one(d)
    return x


def _slice(c: Operation, x: Any, starts: Any = None, ends: Any = None, axes: Any = None, steps: Any = None,
           **more: Any) -> Any:  # fmt: skip
    starts, ends, axes, steps = (
        [int(n) for n in np.asarray(v if v is not None else more.get(name, other)).ravel()]
        for v, name, other in ((starts, "starts", []), (ends, "ends", []), (axes, "axes", []), (steps, "steps", []))
    )
    axes = axes or list(range(len(starts)))
    steps = steps or [1] * len(starts)
    if not isinstance(x, AtomView):
        at = [slice(None)] * np.ndim(x)
        for d, a, b, s in zip(axes, starts, ends, steps, strict=True):
            at[d] = slice(a, b, s)
        return np.asarray(x)[tuple(at)]
    for d, a, b, s in zip(axes, starts, ends, steps, strict=True):
        a, b, s = slice(a, b, s).indices(x.shape[d])
        if s != 1:
            raise NotImplementedError("with steps")
        x = ours.part(c.w, x, d, a, b)
    return x


def _gather(c: Operation, x: Any, ids: Any, *, axis: int = 0) -> Any:
    if not isinstance(x, AtomView):
        if isinstance(ids, AtomView):
            x = write_constant(c.w, np.asarray(x))
        else:
            return np.take(x, ids, axis)
    if isinstance(ids, AtomView):
        if axis:
            raise NotImplementedError("along another dim than the first")
        return ours.gather_rows(c.w, x, ids)
    places = np.asarray(ids)
    if places.ndim == 0:
        at = int(places) % x.shape[axis]
        return ours.part(c.w, x, axis, at, at + 1).squeeze_dims([axis])
    first = int(places.flat[0])
    if places.ndim == 1 and np.array_equal(places, first + np.arange(places.size)):
        return ours.part(c.w, x, axis, first, first + places.size)
    if axis:
        raise NotImplementedError("along another dim than the first")
    return ours.gather_rows(c.w, x, write_constant(c.w, places.astype(np.int64)))


def _concat(c: Operation, *values: Any, axis: int) -> Any:
    if any(isinstance(v, AtomView) for v in values):
        return ours.joined_along(c.w, [_view(c, v) for v in values], axis)
    return np.concatenate([np.atleast_1d(v) for v in values], axis)


def _split(c: Operation, x: Any, sizes: Any = None, *, axis: int = 0, split: Any = None, num_outputs: int = 0) -> Any:
    parts = [int(n) for n in (sizes if sizes is not None else split if split is not None else [])]
    if not parts:
        n, count = x.shape[axis], num_outputs or c.about[1]
        each = -(-n // count)
        parts = [min(each, n - k * each) for k in range(count)]
    if not isinstance(x, AtomView):
        return np.split(x, np.cumsum(parts)[:-1], axis)
    return ours.split_dim(c.w, x, axis, parts)


def _shape(c: Operation, x: Any, *, start: int = 0, end: int | None = None) -> Any:
    return np.asarray(x.shape, dtype=np.int64)[start:end]


def _cast(c: Operation, x: Any, *, to: str, **_: Any) -> Any:
    return c.w.cast(x, to) if isinstance(x, AtomView) else np.asarray(x).astype(numpy_dtype(to))


def _expand(c: Operation, x: Any, shape: Any) -> Any:
    sizes = np.broadcast_shapes(x.shape, tuple(int(n) for n in shape))
    return x.broadcast_dims(sizes) if isinstance(x, AtomView) else np.broadcast_to(x, sizes)


def _constant(c: Operation, **attributes: Any) -> Any:
    return np.asarray(next(iter(attributes.values())))


def _fill_shape(c: Operation, shape: Any, *, value: Any = None) -> Any:
    return np.full([int(n) for n in shape], np.float32(0) if value is None else np.asarray(value).ravel()[0])


def _triangle(c: Operation, x: Any, k: Any = 0, *, upper: int = 1) -> Any:
    if isinstance(x, AtomView):
        raise NotImplementedError("of what is not known")
    return (np.triu if upper else np.tril)(x, int(np.asarray(k)))


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


_FUNCTIONS = {"Exp": "exp", "Log": "log", "Sqrt": "sqrt", "Tanh": "tanh", "Sin": "sin", "Cos": "cos", "Abs": "abs"}

TABLE: dict[str, Handler] = {
    **{name: _elementwise_handler(f"{f}({{a}})", getattr(np, f)) for name, f in _FUNCTIONS.items()},
    "Relu": _elementwise_handler("relu({a})", lambda x: np.maximum(x, 0)),
    "Sigmoid": _elementwise_handler("sigmoid({a})", _sigmoid),
    "Erf": _elementwise_handler("erf({a})", erf),
    "Neg": _elementwise_handler("-{a}", np.negative),
    "Reciprocal": _elementwise_handler("1 / {a}", np.reciprocal),
    "Add": _elementwise_handler("{a} + {b}", np.add),
    "Sub": _elementwise_handler("{a} - {b}", np.subtract),
    "Mul": _elementwise_handler("{a} * {b}", np.multiply),
    "Div": _elementwise_handler("{a} / {b}", lambda x, y: x // y if np.asarray(x).dtype.kind in "iu" else x / y),
    "Max": _elementwise_handler("maximum({a}, {b})", np.maximum),
    "Min": _elementwise_handler("minimum({a}, {b})", np.minimum),
    "Pow": _power,
    "Equal": _compare_handler("==", np.equal),
    "Less": _compare_handler("<", np.less),
    "LessOrEqual": _compare_handler("<=", np.less_equal),
    "Greater": _compare_handler(">", np.greater),
    "GreaterOrEqual": _compare_handler(">=", np.greater_equal),
    "And": _elementwise_handler("{a} * {b}", np.logical_and, boolean=True),
    "Or": _elementwise_handler("maximum({a}, {b})", np.logical_or, boolean=True),
    "Not": _elementwise_handler("1 - {a}", np.logical_not, boolean=True),
    "Where": _write_where,
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Einsum": lambda c, *views, equation: write_einsum(c, equation, [_view(c, v) for v in views]),
    "ReduceMean": _reduce_handler("mean"),
    "ReduceSum": _reduce_handler("sum"),
    "ReduceMax": _reduce_handler("max"),
    "ReduceMin": _reduce_handler("min"),
    "Softmax": _softmax,
    "LayerNormalization": _layer_norm,
    "RMSNormalization": _rms_norm,
    "Gelu": _gelu,
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Transpose": _transpose,
    "Squeeze": _squeeze_dims,
    "Unsqueeze": _unsqueeze_dims,
    "Slice": _slice,
    "Gather": _gather,
    "Concat": _concat,
    "Split": _split,
    "Shape": _shape,
    "Cast": _cast,
    "Expand": _expand,
    "Constant": _constant,
    "ConstantOfShape": _fill_shape,
    "Range": lambda c, a, b, s: np.arange(np.asarray(a).item(), np.asarray(b).item(), np.asarray(s).item()),
    "Trilu": _triangle,
    "Identity": pass_through,
    "Dropout": pass_through,
}
