"""Products of rows of a matrix with a thin matrix, in f32, on torch tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardplan.errors import optional
from shardplan.fused.kernels.native import Kinds, native

if TYPE_CHECKING:
    import torch

_NAMES = {"torch.float32": "f32", "torch.bfloat16": "bf16", "torch.float16": "f16"}


def dtype_name(x: torch.Tensor) -> str:
    """Return the short name of a tensor's dtype, torch's own where it is none of ours."""
    return _NAMES.get(str(x.dtype), str(x.dtype))


def thin(x: torch.Tensor) -> torch.Tensor:
    """Return [K, C] or [K] as f32 [C, K], the form that `rows_times` takes."""
    return (x[None] if x.ndim == 1 else x.t()).float().contiguous()


def rows_times(a: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
    """Store `a @ x.T` of a [m, K] and x f32 [C, K] in out, f32 [m, C], contiguous."""
    torch = optional("torch", "torch")
    kernels, kind = native(), Kinds.get(dtype_name(a))
    if not a.shape[0]:
        return
    if kernels is None or kind is None or a.stride(1) != 1:
        torch.mm(a.float(), x.t(), out=out)
        return
    kernels.gemv(kind, a.data_ptr(), a.stride(0), a.shape[0], a.shape[1], x.data_ptr(), x.shape[0], out.data_ptr())
