"""What kernels keep in place of the weights that an engine loads: layouts for `finish=`, in tensors of their own.

`FinishedLayouts` is called with the model after every refit. It takes the parameters that its patterns name, as they
were loaded, and writes what a kernel reads into `tensors`, by name: allocated at the first call, and filled in place at
all later ones, so that a captured graph keeps its addresses. The loaded parameters stay as they are: the next refit
needs them. Three layouts ship: FlashInfer's rows of experts, MXFP8 with scales transposed, and f8 in square blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Protocol

from shardplan.core import validation
from shardplan.errors import LayoutError, excerpt, optional

MX_BLOCK = 32  # elements with one scale: OCP Microscaling Formats 1.0
_E4M3_MOST = 448.0
_E4M3_EXPONENT = 8  # of the largest power of 2 that e4m3 has
_E8M0_BIAS = 127


class KernelLayout(Protocol):
    """What a layout makes of one parameter: tensors by what is added to its name."""

    def of(self, name: str, tensor: Any) -> dict[str, Any]:
        """Return the kernel's tensors of a loaded one; raises `LayoutError` for a shape that the kernel has not."""
        ...


class FinishedLayouts:
    """The `finish=` of a refit: layouts by pattern of names, and what they made.

    >>> import torch
    >>> finish = FinishedLayouts({"*.w13_weight": FlashInferExperts()})
    >>> finish({"experts.w13_weight": torch.arange(64.0).reshape(1, 64, 1)})
    >>> finish.tensors["experts.w13_weight"][0, :4, 0].tolist()
    [32.0, 34.0, 36.0, 38.0]
    """

    def __init__(self, layouts: Mapping[str, KernelLayout]) -> None:
        """Take layouts by pattern; the first that matches a name holds."""
        self.layouts = dict(layouts)
        self.tensors: dict[str, Any] = {}

    def __call__(self, model: Any) -> None:
        """Make, or fill again, what the kernels read.

        Raises `LayoutError`, before anything is written, where a pattern has no parameter that none before it has; and
        for a parameter whose shape is no longer that of the first call.
        """
        named = model if isinstance(model, Mapping) else dict(model.named_parameters())
        chosen = {name: p for name in named if (p := next((p for p in self.layouts if fnmatchcase(name, p)), None))}
        if missing := {*self.layouts} - {*chosen.values()}:
            raise LayoutError(
                f"finish= has {excerpt(min(missing))}, which no parameter is that no pattern before it has; legal are "
                f"{[name for name in named if name not in chosen][:3]}"
            )
        for name, pattern in chosen.items():
            for added, found in self.layouts[pattern].of(name, named[name].detach()).items():
                known = self.tensors.setdefault(name + added, found)
                if known.shape != found.shape:
                    raise LayoutError(
                        f"{name}{added} of shape {list(found.shape)}; legal is that of the first call, "
                        f"{list(known.shape)}"
                    )
                if known is not found:
                    known.copy_(found)


class FlashInferExperts:
    """Rows of stacked experts as FlashInfer's TensorRT-LLM kernels read them.

    Gate and up, which a server loads one after the other, are swapped (up first) and laid row by row in turn; then rows
    are shuffled within blocks of 16, or 32 for tiles of a multiple of 128, so that the epilogue writes in order. With
    `gated=False`, of a second weight, only the latter. Source: NVIDIA/TensorRT-LLM
    tensorrt_llm/quantization/utils/fp4_utils.py (reorder_rows_for_gated_act_gemm, shuffle_matrix_a) and
    vllm-project/vllm flashinfer_utils.py (swap_w13_to_w31).
    """

    def __init__(self, tile: int = 128, gated: bool = True) -> None:
        """Take the rows of an epilogue's tile, at least 1, and whether there are gate and up."""
        self.block = 32 if validation.whole_number("tile", tile, 1) % 128 == 0 else 16
        self.gated = gated

    def rows(self, count: int) -> Any:
        """Return which loaded row stands at every place; raises `LayoutError` for rows that are no whole blocks."""
        torch = optional("torch", "torch")
        if count % self.block or (self.gated and count % 2):
            raise LayoutError(f"{count} rows in blocks of {self.block}; legal is a multiple of {self.block}")
        rows = torch.arange(count)
        if self.gated:
            rows = rows.view(2, -1).flip(0).t().reshape(-1)  # up, gate, up, gate
        # Of a block, row n i + j goes to place 8 j + i, of n = block / 8.
        return rows.view(-1, 8, self.block // 8).transpose(1, 2).reshape(-1)

    def of(self, name: str, tensor: Any) -> dict[str, Any]:
        """Return a stack of experts [x, rows, columns] in the kernel's order."""
        if tensor.ndim != 3:
            raise LayoutError(f"{name} of shape {list(tensor.shape)}; legal is a stack of experts, three dims")
        return {"": tensor[:, self.rows(tensor.shape[1]).to(tensor.device)].contiguous()}


class TransposedMxfp8:
    """A weight [.., n, k] as MXFP8: e4m3 elements, and scales that are powers of 2, one for 32 elements of a row.

    Both are transposed, elements to [.., k, n] and scales to [.., k / 32, n], uint8 with a bias of 127. A scale is
    2 ** (floor(log2(largest)) - 8), and what is beyond 448 is 448: OCP Microscaling Formats 1.0, 6.3. With
    `transposed=False` both keep the order of the weight.
    """

    def __init__(self, transposed: bool = True) -> None:
        """Say whether elements and scales are transposed."""
        self.transposed = transposed

    def of(self, name: str, tensor: Any) -> dict[str, Any]:
        """Return elements, and under `_scale` the scales."""
        torch = optional("torch", "torch")
        if tensor.ndim < 2 or tensor.shape[-1] % MX_BLOCK:
            raise LayoutError(
                f"{name} of shape {list(tensor.shape)}; legal is a last dim in whole blocks of {MX_BLOCK}"
            )
        blocks = tensor.float().unflatten(-1, (-1, MX_BLOCK))
        largest = blocks.abs().amax(-1)
        exponent = torch.frexp(largest)[1] - 1 - _E4M3_EXPONENT  # frexp's mantissa is in [0.5, 1)
        exponent = torch.where(largest > 0, exponent, -_E8M0_BIAS).clamp(-_E8M0_BIAS, 127)
        scaled = torch.ldexp(blocks, -exponent.unsqueeze(-1)).clamp(-_E4M3_MOST, _E4M3_MOST)
        elements = scaled.flatten(-2).to(torch.float8_e4m3fn)
        scales = (exponent + _E8M0_BIAS).to(torch.uint8)
        if self.transposed:
            elements, scales = elements.transpose(-1, -2).contiguous(), scales.transpose(-1, -2).contiguous()
        return {"": elements, "_scale": scales}


class BlockFp8:
    """A weight [.., n, k] as e4m3 in square blocks, each with an f32 scale: the largest of a block is 448 times it.

    The last block of a dim may be partial; `_scale_inv` is [.., ceil(n / block), ceil(k / block)], as DeepSeek-V3's
    checkpoints have it. On a server it is a layout of `finish=`; a trainer calls `of` before a refit, and sends both.
    """

    def __init__(self, block: int = 128) -> None:
        """Take the size of a block along both dims, at least 1."""
        self.block = validation.whole_number("block", block, 1)

    def of(self, name: str, tensor: Any) -> dict[str, Any]:
        """Return elements, and under `_scale_inv` the scales."""
        torch = optional("torch", "torch")
        if tensor.ndim < 2:
            raise LayoutError(f"{name} of shape {list(tensor.shape)}; legal are two dims or more")
        *_, n, k = tensor.shape
        size = self.block
        wide = torch.nn.functional.pad(tensor.float(), (0, -k % size, 0, -n % size))
        blocks = wide.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))  # .., n, size, k, size
        largest = blocks.abs().amax((-1, -3))
        scales = largest / _E4M3_MOST
        scales = torch.where(scales > 0, scales, torch.ones_like(scales))  # f32 has no scale for the least of its own
        elements = (blocks / scales[..., :, None, :, None]).flatten(-4, -3).flatten(-2)[..., :n, :k]
        return {"": elements.to(torch.float8_e4m3fn).contiguous(), "_scale_inv": scales}
