"""The ops that compute, on one device's shards, in jax.numpy: Einsum, Elementwise, ReduceDims.

As in the reference, floats narrower than 32 bits are computed in f32 and rounded once; integers wrap. Integers are
summed in 32 bits where their dtype is no wider: sums modulo 2^32 and 2^64 agree in the low bits that remain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, assert_never

import numpy as np

from shardplan.core.dtypes import numpy_dtype
from shardplan.core.expression_tree import evaluate
from shardplan.core.ops import Einsum, Elementwise, ReduceDims
from shardplan.core.tensor import TensorType


def compute(op: Einsum | Elementwise | ReduceDims, arrays: Sequence[Any], types: Sequence[TensorType]) -> Any:
    """Return the shard of the result, given those of the operands, of these types."""
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]

    (u,) = op.infer(*types)
    dtype = numpy_dtype(u.dtype)
    match op:
        case Einsum():
            found = jnp.einsum(op.spec, *(x.astype(_wide(dtype)) for x in arrays), precision="highest")
        case Elementwise():
            up = dtype if dtype.kind in "iub" else _wide(dtype)
            values = [x if t.dtype == "bool" else x.astype(up) for x, t in zip(arrays, types, strict=True)]
            named = dict(zip(op.expression.names, values, strict=True))
            found = evaluate(op.expression.root, named, up, _functions())
        case ReduceDims():
            found = _reduce(op, arrays[0], types[0], dtype)
        case _:
            assert_never(op)
    return jnp.broadcast_to(jnp.asarray(found).astype(dtype), u.local_shape())


def _wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in which a result of `dtype` is computed: of 32 bits or more."""
    if dtype.kind in "iu":
        return np.dtype(f"{dtype.kind}{max(4, dtype.itemsize)}")
    return np.dtype(np.float32) if dtype.itemsize < 4 and dtype.kind in "fV" else dtype


def _reduce(op: ReduceDims, x: Any, t: TensorType, dtype: np.dtype[Any]) -> Any:
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]

    if op.combine == "sum":
        total = jnp.sum(x.astype(_wide(dtype)), axis=op.dims, keepdims=op.keep)
        if op.reduction == "mean":
            total = total / _wide(dtype).type(math.prod(t.shape[d] for d in op.dims))
        return total
    up = np.dtype(np.float32) if dtype.kind == "V" else dtype
    return (jnp.max if op.reduction == "max" else jnp.min)(x.astype(up), axis=op.dims, keepdims=op.keep)


def _functions() -> dict[str, Callable[..., Any]]:
    """The functions of the expression language, with the formulas of `core.expression_tree`."""
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]

    def sigmoid(x: Any) -> Any:
        small = jnp.exp(-jnp.abs(x))
        return jnp.where(x >= 0, 1 / (1 + small), small / (1 + small))

    return {
        "exp": jnp.exp,
        "log": jnp.log,
        "sqrt": jnp.sqrt,
        "rsqrt": lambda x: 1 / jnp.sqrt(x),
        "tanh": jnp.tanh,
        "relu": lambda x: jnp.maximum(x, 0),
        "sigmoid": sigmoid,
        "gelu": lambda x: 0.5 * x * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))),
        "silu": lambda x: x * sigmoid(x),
        "sin": jnp.sin,
        "cos": jnp.cos,
        "abs": jnp.abs,
        "maximum": jnp.maximum,
        "minimum": jnp.minimum,
        "where": jnp.where,
    }
