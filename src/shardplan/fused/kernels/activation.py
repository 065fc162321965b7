"""The activations of a fused product, and their gradients, on torch tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardplan.errors import TypingError, excerpt, optional

if TYPE_CHECKING:
    import torch

ACTIVATIONS = ("none", "relu", "gelu", "silu")


def check_activation(name: str) -> None:
    """Raise `TypingError` where there is no activation of that name."""
    if name not in ACTIVATIONS:
        raise TypingError(f"activation {excerpt(name)}; legal are {', '.join(ACTIVATIONS)}")


def apply_activation(z: torch.Tensor, name: str) -> torch.Tensor:
    """Return the activation of z; `gelu` is the exact one. Raises as `check_activation`."""
    check_activation(name)
    functional = optional("torch.nn.functional", "torch")
    match name:
        case "none":
            return z
        case "relu":
            return z.relu()
        case "gelu":
            return functional.gelu(z)
        case _:
            return functional.silu(z)


def activation_gradient(g: torch.Tensor, z: torch.Tensor, name: str) -> torch.Tensor:
    """Return the gradient of z, given that of its activation. Raises as `check_activation`."""
    check_activation(name)
    torch = optional("torch", "torch")
    match name:
        case "none":
            return g
        case "relu":
            return g * (z > 0)
        case "gelu":
            return torch.ops.aten.gelu_backward(g, z)
        case _:
            return torch.ops.aten.silu_backward(g, z)
