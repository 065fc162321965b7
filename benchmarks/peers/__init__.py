"""The baselines that shardplan's redistribution is measured against, from installed packages.

Each peer takes plain data (`problem.Problem`) and answers with `problem.Moves`: what each device receives step by step,
the rounds, and the largest local tensor. Nothing here imports shardplan, so a fault of its accounting cannot hide here.

- `xla`: what XLA's SPMD partitioner compiles a resharding identity to (`hlo` parses the compiled text).
- `shardy`: the pass `sdy-reshard-to-collectives`.
- `dtensor`: the greedy and the min-cost planner of torch's DTensor.
"""
