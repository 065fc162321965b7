"""Running a program for real: one file a backend, one line in the table of `run`.

Reading order:

- `run`      the table of backends, `record` what a process saw of a run, `measure` a run as a `Timeline`
- `lower`    what one device does in an op: the parts of its arrays that it sends, receives and keeps
- `words`    lists of ranks and devices as errors name them
- `torch`    the backend over torch.distributed: `torch_steps` and `torch_sums` bind ops to a rank, `torch_pack` packs,
             `torch_wire` sends, `torch_compute` computes, `torch_faults` names who failed, `torch_clock` joins clocks
- `mpi`      the backend over mpi4py, in files of the same names, and `mpi_site`, what bound steps share
- `jax`      the backend over `shard_map`: `jax_lower` and `jax_compute` lower ops, `jax_rounds` and `rounds` the
             general exchange, `jax_wire` names devices, `jax_agree` compares programs, and `jax_header` at every run
- `lab`      emulated clusters: programs on real processes over rate-limited links, bytes and seconds measured

No file of a framework is imported before its backend is asked for.
"""
