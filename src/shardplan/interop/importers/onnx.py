"""An ONNX model as a flat program: from opset 10 on, external data referenced and never loaded.

A parameter is an initializer of a floating dtype with more than one element. What else is known, as shapes and their
arithmetic, is worked out in numpy.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from shardplan.core.decoding import read_bytes
from shardplan.core.dtypes import numpy_dtype, short_name
from shardplan.errors import LayoutError, ParseError, ShardplanError, excerpt, line, optional
from shardplan.interop.importers.call import Operation, Unknown, handle_operation
from shardplan.interop.importers.constant_value import write_constant
from shardplan.interop.importers.flat import Flattened
from shardplan.interop.importers.onnx_table import TABLE
from shardplan.interop.importers.views import AtomView
from shardplan.interop.importers.writer import FlatWriter

OLDEST = 10


def read_onnx(path: str) -> Any:
    """Load a `.onnx` file, without its external data; raises `ParseError` where it is none."""
    onnx: Any = optional("onnx", "onnx")
    message: Any = optional("google.protobuf.message", "onnx")
    try:
        return onnx.load_model_from_string(read_bytes(path))
    except message.DecodeError as error:
        raise ParseError(f"{line(path)} is no ONNX model: {line(error)}") from None


def is_onnx(source: object) -> bool:
    """Whether it is an ONNX model, without importing onnx."""
    return type(source).__name__ == "ModelProto"


def flatten_source(source: Any, named: Collection[str], w: FlatWriter) -> Flattened:
    """Write the nodes."""
    onnx: Any = optional("onnx", "onnx")
    versions = [o.version for o in source.opset_import if o.domain in ("", "ai.onnx")]
    if not versions or versions[0] < OLDEST:
        raise ShardplanError(f"load: an ONNX model of opset {versions or 'none'}; legal are {OLDEST} and later")
    unknown = Unknown("the ONNX model", w.opaque)
    values: dict[str, Any] = {"": None}
    for x in source.graph.initializer:
        kind, shape = _kind(onnx, x.data_type), tuple(x.dims)
        if numpy_dtype(kind).kind in "fV" and np.prod(shape) > 1:
            values[x.name] = w.parameter(_legal(x.name, w), x.name, kind, shape)
        else:
            values[x.name] = _array(onnx, x)
    data = list[str]()
    for x in source.graph.input:
        if x.name in values:
            continue
        t = x.type.tensor_type
        shape = tuple(d.dim_value for d in t.shape.dim)
        if not all(shape):
            raise ShardplanError(
                f"load: the input {x.name} has a dim without a size; legal are sizes, fixed by an export"
            )
        data.append(_legal(x.name, w))
        values[x.name] = w.input(data[-1], _kind(onnx, t.elem_type), shape)
    for number, node in enumerate(source.graph.node):
        place = f"node {number}, {node.name or next(iter(node.output), node.op_type)}"
        attributes = {a.name: _attribute(onnx, a, place) for a in node.attribute}
        if "to" in attributes:
            attributes["to"] = _kind(onnx, attributes["to"])
        args = [_operand_value(values, name, place) for name in node.input]
        kinds = tuple(w.dtype(v) for v in args if isinstance(v, AtomView))[:1] or ("f32",)
        name = node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"
        call = Operation(w, name, kinds, ((),), (versions[0], len(node.output)))
        made = handle_operation(call, TABLE, unknown, place, args, attributes)
        outs = made if isinstance(made, list) else [made]
        values |= zip(node.output, outs, strict=False)
    unknown.check()
    outputs = [_operand_value(values, x.name, "the graph's output") for x in source.graph.output]
    outputs = [v if isinstance(v, AtomView) else write_constant(w, np.asarray(v)) for v in outputs]
    return Flattened(w, data, outputs, w.constants)


def _kind(onnx: Any, number: Any) -> str:
    """The short name of a dtype that ONNX numbers."""
    try:
        return short_name(onnx.helper.tensor_dtype_to_np_dtype(number))
    except (KeyError, TypeError, LayoutError):
        raise ParseError(
            f"load: a tensor of the ONNX dtype {excerpt(number)}; legal are those with a numpy dtype"
        ) from None


def _array(onnx: Any, x: Any) -> np.ndarray:
    """The values of a tensor that the model holds."""
    if x.data_location == onnx.TensorProto.EXTERNAL:
        raise ParseError(f"load: {excerpt(x.name)} has data outside the ONNX model; legal are weights of floats there")
    try:
        return onnx.numpy_helper.to_array(x)
    except (KeyError, TypeError, ValueError) as error:
        raise ParseError(
            f"load: the ONNX tensor {excerpt(x.name)} of shape {excerpt(list(x.dims))}: {line(error)}"
        ) from None


def _attribute(onnx: Any, a: Any, place: str) -> Any:
    """The value of an attribute: a number, text, an array, or a list."""
    try:
        value = onnx.helper.get_attribute_value(a)
        if hasattr(value, "raw_data"):
            return _array(onnx, value)
        return value.decode() if isinstance(value, bytes) else value
    except ValueError as error:  # what is no UTF-8, too
        raise ParseError(f"load: {line(place)}: the attribute {excerpt(a.name)}: {line(error)}") from None


def _operand_value(values: dict[str, Any], name: str, place: str) -> Any:
    """What a node takes by name."""
    if name not in values:
        raise ParseError(f"load: {line(place)} takes {excerpt(name)}, which no input and no node before it gives")
    return values[name]


def _legal(name: str | bytes, w: FlatWriter) -> str:
    """A name as values have it, which no other input has."""
    if isinstance(name, bytes):  # so are names that are no UTF-8
        raise ParseError(f"load: a value is called {excerpt(name)}; legal are names in UTF-8")
    found = "".join(c if c.isascii() and (c.isalnum() or c in "_.") else "_" for c in name).strip(".") or "value"
    while found in w.inputs:
        found += "_"
    return found
