"""Drop-ins for DTensor: `redistribute` in place of `DTensor.redistribute`, `redistribute_state` for a whole model.

- `layout`     placements and shard orders as layouts and types, and back
- `boxes`      strided shards on uneven dims, which no layout says
- `ends`       what is done to a shard before and after the move that a program is
- `bound`      a plan bound to this rank
- `under_way`  moves that were started and not waited for
- `moves`      moves of a DTensor: found, planned once, kept, run
- `compile`    the call under `torch.compile`
- `dtensor`    `redistribute`, with its gradient
- `state`      `redistribute_state`: a folder
"""

from shardplan.errors import missing

try:
    from shardplan.interop.torch.dtensor import redistribute
    from shardplan.interop.torch.state.move import redistribute_state
except ModuleNotFoundError as error:
    raise missing(error, "torch") from None

__all__ = ["redistribute", "redistribute_state"]
