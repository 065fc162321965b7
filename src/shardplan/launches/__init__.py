"""Launches: where a job that exists put its mesh, and whether that is placed well.

Reading order:

- `launch`      `Launch`: mesh coordinate -> topology device id, and the rings of its groups
- `hostfile`    hostfiles and rankfiles, read and written: which rank runs on which device
- `megatron`    Megatron's order strings as placements, and back
- `frameworks`  launches from torch's and JAX's device meshes
- `host_order`  which unit of the topology a host is, by Slurm's topology.conf or by name
- `arguments`   the strategy that arguments of Megatron-LM or torchtitan say
- `job_traffic` what a step of a job communicates, by axes and op
- `verdict`     what a launch is as a placement, or which groups do not fit
- `fixes`       how to launch a placement, as text that runs
- `causes`      why a demand is slow
- `handover`    a plan as files of torchtitan, Megatron, torch, JAX, Slurm and torchrun
- `audit`       the verb: what a launch costs beside the best placement, why, and how to do better
"""
