"""Compute ops on torch tensors: the namespace of torch, and the one interpreter that runs every op in it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shardplan.core.dtypes import numpy_dtype, short_name
from shardplan.core.namespace import NUMPY, Dtype, Namespace
from shardplan.core.op import Op
from shardplan.core.ops.compute import LocalRun
from shardplan.core.tensor import TensorType
from shardplan.execution.lower import bind_local
from shardplan.execution.rank_rounds import RankKernel
from shardplan.execution.torch.dtypes import FOREIGN, short_name_of, to_numpy, to_torch, torch_dtype
from shardplan.execution.torch.pack import maker

if TYPE_CHECKING:
    from shardplan.execution.torch.wire import TorchWire


def bind_compute(op: Op, operands: Sequence[TensorType], results: Sequence[TensorType], device: int) -> Any:
    """Return the bound step of a compute op on the device of that id; see `steps.bind`."""
    bound = bind_local(op, operands, results[0], device, "torch")
    makers = [maker(u, device) for u in results]
    dtypes = [torch_dtype(u.dtype) for u in results]
    foreign = any(torch_dtype(t.dtype) in FOREIGN for t in (*operands, *results))

    def run(arrays: list[torch.Tensor], wire: TorchWire) -> Generator[None, None, list[torch.Tensor]]:
        if not bound:
            return [make(wire) for make in makers]
        found = on_host(bound, arrays) if foreign else bound(torch_namespace(wire.device), arrays)
        others = {x.untyped_storage().data_ptr() for x in arrays}
        out: list[torch.Tensor] = []
        for make, dtype, x in zip(makers, dtypes, found, strict=True):
            storage = x.untyped_storage()
            # A view would keep what it is of, and no tensor may be another's: what is neither is a result as it is.
            if x.dtype != dtype or x.device != wire.device or not x.is_contiguous() or storage.nbytes() != x.nbytes:
                x = make(wire).copy_(x)
            elif storage.data_ptr() in others:
                x = x.clone()
            others.add(x.untyped_storage().data_ptr())
            out.append(x)
        return out
        yield  # never reached: it makes this a generator, as every bound step is, and no message is waited for

    return run


def on_host(bound: LocalRun, arrays: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run an op in numpy, as is done for dtypes that torch computes little or nothing with."""
    with np.errstate(all="ignore"):
        return [to_torch(y) for y in bound(NUMPY, [to_numpy(x) for x in arrays])]


def work(held: Mapping[str, torch.Tensor], kernel: RankKernel, device: torch.device) -> None:
    """Run what is computed between messages, on buffers."""
    arrays = [block.flat(held) for block in kernel.sources]
    targets = [block.flat(held) for block in kernel.targets]
    if any(x.dtype in FOREIGN for x in (*arrays, *targets)):
        found = on_host(kernel.target_elements, arrays)
    else:
        found = kernel.target_elements(torch_namespace(device), arrays)
    for x, y in zip(targets, found, strict=True):
        x.copy_(y)


def _einsum_on_accelerator(spec: str, *arrays: torch.Tensor) -> torch.Tensor:
    """Return `torch.einsum`, on the host for integers: no library of an accelerator multiplies matrices of them."""
    if arrays[0].is_floating_point() or arrays[0].is_complex():
        return torch.einsum(spec, *arrays)
    return torch.einsum(spec, *(x.cpu() for x in arrays)).to(arrays[0].device)


@lru_cache(maxsize=64)
def torch_namespace(device: torch.device) -> Namespace:
    """Return torch's functions, which make new tensors on `device`."""
    plain: Callable[..., Any] = torch.full  # numbers of Python are taken, too

    def scatter_add(rows: int, index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        out = torch.zeros((rows + 1, *values.shape[1:]), dtype=values.dtype, device=device)
        return out.index_add_(0, index, values)[:rows]

    return Namespace(
        dtype=lambda x: numpy_dtype(short_name_of(x.dtype)),
        astype=_cast,
        arange=lambda n: torch.arange(n, dtype=torch.int32, device=device),
        full=lambda shape, value, dtype: plain(shape, value, dtype=_computing(dtype), device=device),
        broadcast_to=torch.broadcast_to,
        concatenate=torch.concatenate,
        where=torch.where,
        take=lambda x, index: x[index],
        scatter_add=scatter_add,
        einsum=torch.einsum if device.type == "cpu" else _einsum_on_accelerator,
        reduce=_reduce,
        maximum=torch.maximum,
        minimum=torch.minimum,
        exp=torch.exp,
        log=torch.log,
        sqrt=torch.sqrt,
        tanh=torch.tanh,
        erf=torch.erf,
        sin=torch.sin,
        cos=torch.cos,
        eager=device.type == "cpu",  # elsewhere a call costs more than memory does
    )


def _computing(dtype: Dtype) -> torch.dtype:
    """The dtype of torch that stands for one: it has no sums of unsigned integers, which wrap as signed ones do."""
    return torch.int64 if dtype == np.uint64 else torch_dtype(short_name(dtype))


def _cast(x: torch.Tensor, dtype: Dtype) -> torch.Tensor:
    to = _computing(dtype)
    # One rounding, as numpy and ml_dtypes do it: torch goes from f64 to narrow floats through f32.
    if x.dtype.is_floating_point and x.device.type == "cpu" and dtype.itemsize <= x.itemsize and x.dtype != to:
        with np.errstate(all="ignore"):
            return to_torch(to_numpy(x).astype(dtype))
    return x.to(to)


def _reduce(reduction: str, x: torch.Tensor, dims: tuple[int, ...], keep: bool, nothing: Any) -> torch.Tensor:
    if not dims:  # to torch this is all of them
        return x
    if reduction == "sum":
        return torch.sum(x, dim=dims, keepdim=keep, dtype=x.dtype)
    if not x.numel():
        shape = [1 if d in dims else n for d, n in enumerate(x.shape) if keep or d not in dims]
        return torch.full(shape, nothing.item(), dtype=x.dtype, device=x.device)
    return (torch.amax if reduction == "max" else torch.amin)(x, dim=dims, keepdim=keep)
