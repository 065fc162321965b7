"""What PyTorch's operators here do with operands before they run: autocast, and derivatives of forward mode."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardplan.errors import TypingError, optional

if TYPE_CHECKING:
    import torch
else:
    torch = optional("torch", "torch")


def product_operands(name: str, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return operands as torch's own products take them: of autocast's dtype where that is on, but for f64."""
    refuse_tangents(name, *operands)
    kind = operands[0].device.type
    if torch.is_autocast_enabled(kind):
        return tuple(x.to(torch.get_autocast_dtype(kind)) if x.dtype != torch.float64 else x for x in operands)
    return operands


def refuse_tangents(name: str, *operands: torch.Tensor | None) -> None:
    """Raise `TypingError` for a tangent: no operator has a derivative of forward mode, which torch would take for 0."""
    if torch.compiler.is_compiling():
        return
    for x in operands:
        if x is not None and torch.autograd.forward_ad.unpack_dual(x).tangent is not None:
            raise TypingError(f"{name}: a derivative of forward mode; legal are gradients, backward")
