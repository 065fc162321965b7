"""Reduction programs for other systems: torch process groups, JAX `shard_map`, MPI, MSCCL XML; `export` is the table.

`recipe` is what they share: the program as moves of arrays over named factors of the mesh. `torch_calls` and
`mpi_calls` are pasted into the exported texts. `msccl_schema` reads and checks XML, `msccl_interpreter` runs it.
"""
