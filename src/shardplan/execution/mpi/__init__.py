"""The backend over mpi4py.

Reading order:

- `run`             `run_program`; `MpiExecutable`, a program bound to one rank
- `world`           starting MPI; takes the name of its shared memory away
- `steps`           the ops bound to a rank: those that move, by messages or all-to-alls, and those that compute
- `wire`            `MpiWire`: datatypes and traffic, with bounded waits and counted bytes
- `agreed_programs` the programs that ranks have agreed on, each with its communicators
- `letters`         letters between ranks, which carry all that is no data
- `faults`          `MpiWatch`: bounded waits, and one clear error that ends all ranks
"""
