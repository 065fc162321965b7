"""Starting MPI in this process, on first use."""

from __future__ import annotations

import functools

from shardplan.errors import BackendError, MissingExtra, optional
from shardplan.execution.mpi.segments import unname


def start() -> tuple[int, int]:
    """Return this process's rank and the number of ranks of the world; MPI starts if it has not.

    Raises:
        MissingExtra: mpi4py or an MPI library is missing.
        BackendError: MPI does not run.
    """
    optional("mpi4py", "mpi")
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise MissingExtra(f"mpi4py finds no MPI library: pip install 'shardplan[mpi]' brings one ({line})") from None
    if not MPI.Is_initialized():
        raise BackendError("MPI has not started in this process: run after MPI.Init")
    if MPI.Is_finalized():
        raise BackendError("MPI has ended in this process: run before MPI.Finalize")
    _unname_segment()  # the segment has a name only once, and after `MPI.Init`
    return MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()


@functools.cache
def _unname_segment() -> None:
    unname()
