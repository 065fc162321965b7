"""The backend over torch.distributed.

Reading order:

- `run`         `run_program`; `TorchExecutable`, a program bound to one rank, and `launch`, which runs it
- `steps`       `bind`: an op bound to a rank; the interpreter of lowerings
- `compute`     the ops that compute
- `emulated_compute` `SleptStep`: a step of a job whose compute is slept, for devices that are not there
- `pack`        rounds as messages and copies of parts of arrays, and the staging buffers that they lie in
- `dtypes`      element types between numpy and torch, and reductions that torch lacks
- `libraries`   which library of a process group carries what, by the device of the tensors
- `wire`        `TorchWire`: point-to-point messages, with bounded waits and counted bytes
- `faults`      `TorchWatch`: that ranks run one program, and why a run failed, said through the store
- `refusal`     a rank that raises instead of taking part
- `group_state` what a process keeps about its process group, and the thread that looks after waits
- `objects`     Python values between ranks, and one made of those of all
- `clock`       one clock for the ranks, and the spans of all of them
- `machine_timings` kernels and collectives timed, for a machine's parameters
"""
