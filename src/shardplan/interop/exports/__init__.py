"""Reduction programs for other systems, bound to their libraries or as texts that need nothing of shardplan.

Reading order:

- `export`            the table of exports by name
- `recipe`            what they share: the program as moves of arrays over named factors of the mesh
- `torch`             torch.distributed's process groups; `torch_calls` is pasted into its texts
- `jax`               `shard_map`
- `mpi`               mpi4py's communicators; `mpi_calls` is pasted into its texts
- `msccl`             MSCCL XML: the program expanded over rings
- `msccl_schema`      that XML, read and checked
- `msccl_interpreter` that XML, run on integers
"""
