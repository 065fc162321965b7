"""`Runtime`: what a framework holds on a device while it computes, where that is not what a job's programs hold.

State, what every microbatch in flight keeps, and how many are in flight follow from the job. What is at work beside
them depends on who runs it: our executors hold what programs say; frameworks have losses in f32, gather a layer ahead,
and sum the gradients of one in a buffer. The account of a job (`partition.memory`) and the closed form of many
strategies (`simulation.closed.memory`) take these terms from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shardplan.strategy.strategy import Strategy

READS_ROWS = ("gather", "embedding_bag")  # ops whose gradient of a table is made whole


@dataclass(frozen=True, slots=True)
class Runtime:
    """What a framework has at work on a device.

    Args:
        name: What it is called.
        logit: Bytes of a logit at the loss, beside the logits themselves: Megatron's vocabulary-parallel loss has its
            softmax in f32, in whose place the gradient is written; PyTorch's has the logits in f32 and their softmax
            too, and once that is made its gradient is in the place of the first.
        layers: How many layers' gathered parameters are there at once where they are dealt out: one ahead.
        score: Bytes of a score of attention that is kept: without fused attention its softmax, the mask of its dropout
            and what that leaves.
        mask: Bytes an element that goes from layer to layer: each of a layer's two residual sums has a mask of dropout.
        apart: Whether the gradients of a microbatch have a place of their own beside their sum in a wider dtype, where
            state is dealt out: before they were added up in the product.
    """

    name: str
    logit: float
    layers: int = 2
    score: float = 0.0
    mask: float = 0.0
    apart: bool = False

    def work_bytes(self, *, layer: Any, unit: Any, weight: Any, summed: Any, logits: Any, embedding: Any) -> Any:
        """Return what is at work during an action, in bytes; numbers, or arrays of one shape.

        Args:
            layer: Bytes that a layer's program holds beside what it reads and leaves.
            unit: Parameters of a layer that are dealt out and gathered, in elements; 0 where none are.
            weight: Bytes of a parameter.
            summed: Bytes of a gradient as it is summed over devices.
            logits: Elements of the logits at the loss; 0 on stages that have none, and where it is in one pass.
            embedding: Parameters whose gradient is made whole before it is added up, in elements; 0 where none are.
        """
        gathered = unit * (self.layers * weight + summed)
        return np.maximum(np.maximum(layer, gathered), np.maximum(logits * self.logit, embedding * weight))


MEGATRON = Runtime("megatron", 4.0)
MEGATRON_2021 = Runtime("megatron-2021", 4.0, score=5.0, mask=2.0, apart=True)  # arXiv 2205.05198, section 4.1
TORCHTITAN = Runtime("torchtitan", 8.0)


def runtime_of(strategy: Strategy) -> Runtime:
    """Return the runtime that a strategy is for: PyTorch's for FSDP, else Megatron's, of 2021 with unfused attention.

    Software of the days of the first fused attention has its fused loss under FSDP, too.

    >>> runtime_of(Strategy(data=2, fsdp=True, global_batch=2)).name
    'torchtitan'
    """
    if strategy.software.attention == "unfused":
        return MEGATRON_2021
    return TORCHTITAN if strategy.fsdp and strategy.software.attention != "flash1" else MEGATRON
