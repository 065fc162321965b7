"""Complex numbers of torch in ours: a pair of real values; a part of torch's table, for operations on pairs."""

from __future__ import annotations

from typing import Any

from shardplan.core.dtypes import itemsize
from shardplan.interop.importers import composites as ours
from shardplan.interop.importers.call import Handler, Operation
from shardplan.interop.importers.views import AtomView, ComplexPair


def has_pairs(values: Any) -> bool:
    """Whether a complex value is among some."""
    if isinstance(values, (list, tuple)) and not isinstance(values, AtomView | ComplexPair):
        return any(has_pairs(v) for v in values)
    return isinstance(values, ComplexPair)


def _parts(c: Operation, x: AtomView) -> ComplexPair:
    """A last dim of two as a complex value."""
    real, imaginary = (ours.part(c.w, x, -1, k, k + 1).squeeze_dims([-1]) for k in (0, 1))
    return ComplexPair(real, imaginary)


def _side_by_side(c: Operation, x: ComplexPair) -> AtomView:
    d = len(x.real.dims)
    return ours.joined_along(c.w, [x.real.with_one(d), x.imaginary.with_one(d)], d)


def _pair_of(c: Operation, x: Any) -> ComplexPair:
    if isinstance(x, ComplexPair):
        return x
    if isinstance(x, AtomView):
        return ComplexPair(x, c.w.constant(0.0, c.w.dtype(x), x.shape))
    return ComplexPair(*(c.w.constant(part, f"f{4 * itemsize(c.dtype)}") for part in (x.real, x.imag)))


def _product(c: Operation, x: Any, y: Any) -> ComplexPair:
    x, y = _pair_of(c, x), _pair_of(c, y)
    kind = c.w.dtype(x.real)
    values = (x.real, x.imaginary, y.real, y.imaginary)
    return ComplexPair(*(c.write_elementwise(e, *values, dtype=kind) for e in _PRODUCT))


def _map_parts(handle: Handler) -> Handler:
    """What a real operation does, to both parts."""

    def handler(c: Operation, x: ComplexPair, *more: Any, **how: Any) -> ComplexPair:
        real = c._replace(kinds=(c.w.dtype(x.real),))
        return ComplexPair(*(handle(real, part, *more, **how) for part in x))

    return handler


_BOTH = ("aten.view.default", "aten.reshape.default", "aten.unsqueeze.default", "aten.transpose.int",
         "aten.permute.default",
         "aten.slice.Tensor", "aten.select.int", "aten.expand.default", "aten.flatten.using_ints", "aten.neg.default",
         "aten._unsafe_view.default", "aten.clone.default", "aten.contiguous.default", "aten.squeeze.dim",
         "aten.alias.default")  # fmt: skip
_PRODUCT = ("{a} * {c} - {b} * {d}", "{a} * {d} + {b} * {c}")


def _sum_handler(sign: str) -> Handler:
    def handler(c: Operation, x: Any, y: Any, alpha: Any = 1) -> ComplexPair:
        if alpha != 1:
            raise NotImplementedError("with a factor")
        x, y = _pair_of(c, x), _pair_of(c, y)
        pairs = zip(x, y, strict=True)
        return ComplexPair(*(c.write_elementwise(f"{{a}} {sign} {{b}}", a, b, dtype=c.w.dtype(a)) for a, b in pairs))

    return handler


def _absolute(c: Operation, x: ComplexPair) -> AtomView:
    return c.write_elementwise("sqrt({a} * {a} + {b} * {b})", *x)


def complex_table(table: dict[str, Handler]) -> dict[str, Handler]:
    """The operations on pairs, where those on both parts are the table's."""
    return {
        **{name: _map_parts(table[name]) for name in _BOTH},
        "aten.view_as_real.default": _side_by_side,
        "aten.mul.Tensor": _product,
        "aten.add.Tensor": _sum_handler("+"),
        "aten.sub.Tensor": _sum_handler("-"),
        "aten.abs.default": _absolute,
        "aten.real.default": lambda c, x: x.real,
        "aten.imag.default": lambda c, x: x.imaginary,
        "aten._conj.default": lambda c, x: ComplexPair(x.real, c.w.write_elementwise("-a", x.imaginary)),
    }


# What makes pairs of real values.
MADE: dict[str, Handler] = {
    "aten.view_as_complex.default": _parts,
    "aten.complex.default": lambda c, x, y: ComplexPair(x, y),
    "aten.polar.default": lambda c, r, t: ComplexPair(
        c.w.write_elementwise("a * cos(b)", r, t), c.w.write_elementwise("a * sin(b)", r, t)
    ),
}
