"""Products of rows of a matrix with a thin matrix, in f32 (of f64 f64), on torch tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardplan.errors import optional
from shardplan.fused.kernels.native import Kinds, native

if TYPE_CHECKING:
    import torch

_NAMES = {"torch.float32": "f32", "torch.bfloat16": "bf16", "torch.float16": "f16"}


def dtype_name(x: torch.Tensor) -> str:
    """Return the short name of a tensor's dtype, torch's own where it is none of ours."""
    return _NAMES.get(str(x.dtype), str(x.dtype))


def thin(x: torch.Tensor) -> torch.Tensor:
    """Return [K, C] or [K] as f32 [C, K], of f64 as that: the form that `rows_times` takes."""
    return (x[None] if x.ndim == 1 else x.t()).to(sum_dtype(x)).contiguous()


def sum_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype in which numbers of a tensor's are added up: f32, or f64 of f64."""
    torch = optional("torch", "torch")
    return torch.promote_types(x.dtype, torch.float32)


LANE = np.dtype([("to", "u8"), ("flag", "u8"), ("first", "i8"), ("step", "i8")])
WANT = np.dtype([("word", "u8"), ("want", "i8"), ("step", "i8")])


def fits(a: torch.Tensor) -> bool:
    """Return whether the C++ kernels take a matrix."""
    return native() is not None and dtype_name(a) in Kinds and a.stride(1) == 1


def one_shot(
    a: torch.Tensor, x: torch.Tensor, lanes: np.ndarray, wants: np.ndarray, epoch: int, nanoseconds: int,
    came: torch.Tensor, addends: torch.Tensor, sums: torch.Tensor,
) -> int:  # fmt: skip
    """Store `a @ x.T` in all lanes, signal, wait, and sum what came in the order of ranks; return how many came.

    Lanes are rows of `LANE`, wants of `WANT`, `came` is f32 [W, m, C], addends and sums f32 [m, C]; a must `fits`.
    """
    kernels = native()
    assert kernels is not None
    given = (Kinds[dtype_name(a)], a.data_ptr(), a.stride(0), a.shape[0], a.shape[1], x.data_ptr(), x.shape[0])
    said = (lanes.ctypes.data, wants.ctypes.data, len(lanes), epoch, nanoseconds)
    return kernels.one_shot(*given, *said, came.data_ptr(), addends.data_ptr(), sums.data_ptr())


def rows_times(a: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
    """Store `a @ x.T` of a [m, K] and x [C, K] in out [m, C], contiguous, x and out as `thin` says."""
    torch = optional("torch", "torch")
    kernels, kind = native(), Kinds.get(dtype_name(a))
    if not a.shape[0]:
        return
    if kernels is None or kind is None or a.stride(1) != 1:
        torch.mm(a.to(out.dtype), x.t(), out=out)
        return
    kernels.gemv(kind, a.data_ptr(), a.stride(0), a.shape[0], a.shape[1], x.data_ptr(), x.shape[0], out.data_ptr())
