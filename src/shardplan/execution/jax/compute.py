"""Compute ops inside a `shard_map`: the namespace of jax.numpy, and the one interpreter that runs every op in it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
import numpy as np

from shardplan.core.namespace import Dtype, Namespace
from shardplan.core.ops.compute import Compute
from shardplan.core.tensor import TensorType
from shardplan.execution.jax.wire import JaxWire


def compute(op: Compute, arrays: Sequence[Any], types: Sequence[TensorType], wire: JaxWire) -> list[Any]:
    """Return this device's shards of the results, given those of the operands; all types are even."""

    def where(t: TensorType) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        shape = t.local_shape()
        return tuple(wire.index(a) * n if a else 0 for a, n in zip(t.atoms, shape, strict=True)), shape

    return op.bind(types, where)(jax_namespace(), arrays)


@cache
def jax_namespace() -> Namespace:
    """Return jax.numpy's functions; where 64 bits are off, integers are summed in 32, which has the same low bits."""

    def astype(x: Any, dtype: Dtype) -> Any:
        return jnp.asarray(x).astype(jax.dtypes.canonicalize_dtype(dtype))

    def scatter_add(rows: int, index: Any, values: Any) -> Any:
        return jnp.zeros((rows, *values.shape[1:]), values.dtype).at[index].add(values, mode="drop")

    reductions = {"sum": jnp.sum, "max": jnp.max, "min": jnp.min}

    def reduce(reduction: str, x: Any, dims: tuple[int, ...], keep: bool, nothing: Any) -> Any:
        return reductions[reduction](x, axis=dims, keepdims=keep)  # of nothing never: types are even

    return Namespace(
        dtype=lambda x: np.dtype(x.dtype),
        astype=astype,
        arange=lambda n: jnp.arange(n, dtype=np.int32),
        full=lambda shape, value, dtype: jnp.full(shape, value, jax.dtypes.canonicalize_dtype(dtype)),
        broadcast_to=jnp.broadcast_to,
        concatenate=jnp.concatenate,
        where=jnp.where,
        take=lambda x, index: x[index],
        scatter_add=scatter_add,
        einsum=lambda spec, *x: jnp.einsum(spec, *x, precision="highest"),
        reduce=reduce,
        maximum=jnp.maximum,
        minimum=jnp.minimum,
        exp=jnp.exp,
        log=jnp.log,
        sqrt=jnp.sqrt,
        tanh=jnp.tanh,
        erf=jax.lax.erf,
        sin=jnp.sin,
        cos=jnp.cos,
    )
