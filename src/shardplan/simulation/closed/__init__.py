"""The closed form: a model's step under many strategies at once, from one reading of its program.

Reading order:

- `work`            what a device does: `LocalKernel`, `LocalMove`, `HeldParameter`, `Saved`; a `StepProfile` of them
- `axis_propagation` which factor of a step every axis carries
- `caches`          what layers keep between steps beside parameters: caches
- `addends`         how a value may be kept, and how addends of gradients lie
- `read_block`      `ReadBlock`: a program while it is read
- `reading`         from a model and a strategy's tables to a `StepProfile`
- `parameters`      `Parameters`: what of a machine no data sheet says
- `machines`        the parameters of machines that ship, as files
- `collectives`     collectives on the levels of a topology, for many groups at once
- `numbers`         kernels priced, and summed by layer, at many sizes
- `configurations`  `Configurations`: many strategies as columns
- `part_seconds`    what a device and its host take for each part of a pass
- `pair_overlap`    what passes of two microbatches that run together hide of exchanges with experts
- `stages`          what chunks of layers take, and what comes once a step
- `memory`          the bytes of the device that holds most
- `scheduled_steps` the steps of schedules without a formula, by their lists
- `form`            `ClosedForm`: all of it for many strategies
"""
