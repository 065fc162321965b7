"""Reduction programs for other systems, bound to their libraries or as texts that need nothing of shardplan.

Reading order:

- `export`            the table of exports by name
- `recipe`            what they share: the program as moves of arrays over named factors of the mesh
- `template`          a framework's template, filled in by a recipe: what is pasted, and what is bound
- `torch`             torch.distributed's process groups; `torch_calls` is pasted
- `jax`               `shard_map`
- `mpi`               mpi4py's communicators; `mpi_calls` is pasted
- `msccl`             MSCCL XML: the program expanded over rings
- `msccl_schema`      that XML, read and checked
- `msccl_interpreter` that XML, run on integers
"""
