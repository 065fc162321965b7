"""A reduction plan where training reduces: the communication hook of DDP, and the all-reduce hook of FSDP2.

A plan of `sp.reduce`, or a program of `sp.reductions`, sums a payload of one size. Gradients come in buckets of many
sizes and dtypes: the same steps run on the same dims with another last one, padded to whole rows.
"""

# No `annotations` of the future here: DDP compares those of a hook with types.

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError, excerpt
from shardplan.execution.drive import finish
from shardplan.execution.run import TIMEOUT
from shardplan.execution.torch.dtypes import short_name_of
from shardplan.execution.torch.run import executable, launch, rank_among
from shardplan.plans.plan import Plan

MOST_SIZES = 256  # programs of one reduction that are remembered, by rows and dtype


def ddp_hook(plan: Plan | Program, timeout: float = TIMEOUT) -> Callable[[Any, dist.GradBucket], Any]:
    """Return a communication hook that averages gradients by a reduction plan.

    Register it by `model.register_comm_hook(None, ddp_hook(plan))`. DDP reduces its buckets in one order on all ranks,
    so their runs meet. On the host the hook returns when the sums are there; on a device when they are enqueued.

    Args:
        plan: Of `sp.reduce`, to target `replicated`, or its program; device ids are global ranks.
        timeout: Seconds that any wait for other ranks may take.

    Raises:
        LayoutError: The program is no reduction of one payload to all its members.
    """
    reduction = Reduction(plan, timeout)

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
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
    reduction = Reduction(plan, timeout)

    def hook(reduce_output: torch.Tensor) -> None:
        reduce_output.copy_(reduction.average(reduce_output))

    return hook


class Reduction:
    """The steps of a reduction on payloads of any size and dtype."""

    def __init__(self, plan: Plan | Program, timeout: float) -> None:
        """Take the steps; raises `LayoutError` for what is no reduction of one payload."""
        program = plan.program if isinstance(plan, Plan) else plan
        given: Any = program
        if not isinstance(given, Program):
            raise LayoutError(f"a hook takes a plan of sp.reduce or a program, not {excerpt(given)}")
        ends = [*program.input_types, *program.output_types]
        before, after = (ends[0].layout, ends[-1].layout) if len(ends) == 2 else (None, None)
        if before is None or after is None or before.reduction != "sum" or after.partial or after.root:
            raise LayoutError(
                f"a hook takes a program that sums one payload to all its members; this one has inputs "
                f"{', '.join(map(str, program.input_types))} and results {', '.join(map(str, program.output_types))}"
            )
        if any(before.dims) or any(after.dims):
            raise LayoutError(f"a hook takes a payload that is whole on every device, not {ends[0]} to {ends[-1]}")
        self.program, self.timeout = program, timeout
        self.members = ends[0].mesh.group_places(before.partial).shape[1]
        self._sized = lru_cache(maxsize=MOST_SIZES)(self._program_of)

    def average(self, x: torch.Tensor) -> torch.Tensor:
        """Return the average over the members of what each brings, in the shape and dtype of `x`."""
        (t,) = self.program.input_types
        per_row = math.prod(t.shape[:-1])
        rows = max(1, -(-x.numel() // per_row))
        payload = x.new_zeros(rows * per_row)
        torch.div(x.reshape(-1), self.members, out=payload[: x.numel()])
        program = self._sized(short_name_of(x.dtype), rows)
        bound = executable(program, rank_among(program.devices, "reduction"))
        shard = payload.view(*t.shape[:-1], rows)
        (total,) = finish(launch(bound, {program.inputs[0][0]: shard}, self.timeout))
        return total.reshape(-1)[: x.numel()].view(x.shape)

    def _program_of(self, dtype: str, rows: int) -> Program:
        (name, t), program = self.program.inputs[0], self.program
        sized = TensorType(dtype, (*t.shape[:-1], rows), t.layout, t.mesh)
        return Program({name: sized}, [Step(s.op, s.operands, s.results) for s in program.steps], program.outputs)
