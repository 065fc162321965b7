"""A reduction plan where training reduces: the communication hook of DDP, and the all-reduce hook of FSDP2.

A plan of `sp.reduce`, or a program of `sp.reductions`, sums a payload of one size. Gradients come in buckets of many
sizes and dtypes: the same steps run on the same dims with another last one, padded to whole rows.
"""

# No `annotations` of the future here: DDP compares those of a hook with types.

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket

from shardplan.core.program import Program
from shardplan.execution.async_executor import finish
from shardplan.execution.run import TIMEOUT
from shardplan.execution.torch.dtypes import short_name_of
from shardplan.execution.torch.run import executable, launch, rank_among
from shardplan.movement.reductions.sizes import members_of, resize_payload, sum_program
from shardplan.plans.plan import Plan


def ddp_hook(plan: Plan | Program, timeout: float = TIMEOUT) -> Callable[[Any, GradBucket], Any]:
    """Return a communication hook that averages gradients by a reduction plan.

    Register it by `model.register_comm_hook(None, ddp_hook(plan))`. DDP reduces its buckets in one order on all ranks,
    so their runs meet. On the host the hook returns when the sums are there; on a device when they are enqueued.

    Args:
        plan: Of `sp.reduce`, to target `replicated`, or its program; device ids are global ranks.
        timeout: Seconds that any wait for other ranks may take.

    Raises:
        LayoutError: The program is no reduction of one payload to all its members.
    """
    reduction = PayloadAverage(plan, timeout)

    def hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(reduction.average(bucket.buffer()))
        return future

    return hook


def fsdp_hook(plan: Plan | Program, timeout: float = TIMEOUT) -> Callable[[torch.Tensor], None]:
    """Return an all-reduce hook that averages sharded gradients over replicas by a reduction plan.

    Register it by `module.set_all_reduce_hook(fsdp_hook(plan))` on modules that `fully_shard` shards over the axes that
    the plan does not reduce; it is called on the output of the reduce-scatter, in which it writes.

    Args, errors: as of `ddp_hook`.
    """
    reduction = PayloadAverage(plan, timeout)

    def hook(reduce_output: torch.Tensor) -> None:
        reduce_output.copy_(reduction.average(reduce_output))

    return hook


class PayloadAverage:
    """The steps of a reduction on payloads of any size and dtype."""

    def __init__(self, plan: Plan | Program, timeout: float) -> None:
        """Take the steps; raises `LayoutError` for what is no reduction of one payload."""
        self.program, self.timeout = sum_program(plan), timeout
        self.members = members_of(self.program)

    def average(self, x: torch.Tensor) -> torch.Tensor:
        """Return the average over the members of what each brings, in the shape and dtype of `x`."""
        program = resize_payload(self.program, short_name_of(x.dtype), x.numel())
        (t,) = program.input_types
        payload = x.new_zeros(math.prod(t.shape))
        torch.div(x.reshape(-1), self.members, out=payload[: x.numel()])
        bound = executable(program, rank_among(program.devices, "reduction"))
        (total,) = finish(launch(bound, {program.inputs[0][0]: payload.view(t.shape)}, self.timeout))
        return total.reshape(-1)[: x.numel()].view(x.shape)
