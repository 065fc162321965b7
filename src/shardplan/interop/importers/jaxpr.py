"""A closed jaxpr as a flat program: what it calls is written in its place; sharding constraints are kept as they are.

An input is a parameter where its dtype is a floating one and the caller gives its dims no names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from shardplan.core.dtypes import numpy_dtype, short_name
from shardplan.core.tensor import TensorType
from shardplan.interop.importers.call import Operation, Unknown, handle_operation
from shardplan.interop.importers.flat import Flattened
from shardplan.interop.importers.jax_table import TABLE, annotated_type
from shardplan.interop.importers.scan import Kind, ScanForm, write_scan
from shardplan.interop.importers.views import AtomView
from shardplan.interop.importers.writer import FlatWriter

_BODIES = ("jaxpr", "call_jaxpr", "fun_jaxpr")  # parameters of a primitive that calls


def is_jaxpr(source: object) -> bool:
    """Whether it is a closed jaxpr, without importing JAX."""
    return type(source).__name__ == "ClosedJaxpr"


def flatten_source(source: Any, named: Collection[str], w: FlatWriter) -> Flattened:
    """Write the equations."""
    unknown = Unknown("the jaxpr", w.opaque)
    values: dict[Any, Any] = {}
    data = list[str]()
    for var, name in zip(source.jaxpr.invars, _names(source.jaxpr), strict=True):
        kind, shape = short_name(var.aval.dtype), var.aval.shape
        if numpy_dtype(kind).kind in "fV" and name not in named:
            values[var] = w.parameter(name, name, kind, shape)
        else:
            values[var] = w.input(name, kind, shape)
            data.append(name)
    for var, value in zip(source.jaxpr.constvars, source.consts, strict=True):
        array = np.asarray(value)
        values[var] = w.declare_constant(array) if array.shape else array.item()
    found = _jaxpr(w, source.jaxpr, values, unknown)
    kinds = [short_name(var.aval.dtype) for var in source.jaxpr.outvars]
    outputs = [v if isinstance(v, AtomView) else w.constant(v, kind) for v, kind in zip(found, kinds, strict=True)]
    unknown.check()
    return Flattened(w, data, outputs, w.constants, frozenset(), *_said_shardings(source.jaxpr, w, values, outputs))


def _said_shardings(
    jaxpr: Any, w: FlatWriter, values: Mapping[Any, Any], outputs: Sequence[AtomView]
) -> tuple[dict[str, TensorType], list[TensorType | None]]:
    """What `in_shardings` and `out_shardings` say, where all is one call of a jitted function."""
    given: dict[str, TensorType] = {}
    wanted: list[TensorType | None] = [None] * len(outputs)
    if len(jaxpr.eqns) != 1 or "in_shardings" not in jaxpr.eqns[0].params:
        return given, wanted
    (eqn,) = jaxpr.eqns
    for var, sharding in zip(eqn.invars, eqn.params["in_shardings"], strict=True):
        x = values.get(var) if var in jaxpr.invars else None
        if isinstance(x, AtomView) and (t := annotated_type(w, x, sharding)) is not None:
            given[x.name] = t
    said = dict(zip(eqn.outvars, eqn.params["out_shardings"], strict=True))
    for k, (var, x) in enumerate(zip(jaxpr.outvars, outputs, strict=True)):
        wanted[k] = annotated_type(w, w.materialize_view(x), said[var]) if var in said else None
    return given, wanted


def _names(jaxpr: Any) -> list[str]:
    """What the arguments are called: `p['l'][0]` is `p.l.0`."""
    said: Sequence[str] = getattr(jaxpr.debug_info, "arg_names", None) or ()
    names = [".".join(re.findall(r"\w+", n or "")) for n in said]
    legal = len(names) == len(jaxpr.invars) == len(set(names)) and all(names)
    return names if legal else [f"argument.{k}" for k in range(len(jaxpr.invars))]


def _jaxpr(w: FlatWriter, jaxpr: Any, values: dict[Any, Any], unknown: Unknown, outside: str = "") -> list[Any]:
    """Write the equations of a jaxpr whose inputs have values, and return its results."""

    def value(x: Any) -> Any:
        return _number(x.val) if hasattr(x, "val") else values[x]

    for eqn in jaxpr.eqns:
        args = [value(x) for x in eqn.invars]
        body = next((eqn.params[key] for key in _BODIES if key in eqn.params), None)
        name = eqn.primitive.name
        place = _place(eqn) or outside
        made: Any
        if name == "scan" and body is not None and not any(np.ndim(x) for x in body.consts):
            made = write_scan(w, _scan_form(eqn.params), args, partial(_write_closed, body, unknown, place))
        elif name == "cond" and not isinstance(args[0], AtomView):  # clamped, as JAX has it
            branches = eqn.params["branches"]
            chosen = branches[min(max(int(args[0]), 0), len(branches) - 1)]
            made = _write_closed(chosen, unknown, place, w, args[1:])
        elif body is not None and name not in ("scan", "while", "cond"):
            inner = body.jaxpr if hasattr(body, "jaxpr") else body
            given = dict(zip(inner.invars, args, strict=True)) | dict(
                zip(inner.constvars, getattr(body, "consts", ()), strict=True)
            )
            made = _jaxpr(w, inner, given, unknown, place)
        else:
            kinds = tuple(short_name(x.aval.dtype) for x in eqn.outvars)
            call = Operation(w, name, kinds, tuple(tuple(int(n) for n in x.aval.shape) for x in eqn.outvars))
            found = handle_operation(call, TABLE, unknown, place, args, eqn.params)
            made = found if eqn.primitive.multiple_results and not isinstance(found, AtomView) else [found]
        values |= zip(eqn.outvars, made, strict=True)
    return [value(x) for x in jaxpr.outvars]


def _scan_form(params: Mapping[str, Any]) -> ScanForm:
    """What a scan's parameters say."""
    inner = params["jaxpr"].jaxpr

    def kinds(some: Sequence[Any]) -> list[Kind]:
        return [(short_name(v.aval.dtype), tuple(map(int, v.aval.shape))) for v in some]

    given, made = kinds(inner.invars), kinds(inner.outvars)
    return ScanForm(params["num_consts"], params["num_carry"], given, made, params["length"], bool(params["reverse"]))


def _write_closed(body: Any, unknown: Unknown, place: str, w: FlatWriter, args: list[Any]) -> list[Any]:
    """Write a closed jaxpr that is called."""
    given = dict(zip(body.jaxpr.invars, args, strict=True))
    given |= zip(body.jaxpr.constvars, (_number(x) for x in body.consts), strict=True)
    return _jaxpr(w, body.jaxpr, given, unknown, place)


def _number(value: Any) -> Any:
    """A literal as it is written: 1e-05, which in f32 is another number in f64."""
    array = np.asarray(value)
    return float(str(array)) if numpy_dtype(short_name(array.dtype)).kind in "fV" else array.item()


def _place(eqn: Any) -> str:
    """The line that makes an equation."""
    from jax._src import source_info_util

    return source_info_util.summarize(eqn.source_info)
