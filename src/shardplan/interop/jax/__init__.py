"""`reshard` in place of `jax.device_put` and `with_sharding_constraint`, and shardings as types.

Reading order:

- `types`      `PartitionSpec`s of types; types of shardings are `core.shardings`
- `plans`      the plans of moves, kept; how many bytes devices hold during them; what XLA sends beside them
- `eager_move` a move outside `jit`, on any meshes and devices
- `traced_move` a move inside `jit`: one `shard_map`
- `primitive`  the primitive that carries a move through gradients, `vmap` and `jit`
- `leaves`     `reshard`: pytrees of arrays and shardings, and their moves under one limit
- `reductions` `sum_by`: a reduction plan as a function
"""

from shardplan.core.shardings import type_of
from shardplan.errors import missing

try:
    from shardplan.interop.jax.leaves import reshard
    from shardplan.interop.jax.plans import compare_with_xla, plan_of
    from shardplan.interop.jax.reductions import sum_by
    from shardplan.interop.jax.types import spec_of
except ModuleNotFoundError as error:
    raise missing(error, "jax") from None

__all__ = ["compare_with_xla", "plan_of", "reshard", "spec_of", "sum_by", "type_of"]
