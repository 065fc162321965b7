"""`Runtime`: what a framework holds on a device while it computes, where that is not what a job's programs hold.

What every microbatch in flight keeps, how many are in flight, and state but for what is said here follow from the job.
What is at work beside them depends on who runs it: our executors hold what programs say; frameworks have losses in f32,
gather a layer ahead, and sum the gradients of one in a buffer. The account of a job (`partition.memory`) and the closed
form of many strategies (`simulation.closed.memory`) take these terms from here.
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
            softmax in f32, in whose place the gradient is written. PyTorch's has most in its backward pass, where the
            logits are gone: the logarithm of the softmax and the gradients of it and of the logits, all in f32.
        cut_logit: The same where the vocabulary is cut over the tensor axis: DTensor's loss makes the exponential and
            its sum with the gradient apart, four values in f32 (`torch.distributed.tensor.parallel.loss`).
        layers: How many layers' gathered parameters are there at once where they are dealt out: one ahead.
        score: Bytes of a score of attention that is kept: without fused attention its softmax, the mask of its dropout
            and what that leaves.
        mask: Bytes an element that goes from layer to layer: each of a layer's two residual sums has a mask of dropout.
        apart: Whether the gradients of a microbatch have a place of their own beside their sum in a wider dtype, where
            state is dealt out: before they were added up in the product.
        alone: Whether a parameter that is dealt out is there between steps in f32 alone, and is cast as it is gathered.
        root: Whether what is before and behind the layers is gathered once for a whole step.
        late: Whether the stages of a pipeline that keep parameters gathered add gradients up whole, as they are summed
            over devices, and reduce them behind the last microbatch (`torch.distributed.pipelining`).
        ends: Whether a stage that sends keeps what it sent until its backward pass, and has a place for what comes back
            of every microbatch (`torch.distributed.pipelining.stage`: `fwd_cache`, `grad_recv_info`).
        whole: Whether a value that goes from layer to layer is there whole over the tensor axis, once more, in a layer
            that runs back and at the loss: DTensor gathers it before a product, which keeps it; Megatron gathers again.
    """

    name: str
    logit: float
    cut_logit: float
    layers: int = 2
    score: float = 0.0
    mask: float = 0.0
    apart: bool = False
    alone: bool = False
    root: bool = False
    late: bool = False
    ends: bool = False
    whole: bool = False

    def work_bytes(
        self, *, layer: Any, unit: Any, gathers: Any, outside: Any, weight: Any, summed: Any, logits: Any, cut: Any,
        carried: Any, embedding: Any,
    ) -> Any:  # fmt: skip
        """Return what is at work during an action, in bytes; numbers, or arrays of one shape.

        Args:
            layer: Bytes that a layer's program holds beside what it reads and leaves.
            unit: Parameters of a layer that are dealt out with their gradients, in elements; 0 where none are.
            gathers: Whether a layer gathers them, with those of the next, and they do not stay.
            outside: Parameters before and behind the layers that are dealt out and gathered, in elements.
            weight: Bytes of a parameter.
            summed: Bytes of a gradient as it is summed over devices.
            logits: Elements of the logits at the loss; 0 on stages that have none, and where it is in one pass.
            cut: Whether the vocabulary is cut over devices.
            carried: Bytes of what goes from layer to layer, whole over the tensor axis that cuts it; 0 where none does.
            embedding: Parameters whose gradient is made whole before it is added up, in elements; 0 where none are.
        """
        # Beside a layer at work its own gathered parameters, the next one's, and a gradient that is being summed.
        beside = unit * (self.layers * weight * gathers + summed)
        at_loss = logits * np.where(cut, self.cut_logit, self.logit)
        most = np.maximum(layer + beside, np.maximum(at_loss, embedding * weight))
        return most + outside * weight * self.root + carried * self.whole


MEGATRON = Runtime("megatron", 4.0, 4.0)
MEGATRON_2021 = Runtime("megatron-2021", 4.0, 4.0, score=5.0, mask=2.0, apart=True)  # arXiv 2205.05198, section 4.1
TORCHTITAN = Runtime("torchtitan", 10.0, 14.0, alone=True, root=True, late=True, ends=True, whole=True)


def runtime_of(strategy: Strategy) -> Runtime:
    """Return the runtime that a strategy is for: PyTorch's for FSDP, else Megatron's, of 2021 with unfused attention.

    Software of the days of the first fused attention has its fused loss under FSDP, too.

    >>> runtime_of(Strategy(data=2, fsdp=True, global_batch=2)).name
    'torchtitan'
    """
    if strategy.software.attention == "unfused":
        return MEGATRON_2021
    return TORCHTITAN if strategy.fsdp and strategy.software.attention != "flash1" else MEGATRON
