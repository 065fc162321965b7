"""The backend over `shard_map`.

Reading order:

- `run`          `run_program`; what JAX cannot run, and what XLA says of a compiled program
- `executables`  the executables of a program: one for each run of steps on one mesh
- `lower`        an op as what one device does inside a `shard_map`, and the bytes that it moves there
- `native`       the table of the collectives that XLA has
- `interpret`    any other op that moves: its lowering as the permutes of `execution.rounds`
- `compute`      the ops that compute
- `wire`         `JaxWire`: how collectives address the devices of a mesh
- `bits`         elements as unsigned integers, where a dtype cannot travel as it is
- `agree`        that processes are about to run one program; `executables` says so again at every run
- `cache`        executables kept up to a number of bytes
"""
