"""A plan handed over: the files with which what people run is launched as it says.

What a framework cannot say is a line in its file and in the answer, with the strategy that it runs instead.

Reading order:

- `handed_plan`    `HandedPlan`: what is handed over, as `plan.json`, and back; `WrittenFiles` of a framework
- `torchtitan`     a function that sets a config of torchtitan 0.3, and the same as overrides
- `megatron`       arguments of Megatron-LM
- `specs`          how the tensors of a checkpoint are cut: torch's mesh and plan, JAX's mesh and specs
- `scripts`        `torchrun.sh` and `slurm.sh`: nodes, tasks, binding, the order of ranks
- `folder`         all of it in a folder
- `scaled_plan`    a plan on small sizes, to be run here
- `handed_job`     its job, and the machine as it delivers
- `measured_row`   a step of it that was measured, as a row that `calibrate` reads
"""
