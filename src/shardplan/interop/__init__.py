"""What other systems know of a sharded tensor, read and written.

- `torch`       in place of `DTensor.redistribute`, and for a whole model; `torch_layout` placements as layouts,
                `torch_boxes` what no layout says, `torch_async` and `torch_compile` the two other ways to call it
- `jax`         in place of `jax.device_put` and `with_sharding_constraint`; `jax_types` shardings as types
- `safetensors` the checkpoint format, with numpy alone
- `export`      reduction programs for other systems, a line each: `export_torch`, `export_jax`, `export_mpi` as bound
                objects and as source text, `msccl` as XML, which `msccl_schema` reads and `msccl_run` executes;
                `export_recipe` is what they share
- `launches`    a torch DeviceMesh or a JAX Mesh as a launch, for `audit`

Nothing is imported here: a module that needs a framework is imported by the one who has it.
"""
