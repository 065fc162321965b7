"""Starting MPI in this process, on first use."""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path

from shardplan.errors import BackendError, MissingExtra, optional


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


# The shared memory of MPICH, without a name: it vanishes with the last process that uses it, however that ends.
#
# MPICH gives the segment that the ranks of a machine share a name, and takes the name back in `MPI.Finalize` only: a
# rank
# or a launcher that is killed, and an abort, leave 4 MB behind each time. `MPI.Init` returns when all ranks of the
# machine have mapped the segment, so from then on nobody needs the name.


SEGMENT = "/dev/shm/mpich_shm_"  # of MPICH 5, followed by the job and the machine
MAPS = Path("/proc/self/maps")  # of Linux; elsewhere nothing is known of segments, and nothing is done


def unname(segment: str = SEGMENT, maps: Path = MAPS) -> list[str]:
    """Take away the names, beginning with `segment`, of the shared memory that `maps` lists as mapped by this process.

    Returns the names taken away; another rank of the machine may have come first.
    """
    try:
        mapped = [line.split(maxsplit=5) for line in maps.read_text().splitlines()]
    except OSError:
        return []
    gone: list[str] = []
    # A line of maps: addresses, permissions, offset, device, inode, and the path where there is one.
    for device, inode, path in {(f[3], f[4], f[5]) for f in mapped if len(f) == 6 and f[5].startswith(segment)}:
        with contextlib.suppress(OSError):
            found = os.stat(path)
            major, minor = (int(part, 16) for part in device.split(":"))
            if (found.st_dev, found.st_ino) == (os.makedev(major, minor), int(inode)):  # the name may be another's now
                os.unlink(path)
                gone.append(path)
    return gone
