"""The computing ops on torch tensors: Einsum, Elementwise, ReduceDims, with the dtypes of the reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shardplan.core.dtypes import numpy_dtype, short_name
from shardplan.core.expression_tree import BINARY, Binary, Call, Name, Negate, Node, Number
from shardplan.core.messages import at_root
from shardplan.core.ops import Einsum, Elementwise, ReduceDims
from shardplan.core.ops.compute import Compute, wide
from shardplan.core.tensor import TensorType
from shardplan.errors import BackendError
from shardplan.execution.lower import place_of
from shardplan.execution.torch.dtypes import identity_of, short_name_of, to_numpy, to_torch, torch_dtype

if TYPE_CHECKING:
    from shardplan.execution.torch.wire import TorchWire

_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu": torch.nn.functional.silu,
    "sin": torch.sin,
    "cos": torch.cos,
    "abs": torch.abs,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "where": torch.where,
}


def bind_compute(op: Compute, operands: Sequence[TensorType], results: Sequence[TensorType], device: int) -> Any:
    """Return the bound step of a computing op on the device of that id; see `steps.bind`."""
    (u,) = results
    place = place_of(u, device)
    shape = () if place is None else u.local_shape(place)
    held = place is not None and bool(at_root(u)[place])
    dtype = torch_dtype(u.dtype)
    up = _accumulator(u.dtype)

    def local(arrays: list[torch.Tensor]) -> torch.Tensor:
        match op:
            case Einsum():
                return torch.einsum(op.spec, *(x.to(up) for x in arrays))
            case Elementwise():
                return _elementwise(op, arrays, operands, dtype)
            case ReduceDims():
                return _reduce_dims(op, arrays[0], operands[0], up)
            case _:
                raise BackendError(f"torch cannot run {op.name}")

    def run(arrays: list[torch.Tensor], wire: TorchWire) -> Generator[None, None, list[torch.Tensor]]:
        out = torch.empty(shape, dtype=dtype, device=wire.device)
        if held:
            out.copy_(_cast(local(arrays), dtype).expand(shape))
        return [out]
        yield  # never reached: it makes this a generator, as every bound step is, and no message is waited for

    return run


def _accumulator(name: str) -> torch.dtype:
    """The dtype in which sums are taken; torch has no sums of unsigned integers, which wrap as signed ones do."""
    found = wide(numpy_dtype(name))
    return torch.int64 if found.kind == "u" else torch_dtype(short_name(found))


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if x.dtype == dtype:
        return x
    # One rounding, as numpy and ml_dtypes do it: torch goes from f64 to narrow floats through f32.
    if x.dtype.is_floating_point and x.device.type == "cpu":
        return to_torch(to_numpy(x).astype(numpy_dtype(short_name_of(dtype))))
    return x.to(dtype)


def _elementwise(
    op: Elementwise, arrays: Sequence[torch.Tensor], operands: Sequence[TensorType], dtype: torch.dtype
) -> torch.Tensor:
    kind = numpy_dtype(short_name_of(dtype))
    up = dtype if kind.kind in "iub" else torch_dtype(short_name(wide(kind)))
    if up in (torch.uint16, torch.uint32, torch.uint64):  # torch computes with none of them
        values = [to_numpy(x) for x in arrays]
        return to_torch(np.asarray(op.expression.evaluate(values)).astype(kind)).to(arrays[0].device)
    values = [x if t.dtype == "bool" else x.to(up) for x, t in zip(arrays, operands, strict=True)]
    found = _evaluate(op.expression.root, dict(zip(op.expression.names, values, strict=True)), up)
    return found if isinstance(found, torch.Tensor) else torch.tensor(found, dtype=up)


def _evaluate(node: Node, values: dict[str, torch.Tensor], dtype: torch.dtype) -> Any:
    match node:
        case Name(name):
            return values[name]
        case Number(value):
            return value
        case Negate(operand):
            return -_evaluate(operand, values, dtype)
        case Binary(symbol, left, right):
            return BINARY[symbol](_evaluate(left, values, dtype), _evaluate(right, values, dtype))
        case Call(function, arguments):
            found = [_evaluate(x, values, dtype) for x in arguments]
            found = [x if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=dtype) for x in found]
            return _FUNCTIONS[function](*found)


def _reduce_dims(op: ReduceDims, x: torch.Tensor, t: TensorType, up: torch.dtype) -> torch.Tensor:
    if not op.dims:
        return x.to(up) if op.combine == "sum" else x
    if op.combine == "sum":
        total = torch.sum(x.to(up), dim=op.dims, keepdim=op.keep, dtype=up)
        return total / math.prod(t.shape[d] for d in op.dims) if op.reduction == "mean" else total
    if x.dtype in (torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2):
        array = to_numpy(x)
        start = array.dtype.type(to_numpy(identity_of(op.reduction, t.dtype)))
        reducer = np.maximum if op.reduction == "max" else np.minimum
        return to_torch(np.asarray(reducer.reduce(array, axis=op.dims, keepdims=op.keep, initial=start))).to(x.device)
    shape = [1 if d in op.dims else n for d, n in enumerate(x.shape) if op.keep or d not in op.dims]
    if not x.numel():  # the identity of the reduction
        return identity_of(op.reduction, t.dtype).to(x.device).expand(shape)
    return (torch.amax if op.reduction == "max" else torch.amin)(x, dim=op.dims, keepdim=op.keep)
