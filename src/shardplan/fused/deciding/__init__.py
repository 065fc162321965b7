"""Where fusing pays: the pass over programs and jobs, over torch's graphs, and what a machine's constants are.

Reading order:

- `rows`       `Fusion` and its rows: what was found, what each way takes, what was chosen and why
- `fuse`       `fuse`: the pass over programs and jobs
- `kernels`    a fused op of a program on the shards of a rank: the operators, and the layouts around them
- `graphs`     the same pass on graphs of torch.fx, whose nodes `graph_nodes` reads and `graph_patterns` matches
- `calibrate`  the constants of this machine, in seconds
- `trials`     pairs run in every way between two processes, and timed
"""
