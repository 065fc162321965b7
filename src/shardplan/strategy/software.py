"""`Software`: what a prediction takes into account of the software that runs a step; no program has it."""

from __future__ import annotations

from dataclasses import dataclass

from shardplan.core import validation

ATTENTION = ("unfused", "flash1", "flash2", "flash3", "cudnn", "cudnn_2024")
DISPATCH = ("direct", "levels")
EXPERT_PRODUCTS = ("grouped", "loop")


@dataclass(frozen=True, slots=True)
class Software:
    """What of a strategy changes how fast a step is predicted to be, or what it is to hold, and no program of its job.

    Args:
        attention: How fast attention is, a class of kernels: `unfused` (scores go through memory), `flash1`, `flash2`,
            `flash3`, `cudnn`, `cudnn_2024`; by default `flash2`.
        tensor_overlap: Whether movements of the tensor axis are cut up and run beside products.
        offload_layers: Layers whose saved values go to the host.
        imbalance: Of a mixture that drops no token, or has room for more than come, how many tokens the device of
            experts that gets most has over the mean of those that share them, to thousandths: all wait for it. By
            default experts work on all of their slots, `capacity_factor` times the mean.
        dispatch: How tokens get to experts on other nodes: `direct`, a copy for each expert, or over `levels`, one for
            each node, which hands it on; by default as takes less time.
        expert_products: How the products of a device's experts are issued: `grouped`, all in one kernel, as by default,
            or in a `loop`, by the host one after another, as before there were such kernels.
        expert_overlap: Whether tokens go to experts and back while another microbatch computes, where a schedule runs
            a forward and a backward together (DualPipe, DeepSeek-V3, arXiv 2412.19437, section 3.2.1; Megatron-Core's
            `--overlap-moe-expert-parallel-comm`).

    Raises `LayoutError` for a value that is not legal.
    """

    attention: str | None = None
    tensor_overlap: bool = False
    offload_layers: int = 0
    imbalance: float | None = None
    dispatch: str | None = None
    expert_products: str | None = None
    expert_overlap: bool = False

    def __post_init__(self) -> None:
        """Check every field."""
        if self.attention is not None:
            validation.choice("strategy: attention", self.attention, ATTENTION)
        validation.flag("strategy: tensor_overlap", self.tensor_overlap)
        validation.flag("strategy: expert_overlap", self.expert_overlap)
        validation.whole_number("strategy: offload_layers", self.offload_layers, 0)
        if self.imbalance is not None:
            most = validation.number("strategy: imbalance", self.imbalance, least=1.0)
            object.__setattr__(self, "imbalance", round(most, 3))
        if self.dispatch is not None:
            validation.choice("strategy: dispatch", self.dispatch, DISPATCH)
        if self.expert_products is not None:
            validation.choice("strategy: expert_products", self.expert_products, EXPERT_PRODUCTS)
