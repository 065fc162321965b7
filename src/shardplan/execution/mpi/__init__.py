"""The backend over mpi4py.

`run` is its entry; `steps` and `sums` bind ops to a rank, `site` is what they share, `wire` hands to MPI; `agree` says
when ranks start, `pacts` what they have agreed on, `mail` carries letters, `faults` names who failed, `world` starts
MPI, `segments` takes the name of its shared memory away.
"""
