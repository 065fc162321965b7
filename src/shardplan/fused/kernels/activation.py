"""The activations of a fused product, and their gradients, on torch tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardplan.errors import TypingError, excerpt, optional

if TYPE_CHECKING:
    import torch

ACTIVATIONS = ("none", "relu", "gelu", "silu")


def apply_activation(z: torch.Tensor, name: str) -> torch.Tensor:
    """Return the activation of z; `gelu` is the exact one.

    Raises `TypingError` where there is none of that name.
    """
    functional = optional("torch.nn.functional", "torch")
    match name:
        case "none":
            return z
        case "relu":
            return z.relu()
        case "gelu":
            return functional.gelu(z)
        case "silu":
            return functional.silu(z)
        case _:
            raise TypingError(f"activation {excerpt(name)}; legal are {', '.join(ACTIVATIONS)}")


def activation_gradient(g: torch.Tensor, z: torch.Tensor, name: str) -> torch.Tensor:
    """Return the gradient of z, given that of its activation."""
    torch = optional("torch", "torch")
    match name:
        case "none":
            return g
        case "relu":
            return g * (z > 0)
        case "gelu":
            return torch.ops.aten.gelu_backward(g, z)
        case "silu":
            return torch.ops.aten.silu_backward(g, z)
        case _:
            raise TypingError(f"activation {excerpt(name)}; legal are {', '.join(ACTIVATIONS)}")
