"""An ONNX model as a flat program: from opset 10 on, external data referenced and never loaded.

A parameter is an initializer of a floating dtype with more than one element. What else is known, as shapes and their
arithmetic, is worked out in numpy.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from shardplan.core.dtypes import numpy_dtype, short_name
from shardplan.errors import ShardplanError, optional
from shardplan.interop.importers.call import Operation, Unknown, handled
from shardplan.interop.importers.flat import Flattened
from shardplan.interop.importers.onnx_table import TABLE, array_of
from shardplan.interop.importers.views import Seen
from shardplan.interop.importers.writer import FlatWriter

OLDEST = 10


def read_onnx(path: str) -> Any:
    """Load a `.onnx` file, without its external data."""
    onnx: Any = optional("onnx", "onnx")
    return onnx.load(path, load_external_data=False)


def is_onnx(source: object) -> bool:
    """Whether it is an ONNX model, without importing onnx."""
    return type(source).__name__ == "ModelProto"


def flattened(source: Any, named: Collection[str], w: FlatWriter) -> Flattened:
    """Write the nodes."""
    onnx: Any = optional("onnx", "onnx")
    versions = [o.version for o in source.opset_import if o.domain in ("", "ai.onnx")]
    if not versions or versions[0] < OLDEST:
        raise ShardplanError(f"load: an ONNX model of opset {versions or 'none'}; legal are {OLDEST} and later")
    unknown = Unknown("the ONNX model")
    values: dict[str, Any] = {"": None}
    for x in source.graph.initializer:
        kind, shape = _kind(onnx, x.data_type), tuple(x.dims)
        if numpy_dtype(kind).kind in "fV" and np.prod(shape) > 1:
            values[x.name] = w.parameter(_legal(x.name, w), x.name, kind, shape)
        else:
            values[x.name] = onnx.numpy_helper.to_array(x)
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
        attributes: dict[str, Any] = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        attributes = {k: v.decode() if isinstance(v, bytes) else v for k, v in attributes.items()}
        attributes |= {k: onnx.numpy_helper.to_array(v) for k, v in attributes.items() if hasattr(v, "raw_data")}
        if "to" in attributes:
            attributes["to"] = _kind(onnx, int(attributes["to"]))
        args = [values[name] for name in node.input]
        kinds = tuple(w.dtype(v) for v in args if isinstance(v, Seen))[:1] or ("f32",)
        name = node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"
        call = Operation(w, name, kinds, ((),), (versions[0], len(node.output)))
        made = handled(call, TABLE, unknown, f"node {number}, {node.name or node.output[0]}", args, attributes)
        outs = made if isinstance(made, list) else [made]
        values |= zip(node.output, outs, strict=False)
    unknown.check()
    outputs = [v if isinstance(v := values[x.name], Seen) else array_of(w, v) for x in source.graph.output]
    return Flattened(w, data, outputs, w.constants)


def _kind(onnx: Any, number: int) -> str:
    return short_name(onnx.helper.tensor_dtype_to_np_dtype(number))


def _legal(name: str, w: FlatWriter) -> str:
    """A name as values have it, which no other input has."""
    found = "".join(c if c.isascii() and (c.isalnum() or c in "_.") else "_" for c in name).strip(".") or "value"
    while found in w.inputs:
        found += "_"
    return found
