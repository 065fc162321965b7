"""Which files of shared memory processes have mapped or opened: others on the machine have theirs."""

import os
from collections.abc import Iterable
from pathlib import Path


def shared_files(pids: Iterable[int]) -> set[str]:
    """The files below /dev/shm that processes have; those that have ended have none."""
    found: set[str] = set()
    for pid in pids:
        try:
            found |= {line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}
            found |= {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()}
        except OSError:
            continue
    return {name.removesuffix(" (deleted)") for name in found if name.startswith("/dev/shm/")}
