"""`Software`: what a prediction takes into account of the software that runs a step; no program has it."""

from __future__ import annotations

from dataclasses import dataclass

from shardplan.core import border

ATTENTION = ("unfused", "flash1", "flash2", "flash3", "cudnn", "cudnn_2024")


@dataclass(frozen=True, slots=True)
class Software:
    """What of a strategy changes how fast a step is predicted to be, or what it is to hold, and no program of its job.

    Args:
        attention: How fast attention is, a class of kernels: `unfused` (scores go through memory), `flash1`, `flash2`,
            `flash3`, `cudnn`, `cudnn_2024`; by default `flash2`.
        tensor_overlap: Whether movements of the tensor axis are cut up and run beside products.
        offload_layers: Layers whose saved values go to the host.

    Raises `LayoutError` for a value that is not legal.
    """

    attention: str | None = None
    tensor_overlap: bool = False
    offload_layers: int = 0

    def __post_init__(self) -> None:
        """Check every field."""
        if self.attention is not None:
            border.choice("strategy: attention", self.attention, ATTENTION)
        border.flag("strategy: tensor_overlap", self.tensor_overlap)
        border.whole_number("strategy: offload_layers", self.offload_layers, 0)
