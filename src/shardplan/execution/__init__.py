"""Running a program for real: one folder a backend, one line in the table of `run`.

Reading order:

- `run`         `run`, and the table of backends
- `live`        a job whose state stays in shards from step to step; `interop.start` opens one
- `lower`       what one device does in an op: the parts of its arrays that it sends, receives and keeps
- `agreement`   how ranks find out whether all come with the same, whatever carries their words
- `torch`       the backend over torch.distributed
- `mpi`         the backend over mpi4py
- `rounds`      the general move as padded permutes, in numpy: for a backend without an all-to-all-v
- `jax`         the backend over `shard_map`
- `rank_names`  ranks and programs as errors name them
- `record`      what a process saw of a run, step by step
- `measure`     a real run as a `Timeline`
- `verify`      a plan on trial: its certificate without the planner, its program on the reference
- `trial`       a program on trial under a launcher, against the reference
- `lab`         emulated clusters: programs on real processes over rate-limited links, bytes and seconds measured

No file of a framework is imported before its backend is asked for.
"""
