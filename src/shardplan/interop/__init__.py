"""What other systems know of a sharded tensor, read and written.

Reading order:

- `torch`              a folder: in place of `DTensor.redistribute`, and for a whole model
- `jax`                a folder: in place of `jax.device_put` and `with_sharding_constraint`
- `checkpoint`         a folder: checkpoints on disk from any storage to any other, and compared
- `descriptors`        a refit as runs of bytes, for transports that are not ours
- `safetensors`        the checkpoint format, read and written with numpy alone
- `safetensors_header` what a file says it holds, and what is checked of that
- `hlo`                the collectives of a compiled XLA program, and the script that moves their bytes
- `hlo_groups`         the devices that such a collective names
- `hlo_trace`          those collectives as a value, which is timed and replayed
- `importers`          a folder: models of torch, JAX and ONNX as a `Model`
- `start`              a job whose state lives in shards, from arrays or a checkpoint
- `exports`            a folder: reduction programs for torch, JAX, MPI and MSCCL

Nothing is imported here: a module that needs a framework is imported by the one who has it.
"""
