"""Drop-ins for DTensor: `redistribute` in place of `DTensor.redistribute`, `redistribute_state` for a whole model.

`Refit` is the handle with which a trainer and a server, in processes of their own, refit weights at every step.

What is started inside `with process_group():` travels on a process group of its own.

Reading order:

- `dtensor`    `redistribute`, with its gradient
- `moves`      moves of a DTensor: found, planned once, kept, run
- `ends`       what is done to a shard before and after the move that a program is
- `layout`     placements and shard orders as layouts, tables of boxes and types, and back
- `bound_move` a move planned within the memory limit and bound to this rank
- `pending_moves` moves that were started and not waited for
- `compile`    the call under `torch.compile`
- `state`      a folder: `redistribute_state`, for a whole model
- `reductions` `ddp_hook` and `fsdp_hook`: a reduction plan where training reduces
- `refit`      a folder: `Refit`
"""

from shardplan.errors import missing

try:
    from shardplan.execution.torch.group_state import process_group
    from shardplan.interop.torch.dtensor import redistribute
    from shardplan.interop.torch.reductions import ddp_hook, fsdp_hook
    from shardplan.interop.torch.refit.handle import Refit
    from shardplan.interop.torch.state.move import redistribute_state
except ModuleNotFoundError as error:
    raise missing(error, "torch") from None

__all__ = ["Refit", "ddp_hook", "fsdp_hook", "process_group", "redistribute", "redistribute_state"]
