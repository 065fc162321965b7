"""What other systems know of a sharded tensor, read and written.

- `torch/`             in place of `DTensor.redistribute`, and for a whole model
- `jax/`               in place of `jax.device_put` and `with_sharding_constraint`
- `safetensors`        the checkpoint format, with numpy alone; `safetensors_header` says what a file holds
- `hlo`                collectives of a compiled XLA program, as text prints them; `hlo_groups` their groups
- `exports/`           reduction programs for torch, JAX, MPI and MSCCL

Nothing is imported here: a module that needs a framework is imported by the one who has it.
"""
