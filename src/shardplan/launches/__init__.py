"""Launches: where a job that exists put its mesh, and whether that is placed well.

Reading order:

- `launch`      `Launch`: mesh coordinate -> topology device id, and the rings of its groups
- `hostfile`    hostfiles and rankfiles; `megatron` order strings; `frameworks` torch's and JAX's device meshes
- `verdict`     what a launch is as a placement, or which groups do not fit
- `audit`       the verb: a launch against the best placement; `fixes` the better one as text that runs
"""
