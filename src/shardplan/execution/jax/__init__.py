"""The backend over `shard_map`.

Reading order:

- `run`          `run_program`; what JAX cannot run, and what XLA says of a compiled program
- `executables`  the executables of a program: one for each run of steps on one mesh
- `lower`        the ops as what one device does inside a `shard_map`; `compute` those that compute
- `general_move` Exchange and Send, as the permutes of `execution.rounds`
- `wire`         `JaxWire`: how collectives address the devices of a mesh
- `bits`         elements as unsigned integers, where a dtype cannot travel as it is
- `agree`        that processes are about to run one program; `header` says so again at every run
- `cache`        executables kept up to a number of bytes
"""
