"""Running a program for real: one file a backend, one line in the table of `run`.

Reading order:

- `run`      the table of backends, `record` what a process saw of a run, `measure` a run as a `Timeline`
- `lower`    what one device does in an op: the parts of its arrays that it sends, receives and keeps
- `rank_names` lists of ranks and devices as errors name them
- `verify`   a plan against its certificate and, executed, against the reference; `launched` so under a launcher
- `torch`    the backend over torch.distributed; `mpi` over mpi4py; `jax` over `shard_map`; `rounds` what jax shares
- `lab`      emulated clusters: programs on real processes over rate-limited links, bytes and seconds measured

No file of a framework is imported before its backend is asked for.
"""
